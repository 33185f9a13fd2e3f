"""A store that was declared lost comes back, and somebody has written its files meanwhile: what becomes of what it has."""

import os
from typing import Any

import msgspec
import pytest

from ckptfs.cache.admission import StoreRemoved
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import LEADER_KEY, Store, StoreState, VersionState, pack, store_key, unpack
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, Vid, new_segment_id
from ckptfs.cache.lost_stores import roll_back
from ckptfs.cache.mount_db import BOOT_FACT
from ckptfs.cache.store_registry import register_store
from ckptfs.fs import returned_store
from ckptfs.fs.last_use import LastUse
from ckptfs.fs.returned_store import ReturnedStore

UNHARMED = LastUse(True, False, 0.0)


class Killed(BaseException):
    """The process ends here."""


async def put_state(node: Any, state: StoreState) -> None:
    store = node.store.store_id
    await register_store(node.kv, store, node.store.node, "127.0.0.1:1", str(node.store.path), {})
    record = unpack(Store, (await node.kv.get(store_key(store))).value)
    await node.kv.transact([], [Put(store_key(store), pack(msgspec.structs.replace(record, state=state)))])


async def lose(node: Any) -> None:
    """The node is killed, its store declared lost, and its files rolled back."""
    node.kill()
    await put_state(node, StoreState.LOST)
    await roll_back_all(node)


async def roll_back_all(node: Any) -> None:
    """By the leader, of a node that has no session."""
    store = node.store.store_id
    leader = await node.kv.transact([], [Put(LEADER_KEY, b"")])
    async for _ in roll_back(node.kv, Unchanged(LEADER_KEY, leader.revision), store):
        pass


async def begin_anew(node: Any, ino: int) -> None:
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=new_segment_id())


def returned(node: Any) -> ReturnedStore:
    return ReturnedStore(node.namespace, node.database, node.segments, node.store.store_id, 2, lambda: UNHARMED)


async def conflict_directory(node: Any) -> InodeNumber:
    directory, _ = await node.namespace.lookup(ROOT_INODE, b".ckptfs")
    directory, _ = await node.namespace.lookup(directory, b"conflicts")
    return InodeNumber(directory)


async def conflicts(node: Any) -> list[bytes]:
    return [item.name for item in await node.namespace.readdir(await conflict_directory(node))]


async def version_of(node: Any, ino: int) -> Vid:
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    assert vid is not None
    return Vid(vid)


async def rewritten_while_lost(start_node: Any) -> tuple[Any, int, Vid]:
    """A node that is back after its store was lost; a file of it that another node began to write meanwhile; and its version."""
    first, other = await start_node("a"), await start_node("b")
    ino = await first.save(b"f", b"mine")
    vid = await version_of(first, ino)
    await lose(first)
    await begin_anew(other, ino)
    return await start_node("a"), ino, vid


async def test_what_was_written_elsewhere_meanwhile_is_set_aside(start_node: Any) -> None:
    again, ino, vid = await rewritten_while_lost(start_node)
    assert await returned(again).bring_back()
    assert await conflicts(again) == [b"%x-%b-f" % (ino, vid.hex()[:8].encode())]
    assert await again.versions.version(vid) is None
    assert await catalog_problems(again.kv) == []


@pytest.mark.parametrize("power_was_cut", [False, True])
async def test_what_was_closed_and_not_local_yet_is_shown_again(start_node: Any, power_was_cut: bool) -> None:
    """Nobody wrote it elsewhere: it is no conflict. Where the power was cut before it was synced, the file has what it had."""
    node = await start_node("a")
    ino = await node.save(b"f", b"older")
    fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    await node.write(fh, b"newest")
    await node.release(fh)
    await lose(node)
    again = await start_node("a")
    assert await returned(again).bring_back()
    if power_was_cut:
        again.database.set_fact(BOOT_FACT, b"another boot")
        again.store.boot.unlink(missing_ok=True)
    again.kill()
    again = await start_node("a")
    assert await again.content(ino) == (b"older" if power_was_cut else b"newest")
    with pytest.raises(NoSuchName):
        await conflicts(again)
    await again.settle()
    assert await again.state(ino) is VersionState.LOCAL
    assert await catalog_problems(again.kv) == []


@pytest.mark.parametrize("killed_at", ["relabel", "put_file", "remove_files", "end_unnamed"])
async def test_what_an_attempt_that_was_killed_has_set_aside_is_gone_on_with(
    start_node: Any, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """A second file of the same segment would lose its bytes with the first one."""
    again, ino, vid = await rewritten_while_lost(start_node)

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        owner = {"relabel": again.segments, "end_unnamed": returned_store}.get(killed_at, again.database)
        patch.setattr(owner, killed_at, kill)
        with pytest.raises(Killed):
            await returned(again).bring_back()
    assert await returned(again).bring_back()
    assert await conflicts(again) == [b"%x-%b-f" % (ino, vid.hex()[:8].encode())]
    assert await again.versions.version(vid) is None
    assert await catalog_problems(again.kv) == []
    row = again.database.file((await again.namespace.lookup(await conflict_directory(again), (await conflicts(again))[0]))[0])
    assert row.path_hint.endswith(b"-f")


@pytest.mark.parametrize("is_written", [False, True])
async def test_what_was_set_aside_and_lost_again_is_one_file(
    start_node: Any, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """The return was killed, and the store lost for longer: also where somebody wrote even the file it had made meanwhile."""
    again, ino, vid = await rewritten_while_lost(start_node)

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(returned_store, "end_unnamed", kill)
        with pytest.raises(Killed):
            await returned(again).bring_back()
    name = b"%x-%b-f" % (ino, vid.hex()[:8].encode())
    made, _ = await again.namespace.lookup(await conflict_directory(again), name)
    await roll_back_all(again)
    assert (await again.namespace.inode(made)).lost
    if is_written:
        await begin_anew(await start_node("b"), made)
    assert await returned(again).bring_back()
    names = await conflicts(again)
    assert len(names) == (2 if is_written else 1)
    assert await again.versions.version(vid) is None
    assert await catalog_problems(again.kv) == []
    rows = [again.database.file((await again.namespace.lookup(await conflict_directory(again), one))[0]) for one in names]
    kept = [os.pread(again.segments.open_read(row.segment), 100, 0) for row in rows if row is not None]
    assert kept == [b"mine"]


async def test_what_is_not_there_any_more_ends(start_node: Any) -> None:
    """Else nobody would ever, and nothing that died after it began would be removed either."""
    again, _, vid = await rewritten_while_lost(start_node)
    os.unlink(again.segments.path_of((await again.versions.version(vid)).segment))
    assert await returned(again).bring_back()
    assert await again.versions.version(vid) is None
    assert await catalog_problems(again.kv) == []


async def test_a_store_that_was_removed_ends_its_node(start_node: Any) -> None:
    """At its start, and when its session begins anew after the node was cut off."""
    node = await start_node("a")
    await returned(node).require_not_lost()
    await put_state(node, StoreState.REMOVED)
    with pytest.raises(StoreRemoved, match="start this node with a new store directory"):
        await returned(node).require_not_lost()
    with pytest.raises(StoreRemoved):
        await returned(node).bring_back()
