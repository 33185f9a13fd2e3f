"""This node's own store as a holder like any other, without a socket: its files, through threads.

Refusals are the same as a peer's (`PeerRefused`), so that who puts and reads shards has one set of errors to know.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import trio

from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.replication.errors import (
    PeerRefused,
    RefusalReason,
    ReplicationError,
    ShardConflict,
    ShardDamaged,
    StoreFailed,
    StoreFull,
    WriterRevoked,
)
from ckptfs.replication.segment_files import SegmentFiles, SegmentHashes, SegmentPaths, SegmentStatus
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.shard_readers import ShardReaders
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_writer import ShardWriter
from ckptfs.replication.small_copies import SmallCopies, SmallCopy

Result = TypeVar("Result")

_REASONS: dict[type[ReplicationError], RefusalReason] = {
    ShardConflict: RefusalReason.CONFLICT,
    ShardDamaged: RefusalReason.MISMATCH,
    StoreFull: RefusalReason.FULL,
    StoreFailed: RefusalReason.FAILED,
    WriterRevoked: RefusalReason.BUSY,
}
"""What a peer's server would have answered to a put."""


class OwnSink:
    """One shard on its way into the own store (a `striped_attempt.ShardSink`)."""

    def __init__(self, store: "OwnStore", writer: ShardWriter, ino: InodeNumber, path_hint: bytes, revision: int) -> None:
        self.resume_stripe = writer.resume_stripe
        self._store = store
        self._writer = writer
        self._ino = ino
        self._path_hint = path_hint
        self._revision = revision

    async def send_cell(self, stripe: int, cell: memoryview, digest: bytes) -> None:
        await self._store.put(self._writer.write_cell, stripe, cell, digest)

    def send_cell_in_thread(self, stripe: int, cell: memoryview, digest: bytes) -> bool:
        with refusing():
            self._writer.write_cell(stripe, cell, digest)
        return True

    async def send_zeros(self, stripe: int, count: int) -> None:
        await self._store.put(self._writer.write_zeros, stripe, count)

    async def finish(self, own_table: bytes, content_table: bytes) -> bytes:
        footer = ShardFooter(self._writer.header, own_table, content_table, self._ino, self._path_hint, self._revision)
        return await self._store.put(self._writer.finish, footer)

    async def aclose(self) -> None:
        await self._store.put(self._writer.suspend)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Errors of a writer become `PeerRefused`."""
    try:
        yield
    except (ShardConflict, ShardDamaged, StoreFull, StoreFailed, WriterRevoked) as error:
        raise PeerRefused(_REASONS[type(error)], str(error)) from None


class OwnCells:
    """Cells of one shard of the own store, one after the other (a `stripe_run.CellRun`)."""

    def __init__(self, readers: ShardReaders, vid: Vid, index: int, first: int) -> None:
        self._readers, self._vid, self._index, self._next_stripe = readers, vid, index, first

    def next_in_thread(self, buffer: memoryview, seconds: float) -> int:
        with self._readers.borrow(self._vid, self._index) as reader:
            length = reader.read_cell(self._next_stripe, buffer, check=False)
        self._next_stripe += 1
        return length


class OwnStore:
    """The own store's shards, copies and segments. Threads are bounded by two limiters, one for writing, one for reading, so
    that syncs never keep a reader waiting."""

    def __init__(self, shards: ShardStore, copies: SmallCopies, segments: SegmentPaths) -> None:
        self._shards = shards
        self._readers = ShardReaders(shards)
        self._copies = copies
        self._segments = SegmentFiles(segments)
        self._write_limiter = trio.CapacityLimiter(4)
        self._read_limiter = trio.CapacityLimiter(8)

    def free_bytes(self) -> int:
        """Bytes that shards may still take."""
        return self._shards.free_bytes()

    async def put(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a writing function in a thread; its errors become `PeerRefused`."""
        with refusing():
            return await trio.to_thread.run_sync(function, *arguments, limiter=self._write_limiter)

    async def put_shard(
        self, header: ShardHeader, ino: InodeNumber, path_hint: bytes, revision: int, hole_bytes: int = 0
    ) -> OwnSink:
        return OwnSink(self, await self.put(self._shards.begin, header, hole_bytes), ino, path_hint, revision)

    async def put_copies(self, copies: Sequence[SmallCopy]) -> list[bytes]:
        return await self.put(self._copies.put, copies)

    async def read_cell(self, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        """Read one cell, unchecked. Raises `ShardNotFound`, `ShardDamaged`."""
        return await self._read(self._read_cell, vid, index, stripe, buffer)

    def cells(self, vid: Vid, index: int, first: int) -> OwnCells:
        """The cells of a shard from that stripe on, unchecked."""
        return OwnCells(self._readers, vid, index, first)

    async def footer(self, vid: Vid, index: int) -> ShardFooter:
        def read() -> ShardFooter:
            with self._readers.borrow(vid, index) as reader:
                return reader.footer

        return await self._read(read)

    async def read_copy(self, vid: Vid) -> bytes:
        return (await self._read(self._copies.get, vid))[1]

    async def verify_shard(self, vid: Vid, index: int) -> VerifyResult:
        return await self._read(self._shards.verify, vid, index)

    async def read_segment(self, segment: SegmentId, offset: int, length: int) -> bytes:
        """Bytes of an own segment as they are now, short at its end."""

        def read() -> bytes:
            buffer = bytearray(length)
            return bytes(memoryview(buffer)[: self._segments.read(segment, offset, memoryview(buffer))])

        return await self._read(read)

    async def segment_status(self, segment: SegmentId) -> SegmentStatus:
        return await self._read(self._segments.status, segment)

    async def segment_hashes(self, segment: SegmentId, cell_size: int, first_cell: int, count: int) -> SegmentHashes:
        """The hashes of an own segment's cells, re-read from the drive."""
        still_wanted = trio.from_thread.check_cancelled
        return await self._read(self._segments.hashes, segment, cell_size, first_cell, count, still_wanted)

    def close(self) -> None:
        """Close the shards that are kept open for reading."""
        self._readers.close()

    async def _read(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._read_limiter)

    def _read_cell(self, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        with self._readers.borrow(vid, index) as reader:
            return reader.read_cell(stripe, buffer, check=False)
