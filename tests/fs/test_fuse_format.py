"""The kernel's messages: sizes and offsets as `include/uapi/linux/fuse.h` has them, names cut in every way."""

import stat
import struct

import pytest

from ckptfs.fs import fuse_format as fuse

# Sizes that gcc gives for the structures of linux/fuse.h; where a name or another structure follows, without that.
SIZES = {
    "IN_HEADER": 40,
    "OUT_HEADER": 16,
    "INIT_IN_SHORT": 16,
    "INIT_IN": 20,  # of 64: what follows are unused words
    "INIT_OUT": 64,
    "ATTRIBUTES": 88,
    "ENTRY_OUT": 128 - 88,
    "ATTR_OUT": 104 - 88,
    "GETATTR_IN": 16,
    "SETATTR_IN": 88,
    "MKNOD_IN": 16,
    "MKDIR_IN": 8,
    "RENAME_IN": 8,
    "RENAME2_IN": 16,
    "LINK_IN": 8,
    "OPEN_IN": 8,
    "CREATE_IN": 16,
    "OPEN_OUT": 16,
    "RELEASE_IN": 24,
    "FLUSH_IN": 24,
    "READ_IN": 40,
    "WRITE_IN": 40,
    "WRITE_OUT": 8,
    "STATFS_OUT": 80,
    "FSYNC_IN": 16,
    "SETXATTR_IN": 16,
    "BATCH_FORGET_IN": 8,
    "FORGET_ONE": 16,
    "STATX_IN": 24,
    "STATX_OUT": 288 - 256,
    "STATX": 256,
    "GETXATTR_IN": 8,
    "GETXATTR_OUT": 8,
    "FALLOCATE_IN": 32,
    "LSEEK_IN": 24,
    "LSEEK_OUT": 8,
    "DIRENT": 24,
    "INVAL_INODE_OUT": 24,
    "INVAL_ENTRY_OUT": 16,
    "BACKING_MAP": 16,
}

# (structure, number of the field, offsetof)
OFFSETS = [
    ("IN_HEADER", 1, 4),  # opcode
    ("IN_HEADER", 2, 8),  # unique
    ("IN_HEADER", 3, 16),  # nodeid
    ("IN_HEADER", 6, 32),  # pid
    ("IN_HEADER", 7, 36),  # total_extlen
    ("OUT_HEADER", 1, 4),  # error
    ("OUT_HEADER", 2, 8),  # unique
    ("INIT_IN", 4, 16),  # flags2
    ("INIT_OUT", 4, 16),  # max_background
    ("INIT_OUT", 6, 20),  # max_write
    ("INIT_OUT", 8, 28),  # max_pages
    ("INIT_OUT", 9, 30),  # map_alignment
    ("INIT_OUT", 10, 32),  # flags2
    ("INIT_OUT", 11, 36),  # max_stack_depth
    ("ATTRIBUTES", 9, 60),  # mode
    ("ATTRIBUTES", 10, 64),  # nlink
    ("ATTRIBUTES", 13, 76),  # rdev
    ("ATTRIBUTES", 14, 80),  # blksize
    ("SETATTR_IN", 2, 8),  # fh
    ("SETATTR_IN", 3, 16),  # size
    ("SETATTR_IN", 5, 32),  # atime
    ("SETATTR_IN", 11, 68),  # mode
    ("SETATTR_IN", 13, 76),  # uid
    ("SETATTR_IN", 14, 80),  # gid
    ("CREATE_IN", 2, 8),  # umask
    ("MKNOD_IN", 2, 8),  # umask
    ("RENAME2_IN", 1, 8),  # flags
    ("OPEN_OUT", 1, 8),  # open_flags
    ("OPEN_OUT", 2, 12),  # backing_id
    ("WRITE_IN", 2, 16),  # size
    ("WRITE_IN", 3, 20),  # write_flags
    ("SETXATTR_IN", 1, 4),  # flags
    ("STATFS_OUT", 5, 40),  # bsize
    ("STATFS_OUT", 6, 44),  # namelen
    ("STATFS_OUT", 7, 48),  # frsize
    ("FALLOCATE_IN", 3, 24),  # mode
    ("LSEEK_IN", 2, 16),  # whence
    ("DIRENT", 1, 8),  # off
    ("DIRENT", 2, 16),  # namelen
    ("DIRENT", 3, 20),  # type
    ("BACKING_MAP", 1, 4),  # flags
]


