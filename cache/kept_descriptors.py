"""Descriptors of files that SQLite locks, kept for as long as the process lives.

SQLite's locks are POSIX locks, which a process loses when it closes *any* descriptor of the locked file. So what is opened here
is not closed while the file has a name; one that was removed keeps its inode, so that no other file is taken for it.
"""

import errno
import os

_kept: dict[tuple[int, int], int] = {}
"""By device and inode."""


def open_existing(path: str) -> int:
    """A descriptor for reading and, where the drive takes writes, for writing. Raises `OSError`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def kept_descriptor(path: str) -> int:
    """A descriptor of the file for reading and writing, the same one each time. Only `let_go_if_removed` closes it. Raises
    `OSError`."""
    status = os.stat(path)
    identity = status.st_dev, status.st_ino
    if identity not in _kept:
        _kept[identity] = open_existing(path)
    return _kept[identity]


def let_go_if_removed(descriptor: int) -> bool:
    """Close a kept descriptor of a file without a name, which nobody in this process may be using any more; says whether."""
    status = os.fstat(descriptor)
    if status.st_nlink:
        return False
    del _kept[status.st_dev, status.st_ino]
    os.close(descriptor)
    return True
