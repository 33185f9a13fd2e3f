"""Shards move from full stores to empty ones, when nodes were added, and out of failure domains that have two of a file.

How full a store is, is what of its room for shards the catalog says is used: bytes named there, of those and its free bytes. The
garbage that moving leaves on the old holder for a day takes room and is named nowhere, so a store that was just relieved looks a
little fuller than it will be; what is within `TOLERANCE` is let be.

One shard of a version at a time, and to one store that is chosen for it: the version has all its shards at any moment.
"""

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from ckptfs.cache.catalog_format import VERSION_PREFIX, Version, VersionState, unpack, vid_of_key
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.replication.members import Member, Members
from ckptfs.replication.shard_moves import Move, Outcome, ShardMover, shard_bytes

logger = logging.getLogger(__name__)

TOLERANCE = 0.1
"""Stores are balanced when the fullest is no more than a tenth of its room above the emptiest."""

MOVES_MAX = 500
"""Listed at once."""


@dataclass
class RebalanceStatistics:
    """Of the run under way, or the last one. `before` and `after` it: how full each live store was, 0 to 1."""

    running: bool = False
    moved_shards: int = 0
    moved_bytes: int = 0
    failed: int = 0
    last_error: str = ""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)


class Balance:
    """How many bytes each store should give or take. Pure."""

    def __init__(self, named: Mapping[StoreId, int], members: list[Member]) -> None:
        self._members = {member.store: member for member in members if member.takes_shards}
        self.room = {store: named.get(store, 0) + max(0, member.free_bytes) for store, member in self._members.items()}
        self.fill = {store: named.get(store, 0) / room if room else 1.0 for store, room in self.room.items()}
        total = sum(self.room.values())
        target = sum(named.get(store, 0) for store in self.room) / total if total else 0.0
        self.excess = {store: named.get(store, 0) - target * room for store, room in self.room.items()}
        self.is_even = max(self.fill.values(), default=0.0) - min(self.fill.values(), default=0.0) <= TOLERANCE

    def move(self, vid: Vid, version: Version) -> Move | None:
        """The one shard of this version that should be elsewhere, if one should; counted as moved."""
        holders = [self._members.get(shard.store) for shard in version.shards]
        domains = [None if member is None else member.domain for member in holders]
        size = shard_bytes(version)
        crowded = Counter(domain for domain in domains if domain is not None)
        indices = sorted(
            (index for index, member in enumerate(holders) if member is not None),
            key=lambda index: (-crowded[str(domains[index])], -self.excess[version.shards[index].store]),
        )
        for index in indices[:1]:
            store = version.shards[index].store
            misplaced = crowded[str(domains[index])] > 1
            if not misplaced and (self.is_even or self.excess[store] < size / 2):
                return None
            others = {domain for place, domain in enumerate(domains) if place != index}
            held = {shard.store for shard in version.shards}
            takers = [
                member
                for member in self._members.values()
                if member.domain not in others
                and member.store not in held
                and member.free_bytes > 2 * size
                and (misplaced or self.excess[member.store] <= -size / 2)
            ]
            if not takers:
                return None
            taker = min(takers, key=lambda member: (self.excess[member.store], member.store)).store
            self.excess[store] -= size
            self.excess[taker] += size
            return Move(vid, version, (index,), frozenset(self._members) - {taker})
        return None


class Rebalancer:
    """`rebalance` once at a time; a second call while one runs does nothing."""

    def __init__(self, kv: KeyValue, members: Members, mover: ShardMover, may_repair: Callable[[], Awaitable[bool]]) -> None:
        """`may_repair`: whether the catalog can be trusted (R9)."""
        self.life = os.urandom(8).hex()
        """Names this object: what another of the same node says is of other runs."""
        self._may_repair = may_repair
        self.statistics = RebalanceStatistics()
        self._kv = kv
        self._members = members
        self._mover = mover

    async def rebalance(self) -> None:
        """Raises `CacheError`. It may be cut off anywhere, and begun again."""
        if self.statistics.running:
            return
        statistics = self.statistics = RebalanceStatistics(running=True)
        try:
            if not await self._may_repair():
                statistics.failed, statistics.last_error = 1, "the catalog is not the one this store knows: nothing is moved"
                return
            balance = Balance(await self._named(), await self._members.refresh(everyone=True))
            statistics.before = self._by_node(balance)
            await self._move(balance, statistics)
            statistics.after = self._by_node(Balance(await self._named(), await self._members.refresh(everyone=True)))
        except (CacheError, OSError) as error:
            statistics.failed, statistics.last_error = statistics.failed + 1, f"it was cut off: {error}"
            raise
        finally:
            statistics.running = False
        logger.warning(
            "rebalanced shards=%d bytes=%d failed=%d", statistics.moved_shards, statistics.moved_bytes, statistics.failed
        )

    async def _move(self, balance: Balance, statistics: RebalanceStatistics) -> None:
        def note(move: Move, outcome: Outcome) -> None:
            if outcome is None:
                return
            statistics.moved_shards += len(outcome.stores)
            statistics.moved_bytes += len(outcome.stores) * shard_bytes(move.version)
            if outcome.problems:
                statistics.failed += 1
                statistics.last_error = next(iter(outcome.problems.values()))

        moves: list[Move] = []
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=set())) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is not VersionState.PROTECTED or not version.shards:
                    continue
                if (move := balance.move(vid_of_key(entry.key), version)) is not None:
                    moves.append(move)
                if len(moves) >= MOVES_MAX:
                    await self._mover.move(moves, note)
                    moves = []
        await self._mover.move(moves, note)

    async def _named(self) -> Counter[StoreId]:
        """The bytes of shards the catalog names at each store."""
        named: Counter[StoreId] = Counter()
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=set())) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is VersionState.PROTECTED and version.shards:
                    size = shard_bytes(version)
                    for shard in version.shards:
                        named[shard.store] += size
        return named

    def _by_node(self, balance: Balance) -> dict[str, float]:
        return {self._members.name_of(store): round(fill, 3) for store, fill in balance.fill.items()}
