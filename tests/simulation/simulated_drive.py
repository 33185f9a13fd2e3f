"""Drives of the simulated machines: real files in memory whose syncs are noted, so that a power cut takes what was not synced.

Under `segments/`, `shards/` and `copies/` a power cut may take, each by chance: the content that a file got since it was last
synced (all of it, or page by page of 4096 bytes; what a truncation cut off comes back with all that was synced, or not at all),
its name if its directory was not synced since it was made, and the removal of a name likewise. The databases are taken whole or
not at all, but for `small_copies.db`, whose every commit is synced. What SQLite writes in which order is the matter of
`tests/power/`, which records it.

A full drive refuses every write of the product's own (ENOSPC), and says that nothing is free. Stamps of files are virtual time,
and directories are listed in the order of their names: the kernel's order is not the same everywhere.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from virtual_machine import Machine, process, world

PAGE = 4096
AREAS = ("segments", "shards", "copies")
FREE_BYTES = 4 << 30
BLOCK = 4096

_real_open, _real_unlink, _real_rename, _real_rmdir = os.open, os.unlink, os.rename, os.rmdir
_real_pwrite, _real_truncate, _real_copy, _real_mkdir = os.pwrite, os.truncate, os.copy_file_range, os.mkdir
_real_statvfs, _real_listdir, _real_scandir = os.statvfs, os.listdir, os.scandir


class Drive:
    """What of one machine's files is safe. `on_unlink` hears of each file before it is removed."""

    def __init__(self, machine: Machine) -> None:
        self.directory = machine.directory
        """Of the machine while it had this drive: see `Node.replace_drive`."""
        self.on_unlink: Callable[[str], None] = lambda path: None
        self.keeps_segments = False
        """Some may seem older than `mount.db`, which was lost, or the clock set back: such segments are never removed."""
        self._contents: dict[int, bytes] = {}
        self._cut_to: dict[int, int] = {}
        """The least size that a file was truncated to since it was last synced."""
        self._names: dict[str, dict[str, int]] = {}
        self._removed: dict[str, tuple[bytes, dict[str, bytes]]] = {}

    def synced_content(self, inode: int) -> bytes | None:
        """What a file had when it was synced last."""
        return self._contents.get(inode)

    def is_name_safe(self, path: str) -> bool:
        """Whether the name, and those of the directories above it in the store, survive a power cut."""
        directory, name = os.path.split(path)
        if self._names.get(directory, {}).get(name) != os.stat(path).st_ino:
            return False
        return os.path.dirname(directory) == os.fspath(self.directory) or self.is_name_safe(directory)

    def sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(path) as entries:
                self._names[path] = {entry.name: entry.inode() for entry in entries}
            for removed in [one for one in self._removed if os.path.dirname(one) == path]:
                del self._removed[removed]
        elif stat.S_ISREG(status.st_mode):
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self._contents[status.st_ino] = file.read()
            self._cut_to.pop(status.st_ino, None)

    def truncating(self, file: str | int, size: int) -> None:
        """A file (its path or a descriptor) is about to get another size."""
        inode = os.stat(file).st_ino
        self._cut_to[inode] = min(size, self._cut_to.get(inode, size))

    def removing(self, path: str) -> None:
        """A name is about to go: a power cut may bring it back."""
        self.on_unlink(path)
        directory, name = os.path.split(path)
        try:
            inode = os.stat(path).st_ino
        except FileNotFoundError:
            return
        content = self._contents.get(inode)
        if content is not None and self._names.get(directory, {}).get(name) == inode:
            labels = {one: os.getxattr(path, one) for one in os.listxattr(path)}
            self._removed[path] = content, labels

    def cut_power(self, chance: Random) -> None:
        """Take what was not synced; nothing runs on the machine."""
        for area in AREAS:
            self._cut(os.fspath(self.directory / area), chance)
        for path, (content, labels) in self._removed.items():
            if chance.random() < 0.5 and os.path.isdir(os.path.dirname(path)) and not os.path.exists(path):
                Path(path).write_bytes(content)
                for name, value in labels.items():
                    os.setxattr(path, name, value)
        self._removed.clear()
        for name in ("mount.db", "agent/agent.db", "replica.db"):
            if chance.random() < 0.3:
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{self.directory / name}{suffix}").unlink(missing_ok=True)
                if name == "mount.db":
                    self.keeps_segments = True
                    (self.directory / "mount.notes").unlink(missing_ok=True)

    def _cut(self, directory: str, chance: Random) -> None:
        safe = self._names.get(directory, {})
        for entry in os.scandir(directory):
            if safe.get(entry.name) != entry.inode() and chance.random() < 0.5:
                _remove_tree(entry.path)
            elif entry.is_dir():
                self._cut(entry.path, chance)
            else:
                self._forget(entry.path, entry.inode(), chance)

    def _forget(self, path: str, inode: int, chance: Random) -> None:
        current, safe = Path(path).read_bytes(), self._contents.get(inode, b"")
        fate = chance.choice(("drop", "keep", "mix"))
        if current == safe or fate == "keep":
            return
        if fate == "drop":
            kept = safe
        else:
            left = safe[: self._cut_to.get(inode)]
            size = chance.choice((len(left), len(current)))
            ends = [(at, min(at + PAGE, size)) for at in range(0, size, PAGE)]
            kept = b"".join(chance.choice((left, current))[at:end].ljust(end - at, b"\0") for at, end in ends)
        labels = {one: os.getxattr(path, one) for one in os.listxattr(path)}
        Path(path).write_bytes(kept)
        for name, value in labels.items():
            os.setxattr(path, name, value)


