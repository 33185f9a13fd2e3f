"""Files whose bytes are on another node, as programs meet them: two nodes with their agents on one catalog."""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ckptfs.cache import segment_holds
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, SetattrField
from ckptfs.fs.remote_content import RemoteContent
from ckptfs.fs.remote_readers import AWAY_SECONDS_MAX, RemoteReaders
from ckptfs.fs.segment_holds import held_as
from ckptfs.fs.segment_sweep import SegmentSweep

pytestmark = pytest.mark.slow

StartNode = Callable[..., Awaitable[Any]]
StartAgent = Callable[[Any], Awaitable[Any]]


@pytest.fixture
async def pair(start_node: StartNode, start_agent: StartAgent) -> tuple[Any, Any]:
    """Two nodes; the first is the home of what the tests save."""
    nodes = await start_node("a"), await start_node("b")
    for agent in [await start_agent(node) for node in nodes]:
        await agent.members.refresh(everyone=True)
    return nodes


async def test_a_home_moves_with_what_was_written_while_it_was_copied(pair: tuple[Any, Any]) -> None:
    """Another node rewrites and closes the file between the copy and the transaction: nothing of it may be lost."""
    here, there = pair
    ino = await here.save(b"file", b"first")
    copied = []
    copy = there.segments.create_from

    async def rewrite() -> None:
        fh = await here.open(ino, os.O_WRONLY | os.O_TRUNC)
        await here.write(fh, b"second")
        await here.release(fh)
        await here.settle()

    def copy_and_lose(segment: Any, number: Any, source: str, identity: Any) -> int:
        copied.append(source)
        descriptor = copy(segment, number, source, identity)
        if len(copied) == 1:
            trio.from_thread.run(rewrite)
        return int(descriptor)

    there.segments.create_from = copy_and_lose
    fh = await there.open(ino, os.O_RDWR)
    assert len(copied) == 2
    assert await there.read(fh) == b"second"
    await there.write(fh, b"S")
    await there.release(fh)
    await there.settle()
    assert await here.content(ino) == b"Second"


