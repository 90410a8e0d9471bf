"""Files: names that a sandbox chooses do not lead out of the folder, and links on this host are not followed."""

import asyncio
import io
import json
import os

import pytest

import forkd
from forkd import AsyncClient, AsyncSandbox, Sandbox


def entry(path, type="file", **more):
    name = path.rsplit("/", 1)[-1]
    return dict(group="root", mode=0o4755, modified_time="", name=name, owner="root", path=path, permissions="", size=1,
                type=type, **more)


@pytest.fixture
def lists(server):
    """Makes the sandbox list these entries in `/d`, each file with the content `x`."""

    def use(*entries):
        server.alive.add("sb1")

        def script(request, connection):
            if request.path.endswith("/files/list"):
                connection.reply(200, {"entries": list(entries)})
            elif request.path.endswith("/files/stat"):
                connection.reply(200, entry("/d", "directory"))
            elif request.path.endswith("/files"):
                connection.reply(200, body=b"x")
            else:
                return False
            return True

        server.script = script

    return use


def download(server, client, target, asynchronous):
    if not asynchronous:
        return Sandbox.connect("sb1", client=client).files.download("/d", target)

    async def main():
        async with AsyncClient(server.url, timeout=5.0) as client:
            return await (await AsyncSandbox.connect("sb1", client=client)).files.download("/d", target)

    return asyncio.run(main())


NAMES = ["/d/../evil", "/d/a/../../evil", "/evil", "/d//evil", "/d/./evil", "/d/", "/devil", "/d/a\0b", "evil", ""]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("type", ["file", "directory"])
def test_a_name_that_leads_out_of_the_folder_is_an_error(server, client, lists, tmp_path, name, type, asynchronous):
    lists(entry(name, type))
    target = tmp_path / "in" / "target"
    target.mkdir(parents=True)
    with pytest.raises(forkd.ForkdError, match="leads out"):
        download(server, client, target, asynchronous)
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "target"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_links_in_the_target_are_not_followed(server, client, lists, tmp_path, asynchronous):
    (tmp_path / "outside").mkdir()
    (tmp_path / "victim").write_text("mine")
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").symlink_to(tmp_path / "outside")
    (target / "f").symlink_to(tmp_path / "victim")
    for listed in (entry("/d/a", "directory"), entry("/d/a/x"), entry("/d/f")):
        lists(listed)
        with pytest.raises(forkd.InvalidRequestError, match="remove it"):
            download(server, client, target, asynchronous)
    assert not list((tmp_path / "outside").iterdir()) and (tmp_path / "victim").read_text() == "mine"


def test_links_of_the_guest_are_left_out_and_set_user_id_is_dropped(server, client, lists, tmp_path):
    lists(entry("/d/a", "directory"), entry("/d/a/f"), entry("/d/link", "symlink", symlink_target="/etc/passwd"))
    done = download(server, client, tmp_path / "t", False)
    assert done.copied == [str(tmp_path / "t/a/f")] and done.skipped == ["/d/link"]
    assert (tmp_path / "t/a/f").stat().st_mode & 0o7777 == 0o755


