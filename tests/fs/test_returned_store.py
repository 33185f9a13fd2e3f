"""A store that was declared lost returns: what it had of files that were written meanwhile is kept, if it is what was written."""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ckptfs.cache import refusal_mark
from ckptfs.cache.catalog_format import LEADER_KEY, StoreState, VersionState
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, new_segment_id
from ckptfs.cache.lost_stores import declare_lost, roll_back
from ckptfs.cache.mount_db import BOOT_FACT
from ckptfs.cache.store_registry import register_store, stores
from ckptfs.cache.versions import Versions
from ckptfs.fs.last_use import LastUse, last_use
from ckptfs.fs.returned_store import ReturnedStore

StartNode = Callable[..., Awaitable[Any]]
OTHER = StoreId(b"O" * 16)


def last_use_of(node: Any) -> LastUse:
    mark = refusal_mark.RefusalMark(node.store.store_id, node.store.path)
    return last_use(node.database, node.store.boot, mark, node.set_back, new_connection=True)


async def lose(node: Any, *inos: int) -> None:
    """The store is declared lost, and other nodes write these files."""
    for number, store in enumerate((node.store.store_id, OTHER)):
        await register_store(node.kv, store, NodeId(f"n{number}"), "127.0.0.1:1", "/", {})
    leader = Unchanged(LEADER_KEY, (await node.kv.transact([], [Put(LEADER_KEY, b"")])).revision)
    assert await declare_lost(node.kv, leader, node.store.store_id)
    async for _ in roll_back(node.kv, leader, node.store.store_id):
        pass
    elsewhere = Versions(node.kv, OTHER, 1, node.namespace.now_ns)
    for ino in inos:
        await elsewhere.open_for_writing(InodeNumber(ino), truncate_to_new_segment=new_segment_id())


async def bring_back(node: Any) -> None:
    returned = ReturnedStore(node.namespace, node.database, node.segments, node.store.store_id, 1, lambda: last_use_of(node))
    assert await returned.bring_back()
    record, _ = (await stores(node.kv))[node.store.store_id]
    assert record.state is StoreState.IN


async def conflicts(node: Any) -> list[int]:
    try:
        parent = ROOT_INODE
        for name in (b".ckptfs", b"conflicts"):
            parent, _ = await node.namespace.lookup(parent, name)
    except NoSuchName:
        return []
    fh = await node.opendir(parent)
    return [one.ino for one in await node.readdir(parent, fh, 0) if one.name not in (b".", b"..")]


async def was_not_used(node: Any) -> None:
    """Nothing was there but processes that ended: the page cache has all of it."""


async def was_set_back(node: Any) -> None:
    node.set_back.close()
    node.store.uses.unlink()


async def lost_its_power(node: Any) -> None:
    """And the file that says so, which is not synced, with it."""
    node.database.set_fact(BOOT_FACT, b"another boot")
    node.store.boot.unlink(missing_ok=True)


@pytest.mark.parametrize(("happens", "is_kept"), [(was_not_used, True), (was_set_back, False), (lost_its_power, False)])
async def test_what_was_never_synced_is_kept_of_a_store_that_has_all_its_bytes(
    start_node: StartNode, happens: Callable[[Any], Awaitable[None]], is_kept: bool
) -> None:
    node = await start_node()
    unsynced, fh = await node.create(b"unsynced")
    await node.write(fh, b"not synced")
    synced, fh = await node.create(b"synced")
    await node.write(fh, b"synced")
    await node.fsync(fh)
    untouched = await node.save(b"untouched", b"closed")
    await lose(node, unsynced, synced)
    await happens(node)
    await bring_back(node)
    kept = [os.pread(node.segments.open_read(row.segment), 100, 0) for row in map(node.database.file, await conflicts(node))]
    assert sorted(kept) == ([b"not synced", b"synced"] if is_kept else [b"synced"])
    assert await node.state(untouched) is VersionState.LOCAL


async def test_conflicts_find_a_place_where_files_have_its_names(start_node: StartNode) -> None:
    node = await start_node()
    await node.save(b".ckptfs", b"a program's")
    ino = await node.save(b"f", b"mine")
    await lose(node, ino)
    await bring_back(node)
    place, _ = await node.namespace.lookup(ROOT_INODE, b".ckptfs~")
    place, _ = await node.namespace.lookup(place, b"conflicts")
    (name,) = [item.name for item in await node.namespace.readdir(place)]
    assert name.startswith(b"%x-" % ino)