def test_every_structure_is_in_the_table() -> None:
    assert {name for name, value in vars(fuse).items() if isinstance(value, struct.Struct)} == SIZES.keys()


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sizes_are_the_kernels(name: str, size: int) -> None:
    assert getattr(fuse, name).size == size


@pytest.mark.parametrize(("name", "field", "offset"), OFFSETS)
def test_fields_lie_where_the_kernel_has_them(name: str, field: int, offset: int) -> None:
    layout: struct.Struct = getattr(fuse, name)
    count = len(layout.unpack(bytes(layout.size)))
    packed = layout.pack(*(1 if number == field else 0 for number in range(count)))
    assert packed.index(1) == offset
    assert packed.count(0) == layout.size - 1


def test_ioctl_numbers_name_their_arguments_size() -> None:
    """_IOW(229, n, type): direction write, size of the argument, type 229, number."""
    assert (1 << 30) | (fuse.BACKING_MAP.size << 16) | (229 << 8) | 1 == fuse.FUSE_DEV_IOC_BACKING_OPEN
    assert fuse.FUSE_DEV_IOC_BACKING_CLOSE == (1 << 30) | (4 << 16) | (229 << 8) | 2


def test_a_buffer_holds_the_largest_request() -> None:
    assert fuse.MAX_WRITE + fuse.IN_HEADER.size + fuse.WRITE_IN.size <= fuse.BUFFER_SIZE


def test_replies_carry_their_length_and_errors_are_negative() -> None:
    assert fuse.OUT_HEADER.unpack_from(fuse.reply(7, b"abc")) == (19, 0, 7)
    assert fuse.reply(7, b"abc")[16:] == b"abc"
    assert fuse.OUT_HEADER.unpack(fuse.reply(1 << 63)) == (16, 0, 1 << 63)
    assert fuse.OUT_HEADER.unpack(fuse.error_reply(9, 5)) == (16, -5, 9)
    assert fuse.OUT_HEADER.unpack_from(fuse.notification(fuse.Notification.RESEND)) == (16, 7, 0)
    assert fuse.notification(fuse.Notification.INVAL_ENTRY, b"x") == struct.pack("<IiQ", 17, 3, 0) + b"x"


@pytest.mark.parametrize(
    ("data", "count", "names"),
    [
        (b"a\0", 1, [b"a"]),
        (b"old\0new\0", 2, [b"old", b"new"]),
        (b"\0\0", 2, [b"", b""]),
        (b"user.x\0value\0with\0nuls", 1, [b"user.x"]),
        (b"\xff" * 255 + b"\0", 1, [b"\xff" * 255]),
        (b"", 0, []),
    ],
)
def test_names_are_split_at_their_ends(data: bytes, count: int, names: list[bytes]) -> None:
    assert fuse.split_names(memoryview(data), count) == names


@pytest.mark.parametrize(("data", "count"), [(b"", 1), (b"a", 1), (b"old\0ne", 2), (b"old\0", 2)])
def test_a_name_that_does_not_end_is_refused(data: bytes, count: int) -> None:
    with pytest.raises(ValueError, match="does not end"):
        fuse.split_names(memoryview(data), count)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 255])
def test_directory_records_are_aligned_and_read_back(length: int) -> None:
    name = b"n" * length
    record = fuse.directory_record(1 << 40, 77, stat.S_IFLNK, name)
    assert len(record) % 8 == 0
    assert len(record) - 24 - length < 8
    assert fuse.DIRENT.unpack_from(record) == (1 << 40, 77, length, 10)  # DT_LNK
    assert record[24 : 24 + length] == name
    assert record[24 + length :].strip(b"\0") == b""


@pytest.mark.parametrize(
    ("kind", "number"),
    [(stat.S_IFREG, 8), (stat.S_IFDIR, 4), (stat.S_IFLNK, 10), (stat.S_IFIFO, 1), (stat.S_IFSOCK, 12), (stat.S_IFCHR, 2)],
)
def test_kinds_are_those_of_readdir(kind: int, number: int) -> None:
    assert fuse.DIRENT.unpack_from(fuse.directory_record(1, 1, kind, b"x"))[3] == number
