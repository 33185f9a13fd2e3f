"""Walks over everything there is take memory for a page of it, not for all: there may be a million files."""

import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio

from ckptfs.cache.catalog_format import Shard, ShardLayout, VersionState, pack, version_key
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.mount_db import FileRow, FileState
from ckptfs.cache.reserve import Room
from ckptfs.fs import segment_release
from ckptfs.fs.segment_release import SaveSize, SegmentRelease
from ckptfs.fs.segment_sweep import SegmentSweep

COUNT = 20_000
PEAK_BYTES_MAX = 10 << 20
"""A page of the catalog is 5,000 records, 3 to 4 MiB with what is unpacked of it. All of them at once were 20 MiB and more."""


async def peak_of(walk: Callable[[], Awaitable[object]]) -> int:
    """The memory that was taken at once, in bytes."""
    await walk()  # what is kept for good is there then
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await walk()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_number_of_files(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = InodeNumber(await node.save(b"file", b"content"))
    inode = await node.namespace.inode(ino)
    version = msgspec.structs.replace(
        await node.versions.version(inode.cur),
        state=VersionState.PROTECTED,
        layout=ShardLayout.COPIES,
        data_shards=1,
        parity_shards=1,
        shards=[Shard(StoreId(bytes([number]) * 16), bytes(16)) for number in (1, 2)],
    )
    segments = [SegmentId(number.to_bytes(16, "big")) for number in range(1, COUNT + 1)]
    vids = [Vid(bytes(8) + number.to_bytes(8, "big")) for number in range(1, COUNT + 1)]
    for start in range(0, COUNT, 100):
        puts = []
        for vid, segment in zip(vids[start : start + 100], segments[start : start + 100], strict=True):
            puts.append(Put(version_key(vid), pack(msgspec.structs.replace(version, segment=segment))))
            node.database.put_file(
                FileRow(InodeNumber(1000 + len(puts) + start), vid, segment, FileState.LOCAL, 7, 1, None, b"name")
            )
        await node.kv.transact([], puts)
    monkeypatch.setattr(node.segments, "listing", lambda: b"".join(segments))
    monkeypatch.setattr(segment_release, "room_at", lambda path: Room(0, 1 << 40, 1 << 20))
    sweep = SegmentSweep(
        node.namespace, node.versions, node.segments, node.open_files, node.reclaimer, node.database, node.store.store_id
    )

    async def nothing_stands(inos: list[InodeNumber]) -> dict[int, dict[str, Any]]:
        return {}

    async def nobody(_: object) -> str:
        await trio.lowlevel.checkpoint()
        return ""

    release = SegmentRelease(
        node.versions,
        node.segments,
        node.open_files,
        node.reclaimer,
        node.store.store_id,
        node.store.path,
        0.5,
        SaveSize(),
        nothing_stands,
        lambda size_bytes: nobody(size_bytes),  # type: ignore[arg-type, return-value]
        nobody,
    )
    assert await peak_of(sweep.sweep_rows) < PEAK_BYTES_MAX
    assert await peak_of(sweep.sweep_segments) < PEAK_BYTES_MAX
    assert sweep.kept_count == 0
    monkeypatch.setattr(node.segments, "written_at_ns", lambda segment: 1)
    assert await peak_of(release.release) < PEAK_BYTES_MAX