def _remove_tree(path: str) -> None:
    if os.path.isdir(path):
        for name in os.listdir(path):
            _remove_tree(f"{path}/{name}")
        _real_rmdir(path)
    else:
        _real_unlink(path)


drives: dict[Machine, Drive] = {}


def _drive() -> Drive | None:
    """Of the process that runs now; raises `Gone` if it was killed."""
    now = process.get()
    if now is None:
        return None
    now.check()
    return drives.get(now.machine)


def _stamp(file: int | str) -> None:
    now = int(world.wall_seconds() * 1e9)
    os.utime(file, ns=(now, now))


def _check_room() -> None:
    now = process.get()
    if now is not None and now.machine.full:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fsync(descriptor: int) -> None:
    if (drive := _drive()) is not None:
        drive.sync(descriptor)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    drive = _drive()
    if drive is None or not flags & os.O_CREAT:
        return _real_open(path, flags, mode, dir_fd=dir_fd)
    _check_room()
    descriptor = _real_open(path, flags, mode, dir_fd=dir_fd)
    _stamp(descriptor)
    return descriptor


def _pwrite(descriptor: int, data: Any, offset: int) -> int:
    if _drive() is None:
        return _real_pwrite(descriptor, data, offset)
    _check_room()
    written = _real_pwrite(descriptor, data, offset)
    _stamp(descriptor)
    return written


def _truncate(file: Any, size: int) -> None:
    """Of a path or a descriptor."""
    if (drive := _drive()) is not None:
        drive.truncating(file, size)
    _real_truncate(file, size)
    if drive is not None:
        _stamp(file)


def _copy_file_range(source: int, target: int, count: int, *places: int) -> int:
    if _drive() is not None:
        _check_room()
    return _real_copy(source, target, count, *places)


def _unlink(path: Any, *, dir_fd: int | None = None) -> None:
    if (drive := _drive()) is not None and dir_fd is None:
        drive.removing(os.fspath(path))
    _real_unlink(path, dir_fd=dir_fd)


def _rename(source: Any, target: Any, **places: Any) -> None:
    _drive()
    _real_rename(source, target, **places)


def _rmdir(path: Any, **places: Any) -> None:
    _drive()
    _real_rmdir(path, **places)


def _mkdir(path: Any, mode: int = 0o777, **places: Any) -> None:
    _drive()
    _real_mkdir(path, mode, **places)


def _statvfs(path: Any) -> os.statvfs_result:
    now = process.get()
    if now is None:
        return _real_statvfs(path)
    free = 0 if now.machine.full else FREE_BYTES // BLOCK
    return os.statvfs_result((BLOCK, BLOCK, 2 * FREE_BYTES // BLOCK, free, free, 1 << 20, 1 << 20, 1 << 20, 0, 255))


def _listdir(path: Any = ".") -> list[Any]:
    return sorted(_real_listdir(path))


class _Scandir:
    """As `os.scandir` gives it."""

    def __init__(self, path: Any = ".") -> None:
        with _real_scandir(path) as entries:
            self._entries = iter(sorted(entries, key=lambda entry: entry.name))

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Scandir":
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


def take_over_drives() -> None:
    """Have the product's calls go through here; see the module."""
    os.fsync = os.fdatasync = _fsync  # type: ignore[assignment]
    os.open, os.pwrite = _open, _pwrite
    os.ftruncate = os.truncate = _truncate  # type: ignore[assignment]
    os.copy_file_range = _copy_file_range  # type: ignore[assignment]
    os.unlink, os.rmdir, os.mkdir, os.statvfs = _unlink, _rmdir, _mkdir, _statvfs
    os.rename = _rename  # type: ignore[assignment]
    os.listdir, os.scandir = _listdir, _Scandir  # type: ignore[assignment]
