"""Branches, rollbacks, checkpoints and warm-ups, with a daemon that keeps a list of snapshots."""

import asyncio
import threading
import time

import pytest

import forkd
from forkd import AsyncClient, AsyncSandbox, AsyncSnapshot, Sandbox, Snapshot

INFO = dict(dir="", created_at_unix=1, bootable=False, kind="full", mem_size_mib=1, vcpus=1, network=True,
            chain_depth=0, disk_bytes=0, memory_bytes=0, state_bytes=0)


class Snapshots:
    """The snapshots of the server, and where sandboxes were rolled back to. `first` may deal with a request."""

    def __init__(self, server):
        self.server, self.tags, self.rolled, self.replies = server, {}, [], {}
        self.first = lambda request, connection: False
        server.script = self.script

    def script(self, request, connection):
        return self.first(request, connection) or self.answer(request, connection)

    def answer(self, request, connection):
        path = request.path
        if request.method == "POST" and (path.endswith("/branch") or path == "/v1/snapshots"):
            if request.key not in self.replies:
                self.replies[request.key] = self.make(request.json.get("tag") or "branch-%d" % len(self.replies))
            connection.reply(*self.replies[request.key])
        elif path.endswith("/rollback"):
            to = request.json["to"]
            if to not in self.tags and to != "parent":
                return self.refuse(connection, 404, "snapshot_not_found")
            self.rolled.append(to)
            connection.reply(200, dict(self.sandbox(path.split("/")[3]), rolled_back_to=to))
        elif path.startswith("/v1/snapshots/"):
            tag = path.split("/")[3]
            if tag not in self.tags:
                return self.refuse(connection, 404, "snapshot_not_found")
            if request.method == "DELETE":
                del self.tags[tag]
                connection.reply(204, body=b"")
            else:
                connection.reply(200, self.tags[tag])
        else:
            return False
        return True

    def make(self, tag):
        if tag in self.tags:
            return 409, {"error": "the tag is taken", "code": "tag_taken", "request_id": "r"}
        self.tags[tag] = dict(INFO, tag=tag, status="ready")
        return 201, self.tags[tag]

    @staticmethod
    def refuse(connection, status, code):
        connection.reply(status, {"error": "refused", "code": code, "request_id": "r"})
        return True

    @staticmethod
    def sandbox(id):
        return dict(id=id, owner="l", state="running", vcpus=1, mem_size_mib=1, network=False, guest_addr="",
                    created_at_unix=1, snapshot_tag="parent")


@pytest.fixture
def snapshots(server):
    return Snapshots(server)


@pytest.fixture
def box(client):
    with Sandbox.create("parent", client=client) as it:
        yield it


def in_asyncio(server, use):
    """Runs `use(box)` with a sandbox of asyncio."""

    async def main():
        async with AsyncClient(server.url, "token", timeout=1.0) as client:
            async with await AsyncSandbox.create("parent", client=client) as box:
                return await use(box)

    return asyncio.run(main())


def test_a_rollback_goes_to_the_newest_branch_that_has_memory_and_is_there(server, snapshots, box):
    async def use(box):
        await box.branch("async")
        await box.branch(mode="disk")
        return await box.rollback()

    one, two = box.branch("one"), box.branch("two")
    box.branch("a-disk", mode="disk")
    assert box.rollback() == "two"
    two.delete()
    assert box.rollback() == "one"
    one.delete()
    assert box.rollback() == "parent"
    with pytest.raises(forkd.NotFoundError):
        box.rollback("two")
    assert in_asyncio(server, use) == "async"
    assert snapshots.rolled == ["two", "one", "parent", "async"]


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_whose_answer_is_lost_leaves_no_branch(server, snapshots, box, known):
    """`known`: the daemon still knows the request when it is sent again."""

    def first(request, connection):
        if not request.path.endswith("/branch"):
            return False
        if tries.count(request.key) < 4:
            tries.append(request.key)
            snapshots.answer(request, Lost())
            connection.reset()
            return True
        return not known and snapshots.refuse(connection, 409, "idempotency_outcome_unknown")

    class Lost:
        def reply(self, *args):
            pass

    async def use(box):
        async with box.checkpoint():
            pytest.fail("there is no branch")

    tries, snapshots.first = [], first
    with pytest.raises(forkd.StreamBrokenError):
        with box.checkpoint():
            pytest.fail("there is no branch")
    with pytest.raises(forkd.StreamBrokenError):
        in_asyncio(server, use)
    assert not snapshots.tags
    # A tag of the program's own may be that of another snapshot.
    snapshots.make("mine")
    with pytest.raises(forkd.StreamBrokenError):
        with box.checkpoint("mine"):
            pytest.fail("there is no branch")
    assert list(snapshots.tags) == ["mine"]


def test_a_cancelled_checkpoint_leaves_no_branch(server, snapshots):
    branched, answered = threading.Event(), threading.Event()

    def first(request, connection):
        if not request.path.endswith("/branch") or branched.is_set():
            return False
        branched.set()
        time.sleep(0.3)
        try:
            return snapshots.answer(request, connection)
        finally:
            answered.set()

    async def enter(box):
        async with box.checkpoint():
            pytest.fail("it was cancelled")

    async def use(box):
        task = asyncio.ensure_future(enter(box))
        while not branched.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    snapshots.first = first
    in_asyncio(server, use)
    assert answered.wait(20) and not snapshots.tags


