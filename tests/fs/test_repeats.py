"""Requests the kernel sends again, because the process was killed before it answered: one effect, one answer."""

import os
import stat
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, new_segment_id
from ckptfs.cache.mount_db import FileState
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, RequestHeader, SetattrField
from ckptfs.fs.repeats import REMOVED_AT_ONCE, done

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)
UNIQUE = 123_456
Request = tuple[int, int, bytes]
"""Opcode, inode, body."""


def _setattr(ino: int, fields: SetattrField, *, size: int = 0, mtime: int = 0, mode: int = 0) -> Request:
    body = fuse.SETATTR_IN.pack(int(fields), 0, 0, size, 0, 0, mtime, 0, 0, 0, 0, mode, 0, 0, 0, 0)
    return Opcode.SETATTR, ino, body


def _create(flags: int) -> Request:
    return Opcode.CREATE, ROOT, fuse.CREATE_IN.pack(flags | os.O_CREAT, 0o100644, 0, 0) + b"new\0"


def _mknod(kind: int) -> Request:
    return Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(kind | 0o600, 0, 0, 0) + b"new\0"


def _rename(new: bytes, flags: int = 0) -> Request:
    return Opcode.RENAME2, ROOT, fuse.RENAME2_IN.pack(ROOT, flags, 0) + b"file\0" + new + b"\0"


def _xattr(ino: int, name: bytes, flags: int) -> Request:
    return Opcode.SETXATTR, ino, fuse.SETXATTR_IN.pack(1, flags, 0, 0) + name + b"\0v"


EXCHANGE = 2
REPEATED: dict[str, Callable[[int], Request]] = {
    "create": lambda file: _create(os.O_RDWR | os.O_EXCL),
    "create or open": lambda file: _create(os.O_WRONLY | os.O_TRUNC),
    "open": lambda file: (Opcode.OPEN, file, fuse.OPEN_IN.pack(os.O_RDWR, 0)),
    "open and truncate": lambda file: (Opcode.OPEN, file, fuse.OPEN_IN.pack(os.O_WRONLY | os.O_TRUNC, 0)),
    "mknod": lambda file: _mknod(stat.S_IFREG),
    "mknod of a pipe": lambda file: _mknod(stat.S_IFIFO),
    "mkdir": lambda file: (Opcode.MKDIR, ROOT, fuse.MKDIR_IN.pack(0o755, 0) + b"new\0"),
    "symlink": lambda file: (Opcode.SYMLINK, ROOT, b"new\0target\0"),
    "link": lambda file: (Opcode.LINK, ROOT, fuse.LINK_IN.pack(file) + b"new\0"),
    "unlink": lambda file: (Opcode.UNLINK, ROOT, b"file\0"),
    "rmdir": lambda file: (Opcode.RMDIR, ROOT, b"directory\0"),
    "rename": lambda file: _rename(b"new"),
    "rename by the older call": lambda file: (Opcode.RENAME, ROOT, fuse.RENAME_IN.pack(ROOT) + b"file\0new\0"),
    "rename over": lambda file: _rename(b"other"),
    "exchange": lambda file: _rename(b"other", EXCHANGE),
    "change of mode": lambda file: _setattr(file, SetattrField.MODE, mode=0o100600),
    "change of times": lambda file: _setattr(file, SetattrField.MTIME, mtime=1000),
    "truncate": lambda file: _setattr(file, SetattrField.SIZE, size=3),
    "new attribute": lambda file: _xattr(file, b"user.new", os.XATTR_CREATE),
    "removed attribute": lambda file: (Opcode.REMOVEXATTR, file, b"user.old\0"),
}


async def _everything(node: Any) -> list[Any]:
    """All that a program can see of the root: names, attributes, extended attributes, bytes."""
    found = []
    for entry in sorted(await node.readdir(ROOT, await node.opendir(ROOT), 0), key=lambda entry: entry.name):
        if entry.name == b"..":
            continue
        shown = await node.getattr(entry.ino)
        content = await node.content(entry.ino) if stat.S_ISREG(shown.mode) else b""
        names = await node.ask(Opcode.LISTXATTR, entry.ino, fuse.GETXATTR_IN.pack(4096, 0))
        found.append((entry.name, shown, content, names))
    return found


@pytest.mark.parametrize("what", REPEATED)
async def test_a_request_sent_again_after_kills_has_one_effect_and_the_same_answer(start_node: StartNode, what: str) -> None:
    node = await start_node()
    file = await node.save(b"file", b"content")
    await node.save(b"other", b"something else")
    await node.mkdir(b"directory")
    await node.ask(*_xattr(file, b"user.old", 0))
    request = REPEATED[what](file)
    answer = await node.ask(*request, unique=UNIQUE)
    before = await _everything(node)
    for _ in range(3):
        node.kill()
        node = await start_node()
        assert await node.ask(*request, unique=UNIQUE) == answer
        assert await _everything(node) == before
    node.tell(UNIQUE)
    node.kill()
    node = await start_node()
    node.repeats.all_repeated()
    await node.mkdir(b"another")
    await node.mkdir(b"and another")
    assert len(await node.kv.range(b"o/")) == 1


@pytest.mark.parametrize("what", ["mkdir", "unlink", "rename", "create"])
async def test_only_the_request_that_was_carried_out_is_answered_again(start_node: StartNode, what: str) -> None:
    node = await start_node()
    request = REPEATED[what](await node.save(b"file", b"content"))
    await node.ask(*request, unique=UNIQUE)
    node.kill()
    node = await start_node()
    assert await node.errno(node.ask(*request, unique=UNIQUE + 2)) in ("EEXIST", "ENOENT")
    assert await node.errno(node.ask(*request, unique=UNIQUE)) == ""


