"""Shards that go to other stores: many versions after one another, at a bounded pace and with bounded memory.

The new shards come first, then the transaction that names them, which compares that the old ones are still those it was made
of. So there is never less than before, it can be cut off anywhere and begun again, and what two do at once is done once; the
surplus is garbage. What had been sent of a shard when a move was cut off is gone on with.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import trio

from ckptfs.cache.catalog_format import Shard, ShardLayout, StoreState, Version, VersionState
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.cache.versions import RepairedCommit
from ckptfs.replication.errors import NotEnoughDomains, NotEnoughShards, PeerUnreachable, ReplicationError
from ckptfs.replication.members import Members
from ckptfs.replication.new_holder import new_holder
from ckptfs.replication.protect import DurableCatalog
from ckptfs.replication.repair import Rebuilt, RepairedVersions, Repairer, VersionReplaced
from ckptfs.replication.small_copies import SmallCopy

logger = logging.getLogger(__name__)

COPIES_PER_BATCH_MAX = 64
"""Whole copies are below 64 KiB: a batch is 4 MiB at most, and each holder syncs once for its part of it."""

COPY_ROW_BYTES = 4096
COPIES_READ_AT_ONCE = 8


class Move(NamedTuple):
    """Shards of a protected version, by index, that are to be on other stores, none of them in `without`."""

    vid: Vid
    version: Version
    indices: tuple[int, ...]
    without: frozenset[StoreId] = frozenset()


Outcome = Rebuilt | None
"""None: the version was replaced or deleted, or somebody else moved its shards."""


def shard_bytes(version: Version) -> int:
    """What one shard of the version takes, about."""
    return version.size if version.layout is ShardLayout.COPIES else -(-version.size // version.data_shards)


class CopyReader(Protocol):
    """What is needed of `stripe_reader.StripeReader`."""

    async def read_copy(self, vid: Vid, version: Version) -> bytes: ...


class CopyHolders(Protocol):
    """What is needed of `holders.Holders`."""

    async def put_copies(self, store: StoreId, copies: Sequence[SmallCopy]) -> list[bytes]: ...


class ShardMover:
    """`repairers` work at the same time, each with a stripe of its own; `pace` is theirs too."""

    def __init__(
        self,
        kv: DurableCatalog,
        versions: RepairedVersions,
        members: Members,
        reader: CopyReader,
        holders: CopyHolders,
        repairers: Sequence[Repairer],
        pace: Callable[[int], Awaitable[None]],
    ) -> None:
        self._kv = kv
        self._versions = versions
        self._members = members
        self._reader = reader
        self._holders = holders
        self._repairers = repairers
        self._pace = pace

    async def move(
        self, moves: Iterable[Move], note: Callable[[Move, Outcome], None], *, without: frozenset[StoreId] = frozenset()
    ) -> None:
        """Begin them in their order, none on a store in `without`; `note` hears what became of each. Raises `CacheError`."""
        waiting = iter(moves)
        failure: CacheError | None = None

        async def work(repairer: Repairer) -> None:
            nonlocal failure
            small: list[Move] = []
            try:
                for move in waiting:
                    if failure is not None:
                        return
                    if move.version.layout is ShardLayout.COPIES:
                        small.append(move)
                        if len(small) >= COPIES_PER_BATCH_MAX:
                            batch, small = small, []
                            await self._move_copies(batch, note, without)
                    else:
                        if small:
                            batch, small = small, []
                            await self._move_copies(batch, note, without)
                        await self._move_striped(repairer, move, note, without)
                if small:
                    await self._move_copies(small, note, without)
            except CacheError as error:
                failure = error

        async with trio.open_nursery() as nursery:
            for repairer in self._repairers:
                nursery.start_soon(work, repairer)
        if failure is not None:
            raise failure

    async def _move_striped(
        self, repairer: Repairer, move: Move, note: Callable[[Move, Outcome], None], without: frozenset[StoreId]
    ) -> None:
        try:
            outcome: Outcome = await repairer.rebuild(move.vid, move.version, move.indices, without=without | move.without)
        except VersionReplaced:
            outcome = None
        except (ReplicationError, OSError) as error:
            outcome = Rebuilt({}, dict.fromkeys(move.indices, str(error)))
        note(move, outcome)

    # ---- whole copies

    async def _move_copies(
        self, moves: Sequence[Move], note: Callable[[Move, Outcome], None], without: frozenset[StoreId]
    ) -> None:
        """All of them with one batch for each holder, and one sync of the catalog."""
        revision = await self._kv.revision()
        rebuilt = {move.vid: Rebuilt({}, {}) for move in moves}
        contents: dict[Vid, bytes] = {}
        limiter = trio.CapacityLimiter(COPIES_READ_AT_ONCE)

        async def read(move: Move) -> None:
            async with limiter:
                try:
                    contents[move.vid] = await self._reader.read_copy(move.vid, move.version)
                except NotEnoughShards as error:
                    rebuilt[move.vid].problems.update(dict.fromkeys(move.indices, str(error)))

        async with trio.open_nursery() as nursery:
            for move in moves:
                nursery.start_soon(read, move)
        batches: defaultdict[StoreId, list[tuple[Move, int]]] = defaultdict(list)
        for move in moves:
            if move.vid in contents:
                self._choose(move, without, rebuilt[move.vid], batches)

        async def put(store: StoreId, batch: list[tuple[Move, int]]) -> None:
            copies = [
                SmallCopy(move.vid, move.version.ino, move.version.size, b"", revision, contents[move.vid]) for move, _ in batch
            ]
            try:
                roots = await self._holders.put_copies(store, copies)
            except (ReplicationError, OSError) as error:
                if isinstance(error, PeerUnreachable):
                    self._members.note_failure(store, error)
                for move, index in batch:
                    rebuilt[move.vid].problems[index] = f"{self._members.name_of(store)}: {error}"
                return
            for (move, index), root in zip(batch, roots, strict=True):
                if root == move.version.shards[index].root:
                    rebuilt[move.vid].stores[index] = store
                else:
                    rebuilt[move.vid].problems[index] = f"{self._members.name_of(store)} acknowledged another root"
            await self._pace(sum(copy.size for copy in copies))

        async with trio.open_nursery() as nursery:
            for store, batch in batches.items():
                nursery.start_soon(put, store, batch)
        outcomes = [(move, await self._commit(move, rebuilt[move.vid])) for move in moves]
        await self._kv.make_durable()
        for move, outcome in outcomes:
            note(move, outcome)

    def _choose(
        self,
        move: Move,
        without: frozenset[StoreId],
        rebuilt: Rebuilt,
        batches: defaultdict[StoreId, list[tuple[Move, int]]],
    ) -> None:
        places = {index: shard.store for index, shard in enumerate(move.version.shards)}
        bytes_each = move.version.size + COPY_ROW_BYTES
        for index in move.indices:
            own = places.pop(index)
            try:
                places[index] = new_holder(
                    self._members.known(), move.vid, index, places, without | move.without | {own}, bytes_each
                )
                batches[places[index]].append((move, index))
            except NotEnoughDomains as shortage:
                places[index] = own
                rebuilt.problems[index] = str(shortage)

    async def _commit(self, move: Move, rebuilt: Rebuilt) -> Outcome:
        """Name the new holders of one version; durable later."""
        if not rebuilt.stores:
            return rebuilt
        moved = {index: Shard(store, move.version.shards[index].root) for index, store in rebuilt.stores.items()}
        found = {store: self._members.member(store) for store in rebuilt.stores.values()}
        revisions = {store: member.revision for store, member in found.items() if member and member.state is StoreState.IN}
        if len(revisions) == len(found) and await self._versions.commit_repaired(
            RepairedCommit(move.vid, move.version.shards, moved, revisions)
        ):
            return rebuilt
        now = await self._versions.version(move.vid)
        if now is None or now.state is not VersionState.PROTECTED or now.shards != move.version.shards:
            return None
        left = "its new holder left the cluster, or came back changed, before it could be recorded"
        return Rebuilt({}, dict.fromkeys(move.indices, left))
