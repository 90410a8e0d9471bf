-- Names that clients of the E2B API gave to snapshots. A name means something to its owner only.
CREATE TABLE template_names (
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    tag TEXT NOT NULL,
    -- The sandbox that the snapshot was made of.
    sandbox TEXT NOT NULL,
    created_at_unix INTEGER NOT NULL,
    PRIMARY KEY (owner, name)
) STRICT;
