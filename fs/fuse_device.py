"""The descriptor between the kernel and us: opening `/dev/fuse`, mounting, unmounting.

We mount ourselves instead of through libfuse, because the descriptor has to outlive the process that answers requests, and
because passthrough needs an INIT reply that libfuse does not give: root with mount(2), others through fusermount3.
"""

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from ckptfs.fs import fusermount
from ckptfs.fs.fusermount import DEVICE
from ckptfs.fs.mount_table import SOURCE_PREFIX, mounts_at

MS_NOSUID, MS_NODEV = 2, 4
MS_NOATIME = 1024
"""What is true: reads that the kernel passes through tell nobody, and a read should not cost a change of the catalog."""
MNT_DETACH = 2
SUBTYPE = "ckptfs"

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


def mount(mountpoint: Path, store: Path, *, allow_other: bool) -> int:
    """A new FUSE connection, mounted; its descriptor, which doesn't block, is the caller's. Raises `MountError`.

    `allow_other` lets others than this process's user in; an ordinary user may say so only where the machine allows it.
    """
    source = f"{SOURCE_PREFIX}{store}"
    if os.geteuid() != 0:
        try:
            return fusermount.mount(mountpoint, source, SUBTYPE, allow_other=allow_other)
        except fusermount.FusermountFailed as error:
            raise MountError(f"{mountpoint} can't be mounted: {error}") from None
    device = _open_device()
    try:
        _mount(device, mountpoint, source, allow_other=allow_other)
    except BaseException:
        os.close(device)
        raise
    return device


def _open_device() -> int:
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MountError("/dev/fuse is missing; load the kernel module: modprobe fuse") from None
    except OSError as error:
        raise MountError(f"/dev/fuse can't be opened: {error.strerror}; a container must be given the device") from None


def _mount(device: int, mountpoint: Path, source: str, *, allow_other: bool) -> None:
    mode = stat.S_IFMT(os.stat(mountpoint).st_mode)
    options = f"fd={device},rootmode={mode:o},user_id={os.getuid()},group_id={os.getgid()},default_permissions"
    if allow_other:
        options += ",allow_other"
    target, kind = os.fsencode(mountpoint), f"fuse.{SUBTYPE}".encode()
    if _libc.mount(os.fsencode(source), target, kind, ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOATIME), options.encode()):
        number = ctypes.get_errno()
        remedy = "; a container needs CAP_SYS_ADMIN for it" if number == errno.EPERM else ""
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
    if number == errno.EPERM:
        return _unmount_as_user(mountpoint, lazily=lazily)
    if number == errno.EBUSY:
        return False
    if number in (errno.EINVAL, errno.ENOENT):
        return True
    raise MountError(f"{mountpoint} can't be unmounted: {os.strerror(number)}")


def _unmount_as_user(mountpoint: Path, *, lazily: bool) -> bool:
    try:
        fusermount.unmount(mountpoint, lazily=lazily)
    except fusermount.FusermountFailed as error:
        if not mounts_at(mountpoint):
            return True
        if os.strerror(errno.EBUSY) in str(error):
            return False
        raise MountError(f"{mountpoint} can't be unmounted: {error}") from None
    return True
