"""Memory for bytes under way, bounded over all that use it."""

import contextlib
import mmap
from collections.abc import AsyncIterator
from mmap import PAGESIZE

import trio

IDLE_BYTES_MAX = 8 << 20
"""How much is kept while nothing is under way. Before, all is: touching a new MiB costs (m) 0.2 to 0.8 ms in a virtual machine,
as much as sending it."""


class BufferBudget:
    """Gives out buffers in the order they were asked for; never more than `total_bytes` at once, those kept for the next use
    included."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self._idle: list[mmap.mmap] = []
        self._turn = trio.Lock()
        self._returned = trio.lowlevel.ParkingLot()

    @contextlib.asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[memoryview]:
        """A buffer of `size` bytes, with any content, for the `async with` block. Raises `ValueError` for more than the
        total. Each is a mapping of its own, so that its memory goes back to the system."""
        if size > self.total_bytes:
            raise ValueError(f"{size} bytes of {self.total_bytes} can't be had")
        rounded = min(-(-max(size, 1) // PAGESIZE) * PAGESIZE, self.total_bytes)
        async with self._turn:
            while self.current_bytes + rounded > self.total_bytes:
                await self._returned.park()
            self.current_bytes += rounded
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        memory = self._take_idle(rounded)
        try:
            yield memoryview(memory)[:size]
        finally:
            self.current_bytes -= rounded
            self._idle.append(memory)
            self._trim(self.total_bytes - self.current_bytes if self.current_bytes else IDLE_BYTES_MAX)
            self._returned.unpark_all()

    def _take_idle(self, size: int) -> mmap.mmap:
        for number, memory in enumerate(self._idle):
            if len(memory) == size:
                return self._idle.pop(number)
        self._trim(self.total_bytes - self.current_bytes)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # one fault for 2 MiB, not 512
        return memory

    def _trim(self, bytes_max: int) -> None:
        """Let go of the mappings that were idle longest."""
        while sum(map(len, self._idle)) > bytes_max:
            self._idle.pop(0)  # the mapping ends with the last view of it
