"""Dead versions whose shards nobody needs any more lose their key, and with it every store's reason to keep a shard (R1, R9).

A protected version that was replaced or deleted stays until the grace has passed, and until everything that was being saved
before its death is protected or gone (the *frontier*): so rotating checkpoints never leaves only one that a single drive has.
Nothing reads it then: who has it open on another node says so in the catalog (`cache.segment_holds`), and the transaction
compares that nobody does.

How long a version has been dead is measured on this process's own clock, from when it first saw it dead: the wall clock of the
node that stamped the death may be an hour off, and then the grace would be over before it began, or not for another hour.

The leader does this for all (`leadership`).
"""

import logging
import time
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
    unpack,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import Compare, Delete, EmptyRange, KeyValue, Unchanged
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.ids import SegmentId, Vid
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
"""Looked at in one walk; the oldest."""


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
    """The oldest revisions at which a version began that isn't protected yet: one that was closed, one that is open."""

    closed: float
    opened: float

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
        self._dead_since: dict[Vid, float] = {}
        self._grace_seconds = grace_seconds
        self._pause_seconds = pause_seconds

    async def pause(self, began: float) -> None:
        """Between two walks: they take at most a fiftieth of the time, however many files there are."""
        await trio.sleep(max(self._pause_seconds, PAUSE_SHARE * (time.monotonic() - began)))

    async def collect(self) -> int:
        """One walk; returns how many keys went. Raises `CatalogUnavailable`, `DamagedData`."""
        if not self._leadership.is_held:
            return 0
        members = [member for member in self._members.known() if member.live and member.state is StoreState.IN]
        dead, frontier = await self._walk()
        self.statistics.dead = len(dead)
        now = self._now()
        self._dead_since = {one.vid: self._dead_since.get(one.vid, now) for one in dead}
        full = len(members) > 1 and sum(member.free_bytes > 0 for member in members) < DOMAINS_WITH_SPACE_MIN
        count = 0
        for one in dead:
            age_seconds = now - self._dead_since[one.vid]
            if age_seconds < self._grace_seconds:
                continue
            allowed = frontier.allows(one, age_seconds)
            if not (allowed or full):
                continue
            if await self._reclaim(one):
                count += 1
                self.statistics.reclaimed += 1
                if not allowed:
                    self.statistics.early += 1
                    logger.warning(
                        "reclaimed-early vid=%s size=%d: the stores are full; what replaced it may not be protected yet",
                        one.vid.hex(),
                        one.version.size,
                    )
        if count:
            logger.info("dead-versions-reclaimed count=%d left=%d", count, len(dead) - count)
        return count

    async def _walk(self) -> tuple[Sequence[DeadVersion], Frontier]:
        dead: list[DeadVersion] = []
        damaged: set[bytes] = set()
        closed = opened = float("inf")
        gone = {member.store for member in self._members.known() if member.state in (StoreState.LOST, StoreState.REMOVED)}
        async with aclosing(scan(self._kv, VERSION_PREFIX, damaged=damaged)) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is VersionState.DEAD:
                    dead.append(DeadVersion(entry.mod_revision, vid_of_key(entry.key), version))
                    if len(dead) > 2 * DEAD_MAX:
                        dead = sorted(dead)[:DEAD_MAX]
                elif version.home in gone:
                    continue  # nobody protects it: it is rolled back, and its store may never return
                elif version.state is VersionState.LOCAL:
                    closed = min(closed, entry.create_revision)
                elif version.state is VersionState.OPEN:
                    opened = min(opened, entry.create_revision)
        self.statistics.damaged = len(damaged)
        if damaged:
            closed = 0.0  # it may be of what was being saved before all others died
        return sorted(dead)[:DEAD_MAX], Frontier(closed, opened)

    async def _reclaim(self, dead: DeadVersion) -> bool:
        """False if somebody reads it, or it has changed."""
        segments = {SegmentId(dead.vid), dead.version.segment} - {NO_SEGMENT}
        unread = [EmptyRange(hold_prefix(segment)) for segment in sorted(segments)]
        if not self._leadership.is_held:
            return False
        unchanged = Unchanged(version_key(dead.vid), dead.died_at_revision)
        compares: list[Compare] = [self._leadership.compare(), unchanged, *unread]
        return (await self._kv.transact(compares, [Delete(version_key(dead.vid))])).succeeded
