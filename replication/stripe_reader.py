"""Content from shards: any k right cells of a stripe give its content, and nothing but right content leaves here.

Data cells are asked for first, for they need no decoding; a holder that is away, late or wrong is answered by asking one
more. A data cell is right if it has the hash the content's table gives it, and the table if it gives the content root of
the catalog. A parity cell is right by its shard's own table, and that by the root the catalog has for the shard. What was
decoded is checked against the content's table like what was read.

Where too few shards are right, the home's segment is asked for data cells, and for the content's table if no shard has it. What
comes from there is checked in the same way.
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.checksum import HASH_SIZE, cell_hash, content_root, shard_root
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import (
    NotEnoughShards,
    PeerUnreachable,
    ReplicationError,
    ShardDamaged,
    ShardNotFound,
)
from ckptfs.replication.home_segment import SegmentHashers, has_segment, is_table_of, segment_table
from ckptfs.replication.members import Members
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.stripe_run import CellRun, RunBroken, StripedContent, StripeRun
from ckptfs.replication.stripes import Geometry, stripe_cells

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

LATE_SECONDS = 0.75
"""After this long one more holder is asked. A cell on the same machine takes milliseconds, over a slow network tens of them."""

IMPATIENT_SECONDS = 4 * LATE_SECONDS
PATIENT_SECONDS = 30.0
"""For one answer, where there are others to ask, and where there is nobody else."""

SLOW_SECONDS = 5.0
"""For how long a holder that was late is asked last."""

HOME_AFTER_SECONDS = 3.0
"""When all holders have been asked and some say nothing for so long, the home's segment is asked for what is lacking."""

HOME_SECONDS = 10.0
"""How long the home may take for its cells of one stripe."""


class ContentUnreachable(NotEnoughShards):
    """Too few holders of this content answer now. It comes back when they do; nothing older is shown in its place."""


class ContentDamaged(NotEnoughShards):
    """The holders answer, but too few of the shards they have are right."""


