"""Protecting versions: the choice of code and holders, whole copies for small files, and the commit.

Order of each: the version's record is read (it must be `local`), its bytes are checked against the content root it has, all
k+m holders have acknowledged durably, the lease test is made again, then one catalog transaction names the holders. Only
after that transaction is durable does anybody hear of it.
"""

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from ckptfs.cache.catalog_format import Shard, ShardLayout, StoreState, Version, VersionState
from ckptfs.cache.catalog_kv import Entry
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.errors import CacheError
from ckptfs.cache.holes import Holes
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.mount_db import WaitingVersion
from ckptfs.cache.segments import has_no_writer
from ckptfs.cache.version_reshape import Code
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import (
    ContentTooLarge,
    NotEnoughDomains,
    PeerRefused,
    PeerUnreachable,
    RefusalReason,
    ReplicationError,
)
from ckptfs.replication.members import Member, Members, candidates
from ckptfs.replication.placement import Candidate, code_for, place, usable_domains
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.shard_format import ShardHeader
from ckptfs.replication.small_copies import COPY_SIZE_MAX, SmallCopy
from ckptfs.replication.striped_attempt import (
    AttemptVoid,
    ContentChanged,
    SegmentDamaged,
    ShardSink,
    StripedAttempt,
    stripe_buffer_size,
)
from ckptfs.replication.stripes import Geometry

logger = logging.getLogger(__name__)

STRIPES_IN_FLIGHT_MAX = 4
"""More don't help: the holders' disks are behind, not the reading (4 GiB at 4+2, six agents on two cores)."""

STILL_WANTED_SECONDS = 1.0


@dataclass(frozen=True)
class ProtectionLimits:
    """The code asked for, and what protecting may use. Sizes in bytes. When fewer stores are live than the catalog has, a
    version waits until their set has been the same for `shortfall_seconds` before it is protected with a smaller code."""

    data_shards: int
    parity_shards: int
    small_file_size: int
    buffer_bytes_max: int = 32 << 20
    shortfall_seconds: float = 5.0


class VersionRecords(Protocol):
    """What is needed of `cache.versions.Versions`."""

    async def version(self, vid: Vid) -> Version | None: ...

    async def commit_protected(self, commits: Sequence[ProtectedCommit]) -> set[Vid]: ...

    async def mark_damaged(self, vid: Vid, segment: SegmentId, damaged: bool) -> bool: ...
    async def give_up_prefix(self, ino: InodeNumber, prefix: Vid) -> None: ...


class SegmentFiles(Protocol):
    """What is needed of `cache.segments.Segments`."""

    def open_read(self, segment: SegmentId) -> int: ...


class ShardHolders(Protocol):
    """How shards and copies get to the stores that hold them; the own store is one of them."""

    async def put_shard(
        self, store: StoreId, header: ShardHeader, ino: InodeNumber, path_hint: bytes, revision: int, hole_bytes: int = 0
    ) -> ShardSink: ...

    async def put_copies(self, store: StoreId, copies: Sequence[SmallCopy]) -> list[bytes]: ...


class DurableCatalog(Protocol):
    """What is needed of `cache.catalog_kv.KeyValue`."""

    async def get(self, key: bytes) -> Entry | None: ...

    async def make_durable(self) -> None: ...

    async def revision(self) -> int: ...


class StripedSource(NamedTuple):
    """What shards are made of: a file that holds the version's content, in which every cell is checked as it is read."""

    vid: Vid
    ino: InodeNumber
    path_hint: bytes
    version: Version
    descriptor: int


