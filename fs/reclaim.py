"""Segments whose versions ended: the catalog's fact durable first, then unlink, in batches.

The segment of a version that was never durable goes at once: after a power cut nothing would show it, and its dirty pages would
only keep the disk busy (leaving them made later writes ten times slower).
"""

import logging

import trio

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import SegmentId
from ckptfs.cache.segments import Segments

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


class Reclaimer:
    """Takes segment ids and unlinks them in the background, in threads. What is lost with the process, recovery finds."""

    def __init__(self, kv: KeyValue, segments: Segments) -> None:
        self._kv = kv
        self._segments = segments
        self._at_once: list[SegmentId] = []
        self._after_barrier: list[SegmentId] = []
        self._work = trio.Event()
        self.removed_count = 0

    def segment(self, segment: SegmentId, *, at_once: bool) -> None:
        """Remove the segment: at once, or after everything the catalog has committed so far is durable."""
        (self._at_once if at_once else self._after_barrier).append(segment)
        self._work.set()

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self.drain()

    async def drain(self) -> None:
        """Remove everything asked for so far."""
        at_once, self._at_once = self._at_once, []
        if at_once:
            await trio.to_thread.run_sync(self._remove, at_once)
        while self._after_barrier:
            batch, self._after_barrier = self._after_barrier, []
            try:
                await self._kv.make_durable()
            except CatalogUnavailable:
                self._after_barrier += batch
                await trio.sleep(RETRY_SECONDS)
                continue
            await trio.to_thread.run_sync(self._remove, batch)

    def _remove(self, segments: list[SegmentId]) -> None:
        for segment in segments:
            try:
                self._segments.remove(segment)
                self.removed_count += 1
            except OSError as error:
                log.error("segment_not_removed segment=%s error=%s", segment.hex(), error.strerror)
