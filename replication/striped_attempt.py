"""One attempt to put all shards of one version on their holders.

The version's segment is read stripe by stripe, in passes. In a pass each stripe is read once into a buffer of a small set;
hashes, parity and the bytes that are sent come from that buffer, so they belong together whatever happens to the file
meanwhile. A stripe that is a hole is not read: its cells are zeros, which are neither sent nor stored. Every holder is a *lane*
with a task of its own; a buffer is used again when all lanes are done with it. A lane whose holder fails drops out of the pass;
a later pass reads the rest for it again, from where the holder says it stands, or from the start for the store that takes its
place. What is read again must have the hashes it had before.

No lane gets its footer, without which a shard file is nothing, before all cell hashes together gave the content root
the catalog has, and all other lanes have their cells too. So bytes that changed after they were hashed on their home never
become a valid shard, and an attempt that loses a holder on the way leaves only what the next one can go on with or
write over. Complete shards of an earlier attempt with another code may still be in the way (its last step was cut off): a
store that refuses one index for that reason takes another.
"""

import logging
import math
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import trio

from ckptfs.cache.catalog_format import Shard
from ckptfs.cache.checksum import HASH_SIZE, cell_hash, content_root, shard_root
from ckptfs.cache.errors import CacheError
from ckptfs.cache.holes import Holes, zero_hash
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import NotEnoughDomains, PeerRefused, PeerUnreachable, RefusalReason, ReplicationError
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.stripes import Geometry, stripe_cells

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

REPLACE_AFTER_SECONDS = 4.0
"""For how long a holder that failed is tried again before another store takes its shard: a restarted agent is back sooner."""

HANG_SECONDS = 5.0
"""A holder that takes in nothing for this long, and doesn't answer pings either, has its shard taken away: one that hangs
would hold up all others until the connection's own, much longer limit."""

RETRY_SECONDS_MIN = 0.1

HOLE_STRIPES_MAX = 1 << 14
"""Of a larger hole so many stripes at once, so that nobody waits for the tables that are filled."""


class AttemptVoid(Exception):
    """The version ended or its bytes changed while it was being protected; nothing was committed and nothing is lost."""


class ContentChanged(AttemptVoid):
    """The bytes read are not those that were hashed when the file was closed, or can't be read."""


class SegmentDamaged(Exception):
    """The segment's bytes don't match the content root although nothing can have written them: the drive must be looked at. It is
    always that of the one version that was tried."""


class ShardSink(Protocol):
    """One shard on its way to its holder."""

    @property
    def resume_stripe(self) -> int:
        """The first stripe whose cell the holder doesn't have yet."""

    async def send_cell(self, stripe: int, cell: memoryview, digest: bytes) -> None:
        """Hand over the next cell. The buffer is not used after the return. Raises `ReplicationError` or `OSError`."""

    def send_cell_in_thread(self, stripe: int, cell: memoryview, digest: bytes) -> bool:
        """As `send_cell`, from a thread of `trio.to_thread`; False if nothing was done and it is to come by `send_cell`."""

    async def send_zeros(self, stripe: int, count: int) -> None:
        """As `send_cell`, for so many cells of zeros from this stripe on."""

    async def finish(self, own_table: bytes, content_table: bytes) -> bytes:
        """Complete the shard durably; returns the root of what the holder stored."""

    async def aclose(self) -> None:
        """Give up if not finished; what the holder has may be resumed."""


OpenSink = Callable[[StoreId, int], Awaitable[ShardSink]]
"""Opens shard `index` at a store. Raises `ReplicationError` or `OSError`."""


@dataclass
class _Lane:
    index: int
    store: StoreId
    cell_count: int
    next_stripe: int = 0
    sink: ShardSink | None = None
    root: bytes | None = None
    reached: bool = False
    error: Exception | None = None
    failing_since_seconds: float | None = None
    busy_since_seconds: float | None = None
    busy_scope: trio.CancelScope | None = None

    def assign(self, store: StoreId) -> None:
        """Begin anew with this store. The lane is closed."""
        self.store, self.next_stripe, self.reached, self.error, self.failing_since_seconds = store, 0, False, None, None


