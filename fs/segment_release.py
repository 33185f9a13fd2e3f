"""Segments of protected versions, released when the drive gets full: what was written longest ago goes first.

The bytes of a protected version are in its shards, so its segment is a cache (R3); but shards rot unseen, and then it is what
they are made anew from. So each version is *proved* before its segment goes: every holder reads its shard from the drive and
hashes it, and what is wrong is made right first. Released are only versions all of whose shards are right now, and that would
survive the loss of a failure domain, of files that nobody uses; they are read from their shards afterwards. Order: the catalog's
fact that there is no segment, if the shards are still those that were proved, durable; then the unlink (R22). An unprotected byte
is never released. Local copies of other nodes' files, which are the agent's, go before.

Free is to be the reserve, and room for a save as large as the newest. Where that can't be had a warning says so before the save.
"""

import heapq
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import chain

import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Version, VersionState
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.reserve import room_at
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs.durability import Fact
from ckptfs.fs.local_socket import NodeNotAnswering
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
NOTHING_FOUND_SECONDS = 30.0
"""After a walk over the catalog that found nothing to release."""

BATCH_COUNT = 64
WALKED_AT_ONCE = 500
OLDEST_MAX = 10_000
"""So many are found by one walk over the catalog: about 1 MiB."""

PROVE_AGAIN_SECONDS = 300.0
"""A version that could not be proved is not tried again sooner: its shards were read for nothing, and repaired in vain."""

SAVE_ENDS_SECONDS = 30.0
"""A pause this long between two files that become local ends a save."""

SAVE_SECONDS_MAX = 300.0
"""What somebody writes without a pause is not one save."""


