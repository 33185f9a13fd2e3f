"""A mountpoint without its mount takes no files: what is saved there while the node is down fails, instead of lying where no node
sees it and where the next mount would hide it.

Only the file system's own flag (chattr +i) holds back root too. A mount over such a directory works as over any other.
"""

import fcntl
import os
import struct
from pathlib import Path

FS_IOC_GETFLAGS = 0x80086601
FS_IOC_SETFLAGS = 0x40086602
FS_IMMUTABLE_FL = 0x10


def set_takes_files(directory: Path, takes_files: bool) -> bool:
    """Whether it could be set: not every file system knows the flag, and a container's root may not set it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(struct.calcsize("l"))))
        wanted = flags & ~FS_IMMUTABLE_FL if takes_files else flags | FS_IMMUTABLE_FL
        if wanted != flags:
            fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, struct.pack("l", wanted))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
