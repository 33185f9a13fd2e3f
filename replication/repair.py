"""Making damaged and missing shards of one version again, out of those that are right.

A shard is rebuilt where it was, if its holder answers: the put replaces what is damaged there. Otherwise it goes to a
live store in a failure domain that has none of the version's shards, and one catalog transaction names the new holder; what
the old one may still have is garbage then. Nothing is removed here.

Stripe by stripe: the content is read, every cell of it proved by the content's table, and encoded again; where too few shards
are right, from the home's segment, if that is. A shard gets its footer, without which it is nothing, only if its table gives
the root that was acknowledged when the version became protected. So repair never changes a shard, it brings the same one back;
one that can't be brought back is reported. Only of a shard that was missing when its file was recovered no root is known.

A shard that is to leave a store which still answers is copied from there, each cell proved by the shard's table; what can't be
had so is made of the others.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

import trio

from ckptfs.cache.catalog_format import Shard, ShardLayout, StoreState, Version, VersionState
from ckptfs.cache.checksum import HASH_SIZE, cell_hash
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.versions import RepairedCommit
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import (
    NotEnoughDomains,
    NotEnoughShards,
    PeerRefused,
    PeerUnreachable,
    RefusalReason,
    ReplicationError,
    ShardDamaged,
    ShardNotFound,
)
from ckptfs.replication.members import Members
from ckptfs.replication.new_holder import new_holder
from ckptfs.replication.protect import DurableCatalog, ShardHolders
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.readable_shards import ReadableShards
from ckptfs.replication.repair_pass import RUN_BYTES_MAX, Lane, RepairPass
from ckptfs.replication.shard_format import PATH_HINT_SIZE_MAX, ShardFooter, ShardHeader
from ckptfs.replication.small_copies import SmallCopy
from ckptfs.replication.stripe_reader import ShardReaders, StripeReader, shard_root_of
from ckptfs.replication.stripe_run import StripedContent
from ckptfs.replication.striped_attempt import stripe_buffer_size
from ckptfs.replication.verify_report import FileReport

logger = logging.getLogger(__name__)

ROUNDS_MAX = 4
"""How often what failed is tried again, at the same holder or at another, before it is reported."""


class RepairHolders(ShardHolders, ShardReaders, Protocol):
    """How shards and copies are read from and put to their holders; the own store is one of them."""


class RepairedVersions(Protocol):
    """What is needed of `cache.versions.Versions`."""

    async def version(self, vid: Vid) -> Version | None: ...

    async def commit_repaired(self, repaired: RepairedCommit) -> bool: ...


class VersionReplaced(Exception):
    """The version ended, or another repair was faster, while this one was under way."""


class Rebuilt(NamedTuple):
    """What became of shards: where those that are right now are, and why the others are not, by their index."""

    stores: dict[int, StoreId]
    problems: dict[int, str]


async def at_once(size_bytes: int) -> None:
    """The pace of a repair somebody waits for."""


class Repairer:
    """Repairs one version at a time, at low priority. `take_buffer(size)` is an async context manager that gives a buffer, as
    `BufferBudget.take`: one stripe is in memory at a time."""

    def __init__(
        self,
        kv: DurableCatalog,
        versions: RepairedVersions,
        members: Members,
        holders: RepairHolders,
        codec: Codec,
        threads: QuietThreads,
        take_buffer: Callable[[int], Any],
        *,
        pace: Callable[[int], Awaitable[None]] = at_once,
        run_bytes_max: int = RUN_BYTES_MAX,
    ) -> None:
        """`pace` is told how many bytes were sent, and returns when more may be; before, so many are sent at most."""
        self._pace = pace
        self._run_bytes_max = run_bytes_max
        self._kv = kv
        self._versions = versions
        self._members = members
        self._holders = holders
        self._codec = codec
        self._threads = threads
        self._take_buffer = take_buffer
        self._one_at_a_time = trio.Lock()

    async def repair(
        self, ino: InodeNumber, vid: Vid, version: Version, report: FileReport, path_hint: bytes = b""
    ) -> FileReport:
        """Rebuild what the report of this version names, and return the report as it stands then: `repaired` has the indices
        of shards that are right again, the other lists those that are not.

        Never raises for what is wrong with shards or holders; raises `CacheError`. `path_hint` goes with whole copies.
        """
        async with self._one_at_a_time:
            await self._members.refresh(everyone=True)
            wanted = [*report.damaged, *report.missing]
            wanted += [index for index in report.unreachable if self._is_gone(version.shards[index].store)]
            if report.is_gone or not report.is_protected or not (wanted or report.unreachable):
                return report
            lanes = self._lanes(version, wanted)
            try:
                await self._rebuild(ino, vid, version, lanes, path_hint)
            except VersionReplaced as replaced:
                report.is_gone, report.message = True, str(replaced)
                return report
        return self._conclude(version, report, lanes)

    async def rebuild(
        self, vid: Vid, version: Version, indices: Iterable[int], *, without: frozenset[StoreId] = frozenset()
    ) -> Rebuilt:
        """Have these shards of a protected version on stores that answer, none of them in `without`.

        Nothing is asked of the catalog's stores: `members` is as it was refreshed last. Raises `VersionReplaced`, `CacheError`.
        """
        async with self._one_at_a_time:
            lanes = self._lanes(version, indices)
            for lane in lanes:
                lane.useless |= without
            await self._rebuild(version.ino, vid, version, lanes, b"")
        return Rebuilt(
            {lane.index: lane.store for lane in lanes if lane.done},
            {lane.index: lane.problem or "its holder failed again and again" for lane in lanes if not lane.done},
        )

    @staticmethod
    def _lanes(version: Version, indices: Iterable[int]) -> list[Lane]:
        return [Lane(index, version.shards[index].store) for index in sorted(indices)]

    async def _rebuild(self, ino: InodeNumber, vid: Vid, version: Version, lanes: list[Lane], path_hint: bytes) -> None:
        """Bring the lanes as far as they can be, and record where they are. Raises `VersionReplaced`."""
        path_hint = path_hint if len(path_hint) <= PATH_HINT_SIZE_MAX else b""
        try:
            if not lanes:
                return
            if version.layout is ShardLayout.COPIES:
                await self._rebuild_copies(ino, vid, version, lanes, path_hint)
            else:
                await self._rebuild_shards(ino, vid, version, lanes, path_hint)
            await self._record(vid, version, lanes)
        except NotEnoughShards as error:
            for lane in lanes:
                if not lane.done:
                    lane.give_up(str(error))

    # ---- striped

    async def _rebuild_shards(self, ino: InodeNumber, vid: Vid, version: Version, lanes: list[Lane], path_hint: bytes) -> None:
        content, footer, unreadable = await self._open(vid, version, lanes)
        hints = (ino, path_hint, await self._kv.revision()) if footer is None else (footer.ino, footer.path_hint, footer.revision)
        reader = StripeReader(self._members, ReadableShards(self._holders, unreadable), self._codec)
        geometry = content.geometry
        k = geometry.data_shards
        for lane in lanes:
            if lane.index < k:
                cells = range(lane.index, geometry.cell_count, k)
                lane.table = b"".join(content.table[cell * HASH_SIZE : (cell + 1) * HASH_SIZE] for cell in cells)
                lane.require_root(content)
            else:
                lane.table = content.own_tables.get(lane.index)

        async def open_sink(lane: Lane) -> None:
            header = ShardHeader(vid, lane.index, k, geometry.parity_shards, geometry.cell_size, geometry.size)
            lane.sink = await self._holders.put_shard(lane.store, header, *hints)
            lane.next_stripe = lane.sink.resume_stripe

        async def finish(lane: Lane) -> None:
            assert lane.sink is not None
            assert lane.table is not None
            lane.root = await lane.sink.finish(lane.table, content.table)
            if lane.root != shard_root_of(content, lane.index, lane.table):
                raise PeerRefused(RefusalReason.MISMATCH, "the root it acknowledged is not that of what was sent")
            lane.done = True

        repair_pass = RepairPass(
            reader, self._codec, self._threads, self._pace, self._run_bytes_max, self._each, self._require_unchanged
        )

        async def attempt(tried: list[Lane]) -> None:
            try:
                await self._each(tried, open_sink)
                opened = [lane for lane in tried if lane.sink is not None]
                async with self._take_buffer(stripe_buffer_size(geometry)) as buffer:
                    await self._copy(content, [lane for lane in opened if lane.index not in unreadable], buffer)
                    await repair_pass.send(content, opened, buffer)
                await self._require_unchanged(vid, version)
                await self._each([lane for lane in opened if lane.sink is not None], finish)
            finally:
                with trio.CancelScope(shield=True):
                    for lane in tried:
                        await lane.close()

        header = ShardHeader(vid, 0, k, geometry.parity_shards, geometry.cell_size, geometry.size)
        await self._in_rounds(vid, version, lanes, header.file_length(), attempt)

    async def _open(self, vid: Vid, version: Version, lanes: list[Lane]) -> tuple[StripedContent, ShardFooter | None, set[int]]:
        """The version with its proved tables, a footer to take the hints from, if there is one, and the shards of which no cell
        can be read.

        Raises `NotEnoughShards` if neither a footer nor the home's segment gives the content's table.
        """
        wrong = {lane.index for lane in lanes}
        others = [index for index in range(len(version.shards)) if index not in wrong]
        source: ShardFooter | None = None
        content = StripedContent(vid, version, b"")
        unreadable: set[int] = set()
        for index in (*others, *sorted(wrong)):
            if source is not None and index not in wrong:
                continue
            shard = version.shards[index]
            if self._members.is_known_dead(shard.store):
                unreadable.update({index} & wrong)
                continue
            try:
                footer = await self._holders.footer(shard.store, vid, index)
            except ReplicationError as error:
                self._note(shard.store, error)
                unreadable.update({index} & wrong)
                continue
            if footer.content_root != version.root or footer.header.cell_size != version.cell_size:
                unreadable.add(index)
                continue
            source = source or footer
            if shard_root_of(content, index, footer.cell_hashes) == shard.root:
                content.own_tables[index] = footer.cell_hashes
            else:
                unreadable.add(index)
        if source is not None:
            content.table = source.content_hashes
            return content, source, unreadable
        try:
            of_home = await StripeReader(self._members, self._holders, self._codec).content_of_home(vid, version)
        except ReplicationError as error:
            raise NotEnoughShards(
                f"no shard's footer can be read, so nothing says what the content was; nor does its home: {error}"
            ) from None
        return of_home, None, unreadable

    async def _copy(self, content: StripedContent, lanes: list[Lane], buffer: memoryview) -> None:
        """Send the cells of lanes that move away from a store which still has them, as far as it gives right ones."""
        vid, version = content.vid, content.version

        async def copy(lane: Lane, place: memoryview) -> None:
            source = version.shards[lane.index].store
            assert lane.table is not None
            for stripe in range(lane.next_stripe, len(lane.table) // HASH_SIZE):
                try:
                    length = await self._holders.read_cell(source, vid, lane.index, stripe, place)
                except ReplicationError as error:
                    self._note(source, error)
                    return
                cell = place[:length]
                digest = await self._threads.run(cell_hash, cell)
                if digest != lane.table[stripe * HASH_SIZE : (stripe + 1) * HASH_SIZE]:
                    return
                if lane.sink is None:
                    return
                await lane.sink.send_cell(stripe, cell, digest)
                lane.next_stripe = stripe + 1
                await self._pace(length)

        moving = [lane for lane in lanes if lane.table is not None and lane.store != version.shards[lane.index].store]
        size = content.geometry.cell_size
        places = {lane.index: buffer[number * size :][:size] for number, lane in enumerate(moving)}
        await self._each(moving, lambda lane: copy(lane, places[lane.index]))

    # ---- whole copies

    async def _rebuild_copies(self, ino: InodeNumber, vid: Vid, version: Version, lanes: list[Lane], path_hint: bytes) -> None:
        content = await StripeReader(self._members, self._holders, self._codec).read_copy(vid, version)
        copy = SmallCopy(vid, ino, len(content), path_hint, await self._kv.revision(), content)

        async def put(lane: Lane) -> None:
            if await self._holders.put_copies(lane.store, [copy]) != [version.shards[lane.index].root]:
                raise PeerRefused(RefusalReason.MISMATCH, "the root it acknowledged is not that of what was sent")
            lane.done = True

        async def attempt(tried: list[Lane]) -> None:
            await self._require_unchanged(vid, version)
            await self._each(tried, put)

        await self._in_rounds(vid, version, lanes, len(content) + 4096, attempt)

    # ---- holders

    async def _in_rounds(
        self,
        vid: Vid,
        version: Version,
        lanes: list[Lane],
        bytes_each: int,
        attempt: Callable[[list[Lane]], Awaitable[None]],
    ) -> None:
        """Attempt the lanes until each is done or given up."""
        for number in range(ROUNDS_MAX):
            if number:
                await self._members.refresh(everyone=True)
            tried = []
            for lane in lanes:
                if lane.done or lane.given_up:
                    continue
                try:
                    lane.store = self._holder_for(vid, version, lane, lanes, bytes_each)
                except NotEnoughDomains as shortage:
                    lane.give_up(f"{lane.problem or 'its holder is away'}; no other can take it: {shortage}")
                    continue
                tried.append(lane)
            if not tried:
                return
            await attempt(tried)

    def _holder_for(self, vid: Vid, version: Version, lane: Lane, lanes: list[Lane], bytes_each: int) -> StoreId:
        """The shard's own holder if it answers and didn't prove useless; else a live store in a domain that has no other shard
        of the version. Raises `NotEnoughDomains`."""
        own = version.shards[lane.index].store
        if own not in lane.useless and not self._is_gone(own):
            return own
        places = {index: shard.store for index, shard in enumerate(version.shards)}
        places.update((other.index, other.store) for other in lanes)
        del places[lane.index]
        without = frozenset({*lane.useless, own})
        return new_holder(self._members.known(), vid, lane.index, places, without, bytes_each)

    def _is_gone(self, store: StoreId) -> bool:
        member = self._members.member(store)
        return member is None or not member.live or member.state.is_gone

    async def _each(self, lanes: Iterable[Lane], act: Callable[[Lane], Awaitable[None]]) -> None:
        """Act on all lanes at once. What a holder says no to is noted in its lane, which is closed."""

        async def guarded(lane: Lane) -> None:
            try:
                await act(lane)
            except (ReplicationError, OSError) as error:
                self._note(lane.store, error)
                await lane.fail(self._name(lane.store), error)

        async with trio.open_nursery() as nursery:
            for lane in lanes:
                nursery.start_soon(guarded, lane)

    def _note(self, store: StoreId, error: Exception) -> None:
        if isinstance(error, PeerUnreachable):
            self._members.note_failure(store, error)
        elif not isinstance(error, ShardDamaged | ShardNotFound):
            logger.info("repair-holder-failed store=%s error=%s: %s", store.hex(), type(error).__name__, error)

    def _name(self, store: StoreId) -> str:
        return self._members.name_of(store)

    # ---- the catalog

    async def _require_unchanged(self, vid: Vid, version: Version) -> None:
        now = await self._versions.version(vid)
        if now is None or now.state is not VersionState.PROTECTED:
            raise VersionReplaced("the file was replaced, rewritten or deleted while it was being repaired")
        if now.shards != version.shards:
            raise VersionReplaced("another repair gave the file's shards new holders meanwhile")

    async def _record(self, vid: Vid, version: Version, lanes: list[Lane]) -> None:
        """Name the new holders, all or none. Raises `VersionReplaced`."""
        moving = [lane for lane in lanes if lane.done and _shard_of(lane, version) != version.shards[lane.index]]
        if not moving:
            return
        moved = {lane.index: _shard_of(lane, version) for lane in moving}
        found = {lane.store: self._members.member(lane.store) for lane in moving}
        revisions = {store: member.revision for store, member in found.items() if member and member.state is StoreState.IN}
        if len(revisions) == len(found) and await self._versions.commit_repaired(
            RepairedCommit(vid, version.shards, moved, revisions)
        ):
            await self._kv.make_durable()
            return
        await self._require_unchanged(vid, version)
        for lane in moving:
            lane.done = False
            lane.give_up(
                f"{self._name(lane.store)} left the cluster, or came back changed, before it could be recorded as holder"
            )

    def _conclude(self, version: Version, report: FileReport, lanes: list[Lane]) -> FileReport:
        done = {lane.index for lane in lanes if lane.done}
        report.repaired = sorted(done)
        for indices in (report.damaged, report.missing, report.unreachable):
            indices[:] = [index for index in indices if index not in done]
        report.away = {self._name(version.shards[index].store) for index in report.unreachable}
        if done:
            report.is_lost, report.reading = False, ""  # what it was made of was read
        notes = [report.message] if report.message else []
        for lane in lanes:
            before = version.shards[lane.index].store
            if not lane.done:
                notes.append(f"shard {lane.index} was not repaired: {lane.problem or 'its holder failed again and again'}")
            elif lane.store == before:
                notes.append(f"shard {lane.index} was rebuilt on {self._name(before)}")
            else:
                notes.append(f"shard {lane.index} was rebuilt on {self._name(lane.store)}, in place of {self._name(before)}")
        asked = {lane.index for lane in lanes}
        notes += [
            f"the holder of shard {index} answers again: it can be verified now"
            for index in report.unreachable
            if index not in asked
        ]
        report.message = "; ".join(notes)
        logger.warning(
            "repaired ino=%d result=%s repaired=%s damaged=%s missing=%s unreachable=%s",
            report.ino, report.result, report.repaired, report.damaged, report.missing, report.unreachable,
        )  # fmt: skip
        return report


def _shard_of(lane: Lane, version: Version) -> Shard:
    return Shard(lane.store, lane.root or version.shards[lane.index].root)
