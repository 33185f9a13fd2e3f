"""One program of `test_posix_walk`, with a user of its own: makes each call it is told of in two directories, in turn.

Started as `python posix_client.py UID GID GROUP,… DIRECTORY DIRECTORY`. A line on standard input is `[call, argument…]` in JSON,
a line on standard output the two outcomes: `{"value": …}` or `{"error": "ENOENT"}`. Bytes travel as Latin-1. Descriptors are
named by slots, which mean one descriptor in each directory.
"""

import contextlib
import ctypes
import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Any

Slots = dict[int, int]
Stat = list[int]

_libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_SYMLINK_FOLLOW = -100, 0x100, 0x400
STATX_BTIME = 0x800
_statx_out = ctypes.c_char * 256


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_long)]


def _call(name: str, *arguments: Any) -> int:
    ctypes.set_errno(0)
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def status(result: os.stat_result) -> dict[str, int]:
    """Every field that two file systems can agree on; times and numbers are compared as relations."""
    fields = {name: getattr(result, f"st_{name}") for name in ("mode", "nlink", "uid", "gid", "rdev")}
    fields |= {name: getattr(result, f"st_{name}_ns") for name in ("atime", "mtime", "ctime")}
    fields["ino"] = result.st_ino
    if not stat.S_ISDIR(result.st_mode):
        fields["size"] = result.st_size
    return fields


