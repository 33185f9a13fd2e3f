"""Reading the store's files for the served lane: without a thread what is in memory, with one what isn't."""

import os

import trio

READS_MAX = 16
"""Each has up to a MiB in memory."""


class DiskReads:
    """A bounded number of reads at once."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(READS_MAX)

    async def read(self, descriptor: int, size: int, offset: int) -> bytes | bytearray:
        """Bytes of the file, short at its end. Raises `OSError`."""
        buffer = bytearray(size)
        try:
            count = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
            if count == size:
                return buffer
        except OSError:  # not in memory, or a file system that can't say
            pass
        del buffer  # nothing is held by those who wait for a thread
        own = os.dup(
            descriptor
        )  # the caller's may be closed, and its number given to another file, before the thread has its turn
        try:
            return await trio.to_thread.run_sync(os.pread, own, size, offset, limiter=self._limiter)
        finally:
            os.close(own)