class Protector:
    """Protects versions; the replicator says which and when. `failures_by_store` counts failed requests."""

    def __init__(
        self,
        limits: ProtectionLimits,
        kv: DurableCatalog,
        versions: VersionRecords,
        members: Members,
        holders: ShardHolders,
        segments: SegmentFiles,
        codec: Codec,
        threads: QuietThreads,
    ) -> None:
        self.limits = limits
        self.failures_by_store: Counter[StoreId] = Counter()
        self._kv = kv
        self._versions = versions
        self._members = members
        self._holders = holders
        self._segments = segments
        self._codec = codec
        self._threads = threads
        self._budget = BufferBudget(limits.buffer_bytes_max)

    def is_small(self, version: Version) -> bool:
        """Whether the version is kept as whole copies (or, empty, needs nothing but the catalog)."""
        limit = min(self.limits.small_file_size, COPY_SIZE_MAX + 1)
        return version.size == 0 or (version.size < limit and version.cell_size == version.size)

    def is_smaller(self, commit: ProtectedCommit) -> bool:
        """Whether that is a smaller code than asked for."""
        asked = Code(1 if commit.layout is ShardLayout.COPIES else self.limits.data_shards, self.limits.parity_shards)
        return bool(commit.shards) and asked.is_larger_than(Code(commit.data_shards, commit.parity_shards))

    # ---- what the cluster can carry

    def has_company(self, members: Sequence[Member]) -> bool:
        """Whether there is a second failure domain to put anything in: without one no loss can be survived."""
        return len({candidate.domain for candidate in candidates(members)}) > 1

    def shortfall(self, members: Sequence[Member]) -> tuple[int, int] | None:
        """The code (k, m) the live stores can carry, if it is less than what is asked for."""
        domains = {member.domain for member in members if member.state is StoreState.IN and member.live}
        code = code_for(self.limits.data_shards, self.limits.parity_shards, len(domains))
        return code if code != (self.limits.data_shards, self.limits.parity_shards) else None

    def settling_seconds(self, members: Sequence[Member]) -> float:
        """How long to wait for stores that the catalog has and that don't answer now; 0 if there is no reason to wait."""
        joined = {member.domain for member in members if member.state is StoreState.IN}
        live = {member.domain for member in members if member.state is StoreState.IN and member.live}
        wanted = self.limits.data_shards + self.limits.parity_shards
        if len(live) >= min(wanted, len(joined)):
            return 0.0
        return max(0.0, self.limits.shortfall_seconds - self._members.seconds_unchanged())

    def _striped_code(self, size: int, cell_size: int, holes: Holes, available: list[Candidate]) -> Geometry:
        """The largest code asked for that the domains with enough space can carry. Raises `NotEnoughDomains` and
        `ContentTooLarge`."""
        k, m = self.limits.data_shards, self.limits.parity_shards
        while True:
            geometry = Geometry(size, cell_size, k, m)
            domains = usable_domains(available, _shard_file_size(geometry) - _hole_bytes(geometry, holes))
            smaller = code_for(k, m, len(domains))
            if smaller[1] == 0 or len(domains) < sum(smaller):
                raise NotEnoughDomains(
                    f"{len(domains)} live failure domains have space for this version: it can't be protected against any loss; "
                    "bring more nodes up"
                )
            if smaller == (k, m):
                return geometry
            k, m = smaller

    # ---- striped

    async def protect_striped(self, waiting: WaitingVersion, version: Version) -> ProtectedCommit:
        """Put the version's shards on k+m holders. Returns what is to be committed, now: the lease test has just been made.

        Raises `AttemptVoid`, `SegmentDamaged`, `ReplicationError`, `CacheError` or `OSError`. For a prefix of what is being
        written there is no lease test: what is sent has the hashes that were taken before, so all of it was there at one moment
        in between; if it changed, `ContentChanged`.
        """

        async def still_wanted() -> None:
            await self._require_local(waiting.vid)

        descriptor = await self._open_striped(waiting, version)
        try:
            source = StripedSource(waiting.vid, waiting.ino, waiting.path_hint, version, descriptor)
            geometry, shards = await self.put_striped(source, still_wanted)
            if not waiting.is_prefix:
                _require_sealed(descriptor)
        except ContentChanged as change:
            await self._require_local(waiting.vid)
            if waiting.is_prefix:
                raise
            _require_sealed(descriptor)
            raise _damaged(waiting, str(change)) from None
        finally:
            os.close(descriptor)
        return self._commit_of(waiting, ShardLayout.STRIPED, geometry.data_shards, geometry.cell_size, shards)

    async def put_striped(
        self, source: "StripedSource", still_wanted: Callable[[], Awaitable[None]], larger_than: Code | None = None
    ) -> tuple[Geometry, list[Shard]]:
        """Put shards on as many holders as the largest code takes that can be had; where they are.

        `still_wanted` is asked again and again, and raises `AttemptVoid`. With `larger_than`, no smaller code, nor that, will do,
        and no shard goes where one of the same index is: `NotEnoughDomains`. Raises as `protect_striped`, and `ContentChanged`.
        """
        version = source.version
        available = candidates(await self._members.refresh())
        holes = Holes(source.descriptor)
        geometry = await self._threads.run(self._striped_code, version.size, version.cell_size, holes, available)
        if larger_than is not None and not Code(geometry.data_shards, geometry.parity_shards).is_larger_than(larger_than):
            raise NotEnoughDomains(f"no larger code than {larger_than.data_shards}+{larger_than.parity_shards} can be had now")
        hole_bytes = _hole_bytes(geometry, holes)
        bytes_each = _shard_file_size(geometry) - hole_bytes
        stores = place(available, geometry.shard_count, source.vid, bytes_each)
        if larger_than is not None:
            stores = _at_other_indices(stores, version.shards)
        revision = await self._kv.revision()
        header = ShardHeader(source.vid, 0, geometry.data_shards, geometry.parity_shards, geometry.cell_size, geometry.size)

        async def open_sink(store: StoreId, index: int) -> ShardSink:
            own = ShardHeader(header.vid, index, header.data_shards, header.parity_shards, header.cell_size, header.size)
            return await self._holders.put_shard(store, own, source.ino, source.path_hint, revision, hole_bytes)

        async def replace(index: int, used: Sequence[StoreId]) -> StoreId:
            return await self._another_holder(source.vid, index, used, bytes_each)

        stripe_bytes = stripe_buffer_size(geometry)
        in_flight = max(1, min(geometry.stripe_count, STRIPES_IN_FLIGHT_MAX, self._budget.total_bytes // stripe_bytes))
        async with self._budget.take(in_flight * stripe_bytes) as buffer:
            attempt = StripedAttempt(
                source.vid,
                version.root,
                geometry,
                source.descriptor,
                buffer,
                self._codec,
                self._threads,
                open_sink,
                replace,
                self.note_failure,
                still_wanted,
                self._is_away,
            )
            return geometry, await self._watched(still_wanted, lambda: attempt.run(stores))

    async def _open_striped(self, waiting: WaitingVersion, version: Version) -> int:
        try:
            return self._open_sealed(waiting, version)
        except SegmentDamaged:
            await self._require_local(waiting.vid)  # else it is a newer version's, or was removed with this one
            raise

    async def _watched(
        self, still_wanted: Callable[[], Awaitable[None]], run: Callable[[], Awaitable[list[Shard]]]
    ) -> list[Shard]:
        """Run the attempt, and end it early when it isn't wanted any more."""
        ended: AttemptVoid | None = None
        failure: Exception | None = None
        shards: list[Shard] | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal ended
                while True:
                    await trio.sleep(STILL_WANTED_SECONDS)
                    try:
                        await still_wanted()
                    except AttemptVoid as void:
                        ended = void
                        nursery.cancel_scope.cancel()
                    except CacheError:
                        continue  # the commit asks again

            nursery.start_soon(watch)
            try:
                shards = await run()
            except (AttemptVoid, SegmentDamaged, ReplicationError, CacheError, OSError) as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if shards is None:
            raise ended or AttemptVoid("the attempt was ended")
        return shards

    async def _another_holder(self, vid: Vid, index: int, used: Sequence[StoreId], bytes_each: int) -> StoreId:
        members = await self._members.refresh()
        taken = {member.domain for member in members if member.store in used}
        free = [candidate for candidate in candidates(members, without=frozenset(used)) if candidate.domain not in taken]
        return place(free, 1, vid + bytes([index]), bytes_each)[0]

    # ---- whole copies

    async def protect_copies(
        self, batch: Sequence[tuple[WaitingVersion, Version]]
    ) -> tuple[list[ProtectedCommit], dict[Vid, Exception]]:
        """Put whole copies of small files on m+1 holders each. Returns what is to be committed, and what is wrong with the
        others. Raises `ReplicationError`, `CacheError` or `OSError` when the batch as a whole failed."""
        wrong: dict[Vid, Exception] = {}
        members = await self._members.refresh()
        revision = await self._kv.revision()
        total = sum(version.size for _, version in batch)
        async with self._budget.take(
            min(total, self._budget.total_bytes)
        ):  # counted there, though the contents are objects of their own
            loaded = await self._threads.run(self._load_batch, batch, revision, wrong)
            for vid in [vid for vid, error in wrong.items() if isinstance(error, SegmentDamaged)]:
                try:
                    await self._require_local(vid)
                except AttemptVoid as void:
                    wrong[vid] = void
            copies = [copy for _, copy, _ in loaded]
            if not copies:
                return [], wrong
            holders = await self._copy_to_holders(copies, [root for _, _, root in loaded], members, total)
        commits = []
        for waiting, copy, root in loaded:
            placed = [Shard(store, root) for store in holders]
            commits.append(self._commit_of(waiting, ShardLayout.COPIES, 1, copy.size, placed))
        return commits, wrong

    async def _copy_to_holders(
        self, copies: Sequence[SmallCopy], roots: Sequence[bytes], members: Sequence[Member], total: int
    ) -> list[StoreId]:
        """The stores that have acknowledged all copies with the right roots."""
        bytes_each = total + 4096 * len(copies)
        available = candidates(members)
        domains = usable_domains(available, bytes_each)
        count = 1 + code_for(1, self.limits.parity_shards, len(domains))[1]
        if count < 2:
            raise NotEnoughDomains(f"{len(domains)} live failure domains have space for small files: no loss can be survived")
        stores = place(available, count, copies[0].vid, bytes_each)
        done: list[StoreId] = []
        tried: set[StoreId] = set()
        while True:
            await self._copy_to_each(stores, copies, roots, done)
            tried.update(stores)
            missing = count - len(done)
            if not missing:
                return done
            members = await self._members.refresh()
            taken = {member.domain for member in members if member.store in done}
            free = [one for one in candidates(members, without=frozenset(tried)) if one.domain not in taken]
            stores = place(free, missing, copies[0].vid, bytes_each)

    async def put_more_copies(self, vid: Vid, version: Version, content: bytes) -> list[Shard]:
        """Put copies of a small file that has too few on further holders, in domains that have none; where all of them are then.

        Raises `NotEnoughDomains` if there is none, else as `protect_copies`.
        """
        members = await self._members.refresh()
        there = {shard.store for shard in version.shards}
        taken = {member.domain for member in members if member.store in there}
        free = [one for one in candidates(members, without=frozenset(there)) if one.domain not in taken]
        bytes_each = len(content) + 4096
        missing = min(1 + self.limits.parity_shards - len(there), len(usable_domains(free, bytes_each)))
        if missing < 1:
            raise NotEnoughDomains("no further failure domain has space for a copy")
        copy = SmallCopy(vid, version.ino, len(content), b"", await self._kv.revision(), content)
        done: list[StoreId] = []
        await self._copy_to_each(place(free, missing, vid, bytes_each), [copy], [version.root], done)
        if not done:
            raise NotEnoughDomains("no further store took a copy")
        return [*version.shards, *(Shard(store, version.root) for store in done)]

    async def _copy_to_each(
        self, stores: Sequence[StoreId], copies: Sequence[SmallCopy], roots: Sequence[bytes], done: list[StoreId]
    ) -> None:
        async def put(store: StoreId) -> None:
            try:
                if await self._holders.put_copies(store, copies) != list(roots):
                    raise PeerRefused(RefusalReason.MISMATCH, "the roots it acknowledged are not those of what was sent")
            except (ReplicationError, OSError) as error:
                self.note_failure(store, error)
                return
            done.append(store)

        async with trio.open_nursery() as nursery:
            for store in stores:
                nursery.start_soon(put, store)

    def _load_batch(
        self, batch: Sequence[tuple[WaitingVersion, Version]], revision: int, wrong: dict[Vid, Exception]
    ) -> list[tuple[WaitingVersion, SmallCopy, bytes]]:
        """Read the contents and check them; runs in a thread."""
        loaded = []
        for waiting, version in batch:
            try:
                content = self._load_small(waiting, version)
            except (AttemptVoid, SegmentDamaged, OSError) as error:
                wrong[waiting.vid] = error
                continue
            copy = SmallCopy(waiting.vid, waiting.ino, version.size, waiting.path_hint, revision, content)
            loaded.append((waiting, copy, version.root))
        return loaded

    def _load_small(self, waiting: WaitingVersion, version: Version) -> bytes:
        descriptor = self._open_sealed(waiting, version)
        problem = "it does not hold what was hashed when the file was closed"
        try:
            try:
                content = os.pread(descriptor, version.size, 0)
            except OSError as error:
                content, problem = b"", f"it can't be read: {error.strerror}"
            cell_size = max(version.cell_size, 1)
            if len(content) == version.size:
                table = cell_table(content, cell_size)
                if content_root(waiting.vid, version.size, cell_size, table) == version.root:
                    return content
            if waiting.is_prefix:
                raise ContentChanged("the file was changed, not only appended to, since its prefix was hashed")
            _require_sealed(descriptor)
        finally:
            os.close(descriptor)
        raise _damaged(waiting, problem)

    # ---- common

    def protect_empty(self, waiting: WaitingVersion) -> ProtectedCommit:
        """An empty file is protected by the catalog alone."""
        return self._commit_of(waiting, ShardLayout.COPIES, 1, 1, [])

    async def commit(self, commits: Sequence[ProtectedCommit]) -> set[Vid]:
        """Commit and make durable. Returns the vids that are protected now; the others' attempts are void."""
        committed = await self._versions.commit_protected(commits)
        if committed:
            await self._kv.make_durable()
        return committed

    def _is_away(self, store: StoreId) -> bool:
        member = self._members.member(store)
        return member is None or not member.live

    async def mark_damaged(self, waiting: WaitingVersion) -> None:
        """Have everybody know that the version's segment is damaged: status shows it, and programs get EIO. Protecting it takes
        that back."""
        if await self._versions.mark_damaged(waiting.vid, waiting.segment, True):
            await self._kv.make_durable()

    def note_failure(self, store: StoreId, error: Exception) -> None:
        """Count a failed request; a store that can't be reached isn't asked again for a moment."""
        self.failures_by_store[store] += 1
        logger.info("holder-failed store=%s error=%s: %s", store.hex(), type(error).__name__, error)
        if isinstance(error, PeerUnreachable):
            self._members.note_failure(store, error)

    def _commit_of(
        self, waiting: WaitingVersion, layout: ShardLayout, data_shards: int, cell_size: int, shards: list[Shard]
    ) -> ProtectedCommit:
        revisions = {}
        for shard in shards:
            member = self._members.member(shard.store)
            if member is None or member.state is not StoreState.IN:
                raise AttemptVoid(f"the holder {shard.store.hex()} left the cluster meanwhile")
            revisions[shard.store] = member.revision
        parity_shards = max(0, len(shards) - data_shards)
        return ProtectedCommit(waiting.ino, waiting.vid, layout, data_shards, parity_shards, cell_size, shards, revisions)

    def _open_sealed(self, waiting: WaitingVersion, version: Version) -> int:
        """Raises `SegmentDamaged` also where the version has ended meanwhile: the caller asks."""
        try:
            descriptor = self._segments.open_read(waiting.segment)
        except FileNotFoundError:
            if waiting.is_prefix:
                raise AttemptVoid("the file was removed") from None
            raise _damaged(waiting, "it is gone") from None
        try:
            if waiting.is_prefix:
                return descriptor  # programs write behind it; only its bytes say that they haven't changed
            _require_sealed(descriptor)
            size = os.fstat(descriptor).st_size
            if size != version.size:
                raise _damaged(waiting, f"it has {size} bytes, {version.size} were hashed")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    async def _require_local(self, vid: Vid) -> None:
        version = await self._versions.version(vid)
        if version is None or version.state is not VersionState.LOCAL:
            raise AttemptVoid("the version was replaced, rewritten or deleted")


def _damaged(waiting: WaitingVersion, problem: str) -> SegmentDamaged:
    return SegmentDamaged(f"the segment {waiting.segment.hex()}: {problem}")


def _require_sealed(descriptor: int) -> None:
    if not has_no_writer(descriptor):
        raise AttemptVoid("the file is open for writing, or mapped writable")


def _at_other_indices(stores: Sequence[StoreId], before: Sequence[Shard]) -> list[StoreId]:
    """The same stores in an order in which none gets the index of the shard it has of another code: both have one name there."""
    there = {shard.store: index for index, shard in enumerate(before)}
    stores = list(stores)
    for index, store in enumerate(stores):
        if there.get(store) == index:  # no other store has this index: whichever takes its place is free to
            other = (index + 1) % len(stores)
            stores[index], stores[other] = stores[other], store
    return stores


def _shard_file_size(geometry: Geometry) -> int:
    """Bytes of the largest of the version's shard files. Raises `ContentTooLarge`."""
    try:
        header = ShardHeader(
            Vid(bytes(16)), 0, geometry.data_shards, geometry.parity_shards, geometry.cell_size, max(geometry.size, 1)
        )
    except ValueError as error:
        raise ContentTooLarge(
            f"{error} for shards of {geometry.data_shards}+{geometry.parity_shards}: only its home has its bytes; write it as"
            " several files, or make a cluster with a larger protection.cell_size_bytes"
        ) from None
    return header.file_length()


def _hole_bytes(geometry: Geometry, holes: Holes) -> int:
    """Bytes of zeros in each of the shards, at least, that come of whole stripes in holes."""
    return holes.whole_units(geometry.data_shards * geometry.cell_size) * geometry.cell_size
