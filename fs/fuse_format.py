"""The kernel's FUSE messages, as `include/uapi/linux/fuse.h` defines them (protocol 7.31 to 7.45), little-endian.

Only sizes, offsets and numbers: no I/O, no state. A request is an `IN_HEADER`, then the structure of its opcode, then names
(each ended by NUL) or data. A reply is an `OUT_HEADER`, then the structure of the answer, or nothing beside an error.
"""

import struct
from enum import IntEnum, IntFlag
from typing import NamedTuple

MAJOR = 7
MINOR_MIN = 31
MINOR = 41
"""The minor version we speak: the first whose `fuse_init_out` has what passthrough needs is 40."""

IN_HEADER = struct.Struct("<IIQQIIIHH")
"""length opcode unique nodeid uid gid pid total_extlen padding: 40 bytes."""
OUT_HEADER = struct.Struct("<IiQ")
"""length error unique: 16 bytes."""

INIT_IN_SHORT = struct.Struct("<IIII")
"""major minor max_readahead flags: all that a kernel before 7.36 sends."""
INIT_IN = struct.Struct("<IIIII")
"""The same, then flags2."""
INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
"""major minor max_readahead flags max_background congestion_threshold max_write time_gran max_pages map_alignment flags2
max_stack_depth: 64 bytes with the unused tail."""
ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
"""ino size blocks atime mtime ctime atimensec mtimensec ctimensec mode nlink uid gid rdev blksize flags: 88 bytes."""
ENTRY_OUT = struct.Struct("<QQQQII")
"""nodeid generation entry_valid attr_valid entry_valid_nsec attr_valid_nsec: 40 bytes, followed by `ATTRIBUTES`."""
ATTR_OUT = struct.Struct("<QII")
"""attr_valid attr_valid_nsec dummy: 16 bytes, followed by `ATTRIBUTES`."""
GETATTR_IN = struct.Struct("<IIQ")
SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")
"""valid padding fh size lock_owner atime mtime ctime atimensec mtimensec ctimensec mode unused uid gid unused: 88 bytes."""
BATCH_FORGET_IN = struct.Struct("<II")
"""count dummy, then so many `FORGET_ONE`."""
FORGET_ONE = struct.Struct("<QQ")
"""nodeid nlookup."""
MKNOD_IN = struct.Struct("<IIII")
"""mode rdev umask padding, then the name."""
MKDIR_IN = struct.Struct("<II")
"""mode umask, then the name."""
RENAME_IN = struct.Struct("<Q")
RENAME2_IN = struct.Struct("<QII")
"""new directory, flags, padding, then the old and the new name."""
LINK_IN = struct.Struct("<Q")
OPEN_IN = struct.Struct("<II")
"""flags open_flags."""
CREATE_IN = struct.Struct("<IIII")
"""flags mode umask open_flags, then the name."""
OPEN_OUT = struct.Struct("<QIi")
"""fh open_flags backing_id."""
RELEASE_IN = struct.Struct("<QIIQ")
"""fh flags release_flags lock_owner."""
FLUSH_IN = struct.Struct("<QIIQ")
READ_IN = struct.Struct("<QQIIQII")
"""fh offset size read_flags lock_owner flags padding: 40 bytes."""
WRITE_IN = struct.Struct("<QQIIQII")
"""fh offset size write_flags lock_owner flags padding: 40 bytes, then the data."""
WRITE_OUT = struct.Struct("<II")
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
"""blocks bfree bavail files ffree bsize namelen frsize padding: 80 bytes."""
FSYNC_IN = struct.Struct("<QII")
SETXATTR_IN = struct.Struct("<IIII")
"""size flags setxattr_flags padding (as SETXATTR_EXT makes it), then the name and the value."""
GETXATTR_IN = struct.Struct("<II")
GETXATTR_OUT = struct.Struct("<II")
STATX_IN = struct.Struct("<IIQII")
"""getattr_flags reserved fh sx_flags sx_mask: 24 bytes."""
STATX_OUT = struct.Struct("<QII16x")
"""attr_valid attr_valid_nsec flags: 32 bytes, followed by `STATX`."""
STATX = struct.Struct("<IIQIIIHHQQQQqIiqIiqIiqIiIIII112x")
"""mask blksize attributes nlink uid gid mode spare ino size blocks attributes_mask, then atime, btime, ctime and mtime, each as
seconds, nanoseconds and padding, then the device numbers rdev_major rdev_minor dev_major dev_minor: 256 bytes."""
FALLOCATE_IN = struct.Struct("<QQQII")
"""fh offset length mode padding."""
LSEEK_IN = struct.Struct("<QqII")
"""fh offset whence padding; a negative offset is the file system's to refuse."""
LSEEK_OUT = struct.Struct("<Q")
DIRENT = struct.Struct("<QQII")
"""ino offset namelen type, then the name padded to 8 bytes."""
INVAL_INODE_OUT = struct.Struct("<Qqq")
INVAL_ENTRY_OUT = struct.Struct("<QII")
BACKING_MAP = struct.Struct("<iIQ")
"""fd flags padding: the argument of FUSE_DEV_IOC_BACKING_OPEN."""

