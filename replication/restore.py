"""Local copies filled with checked content, as far and as fast as readers need it.

A part is asked for by offset and length and answered when every stripe it touches is in the local copy and right. Stripes
are fetched by background tasks, several at a time within a bounded memory, each at most once however many ask for it; a
reader that goes forward is kept a few stripes behind the fetching. A version that isn't protected yet is fetched
whole from its home and checked against its content root before anybody sees a byte of it.
"""

import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from ckptfs.cache.catalog_format import ShardLayout, Version
from ckptfs.cache.checksum import cell_hash, content_root
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.errors import ReplicationError, ShardDamaged
from ckptfs.replication.local_copies import CopyFailed, LocalCopies, LocalCopy
from ckptfs.replication.stripe_reader import StripedContent, StripeReader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

READ_AHEAD_STRIPES = 4
PROOF_ATTEMPTS_MAX = 3
"""How far the fetching runs ahead of a sequential reader: 16 MiB at 4+2, what is in flight at once anyway."""

SOURCES_MAX = 128
"""Versions whose copies are kept open; each has a descriptor and its table of cell hashes."""

FORWARD_BYTES = 1 << 20


class SegmentReaders(Protocol):
    """How bytes of a version that isn't protected are read from its home."""

    async def read_segment(self, store: StoreId, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes: ...


@dataclass
class _Source:
    """One version being read. A *part* is a stripe, or the whole of a version that isn't striped; `loading` has an event for
    each part on its way and `errors` what became of those that failed."""

    copy: LocalCopy
    content: StripedContent | None
    version: Version
    part_cells: int
    part_size: int
    loading: dict[int, trio.Event] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    next_offset: int = 0
    users: int = 0
    is_kept: bool = True

    def has(self, part: int) -> bool:
        first = part * self.part_cells
        present = self.copy.present[first : first + self.part_cells]
        return present.count(1) == len(present)

    def parts(self, offset: int, length: int) -> range:
        end = min(offset + length, self.version.size)
        return range(offset // self.part_size, -(-end // self.part_size)) if offset < end else range(0)


class Restorer:
    """Fetches content into local copies. `run` must be running; it owns the tasks that fetch.

    Buffers are counted: never more than `buffer_bytes_max` are in flight. `bytes_fetched` counts content put into local copies
    since the start; the reader counts cells.
    """

    def __init__(
        self, reader: StripeReader, homes: SegmentReaders, copies: LocalCopies, *, buffer_bytes_max: int = 24 << 20
    ) -> None:
        self._reader = reader
        self._homes = homes
        self._copies = copies
        self._budget = BufferBudget(buffer_bytes_max)
        self._disk_limiter = trio.CapacityLimiter(4)
        self._sources: OrderedDict[Vid, _Source] = OrderedDict()
        self._opening: dict[Vid, trio.Lock] = {}
        self._last_used_at: dict[Vid, float] = {}
        self.bytes_fetched = 0
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for source in self._sources.values():
                source.copy.close()
            self._sources.clear()

    async def fetch(self, vid: Vid, version: Version, offset: int, length: int) -> Path:
        """Return the local copy once this part of it is there and right; what is read from there needs no further check.

        Raises `ReplicationError`: `ContentUnreachable`, `ContentDamaged`, `CopyFailed`, `PeerUnreachable`.
        """
        source = await self._use(vid, version)
        try:
            parts = source.parts(offset, length)
            await self._require_proved(source, parts, offset, length)
            if parts and offset <= source.next_offset + source.part_size:
                last = -(-version.size // source.part_size)
                for part in range(parts.stop, min(parts.stop + READ_AHEAD_STRIPES, last)):
                    self._start(source, part)
            source.next_offset = offset + length
            return source.copy.path
        finally:
            self._release(source)

    async def fetch_whole(self, vid: Vid, version: Version) -> Path:
        """Return a local copy that is complete, right and synced. Raises as `fetch`."""
        source = await self._use(vid, version)
        try:
            for part in source.parts(0, version.size):
                length = min(source.part_size, version.size - part * source.part_size)
                await self._require_proved(source, range(part, part + 1), part * source.part_size, length)
            await self._in_thread(source.copy.sync)
            return source.copy.path
        finally:
            self._release(source)

    async def remove_unwanted(self, is_wanted: Callable[[Vid], Awaitable[bool]]) -> int:
        """Remove the copies of versions that no longer are; returns how many."""
        removed = 0
        for vid in await self._in_thread(self._copies.vids):
            source = self._sources.get(vid)
            if (source is None or not source.users) and not await is_wanted(vid):
                self._forget(vid)
                await self._in_thread(self._copies.remove, vid)
                removed += 1
        return removed

    # ---- sources

    async def _use(self, vid: Vid, version: Version) -> _Source:
        """The version's source, opened if need be, with one user more."""
        lock = self._opening.setdefault(vid, trio.Lock())
        try:
            async with lock:
                source = self._sources.get(vid)
                if source is not None and (source.version.shards != version.shards or not source.copy.exists()):
                    self._forget(vid)
                    source = None
                if source is None:
                    source = self._sources[vid] = await self._open(vid, version)
                source.users += 1
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._opening.pop(vid, None)
        self._sources.move_to_end(vid)
        self._last_used_at[vid] = time.time()
        return source

    async def _open(self, vid: Vid, version: Version) -> _Source:
        evicted = await self._in_thread(self._copies.make_room, version.size, dict(self._last_used_at))
        for gone in evicted:
            self._last_used_at.pop(gone, None)
        if version.size == 0:
            return _Source(await self._open_copy(vid, version, b""), None, version, 1, 1)
        table = await self._in_thread(self._copies.table_of, vid, version.size, version.cell_size, version.root)
        if not version.shards:
            return await self._open_forwarded(vid, version, table)
        if version.layout is ShardLayout.COPIES:
            if table is None:
                data = await self._reader.read_copy(vid, version)
                table = cell_hash(data)
                source = _Source(await self._open_copy(vid, version, table), None, version, 1, version.size)
                await self._in_thread(source.copy.write, 0, memoryview(data))
                self.bytes_fetched += len(data)
                source.copy.present[0] = 1
                return source
            return _Source(await self._open_copy(vid, version, table), None, version, 1, version.size)
        content = await self._reader.content(vid, version, table)
        copy = await self._open_copy(vid, version, content.table)
        k = version.data_shards
        return _Source(copy, content, version, k, k * version.cell_size)

    async def _open_copy(self, vid: Vid, version: Version, table: bytes) -> LocalCopy:
        return await self._in_thread(self._copies.open, vid, version.size, max(version.cell_size, 1), table)

    async def _open_forwarded(self, vid: Vid, version: Version, table: bytes | None) -> _Source:
        """A local version: all of it from its home, checked as a whole."""
        if table is None:
            table = await self._forward(vid, version)
        copy = await self._open_copy(vid, version, table)
        return _Source(copy, None, version, len(copy.present), version.size)

    async def _forward(self, vid: Vid, version: Version) -> bytes:
        path = self._copies.path_of(vid)
        temporary = path.with_name(path.name + ".fetching")
        table = bytearray()
        descriptor = await self._in_thread(_create, temporary)
        try:
            for offset in range(0, version.size, version.cell_size):
                cell = bytearray()
                end = min(version.size, offset + version.cell_size)
                while offset + len(cell) < end:
                    start = offset + len(cell)
                    data = await self._homes.read_segment(
                        version.home, vid, version.segment, start, min(FORWARD_BYTES, end - start)
                    )
                    if not data:
                        raise ShardDamaged(f"the home's file ends at byte {start} of {version.size}")
                    cell += data
                table += cell_hash(cell)
                await self._in_thread(_write_at, descriptor, cell, offset)
                self.bytes_fetched += len(cell)
            if content_root(vid, version.size, version.cell_size, table) != version.root:
                raise ShardDamaged("the home's file does not hold what was hashed when it was closed")
            await self._in_thread(os.replace, temporary, path)
        except OSError as error:
            raise CopyFailed(f"the local copy {path} can't be written: {error.strerror}") from None
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        return bytes(table)

    def _forget(self, vid: Vid) -> None:
        source = self._sources.pop(vid, None)
        if source is not None:
            source.is_kept = False
            self._close_unused(source)

    def _release(self, source: _Source) -> None:
        source.users -= 1
        self._close_unused(source)
        self._shrink()

    @staticmethod
    def _close_unused(source: _Source) -> None:
        if not source.is_kept and not source.users and not source.loading:
            source.copy.close()

    def _shrink(self) -> None:
        """Close what was used longest ago and is not in use now."""
        if len(self._sources) <= SOURCES_MAX:
            return
        for vid, source in list(self._sources.items()):
            if not source.users and not source.loading:
                self._forget(vid)
                if len(self._sources) <= SOURCES_MAX:
                    return

    # ---- parts

    async def _require(self, source: _Source, parts: range) -> None:
        """Return when all parts are there. Starts them in order, a bounded number ahead."""
        for part in parts:
            for ahead in range(part, min(part + READ_AHEAD_STRIPES, parts.stop)):
                self._start(source, ahead)
            while not source.has(part):
                event = source.loading.get(part)
                if event is None:
                    error = source.errors.pop(part, None)
                    if error is not None:
                        raise error
                    self._start(source, part)
                    continue
                await event.wait()

    async def _require_proved(self, source: _Source, parts: range, offset: int, length: int) -> None:
        """Have the parts, and hash the cells of this range again: what was right when it was written lies on a drive since then.

        Cells that are wrong are fetched anew. Hashing a MiB that is in memory takes a tenth of fetching it.
        """
        copy = source.copy
        for _ in range(PROOF_ATTEMPTS_MAX):
            await self._require(source, parts)
            if not parts:
                return
            first, last = offset // copy.cell_size, -(-min(offset + length, copy.size) // copy.cell_size)
            async with self._budget.take(copy.cell_size) as buffer:
                right = set(await self._in_thread(copy.check, first, last - first, buffer))
            wrong = [cell for cell in range(first, last) if cell not in right]
            if not wrong:
                return
            logger.warning("copy-damaged vid=%s cells=%d: fetched anew", copy.vid.hex(), len(wrong))
            for cell in wrong:
                copy.present[cell] = 0
        raise CopyFailed(f"the local copy {copy.path} is damaged each time it is written: check the drive")

    def _start(self, source: _Source, part: int) -> None:
        if source.has(part) or part in source.loading:
            return
        if self._nursery is None:
            raise AssertionError("the restorer isn't running")
        source.errors.pop(part, None)
        source.loading[part] = trio.Event()
        self._nursery.start_soon(self._load, source, part)

    async def _load(self, source: _Source, part: int) -> None:
        try:
            await self._load_part(source, part)
        except ReplicationError as error:
            source.errors[part] = error
        finally:
            source.loading.pop(part).set()
            self._close_unused(source)

    async def _load_part(self, source: _Source, part: int) -> None:
        copy, version = source.copy, source.version
        first = part * source.part_cells
        cells = min(source.part_cells, len(copy.present) - first)
        shards = version.data_shards + version.parity_shards if source.content else 1
        async with self._budget.take(shards * copy.cell_size) as buffer:
            if copy.may_hold_cells:
                for cell in await self._in_thread(copy.check, first, cells, buffer[: copy.cell_size]):
                    copy.present[cell] = 1
                if source.has(part):
                    return
            if source.content is not None:
                data = await self._reader.read_stripe(source.content, part, buffer)
            elif version.shards:
                data = memoryview(await self._reader.read_copy(copy.vid, version))
            else:
                await self._refetch_forwarded(source)
                return
            await self._in_thread(copy.write, part * source.part_size, data)
        self.bytes_fetched += len(data)
        copy.present[first : first + cells] = b"\1" * cells

    async def _refetch_forwarded(self, source: _Source) -> None:
        """The copy of a local version lost bytes since it was made: make it anew, cell by cell from the home."""
        copy, version = source.copy, source.version
        for cell in range(len(copy.present)):
            offset, length = cell * copy.cell_size, copy.cell_length(cell)
            data = await self._homes.read_segment(version.home, copy.vid, version.segment, offset, length)
            if cell_hash(data) != copy.cell_digest(cell):
                raise ShardDamaged(f"cell {cell} of the home's file is not what was hashed when it was closed")
            await self._in_thread(copy.write, offset, memoryview(data))
            copy.present[cell] = 1

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._disk_limiter)


def _create(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write_at(descriptor: int, data: bytearray, offset: int) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
