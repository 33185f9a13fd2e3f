"""The descriptor between the kernel and us: opening `/dev/fuse`, mounting, unmounting.

We mount ourselves with mount(2) instead of through libfuse, because the descriptor has to outlive the process that answers
requests, and because passthrough needs an INIT reply that libfuse does not give.
"""

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from ckptfs.fs.mount_table import SOURCE_PREFIX, mounts_at

DEVICE = Path("/dev/fuse")
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2
FILE_SYSTEM_TYPE = "fuse.ckptfs"

_libc = ctypes.CDLL(None, use_errno=True)


class MountError(Exception):
    """The mount can't be made or removed; the message says why and what to do."""


def check_mountpoint(mountpoint: Path) -> None:
    """Raise `MountError` unless the mountpoint is an existing, empty, unused directory."""
    if mounts_at(mountpoint):
        raise MountError(f"{mountpoint} is already mounted; end that node first (ckptfs umount {mountpoint})")
    try:
        status = os.stat(mountpoint)
    except FileNotFoundError:
        raise MountError(f"the mountpoint {mountpoint} does not exist; make it: mkdir -p {mountpoint}") from None
    except OSError as error:
        raise MountError(f"the mountpoint {mountpoint} can't be used: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(f"the mountpoint {mountpoint} is not a directory; name an empty directory")
    if os.path.ismount(mountpoint):
        raise MountError(f"{mountpoint} is a mountpoint of another file system; name an empty directory")
    if os.listdir(mountpoint):
        raise MountError(f"the mountpoint {mountpoint} is not empty; nothing was touched: empty it or name another directory")


def open_device() -> int:
    """A new FUSE connection, not yet mounted. Raises `MountError`."""
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MountError("/dev/fuse is missing; load the kernel module: modprobe fuse") from None
    except OSError as error:
        raise MountError(f"/dev/fuse can't be opened: {error.strerror}; run as root") from None


def mount(device: int, mountpoint: Path, store: Path, *, allow_other: bool) -> None:
    """Mount the connection. Raises `MountError`."""
    mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    options = f"fd={device},rootmode={mode:o},user_id={os.getuid()},group_id={os.getgid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    source = f"{SOURCE_PREFIX}{store}".encode(errors="surrogateescape")
    target = os.fsencode(mountpoint)
    if _libc.mount(source, target, FILE_SYSTEM_TYPE.encode(), ctypes.c_ulong(MS_NOSUID | MS_NODEV), options.encode()):
        number = ctypes.get_errno()
        remedy = "; run as root" if number == errno.EPERM else ""
        raise MountError(f"{mountpoint} can't be mounted: {os.strerror(number)}{remedy}")


def set_read_ahead(mountpoint: Path, size_bytes: int) -> None:
    """How far the kernel reads ahead in the served lane; its default of 128 KiB asks for a MiB in eight requests, one after
    another. Where /sys is read-only the default stays."""
    for mounted in mounts_at(mountpoint):
        major, minor = mounted.device
        with contextlib.suppress(OSError):
            Path(f"/sys/class/bdi/{major}:{minor}/read_ahead_kb").write_text(str(size_bytes >> 10))


def unmount(mountpoint: Path, *, lazily: bool = False) -> bool:
    """Unmount; False if programs still use it (never with `lazily`). Raises `MountError` for anything else but not mounted."""
    if _libc.umount2(os.fsencode(mountpoint), ctypes.c_int(MNT_DETACH if lazily else 0)) == 0:
        return True
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        return False
    if number in (errno.EINVAL, errno.ENOENT):
        return True
    raise MountError(f"{mountpoint} can't be unmounted: {os.strerror(number)}")
