"""Files made without a name (O_TMPFILE), and inodes that have none any more."""

import os
import stat
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.ids import ROOT_INODE
from ckptfs.cache.mount_db import BOOT_FACT
from ckptfs.cache.removal import Removed
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)
LINK_UNIQUE, TMPFILE_UNIQUE = 123_456, 123_458


async def _tmpfile(node: Any, parent: int = ROOT, mode: int = 0o100600, **header: int) -> tuple[int, int]:
    """(ino, fh)"""
    body = fuse.CREATE_IN.pack(os.O_RDWR | os.O_TMPFILE, mode, 0o022, 0) + b"#1\0"
    answer = await node.ask(Opcode.TMPFILE, parent, body, **header)
    return fuse.ENTRY_OUT.unpack_from(answer)[0], fuse.OPEN_OUT.unpack(answer[-fuse.OPEN_OUT.size :])[0]


async def _link(node: Any, ino: int, name: bytes, **header: int) -> bytes:
    answer: bytes = await node.ask(Opcode.LINK, ROOT, fuse.LINK_IN.pack(ino) + name + b"\0", **header)
    return answer


async def _chmod(node: Any, ino: int, mode: int) -> None:
    body = fuse.SETATTR_IN.pack(fuse.SetattrField.MODE, *(0,) * 10, mode, *(0,) * 4)
    await node.ask(Opcode.SETATTR, ino, body)


async def _next_life(start_node: StartNode, node: Any, *, power_cut: bool = False) -> Any:
    if power_cut:
        node.database.set_fact(BOOT_FACT, b"another boot")
        node.database.forget_handles()
    node.kill()
    return await start_node()


async def test_a_file_without_a_name_is_nowhere_until_it_gets_one(start_node: StartNode) -> None:
    node = await start_node()
    directory = await node.mkdir(b"directory", mode=0o2775, gid=8)
    ino, fh = await _tmpfile(node, directory, 0o100666, uid=5, gid=6)
    shown = await node.getattr(ino)
    assert (shown.nlink, shown.mode, shown.uid, shown.gid) == (0, stat.S_IFREG | 0o644, 5, 8)
    await node.write(fh, b"content")
    assert len(await node.readdir(directory, await node.opendir(directory), 0)) == 2  # itself and its parent
    await _link(node, ino, b"file")
    await _link(node, ino, b"again")
    assert (await node.lookup(ROOT, b"again")).nlink == 2
    await node.write(fh, b"s", 7)
    await node.release(fh)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content((await node.lookup(ROOT, b"file")).ino) == b"contents"


async def test_a_name_that_is_taken_leaves_the_file_as_it_is(start_node: StartNode) -> None:
    node = await start_node()
    await node.save(b"taken", b"")
    ino, fh = await _tmpfile(node)
    await node.write(fh, b"content")
    assert await node.errno(_link(node, ino, b"taken")) == "EEXIST"
    assert (await node.getattr(ino)).nlink == 0
    await _link(node, ino, b"file")
    assert await node.read(fh) == b"content"


async def test_without_a_name_it_goes_with_its_last_handle(start_node: StartNode) -> None:
    node = await start_node()
    _, fh = await _tmpfile(node)
    await node.write(fh, b"content")
    await node.release(fh)
    await node.settle()
    assert node.segment_count() == 0
    assert node.database.files() == []


@pytest.mark.parametrize("linked", [False, True])
async def test_it_outlives_kills(start_node: StartNode, linked: bool) -> None:
    node = await start_node()
    ino, fh = await _tmpfile(node, unique=TMPFILE_UNIQUE)
    await node.write(fh, b"content")
    node = await _next_life(start_node, node)
    assert await _tmpfile(node, unique=TMPFILE_UNIQUE) == (ino, fh)
    answer = await _link(node, ino, b"file", unique=LINK_UNIQUE) if linked else b""
    node = await _next_life(start_node, node)
    assert await node.read(fh) == b"content"
    assert await _link(node, ino, b"file", unique=LINK_UNIQUE) == answer or not linked
    assert (await node.getattr(ino)).nlink == 1
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"content"
    assert node.segment_count() == 1


async def test_killed_between_the_name_and_the_note_of_it(start_node: StartNode) -> None:
    """The catalog has the name, `mount.db` still calls the file nameless."""
    node = await start_node()
    ino, fh = await _tmpfile(node)
    await node.write(fh, b"content")
    row = node.database.file(ino)
    await _link(node, ino, b"file")
    node.database.put_file(row)
    node = await _next_life(start_node, node)
    assert (await node.getattr(ino)).nlink == 1
    await node.write(fh, b"s", 7)
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"contents"


