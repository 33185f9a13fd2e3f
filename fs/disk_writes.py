"""Writing segments for the served lane: without a thread while the page cache takes bytes at once, with one when it doesn't.

Handing a MiB to a thread and back takes as long as copying it. But a writer that is faster than its drive is made to wait by the
kernel in the middle of a write, and then nobody else is to wait with it.
"""

import os
import time

import trio

SLOW_SECONDS = 0.005
"""A write of a MiB takes a fraction of a millisecond unless it has to wait."""
CAREFUL_SECONDS = 1.0
"""For so long after a slow write all go to threads: what slows one down slows the next ones too."""


class DiskWrites:
    """One write at a time is made without a thread; the others find out whether there is one by asking for it."""

    def __init__(self) -> None:
        self._careful_until = 0.0
        self._in_threads = 0

    async def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Bytes written. Raises `OSError`. The data are used until it returns."""
        started = time.monotonic()
        if self._in_threads or started < self._careful_until:
            self._in_threads += 1
            try:
                written = await trio.to_thread.run_sync(os.pwrite, descriptor, data, offset)
            finally:
                self._in_threads -= 1
        else:
            written = os.pwrite(descriptor, data, offset)
        ended = time.monotonic()
        if ended - started > SLOW_SECONDS:
            self._careful_until = ended + CAREFUL_SECONDS
        return written