FUSE_DEV_IOC_BACKING_OPEN = 0x4010E501
FUSE_DEV_IOC_BACKING_CLOSE = 0x4004E502

UNIQUE_RESEND = 1 << 63
"""Set in `unique` of a request the kernel sends again; the answer goes to the number with the bit."""

MAX_WRITE = 1 << 20
BUFFER_SIZE = MAX_WRITE + 4096
"""One request at most: the data and the header page. The kernel wants at least this."""
NAME_SIZE_MAX = 255


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    TMPFILE = 51
    STATX = 52


class InitFlag(IntFlag):
    """Bits of `flags`, and above bit 31 of `flags2`, in INIT."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


class OpenFlag(IntFlag):
    """`open_flags` of a reply to OPEN, CREATE, OPENDIR."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NOFLUSH = 1 << 5
    PARALLEL_DIRECT_WRITES = 1 << 6
    PASSTHROUGH = 1 << 7


class SetattrField(IntFlag):
    """`valid` of SETATTR."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCK_OWNER = 1 << 9
    CTIME = 1 << 10
    KILL_SUIDGID = 1 << 11
    ABOUT_CALLER = FH | LOCK_OWNER
    """Those that change nothing."""


OPEN_KILL_SUIDGID = 1 << 0
WRITE_KILL_SUIDGID = 1 << 2
FSYNC_DATA_ONLY = 1 << 0
SETXATTR_KILL_SGID = 1 << 0
"""The access control list is set by somebody who is not in the file's group."""
STATX_BASIC, STATX_BIRTH = 0x7FF, 0x800
"""`mask` of STATX: all that GETATTR has, and the time the inode was made."""


class Notification(IntEnum):
    """Messages we start; they travel in `error` with `unique` 0."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    RESEND = 7


class RequestHeader(NamedTuple):
    """The fixed part of every request."""

    length: int
    opcode: int
    unique: int
    nodeid: int
    uid: int
    gid: int
    pid: int
    total_extlen: int
    padding: int


def reply(unique: int, body: bytes = b"") -> bytes:
    """A successful answer."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique) + body


def error_reply(unique: int, error_number: int) -> bytes:
    """An answer that is only an errno (given positive)."""
    return OUT_HEADER.pack(OUT_HEADER.size, -error_number, unique)


def notification(code: Notification, body: bytes = b"") -> bytes:
    """A message to the kernel that answers nothing."""
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), code, 0) + body


def split_names(data: memoryview, count: int) -> list[bytes]:
    """The NUL-ended names at the start of `data`. Raises `ValueError` if there are fewer than `count`."""
    parts = bytes(data).split(b"\0", count)
    if len(parts) <= count:
        raise ValueError("a name in a request does not end")
    return parts[:count]


def directory_record(ino: int, offset: int, kind: int, name: bytes) -> bytes:
    """A `fuse_dirent`: `kind` is the S_IFMT part of a mode, `offset` what the kernel sends to continue after it."""
    head = DIRENT.pack(ino, offset, len(name), kind >> 12)
    return head + name + bytes(-len(name) % 8)
