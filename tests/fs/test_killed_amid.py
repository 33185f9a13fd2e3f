"""The process killed at every step of a request that leaves something on a drive; the kernel sends the request again.

A step is one commit to the catalog or to `mount.db`, one segment made or removed, one change of a segment. The kill comes just
before or just after it, and from then on nothing that the process still runs has an effect. Whatever the step: the answer and
what is there afterwards are those of a request nobody interrupted.
"""

import inspect
import os
import stat
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ROOT_INODE
from ckptfs.cache.mount_db import MountDatabase
from ckptfs.cache.segments import Segments
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, SetattrField
from ckptfs.fs.segment_sweep import SegmentSweep

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)
UNIQUE = 123_456
Request = tuple[int, int, bytes]
"""Opcode, inode, body."""

STEPS: dict[Any, tuple[str, ...]] = {
    SqliteCatalog: ("transact", "transact_together"),
    MountDatabase: (
        "put_file",
        "put_handle",
        "remove_handle",
        "remove_handle_and_backing",
        "remove_files",
        "set_states",
        "put_prefix",
        "remove_prefixes",
    ),
    Segments: ("create", "remove", "mark_sync_failed"),
    os: ("truncate", "utime", "pwrite"),
}


class Killed(BaseException):
    """The process is dead: nothing catches this."""


class Killer:
    """`arm(n)`: the process dies at half step n: even ones just before a step, odd ones just after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self.has_struck = False
        for owner, names in STEPS.items():
            for name in names:
                monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def arm(self, half_steps: int) -> None:
        self._left, self.has_struck = half_steps, False

    def disarm(self) -> None:
        self._left, self.has_struck = None, False

    def _pass(self) -> None:
        if self.has_struck:
            raise Killed
        if self._left is None:
            return
        self.has_struck = self._left == 0
        self._left -= 1
        if self.has_struck:
            raise Killed

    def _wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        async def waiting(*arguments: Any, **named: Any) -> Any:
            self._pass()
            result = await step(*arguments, **named)
            self._pass()
            return result

        def direct(*arguments: Any, **named: Any) -> Any:
            self._pass()
            result = step(*arguments, **named)
            self._pass()
            return result

        return waiting if inspect.iscoroutinefunction(step) else direct


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


class Scene:
    """What is there before the request: in a file, a second one and a directory; and one open for writing, another without a
    name that is open."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.file = self.other = self.opened = self.opened_handle = self.nameless = self.nameless_handle = 0

    async def prepare(self) -> None:
        node = self.node
        self.file = await node.save(b"file", b"content")
        await node.ask(*_xattr(self.file, b"user.old", 0))
        self.other = await node.save(b"other", b"something else")
        await node.mkdir(b"directory")
        self.opened, self.opened_handle = await node.create(b"opened")
        await node.write(self.opened_handle, b"being written")
        self.nameless, self.nameless_handle = await node.create(b"nameless")
        await node.write(self.nameless_handle, b"nobody sees me")
        await node.ask(*_xattr(self.nameless, b"user.old", 0))
        await node.unlink(b"nameless")

    async def seen(self) -> list[Any]:
        """All that programs can see, without times and numbers, which may differ."""
        node = self.node
        found: list[Any] = [await self._nameless(), await node.read(self.opened_handle)]
        for entry in sorted(await node.readdir(ROOT, await node.opendir(ROOT), 0), key=lambda entry: entry.name):
            if entry.name in (b".", b".."):
                continue
            shown = await node.getattr(entry.ino)
            content = await node.content(entry.ino) if stat.S_ISREG(shown.mode) else b""
            found.append((entry.name, *_lasting(shown), content, await self._xattrs(entry.ino)))
        return found

    async def _nameless(self) -> Any:
        handle = self.node.open_files.handle(self.nameless_handle)
        if handle is None:
            return None
        shown = _lasting(await self.node.getattr(self.nameless))
        return shown, await self.node.read(self.nameless_handle), await self._xattrs(self.nameless)

    async def _xattrs(self, ino: int) -> bytes:
        return bytes(await self.node.ask(Opcode.LISTXATTR, ino, fuse.GETXATTR_IN.pack(4096, 0)))

    async def clear(self) -> None:
        """Close and remove everything."""
        node = self.node
        for handle in [row.fh for row in node.database.handles()]:
            await node.release(handle)
        for entry in await node.readdir(ROOT, await node.opendir(ROOT), 0):
            if entry.name in (b".", b".."):
                continue
            is_directory = stat.S_ISDIR((await node.getattr(entry.ino)).mode)
            await node.ask(Opcode.RMDIR if is_directory else Opcode.UNLINK, ROOT, entry.name + b"\0")
        await node.settle()
        await SegmentSweep(
            node.namespace, node.versions, node.segments, node.open_files, node.reclaimer, node.database, node.store.store_id
        ).sweep_segments()
        await node.settle()