async def test_an_error_is_found_again(start_node: StartNode) -> None:
    node = await start_node()
    request = (Opcode.RMDIR, ROOT, b"directory\0")
    directory = await node.mkdir(b"directory")
    await node.save(b"file", b"", directory)
    assert await node.errno(node.ask(*request, unique=UNIQUE)) == "ENOTEMPTY"
    node.kill()
    node = await start_node()
    assert await node.errno(node.ask(*request, unique=UNIQUE)) == "ENOTEMPTY"
    await node.unlink(b"file", directory)
    node.kill()
    node = await start_node()
    assert await node.errno(node.ask(*request, unique=UNIQUE)) == ""
    assert await node.errno(node.lookup(ROOT, b"directory")) == "ENOENT"


async def test_what_was_never_carried_out_is(start_node: StartNode) -> None:
    node = await start_node()
    node.kill()
    node = await start_node()
    for name in ("create", "mkdir", "symlink"):
        await node.ask(*REPEATED[name](0), unique=UNIQUE)
        assert stat.S_IFMT((await node.lookup(ROOT, b"new")).mode)
        await node.ask(Opcode.RMDIR if name == "mkdir" else Opcode.UNLINK, ROOT, b"new\0")


async def test_numbers_of_another_mount_mean_nothing(start_node: StartNode) -> None:
    node = await start_node(incarnation=1)
    await node.save(b"file", b"content")
    await node.ask(Opcode.UNLINK, ROOT, b"file\0", unique=UNIQUE)
    node.kill()
    node = await start_node(incarnation=2)
    assert await node.kv.range(b"o/") == []
    await node.save(b"file", b"content")
    await node.ask(Opcode.UNLINK, ROOT, b"file\0", unique=UNIQUE)
    assert await node.errno(node.lookup(ROOT, b"file")) == "ENOENT"


async def test_another_node_s_numbers_are_its_own(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    await here.mkdir(b"new")
    await here.ask(Opcode.RMDIR, ROOT, b"new\0", unique=UNIQUE)
    there.kill()
    there = await start_node("b")
    assert await there.errno(there.ask(Opcode.RMDIR, ROOT, b"new\0", unique=UNIQUE)) == "ENOENT"
    here.kill()
    here = await start_node("a")
    assert await here.errno(here.ask(Opcode.RMDIR, ROOT, b"new\0", unique=UNIQUE)) == ""


async def test_notes_go_with_later_changes(start_node: StartNode) -> None:
    node = await start_node()
    for number in range(3 * REMOVED_AT_ONCE):
        await node.ask(Opcode.SYMLINK, ROOT, b"%d\0target\0" % number, unique=UNIQUE + number)
    assert len(await node.kv.range(b"o/")) == 3 * REMOVED_AT_ONCE
    node.kill()
    node = await start_node()
    await node.ask(Opcode.SYMLINK, ROOT, b"7\0target\0", unique=UNIQUE + 7)
    node.repeats.all_repeated()
    for number in range(4):
        await node.mkdir(b"directory-%d" % number)
    left = [entry.key for entry in await node.kv.range(b"o/")]
    assert len(left) == 2  # of the newest change, and of the one that is not answered yet
    assert b"o/a/%016x" % (UNIQUE + 7) in left


async def test_a_file_that_was_only_named_is_made(start_node: StartNode) -> None:
    node = await start_node()

    async def named(header: RequestHeader, body: memoryview) -> bytes:
        await node.namespace.create_file(InodeNumber(ROOT), b"new", 0o600, 0, 0, new_segment_id())
        return b""

    opcode, _, body = _mknod(stat.S_IFREG)
    with memoryview(body) as view:
        await node.repeats.once(named, done)(RequestHeader(0, opcode, UNIQUE, ROOT, 0, 0, 1, 0, 0), view)
    node.kill()
    node = await start_node()
    await node.ask(opcode, ROOT, body, unique=UNIQUE)
    ino = (await node.lookup(ROOT, b"new")).ino
    assert await node.content(ino) == b""
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL


async def test_a_name_another_node_took_away_meanwhile_is_looked_up_again(start_node: StartNode) -> None:
    node, other = await start_node("a"), await start_node("b")
    await node.ask(*REPEATED["mkdir"](0), unique=UNIQUE)
    await other.ask(Opcode.RMDIR, ROOT, b"new\0")
    node.kill()
    node = await start_node("a")
    assert await node.errno(node.ask(*REPEATED["mkdir"](0), unique=UNIQUE)) == "ESTALE"  # the kernel begins the call again


@pytest.mark.parametrize("in_use", [False, True])
async def test_a_file_that_was_replaced_just_before_the_kill_is_no_longer_kept_for_itself(
    start_node: StartNode, in_use: bool
) -> None:
    """Its version outlives it, because the new file may have to fall back to it; its row in `mount.db` must not."""
    node = await start_node()
    replaced = await node.save(b"file", b"replaced")
    handles = [await node.open(replaced)] if in_use else []
    ino, fh = await node.create(b"new")
    await node.namespace.rename(InodeNumber(ROOT), b"new", InodeNumber(ROOT), b"file")
    node.kill()
    node = await start_node()
    for handle in handles:
        assert await node.read(handle) == b"replaced"
        assert (await node.getattr(replaced)).nlink == 0
        assert node.database.file(InodeNumber(replaced)).state is FileState.ORPHAN
        await node.release(handle)
    await node.reclaimer.drain()
    assert node.database.file(InodeNumber(replaced)) is None
    await node.write(fh, b"new")
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"new"
    assert node.segment_count() == 1