def test_an_upload_leaves_out_links_and_keeps_modes(server, client, tmp_path):
    (tmp_path / "s/in").mkdir(parents=True)
    (tmp_path / "s/in/run").write_text("#!/bin/sh")
    (tmp_path / "s/in/run").chmod(0o755)
    (tmp_path / "s/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "s/pipe")
    written = {}

    def script(request, connection):
        path = request.query.get("path", [""])[0]
        if request.method == "PUT":
            written[path] = (request.query["mode"], request.headers.get("transfer-encoding"))
            stream = connection.stream
            while size := int(stream.readline(), 16):
                stream.read(size + 2)
            stream.readline()
            connection.reply(200, {"atomic": True, "whole": True, "path": path, "size": 9})
        elif request.path.endswith("/stat"):
            connection.reply(404, {"error": "no", "code": "guest_not_found", "request_id": "r"})
        elif request.path.endswith("/mkdir"):
            written[request.json["path"]] = "folder"
            connection.reply(201, entry(request.json["path"], "directory"))
        else:
            return False
        return True

    server.alive.add("sb1")
    server.script = script
    done = Sandbox.connect("sb1", client=client).files.upload(tmp_path / "s", "/t")
    assert written == {"/t": "folder", "/t/in": "folder", "/t/in/run": (["755"], "chunked")}
    assert done.copied == ["/t/in/run"] and done.skipped == [str(tmp_path / "s/link"), str(tmp_path / "s/pipe")]


def test_a_download_to_a_pipe_writes_to_the_pipe(server, client, lists, tmp_path):
    lists()
    server.script = lambda request, connection, script=server.script: (
        connection.reply(200, entry("/d/f")) or True if request.path.endswith("/stat") else script(request, connection))
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    download(server, client, tmp_path / "pipe", False)
    assert os.read(reading, 10) == b"x" and (tmp_path / "pipe").is_fifo()
    os.close(reading)


def test_ids_and_paths_are_escaped(server, client):
    server.script = lambda request, connection: connection.reply(200, body=b"") or True
    client.read_file("../x?y", "/a b&c=%2F")
    request = server.requests[0]
    assert request.path == "/v1/sandboxes/..%2Fx%3Fy/files" and request.query == {"path": ["/a b&c=%2F"]}


@pytest.mark.parametrize("data", ["text", b"text", bytearray(b"text"), io.BytesIO(b"text"), io.StringIO("text"), [b"te", b"xt"]])
def test_every_kind_of_content_is_sent(data):
    from forkd.entries import bytes_of

    sent = bytes_of(data)
    assert (sent if isinstance(sent, bytes) else b"".join(sent)) == b"text"


def test_changes_are_by_content_and_not_by_time():
    from forkd.changes import changes
    from forkd.decoding import decode
    from forkd.models import FileTree

    def tree(*entries):
        return decode(FileTree, {"path": "/srv", "entries": list(entries)})

    def at(path, kind="file", size=1, mode=420, sha256="a", target=None, modified_unix_ms=1, path_base64=None):
        return json.loads(json.dumps(locals()))

    before = tree(at("same"), at("touched"), at("gone"), at("changed"), at("kind"), at("mode"), at("link", "symlink", target="x"), at("\ufffd", path_base64="/w=="))
    after = tree(at("same"), at("touched", modified_unix_ms=9), at("new"), at("changed", sha256="b"),
                 at("kind", "directory"), at("mode", mode=0), at("link", "symlink", target="y"),
                 at("\ufffd", path_base64="/g=="))
    found = {change.path: change.kind for change in changes(before, after) if "\ufffd" not in change.path}
    assert [change.kind for change in changes(before, after) if "\ufffd" in change.path] == ["added", "removed"]
    assert found == {"/srv/gone": "removed", "/srv/new": "added", "/srv/changed": "modified", "/srv/kind": "type",
                     "/srv/mode": "mode", "/srv/link": "modified"}
    assert not changes(before, before)


def test_what_could_not_be_compared_is_unknown():
    from forkd.changes import changes
    from forkd.decoding import decode
    from forkd.models import FileTree

    def tree(**reasons):
        fields = dict(kind="file", size=1, mode=420, modified_unix_ms=1)
        entries = [dict(fields, path=path, sha256=None if reason else "a", incomplete=reason) for path, reason in reasons.items()]
        return decode(FileTree, {"path": "/srv", "entries": entries})

    before = tree(both="unreadable", one="changing", proc="file_system", same=None, size="changing")
    after = tree(both="unreadable", one=None, proc="file_system", same=None, size="changing")
    object.__setattr__(after.entries[4], "size", 2)
    found = {change.path: change.kind for change in changes(before, after)}
    assert found == {"/srv/both": "unknown", "/srv/one": "unknown", "/srv/size": "modified"}


def test_an_event_that_is_no_json_is_an_error_of_ours():
    from forkd.sse import EventLines

    with pytest.raises(forkd.ForkdError, match="no event"):
        list(EventLines().feed(b"event: sandbox.ended\ndata: {half\n\n"))
    with pytest.raises(forkd.ForkdError):
        list(EventLines().feed(b"event: lagged\ndata: []\n\n"))


def test_events_are_read_across_parts_and_a_lag_is_reported():
    from forkd.sse import EventLines, Lagged

    text = b': \n\nid: 1\nevent: sandbox.ended\ndata: {"id": "1", "kind": "sandbox.ended", "ts": "t",\ndata: "sandbox": "sb1"}\n\n'
    text += b'event: lagged\ndata: {"missed": 3}\n\n'
    lines = EventLines()
    events = [event for i in range(len(text)) for event in lines.feed(text[i : i + 1])]
    assert events[0].sandbox == "sb1" and events[1:] == [Lagged(3)]
