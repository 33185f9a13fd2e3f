"""What other nodes remove, replace and take over is let go of by its home, and waits for protection no more."""

import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ckptfs.cache.catalog_format import ShardLayout
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId, new_vid
from ckptfs.cache.mount_db import BOOT_FACT, FileState
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.fs.segment_sweep import GIVE_WAY_SECONDS, GIVE_WAY_SECONDS_MAX, ROWS_SECONDS, SegmentSweep

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)


@pytest.mark.parametrize("power_cut", [False, True])
async def test_a_row_that_got_further_than_the_catalog_goes_with_the_next_sweep(start_node: StartNode, power_cut: bool) -> None:
    """A power cut may take the catalog's newest transactions and leave a row that tells of them."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    for _ in range(2):  # what agrees is noted
        await node.sweep().sweep_rows()
    row = node.database.file(ino)
    node.database.put_file(row._replace(ino=12345, vid=new_vid()))
    if power_cut:
        node.database.set_fact(BOOT_FACT, b"another boot")
    node.kill()
    node = await start_node()
    assert await node.sweep().sweep_rows() == int(power_cut), "a kill takes nothing from the catalog: it is not looked for"
    assert await node.content(ino) == b"content"


async def test_what_another_node_removed_is_let_go(start_node: StartNode) -> None:
    node = await start_node()
    sweep = node.sweep()
    await node.save(b"local", b"content")
    await node.settle()
    await node.save(b"settling", b"content")
    _, fh = await node.create(b"open")
    await node.save(b"kept", b"content")
    other = Namespace(node.kv, StoreId(b"another store id"), 1, lambda: 0)
    for name in (b"local", b"settling", b"open"):
        await other.unlink(InodeNumber(ROOT), name)
    assert await sweep.sweep_rows() == 2
    await node.settle()
    assert node.segment_count() == 2
    assert await node.write(fh, b"still") == 5
    await node.release(fh)
    assert await sweep.sweep_rows() == 1
    await node.settle()
    assert node.segment_count() == 1


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("looked_between", [False, True])
async def test_what_a_file_of_another_node_replaced_counts_as_unprotected_no_more(
    start_node: StartNode, looked_between: bool, killed: bool
) -> None:
    """The replaced version outlives its inode until the other file is local: then no change of that inode tells of its end."""
    here, there = await start_node("a"), await start_node("b")
    sweep = here.sweep()
    await here.save(b"name", b"what was there before")
    await here.settle()
    await sweep.sweep_rows()
    _, fh = await there.create(b"temporary")
    await there.write(fh, b"what is there now")
    await there.release(fh)
    await there.rename(b"temporary", b"name")
    if looked_between:
        for _ in range(3):
            await sweep.sweep_rows()
        assert here.segment_count() == 1, "the other file may fall back to it"
    await there.settle()
    if killed:
        here.kill()
        here = await start_node("a")
        sweep = here.sweep()
    await sweep.sweep_rows(all_rows=killed)  # as a new process begins: a row may have been let go, and not be gone yet
    await here.settle()
    assert here.database.exposure().files == 0
    assert here.database.files() == []
    await sweep.sweep_segments()
    await here.settle()
    assert here.segment_count() == 0


async def test_what_was_protected_and_replaced_before_its_home_heard_of_it_counts_as_unprotected_no_more(
    start_node: StartNode,
) -> None:
    """Its agent was killed before it could tell the mount, and the version is a tombstone by now."""
    here, there = await start_node("a"), await start_node("b")
    sweep = here.sweep()
    ino = InodeNumber(await here.save(b"name", b""))
    await _protect_empty(here, ino)
    await sweep.sweep_rows()
    assert here.database.exposure().files == 1, "not before its mount is told"
    await there.release(await there.open(ino, os.O_WRONLY | os.O_TRUNC))
    await there.settle()
    await _protect_empty(there, ino)
    assert await sweep.sweep_rows() == 1
    await here.settle()
    assert here.database.files() == []


async def _protect_empty(node: Any, ino: InodeNumber) -> None:
    """As the agent does it, but that it tells nobody."""
    vid = (await node.namespace.inode(ino)).cur
    commit = ProtectedCommit(ino, vid, ShardLayout.COPIES, 0, 0, 0, [], {})
    assert await node.versions.commit_protected([commit]) == {vid}


async def test_a_row_that_a_sweep_found_changing_is_looked_at_again(start_node: StartNode) -> None:
    """As when a file becomes local while another node removes it: the row is written after the sweep has looked."""
    node = await start_node()
    sweep = node.sweep()
    ino = await node.save(b"file", b"content")
    await node.settle()
    await sweep.sweep_rows()
    await Namespace(node.kv, StoreId(b"another store id"), 1, lambda: 0).unlink(InodeNumber(ROOT), b"file")
    row = node.database.file(ino)
    async with trio.open_nursery() as nursery, node.open_files.alone(ino):
        nursery.start_soon(sweep.sweep_rows)
        await trio.testing.wait_all_tasks_blocked()
        node.database.put_file(row._replace(size=row.size + 1))
    assert node.database.file(ino) is not None
    assert await sweep.sweep_rows() == 1
    await node.settle()
    assert node.database.files() == []


async def test_what_another_node_removed_is_let_go_though_the_replica_lags(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog's log says that it is gone, and reads still show it: it would not be looked at again."""
    node = await start_node()
    sweep = node.sweep()
    await node.save(b"local", b"content")
    assert await sweep.sweep_rows() == 0
    before = {entry.key: entry for entry in await node.kv.range(b"")}
    await Namespace(node.kv, StoreId(b"another store id"), 1, lambda: 0).unlink(InodeNumber(ROOT), b"local")
    get, get_many = node.kv.get, node.kv.get_many

    async def lagging(key: bytes) -> Any:
        return before.get(key)

    async def lagging_many(keys: Sequence[bytes]) -> Any:
        return [before.get(key) for key in keys]

    async def catch_up() -> None:
        node.kv.get, node.kv.get_many = get, get_many

    monkeypatch.setattr(node.kv, "get", lagging)
    monkeypatch.setattr(node.kv, "get_many", lagging_many)
    monkeypatch.setattr(node.kv, "catch_up", catch_up)
    assert await sweep.sweep_rows() == 1
    await node.settle()
    assert node.segment_count() == 0


