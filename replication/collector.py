"""Dead versions whose shards nobody needs any more lose their key, and with it every store's reason to keep a shard (R1, R9).

A protected version that was replaced or deleted stays until the grace has passed, and until everything that was being saved
before its death is protected or gone (the *frontier*): so rotating checkpoints never leaves only one that a single drive has.
What no file has any more, and is left by a store that was lost, counts as gone: nobody will ever protect it.
Nothing reads it then: who has it open on another node says so in the catalog (`cache.segment_holds`), and the transaction
compares that nobody does.

How long a version has been dead is measured on this process's own clock, from the first walk that could see it dead: the wall
clock of the node that stamped the death may be an hour off, and then the grace would be over before it began, or not for another
hour. What is remembered for this is the catalog's revision at each walk: a death has one too, so it is nothing for each version,
however many there are.

The leader does this for all (`leadership`).
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_format import (
    NO_SEGMENT,
    VERSION_PREFIX,
    StoreState,
    Version,
    VersionState,
    hold_prefix,
    store_key,
    unpack,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import COMPARES_MAX, Compare, Delete, EmptyRange, Entry, KeyValue, Unchanged
from ckptfs.cache.catalog_records import existing_inode
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.changed_inodes import remembered
from ckptfs.cache.errors import DamagedRecord, NoSuchName
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.cache.store_registry import stores
from ckptfs.replication.leadership import Leadership
from ckptfs.replication.members import Members

logger = logging.getLogger(__name__)

GRACE_SECONDS = 600.0
OPEN_COUNTS_SECONDS = 3600.0
"""How long after a death a version that was open then counts as being saved: a log that is never closed holds nothing up."""

PAUSE_SECONDS = 60.0
PAUSE_SHARE = 50
DOMAINS_WITH_SPACE_MIN = 2
"""With fewer nothing can be protected any more: what is dead goes before its time, the oldest first."""

DEAD_MAX = 10_000
"""Remembered in one walk, the oldest. Those beyond go in a second one, in the order of their keys."""

BATCH_COUNT = (COMPARES_MAX - 1) // 3
"""Versions that go in one transaction at most: each is compared, and that nobody has one of its two segments open."""

GONE_MAX = COMPARES_MAX // 2
"""Lost stores that have what isn't protected: where there are more nothing goes, for their return could not be noticed."""

GIVE_WAY_FACTOR = 4
"""After each transaction others have the catalog for so many times as long as it took: there may be very many."""


@dataclass
class CollectorStatistics:
    """`dead` and `damaged`, records of versions that fail their checksum, as of the last walk; the others since the start.
    `early`: before their time, because the stores were full."""

    dead: int = 0
    damaged: int = 0
    reclaimed: int = 0
    early: int = 0


class DeadVersion(NamedTuple):
    """In order of death."""

    died_at_revision: int
    vid: Vid
    version: Version


class Frontier(NamedTuple):
    """The oldest revisions at which a version began that isn't protected yet: one that was closed, one that is open. It holds
    while `compares` do: no lost store has returned that has such a version."""

    closed: float
    opened: float
    compares: Sequence[Compare] = ()

    def allows(self, dead: DeadVersion, age_seconds: float) -> bool:
        """Whether everything that was being saved before this death is protected or gone."""
        opened = self.opened if age_seconds < OPEN_COUNTS_SECONDS else float("inf")
        return dead.died_at_revision < min(self.closed, opened)


