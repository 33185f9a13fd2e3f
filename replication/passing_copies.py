"""Content that passes through memory, because the drive has no room for a copy of it: the few parts that were read last.

What is not there any more is fetched again, so reading goes on, at the cost of the network, within a bounded memory.
"""

import threading
from collections import OrderedDict

from ckptfs.cache.checksum import HASH_SIZE
from ckptfs.cache.ids import Vid

PARTS_KEPT_MIN = 8
"""A read touches two parts at most, and there are at most `restore.PASSING_READS_MAX` at a time."""


class PassingMemory:
    """The parts of all copies that pass. Safe to use from several threads."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` is for all parts together, unless the `PARTS_KEPT_MIN` newest take more."""
        self._bytes_max = bytes_max
        self._parts: OrderedDict[tuple[Vid, int], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.current_bytes = 0

    def put(self, vid: Vid, offset: int, data: bytes) -> None:
        """Keep a part that begins at `offset`, and let go of those used longest ago."""
        with self._lock:
            self.current_bytes += len(data) - len(self._parts.pop((vid, offset), b""))
            self._parts[vid, offset] = data
            while self.current_bytes > self._bytes_max and len(self._parts) > PARTS_KEPT_MIN:
                self.current_bytes -= len(self._parts.popitem(last=False)[1])

    def get(self, vid: Vid, offset: int) -> bytes | None:
        """The part that begins there, or None if it was let go."""
        with self._lock:
            data = self._parts.get((vid, offset))
            if data is not None:
                self._parts.move_to_end((vid, offset))
            return data

    def drop(self, vid: Vid) -> None:
        """Let go of all parts of a version."""
        with self._lock:
            for key in [key for key in self._parts if key[0] == vid]:
                self.current_bytes -= len(self._parts.pop(key))


class PassingCopy:
    """Stands in for a `LocalCopy` of the same content. It is written in whole parts of `part_size` bytes."""

    may_hold_cells = False

    def __init__(self, memory: PassingMemory, vid: Vid, size: int, cell_size: int, table: bytes, part_size: int) -> None:
        self._memory = memory
        self.vid = vid
        self.size = size
        self.cell_size = cell_size
        self.table = table
        self.part_size = part_size
        self.present = bytearray(-(-size // cell_size))

    def cell_length(self, cell: int) -> int:
        return min(self.cell_size, self.size - cell * self.cell_size)

    def cell_digest(self, cell: int) -> bytes:
        return self.table[cell * HASH_SIZE : (cell + 1) * HASH_SIZE]

    def check(self, first_cell: int, cells: int, buffer: memoryview) -> list[int]:
        """Nothing is known of what memory holds but what `present` says."""
        return []

    def write(self, offset: int, data: memoryview) -> None:
        """Keep one part of checked bytes. Does not keep the buffer."""
        self._memory.put(self.vid, offset, bytes(data))

    def read(self, offset: int, length: int) -> bytes | None:
        """Bytes that are there, short at the end; None if some were let go meanwhile, which `present` says then."""
        pieces: list[bytes] | None = []
        end = min(offset + length, self.size)
        for start in range(offset // self.part_size * self.part_size, end, self.part_size):
            part = self._memory.get(self.vid, start)
            if part is None:
                first = start // self.cell_size
                last = -(-min(start + self.part_size, self.size) // self.cell_size)
                self.present[first:last] = bytes(last - first)
                pieces = None
            elif pieces is not None:
                pieces.append(part[max(0, offset - start) : end - start])
        return None if pieces is None else b"".join(pieces)

    def exists(self) -> bool:
        return True

    def close(self) -> None:
        """Let go of everything."""
        self._memory.drop(self.vid)