async def test_a_home_that_moves_keeps_the_files_times(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    before = await here.getattr(ino)
    await there.release(await there.open(ino, os.O_RDWR))
    await there.settle()
    after = await there.getattr(ino)
    assert (after.mtime_ns, after.size) == (before.mtime_ns, 7)


async def test_times_set_on_another_node_than_the_writers_are_kept(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, fh = await here.create(b"file")
    await here.write(fh, b"content")
    await here.release(fh)
    body = fuse.SETATTR_IN.pack(SetattrField.MTIME, 0, 0, 0, 0, 0, 1000, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    await there.ask(Opcode.SETATTR, ino, body)
    for _ in range(2):
        assert [(await node.getattr(ino)).mtime_ns for node in pair] == [1000 * 10**9 + 5] * 2
        await here.settle()
    fh = await here.open(ino, os.O_WRONLY)
    await there.ask(Opcode.SETATTR, ino, body)
    newer_ns = time.time_ns() + 10**9
    os.utime(here.segments.path_of(here.open_files.get(ino).segment), ns=(newer_ns, newer_ns))  # a write, some time later
    await here.release(fh)
    await here.settle()
    assert [(await node.getattr(ino)).mtime_ns for node in pair] == [newer_ns] * 2


# Readers of what is removed or rewritten on its home


async def _end(here: Any, how: str, ino: int) -> None:
    if how == "unlink":
        await here.unlink(b"file")
    else:
        _, fh = await here.create(b"new")
        await here.write(fh, b"other content")
        await here.release(fh)
        await here.rename(b"new", b"file")


async def _all_let_go(pair: tuple[Any, Any]) -> None:
    for node in reversed(pair):
        await node.settle()
    assert await segment_holds.held_by(pair[0].kv, pair[1].store.store_id) == []


@pytest.mark.parametrize("how", ["unlink", "rename over"])
@pytest.mark.parametrize("when", ["written", "closed", "local"])
@pytest.mark.parametrize("read_before", [0, 1000])
async def test_a_reader_elsewhere_keeps_what_it_opened(pair: tuple[Any, Any], how: str, when: str, read_before: int) -> None:
    here, there = pair
    content = os.urandom(300_000)
    ino, writing = await here.create(b"file")
    await here.write(writing, content)
    if when != "written":
        await here.release(writing)
    if when == "local":
        await here.settle()
    fh = await there.open(ino)
    assert await there.read(fh, read_before) == content[:read_before]
    await _end(here, how, ino)
    if when == "written":
        await here.release(writing)
    await here.settle()
    assert await there.read(fh) == content
    shown = await there.getattr(ino)
    assert (shown.nlink, shown.size) == (0, len(content))
    assert await there.errno(there.open(ino)) == "ESTALE"  # the name leads elsewhere now
    assert here.segment_count() == (1 if how == "unlink" else 2)
    await there.release(fh)
    await _all_let_go(pair)
    assert here.segment_count() == (0 if how == "unlink" else 1)
    assert there.database.remotes() == []


@pytest.mark.parametrize("when", ["closed", "local"])
@pytest.mark.parametrize("removed", ["before the kill", "after it"])
async def test_a_reader_elsewhere_keeps_what_it_opened_through_a_kill(
    pair: tuple[Any, Any], start_node: StartNode, when: str, removed: str
) -> None:
    here, there = pair
    content = os.urandom(300_000)
    ino, writing = await here.create(b"file")
    await here.write(writing, content)
    await here.release(writing)
    if when == "local":
        await here.settle()
    fh = await there.open(ino)
    if removed == "before the kill":
        await here.unlink(b"file")
        await here.settle()
    there.kill()
    there = await start_node("b")
    if removed == "after it":
        await here.unlink(b"file")
        await here.settle()
    assert await there.read(fh) == content
    assert (await there.getattr(ino)).nlink == 0
    await there.release(fh)
    await _all_let_go((here, there))
    assert here.segment_count() == 0


async def test_what_a_dead_connection_had_open_is_let_go(pair: tuple[Any, Any], start_node: StartNode) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    await there.open(ino)
    await here.unlink(b"file")
    await here.settle()
    assert here.segment_count() == 1
    there.database.forget_handles()
    there.kill()
    await _all_let_go((here, await start_node("b")))
    assert here.segment_count() == 0


async def test_a_segment_that_is_read_elsewhere_is_still_kept_after_its_home_was_killed(
    pair: tuple[Any, Any], start_node: StartNode
) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    fh = await there.open(ino)
    await here.unlink(b"file")
    here.kill()
    here = await start_node("a")
    sweep = SegmentSweep(
        here.namespace, here.versions, here.segments, here.open_files, here.reclaimer, here.database, here.store.store_id
    )
    await sweep.sweep_segments()
    await here.settle()
    assert await sweep.sweep_segments() == 0  # it is known to wait
    assert await there.read(fh) == b"content"
    await there.release(fh)
    await _all_let_go((here, there))
    assert here.segment_count() == 0


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
@pytest.mark.parametrize("sealed", [False, True])
async def test_a_reader_elsewhere_sees_that_its_file_is_rewritten(pair: tuple[Any, Any], flags: int, sealed: bool) -> None:
    """As on one node: it is the same file. What is written from nothing shows when it is local."""
    here, there = pair
    ino = await here.save(b"file", b"first content")
    fh = await there.open(ino)
    assert await there.read(fh) == b"first content"
    writing = await here.open(ino, flags)
    await here.write(writing, b"other content")
    await here.release(writing)
    if sealed:
        await here.settle()
    shows_old = flags & os.O_TRUNC and not sealed
    assert await there.read(fh) == (b"first content" if shows_old else b"other content")
    await there.release(fh)
    await _all_let_go(pair)


async def test_a_handle_of_which_nothing_is_known_any_more_is_an_error_and_not_an_unknown_handle(
    pair: tuple[Any, Any], start_node: StartNode
) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    fh = await there.open(ino)
    there.database.remove_remotes([InodeNumber(ino)])  # as an earlier release leaves it
    await here.unlink(b"file")
    there.kill()
    there = await start_node("b")
    assert await there.errno(there.read(fh)) == "EIO"
    assert (await there.getattr(ino)).nlink == 0
    await there.release(fh)
    assert list(there.open_files) == []


async def test_a_store_that_is_away_for_long_holds_up_no_space(pair: tuple[Any, Any], autojump_clock: MockClock) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    await there.open(ino)
    segment = (await here.versions.version((await here.namespace.inode(InodeNumber(ino))).cur)).segment
    live = {there.store.store_id}

    async def live_stores() -> set[StoreId]:
        return live

    readers = RemoteReaders(here.kv, live_stores)
    for _ in range(3):
        await readers.forget_the_dead([segment])
        await trio.sleep(AWAY_SECONDS_MAX)
    live.clear()
    await readers.forget_the_dead([segment])
    assert await readers.of([segment]) == {segment}
    await trio.sleep(AWAY_SECONDS_MAX)
    await readers.forget_the_dead([segment])
    assert await readers.of([segment]) == set()


# Local copies that make room while they are read


def _replace_once(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Path]:
    """The next copy that is answered with `method` makes room before the mount has opened it, and an empty one has its name."""
    replaced: list[Path] = []
    ask = getattr(RemoteContent, method)

    async def answered(self: RemoteContent, *arguments: Any) -> Any:
        answer = await ask(self, *arguments)
        place = answer.place if method == "fetch_whole" else answer
        if not replaced:
            replaced.append(place.path)
            size = place.path.stat().st_size
            place.path.unlink()
            place.path.touch()
            os.truncate(place.path, size)
        return answer

    monkeypatch.setattr(RemoteContent, method, answered)
    return replaced


async def test_another_copy_under_the_same_name_is_not_read(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    content = os.urandom(200_000)
    ino = await here.save(b"file", content)
    replaced = _replace_once(monkeypatch, "fetch")
    assert await there.content(ino) == content
    assert replaced


async def test_another_copy_under_the_same_name_does_not_become_the_content(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair
    content = os.urandom(200_000)
    ino = await here.save(b"file", content)
    replaced = _replace_once(monkeypatch, "fetch_whole")
    fh = await there.open(ino, os.O_RDWR)
    assert await there.read(fh) == content
    assert replaced


async def test_a_copy_that_made_room_gives_it_back_while_programs_have_it_open(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    fh = await there.open(ino)
    assert await there.read(fh) == b"content"
    file = there.open_files.get(ino)
    place = Path(os.readlink(f"/proc/self/fd/{file.copy_descriptor}"))
    there.open_files.close_evicted_copies()
    assert file.copy_descriptor is not None
    place.unlink()
    there.open_files.close_evicted_copies()
    assert file.copy_descriptor is None
    assert await there.read(fh) == b"content"


async def test_shards_of_what_died_are_kept_for_who_reads_it(pair: tuple[Any, Any]) -> None:
    here, there = pair
    content = os.urandom(300_000)
    ino = await here.save(b"file", content)
    with trio.fail_after(20):
        while (await here.namespace.inode(ino)).prot is None:
            await trio.sleep(0.01)
    elsewhere = there.files._elsewhere
    fh = await there.open(ino)
    assert await there.read(fh, 10) == content[:10]
    await elsewhere.look_for_deaths()
    assert await segment_holds.held_by(here.kv, there.store.store_id) == []
    (vid,) = [file.vid for file in there.open_files]
    await here.unlink(b"file")
    await elsewhere.look_for_deaths()
    await elsewhere.look_for_deaths()
    assert await segment_holds.held_by(here.kv, there.store.store_id) == [held_as(vid)]
    await there.holds.begin([held_as(vid)])  # the next life of the mount process
    assert await segment_holds.held_by(here.kv, there.store.store_id) == [held_as(vid)]
    assert await there.read(fh) == content
    await there.release(fh)
    await _all_let_go(pair)