class ShardReaders(SegmentHashers, Protocol):
    """How a store's shards and segments are read; the own store is one of them. All raise `ReplicationError`."""

    async def read_cell(self, store: StoreId, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        """Read one cell, unchecked, into the buffer; returns its length."""

    def cells(
        self, store: StoreId, vid: Vid, index: int, first: int, count: int
    ) -> contextlib.AbstractAsyncContextManager[CellRun]:
        """Inside, a thread may take in the shard's cells of so many stripes."""

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter: ...

    async def read_copy(self, store: StoreId, vid: Vid) -> bytes: ...

    async def read_segment(self, store: StoreId, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes:
        """Bytes of a segment at its home, unchecked, short at its end."""


@dataclass
class ReadCounters:
    """Since the start: cells read from shards, cells decoded because others were missing, cells read from homes' segments
    because too few shards were right, and cells or copies that failed their hash."""

    cells_read: int = 0
    cells_decoded: int = 0
    cells_from_home: int = 0
    damaged_by_store: Counter[StoreId] = field(default_factory=Counter)
    failed_by_store: Counter[StoreId] = field(default_factory=Counter)


def geometry_of(version: Version) -> Geometry:
    """How the version's content is cut."""
    return Geometry(version.size, version.cell_size, version.data_shards, version.parity_shards)


class StripeReader:
    """Reads stripes and copies from their holders. `codec_limiter` bounds the threads that decode."""

    def __init__(
        self,
        members: Members,
        holders: ShardReaders,
        codec: Codec,
        *,
        on_wrong: Callable[[Vid], None] = lambda vid: None,
    ) -> None:
        """`on_wrong` hears of versions of which a shard was wrong or missing."""
        self._on_wrong = on_wrong
        self.counters = ReadCounters()
        self._members = members
        self._holders = holders
        self._codec = codec
        self._codec_limiter = trio.CapacityLimiter(2)
        self._late_until_seconds: dict[StoreId, float] = {}

    async def _reachable(self, version: Version, read: Callable[[], Awaitable[Result]]) -> Result:
        """Read; once more if it turns out that holders are elsewhere than this node believed."""
        addresses = self._addresses(version)
        if not all(addresses):
            await self._refresh()
            addresses = self._addresses(version)
        try:
            return await read()
        except ContentUnreachable:
            await self._refresh()
            if self._addresses(version) == addresses:
                raise
        return await read()

    def _addresses(self, version: Version) -> list[str | None]:
        own = self._members.own_store
        stores = [shard.store for shard in version.shards] + ([version.home] if has_segment(version) else [])
        return ["own" if store == own else self._members.address_of(store) for store in stores]

    async def _refresh(self) -> None:
        with contextlib.suppress(CacheError):  # then with what is known
            await self._members.refresh()

    async def content(self, vid: Vid, version: Version, table: bytes | None = None) -> StripedContent:
        """The version with its content's table, fetched from any holder unless a proved one is given.

        Raises `ContentUnreachable` or `ContentDamaged`.
        """
        if table is not None:
            return StripedContent(vid, version, table)
        return await self._reachable(version, partial(self._open_content, vid, version))

    async def _open_content(self, vid: Vid, version: Version) -> StripedContent:
        complaints: list[tuple[StoreId, Exception]] = []
        order = self._order(version, range(len(version.shards)))
        last_hope = None if has_segment(version) else self._last_hope(version, order)
        for index in order:
            store = version.shards[index].store
            try:
                with trio.fail_after(PATIENT_SECONDS if index == last_hope else IMPATIENT_SECONDS):
                    footer = await self._holders.footer(store, vid, index)
                table = self._proved_content_table(vid, version, footer)
            except (ReplicationError, trio.TooSlowError) as error:
                self._note(store, error, vid)
                complaints.append((store, error))
                continue
            content = StripedContent(vid, version, table)
            if shard_root_of(content, index, footer.cell_hashes) == version.shards[index].root:
                content.own_tables[index] = footer.cell_hashes
            return content
        if has_segment(version):
            try:
                return await self.content_of_home(vid, version)
            except ReplicationError as error:
                self._note(version.home, error)
                complaints.append((version.home, error))
        raise self.unavailable(complaints, f"none of {len(version.shards)} shards can be opened")

    async def content_of_home(self, vid: Vid, version: Version) -> StripedContent:
        """The version with its content's table as its home hashes it. Raises `ReplicationError`."""
        size, table = await segment_table(self._holders, version)
        if size < version.size or not is_table_of(vid, version, table):
            raise ShardDamaged("the home's segment is not what was hashed when the file was closed")
        return StripedContent(vid, version, table)

    @contextlib.asynccontextmanager
    async def run(
        self, content: StripedContent, stripes: range, buffer: memoryview, *, without: Collection[int] = ()
    ) -> AsyncIterator[StripeRun | None]:
        """Inside, a thread may take in these stripes, which are whole: from k holders that are there and were not late, none of
        them of a shard in `without`; None if there are no such. `RunBroken` goes no further than to here: who is late is asked
        last for a while, and a shard that isn't right is left to `read_stripe`, which finds it out cell by cell.

        `buffer` has room for k+m cells.
        """
        version = content.version
        indices = [index for index in range(len(version.shards)) if index not in without and index not in content.unfit]
        order = [index for index in self._order(version, indices) if not self._trouble_with(version.shards[index].store)]
        sources: dict[int, CellRun] = {}

        def note(index: int, error: Exception) -> None:
            if isinstance(error, ShardDamaged | ShardNotFound):
                content.unfit.add(index)
            else:
                self._note(version.shards[index].store, error, content.vid)

        async with contextlib.AsyncExitStack() as stack:
            for index in order:
                if len(sources) == version.data_shards:
                    break
                store = version.shards[index].store
                try:
                    with trio.fail_after(LATE_SECONDS):
                        if index >= version.data_shards:
                            await self.own_table(content, index)
                        cells = self._holders.cells(store, content.vid, index, stripes.start, len(stripes))
                        sources[index] = await stack.enter_async_context(cells)
                except (ReplicationError, trio.TooSlowError) as error:
                    note(index, error)
            if len(sources) < version.data_shards:
                yield None
                return
            run = StripeRun(content, self._codec, sources, buffer, LATE_SECONDS)
            try:
                yield run
            except RunBroken as broken:
                if broken.index is not None:
                    note(broken.index, broken.error)
            finally:
                self.counters.cells_read += run.cells_read
                self.counters.cells_decoded += run.cells_decoded

    async def read_stripe(self, content: StripedContent, stripe: int, buffer: memoryview) -> memoryview:
        """Read the stripe's content, checked, into the buffer and return that part of it.

        `buffer` has room for k+m cells; it is the caller's. Raises `ContentUnreachable` or `ContentDamaged`.
        """
        geometry = content.geometry
        k = geometry.data_shards
        code_length = geometry.code_length(stripe)
        right = await self._reachable(content.version, partial(self._gather, content, geometry, stripe, buffer))
        lacking = [index for index in range(k) if geometry.cell_length(stripe, index) and index not in right]
        if lacking:
            await self._decode(content, geometry, stripe, buffer, code_length, right, lacking)
        return buffer[: geometry.stripe_length(stripe)]

    async def read_copy(self, vid: Vid, version: Version) -> bytes:
        """The content of a version kept as whole copies, checked. Raises `ContentUnreachable` or `ContentDamaged`."""
        return await self._reachable(version, partial(self._read_copy, vid, version))

    async def _read_copy(self, vid: Vid, version: Version) -> bytes:
        complaints: list[tuple[StoreId, Exception]] = []
        order = self._order(version, range(len(version.shards)))
        last_hope = self._last_hope(version, order)
        for index in order:
            store = version.shards[index].store
            try:
                with trio.fail_after(PATIENT_SECONDS if index == last_hope else IMPATIENT_SECONDS):
                    data = await self._holders.read_copy(store, vid)
                if not self.is_content(vid, version, data):
                    raise ShardDamaged("the copy is not what the catalog says")
            except (ReplicationError, trio.TooSlowError) as error:
                self._note(store, error, vid)
                complaints.append((store, error))
                continue
            self.counters.cells_read += 1
            return data
        if has_segment(version):
            try:
                with trio.fail_after(HOME_SECONDS):
                    data = await self._holders.read_segment(version.home, vid, version.segment, 0, version.size)
                if not self.is_content(vid, version, data):
                    raise ShardDamaged("the home's segment is not what was hashed when the file was closed")
                self.counters.cells_from_home += 1
                return data
            except (ReplicationError, trio.TooSlowError) as error:
                self._note(version.home, error)
                complaints.append((version.home, error))
        raise self.unavailable(complaints, f"none of {len(version.shards)} copies can be read")

    @staticmethod
    def is_content(vid: Vid, version: Version, data: bytes) -> bool:
        """Whether these bytes are the whole content of a version kept as copies."""
        return len(data) == version.size and content_root(vid, version.size, version.cell_size, cell_hash(data)) == version.root

    async def own_table(self, content: StripedContent, index: int) -> bytes:
        """The proved table of shard `index`. Raises `ReplicationError` as its holder does, or `ShardDamaged`."""
        table = content.own_tables.get(index)
        if table is None:
            shard = content.version.shards[index]
            table = (await self._holders.footer(shard.store, content.vid, index)).cell_hashes
            if shard_root_of(content, index, table) != shard.root:
                raise ShardDamaged(f"shard {index} is not the one that was acknowledged")
            content.own_tables[index] = table
        return table

    def unavailable(self, complaints: Sequence[tuple[StoreId, Exception]], what: str) -> NotEnoughShards:
        """The error for what could not be read, with the nodes that were asked and what they said."""
        parts = []
        away = False
        for store, error in complaints:
            member = self._members.member(store)
            name = member.node if member else store.hex()[:8]
            away = away or isinstance(error, PeerUnreachable | trio.TooSlowError) or not member
            parts.append(f"{name}: {'no answer in time' if isinstance(error, trio.TooSlowError) else error}")
        kind = ContentUnreachable if away else ContentDamaged
        return kind(f"{what} ({'; '.join(parts)})" if parts else what)

    # ---- the cells of one stripe

    async def _gather(
        self, content: StripedContent, geometry: Geometry, stripe: int, buffer: memoryview
    ) -> dict[int, memoryview]:
        """Cells that are right, at their places in the buffer: all data cells there are, or any other set that is enough."""
        k = geometry.data_shards
        real = [index for index in range(geometry.shard_count) if index >= k or geometry.cell_length(stripe, index)]
        needed = sum(1 for index in real if index < k)
        right: dict[int, memoryview] = {}
        home = has_segment(content.version)
        home_may_answer = home and not self._members.is_known_dead(content.version.home)
        complaints = await self._ask_holders(content, stripe, buffer, real, needed, right, patient=not home_may_answer)
        if len(right) < needed and home:
            lacking = [index for index in real if index < k and index not in right]
            of_home = await self._ask_home(content, stripe, buffer, lacking, right)
            if len(right) < needed and home_may_answer:
                complaints = await self._ask_holders(content, stripe, buffer, real, needed, right, patient=True)
            complaints += of_home
        if len(right) < needed:
            raise self.unavailable(complaints, f"stripe {stripe} has {len(right)} of the {needed} cells it needs")
        return right

    async def _ask_holders(
        self,
        content: StripedContent,
        stripe: int,
        buffer: memoryview,
        real: Sequence[int],
        needed: int,
        right: dict[int, memoryview],
        *,
        patient: bool,
    ) -> list[tuple[StoreId, Exception]]:
        """Add right cells until they are enough; returns what holders said that had none. Without `patient` those known to be
        dead or late are not asked, and others are waited for only so long, once there is nobody else to ask. No cell is on its
        way any more at the end."""
        geometry, version = content.geometry, content.version
        waiting = self._order(version, [index for index in real if index not in right])
        if not patient:
            waiting = [index for index in waiting if not self._trouble_with(version.shards[index].store)]
        complaints: list[tuple[StoreId, Exception]] = []
        asked: set[int] = set()
        send, receive = trio.open_memory_channel[tuple[int, Exception | None]](len(real))

        async def read(index: int) -> None:
            error: Exception | None = None
            cell = buffer[index * geometry.cell_size :][: geometry.cell_length(stripe, index)]
            try:
                await self._read_right_cell(content, index, stripe, cell)
            except ReplicationError as failure:
                error = failure
            else:
                right[index] = cell
            send.send_nowait((index, error))

        async with trio.open_nursery() as nursery:

            def ask_one_more() -> None:
                if waiting:
                    index = waiting.pop(0)
                    asked.add(index)
                    nursery.start_soon(read, index)

            for _ in range(needed - len(right)):
                ask_one_more()
            while len(right) < needed and asked:
                last_seconds = math.inf if patient else HOME_AFTER_SECONDS
                with trio.move_on_after(LATE_SECONDS if waiting else last_seconds) as late:
                    index, error = await receive.receive()
                    asked.discard(index)
                if late.cancelled_caught:
                    for slow in asked:
                        self._late_until_seconds[version.shards[slow].store] = trio.current_time() + SLOW_SECONDS
                    if not waiting:
                        complaints += [(version.shards[slow].store, trio.TooSlowError()) for slow in asked]
                        break
                    for _ in range(needed - len(right)):
                        ask_one_more()
                elif error is not None:
                    store = version.shards[index].store
                    self._note(store, error, content.vid)
                    complaints.append((store, error))
                    ask_one_more()
            nursery.cancel_scope.cancel()
        return complaints

    async def _ask_home(
        self,
        content: StripedContent,
        stripe: int,
        buffer: memoryview,
        lacking: Sequence[int],
        right: dict[int, memoryview],
    ) -> list[tuple[StoreId, Exception]]:
        """Add those of the lacking data cells that are right in the home's segment; returns what is wrong with others, one of a
        kind."""
        version, geometry = content.version, content.geometry
        if self._members.is_known_dead(version.home):
            return [(version.home, PeerUnreachable(f"it is away: {self._members.last_error(version.home)}"))]
        failures: dict[type[Exception], Exception] = {}

        async def read(index: int) -> None:
            length = geometry.cell_length(stripe, index)
            number = stripe * geometry.data_shards + index
            offset = number * geometry.cell_size
            try:
                with trio.fail_after(HOME_SECONDS):
                    data = await self._holders.read_segment(version.home, content.vid, version.segment, offset, length)
                if len(data) != length or cell_hash(data) != content.table[number * HASH_SIZE : (number + 1) * HASH_SIZE]:
                    raise ShardDamaged(f"cell {number} of the home's segment is not what was hashed when the file was closed")
            except (ReplicationError, trio.TooSlowError) as error:
                failures.setdefault(type(error), error)
                return
            cell = buffer[index * geometry.cell_size :][:length]
            cell[:] = data
            right[index] = cell
            self.counters.cells_from_home += 1

        async with trio.open_nursery() as nursery:
            for index in lacking:
                nursery.start_soon(read, index)
        for error in failures.values():
            self._note(version.home, error)
        return [(version.home, error) for error in failures.values()]

    async def _read_right_cell(self, content: StripedContent, index: int, stripe: int, cell: memoryview) -> None:
        """Raises `ShardDamaged` for a cell that fails its hash, and `ReplicationError` as its holder does."""
        shard = content.version.shards[index]
        k = content.version.data_shards
        table = content.table if index < k else await self.own_table(content, index)
        number = stripe * k + index if index < k else stripe
        count = await self._holders.read_cell(shard.store, content.vid, index, stripe, cell)
        if count != len(cell) or cell_hash(cell) != table[number * HASH_SIZE : (number + 1) * HASH_SIZE]:
            raise ShardDamaged(f"cell {stripe} of shard {index} fails its hash")
        self.counters.cells_read += 1

    async def _decode(
        self,
        content: StripedContent,
        geometry: Geometry,
        stripe: int,
        buffer: memoryview,
        code_length: int,
        right: dict[int, memoryview],
        lacking: list[int],
    ) -> None:
        """Fill the lacking data cells from the right ones. Raises `ContentDamaged` if the result fails its hash."""
        k, m = geometry.data_shards, geometry.parity_shards
        data = stripe_cells(geometry, stripe, buffer)  # pads short cells, and zeros those beyond the content
        given: dict[int, memoryview] = {}
        for index in range(geometry.shard_count):
            beyond = index < k and not geometry.cell_length(stripe, index)
            if len(given) < k and (index in right or beyond):
                given[index] = data[index] if index < k else right[index]
        wanted = {index: data[index] for index in lacking}
        await trio.to_thread.run_sync(self._codec.reconstruct, given, wanted, k, m, limiter=self._codec_limiter)
        for index in lacking:
            number = stripe * k + index
            cell = data[index][: geometry.cell_length(stripe, index)]
            if cell_hash(cell) != content.table[number * HASH_SIZE : (number + 1) * HASH_SIZE]:
                raise ContentDamaged(f"data cell {index} of stripe {stripe}, decoded from right cells, fails its hash")
        assert code_length == len(data[0])
        self.counters.cells_decoded += len(lacking)

    def _order(self, version: Version, indices: Sequence[int]) -> list[int]:
        """The order to ask in: known-dead holders last, late ones before them; then data before parity, own store first."""

        def rank(index: int) -> tuple[int, bool, bool, int]:
            store = version.shards[index].store
            return self._trouble_with(store), index >= version.data_shards, store != self._members.own_store, index

        return sorted(indices, key=rank)

    def _last_hope(self, version: Version, order: Sequence[int]) -> int:
        """Of those in that order the last whose holder isn't known to be dead: whoever comes after it won't answer anyway."""
        alive = [index for index in order if self._trouble_with(version.shards[index].store) < 2]
        return (alive or order)[-1]

    def _trouble_with(self, store: StoreId) -> int:
        """2 for a store known to be dead, 1 for one that is suspect or was late a moment ago, else 0."""
        member = self._members.member(store)
        if self._members.is_known_dead(store) or member is None:
            return 2
        return int(member.is_suspect or self._late_until_seconds.get(store, 0.0) > trio.current_time())

    def _note(self, store: StoreId, error: Exception, vid: Vid | None = None) -> None:
        """`vid`: it is about a shard of that version, and not about its home's segment."""
        if vid is not None and isinstance(error, ShardDamaged | ShardNotFound):
            self._on_wrong(vid)
        if isinstance(error, ShardDamaged):
            self.counters.damaged_by_store[store] += 1
            logger.warning("shard-damaged store=%s error=%s", store.hex(), error)
            return
        self.counters.failed_by_store[store] += 1
        if isinstance(error, trio.TooSlowError):
            self._late_until_seconds[store] = trio.current_time() + SLOW_SECONDS
        elif isinstance(error, PeerUnreachable):
            self._members.note_failure(store, error)

    @staticmethod
    def _proved_content_table(vid: Vid, version: Version, footer: ShardFooter) -> bytes:
        header = footer.header
        if (header.size, header.cell_size) != (version.size, version.cell_size) or footer.content_root != version.root:
            raise ShardDamaged("the shard's footer is not of the content the catalog names")
        return footer.content_hashes


def shard_root_of(content: StripedContent, index: int, table: bytes) -> bytes:
    """The root a shard with this table of cells has."""
    version = content.version
    return shard_root(content.vid, index, version.data_shards, version.parity_shards, version.cell_size, version.size, table)