async def test_a_power_cut_never_shows_the_name_without_the_bytes(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await _tmpfile(node)
    await node.write(fh, b"content")
    await _link(node, ino, b"file")
    node = await _next_life(start_node, node, power_cut=True)
    assert await node.content((await node.lookup(ROOT, b"file")).ino) == b"content"


@pytest.mark.parametrize("how", ["rmdir", "rename over"])
async def test_a_removed_directory_is_shown_as_long_as_the_kernel_knows_it(start_node: StartNode, how: str) -> None:
    node = await start_node()
    directory = await node.mkdir(b"directory", mode=0o750)
    if how == "rmdir":
        await node.ask(Opcode.RMDIR, ROOT, b"directory\0")
    else:
        await node.mkdir(b"new")
        await node.rename(b"new", b"directory")
    shown = await node.getattr(directory)
    assert (shown.nlink, shown.mode) == (0, stat.S_IFDIR | 0o750)
    assert await node.errno(node.mkdir(b"below", directory)) == "ESTALE"
    await node.ask(Opcode.BATCH_FORGET, 0, fuse.BATCH_FORGET_IN.pack(1, 0) + fuse.FORGET_ONE.pack(directory, 3))
    assert await node.errno(node.getattr(directory)) == "ESTALE"


async def test_a_removed_pipe_is_shown_as_long_as_the_kernel_knows_it(start_node: StartNode) -> None:
    node = await start_node()
    await node.ask(Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(stat.S_IFIFO | 0o600, 0, 0, 0) + b"pipe\0")
    ino = (await node.lookup(ROOT, b"pipe")).ino
    await node.unlink(b"pipe")
    assert (await node.getattr(ino)).nlink == 0
    await node.ask(Opcode.FORGET, ino, (1).to_bytes(8, "little"))
    assert await node.errno(node.getattr(ino)) == "ESTALE"


@pytest.mark.parametrize("committed", [True, False])
async def test_what_is_removed_and_not_a_regular_file_outlives_a_kill(start_node: StartNode, committed: bool) -> None:
    node = await start_node()
    directory, other = await node.mkdir(b"directory", mode=0o750), await node.mkdir(b"other")
    await node.ask(Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(stat.S_IFIFO | 0o600, 0, 0, 0) + b"pipe\0")
    pipe = (await node.lookup(ROOT, b"pipe")).ino
    for name in (b"directory", b"other"):
        await node.ask(Opcode.RMDIR, ROOT, name + b"\0")
    await node.unlink(b"pipe")
    await _chmod(node, directory, 0o700)
    await node.ask(Opcode.FORGET, other, (1).to_bytes(8, "little"))
    if committed:
        node.database.settle_debts()
    node.kill()
    node = await start_node()
    shown = await node.getattr(directory)
    assert (shown.nlink, shown.mode) == (0, stat.S_IFDIR | 0o700)
    assert (await node.getattr(pipe)).mode == stat.S_IFIFO | 0o600
    assert await node.errno(node.getattr(other)) == "ESTALE"
    await _chmod(node, pipe, 0o640)
    await node.ask(Opcode.FORGET, directory, (1).to_bytes(8, "little"))
    node.kill()
    node = await start_node()
    assert (await node.getattr(pipe)).mode == stat.S_IFIFO | 0o640
    assert await node.errno(node.getattr(directory)) == "ESTALE"
    node.kill()
    node = await start_node(incarnation=2, new_connection=True)
    assert await node.errno(node.getattr(pipe)) == "ESTALE"


async def test_a_kill_right_after_the_removal_s_transaction_leaves_the_directory_to_its_users(start_node: StartNode) -> None:
    node = await start_node()
    removed, replaced = await node.mkdir(b"removed"), await node.mkdir(b"replaced")
    await node.mkdir(b"new")
    await node.namespace.rmdir(ROOT_INODE, b"removed")  # as far as the handler got
    await node.namespace.rename(ROOT_INODE, b"new", ROOT_INODE, b"replaced")
    node.kill()
    node = await start_node()
    assert ((await node.getattr(removed)).nlink, (await node.getattr(replaced)).nlink) == (0, 0)


async def test_a_removal_that_was_noted_and_never_made_changes_nothing(start_node: StartNode) -> None:
    node = await start_node()
    directory = await node.mkdir(b"directory")
    record = await node.namespace.inode(directory)
    node.namespace.before_removal(Removed(directory, replace(record, nlink=0, mode=stat.S_IFDIR | 0o111), True, []))
    for _ in range(2):
        await _chmod(node, directory, 0o700)
        shown = await node.lookup(ROOT, b"directory")
        assert (shown.nlink, shown.mode) == (2, stat.S_IFDIR | 0o700)
        node.kill()
        node = await start_node()


async def test_a_change_of_a_removed_pipe_is_made_once(start_node: StartNode) -> None:
    node = await start_node()
    await node.ask(Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(stat.S_IFIFO | 0o600, 0, 0, 0) + b"pipe\0")
    ino = (await node.lookup(ROOT, b"pipe")).ino
    await node.unlink(b"pipe")
    body = fuse.SETXATTR_IN.pack(1, os.XATTR_CREATE, 0, 0) + b"user.a\0" + b"1"
    await node.ask(Opcode.SETXATTR, ino, body, unique=LINK_UNIQUE)
    node.kill()
    node = await start_node()
    await node.ask(Opcode.SETXATTR, ino, body, unique=LINK_UNIQUE)  # the kernel sends it again


async def test_when_it_was_made_is_told_by_statx_alone(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    answer = await node.ask(Opcode.STATX, ino, fuse.STATX_IN.pack(0, 0, 0, 0, fuse.STATX_BIRTH))
    assert len(answer) == 288
    fields = fuse.STATX.unpack_from(answer, fuse.STATX_OUT.size)
    shown = await node.getattr(ino)
    assert fields[0] & fuse.STATX_BIRTH
    assert (fields[6], fields[8], fields[9]) == (shown.mode, ino, 7)
    atime, birth, ctime, mtime = (fields[at] * 10**9 + fields[at + 1] for at in (12, 15, 18, 21))
    assert (atime, ctime, mtime) == (shown.atime_ns, shown.ctime_ns, shown.mtime_ns)
    assert birth == (await node.namespace.inode(ino)).made_ns > 0