class SaveSize:
    """How large a save is: of the newest and the one before, the larger. Bytes."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_at = self._last_at = float("-inf")
        self._before = self._newest = 0

    def add(self, size_bytes: int) -> None:
        """So much became local now."""
        now = self._now()
        if now - self._last_at > SAVE_ENDS_SECONDS or now - self._began_at > SAVE_SECONDS_MAX:
            self._before, self._newest, self._began_at = self._newest, 0, now
        self._newest += size_bytes
        self._last_at = now

    @property
    def bytes(self) -> int:
        return max(self._before, self._newest)


class SegmentRelease:
    """`run` releases until it is cancelled. `standing` answers as `Durability.states`, for inodes that exist; `keep_free` has the
    agent release local copies until so many bytes are free; `prove` has every holder of a protected version hash its shard and
    gives the reason why the version's segment must stay, or "", or raises `NodeNotAnswering`."""

    def __init__(
        self,
        versions: Versions,
        segments: Segments,
        open_files: OpenFiles,
        reclaimer: Reclaimer,
        store: StoreId,
        directory: os.PathLike[str],
        reserve_fraction: float,
        save_size: SaveSize,
        standing: Callable[[list[InodeNumber]], Awaitable[dict[int, Fact]]],
        keep_free: Callable[[int], Awaitable[None]],
        prove: Callable[[Vid], Awaitable[str]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._reclaimer = reclaimer
        self._store = store
        self._directory = directory
        self._reserve_fraction = reserve_fraction
        self._save_size = save_size
        self._standing = standing
        self._keep_free = keep_free
        self._prove = prove
        self._now = now
        self._not_before: dict[Vid, float] = {}
        self._told_bytes = 0
        self.released_bytes = 0
        self.warning = ""

    async def run(self) -> None:
        while True:
            pause_seconds = LOOK_SECONDS
            try:
                await self.release_copies()
                if self.wanted_bytes() > 0 and not await self.release():
                    pause_seconds = NOTHING_FOUND_SECONDS
                self._warn()
            except (CacheError, OSError, NodeNotAnswering) as error:
                log.warning("segments_not_released error=%s", error)
            await trio.sleep(pause_seconds)

    def wanted_bytes(self) -> int:
        """What is free less than it should be."""
        return self._target_bytes() - room_at(self._directory).free_bytes

    def _target_bytes(self) -> int:
        total_bytes = room_at(self._directory).total_bytes
        return max(int(self._reserve_fraction * total_bytes), min(self._save_size.bytes, total_bytes // 2))

    async def release_copies(self) -> None:
        """Have local copies released, if that is wanted, and let go of those that were."""
        target_bytes = self._target_bytes()
        if self.wanted_bytes() > 0 or target_bytes != self._told_bytes:
            await self._keep_free(target_bytes)
            self._told_bytes = target_bytes
        self._open_files.close_evicted_copies()

    async def release(self) -> int:
        """Release what is wanted, as far as there is anything; returns how many segments."""
        count = 0
        now = self._now()
        self._not_before = {vid: at for vid, at in self._not_before.items() if at > now}
        candidates = await self._oldest_first()
        for start in range(0, len(candidates), BATCH_COUNT):
            found = [(vid, await self._versions.version(vid)) for vid in candidates[start : start + BATCH_COUNT]]
            batch = [(vid, version) for vid, version in found if version is not None and version.segment != NO_SEGMENT]
            facts = await self._standing([version.ino for _, version in batch])
            for vid, version in batch:
                if self.wanted_bytes() <= 0:
                    return count
                fact = facts.get(version.ino)
                if fact is None or fact["state"] != "protected" or not fact["protected_m"]:
                    continue
                if self._open_files.get(version.ino) is not None or not await self._is_proved(vid, version):
                    continue
                if await self._release(vid, version):
                    count += 1
                    await self._reclaimer.drain()
        return count

    async def _oldest_first(self) -> list[Vid]:
        """The protected versions whose segments were written longest ago, as far as they are not to be passed over now."""
        oldest: list[tuple[int, Vid]] = []
        walked: list[tuple[SegmentId, Vid]] = []

        def merge() -> list[tuple[int, Vid]]:
            written = ((self._segments.written_at_ns(segment), vid) for segment, vid in walked)
            return heapq.nsmallest(OLDEST_MAX, chain(oldest, written))

        walk = self._versions.walk_local_versions(self._store, (VersionState.PROTECTED,), damaged=set())
        async with aclosing(walk) as versions:
            async for vid, version in versions:
                if version.segment != NO_SEGMENT and vid not in self._not_before:
                    walked.append((version.segment, vid))
                if len(walked) == WALKED_AT_ONCE:
                    oldest = await trio.to_thread.run_sync(merge)
                    walked.clear()
        oldest = await trio.to_thread.run_sync(merge)
        return [vid for _, vid in oldest]

    async def _is_proved(self, vid: Vid, version: Version) -> bool:
        reason = await self._prove(vid)
        if reason:
            self._not_before[vid] = self._now() + PROVE_AGAIN_SECONDS
            log.warning("segment_kept inode=%d size=%d: its shards are not all right: %s", version.ino, version.size, reason)
        return not reason

    async def _release(self, vid: Vid, version: Version) -> bool:
        async with self._open_files.alone(version.ino):
            if self._open_files.get(version.ino) is not None:
                return False
            self._open_files.releasing.add(version.segment)  # whoever opens it from here on reads the shards
            try:
                released = await self._versions.release_segment(vid, version.shards)
            finally:
                self._open_files.releasing.discard(version.segment)
        if not released:
            return False
        size = self._segments.size(version.segment)
        self.released_bytes += size
        log.info("segment_released inode=%d size=%d: it is read from its shards now", version.ino, size)
        self._reclaimer.segment(version.segment, at_once=False)
        return True

    def _warn(self) -> None:
        """Say before the save that it may not fit."""
        before, wanted = self.warning, self.wanted_bytes()
        self.warning = ""
        if wanted > 0:
            free = room_at(self._directory).free_bytes
            self.warning = (
                f"{free >> 20} MiB are free, {free + wanted >> 20} MiB are wanted for the next save, and nothing more can be "
                "released: delete files, or wait until more is protected"
            )
        if self.warning and not before:
            log.warning("save_may_not_fit %s", self.warning)
        elif before and not self.warning:
            log.info("save_fits_again")