@pytest.mark.parametrize("who", ["here", "there"])
async def test_what_a_file_of_another_node_replaced_and_lost_again_is_protected(start_node: StartNode, who: str) -> None:
    here, there = await start_node("a"), await start_node("b")
    await here.save(b"name", b"what was there before")
    ino, fh = await there.create(b"temporary")
    await there.write(fh, b"not synced")
    await (here if who == "here" else there).rename(b"temporary", b"name")
    await here.sweep().sweep_rows()
    await here.settle()
    assert await there.versions.drop_open_versions([(InodeNumber(ino), there.open_files.get(InodeNumber(ino)).vid)])
    shown = await here.namespace.inode(InodeNumber(ino))
    for _ in range(2):  # once is enough
        await here.sweep().sweep_segments()
        (row,) = here.database.files()
        # Under the number of the file that shows it: it can't be protected under another.
        assert (row.ino, row.vid, row.state) == (ino, shown.cur, FileState.LOCAL)
    assert await here.content(ino) == b"what was there before"


async def test_what_is_shown_again_is_protected_though_programs_have_the_replaced_file_open(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    fh = await here.open(await here.save(b"name", b"what was there before"))
    ino, _ = await there.create(b"temporary")
    await there.rename(b"temporary", b"name")
    here.kill()
    here = await start_node("a")
    assert await there.versions.drop_open_versions([(InodeNumber(ino), there.open_files.get(InodeNumber(ino)).vid)])
    await here.sweep().sweep_segments()
    assert [(row.ino, row.state) for row in here.database.files()][1:] == [(ino, FileState.LOCAL)]
    assert await here.read(fh) == b"what was there before"
    await here.release(fh)
    await here.settle()
    assert [row.ino for row in here.database.files()] == [ino]
    assert await here.content(ino) == b"what was there before"


async def test_looking_at_the_rows_gives_way_to_programs_and_not_for_ever(
    node: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    is_busy = False

    async def sweep_rows(self: SegmentSweep, *, all_rows: bool = False) -> int:
        if not all_rows:
            looks.append(trio.current_time())
        return 0

    async def sweep_segments(self: SegmentSweep) -> int:
        return 0

    monkeypatch.setattr(SegmentSweep, "sweep_rows", sweep_rows)
    monkeypatch.setattr(SegmentSweep, "sweep_segments", sweep_segments)
    sweep = SegmentSweep(
        node.namespace,
        node.versions,
        node.segments,
        node.open_files,
        node.reclaimer,
        node.database,
        node.store.store_id,
        lambda: is_busy,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sweep.run)
        await trio.sleep(5 * ROWS_SECONDS + 0.5)
        assert len(looks) == 6
        is_busy = True
        began = trio.current_time()
        looks.clear()
        await trio.sleep(30)
        pauses = [later - earlier for earlier, later in pairwise(looks)]
        longest = ROWS_SECONDS + GIVE_WAY_SECONDS_MAX
        assert len(pauses) >= 3
        assert all(longest <= pause <= longest + 2 * GIVE_WAY_SECONDS for pause in pauses)
        assert looks[0] - began <= longest + 2 * GIVE_WAY_SECONDS
        is_busy = False
        looks.clear()
        await trio.sleep(ROWS_SECONDS + 2 * GIVE_WAY_SECONDS)
        assert looks
        nursery.cancel_scope.cancel()
