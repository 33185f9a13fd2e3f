"""Which file a descriptor leads to, told apart from any other that has, or will have, its name or its inode number."""

import errno
import fcntl
import os
import struct

FS_IOC_GETVERSION = 0x80087601
"""The generation, which the file system chooses anew each time it gives out an inode number."""

FileIdentity = tuple[int, int]


def file_identity(descriptor: int) -> FileIdentity:
    """Inode number and generation; the latter is 0 where the file system has none."""
    try:
        (generation,) = struct.unpack("=I4x", fcntl.ioctl(descriptor, FS_IOC_GETVERSION, bytes(8)))
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        generation = 0
    return os.fstat(descriptor).st_ino, generation
