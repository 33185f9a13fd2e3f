"""Fetching a version part by part, in the background: each part at most once however many ask for it, in a bounded memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.checksum import cell_hash
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.errors import ReplicationError, ShardDamaged
from ckptfs.replication.home_content import HomeContent
from ckptfs.replication.local_copies import CopyFailed, LocalCopy
from ckptfs.replication.passing_copies import PassingCopy
from ckptfs.replication.stripe_reader import StripeReader
from ckptfs.replication.stripe_run import StripedContent, StripeRun

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RUN_STRIPES = 4
"""So many are fetched at once, one after another, for a reader that goes forward: each request to a holder is for so many cells.
A run needs the memory of one stripe."""

READ_AHEAD_STRIPES = 2 * RUN_STRIPES
"""How far the fetching runs ahead of a sequential reader: while one run is read, two are under way."""

RUNS_MAX = 4
"""Threads that fetch at once; the memory bounds them too."""

PROOF_ATTEMPTS_MAX = 3
PROOF_BYTES_MAX = 8 << 20
"""For cells that are hashed again: in the budget of the stripes they would drive those out that are kept for the next."""


@dataclass
class Source:
    """One version being read. A *part* is a stripe, or the whole of a version that isn't striped; `loading` has an event for
    each part on its way and `errors` what became of those that failed."""

    copy: LocalCopy | PassingCopy
    content: StripedContent | None
    version: Version
    part_cells: int
    part_size: int
    loading: dict[int, trio.Event] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    next_offset: int = 0
    users: int = 0
    is_kept: bool = True
    passes_until_seconds: float = 0.0

    def has(self, part: int) -> bool:
        first = part * self.part_cells
        present = self.copy.present[first : first + self.part_cells]
        return present.count(1) == len(present)

    def parts(self, offset: int, length: int) -> range:
        end = min(offset + length, self.version.size)
        return range(offset // self.part_size, -(-end // self.part_size)) if offset < end else range(0)

    def close_unused(self) -> None:
        """Close the copy if nobody needs it any more."""
        if not self.is_kept and not self.users and not self.loading:
            self.copy.close()


class PartLoader:
    """Fetches parts in tasks of `nursery`, which the restorer sets while it runs. `bytes_fetched` counts what went into local
    copies since the start."""

    def __init__(self, reader: StripeReader, home: HomeContent, budget: BufferBudget, disk_limiter: trio.CapacityLimiter) -> None:
        self.nursery: trio.Nursery | None = None
        self.bytes_fetched = 0
        self._reader = reader
        self._home = home
        self._budget = budget
        self._proof_budget = BufferBudget(PROOF_BYTES_MAX)
        self._disk_limiter = disk_limiter
        self._run_limiter = trio.CapacityLimiter(RUNS_MAX)

    async def require(self, source: Source, parts: range) -> None:
        """Return when all parts are there. Starts them in order, a bounded number ahead."""
        for part in parts:
            for ahead in range(part, min(part + READ_AHEAD_STRIPES, parts.stop)):
                self.start(source, ahead, parts.stop)
            while not source.has(part):
                event = source.loading.get(part)
                if event is None:
                    error = source.errors.pop(part, None)
                    if error is not None:
                        raise error
                    self.start(source, part)
                    continue
                await event.wait()

    async def require_proved(self, source: Source, copy: LocalCopy, parts: range, offset: int, length: int) -> None:
        """Have the parts, and hash the cells of this range again: what was right when it was written lies on a drive since then.

        Cells that are wrong are fetched anew. Hashing a MiB that is in memory takes a tenth of fetching it.
        """
        for _ in range(PROOF_ATTEMPTS_MAX):
            await self.require(source, parts)
            if not parts:
                return
            first, last = offset // copy.cell_size, -(-min(offset + length, copy.size) // copy.cell_size)
            async with self._proof_budget.take(copy.cell_size) as buffer:
                right = set(await self._in_thread(copy.check, first, last - first, buffer))
            wrong = [cell for cell in range(first, last) if cell not in right]
            if not wrong:
                return
            logger.warning("copy-damaged vid=%s cells=%d: fetched anew", copy.vid.hex(), len(wrong))
            for cell in wrong:
                copy.present[cell] = 0
        raise CopyFailed(f"the local copy {copy.path} is damaged each time it is written: check the drive")

    def read_ahead(self, source: Source, part: int) -> None:
        """Have the parts from this one on fetched, in whole runs, for a reader that goes forward."""
        last = -(-source.copy.size // source.part_size)
        for ahead in range(part, min(part + READ_AHEAD_STRIPES, last)):
            self.start(source, ahead, min((ahead // RUN_STRIPES + 1) * RUN_STRIPES, last))

    def start(self, source: Source, part: int, stop: int = 0) -> None:
        """Have the part fetched, unless it is there or on its way; with it those up to `stop` that can be fetched in one run."""
        if source.has(part) or part in source.loading:
            return
        if self.nursery is None:
            raise AssertionError("the restorer isn't running")
        copy, content = source.copy, source.content
        whole = 0
        if content is not None and isinstance(copy, LocalCopy) and not copy.may_hold_cells:
            whole = content.geometry.whole_stripe_count
        last = part + 1
        while last < min(stop, part + RUN_STRIPES, whole) and not source.has(last) and last not in source.loading:
            last += 1
        for one in range(part, last):
            source.errors.pop(one, None)
            source.loading[one] = trio.Event()
        if last <= whole:
            assert content is not None
            assert isinstance(copy, LocalCopy)
            self.nursery.start_soon(self._load_run, source, copy, content, range(part, last))
        else:
            self.nursery.start_soon(self._load, source, part)

    async def _load_run(self, source: Source, copy: LocalCopy, content: StripedContent, parts: range) -> None:
        """Fetch these whole stripes, one after another in one thread, as far as nothing is amiss, and the others one by one."""
        own = {part: source.loading[part] for part in parts}
        done: list[int] = []
        token = trio.lowlevel.current_trio_token()
        data_cells = range(content.version.data_shards)

        def arrived(part: int) -> None:
            if source.loading.get(part) is own[part]:
                self.bytes_fetched += source.part_size
                first = part * source.part_cells
                copy.present[first : first + source.part_cells] = b"\1" * source.part_cells
                source.loading.pop(part).set()

        def load_run(run: StripeRun, buffer: memoryview) -> None:
            for part in parts:
                trio.from_thread.check_cancelled()
                run.next(part, data_cells)
                copy.write(part * source.part_size, buffer[: source.part_size])
                done.append(part)
                token.run_sync_soon(arrived, part)

        try:
            async with (
                self._budget.take(content.geometry.shard_count * copy.cell_size) as buffer,
                self._reader.run(content, parts, buffer) as run,
            ):
                if run is not None:
                    await trio.to_thread.run_sync(load_run, run, buffer, limiter=self._run_limiter)
        except ReplicationError as error:  # of the copy: it is found out of each part below
            logger.info("run-broken vid=%s error=%s", copy.vid.hex(), error)
        finally:
            for part in done:
                arrived(part)
            async with trio.open_nursery() as nursery:
                for part, event in own.items():
                    if source.loading.get(part) is event:
                        nursery.start_soon(self._load, source, part)
            source.close_unused()

    async def _load(self, source: Source, part: int) -> None:
        try:
            await self._load_part(source, part)
        except ReplicationError as error:
            source.errors[part] = error
        finally:
            source.loading.pop(part).set()
            source.close_unused()

    async def _load_part(self, source: Source, part: int) -> None:
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
                await self._load_from_home(source, range(first, first + cells))
                return
            await self._in_thread(copy.write, part * source.part_size, data)
        if not isinstance(copy, PassingCopy):
            self.bytes_fetched += len(data)
        copy.present[first : first + cells] = b"\1" * cells

    async def _load_from_home(self, source: Source, cells: range) -> None:
        """Cells of a local version: of one that passes, or of a copy that lost bytes since it was made."""
        copy, version = source.copy, source.version
        for cell in cells:
            data = await self._home.cell_at_home(copy.vid, version, cell * copy.cell_size)
            if cell_hash(data) != copy.cell_digest(cell):
                raise ShardDamaged(f"cell {cell} of the home's file is not what was hashed when it was closed")
            await self._in_thread(copy.write, cell * copy.cell_size, memoryview(data))
            copy.present[cell] = 1

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._disk_limiter)
