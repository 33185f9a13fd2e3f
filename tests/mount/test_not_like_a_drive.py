"""What docs/semantics.md says a mount does otherwise than the drive's file system: each, in a plain directory beside it and in a
mount. What a newer kernel makes alike shows here, and is to go from the document.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
FALLOC_COLLAPSE, FALLOC_INSERT = 0x08, 0x20
FS_IOC_FIEMAP, FS_IOC_GETFLAGS, FS_IOC_FSGETXATTR = 0xC020660B, 0x80086601, 0x801C581F
RWF_DONTCACHE = 0x80
TIB = 1 << 40
KEEPS_NOTHING = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 14)
"""Whether ext4 knows RWF_DONTCACHE."""


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def _file(directory: Path, size: int = 65536) -> int:
    descriptor = os.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(descriptor, b"x" * size)
    return descriptor


def _fallocate(mode: int) -> Callable[[Path], Any]:
    return lambda at: _checked(_libc.fallocate(_file(at), mode, 4096, 4096))


def _ioctl(request: int, argument: bytes) -> Callable[[Path], Any]:
    return lambda at: len(fcntl.ioctl(_file(at), request, argument)) - len(argument)


def _read_without_waiting(at: Path) -> int:
    return os.preadv(_file(at), [bytearray(10)], 0, os.RWF_NOWAIT)


def _read_without_keeping(at: Path) -> int:
    return os.preadv(_file(at), [bytearray(10)], 0, RWF_DONTCACHE)


def _swap(at: Path) -> int:
    """On a file of ten pages, and off at once."""
    page = os.sysconf("SC_PAGE_SIZE")
    descriptor = _file(at, 10 * page)
    os.fchmod(descriptor, 0o600)
    header = bytes(1024) + struct.pack("=III", 1, 9, 0)  # version, last page, bad pages
    os.pwrite(descriptor, header.ljust(page - 10, b"\0") + b"SWAPSPACE2", 0)
    os.fsync(descriptor)
    path = os.fsencode(at / "file")
    _checked(_libc.swapon(path, 0))
    return _checked(_libc.swapoff(path))


def _limits(at: Path) -> tuple[int, int]:
    return os.pathconf(at, "PC_LINK_MAX"), os.pathconf(at, "PC_FILESIZEBITS")


def _seek_beyond_all(at: Path) -> int:
    descriptor = _file(at)
    return os.lseek(descriptor, 16 * TIB + 4096, os.SEEK_SET)


def _write_beyond_all(at: Path) -> int:
    return os.pwrite(_file(at), b"x", 16 * TIB + 4096)


def _no_longer_appending(at: Path) -> bytes:
    descriptor = os.open(at / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, b"0123")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
    os.pwrite(descriptor, b"Z", 0)
    return os.pread(descriptor, 10, 0)


def _nameless_in_removed_directory(at: Path) -> int:
    (at / "gone").mkdir()
    directory = os.open(at / "gone", os.O_RDONLY)
    (at / "gone").rmdir()
    os.close(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600, dir_fd=directory))
    return 0


def _open_removed_by_path_descriptor(at: Path) -> int:
    os.close(_file(at))
    descriptor = os.open(at / "file", os.O_PATH | os.O_CLOEXEC)
    (at / "file").unlink()
    assert os.fstat(descriptor).st_size == 65536
    os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
    return 0


def _large_attribute(size: int) -> Callable[[Path], Any]:
    return lambda at: os.setxattr(_file(at), "user.large", b"x" * size)


def _pipe_times_move(at: Path) -> bool:
    os.mkfifo(at / "pipe")
    before = (at / "pipe").stat().st_mtime_ns
    descriptor = os.open(at / "pipe", os.O_RDWR)
    deadline = time.monotonic() + 0.5
    while (at / "pipe").stat().st_mtime_ns == before and time.monotonic() < deadline:
        os.write(descriptor, b"x")
        os.read(descriptor, 1)
    return (at / "pipe").stat().st_mtime_ns != before


def _device(at: Path) -> int:
    os.mknod(at / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.close(os.open(at / "null", os.O_RDONLY))
    return 0


def _set_id_of_nobody(at: Path) -> int:
    """chown(2) by a stranger that changes nothing."""
    descriptor = _file(at)
    os.fchmod(descriptor, 0o6777)
    child = os.fork()
    if not child:
        number = 0
        try:
            os.setgroups([])
            os.setgid(54321)
            os.setuid(54321)
            os.fchown(descriptor, -1, -1)
        except OSError as error:
            number = error.errno or 255
        os._exit(number)
    if number := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(number, "")
    return 0


@pytest.mark.parametrize(
    ("do", "on_the_drive", "in_the_mount"),
    [
        (_fallocate(FALLOC_COLLAPSE), 0, errno.EOPNOTSUPP),
        (_fallocate(FALLOC_INSERT), 0, errno.EOPNOTSUPP),
        (_ioctl(FS_IOC_FIEMAP, struct.pack("=QQIIII", 0, TIB, 0, 0, 1, 0) + bytes(56)), 0, errno.EOPNOTSUPP),
        (_ioctl(FS_IOC_GETFLAGS, bytes(8)), 0, errno.ENOTTY),
        (_ioctl(FS_IOC_FSGETXATTR, bytes(28)), 0, errno.ENOTTY),
        (_read_without_waiting, 10, errno.EOPNOTSUPP),
        (_read_without_keeping, 10 if KEEPS_NOTHING else errno.EOPNOTSUPP, errno.EOPNOTSUPP),
        (_swap, 0, errno.EINVAL),
        (_limits, (65000, 64), (127, 32)),
        (_seek_beyond_all, errno.EINVAL, 16 * TIB + 4096),
        (_write_beyond_all, errno.EFBIG, errno.EFBIG),
        (_no_longer_appending, b"Z123", b"0123Z"),
        (_nameless_in_removed_directory, errno.EPERM, errno.ESTALE),
        (_open_removed_by_path_descriptor, 0, errno.ESTALE),
        (_large_attribute(5000), errno.ENOSPC, None),
        (_large_attribute(17_000), errno.ENOSPC, errno.ENOSPC),
        (_pipe_times_move, True, False),
        (_device, 0, errno.EACCES),
        (_set_id_of_nobody, errno.EPERM, 0),
    ],
    ids=[
        *(
            "collapse",
            "insert",
            "fiemap",
            "lsattr",
            "project",
            "nowait",
            "dontcache",
            "swap",
            "limits",
            "seek",
            "write",
            "append",
            "tmpfile",
            "path",
            "attributes",
        ),
        *("more attributes", "pipe", "device", "chown"),
    ],
)
def test_what_differs(cluster: Any, scratch: Path, do: Callable[[Path], Any], on_the_drive: Any, in_the_mount: Any) -> None:
    node: ClusterNode = cluster.nodes[0]
    found = []
    for base in (scratch, node.mountpoint):
        base.chmod(0o755)
        directory = base / f"differs-{os.getpid()}-{time.monotonic_ns()}"
        directory.mkdir()
        try:
            found.append(do(directory))
        except OSError as error:
            found.append(error.errno)
    assert found == [on_the_drive, in_the_mount]


def test_reading_does_not_move_the_time_of_access(cluster: Any) -> None:
    path: Path = cluster.nodes[0].mountpoint / "read"
    path.write_bytes(b"content")
    os.utime(path, ns=(1000, 2000))  # where relatime holds, the next read moves it
    assert path.read_bytes() == b"content"
    assert path.stat().st_atime_ns == 1000
    assert os.statvfs(path).f_flag & os.ST_NOATIME


def test_a_sync_of_the_whole_file_system_asks_nobody(cluster: Any) -> None:
    node: ClusterNode = cluster.nodes[5]

    def requests() -> int:
        return int(call(node.store / "run" / "mount.sock", {"do": "status"})["requests"])

    with open(node.mountpoint / f"synced-{time.monotonic_ns()}", "wb") as file:
        file.write(b"content")
        file.flush()
        before = requests()
        assert _checked(_libc.syncfs(file.fileno())) == 0
        assert requests() == before
