"""Holders' shards and segments without those shards that are known to be unreadable: nobody asks for them again at every
stripe."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.replication.errors import ShardNotFound
from ckptfs.replication.segment_files import SegmentHashes
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.stripe_reader import ShardReaders
from ckptfs.replication.stripe_run import CellRun


class ReadableShards:
    """A `ShardReaders` for one version; `unreadable` are indices."""

    def __init__(self, holders: ShardReaders, unreadable: set[int]) -> None:
        self._holders = holders
        self._unreadable = unreadable

    async def read_cell(self, store: StoreId, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        self._require_readable(index)
        return await self._holders.read_cell(store, vid, index, stripe, buffer)

    @asynccontextmanager
    async def cells(self, store: StoreId, vid: Vid, index: int, first: int, count: int) -> AsyncIterator[CellRun]:
        self._require_readable(index)
        async with self._holders.cells(store, vid, index, first, count) as cells:
            yield cells

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter:
        self._require_readable(index)
        return await self._holders.footer(store, vid, index)

    async def read_copy(self, store: StoreId, vid: Vid) -> bytes:
        return await self._holders.read_copy(store, vid)

    async def read_segment(self, store: StoreId, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes:
        return await self._holders.read_segment(store, vid, segment, offset, length)

    async def segment_hashes(
        self, store: StoreId, segment: SegmentId, cell_size: int, first_cell: int, count: int
    ) -> SegmentHashes:
        return await self._holders.segment_hashes(store, segment, cell_size, first_cell, count)

    def _require_readable(self, index: int) -> None:
        if index in self._unreadable:
            raise ShardNotFound(f"shard {index} is known to be unreadable")
