"""What the lives of files leave in the memory of the mount process: nothing, whether they stay or go."""

import gc
import os
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ckptfs.cache import catalog_records, record_cache
from ckptfs.cache.catalog_format import Shard, ShardLayout
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId
from ckptfs.cache.store_registry import register_store
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.fs import kernel_pages
from ckptfs.fs.fuse_format import Opcode

FILES = 24
WARM_UP_FILES = 48
"""Until as many rows wait to be written as do at most, and the caches are full."""
BYTES_PER_FILE_MAX = 900
"""A record that is kept takes a thousand; what caches and waiting rows hold in one moment or the other is half of that."""

HOLDERS = [StoreId(bytes([number]) * 16) for number in (1, 2)]


async def protect(node: Any, ino: int, revisions: dict[StoreId, int]) -> None:
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    version = await node.versions.version(vid)
    shards = [Shard(store, version.root) for store in HOLDERS]
    commit = ProtectedCommit(InodeNumber(ino), vid, ShardLayout.COPIES, 1, 1, version.cell_size, shards, revisions)
    await node.versions.commit_protected([commit])
    node.database.set_protected([vid], in_use=node.open_files.protected({vid}))
    node.growing.protected([vid])


async def live(node: Any, numbers: range, revisions: dict[StoreId, int]) -> None:
    """Each of them is made, protected, read, rewritten, and renamed over the one before, protected again; one in two goes, and
    another one stays."""
    for number in numbers:
        ino = await node.save(b"temporary", b"content")
        await protect(node, ino, revisions)
        fh = await node.open(ino, os.O_RDWR | (os.O_TRUNC if number % 2 else 0))
        await node.write(fh, b"CONTENT")
        await node.fsync(fh)
        await node.release(fh)
        await node.settle()
        before = (await node.lookup(1, b"newest")).ino if number else None
        await node.rename(b"temporary", b"newest")
        await protect(node, ino, revisions)
        if before is not None:
            await node.ask(Opcode.FORGET, before, bytes(8))
        kept = await node.save(b"kept-%d" % number, b"content")
        assert await node.content(kept) == b"content"
        if number % 2:
            await node.unlink(b"kept-%d" % number)
            await node.ask(Opcode.FORGET, kept, bytes(8))
        await node.settle()


def traced_bytes(node: Any) -> int:
    node.told.clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.slow
async def test_flat_memory(start_node: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    caches = ((record_cache, "ENTRIES_MAX"), (kernel_pages, "REMEMBERED_MAX"), (catalog_records, "_INODES_REMEMBERED_MAX"))
    for cache, name in caches:
        monkeypatch.setattr(cache, name, 0)
    node = await start_node()
    revisions = {}
    for number, store in enumerate(HOLDERS):
        revisions[store] = await register_store(node.kv, store, NodeId(f"n{number}"), "127.0.0.1:1", "/", {})
    tracemalloc.start()
    try:
        await live(node, range(WARM_UP_FILES), revisions)
        before = traced_bytes(node)
        await live(node, range(WARM_UP_FILES, WARM_UP_FILES + FILES), revisions)
        grown = traced_bytes(node) - before
    finally:
        tracemalloc.stop()
    assert grown < BYTES_PER_FILE_MAX * FILES, f"{grown / FILES:.0f} bytes a file"
