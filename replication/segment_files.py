"""Reading this node's segments, for itself and for peers: bytes, size, hashes, as they are now. Blocking, for threads.

A path is made from a segment's id only. All raise `ShardNotFound` where there is no such segment, `ShardDamaged` where the drive
doesn't give it, and `PeerRefused` (busy) where that is not the segment's fault.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from ckptfs.cache.ids import SegmentId
from ckptfs.cache.segments import hash_cells
from ckptfs.replication.errors import ShardDamaged, ShardNotFound
from ckptfs.replication.unopened import unopened


class SegmentPaths(Protocol):
    """What is needed of `cache.segments.Segments`."""

    def path_of(self, segment: SegmentId) -> str: ...


class SegmentStatus(NamedTuple):
    """A segment at its home, as it is now: bytes, nanoseconds, blocks of 512 bytes."""

    size: int
    mtime_ns: int
    blocks: int


class SegmentHashes(NamedTuple):
    """A segment's size in bytes, and the hashes of the cells that were asked for, as far as there are such."""

    size: int
    hashes: bytes


class SegmentFiles:
    """The segments of one store."""

    def __init__(self, paths: SegmentPaths) -> None:
        self._paths = paths

    def read(self, segment: SegmentId, offset: int, buffer: memoryview) -> int:
        """Read into the buffer; returns how many bytes, fewer than fit only at the segment's end."""
        with self._opened(segment) as descriptor:
            count = 0
            while count < len(buffer):
                more = os.preadv(descriptor, [buffer[count:]], offset + count)
                if not more:
                    break
                count += more
            return count

    def status(self, segment: SegmentId) -> SegmentStatus:
        with self._opened(segment) as descriptor:
            status = os.fstat(descriptor)
            return SegmentStatus(status.st_size, status.st_mtime_ns, status.st_blocks)

    def hashes(
        self, segment: SegmentId, cell_size: int, first_cell: int, count: int, still_wanted: Callable[[], object]
    ) -> SegmentHashes:
        """Re-read cells from the drive and hash them; `cache.segments.UNREADABLE` for a cell it doesn't give. `still_wanted` is
        called before each cell, and raises to end it."""
        with self._opened(segment) as descriptor:
            size = os.fstat(descriptor).st_size
            return SegmentHashes(size, hash_cells(descriptor, cell_size, first_cell, count, still_wanted))

    @contextmanager
    def _opened(self, segment: SegmentId) -> Iterator[int]:
        try:
            descriptor = os.open(self._paths.path_of(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise ShardNotFound(f"the home has no segment {segment.hex()} any more") from None
        except OSError as error:
            raise unopened(error, f"the segment {segment.hex()}") from None
        try:
            yield descriptor
        except OSError as error:
            raise ShardDamaged(f"the segment {segment.hex()} can't be read: {error.strerror}") from None
        finally:
            os.close(descriptor)