class Collector:
    """`run` in the agent. `now` is a clock that nobody sets."""

    def __init__(
        self,
        kv: KeyValue,
        members: Members,
        leadership: Leadership,
        *,
        grace_seconds: float = GRACE_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self.statistics = CollectorStatistics()
        self._kv = kv
        self._members = members
        self._leadership = leadership
        self._now = now
        self._walks: list[tuple[int, float]] = []
        """The catalog's revision, and when it was that, at the walks of the last hour."""
        self._walk_seconds = 0.0
        self._grace_seconds = grace_seconds
        self._pause_seconds = pause_seconds

    async def pause(self) -> None:
        """Between two walks: they take at most a fiftieth of the time, however many files there are."""
        await trio.sleep(max(self._pause_seconds, PAUSE_SHARE * self._walk_seconds))

    async def collect(self) -> int:
        """One walk; returns how many keys went. Raises `CatalogUnavailable`, `DamagedData`."""
        self._walk_seconds = 0.0
        if not self._leadership.is_held:
            return 0
        members = [member for member in self._members.known() if member.live and member.state is StoreState.IN]
        full = len(members) > 1 and sum(member.free_bytes > 0 for member in members) < DOMAINS_WITH_SPACE_MIN
        await self._note_walk()
        due, due_count, frontier = await self._walk()
        count = await self._reclaim_all([one for one in due if frontier.allows(one, self._age_seconds(one))], frontier.compares)
        if full:
            for one in due:
                if not frontier.allows(one, self._age_seconds(one)) and await self._reclaim([one], []):
                    count += 1
                    self.statistics.early += 1
                    logger.warning(
                        "reclaimed-early vid=%s size=%d: the stores are full; what replaced it may not be protected yet",
                        one.vid.hex(),
                        one.version.size,
                    )
        if due_count > len(due):
            count += await self._reclaim_others(frontier)
        self.statistics.reclaimed += count
        if count:
            logger.info("dead-versions-reclaimed count=%d left=%d", count, self.statistics.dead - count)
        return count

    async def _note_walk(self) -> None:
        """What is dead at this revision is from now on known to be."""
        revision, now = await self._kv.revision(), self._now()
        if self._walks and revision < self._walks[-1][0]:
            self._walks.clear()  # another catalog lies there
        self._walks.append((revision, now))
        while len(self._walks) > 1 and now - self._walks[1][1] >= max(OPEN_COUNTS_SECONDS, self._grace_seconds):
            del self._walks[0]

    def _age_seconds(self, dead: DeadVersion) -> float:
        """For how long it is known to be dead; negative if it died during this walk."""
        first = bisect_left(self._walks, (dead.died_at_revision, float("-inf")))
        return self._now() - self._walks[first][1] if first < len(self._walks) else -1.0

    async def _walk(self) -> tuple[list[DeadVersion], int, Frontier]:
        """The versions whose grace has passed, the oldest, in order, and how many there are in all; and the frontier."""
        began = time.monotonic()
        due: list[DeadVersion] = []
        damaged: set[bytes] = set()
        dead_count = due_count = 0
        of_removed: dict[Vid, int] = {}
        closed = opened = float("inf")
        # Not as the members were when they were looked at last: one that has returned since counts again.
        gone = {store: found for store, found in (await stores(self._kv)).items() if found[0].state.is_gone}
        waited_for: dict[StoreId, Compare] = {}
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=damaged)) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is VersionState.DEAD:
                    dead_count += 1
                    dead = _dead(entry, version)
                    if self._is_due(dead):
                        due_count += 1
                        due.append(dead)
                    if len(due) > 2 * DEAD_MAX:
                        due = sorted(due)[:DEAD_MAX]
                elif version.home in gone:  # nobody protects it: it is rolled back, and its store may never return
                    record, revision = gone[version.home]
                    if version.state is not VersionState.PROTECTED and record.state is StoreState.LOST:
                        waited_for[version.home] = Unchanged(store_key(version.home), revision)
                elif version.state is VersionState.LOCAL and entry.create_revision < closed:
                    named = await self._is_named(vid_of_key(entry.key), version)
                    if named is None:
                        of_removed[vid_of_key(entry.key)] = entry.create_revision
                    elif named:
                        closed = entry.create_revision
                elif version.state is VersionState.OPEN and entry.create_revision < opened:
                    opened = entry.create_revision if await self._is_named(vid_of_key(entry.key), version) else opened
        of_removed = {vid: revision for vid, revision in of_removed.items() if revision < closed}
        closed = min([closed, *(of_removed[vid] for vid in await remembered(self._kv, of_removed))])
        self.statistics.dead, self.statistics.damaged = dead_count, len(damaged)
        if damaged:
            closed = 0.0  # it may be of what was being saved before all others died
        if len(waited_for) > GONE_MAX:
            closed, waited_for = 0.0, {}
        self._walk_seconds += time.monotonic() - began
        return sorted(due)[:DEAD_MAX], due_count, Frontier(closed, opened, list(waited_for.values()))

    async def _is_named(self, vid: Vid, version: Version) -> bool | None:
        """Whether its file has the version, or may have it, where the file's record is damaged; None if there is no such file."""
        try:
            inode, _ = await existing_inode(self._kv, version.ino)
        except NoSuchName:
            return None
        except DamagedRecord:
            return True
        return vid in (inode.open, inode.cur, inode.prefix_next)

    def _is_due(self, dead: DeadVersion) -> bool:
        return self._age_seconds(dead) >= self._grace_seconds

    async def _reclaim_others(self, frontier: Frontier) -> int:
        """All that may go, in a second walk. The first one's frontier holds: what began since is younger than what is due."""
        began = time.monotonic()
        count = 0
        batch: list[DeadVersion] = []
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=set())) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is not VersionState.DEAD:
                    continue
                dead = _dead(entry, version)
                if self._is_due(dead) and frontier.allows(dead, self._age_seconds(dead)):
                    batch.append(dead)
                if len(batch) == BATCH_COUNT:
                    count += await self._reclaim_all(batch, frontier.compares)
                    batch = []
        self._walk_seconds += time.monotonic() - began
        return count + await self._reclaim_all(batch, frontier.compares)

    async def _reclaim_all(self, dead: Sequence[DeadVersion], compares: Sequence[Compare]) -> int:
        """How many went: those of a batch one by one, where one of them may not."""
        count = 0
        batch_count = (COMPARES_MAX - 1 - len(compares)) // 3
        for start in range(0, len(dead), batch_count):
            batch = dead[start : start + batch_count]
            began = time.monotonic()
            if await self._reclaim(batch, compares):
                count += len(batch)
            elif len(batch) > 1:
                count += sum([await self._reclaim([one], compares) for one in batch])
            await trio.sleep(GIVE_WAY_FACTOR * (time.monotonic() - began))
        return count

    async def _reclaim(self, batch: Sequence[DeadVersion], while_they_hold: Sequence[Compare]) -> bool:
        """False, and nothing happened, if somebody reads one of them, or it has changed, or one of the compares doesn't hold."""
        if not batch or not self._leadership.is_held:
            return False
        compares: list[Compare] = [self._leadership.compare(), *while_they_hold]
        for one in batch:
            compares.append(Unchanged(version_key(one.vid), one.died_at_revision))
            segments = {SegmentId(one.vid), one.version.segment} - {NO_SEGMENT}
            compares += [EmptyRange(hold_prefix(segment)) for segment in sorted(segments)]
        return (await self._kv.transact(compares, [Delete(version_key(one.vid)) for one in batch])).succeeded


def _dead(entry: Entry, version: Version) -> DeadVersion:
    return DeadVersion(entry.mod_revision, vid_of_key(entry.key), version)
