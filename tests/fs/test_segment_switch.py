"""Segments known to be damaged: nobody reads or carries them on, a right one takes their place, and open handles are told
apart."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.catalog_format import Shard, ShardLayout, Version, VersionState
from ckptfs.cache.file_identity import file_identity
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid, new_segment_id
from ckptfs.cache.store_registry import register_store
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.fs.segment_switch import SegmentSwitch
from ckptfs.replication.local_copies import CopyPlace

StartNode = Callable[..., Awaitable[Any]]
HOLDERS = [StoreId(bytes([number]) * 16) for number in range(1, 7)]
CONTENT = b"c" + os.urandom(200_000)


async def _current(node: Any, ino: int) -> tuple[Vid, Version]:
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    version = await node.versions.version(vid)
    return vid, version


async def _protect(node: Any, ino: int) -> tuple[Vid, Version]:
    """As the agent has it done, shards aside."""
    vid, version = await _current(node, ino)
    revisions = {
        store: await register_store(node.kv, store, NodeId(f"node-{number}"), "127.0.0.1:1", "/store", {})
        for number, store in enumerate(HOLDERS)
    }
    shards = [Shard(store, bytes(16)) for store in HOLDERS] if version.size else []
    parity = 2 if shards else 0
    layout = ShardLayout.STRIPED if shards else ShardLayout.COPIES
    commit = ProtectedCommit(
        InodeNumber(ino), vid, layout, max(1, len(shards) - parity), parity, version.cell_size, shards, revisions
    )
    assert await node.versions.commit_protected([commit]) == {vid}
    node.database.set_protected([vid])
    node.open_files.protected({vid})
    return await _current(node, ino)


async def _saved_and_protected(node: Any) -> tuple[int, Vid, Version]:
    ino = await node.save(b"file", CONTENT)
    return ino, *(await _protect(node, ino))


async def _damage(node: Any, vid: Vid, version: Version) -> None:
    with open(node.segments.path_of(version.segment), "r+b") as file:
        file.write(b"damage")
    assert await node.versions.mark_damaged(vid, version.segment, True)


def _switch(node: Any) -> SegmentSwitch:
    return SegmentSwitch(node.versions, node.segments, node.open_files, node.reclaimer, node.store.store_id)


def _sweep(node: Any) -> SegmentSweep:
    return SegmentSweep(
        node.namespace, node.versions, node.segments, node.open_files, node.reclaimer, node.database, node.store.store_id
    )


def _copy(tmp_path: Path, content: bytes = CONTENT) -> CopyPlace:
    path = tmp_path / "copy"
    with open(path, "wb") as file:
        file.write(content)
        return CopyPlace(path, file_identity(file.fileno()))


async def test_a_damaged_segment_is_read_neither_protected_nor_local(start_node: StartNode) -> None:
    node = await start_node()
    for protected in (False, True):
        ino = await node.save(b"file-%d" % protected, CONTENT)
        vid, version = await (_protect if protected else _current)(node, ino)
        assert await node.content(ino) == CONTENT
        await _damage(node, vid, version)
        # Protected, it is fetched from shards, by the agent, which isn't there; from the segment it would be there.
        assert await node.errno(node.content(ino)) == "EIO"


async def test_a_damaged_segment_is_not_carried_on(start_node: StartNode) -> None:
    """Appending would make a new version of it, hashed as it is."""
    node = await start_node()
    for protected in (False, True):
        ino = await node.save(b"file-%d" % protected, CONTENT)
        vid, version = await (_protect if protected else _current)(node, ino)
        await _damage(node, vid, version)
        assert await node.errno(node.open(ino, os.O_WRONLY | os.O_APPEND)) == "EIO"
        assert await _current(node, ino) == (vid, await node.versions.version(vid))
        # What replaces all of it may begin anew.
        fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
        await node.write(fh, b"new")
        await node.release(fh)
        await node.settle()
        assert await node.content(ino) == b"new"


async def test_who_has_it_open_keeps_it_and_nobody_opens_it_anew(start_node: StartNode) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    fh = await node.open(ino)
    await _damage(node, vid, version)
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        assert await node.errno(node.open(ino, flags)) == "EIO"
    assert (await node.read(fh))[:6] == b"damage"
    await node.release(fh)


async def test_a_right_segment_takes_the_place(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    await _damage(node, vid, version)
    mended = await _switch(node).switch(InodeNumber(ino), vid, version.segment, _copy(tmp_path))
    assert mended == (True, "it was made anew from the shards")
    await node.reclaimer.drain()
    assert await node.content(ino) == CONTENT
    assert node.segment_count() == 1
    _, after = await _current(node, ino)
    assert (after.damaged, after.state) == (False, VersionState.PROTECTED)
    # It is a segment like any other: it carries on, and is labelled.
    fh = await node.open(ino, os.O_WRONLY | os.O_APPEND)
    await node.write(fh, b"more", len(CONTENT))
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == CONTENT + b"more"
    assert await _sweep(node).sweep_segments() == 0


async def test_a_switch_under_open_handles(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    fh = await node.open(ino)
    await _damage(node, vid, version)
    right, message = await _switch(node).switch(InodeNumber(ino), vid, version.segment, _copy(tmp_path))
    assert right
    assert "until they close it" in message
    for life in range(2):
        assert (await node.read(fh))[:6] == b"damage", life
        for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            assert await node.errno(node.open(ino, flags)) == "EIO"
        assert await _sweep(node).sweep_segments() == 0
        if life == 0:  # the mount process is killed: the handle stands for the same bytes afterwards
            node.kill()
            node = await start_node()
    await node.release(fh)
    assert await node.content(ino) == CONTENT
    assert await _sweep(node).sweep_segments() == 1
    await node.reclaimer.drain()
    assert node.segment_count() == 1
    assert await node.content(ino) == CONTENT


async def test_a_copy_that_is_not_the_content_is_refused(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    for wrong in (CONTENT[:-1], CONTENT + b"x", b"x" + CONTENT[1:], b""):
        mended = await _switch(node).switch(InodeNumber(ino), vid, version.segment, _copy(tmp_path, wrong))
        assert not mended.right
        assert "check the drive" in mended.message
    assert not (
        await _switch(node).switch(InodeNumber(ino), vid, version.segment, _copy(tmp_path)._replace(identity=(0, 0)))
    ).right
    assert await _current(node, ino) == (vid, version)
    assert node.segment_count() == 1
    assert await node.content(ino) == CONTENT


async def test_a_version_that_moved_on_gets_no_other_segment(start_node: StartNode, tmp_path: Path) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    fh = await node.open(ino, os.O_WRONLY)
    await node.write(fh, b"now this")
    for before in (version.segment, new_segment_id()):
        mended = await _switch(node).switch(InodeNumber(ino), vid, before, _copy(tmp_path))
        assert mended == (True, "the version has another segment now, or none")
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"now this" + CONTENT[8:]
    assert node.segment_count() == 1


async def test_a_segment_in_the_making_is_not_swept_away(start_node: StartNode) -> None:
    """It is complete before any version names it: that may take long, and a sweep may come in between."""
    node = await start_node()
    ino, _, _ = await _saved_and_protected(node)
    segment = SegmentId(new_segment_id())
    os.close(node.segments.create(segment, InodeNumber(ino)))
    with node.open_files.making(segment):
        assert await _sweep(node).sweep_segments() == 0
    assert await _sweep(node).sweep_segments() == 1


@pytest.mark.parametrize("committed", [False, True])
async def test_a_kill_amid_a_switch(start_node: StartNode, tmp_path: Path, committed: bool) -> None:
    node = await start_node()
    ino, vid, version = await _saved_and_protected(node)
    await _damage(node, vid, version)
    segment = new_segment_id()
    os.close(node.segments.create_from(segment, InodeNumber(ino), str(_copy(tmp_path).path)))
    if committed:
        assert await node.versions.replace_segment(vid, version.segment, segment)
    node.kill()
    node = await start_node()
    assert await _sweep(node).sweep_segments() == 1
    await node.reclaimer.drain()
    if committed:
        assert await node.content(ino) == CONTENT
    else:
        assert await node.errno(node.content(ino)) == "EIO"
        assert (await _switch(node).switch(InodeNumber(ino), vid, version.segment, _copy(tmp_path))).right
        assert await node.content(ino) == CONTENT
