"""A store that lost what was not synced, in the same boot, and versions that a killed node was in the making of."""

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache import refusal_mark
from ckptfs.cache.catalog_format import Shard, ShardLayout, VersionState
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId, new_segment_id, new_vid
from ckptfs.cache.mount_db import FileState
from ckptfs.cache.store_registry import register_store
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.fs.segment_sweep import SegmentSweep

StartNode = Callable[..., Awaitable[Any]]


async def protect(node: Any, ino: int) -> None:
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    version = await node.versions.version(vid)
    holders = [StoreId(bytes([number]) * 16) for number in (1, 2)]
    revisions = {}
    for number, store in enumerate(holders):
        revisions[store] = await register_store(node.kv, store, NodeId(f"n{number}"), "127.0.0.1:1", "/", {})
    shards = [Shard(store, version.root) for store in holders]
    commit = ProtectedCommit(InodeNumber(ino), vid, ShardLayout.COPIES, 1, 1, version.cell_size, shards, revisions)
    assert await node.versions.commit_protected([commit]) == {vid}
    node.database.set_protected([vid], in_use=node.open_files.protected({vid}))


def _copy_of(store: Path) -> Path:
    return Path(shutil.copytree(store, store.with_name(f"{store.name}-before")))


def _set_back(store: Path, before: Path, *names: str) -> None:
    """Have these files of the store as they were."""
    for name in names:
        for path in store.glob(f"{name}*"):
            path.unlink()
        for path in before.glob(f"{name}*"):
            shutil.copy(path, store)


DATABASE = ("mount.db", "mount.notes", "uses")
"""What is not synced with the file."""


@pytest.mark.parametrize("is_noticed", [True, False])
@pytest.mark.parametrize("truncates", [True, False])
async def test_what_was_synced_is_taken_up_by_a_store_that_was_set_back(
    start_node: StartNode, truncates: bool, is_noticed: bool
) -> None:
    """`mount.db` knows of an older version, or of none; the catalog has the newer one."""
    node = await start_node()
    old = await node.save(b"old", b"old content")
    before = _copy_of(node.store.path)
    fh = await node.open(old, os.O_WRONLY | (os.O_TRUNC if truncates else 0))
    await node.write(fh, b"new")
    await node.fsync(fh)
    new, fh = await node.create(b"new")
    await node.write(fh, b"synced")
    await node.fsync(fh)
    node.kill()
    _set_back(node.store.path, before, *DATABASE)
    if not is_noticed:
        node.set_back.clear()
    node = await start_node(new_connection=True)
    await node.settle()
    for ino, content in ((old, b"new" if truncates else b"new content"), (new, b"synced")):
        assert await node.content(ino) == content
        assert await node.state(ino) is VersionState.LOCAL
        assert node.database.file(InodeNumber(ino)).state is FileState.LOCAL
    await SegmentSweep(
        node.namespace, node.versions, node.segments, node.open_files, node.reclaimer, node.database, node.store.store_id
    ).sweep_segments()
    await node.reclaimer.drain()
    assert node.segment_count() == 2


async def test_what_was_not_synced_is_dropped_from_a_store_that_was_set_back(start_node: StartNode) -> None:
    """Its row is there, its bytes are not."""
    node = await start_node()
    ino = await node.save(b"file", b"old")
    fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    before = _copy_of(node.store.path)
    await node.write(fh, b"new content")
    await node.release(fh)
    segment = node.segments.path_of(node.database.file(InodeNumber(ino)).segment)
    node.kill()
    os.truncate(segment, 0)
    _set_back(node.store.path, before, "uses")
    node = await start_node(new_connection=True)
    await node.settle()
    assert await node.content(ino) == b"old"
    assert node.segment_count() == 1


async def test_a_count_that_is_lost_takes_nothing_from_programs(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    node.kill()
    node.store.uses.unlink()
    node = await start_node()
    assert await node.read(fh) == b"not synced"
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"not synced"


async def test_a_killed_node_is_not_taken_for_one_that_was_set_back(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    node.kill()
    node = await start_node(new_connection=True)
    await node.settle()
    assert await node.content(ino) == b"not synced"


@pytest.mark.parametrize("truncates", [True, False])
@pytest.mark.parametrize("is_read", [True, False])
async def test_a_node_killed_in_the_making_of_a_version_leaves_no_file_open(
    start_node: StartNode, truncates: bool, is_read: bool
) -> None:
    """With its supervisor: the request does not come again."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    if is_read:
        await node.open(ino)
    await protect(node, ino)
    segment = new_segment_id() if truncates else None
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=segment)
    node.kill()
    node = await start_node(new_connection=True)
    await node.settle()
    inode = await node.namespace.inode(InodeNumber(ino))
    assert (inode.open, inode.writer) == (None, None)
    assert (inode.cur == vid) is truncates
    assert await node.content(ino) == b"content"


async def test_a_protected_file_that_is_read_is_opened_again_just_before_the_kill(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    reading = await node.open(ino)
    await protect(node, ino)
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=None)
    node.kill()
    node = await start_node()
    fh = await node.open(ino, os.O_WRONLY)
    await node.write(fh, b"CON")
    await node.release(fh)
    await node.settle()
    assert await node.read(reading) == b"CONtent"
    assert await node.state(ino) is VersionState.LOCAL
    assert node.database.file(InodeNumber(ino)).state is FileState.LOCAL


async def test_a_place_that_takes_no_count_is_passed_over(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_mark, "RUN", Path("/proc/nowhere"))
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    node.kill()
    node = await start_node(new_connection=True)
    assert not node.set_back.was_set_back()
    await node.settle()
    assert await node.content(ino) == b"not synced"


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_row_that_got_further_than_the_catalog_takes_no_bytes_along(start_node: StartNode, is_noticed: bool) -> None:
    """It names the version that was begun in the segment of the one that the catalog has."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    row = node.database.file(InodeNumber(ino))
    node.database.put_file(row._replace(vid=new_vid(), state=FileState.OPEN, size=0))
    node.kill()
    if is_noticed:
        node.store.uses.unlink()
    node = await start_node(new_connection=True)
    await node.settle()
    assert await node.content(ino) == b"content"
    assert await node.state(ino) is VersionState.LOCAL
    found = node.database.file(InodeNumber(ino))
    assert (found.vid, found.segment, found.state) == (row.vid, row.segment, FileState.LOCAL)