def _lasting(shown: Any) -> tuple[int, int, int, int, int]:
    """What of the attributes is the same in every run."""
    size = 0 if stat.S_ISDIR(shown.mode) else shown.size
    return shown.mode, shown.nlink, size, shown.uid, shown.gid


def _setattr(ino: int, fields: SetattrField, *, size: int = 0, mtime: int = 0, mode: int = 0, fh: int = 0) -> Request:
    body = fuse.SETATTR_IN.pack(int(fields), 0, fh, size, 0, 0, mtime, 0, 0, 0, 0, mode, 0, 0, 0, 0)
    return Opcode.SETATTR, ino, body


def _create(name: bytes, flags: int) -> Request:
    return Opcode.CREATE, ROOT, fuse.CREATE_IN.pack(flags | os.O_CREAT, 0o100644, 0, 0) + name + b"\0"


def _open(ino: int, flags: int) -> Request:
    return Opcode.OPEN, ino, fuse.OPEN_IN.pack(flags, 0)


def _mknod(kind: int) -> Request:
    return Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(kind | 0o600, 0, 0, 0) + b"new\0"


def _rename(old: bytes, new: bytes, flags: int = 0) -> Request:
    return Opcode.RENAME2, ROOT, fuse.RENAME2_IN.pack(ROOT, flags, 0) + old + b"\0" + new + b"\0"


def _xattr(ino: int, name: bytes, flags: int) -> Request:
    return Opcode.SETXATTR, ino, fuse.SETXATTR_IN.pack(1, flags, 0, 0) + name + b"\0v"


def _removexattr(ino: int) -> Request:
    return Opcode.REMOVEXATTR, ino, b"user.old\0"


def _write(fh: int, offset: int) -> Request:
    return Opcode.WRITE, 0, fuse.WRITE_IN.pack(fh, offset, 4, 0, 0, 0, 0) + b"more"


def _release(fh: int) -> Request:
    return Opcode.RELEASE, 0, fuse.RELEASE_IN.pack(fh, 0, 0, 0)


EXCHANGE = 2
REQUESTS: dict[str, Callable[[Scene], Request]] = {
    "create": lambda scene: _create(b"new", os.O_RDWR | os.O_EXCL),
    "create what is there": lambda scene: _create(b"file", os.O_WRONLY | os.O_TRUNC),
    "open": lambda scene: _open(scene.file, os.O_RDWR),
    "open to read": lambda scene: _open(scene.file, os.O_RDONLY),
    "open to append to what is open": lambda scene: _open(scene.opened, os.O_WRONLY | os.O_APPEND),
    "open and truncate": lambda scene: _open(scene.file, os.O_WRONLY | os.O_TRUNC),
    "open and truncate what is open": lambda scene: _open(scene.opened, os.O_WRONLY | os.O_TRUNC),
    "open what has no name": lambda scene: _open(scene.nameless, os.O_RDWR),
    "mknod": lambda scene: _mknod(stat.S_IFREG),
    "mknod of a pipe": lambda scene: _mknod(stat.S_IFIFO),
    "mkdir": lambda scene: (Opcode.MKDIR, ROOT, fuse.MKDIR_IN.pack(0o755, 0) + b"new\0"),
    "symlink": lambda scene: (Opcode.SYMLINK, ROOT, b"new\0target\0"),
    "link": lambda scene: (Opcode.LINK, ROOT, fuse.LINK_IN.pack(scene.file) + b"new\0"),
    "unlink": lambda scene: (Opcode.UNLINK, ROOT, b"file\0"),
    "unlink what is open": lambda scene: (Opcode.UNLINK, ROOT, b"opened\0"),
    "rmdir": lambda scene: (Opcode.RMDIR, ROOT, b"directory\0"),
    "rename": lambda scene: _rename(b"file", b"new"),
    "rename over": lambda scene: _rename(b"file", b"other"),
    "rename what is open over": lambda scene: _rename(b"opened", b"other"),
    "rename over what is open": lambda scene: _rename(b"file", b"opened"),
    "exchange": lambda scene: _rename(b"file", b"opened", EXCHANGE),
    "change of mode": lambda scene: _setattr(scene.file, SetattrField.MODE, mode=0o100600),
    "change of times": lambda scene: _setattr(scene.file, SetattrField.MTIME, mtime=1000),
    "change of times of what is open": lambda scene: _setattr(scene.opened, SetattrField.MTIME, mtime=1000),
    "change of mode of what has no name": lambda scene: _setattr(scene.nameless, SetattrField.MODE, mode=0o100600),
    "truncate": lambda scene: _setattr(scene.file, SetattrField.SIZE, size=3),
    "truncate to nothing": lambda scene: _setattr(scene.file, SetattrField.SIZE, size=0),
    "truncate what is open": lambda scene: _setattr(
        scene.opened, SetattrField.SIZE | SetattrField.FH, size=3, fh=scene.opened_handle
    ),
    "truncate what has no name": lambda scene: _setattr(
        scene.nameless, SetattrField.SIZE | SetattrField.FH, size=3, fh=scene.nameless_handle
    ),
    "new attribute": lambda scene: _xattr(scene.file, b"user.new", os.XATTR_CREATE),
    "removed attribute": lambda scene: _removexattr(scene.file),
    "new attribute of what has no name": lambda scene: _xattr(scene.nameless, b"user.new", os.XATTR_CREATE),
    "removed attribute of what has no name": lambda scene: _removexattr(scene.nameless),
    "write": lambda scene: _write(scene.opened_handle, 13),
    "write to what has no name": lambda scene: _write(scene.nameless_handle, 14),
    "fsync": lambda scene: (Opcode.FSYNC, 0, fuse.FSYNC_IN.pack(scene.opened_handle, 0, 0)),
    "fallocate": lambda scene: (Opcode.FALLOCATE, 0, fuse.FALLOCATE_IN.pack(scene.opened_handle, 0, 100, 0, 0)),
    "release of what has no name": lambda scene: _release(scene.nameless_handle),
}
MAKES_HANDLE = ("create", "open")


