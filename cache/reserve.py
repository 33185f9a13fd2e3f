"""Room on a drive, taken before it is needed, so that what must go on when the drive is full can: deleting, recovery, starting.

A file that grows can *hold* room beyond its end (fallocate(2) with KEEP_SIZE): readers see nothing of it, no other file can take
it, and what is appended there can't meet a full drive. Cutting the file, even to the size it has, gives the room back.

A *reserve* is a file of its own, and some empty ones that hold an inode each, removed when room is needed for what has no file
yet.
"""

import contextlib
import ctypes
import errno
import os
from pathlib import Path
from typing import NamedTuple

_KEEP_SIZE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

SPARE_INODES = 7
"""Besides that of the reserve itself. Three processes that start replace a few small files each: for a moment there are two."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Room(NamedTuple):
    """What a file system has: free for everybody, in all, and how many more files there can be. Sizes in bytes."""

    free_bytes: int
    total_bytes: int
    free_inodes: int


def room_at(path: str | os.PathLike[str]) -> Room:
    """The room of the file system the path lies on. Raises `OSError`."""
    status = os.statvfs(path)
    inodes = status.f_favail if status.f_files else 1 << 62  # some file systems make them as they are needed and count none
    return Room(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize, inodes)


def share_of(path: str | os.PathLike[str], fraction: float, bytes_min: int, bytes_max: int) -> int:
    """That fraction of the whole file system, within the limits: on a small one a reserve must not be all there is."""
    return min(max(int(room_at(path).total_bytes * fraction), bytes_min), bytes_max)


def hold_beyond_end(descriptor: int, size_bytes: int) -> int:
    """Have the file hold `size_bytes` beyond its end, taken anew when less than half is left. Returns the bytes that lack of
    that half: 0 unless the drive is full. A file system without fallocate can't hold anything, which counts as nothing lacking.

    `descriptor` is open for writing. Raises `OSError` for a drive that is broken rather than full.
    """
    lacking = lacking_beyond_end(descriptor, size_bytes)
    if not lacking:
        return 0
    status = os.fstatvfs(descriptor)
    if status.f_bavail * status.f_frsize < size_bytes:  # a part of it would only be missed elsewhere
        return lacking
    if _libc.fallocate(descriptor, _KEEP_SIZE, os.fstat(descriptor).st_size, size_bytes) == 0:
        return 0
    number = ctypes.get_errno()
    if number == errno.EOPNOTSUPP:
        return 0
    if number not in _FULL:
        raise OSError(number, os.strerror(number))
    return lacking_beyond_end(descriptor, size_bytes)  # others were faster, and a part of it may have been had


def lacking_beyond_end(descriptor: int, size_bytes: int) -> int:
    """How many bytes the file holds less than half of `size_bytes` beyond its end."""
    status = os.fstat(descriptor)
    return max(0, size_bytes // 2 - (status.st_blocks * 512 - status.st_size))


class Reserve:
    """One file of `size_bytes`, and the spare inodes beside it. Any process of the node may give it up or make it again."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._spare = [path.with_name(f"{path.name}.{number + 1}") for number in range(SPARE_INODES)]

    def lacking_bytes(self) -> int:
        """How much of it is not there: 0 if it is whole."""
        try:
            return max(0, self.size_bytes - os.stat(self.path).st_blocks * 512)
        except FileNotFoundError:
            return self.size_bytes

    def give_up(self) -> None:
        """Its room, and its inodes, are free for whoever comes first. Raises `OSError`."""
        for path in (self.path, *self._spare):
            path.unlink(missing_ok=True)

    def make(self) -> int:
        """Make it whole if the drive has that much room; returns how many bytes are lacking. Raises `OSError` for a drive that
        is broken rather than full."""
        try:
            for path in self._spare:
                if not path.exists():
                    path.touch(0o600)
        except OSError as error:
            if error.errno not in _FULL:
                raise
        lacking = self.lacking_bytes()
        if lacking and room_at(self.path.parent).free_bytes >= lacking:
            try:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                with contextlib.closing(os.fdopen(descriptor, "wb", buffering=0)):
                    os.posix_fallocate(descriptor, 0, self.size_bytes)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
        return self.lacking_bytes() if lacking else 0
