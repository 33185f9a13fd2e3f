"""One pass over the stripes of a version, in which every shard that is rebuilt is sent the cells it lacks.

Each shard is a *lane*. Stripes that are whole go in runs: one thread takes k right cells from their holders, decodes those that
are wanted and sends them on. What a run can't do is done stripe by stripe. Nothing is sent that isn't proved by a table, or by
the shard's root before it gets its footer.
"""

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.cache.catalog_format import UNKNOWN_ROOT, Version
from ckptfs.cache.checksum import HASH_SIZE, cell_hash
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import PeerRefused, ReplicationError
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.stripe_reader import StripeReader, shard_root_of
from ckptfs.replication.stripe_run import StripedContent, StripeRun
from ckptfs.replication.striped_attempt import ShardSink
from ckptfs.replication.stripes import stripe_cells

STILL_THERE_SECONDS = 1.0
"""How often it is looked whether the version still is what it was; the commit compares that anyway."""

RUN_BYTES_MAX = 16 << 20
"""So much is sent in one run: the holders are asked again after that."""


@dataclass
class Lane:
    """One shard that is rebuilt. `store` is where it is put in this round. `table` is that of its cells, once it is proved;
    `hashes` are its first ones, where it has to be worked out. `root` is what its holder acknowledged."""

    index: int
    store: StoreId
    table: bytes | None = None
    root: bytes | None = None
    hashes: bytearray = field(default_factory=bytearray)
    next_stripe: int = 0
    sink: ShardSink | None = None
    failures: list[StoreId] = field(default_factory=list)
    useless: set[StoreId] = field(default_factory=set)
    problem: str = ""
    given_up: bool = False
    done: bool = False

    def needs(self, stripe: int) -> bool:
        """Whether its cell of that stripe is still to be sent, or hashed."""
        return self.next_stripe <= stripe or (self.table is None and len(self.hashes) <= stripe * HASH_SIZE)

    def note_hash(self, stripe: int, digest: bytes) -> None:
        """What its cell of that stripe hashes to, if that is what comes next."""
        if self.table is None and len(self.hashes) == stripe * HASH_SIZE:
            self.hashes += digest

    def give_up(self, problem: str) -> None:
        self.problem, self.given_up = problem, True

    async def fail(self, name: str, error: Exception) -> None:
        """Its store, of this name, said no or is away. The lane is closed; what fails twice there goes elsewhere."""
        self.problem = f"{name}: {error}"
        refused_for_good = isinstance(error, PeerRefused) and not error.retryable
        if refused_for_good or self.store in self.failures:
            self.useless.add(self.store)
        self.failures.append(self.store)
        await self.close()

    def require_root(self, content: StripedContent) -> None:
        """Give up if the shard with this table isn't the one that was acknowledged."""
        assert self.table is not None
        if content.version.shards[self.index].root not in (shard_root_of(content, self.index, self.table), UNKNOWN_ROOT):
            self.give_up("what follows from the other shards is not the shard that was acknowledged")

    async def close(self) -> None:
        if self.sink is not None:
            sink, self.sink = self.sink, None
            await sink.aclose()


class Each(Protocol):
    """Has an action done on all lanes at once; a lane whose holder says no is closed."""

    async def __call__(self, lanes: Iterable[Lane], act: Callable[[Lane], Awaitable[None]]) -> None: ...