async def _outcome(scene: Scene, what: str, answer: bytes) -> list[Any]:
    """What the program is told, and what is there then: also after what it opened was written to and closed, and after all is
    removed."""
    node = scene.node
    found: list[Any] = [len(answer), await scene.seen()]
    if what.startswith(MAKES_HANDLE):
        handle = node.open_files.handle(UNIQUE)
        if handle.writable:
            await node.write(UNIQUE, b"written")
        found.append(await node.read(UNIQUE))
        await node.release(UNIQUE)
        await node.settle()
        found.append(await scene.seen())
    assert await catalog_problems(node.kv) == []
    await scene.clear()
    assert node.segment_count() == 0
    assert node.database.files() == []
    assert len(node.open_files) == 0
    return found


@pytest.mark.parametrize("what", REQUESTS)
async def test_a_request_killed_at_any_step_is_as_one_that_was_not(start_node: StartNode, killer: Killer, what: str) -> None:
    node = await start_node()
    scene = Scene(node)
    await scene.prepare()
    expected = await _outcome(scene, what, await node.ask(*REQUESTS[what](scene), unique=UNIQUE))
    half_steps = 0
    while True:
        node.tell(UNIQUE)
        await scene.prepare()
        request = REQUESTS[what](scene)
        killer.arm(half_steps)
        try:
            answer = await node.ask(*request, unique=UNIQUE)
        except Killed:
            node.kill()
            killer.disarm()
            scene.node = node = await start_node()
            answer = await node.ask(*request, unique=UNIQUE)
        else:
            if killer.has_struck:
                raise AssertionError("a kill was caught")
            killer.disarm()
            break
        assert await _outcome(scene, what, answer) == expected, f"killed at half step {half_steps}"
        half_steps += 1
    assert half_steps > 0 or what == "fallocate"


async def test_creates_that_share_a_commit_are_each_as_one_alone(start_node: StartNode, killer: Killer) -> None:
    """Killed at any step: those that had no answer come again, and all three files are there."""
    half_steps = 0
    while True:
        node = await start_node()
        requests = {UNIQUE + number: _create(b"new%d" % number, os.O_RDWR | os.O_EXCL) for number in range(3)}
        answers: dict[int, tuple[int, bytes]] = {}
        killer.arm(half_steps)
        try:
            await node.ask_at_once(requests, answers)
        except BaseExceptionGroup as group:
            if group.split(Killed)[1] is not None:
                raise
        has_struck = killer.has_struck
        killer.disarm()
        if has_struck:
            node.kill()
            node = await start_node()
            await node.ask_at_once({number: request for number, request in requests.items() if number not in answers}, answers)
        assert {unique: error for unique, (error, _) in answers.items()} == dict.fromkeys(requests, 0)
        for unique in requests:
            await node.write(unique, b"%d" % unique)
            await node.release(unique)
        await node.settle()
        for number, unique in enumerate(requests):
            assert await node.content((await node.lookup(ROOT, b"new%d" % number)).ino) == b"%d" % unique
        assert await catalog_problems(node.kv) == []
        await Scene(node).clear()
        assert node.segment_count() == 0
        node.kill()
        if not has_struck:
            break
        half_steps += 1
    assert half_steps > 3 * 4  # each has a segment and a row of its own
