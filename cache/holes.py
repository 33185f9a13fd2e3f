"""Holes: what of a file was never written reads as zeros, and is hashed without being read.

So a file of terabytes with little in it costs what is in it. A hole is only what the file system says is one (lseek(2),
SEEK_DATA): zeros that were written are data.
"""

import errno
import functools
import os

from ckptfs.cache.checksum import cell_hash


@functools.lru_cache(maxsize=16)
def zero_hash(length: int) -> bytes:
    """The hash of a cell of so many zeros."""
    return cell_hash(bytes(length))


class Holes:
    """The holes of one file, as far as it doesn't change; asked from its beginning on, each is looked for once. Not for several
    threads. The descriptor is the caller's; its file offset moves."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._is_sparse = status.st_blocks * 512 < status.st_size
        self._begin = self._end = 0

    def cover(self, offset: int, length: int) -> bool:
        """Whether all of this part of the file is in one hole. Never raises: what isn't known counts as data."""
        if not self._is_sparse:
            return False
        if not self._begin <= offset < self._end:
            self._begin, self._end = offset, self._next_data(offset)
        return offset + length <= self._end

    def _next_data(self, offset: int) -> int:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            return 1 << 63 if error.errno == errno.ENXIO else offset  # ENXIO: nothing but a hole up to the end
