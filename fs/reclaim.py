"""Segments whose versions ended: the catalog's fact durable first, then unlink, in batches; but none that is read elsewhere.

The segment of a version that was never durable goes at once: after a power cut nothing would show it, and its dirty pages would
only keep the disk busy (leaving them made later writes ten times slower).
"""

import contextlib
import logging
from collections.abc import Callable

import trio

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import SegmentId
from ckptfs.cache.segments import Segments
from ckptfs.fs.remote_readers import RemoteReaders

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
READ_SECONDS = 5.0
"""How often it is asked whether what programs on other nodes still read may go."""


class Reclaimer:
    """Takes segment ids and unlinks them in the background, in threads. What is lost with the process, recovery finds."""

    def __init__(self, kv: KeyValue, segments: Segments, readers: RemoteReaders) -> None:
        self._kv = kv
        self._segments = segments
        self._readers = readers
        self._still_read: set[SegmentId] = set()
        self._at_once: list[SegmentId] = []
        self._after_barrier: list[SegmentId] = []
        self._then: list[Callable[[], None]] = []
        self._work = trio.Event()
        self.removed_count = 0

    def segment(self, segment: SegmentId, *, at_once: bool) -> None:
        """Remove the segment: at once, or after everything the catalog has committed so far is durable."""
        (self._at_once if at_once else self._after_barrier).append(segment)
        self._work.set()

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call it as soon as everything the catalog has committed so far is durable."""
        self._then.append(then)
        self._work.set()

    def is_still_read(self, segment: SegmentId) -> bool:
        """Whether it is to go as soon as programs on other nodes have closed it."""
        return segment in self._still_read

    async def run(self) -> None:
        while True:
            with trio.move_on_after(READ_SECONDS if self._still_read else float("inf")) as waiting:
                await self._work.wait()
            self._work = trio.Event()
            if waiting.cancelled_caught:
                with contextlib.suppress(CatalogUnavailable):
                    await self._readers.forget_the_dead(self._still_read)
            await self.drain()

    async def drain(self) -> None:
        """Remove everything asked for so far that may go."""
        at_once = [*self._at_once, *self._still_read]
        self._at_once = []
        await self._remove_unread(at_once)
        while self._after_barrier or self._then:
            batch, self._after_barrier = self._after_barrier, []
            then, self._then = self._then, []
            try:
                await self._kv.make_durable()
            except CatalogUnavailable:
                self._after_barrier += batch
                self._then += then
                await trio.sleep(RETRY_SECONDS)
                continue
            for call in then:
                call()
            await self._remove_unread(batch)

    async def _remove_unread(self, segments: list[SegmentId]) -> None:
        if not segments:
            return
        try:
            still_read = await self._readers.of(segments)
        except CatalogUnavailable:
            still_read = set(segments)  # asked again soon
        self._still_read = self._still_read.difference(segments) | still_read
        if free := [segment for segment in segments if segment not in still_read]:
            await trio.to_thread.run_sync(self._remove, free)

    def _remove(self, segments: list[SegmentId]) -> None:
        for segment in segments:
            try:
                self._segments.remove(segment)
                self.removed_count += 1
            except OSError as error:
                log.error("segment_not_removed segment=%s error=%s", segment.hex(), error.strerror)