def test_a_checkpoint_rolls_back_and_goes(server, snapshots, box):
    with box.checkpoint("kept") as branch:
        assert list(snapshots.tags) == [branch.tag] == ["kept"]
    with pytest.raises(ZeroDivisionError):
        with box.checkpoint() as branch:
            1 / 0
    assert snapshots.rolled == [branch.tag] and not snapshots.tags
    assert box.rollback() == "parent"


@pytest.mark.parametrize("status, error", [("writing", forkd.TimeoutError), ("failed", forkd.GuestError)])
def test_a_warm_up_that_does_not_succeed_leaves_no_snapshot(server, snapshots, client, status, error):
    def first(request, connection):
        for tag in snapshots.tags:
            snapshots.tags[tag].update(status=status, error="the guest ended", error_code="guest_failed")
        return False

    async def use():
        async with AsyncClient(server.url, "token") as client:
            await AsyncSnapshot.warm("python", timeout=0, client=client)

    snapshots.first = first
    with pytest.raises(error, match="the guest ended|longer timeout"):
        Snapshot.warm("python", "t", timeout=0, client=client)
    with pytest.raises(error):
        asyncio.run(use())
    assert server.count("POST", "/v1/snapshots") == 2 and not snapshots.tags


def test_a_warm_up_removes_no_snapshot_that_was_there_before(server, snapshots, client):
    def first(request, connection):
        tries.append(request.key)
        return len(tries) <= 4 and not connection.reset()

    tries = []
    snapshots.make("t")
    with pytest.raises(forkd.ConflictError) as refused:
        Snapshot.warm("python", "t", client=client)
    assert refused.value.code == "tag_taken"
    snapshots.first = first
    with pytest.raises(forkd.StreamBrokenError):
        Snapshot.warm("python", "t", client=client)
    assert len(set(tries)) == 1 and list(snapshots.tags) == ["t"]


def test_a_wait_that_is_too_short_leaves_the_snapshot(snapshots, client):
    snapshots.make("t")
    snapshots.tags["t"]["status"] = "writing"
    with pytest.raises(forkd.TimeoutError, match="longer timeout"):
        Snapshot.get("t", client).wait_ready(0)
    assert list(snapshots.tags) == ["t"]


def refused(snapshots):
    """Rollbacks are refused: the sandbox is busy."""
    snapshots.first = lambda request, connection: request.path.endswith("/rollback") and snapshots.refuse(
        connection, 409, "sandbox_busy")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_roll_back_keeps_its_branch_and_says_how_to(server, snapshots, box, asynchronous):
    async def use(box):
        try:
            async with box.checkpoint("before"):
                1 / 0
        finally:
            snapshots.first = lambda request, connection: False
            assert await box.rollback() == "before"

    refused(snapshots)
    with pytest.raises(forkd.RollbackError, match=r"sandbox.rollback\('before'\)") as failed:
        if asynchronous:
            in_asyncio(server, use)
        else:
            with box.checkpoint("before"):
                1 / 0
    assert list(snapshots.tags) == ["before"] == [failed.value.tag] and failed.value.code == "sandbox_busy"
    assert isinstance(failed.value.__cause__, ZeroDivisionError) and "refused" in failed.value.message
    snapshots.first = lambda request, connection: False
    assert box.rollback() == ("parent" if asynchronous else "before")


def test_a_generator_that_closes_in_a_checkpoint_rolls_back_and_blocks_no_other_task(server, snapshots):
    """Also the sandbox of its block ends."""

    async def main():
        async def ticks():
            # The daemon answers the rollback and the removal only while the loop goes on.
            while True:
                await asyncio.sleep(0.01)
                beat.set()

        async def generate():
            async with AsyncClient(server.url, "token", timeout=5.0) as client:
                async with await AsyncSandbox.create("parent", client=client) as box:
                    async with box.checkpoint():
                        yield

        ticking = asyncio.ensure_future(ticks())
        generator = generate()
        await generator.__anext__()
        slow.append(True)
        await generator.aclose()
        ticking.cancel()

    def first(request, connection):
        if slow and (request.path.endswith("/rollback") or request.method == "DELETE"):
            for _ in range(3):
                beat.clear()
                beats.append(beat.wait(20))
        return False

    slow, beats, beat = [], [], threading.Event()
    snapshots.first = first
    asyncio.run(main())
    assert len(snapshots.rolled) == 1 and not snapshots.tags and not server.alive
    assert len(beats) == 9 and all(beats)


def test_a_loop_that_closes_in_a_checkpoint_rolls_back(server, snapshots):
    async def main():
        client = AsyncClient(server.url, timeout=5.0)
        async with await AsyncSandbox.create("parent", client=client) as box:
            async with box.checkpoint():
                entered.append(1)
                await asyncio.Event().wait()

    entered, loop, coroutine = [], asyncio.new_event_loop(), main()
    task = loop.create_task(coroutine)
    while not entered:
        loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    coroutine.close()
    assert len(snapshots.rolled) == 1 and not snapshots.tags and not server.alive