class RepairPass:
    """`send` as often as need be. `pace` is told how many bytes were sent, `run_bytes_max` at most at a time; `require_unchanged`
    raises when the version has ended."""

    def __init__(
        self,
        reader: StripeReader,
        codec: Codec,
        threads: QuietThreads,
        pace: Callable[[int], Awaitable[None]],
        run_bytes_max: int,
        each: Each,
        require_unchanged: Callable[[Vid, Version], Awaitable[None]],
    ) -> None:
        self._reader = reader
        self._codec = codec
        self._threads = threads
        self._pace = pace
        self._run_bytes_max = run_bytes_max
        self._each = each
        self._require_unchanged = require_unchanged
        self._limiter = trio.CapacityLimiter(1)

    async def send(self, content: StripedContent, lanes: list[Lane], buffer: memoryview) -> None:
        """Send each lane, which is open, the cells it lacks. A lane that fails drops out. `buffer` has room for k+m cells."""
        geometry = content.geometry
        for lane in lanes:
            lane.hashes.clear()
        looked_at = -math.inf

        def live(stripe: int) -> list[Lane]:
            count = geometry.shard_cell_count
            return [lane for lane in lanes if lane.sink is not None and stripe < count(lane.index) and lane.needs(stripe)]

        for stripe in range(geometry.stripe_count):
            if not live(stripe):
                continue
            if trio.current_time() - looked_at >= STILL_THERE_SECONDS:
                await self._require_unchanged(content.vid, content.version)
                looked_at = trio.current_time()
            count = max(1, self._run_bytes_max // (len(live(stripe)) * geometry.cell_size))
            run = range(stripe, min(stripe + count, geometry.whole_stripe_count))
            if run:
                await self._send_run(content, run, live(stripe), buffer)
            if left := live(stripe):
                await self._send_stripe(content, stripe, left, buffer)
        for lane in lanes:
            if lane.sink is not None and lane.table is None:
                lane.table = bytes(lane.hashes)
                lane.require_root(content)
                if lane.given_up:
                    await lane.close()

    async def _send_run(self, content: StripedContent, stripes: range, lanes: list[Lane], buffer: memoryview) -> None:
        """Send the lanes their cells of these whole stripes, in one thread, as far as nothing is amiss."""
        failures: dict[int, Exception] = {}
        sent_bytes = 0

        def send(lane: Lane, stripe: int, cell: memoryview) -> bool:
            nonlocal sent_bytes
            assert lane.sink is not None
            digest = content.digest(lane.index, stripe) or cell_hash(cell)
            if lane.next_stripe <= stripe:
                if not lane.sink.send_cell_in_thread(stripe, cell, digest):
                    return False
                lane.next_stripe = stripe + 1
                sent_bytes += len(cell)
            lane.note_hash(stripe, digest)
            return True

        def send_run(run: StripeRun) -> None:
            for stripe in stripes:
                trio.from_thread.check_cancelled()
                wanted = {lane.index: lane for lane in lanes if lane.index not in failures and lane.needs(stripe)}
                if not wanted:
                    return
                for index, cell in run.next(stripe, list(wanted)).items():
                    try:
                        if not send(wanted[index], stripe, cell):
                            return
                    except (ReplicationError, OSError) as error:
                        failures[index] = error

        without = [lane.index for lane in lanes]
        async with self._reader.run(content, stripes, buffer, without=without) as run:
            if run is not None:
                await trio.to_thread.run_sync(send_run, run, limiter=self._limiter)

        async def fail(lane: Lane) -> None:
            raise failures[lane.index]

        await self._each([lane for lane in lanes if lane.index in failures], fail)
        await self._pace(sent_bytes)

    async def _send_stripe(self, content: StripedContent, stripe: int, lanes: list[Lane], buffer: memoryview) -> None:
        """Send the lanes their cells of one stripe, of whatever length, from whoever has what it takes."""
        await self._reader.read_stripe(content, stripe, buffer)
        cells = await self._threads.run(self._cells, content, stripe, buffer, [lane.index for lane in lanes])

        async def send(lane: Lane) -> None:
            cell, digest = cells[lane.index]
            assert lane.sink is not None
            if lane.table is not None and digest != lane.table[stripe * HASH_SIZE : (stripe + 1) * HASH_SIZE]:
                lane.give_up(f"the parity of stripe {stripe} is not that which was acknowledged")
                await lane.close()
                return
            lane.note_hash(stripe, digest)
            if lane.next_stripe <= stripe:
                await lane.sink.send_cell(stripe, cell, digest)
                lane.next_stripe = stripe + 1

        await self._each(lanes, send)
        await self._pace(sum(len(cells[lane.index][0]) for lane in lanes))

    def _cells(
        self, content: StripedContent, stripe: int, buffer: memoryview, indices: list[int]
    ) -> dict[int, tuple[memoryview, bytes]]:
        """The stripe's cells of those shards and their hashes; its data is in the buffer, proved. Runs in a thread."""
        geometry = content.geometry
        k, length = geometry.data_shards, geometry.code_length(stripe)
        data = stripe_cells(geometry, stripe, buffer)
        parity = [buffer[(k + row) * geometry.cell_size :][:length] for row in range(geometry.parity_shards)]
        if any(index >= k for index in indices):
            self._codec.encode(data, parity)
        cells = {}
        for index in indices:
            cell = [*data, *parity][index][: geometry.cell_length(stripe, index)]
            cells[index] = cell, cell_hash(cell)
        return cells