@dataclass
class _LoadedStripe:
    """A stripe's buffer on its way through the lanes; `users` counts those that are not done with it. With `hole_count` it stands
    for so many stripes that are holes, from its own number on; its cells are nothing then."""

    number: int
    buffer: memoryview
    hole_count: int = 0
    cells: list[memoryview] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    ready: trio.Event = field(default_factory=trio.Event)
    users: int = 0


class StripedAttempt:
    """Use once: `run`. The owner keeps `descriptor` open and `buffer` to itself until `run` has returned or raised.

    `replace(index, used)` names another store for a shard, given the stores in use, or raises `NotEnoughDomains`;
    `note_failure` hears of each failure of a holder, `is_away` says whether one answers pings. `still_wanted` is asked at every
    pass.
    """

    def __init__(
        self,
        vid: Vid,
        root: bytes,
        geometry: Geometry,
        descriptor: int,
        buffer: memoryview,
        codec: Codec,
        threads: QuietThreads,
        open_sink: OpenSink,
        replace: Callable[[int, Sequence[StoreId]], Awaitable[StoreId]],
        note_failure: Callable[[StoreId, Exception], None],
        still_wanted: Callable[[], Awaitable[None]],
        is_away: Callable[[StoreId], bool],
        *,
        replace_after_seconds: float = REPLACE_AFTER_SECONDS,
        hang_seconds: float = HANG_SECONDS,
    ) -> None:
        self._vid = vid
        self._root = root
        self._geometry = geometry
        self._descriptor = descriptor
        self._holes = Holes(descriptor)
        self._zero_hashes = [zero_hash(geometry.cell_size)] * geometry.shard_count
        self._codec = codec
        self._threads = threads
        self._open_sink = open_sink
        self._replace = replace
        self._note_failure = note_failure
        self._still_wanted = still_wanted
        self._is_away = is_away
        self._replace_after_seconds = replace_after_seconds
        self._hang_seconds = hang_seconds
        stripe_bytes = stripe_buffer_size(geometry)
        self._buffers = [buffer[at : at + stripe_bytes] for at in range(0, len(buffer) - stripe_bytes + 1, stripe_bytes)]
        if not self._buffers:
            raise ValueError(f"a buffer of {len(buffer)} bytes for stripes of {stripe_bytes}")
        self._hashes: list[list[bytes] | None] = [None] * geometry.stripe_count
        self._unhashed_count = geometry.stripe_count
        self._failure: Exception | None = None
        self._conflicts: set[tuple[StoreId, int]] = set()

    async def run(self, stores: Sequence[StoreId]) -> list[Shard]:
        """Send shard i to stores[i] and return the shards as they were acknowledged.

        Raises `AttemptVoid`, `SegmentDamaged`, or what made the attempt fail: `ReplicationError`, `CacheError`, `OSError`.
        """
        lanes = [_Lane(index, store, self._geometry.shard_cell_count(index)) for index, store in enumerate(stores)]
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_for_hangs, lanes)
                try:
                    await self._run(lanes)
                except (AttemptVoid, ReplicationError, CacheError, OSError) as error:
                    failure = error  # raised below, where the nursery can't wrap it
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                for lane in lanes:
                    await self._close(lane)
        if failure is not None:
            raise failure
        return [Shard(lane.store, lane.root or b"") for lane in lanes]

    async def _run(self, lanes: list[_Lane]) -> None:
        while unfinished := [lane for lane in lanes if lane.root is None]:
            await self._still_wanted()
            await self._open_all(lanes, unfinished)
            await self._pass([lane for lane in unfinished if lane.sink is not None])
            await self._finish_all(unfinished)

    async def _watch_for_hangs(self, lanes: list[_Lane]) -> None:
        while True:
            await trio.sleep(self._hang_seconds / 5)
            for lane in lanes:
                since = lane.busy_since_seconds
                if since is not None and trio.current_time() - since >= self._hang_seconds and self._is_away(lane.store):
                    assert lane.busy_scope is not None
                    lane.busy_scope.cancel()

    async def _unless_hung(self, lane: _Lane, call: Awaitable[Result]) -> Result:
        """Await what the lane's holder does. Raises `PeerUnreachable` when it hangs; the lane is not opened again then."""
        lane.busy_since_seconds = trio.current_time()
        try:
            with trio.CancelScope() as lane.busy_scope:
                return await call
        finally:
            lane.busy_since_seconds = None
        lane.failing_since_seconds = -math.inf
        raise PeerUnreachable(f"it hangs: nothing was taken in for {self._hang_seconds:g} s, and it doesn't answer pings")

    async def _open_all(self, lanes: list[_Lane], unfinished: list[_Lane]) -> None:
        """Open the lanes that are not open. A holder that can't be reached is tried again for a while if it was reached
        before, and replaced otherwise; afterwards at least one unfinished lane is open."""
        while True:
            closed = [lane for lane in unfinished if lane.sink is None]
            if any(lane.failing_since_seconds is not None for lane in closed):
                await trio.sleep(RETRY_SECONDS_MIN * (1 + random.random()))
            if any((lane.store, lane.index) in self._conflicts for lane in closed):
                await self._swap(unfinished)
                closed = [lane for lane in unfinished if lane.sink is None]
            for lane in closed:
                if self._is_given_up(lane):
                    await self._move(lane, lanes)
            async with trio.open_nursery() as nursery:
                for lane in closed:
                    nursery.start_soon(self._open, lane)
            if all(lane.sink is not None for lane in unfinished):
                return
            if any(lane.sink is not None for lane in unfinished) and not any(self._is_given_up(lane) for lane in unfinished):
                return  # go on with those; the others are tried again after this pass

    async def _swap(self, unfinished: list[_Lane]) -> None:
        """Give the stores of unfinished lanes other indices, so that none has one it refused; most keep theirs. Where that
        can't be, the lanes in conflict stay as they are, to be moved to other stores."""
        homeless = [lane for lane in unfinished if (lane.store, lane.index) in self._conflicts]
        taken: dict[StoreId, _Lane | None] = {lane.store: None if lane in homeless else lane for lane in unfinished}
        assigned = _match(homeless, taken, self._conflicts)
        for lane, store in assigned:
            if lane.store != store:
                await self._close(lane)
                lane.assign(store)

    def _is_given_up(self, lane: _Lane) -> bool:
        if lane.error is None or lane.failing_since_seconds is None:
            return False
        if trio.current_time() - lane.failing_since_seconds >= self._replace_after_seconds:
            return True
        return not lane.error.retryable if isinstance(lane.error, PeerRefused) else not lane.reached

    async def _move(self, lane: _Lane, lanes: list[_Lane]) -> None:
        try:
            store = await self._replace(lane.index, [other.store for other in lanes])
        except NotEnoughDomains as shortage:
            raise NotEnoughDomains(
                f"shard {lane.index} has lost its holder ({lane.error}) and has no other: {shortage}"
            ) from None
        logger.info("shard-moves vid=%s index=%d from=%s to=%s", self._vid.hex(), lane.index, lane.store.hex(), store.hex())
        lane.assign(store)

    async def _open(self, lane: _Lane) -> None:
        try:
            lane.sink = await self._unless_hung(lane, self._open_sink(lane.store, lane.index))
        except (ReplicationError, OSError) as error:
            if isinstance(error, PeerRefused) and error.reason is RefusalReason.CONFLICT:
                self._conflicts.add((lane.store, lane.index))
            await self._fail(lane, error)
            return
        lane.next_stripe, lane.reached, lane.error = lane.sink.resume_stripe, True, None

    async def _fail(self, lane: _Lane, error: Exception) -> None:
        lane.error = error
        if lane.failing_since_seconds is None:
            lane.failing_since_seconds = trio.current_time()
        self._note_failure(lane.store, error)
        await self._close(lane)

    async def _close(self, lane: _Lane) -> None:
        if lane.sink is not None:
            sink, lane.sink = lane.sink, None
            await sink.aclose()

    # ---- one pass over the segment

    async def _pass(self, lanes: list[_Lane]) -> None:
        first = 0 if self._unhashed_count else min(min(lane.next_stripe, lane.cell_count) for lane in lanes)
        stripe_count = self._geometry.stripe_count
        if not self._unhashed_count and all(lane.next_stripe >= lane.cell_count for lane in lanes):
            return
        free_send, free_receive = trio.open_memory_channel[memoryview](len(self._buffers))
        loaded_send, loaded_receive = trio.open_memory_channel[_LoadedStripe](len(self._buffers))
        for buffer in self._buffers:
            free_send.send_nowait(buffer)
        self._failure = None

        def done(stripe: _LoadedStripe) -> None:
            stripe.users -= 1
            if stripe.users == 0:
                free_send.send_nowait(stripe.buffer)

        async with trio.open_nursery() as nursery:

            async def load(stripe: _LoadedStripe) -> None:
                try:
                    if stripe.hole_count:
                        stripe.hashes = self._zero_hashes
                    else:
                        stripe.cells, stripe.hashes = await self._threads.run(self._load, stripe.number, stripe.buffer)
                    self._check_again(stripe)
                except (AttemptVoid, OSError) as error:
                    self._failure = error
                    nursery.cancel_scope.cancel()
                stripe.ready.set()

            async def load_all() -> None:
                async with loaded_send:
                    number = first
                    while number < stripe_count:
                        stripe = _LoadedStripe(number, await free_receive.receive(), self._hole_count(number))
                        nursery.start_soon(load, stripe)
                        await loaded_send.send(stripe)
                        number += stripe.hole_count or 1

            queues: list[trio.MemorySendChannel[_LoadedStripe]] = []
            for lane in lanes:
                send, receive = trio.open_memory_channel[_LoadedStripe](len(self._buffers))
                queues.append(send)
                nursery.start_soon(self._feed, lane, receive, done)
            nursery.start_soon(load_all)
            async for stripe in loaded_receive:
                await stripe.ready.wait()
                if self._failure is None and all(lane.sink is None for lane in lanes):
                    nursery.cancel_scope.cancel()
                    await trio.lowlevel.checkpoint()
                stripe.users = len(queues)
                for queue in queues:
                    queue.send_nowait(stripe)
            for queue in queues:
                queue.close()
        if self._failure is not None:
            raise self._failure

    async def _feed(
        self, lane: _Lane, stripes: trio.MemoryReceiveChannel[_LoadedStripe], done: Callable[[_LoadedStripe], None]
    ) -> None:
        async for stripe in stripes:
            end = stripe.number + (stripe.hole_count or 1)
            if lane.sink is not None and stripe.number <= lane.next_stripe < min(end, lane.cell_count):
                try:
                    await self._unless_hung(lane, self._send(lane.sink, lane, stripe))
                except (ReplicationError, OSError) as error:
                    await self._fail(lane, error)
                else:
                    lane.next_stripe = end
                    lane.failing_since_seconds = None
            done(stripe)

    async def _send(self, sink: ShardSink, lane: _Lane, stripe: _LoadedStripe) -> None:
        if stripe.hole_count:
            await sink.send_zeros(lane.next_stripe, stripe.number + stripe.hole_count - lane.next_stripe)
        else:
            cell = stripe.cells[lane.index][: self._geometry.cell_length(stripe.number, lane.index)]
            await sink.send_cell(stripe.number, cell, stripe.hashes[lane.index])

    def _hole_count(self, number: int) -> int:
        """How many stripes from this one on are whole and holes. Asks the file system for what it has in memory: in no thread."""
        length, size = self._geometry.data_shards * self._geometry.cell_size, self._geometry.size
        count = 0
        while (number + count + 1) * length <= size and count < HOLE_STRIPES_MAX:
            if not self._holes.cover((number + count) * length, length):
                break
            count += 1
        return count

    def _load(self, number: int, buffer: memoryview) -> tuple[list[memoryview], list[bytes]]:
        """Read, encode and hash one stripe; runs in a thread. Returns its k+m cells and their hashes, empty for no cell."""
        geometry = self._geometry
        k = geometry.data_shards
        length, offset = geometry.stripe_length(number), geometry.stripe_offset(number)
        filled = 0
        while filled < length:
            try:
                count = os.preadv(self._descriptor, [buffer[filled:length]], offset + filled)
            except OSError as error:
                raise ContentChanged(f"the segment can't be read at byte {offset + filled}: {error.strerror}") from None
            if count == 0:
                raise ContentChanged(f"the segment ends at byte {offset + filled} of {geometry.size}")
            filled += count
        data = stripe_cells(geometry, number, buffer)
        code_length = geometry.code_length(number)
        parity = [buffer[(k + row) * geometry.cell_size :][:code_length] for row in range(geometry.parity_shards)]
        self._codec.encode(data, parity)
        cells = [*data, *parity]
        lengths = [geometry.cell_length(number, index) for index in range(geometry.shard_count)]
        return cells, [cell_hash(cell[:size]) if size else b"" for cell, size in zip(cells, lengths, strict=True)]

    def _check_again(self, stripe: _LoadedStripe) -> None:
        for number in range(stripe.number, stripe.number + (stripe.hole_count or 1)):
            before = self._hashes[number]
            if before is None:
                self._hashes[number] = stripe.hashes
                self._unhashed_count -= 1
                if not self._unhashed_count:
                    self._check_root()
            elif before != stripe.hashes:
                raise ContentChanged(f"stripe {number} changed between two readings")

    def _check_root(self) -> None:
        if content_root(self._vid, self._geometry.size, self._geometry.cell_size, self._content_table()) != self._root:
            raise ContentChanged("the segment's content is not what was hashed when it was closed")

    def _content_table(self) -> bytes:
        k = self._geometry.data_shards
        return b"".join(b"".join(hashes[:k]) for hashes in self._hashes if hashes is not None)

    # ---- the end of a shard

    async def _finish_all(self, unfinished: list[_Lane]) -> None:
        complete = [lane for lane in unfinished if lane.sink is not None and lane.next_stripe >= lane.cell_count]
        if len(complete) < len(unfinished) or self._unhashed_count:
            for lane in complete:
                await self._close(lane)  # rather than let its connection wait for the others, however long that takes
            return
        await self._still_wanted()
        content_table = self._content_table()
        async with trio.open_nursery() as nursery:
            for lane in complete:
                nursery.start_soon(self._finish, lane, content_table)

    async def _finish(self, lane: _Lane, content_table: bytes) -> None:
        assert lane.sink is not None
        geometry = self._geometry
        own_table = b"".join(hashes[lane.index] for hashes in self._hashes if hashes is not None)
        assert len(own_table) == lane.cell_count * HASH_SIZE
        expected = shard_root(
            self._vid, lane.index, geometry.data_shards, geometry.parity_shards, geometry.cell_size, geometry.size, own_table
        )
        try:
            root = await self._unless_hung(lane, lane.sink.finish(own_table, content_table))
            if root != expected:
                raise PeerRefused(RefusalReason.MISMATCH, "the root it acknowledged is not that of what was sent")
        except (ReplicationError, OSError, CacheError) as error:
            await self._fail(lane, error)
            return
        lane.root = root
        await self._close(lane)


def _match(
    homeless: Sequence[_Lane], owners: dict[StoreId, _Lane | None], refused: set[tuple[StoreId, int]]
) -> list[tuple[_Lane, StoreId]]:
    """The lanes with the stores they should have (a bipartite matching by augmenting paths), empty if there is none.
    `owners` says whose each store is now, None for those free to be had."""

    def find_store(lane: _Lane, visited: set[StoreId]) -> bool:
        for store in sorted(owners, key=lambda store: owners[store] is not None):
            if store in visited or (store, lane.index) in refused:
                continue
            visited.add(store)
            owner = owners[store]
            if owner is None or find_store(owner, visited):
                owners[store] = lane
                return True
        return False

    if not all(find_store(lane, set()) for lane in homeless):
        return []
    return [(lane, store) for store, lane in owners.items() if lane is not None]


def stripe_buffer_size(geometry: Geometry) -> int:
    """Bytes of memory one stripe in flight needs."""
    return geometry.shard_count * geometry.cell_size
