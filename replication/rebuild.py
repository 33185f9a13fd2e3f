"""Shards of stores that were lost, removed or are draining are made again on other stores, most exposed versions first.

One node does this for all: the leader. It walks over all versions when there is such a store, and keeps those in a list of
bounded length that have the fewest live shards beyond what reading takes; those it moves, and walks again until there are none.
A version of which too few shards are left is tried as well: its home's segment may have what is lacking. One that can't be had
from anywhere is counted, and named, as lost.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_format import (
    VERSION_PREFIX,
    ShardLayout,
    StoreState,
    Version,
    VersionState,
    unpack,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.home_segment import has_segment
from ckptfs.replication.members import Member, Members
from ckptfs.replication.shard_moves import Move, Outcome, ShardMover, shard_bytes

logger = logging.getLogger(__name__)

MOVES_MAX = 2000
"""How many versions are listed at once; about a kilobyte each."""

LOST_NAMED_MAX = 1000
PAUSE_SECONDS_MAX = 600.0
REFUSED_SECONDS = 60.0


STUCK_MAX = 10_000
"""When so many could not be moved, it is enough for now."""


@dataclass
class RebuildStatistics:
    """`rebuilt_*` since the start, the others as of the last walk: `left` are the versions that have shards on a store they are
    to leave; `homeless` those of them for which no failure domain is free, `stuck` those that could not be moved for another
    reason, which is in `last_error`. Of the `lost_count` files whose bytes are nowhere any more `lost` has the first."""

    rebuilt_shards: int = 0
    rebuilt_bytes: int = 0
    busy_seconds: float = 0.0
    left: int = 0
    homeless: int = 0
    stuck: int = 0
    lost_count: int = 0
    lost: list[InodeNumber] = field(default_factory=list)
    last_error: str = ""

    def begun_anew(self) -> "RebuildStatistics":
        """With nothing left to do."""
        return RebuildStatistics(self.rebuilt_shards, self.rebuilt_bytes, self.busy_seconds)


class Exposed(NamedTuple):
    """In the order in which versions are moved: `surplus` is how many live shards there are beyond what reading takes."""

    surplus: int
    mod_revision: int
    vid: Vid
    version: Version
    indices: tuple[int, ...]


def leaving_stores(members: list[Member]) -> frozenset[StoreId]:
    """The stores that no shard is to stay on."""
    return frozenset(member.store for member in members if member.state is not StoreState.IN)


def exposed(vid: Vid, version: Version, revision: int, leaving: frozenset[StoreId], members: Members) -> Exposed | None:
    """What of the version is to move, None if nothing is. A store the catalog doesn't have is gone for good."""
    indices, live = [], 0
    for index, shard in enumerate(version.shards):
        member = members.member(shard.store)
        if member is None or member.store in leaving:
            indices.append(index)
        live += member is not None and member.live and not member.state.is_gone
    if not indices:
        return None
    needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
    return Exposed(live - needed, revision, vid, version, tuple(indices))


