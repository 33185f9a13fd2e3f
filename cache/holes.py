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
    """The holes of one file, as far as it doesn't change; asked from its beginning on, each is looked for once. The descriptor is
    the caller's; its file offset moves."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._is_sparse = status.st_blocks * 512 < status.st_size
        self._size = status.st_size
        self._newest = 0, 0
        """Where the hole that was asked about last begins, as far as is known, and ends. One object, for the sake of threads."""

    def cover(self, offset: int, length: int) -> bool:
        """Whether all of this part of the file is in one hole. Never raises: what isn't known counts as data."""
        if not self._is_sparse:
            return False
        begin, end = self._newest
        if not begin <= offset < end:
            end = _next(self._descriptor, offset, os.SEEK_DATA, 1 << 63)
            self._newest = offset, end
        return offset + length <= end

    def whole_units(self, unit_bytes: int) -> int:
        """How many of the file's consecutive units of so many bytes are wholly in a hole. The last one counts if it is whole."""
        count = at = 0
        while self._is_sparse and at < self._size:
            begin = _next(self._descriptor, at, os.SEEK_HOLE, self._size)
            at = _next(self._descriptor, begin, os.SEEK_DATA, self._size)
            if at <= begin:
                break
            count += max(0, at // unit_bytes - -(-begin // unit_bytes))
        return count


def _next(descriptor: int, offset: int, whence: int, nowhere: int) -> int:
    try:
        return os.lseek(descriptor, offset, whence)
    except OSError as error:
        return nowhere if error.errno == errno.ENXIO else offset  # ENXIO: nothing of the kind up to the end