class Client:
    """The calls. Each works in the current directory, which is one of the two, with that one's slots."""

    def __init__(self) -> None:
        self.slots: Slots = {}

    def umask(self, mask: int) -> None:
        os.umask(mask)

    def open(self, slot: int, path: bytes, flags: int, mode: int) -> None:
        descriptor = os.open(path, flags, mode)
        self.close(slot)
        self.slots[slot] = descriptor

    def close(self, slot: int) -> None:
        if slot in self.slots:
            os.close(self.slots.pop(slot))

    def _fd(self, slot: int) -> int:
        if slot not in self.slots:
            raise OSError(errno.EBADF, "nothing is open there")
        return self.slots[slot]

    def write(self, slot: int, data: bytes) -> int:
        return os.write(self._fd(slot), data)

    def pwrite(self, slot: int, data: bytes, offset: int) -> int:
        return os.pwrite(self._fd(slot), data, offset)

    def pread(self, slot: int, size: int, offset: int) -> bytes:
        return os.pread(self._fd(slot), size, offset)

    def fsync(self, slot: int) -> None:
        os.fsync(self._fd(slot))

    def ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self._fd(slot), size)

    def fstat(self, slot: int) -> dict[str, int]:
        return status(os.fstat(self._fd(slot)))

    def open_stats(self) -> list[list[Any]]:
        return [[slot, status(os.fstat(descriptor))] for slot, descriptor in sorted(self.slots.items())]

    def fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self._fd(slot), mode)

    def fchown(self, slot: int, uid: int, gid: int) -> None:
        os.fchown(self._fd(slot), uid, gid)

    def link_slot(self, slot: int, path: bytes) -> None:
        _call("linkat", AT_FDCWD, b"/proc/self/fd/%d" % self._fd(slot), AT_FDCWD, path, AT_SYMLINK_FOLLOW)

    def reopen(self, slot: int, into: int, flags: int) -> None:
        self.open(into, b"/proc/self/fd/%d" % self._fd(slot), flags, 0)

    def list_slot(self, slot: int) -> list[str]:
        return sorted(os.listdir(self._fd(slot)))

    def mkdir_at(self, slot: int, name: bytes) -> None:
        os.mkdir(name, 0o777, dir_fd=self._fd(slot))

    def stat_at(self, slot: int, name: bytes) -> dict[str, int]:
        return status(os.stat(name, dir_fd=self._fd(slot), follow_symlinks=False))

    def truncate(self, path: bytes, size: int) -> None:
        os.truncate(path, size)

    def mkdir(self, path: bytes, mode: int) -> None:
        os.mkdir(path, mode)

    def rmdir(self, path: bytes) -> None:
        os.rmdir(path)

    def unlink(self, path: bytes) -> None:
        os.unlink(path)

    def rename(self, old: bytes, new: bytes, flags: int) -> None:
        _call("renameat2", AT_FDCWD, old, AT_FDCWD, new, flags)

    def link(self, old: bytes, new: bytes, flags: int) -> None:
        _call("linkat", AT_FDCWD, old, AT_FDCWD, new, flags)

    def symlink(self, target: bytes, path: bytes) -> None:
        os.symlink(target, path)

    def readlink(self, path: bytes) -> bytes:
        return os.readlink(path)

    def mknod(self, path: bytes, mode: int, device: int) -> None:
        os.mknod(path, mode, device)

    def bind(self, path: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)

    def connect(self, path: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)

    def chmod(self, path: bytes, mode: int) -> None:
        os.chmod(path, mode)

    def chown(self, path: bytes, uid: int, gid: int) -> None:
        os.chown(path, uid, gid)

    def lchown(self, path: bytes, uid: int, gid: int) -> None:
        os.lchown(path, uid, gid)

    def utimens(self, path: bytes, atime: list[int], mtime: list[int], flags: int) -> None:
        times = (_Timespec * 2)(_Timespec(*atime), _Timespec(*mtime))
        _call("utimensat", AT_FDCWD, path, times, flags)

    def access(self, path: bytes, mode: int) -> bool:
        return os.access(path, mode, effective_ids=True)

    def listdir(self, path: bytes) -> list[bytes]:
        return sorted(os.listdir(path))

    def stat(self, path: bytes) -> dict[str, int]:
        return status(os.stat(path))

    def lstat(self, path: bytes) -> dict[str, int]:
        return status(os.lstat(path))

    def birth_is_shown(self, path: bytes) -> bool:
        out = _statx_out()
        _call("statx", AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BTIME, out)
        return bool(int.from_bytes(bytes(out)[:4], sys.byteorder) & STATX_BTIME)

    def setxattr(self, path: bytes, name: bytes, value: bytes, flags: int, follow: bool) -> None:
        os.setxattr(path, name, value, flags, follow_symlinks=follow)

    def getxattr(self, path: bytes, name: bytes, follow: bool) -> bytes:
        return os.getxattr(path, name, follow_symlinks=follow)

    def listxattr(self, path: bytes, follow: bool) -> list[str]:
        return sorted(os.listxattr(path, follow_symlinks=follow))

    def removexattr(self, path: bytes, name: bytes, follow: bool) -> None:
        os.removexattr(path, name, follow_symlinks=follow)

    def statvfs(self, path: bytes) -> list[int]:
        found = os.statvfs(path)
        return [found.f_bsize, found.f_frsize, found.f_namemax]

    def tree(self) -> dict[str, Any]:
        """All that is there, as root sees it: by path, what lstat, readlink and the extended attributes say."""
        found: dict[str, Any] = {}

        def add(path: bytes) -> None:
            entry: dict[str, Any] = status(os.lstat(path))
            entry["xattrs"] = {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in _xattrs(path)}
            if stat.S_ISLNK(entry["mode"]):
                entry["target"] = os.readlink(path)
            found[path.decode("latin-1")] = entry
            if stat.S_ISDIR(entry["mode"]):
                for name in os.listdir(path):
                    add(path + b"/" + name)

        add(b".")
        return found

    def content(self, path: bytes) -> bytes:
        with open(path, "rb") as file:
            return file.read()


def _xattrs(path: bytes) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


def _plain(value: Any) -> Any:
    """As JSON takes it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode("latin-1")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def outcome(call: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """What the call gave."""
    try:
        return {"value": _plain(call(*arguments))}
    except OSError as error:
        return {"error": errno.errorcode.get(error.errno or 0, str(error))}
    except ValueError as error:
        return {"error": f"ValueError {error}"}


def main() -> None:
    uid, gid, groups, *directories = sys.argv[1:]
    roots = [os.open(directory, os.O_PATH) for directory in directories]
    os.setgroups([int(group) for group in groups.split(",") if group])
    os.setgid(int(gid))
    os.setuid(int(uid))
    clients = [Client() for _ in roots]
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        arguments = [item.encode("latin-1") if isinstance(item, str) else item for item in arguments]
        outcomes = []
        for root, client in zip(roots, clients, strict=True):
            entered = outcome(os.fchdir, [root])
            outcomes.append(entered if "error" in entered else outcome(getattr(client, name), arguments))
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
