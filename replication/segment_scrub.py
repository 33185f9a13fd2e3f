"""The only copies there are, hashed again now and then: segments of this home's versions that are not protected yet.

Protecting a version reads it once more anyhow. What waits for that long (too few nodes, a full cluster) lies on one drive, and
damage to it is worth knowing while its writer may still save it again. It is marked as `verify` does, so status says it and
programs get EIO. Nothing here can make it right.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.checksum import HASH_SIZE
from ckptfs.cache.errors import CacheError
from ckptfs.cache.holes import zero_hash
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.cache.version_recovery import versions_at_home
from ckptfs.replication.home_segment import SegmentStanding, check_segment
from ckptfs.replication.kept_content import SegmentVersions
from ckptfs.replication.pace import Pace
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.segment_files import SegmentFiles, SegmentHashes, SegmentPaths

logger = logging.getLogger(__name__)

FIRST_SECONDS_MAX = 3600.0
"""After the start, so that a node that is started again and again doesn't read all the time."""
READ_BYTES = 8 << 20
"""How much is read before the pace is asked."""
BYTES_PER_SECOND_MIN = 1 << 20
SHARE_OF_PERIOD = 0.5


@dataclass
class SegmentScrubStatistics:
    """Since the start: segments that were hashed, and that were found damaged or missing; `last_ended_ns` (wall time) is when the
    last pass was over."""

    checked: int = 0
    damaged: int = 0
    last_ended_ns: int = 0


class SegmentScrub:
    """Use: `run` in a nursery. `now_ns` is the wall clock; `period_seconds` 0: never. `limit` is shared with whoever else reads
    while nobody waits."""

    def __init__(
        self,
        kv: KeyValue,
        versions: SegmentVersions,
        segments: SegmentPaths,
        own_store: StoreId,
        threads: QuietThreads,
        now_ns: Callable[[], int],
        limit: Pace,
        *,
        period_seconds: float,
    ) -> None:
        self.statistics = SegmentScrubStatistics()
        self._kv = kv
        self._versions = versions
        self._segments = SegmentFiles(segments)
        self._own_store = own_store
        self._threads = threads
        self._now_ns = now_ns
        self._limit = limit
        self._period_seconds = period_seconds

    async def run(self) -> None:
        if not self._period_seconds:
            return
        await trio.sleep(min(self._period_seconds, FIRST_SECONDS_MAX))
        while True:
            try:
                await self.pass_over()
            except CacheError as error:
                logger.info("segment-scrub-put-off error=%s: %s", type(error).__name__, error)
            await trio.sleep(self._period_seconds)

    async def pass_over(self) -> None:
        """Hash all of them once. Raises `CacheError`."""
        waiting_bytes = 0
        async with aclosing(self._unprotected()) as versions:
            async for _, version in versions:
                waiting_bytes += version.size
        rate = 0.0
        if self._period_seconds:
            rate = max(waiting_bytes / (SHARE_OF_PERIOD * self._period_seconds), BYTES_PER_SECOND_MIN)
        homes = _Paced(self._segments, self._threads, Pace(rate, within=self._limit))
        async with aclosing(self._unprotected()) as versions:
            async for vid, _ in versions:
                await self._look_at(vid, homes)
        self.statistics.last_ended_ns = self._now_ns()

    def _unprotected(self) -> AsyncGenerator[tuple[Vid, Version], None]:
        return versions_at_home(self._kv, self._own_store, (VersionState.LOCAL,))

    async def _look_at(self, vid: Vid, homes: "_Paced") -> None:
        version = await self._versions.version(vid)  # as it is now: the walk may have read it hours ago
        if version is None or version.state is not VersionState.LOCAL or version.home != self._own_store:
            return
        check = await check_segment(homes, vid, version)
        if check.standing not in (SegmentStanding.RIGHT, SegmentStanding.DAMAGED, SegmentStanding.MISSING):
            return
        self.statistics.checked += 1
        is_wrong = check.standing is not SegmentStanding.RIGHT
        if is_wrong == version.damaged or not await self._versions.mark_damaged(vid, version.segment, is_wrong):
            return  # nothing new; or opened for writing meanwhile, replaced or deleted: that was another content's
        if is_wrong:
            self.statistics.damaged += 1
            logger.error(
                "segment-damaged vid=%s ino=%d segment=%s: %s; it is not protected, nothing can repair it: save the file again",
                vid.hex(), version.ino, version.segment.hex(), check.message,
            )  # fmt: skip


class _Paced(NamedTuple):
    """The own store, asked for hashes a few at a time."""

    segments: SegmentFiles
    threads: QuietThreads
    pace: Pace

    async def segment_hashes(
        self, store: StoreId, segment: SegmentId, cell_size: int, first_cell: int, count: int
    ) -> SegmentHashes:
        size, table = 0, bytearray()
        hole = zero_hash(cell_size)
        step = max(1, READ_BYTES // cell_size)
        for first in range(first_cell, first_cell + count, step):
            wanted = min(step, first_cell + count - first)
            size, hashes = await self.threads.run(self.segments.hashes, segment, cell_size, first, wanted, lambda: None)
            table += hashes
            cells = [hashes[at : at + HASH_SIZE] for at in range(0, len(hashes), HASH_SIZE)]
            await self.pace.spend(cell_size * sum(cell != hole for cell in cells))
            if len(cells) < wanted:
                break
        return SegmentHashes(size, bytes(table))
