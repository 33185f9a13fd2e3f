"""Checked content, as far and as fast as readers need it: in local copies, or through memory where the drive has no room.

A part is asked for by offset and length and answered when every stripe it touches is in the local copy and right. Stripes
are fetched by background tasks, several at a time within a bounded memory, each at most once however many ask for it; a
reader that goes forward is kept a few stripes behind the fetching. A version that isn't protected yet is fetched
whole from its home and checked against its content root before anybody sees a byte of it.

Copies make room for local saves: those used longest ago go when less than the reserve is free, and none is begun that would
not leave the reserve. What gets no copy is fetched as it is read, a few parts at a time (`passing_copies`).
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ckptfs.cache.catalog_format import ShardLayout, Version
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import Vid
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.home_content import HomeContent, SegmentReaders
from ckptfs.replication.local_copies import CopyFailed, CopyFull, CopyPlace, LocalCopies, LocalCopy
from ckptfs.replication.passing_copies import PassingCopy, PassingMemory
from ckptfs.replication.restore_parts import PartLoader, Source
from ckptfs.replication.stripe_reader import StripeReader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PASSING_BYTES_MAX = 32 << 20
"""Eight stripes of 4+2."""

PASSING_READS_MAX = 4
"""As many reads at a time find their parts together in memory: each touches two at most, but for large requests."""

PASSING_SECONDS = 10.0
"""After so long content that passes is given a copy if there is room now."""

COMPLAINT_SECONDS = 60.0
SOURCES_MAX = 128
"""Versions whose copies are kept open; each has a descriptor and its table of cell hashes."""

CELLS_AT_ONCE = 64
"""Of so many cells one thread looks for wrong ones without coming back."""


class Restorer:
    """Fetches content into local copies. `run` must be running; it owns the tasks that fetch.

    Buffers are counted: never more than `buffer_bytes_max` are in flight. `bytes_fetched` counts content put into local copies
    since the start, `bytes_passed` what was read without one; the reader counts cells.
    """

    def __init__(
        self, reader: StripeReader, homes: SegmentReaders, copies: LocalCopies, *, buffer_bytes_max: int = 24 << 20
    ) -> None:
        self._reader = reader
        self._copies = copies
        self._budget = BufferBudget(buffer_bytes_max)
        self._disk_limiter = trio.CapacityLimiter(4)
        self._home = HomeContent(homes, copies, self._disk_limiter)
        self._parts = PartLoader(reader, self._home, self._budget, self._disk_limiter)
        self._sources: OrderedDict[Vid, Source] = OrderedDict()
        self._opening: dict[Vid, trio.Lock] = {}
        self._last_used_at: dict[Vid, float] = {}
        self._passing = PassingMemory(PASSING_BYTES_MAX)
        self._passing_queue = trio.Lock()
        self._passing_reads = trio.Semaphore(PASSING_READS_MAX)
        self._full_until_seconds = float("-inf")
        self._complained_at_seconds = float("-inf")
        self._bytes_fetched = 0
        self.bytes_passed = 0

    @property
    def bytes_fetched(self) -> int:
        return self._bytes_fetched + self._home.bytes_fetched + self._parts.bytes_fetched

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._parts.nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._parts.nursery = None
            for source in self._sources.values():
                source.copy.close()
            self._sources.clear()

    async def fetch(self, vid: Vid, version: Version, offset: int, length: int) -> CopyPlace | bytes:
        """Return the local copy once this part of it is there and right: what is read from there needs no further check. Where
        the drive has no room for a copy, the bytes themselves, short at the end.

        Raises `ReplicationError`: `ContentUnreachable`, `ContentDamaged`, `CopyFailed`, `PeerUnreachable`.
        """
        while True:
            source = await self._use(vid, version)
            try:
                if isinstance(source.copy, PassingCopy):
                    return await self._pass(source, source.copy, offset, length)
                return await self._fetch_kept(source, source.copy, offset, length)
            except CopyFull:
                self._go_without_copy(vid)
            finally:
                self._release(source)

    async def _fetch_kept(self, source: Source, copy: LocalCopy, offset: int, length: int) -> CopyPlace:
        parts = source.parts(offset, length)
        await self._parts.require_proved(source, copy, parts, offset, length)
        if parts and offset <= source.next_offset + source.part_size:
            self._parts.read_ahead(source, parts.stop)
        source.next_offset = offset + length
        return copy.place

    async def _pass(self, source: Source, copy: PassingCopy, offset: int, length: int) -> bytes:
        for at_once in (1, PASSING_READS_MAX, PASSING_READS_MAX):
            async with self._passing_turns(at_once):  # all of them: nobody else's parts take the place of these
                data = copy.read(offset, length)
                if data is None:
                    await self._parts.require(source, source.parts(offset, length))
                    data = copy.read(offset, length)
            if data is not None:
                self.bytes_passed += len(data)
                return data
        raise CopyFailed("memory is too small for what the drive has no room to keep: read smaller parts")

    @contextlib.asynccontextmanager
    async def _passing_turns(self, count: int) -> AsyncIterator[None]:
        taken = 0
        try:
            async with self._passing_queue:
                while taken < count:
                    await self._passing_reads.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._passing_reads.release()

    async def fetch_whole(self, vid: Vid, version: Version) -> CopyPlace:
        """Return a local copy that is complete, right and synced. Raises as `fetch`, and `CopyFull`."""
        source = await self._use(vid, version, must_keep=True)
        copy = source.copy
        assert isinstance(copy, LocalCopy)
        try:
            for part in source.parts(0, version.size):
                length = min(source.part_size, version.size - part * source.part_size)
                await self._parts.require_proved(source, copy, range(part, part + 1), part * source.part_size, length)
            await self._in_thread(copy.sync)
            return copy.place
        except CopyFull:
            self._go_without_copy(vid)
            raise
        finally:
            self._release(source)

    async def keep_free(self, reserve_bytes: int) -> None:
        """So much is to stay free from now on, of which what copies take is released first."""
        self._copies.reserve_bytes = reserve_bytes
        await self.make_room()

    async def make_room(self, needed_bytes: int = 0, *, spare: Vid | None = None) -> bool:
        """Remove the copies used longest ago until `needed_bytes` are free besides the reserve; whether they are then."""
        if self._copies.has_room(needed_bytes):
            return True
        for vid in await self._in_thread(self._copies.evictable, dict(self._last_used_at)):
            source = self._sources.get(vid)
            if vid == spare or (source is not None and (source.users or source.loading)):
                continue
            self._forget(vid)  # an open copy takes its room until it is closed
            self._last_used_at.pop(vid, None)
            await self._in_thread(self._copies.evict, vid)
            if self._copies.has_room(needed_bytes):
                return True
        return False

    async def wrong_cells(self, vid: Vid, version: Version) -> tuple[int, list[int]]:
        """Hash what the local copy holds: how many cells it has, and which of them are wrong. Readers never see those: every
        cell is hashed again before it is read. Raises `CopyFailed`."""
        source = self._sources.get(vid)
        if source is not None and isinstance(source.copy, LocalCopy):
            source.users += 1
            try:
                return await self._wrong_cells(source.copy, source)
            finally:
                self._release(source)
        table = await self._in_thread(self._copies.table_of, vid, version.size, version.cell_size, version.root)
        if table is None or not await self._in_thread(self._copies.exists, vid):
            return 0, []
        copy = await self._open_copy(vid, version, table)
        try:
            return await self._wrong_cells(copy, None)
        finally:
            copy.close()

    async def _wrong_cells(self, copy: LocalCopy, source: Source | None) -> tuple[int, list[int]]:
        held, wrong = 0, list[int]()
        async with self._budget.take(copy.cell_size) as buffer:
            for first in range(0, len(copy.present), CELLS_AT_ONCE):
                count = min(CELLS_AT_ONCE, len(copy.present) - first)
                held_now, suspected = await self._in_thread(copy.wrong, first, count, buffer)
                held += held_now
                for cell in suspected:  # one that is being written may be half there
                    is_coming = source is not None and cell // source.part_cells in source.loading
                    if not is_coming and (await self._in_thread(copy.wrong, cell, 1, buffer))[1]:
                        wrong.append(cell)
        return held, wrong

    async def mend(self, vid: Vid, version: Version, cells: Sequence[int]) -> None:
        """Fetch these cells of the local copy anew, those that are wrong. Raises as `fetch`."""
        source = await self._use(vid, version)
        try:
            if not isinstance(source.copy, LocalCopy):  # no room: what there was of it is used by nobody
                await self._in_thread(self._copies.remove, vid)
                return
            for cell in cells:
                part = cell // source.part_cells
                offset = cell * source.copy.cell_size
                length = source.copy.cell_length(cell)
                await self._parts.require_proved(source, source.copy, range(part, part + 1), offset, length)
        finally:
            self._release(source)

    async def remove_copy(self, vid: Vid) -> None:
        """Remove the local copy unless somebody reads it now; it may be fetched again."""
        source = self._sources.get(vid)
        if source is None or not source.users:
            self._forget(vid)
            await self._in_thread(self._copies.remove, vid)

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

    async def _use(self, vid: Vid, version: Version, *, must_keep: bool = False) -> Source:
        """The version's source, opened if need be, with one user more. `must_keep`: with a local copy, even in the reserve."""
        lock = self._opening.setdefault(vid, trio.Lock())
        try:
            async with lock:
                source = self._sources.get(vid)
                if source is not None and (source.version.shards != version.shards or not source.copy.exists()):
                    self._forget(vid)
                    source = None
                passes = source is not None and isinstance(source.copy, PassingCopy)
                if source is not None and passes and (must_keep or source.passes_until_seconds < trio.current_time()):
                    self._forget(vid)
                    source = None
                if source is None:
                    source = self._sources[vid] = await self._open(vid, version, must_keep)
                source.users += 1
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._opening.pop(vid, None)
        self._sources.move_to_end(vid)
        if not isinstance(source.copy, PassingCopy):
            self._last_used_at[vid] = time.monotonic()
        return source

    async def _open(self, vid: Vid, version: Version, must_keep: bool) -> Source:
        if await self._may_keep(vid, version) or must_keep:
            try:
                return await self._open_kept(vid, version)
            except CopyFull:
                self._go_without_copy(vid)
                if must_keep:
                    raise
        return await self._open_passing(vid, version)

    async def _may_keep(self, vid: Vid, version: Version) -> bool:
        if trio.current_time() < self._full_until_seconds:
            return False
        missing = await self._in_thread(self._copies.missing_bytes, vid, version.size)
        try:
            return not missing or await self.make_room(missing, spare=vid)
        except OSError as error:
            logger.warning("copies-not-released error=%s", error)
            return False

    def _go_without_copy(self, vid: Vid) -> None:
        """The drive ran full while a copy was being made: no copy grows for a while. What there is of it goes when its time has
        come: readers may be just about to open it."""
        self._full_until_seconds = trio.current_time() + PASSING_SECONDS
        self._forget(vid)

    async def _open_kept(self, vid: Vid, version: Version) -> Source:
        if version.size == 0:
            return Source(await self._open_copy(vid, version, b""), None, version, 1, 1)
        table = await self._in_thread(self._copies.table_of, vid, version.size, version.cell_size, version.root)
        if not version.shards:
            if table is None:
                table = await self._home.forward(vid, version)
            copy = await self._open_copy(vid, version, table)
            return Source(copy, None, version, len(copy.present), version.size)
        if version.layout is ShardLayout.COPIES:
            if table is None:
                data = await self._reader.read_copy(vid, version)
                table = cell_hash(data)
                source = Source(await self._open_copy(vid, version, table), None, version, 1, version.size)
                await self._in_thread(source.copy.write, 0, memoryview(data))
                self._bytes_fetched += len(data)
                source.copy.present[0] = 1
                return source
            return Source(await self._open_copy(vid, version, table), None, version, 1, version.size)
        content = await self._reader.content(vid, version, table)
        copy = await self._open_copy(vid, version, content.table)
        k = version.data_shards
        return Source(copy, content, version, k, k * version.cell_size)

    async def _open_passing(self, vid: Vid, version: Version) -> Source:
        """Content without a local copy. Of a version that isn't striped a part is a cell."""
        now = trio.current_time()
        if now - self._complained_at_seconds >= COMPLAINT_SECONDS:
            self._complained_at_seconds = now
            logger.warning(
                "copy-not-kept vid=%s size=%d: no room besides the reserve, it passes through memory", vid.hex(), version.size
            )
        content = None
        cells = 1
        if not version.shards:
            table = b"" if version.size == 0 else await self._home.hash_at_home(vid, version)
        elif version.layout is ShardLayout.COPIES:
            table = cell_hash(await self._reader.read_copy(vid, version))
        else:
            content = await self._reader.content(vid, version)
            table, cells = content.table, version.data_shards
        cell_size = max(version.cell_size, 1)
        copy = PassingCopy(self._passing, vid, version.size, cell_size, table, cells * cell_size)
        return Source(copy, content, version, cells, copy.part_size, passes_until_seconds=now + PASSING_SECONDS)

    async def _open_copy(self, vid: Vid, version: Version, table: bytes) -> LocalCopy:
        return await self._in_thread(self._copies.open, vid, version.size, max(version.cell_size, 1), table)

    def _forget(self, vid: Vid) -> None:
        source = self._sources.pop(vid, None)
        if source is not None:
            source.is_kept = False
            source.close_unused()

    def _release(self, source: Source) -> None:
        source.users -= 1
        source.close_unused()
        self._shrink()

    def _shrink(self) -> None:
        """Close what was used longest ago and is not in use now."""
        if len(self._sources) <= SOURCES_MAX:
            return
        for vid, source in list(self._sources.items()):
            if not source.users and not source.loading:
                self._forget(vid)
                if len(self._sources) <= SOURCES_MAX:
                    return

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._disk_limiter)