class Rebuilder:
    """Use: `run` in a nursery. It looks every `look_seconds`. `may_repair`: whether the catalog can be trusted (R9)."""

    def __init__(
        self,
        kv: KeyValue,
        members: Members,
        mover: ShardMover,
        is_leader: Callable[[], bool],
        *,
        look_seconds: float,
        may_repair: Callable[[], Awaitable[bool]],
    ) -> None:
        self.statistics = RebuildStatistics()
        self._kv = kv
        self._members = members
        self._mover = mover
        self._is_leader = is_leader
        self._look_seconds = look_seconds
        self._may_repair = may_repair
        self._done_with: tuple[frozenset[StoreId], ...] | None = None
        self._not_before = self._refused_until = 0.0
        self._pause_seconds = look_seconds

    def look_again(self) -> None:
        """Somebody waits for it."""
        self._done_with, self._not_before, self._refused_until, self._pause_seconds = None, 0.0, 0.0, self._look_seconds

    async def run(self) -> None:
        while True:
            await trio.sleep(self._look_seconds)
            try:
                await self.look()
            except (CacheError, ReplicationError, OSError) as error:
                self.statistics.last_error = f"{type(error).__name__}: {error}"
                logger.info("rebuild-put-off error=%s", self.statistics.last_error)

    async def look(self) -> None:
        """Move what is to move, if there is anything and this node is to do it. Raises `CacheError`."""
        members = await self._members.refresh()
        leaving = leaving_stores(members)
        if not self._is_leader():
            self.statistics = self.statistics.begun_anew()
            self._done_with = None
            return
        standing = leaving, frozenset(member.store for member in members if member.live)
        if self._done_with == standing:
            if trio.current_time() < self._not_before or not self.statistics.stuck:
                return
        else:
            self._pause_seconds = self._look_seconds
        if leaving and not await self._is_allowed():
            self.statistics.last_error = "the catalog is not the one this store knows: nothing is moved"
            return
        if leaving:
            began = trio.current_time()
            try:
                await self._rebuild(leaving)
            finally:
                self.statistics.busy_seconds += trio.current_time() - began
        else:
            self.statistics = self.statistics.begun_anew()
        self._done_with = standing
        self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        self._not_before = trio.current_time() + self._pause_seconds

    async def _is_allowed(self) -> bool:
        """Asked anew only once a minute while it is not: each time is an error in the log."""
        if trio.current_time() < self._refused_until:
            return False
        if await self._may_repair():
            return True
        self._refused_until = trio.current_time() + REFUSED_SECONDS
        return False

    async def _rebuild(self, leaving: frozenset[StoreId]) -> None:
        """Walk and move until nothing is left but what can't be moved."""
        statistics = self.statistics
        stuck: set[Vid] = set()

        def note(move: Move, outcome: Outcome) -> None:
            if outcome is None:  # the next walk shows what is left of it
                return
            statistics.rebuilt_shards += len(outcome.stores)
            statistics.rebuilt_bytes += len(outcome.stores) * shard_bytes(move.version)
            statistics.left -= not outcome.problems
            if outcome.problems:
                stuck.add(move.vid)
                statistics.last_error = next(iter(outcome.problems.values()))

        while (found := await self._walk(leaving, stuck)) and len(stuck) < STUCK_MAX:
            logger.warning("rebuilding versions=%d stores=%d surplus_min=%d", statistics.left, len(leaving), found[0].surplus)
            moves = [Move(one.vid, one.version, one.indices) for one in found]
            await self._mover.move(moves, note, without=leaving)
            await self._members.refresh()
        statistics.stuck = len(stuck)
        if not stuck:
            statistics.last_error = ""
        if statistics.left:
            logger.warning(
                "rebuild-incomplete homeless=%d stuck=%d lost=%d error=%s",
                statistics.homeless, statistics.stuck, statistics.lost_count, statistics.last_error,
            )  # fmt: skip

    async def _walk(self, leaving: frozenset[StoreId], stuck: set[Vid]) -> list[Exposed]:
        """The most exposed versions that can be moved; those in `stuck` were tried. The others are counted."""
        statistics = self.statistics
        found: list[Exposed] = []
        left = homeless = lost_count = 0
        lost: list[InodeNumber] = []
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=set())) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is not VersionState.PROTECTED or not version.shards:
                    continue
                one = exposed(vid_of_key(entry.key), version, entry.mod_revision, leaving, self._members)
                if one is None:
                    continue
                left += 1
                if self._is_lost(version):
                    lost_count += 1
                    if len(lost) < LOST_NAMED_MAX:
                        lost.append(version.ino)
                elif not self._has_room(one):
                    homeless += 1
                elif one.vid not in stuck:
                    found.append(one)
                    if len(found) > 2 * MOVES_MAX:
                        found = sorted(found, key=_order)[:MOVES_MAX]
        statistics.left, statistics.homeless = left, homeless
        statistics.lost_count, statistics.lost = lost_count, lost
        return sorted(found, key=_order)[:MOVES_MAX]

    def _has_room(self, one: Exposed) -> bool:
        """Whether a failure domain is free for any of it."""
        moving = set(one.indices)
        staying = [self._members.member(shard.store) for index, shard in enumerate(one.version.shards) if index not in moving]
        taken = {member.domain for member in staying if member is not None}
        return any(member.takes_shards and member.domain not in taken for member in self._members.known())

    def _is_lost(self, version: Version) -> bool:
        """Whether too few shards are left that could come back, and no home that could have the bytes."""
        needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
        return sum(self._may_return(shard.store) for shard in version.shards) < needed and not (
            has_segment(version) and not version.damaged and self._may_return(version.home)
        )

    def _may_return(self, store: StoreId) -> bool:
        member = self._members.member(store)
        return member is not None and not member.state.is_gone


def _order(one: Exposed) -> tuple[int, int, Vid]:
    return one[:3]
