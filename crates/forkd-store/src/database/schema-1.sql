-- Who may come in over TCP. A token itself is never stored.
CREATE TABLE tokens (
    name TEXT PRIMARY KEY,
    hash BLOB NOT NULL UNIQUE,
    scope TEXT NOT NULL CHECK (scope IN ('read', 'use', 'admin')),
    owner TEXT NOT NULL,
    max_sandboxes INTEGER,
    max_memory_mib INTEGER,
    max_snapshots INTEGER,
    created_at_unix INTEGER NOT NULL,
    expires_at_unix INTEGER
) STRICT;

-- Whose a snapshot is. One that is not here belongs to whoever owns the host.
CREATE TABLE snapshot_owners (
    tag TEXT PRIMARY KEY,
    owner TEXT NOT NULL
) STRICT;

-- Answers to requests that came with an idempotency key. One without a status is under way, or was when the
-- daemon ended; one with a status and without a body had a body too large to keep.
CREATE TABLE answers (
    owner TEXT NOT NULL,
    key TEXT NOT NULL,
    request BLOB NOT NULL,
    status INTEGER,
    body BLOB,
    created_at_unix INTEGER NOT NULL,
    PRIMARY KEY (owner, key)
) STRICT;
CREATE INDEX answers_by_age ON answers (created_at_unix);

-- Sandboxes there are or were: whoever asks for one that is gone is told when and why.
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    snapshot_tag TEXT,
    labels TEXT NOT NULL DEFAULT '{}',
    created_at_unix INTEGER NOT NULL,
    ended_at_unix INTEGER,
    reason TEXT,
    detail TEXT
) STRICT;
CREATE INDEX sandboxes_by_end ON sandboxes (ended_at_unix);
