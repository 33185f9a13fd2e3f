"""The handlers, asked directly on a real catalog and a real store: names, attributes, bytes, and what a kill leaves."""

import errno
import os
import resource
import stat
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId, new_segment_id
from ckptfs.cache.versions import LocalCommit, Versions
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.callers import is_member
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.fuse_format import Opcode, RequestHeader, SetattrField

StartNode = Callable[..., Awaitable[Any]]
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
ROOT = int(ROOT_INODE)


async def _setattr(node: Any, ino: int, fields: SetattrField, **values: int) -> Any:
    order = ("fh", "size", "_", "atime", "mtime", "_", "atimensec", "mtimensec", "_", "mode", "_", "uid", "gid", "_")
    body = fuse.SETATTR_IN.pack(int(fields), 0, *(values.get(name, 0) for name in order))
    await node.ask(Opcode.SETATTR, ino, body)
    return await node.getattr(ino)


async def _set_xattr(node: Any, ino: int, name: bytes, value: bytes, flags: int = 0) -> None:
    await node.ask(Opcode.SETXATTR, ino, fuse.SETXATTR_IN.pack(len(value), flags, 0, 0) + name + b"\0" + value)


async def _xattr(node: Any, ino: int, name: bytes, size: int = 4096) -> bytes:
    answer: bytes = await node.ask(Opcode.GETXATTR, ino, fuse.GETXATTR_IN.pack(size, 0) + name + b"\0")
    return answer


# Names


async def test_what_a_name_leads_to(node: Any) -> None:
    directory = await node.mkdir(b"directory")
    ino, _ = await node.create(b"file", directory)
    assert (await node.lookup(directory, b"file")).ino == ino
    assert (await node.lookup(directory, b".")).ino == directory
    assert (await node.lookup(directory, b"..")).ino == ROOT
    assert await node.errno(node.lookup(directory, b"none")) == "ENOENT"
    assert await node.errno(node.lookup(ino, b"file")) == "ENOTDIR"
    assert await node.errno(node.lookup(ROOT, b"n" * 256)) == "ENAMETOOLONG"
    assert await node.errno(node.lookup(99_999, b"x")) != ""


async def test_a_new_file_shows_what_was_asked_for(node: Any) -> None:
    ino, _ = await node.create(b"file", mode=0o102640, uid=7, gid=8)
    shown = await node.lookup(ROOT, b"file")
    assert (shown.ino, shown.size, shown.nlink, shown.uid, shown.gid) == (ino, 0, 1, 7, 8)
    assert shown.mode == stat.S_IFREG | 0o2640
    assert await node.getattr(ino) == shown


async def test_making_what_is_there(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    assert await node.errno(node.create(b"file", flags=os.O_RDWR | os.O_EXCL)) == "EEXIST"
    assert await node.errno(node.mkdir(b"file")) == "EEXIST"
    again, second = await node.create(b"file")
    assert again == ino
    assert second != fh
    assert await node.read(second) == b"content"
    await node.create(b"file", flags=os.O_RDWR | os.O_TRUNC)
    assert (await node.getattr(ino)).size == 0


async def test_a_file_whose_segment_cannot_be_made_leaves_no_name(node: Any) -> None:
    node.store.segments.rmdir()
    assert await node.errno(node.create(b"file")) != ""
    assert await node.errno(node.lookup(ROOT, b"file")) == "ENOENT"
    assert node.database.files() == []
    node.store.segments.mkdir()
    await node.create(b"file")


@pytest.mark.parametrize(("kind", "rdev"), [(stat.S_IFIFO, 0), (stat.S_IFSOCK, 0), (stat.S_IFCHR, 0x103), (stat.S_IFREG, 0)])
async def test_nodes(node: Any, kind: int, rdev: int) -> None:
    await node.ask(Opcode.MKNOD, ROOT, fuse.MKNOD_IN.pack(kind | 0o600, rdev, 0, 0) + b"node\0")
    shown = await node.lookup(ROOT, b"node")
    assert (shown.mode, shown.rdev) == (kind | 0o600, rdev)
    await node.settle()
    if kind == stat.S_IFREG:
        assert await node.state(shown.ino) is VersionState.LOCAL
        assert await node.content(shown.ino) == b""
    await node.unlink(b"node")
    assert await node.errno(node.lookup(ROOT, b"node")) == "ENOENT"


async def test_links(node: Any) -> None:
    await node.ask(Opcode.SYMLINK, ROOT, b"link\0../some where\0")
    shown = await node.lookup(ROOT, b"link")
    assert stat.S_ISLNK(shown.mode)
    assert shown.size == len(b"../some where")
    assert await node.ask(Opcode.READLINK, shown.ino) == b"../some where"
    ino = await node.save(b"file", b"content")
    assert await node.errno(node.ask(Opcode.READLINK, ino)) == "EINVAL"
    await node.ask(Opcode.LINK, ROOT, fuse.LINK_IN.pack(ino) + b"second\0")
    assert (await node.lookup(ROOT, b"second")).ino == ino
    assert (await node.getattr(ino)).nlink == 2
    await node.unlink(b"file")
    await node.settle()
    assert (await node.getattr(ino)).nlink == 1
    assert await node.content(ino) == b"content"
    directory = await node.mkdir(b"directory")
    assert await node.errno(node.ask(Opcode.LINK, ROOT, fuse.LINK_IN.pack(directory) + b"third\0")) == "EPERM"


async def test_directories_count_their_own(node: Any) -> None:
    directory = await node.mkdir(b"directory")
    await node.mkdir(b"inner", directory)
    await node.create(b"file", directory)
    assert (await node.getattr(directory)).nlink == 3
    assert await node.errno(node.ask(Opcode.RMDIR, ROOT, b"directory\0")) == "ENOTEMPTY"
    assert await node.errno(node.ask(Opcode.RMDIR, directory, b"file\0")) == "ENOTDIR"
    assert await node.errno(node.unlink(b"inner", directory)) == "EISDIR"
    await node.ask(Opcode.RMDIR, directory, b"inner\0")
    await node.unlink(b"file", directory)
    await node.ask(Opcode.RMDIR, ROOT, b"directory\0")
    assert await node.errno(node.lookup(ROOT, b"directory")) == "ENOENT"


async def test_renames(node: Any) -> None:
    first, second = await node.save(b"first", b"1"), await node.save(b"second", b"2")
    assert await node.errno(node.rename(b"first", b"second", RENAME_NOREPLACE)) == "EEXIST"
    assert await node.errno(node.rename(b"first", b"third", RENAME_NOREPLACE | RENAME_EXCHANGE)) == "EINVAL"
    await node.rename(b"first", b"second", RENAME_EXCHANGE)
    assert ((await node.lookup(ROOT, b"first")).ino, (await node.lookup(ROOT, b"second")).ino) == (second, first)
    await node.ask(Opcode.RENAME, ROOT, fuse.RENAME_IN.pack(ROOT) + b"first\0second\0")
    await node.settle()
    assert (await node.lookup(ROOT, b"second")).ino == second
    assert await node.content(second) == b"2"
    assert node.segment_count() == 1
    directory = await node.mkdir(b"directory")
    inner = await node.mkdir(b"inner", directory)
    assert await node.errno(node.rename(b"directory", b"x", parents=(ROOT, inner))) == "EINVAL"
    assert await node.errno(node.rename(b"second", b"directory")) == "EISDIR"
    assert await node.errno(node.rename(b"directory", b"second")) == "ENOTDIR"
    assert await node.errno(node.rename(b"none", b"x")) == "ENOENT"


# Directories read


async def _names(node: Any, directory: int, fh: int, offset: int = 0, size: int = 4096) -> list[bytes]:
    names: list[bytes] = []
    while found := await node.readdir(directory, fh, offset, size):
        names += [entry.name for entry in found]
        offset = found[-1].cookie
    return names


async def test_a_directory_is_read_once_through_in_answers_of_any_size(node: Any) -> None:
    wanted = [b"n" * length for length in range(1, 60)]
    for name in wanted:
        await node.mkdir(name)
    for size in (24 + 64, 200, 4096, 1 << 20):
        fh = await node.opendir(ROOT)
        assert await _names(node, ROOT, fh, size=size) == [b".", b"..", *wanted]
        await node.ask(Opcode.RELEASEDIR, ROOT, fuse.RELEASE_IN.pack(fh, 0, 0, 0))


async def test_names_that_stay_are_listed_once_whatever_is_removed_meanwhile(node: Any) -> None:
    for number in range(40):
        await node.ask(Opcode.SYMLINK, ROOT, b"%02d\0target\0" % number)
    fh = await node.opendir(ROOT)
    seen: list[bytes] = []
    offset = 0
    removed: set[bytes] = set()
    while found := await node.readdir(ROOT, fh, offset, 160):
        seen += [entry.name for entry in found]
        offset = found[-1].cookie
        for name in (found[-1].name, b"%02d" % (39 - len(removed) // 2)):  # what was just listed, and what is to come
            if name.isdigit() and name not in removed:
                await node.unlink(name)
                removed.add(name)
    assert len(seen) == len(set(seen))
    assert {b"%02d" % number for number in range(40)} - removed <= set(seen)


async def test_rewinding_reads_the_directory_anew(node: Any) -> None:
    fh = await node.opendir(ROOT)
    assert await _names(node, ROOT, fh) == [b".", b".."]
    await node.mkdir(b"new")
    assert await _names(node, ROOT, fh) == [b".", b"..", b"new"]


async def test_a_listing_goes_on_where_it_was_after_a_kill(start_node: StartNode) -> None:
    node = await start_node()
    for number in range(30):
        await node.mkdir(b"%02d" % number)
    fh = await node.opendir(ROOT)
    first = await node.readdir(ROOT, fh, 0, 400)
    node.kill()
    node = await start_node()
    await node.ask(Opcode.RMDIR, ROOT, first[-1].name + b"\0")
    rest = await _names(node, ROOT, fh, first[-1].cookie)
    assert [entry.name for entry in first] + rest == [b".", b"..", *(b"%02d" % number for number in range(30))]


async def test_a_listing_of_an_earlier_daemon_is_not_taken_for_one_of_this(start_node: StartNode) -> None:
    node = await start_node()
    full, other = await node.mkdir(b"full"), await node.mkdir(b"other")
    for number in range(30):
        await node.mkdir(b"%02d" % number, full)
    await node.mkdir(b"only", other)
    fh = await node.opendir(full)
    first = await node.readdir(full, fh, 0, 400)
    node.kill()
    node = await start_node()
    assert await _names(node, other, await node.opendir(other)) == [b".", b"..", b"only"]
    rest = await _names(node, full, fh, first[-1].cookie)
    assert [entry.name for entry in first] + rest == [b".", b"..", *(b"%02d" % number for number in range(30))]


async def test_reading_with_attributes_gives_what_lookup_gives(node: Any) -> None:
    await node.mkdir(b"directory")
    await node.save(b"file", b"content")
    await node.ask(Opcode.SYMLINK, ROOT, b"link\0target\0")
    answer = await node.ask(Opcode.READDIRPLUS, ROOT, fuse.READ_IN.pack(await node.opendir(ROOT), 0, 4096, 0, 0, 0, 0))
    entry_size = fuse.ENTRY_OUT.size + fuse.ATTRIBUTES.size
    at = 0
    names = []
    while at < len(answer):
        entry = answer[at : at + entry_size]
        _, _, length, _ = fuse.DIRENT.unpack_from(answer, at + entry_size)
        name = answer[at + entry_size + fuse.DIRENT.size :][:length]
        names.append(name)
        if name in (b".", b".."):
            assert entry == bytes(entry_size)
        else:
            assert entry == await node.ask(Opcode.LOOKUP, ROOT, name + b"\0")
        at += entry_size + fuse.DIRENT.size + -(-length // 8) * 8
    assert names == [b".", b"..", b"directory", b"file", b"link"]


# Attributes


async def test_mode_owner_and_times_are_set(node: Any) -> None:
    ino = await node.save(b"file", b"content")
    before = await node.getattr(ino)
    changed = await _setattr(node, ino, SetattrField.MODE, mode=0o100751)
    assert changed.mode == stat.S_IFREG | 0o751
    assert changed.ctime_ns > before.ctime_ns
    changed = await _setattr(node, ino, SetattrField.UID | SetattrField.GID, uid=5, gid=6)
    assert (changed.uid, changed.gid) == (5, 6)
    fields = SetattrField.ATIME | SetattrField.MTIME
    changed = await _setattr(node, ino, fields, atime=1, atimensec=2, mtime=(1 << 64) - 3, mtimensec=4)
    assert (changed.atime_ns, changed.mtime_ns) == (1_000_000_002, -3 * 10**9 + 4)
    now = (await _setattr(node, ino, SetattrField.ATIME | SetattrField.ATIME_NOW)).atime_ns
    assert now > before.ctime_ns
    assert await node.content(ino) == b"content"
    assert await node.state(ino) is VersionState.LOCAL  # no new version for that


async def test_times_of_a_file_that_is_written_are_kept_through_its_sealing(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    await _setattr(node, ino, SetattrField.MTIME | SetattrField.ATIME, mtime=1000, mtimensec=5, atime=2000)
    assert (await node.getattr(ino)).mtime_ns == 1000 * 10**9 + 5
    await node.release(fh)
    await node.settle()
    shown = await node.getattr(ino)
    assert (shown.mtime_ns, shown.size) == (1000 * 10**9 + 5, 7)


async def test_set_id_bits_go_with_a_new_owner_and_with_a_write_by_somebody_else(node: Any) -> None:
    ino = await node.save(b"file", b"")
    await _setattr(node, ino, SetattrField.MODE, mode=0o106755)
    assert (await _setattr(node, ino, SetattrField.UID, uid=5)).mode & 0o7777 == 0o755
    await _setattr(node, ino, SetattrField.MODE, mode=0o106755)
    await node.release(await node.open(ino, os.O_WRONLY))
    assert (await node.getattr(ino)).mode & 0o7777 == 0o6755
    fh = await node.open(ino, os.O_WRONLY, uid=5)
    assert (await node.getattr(ino)).mode & 0o7777 == 0o6755
    await node.ask(Opcode.WRITE, ino, fuse.WRITE_IN.pack(fh, 0, 1, fuse.WRITE_KILL_SUIDGID, 0, 0, 0) + b"x")
    await node.release(fh)
    assert (await node.getattr(ino)).mode & 0o7777 == 0o755
    await _setattr(node, ino, SetattrField.MODE, mode=0o106755)
    body = fuse.OPEN_IN.pack(os.O_RDONLY | os.O_TRUNC, fuse.OPEN_KILL_SUIDGID)
    await node.release(fuse.OPEN_OUT.unpack(await node.ask(Opcode.OPEN, ino, body, uid=5))[0])
    assert (await node.getattr(ino)).mode & 0o7777 == 0o755
    await _setattr(node, ino, SetattrField.MODE, mode=0o106755)
    before = await node.getattr(ino)
    await node.ask(Opcode.SETATTR, ino, fuse.SETATTR_IN.pack(0, 0, *bytes(14)), uid=before.uid + 1)
    assert await node.getattr(ino) == before  # by somebody else it can't be told from a write to a file with capabilities
    assert (await _setattr(node, ino, SetattrField(0))).mode & 0o7777 == 0o755  # chown(2) of nobody
    await _setattr(node, ino, SetattrField.MODE, mode=0o102644)  # set-group-id without execution: a lock, not a privilege
    await node.release(await node.open(ino, os.O_WRONLY, uid=5))
    assert (await node.getattr(ino)).mode & 0o7777 == 0o2644


def test_who_is_in_a_group_says_the_request_or_proc() -> None:
    caller = RequestHeader(fuse.IN_HEADER.size, Opcode.WRITE, 2, 1, 0, 77, os.getpid(), 0, 0)
    others = [gid for gid in (77001, 77002) if gid not in os.getgroups()]
    assert is_member(caller, 77)
    assert not is_member(caller, others[0])
    assert all(is_member(caller, gid) for gid in os.getgroups())
    assert is_member(caller._replace(pid=0), others[0]), "of another PID namespace: it can't be told"


@pytest.mark.parametrize("how", ["write", "truncate", "open to nothing", "chown", "chown of nobody"])
async def test_capabilities_go_when_the_file_changes_hands_or_content(node: Any, how: str) -> None:
    ino = await node.save(b"file", b"content")
    await _set_xattr(node, ino, b"security.capability", b"granted")
    await _set_xattr(node, ino, b"security.other", b"kept")
    fh = await node.open(ino, os.O_RDWR)
    await _setattr(node, ino, SetattrField.MTIME, mtime=7)
    assert await _xattr(node, ino, b"security.capability") == b"granted"
    match how:
        case "write":
            await node.write(fh, b"x")
        case "truncate":
            await _setattr(node, ino, SetattrField.SIZE, size=3)
        case "open to nothing":
            await node.release(await node.open(ino, os.O_WRONLY | os.O_TRUNC))
        case "chown":
            await _setattr(node, ino, SetattrField.GID, gid=5)
        case "chown of nobody":
            await _setattr(node, ino, SetattrField(0))
    assert await node.errno(_xattr(node, ino, b"security.capability")) == "ENODATA"
    assert await _xattr(node, ino, b"security.other") == b"kept"


async def test_times_beyond_what_ext4_has_become_the_nearest_it_has(node: Any) -> None:
    for ino in (await node.save(b"file", b""), (await node.create(b"open"))[0], await node.mkdir(b"directory")):
        for asked, shown in ((1 << 40, (2**34 - 2**31 - 1) * 10**9), (-(1 << 40) & (1 << 64) - 1, -(2**31) * 10**9)):
            before = await _setattr(node, ino, SetattrField.MTIME, mtime=asked)
            assert before.mtime_ns == shown
            assert abs(before.ctime_ns - time.time_ns()) < 600 * 10**9
    await node.settle()
    ino = (await node.lookup(ROOT, b"open")).ino
    assert (await node.getattr(ino)).ctime_ns < time.time_ns() + 600 * 10**9


async def test_an_access_control_list_is_the_mode_s_other_half(node: Any) -> None:
    access, default = b"system.posix_acl_access", b"system.posix_acl_default"
    nobody = 0xFFFFFFFF
    entries = [(1, 7, nobody), (2, 6, 1000), (4, 5, nobody), (16, 6, nobody), (32, 0, nobody)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    directory = await node.mkdir(b"directory")
    await _set_xattr(node, directory, default, acl)
    assert (await node.getattr(directory)).mode & 0o7777 == 0o755
    ino, _ = await node.create(b"file", directory, mode=0o100644)
    assert (await node.getattr(ino)).mode & 0o7777 == 0o640
    assert len(await _xattr(node, ino, access)) == len(acl)
    assert await node.errno(_xattr(node, ino, default)) == "ENODATA"
    await _setattr(node, ino, SetattrField.MODE, mode=0o102770)
    await _set_xattr(node, ino, access, acl)
    assert (await node.getattr(ino)).mode & 0o7777 == 0o2760
    body = fuse.SETXATTR_IN.pack(len(acl), 0, fuse.SETXATTR_KILL_SGID, 0) + access + b"\0" + acl
    await node.ask(Opcode.SETXATTR, ino, body)
    assert (await node.getattr(ino)).mode & 0o7777 == 0o760
    for _ in range(2):
        await node.ask(Opcode.REMOVEXATTR, ino, access + b"\0")
    assert (await node.getattr(ino)).mode & 0o7777 == 0o760


async def test_only_root_is_told_of_trusted_attributes(node: Any) -> None:
    ino = await node.save(b"file", b"")
    await _set_xattr(node, ino, b"trusted.a", b"1")
    await _set_xattr(node, ino, b"user.a", b"1")
    for uid, names in ((0, {b"trusted.a", b"user.a"}), (5, {b"user.a"})):
        listed = await node.ask(Opcode.LISTXATTR, ino, fuse.GETXATTR_IN.pack(100, 0), uid=uid)
        assert set(listed.split(b"\0")) - {b""} == names
    for name, error in ((b"user.", "EINVAL"), (b"foo.a", "ENOTSUP"), (b"system.x", "ENOTSUP")):
        for opcode, body in (
            (Opcode.GETXATTR, fuse.GETXATTR_IN.pack(10, 0)),
            (Opcode.REMOVEXATTR, b""),
            (Opcode.SETXATTR, fuse.SETXATTR_IN.pack(0, 0, 0, 0)),
        ):
            assert await node.errno(node.ask(opcode, ino, body + name + b"\0")) == error


@pytest.mark.parametrize("sealed", [False, True])
async def test_sizes_are_set_by_name_and_by_handle(node: Any, sealed: bool) -> None:
    ino = await node.save(b"file", b"0123456789") if sealed else (await node.create(b"file"))[0]
    fh = await node.open(ino, os.O_RDWR)
    await node.write(fh, b"0123456789")
    assert (await _setattr(node, ino, SetattrField.SIZE, size=4)).size == 4
    assert (await _setattr(node, ino, SetattrField.SIZE | SetattrField.FH, fh=fh, size=8)).size == 8
    assert await node.read(fh) == b"0123\0\0\0\0"
    await node.release(fh)
    await node.settle()
    assert (await node.getattr(ino)).size == 8
    assert (await _setattr(node, ino, SetattrField.SIZE, size=0)).size == 0  # by name, with nobody having it open
    await node.settle()
    assert await node.content(ino) == b""


async def test_extended_attributes(node: Any) -> None:
    ino = await node.save(b"file", b"")
    assert await node.errno(_xattr(node, ino, b"user.x")) == "ENODATA"
    assert await node.errno(_xattr(node, ino, b"system.x")) == "ENOTSUP"
    assert await node.errno(_set_xattr(node, ino, b"system.x", b"")) == "ENOTSUP"
    await _set_xattr(node, ino, b"user.x", b"va\0lue")
    await _set_xattr(node, ino, b"user.empty", b"")
    assert await _xattr(node, ino, b"user.x") == b"va\0lue"
    assert await _xattr(node, ino, b"user.empty") == b""
    assert await _xattr(node, ino, b"user.x", 0) == fuse.GETXATTR_OUT.pack(6, 0)
    assert await _xattr(node, ino, b"user.x", 6) == b"va\0lue"
    assert await node.errno(_xattr(node, ino, b"user.x", 5)) == "ERANGE"
    assert await node.errno(_set_xattr(node, ino, b"user.x", b"", os.XATTR_CREATE)) == "EEXIST"
    assert await node.errno(_set_xattr(node, ino, b"user.y", b"", os.XATTR_REPLACE)) == "ENODATA"
    assert await node.errno(_set_xattr(node, ino, b"user.y", bytes(65537))) == "E2BIG"
    listed = await node.ask(Opcode.LISTXATTR, ino, fuse.GETXATTR_IN.pack(4096, 0))
    assert sorted(listed.split(b"\0")) == [b"", b"user.empty", b"user.x"]
    await node.ask(Opcode.REMOVEXATTR, ino, b"user.x\0")
    assert await node.errno(node.ask(Opcode.REMOVEXATTR, ino, b"user.x\0")) == "ENODATA"
    assert await node.content(ino) == b""


async def test_the_store_s_space_is_shown(node: Any) -> None:
    values = fuse.STATFS_OUT.unpack(await node.ask(Opcode.STATFS, ROOT))
    assert values[0] == os.statvfs(node.store.path).f_blocks
    assert values[6] == 255


# Bytes


async def test_a_file_s_life_from_create_to_local(node: Any) -> None:
    ino, fh = await node.create(b"file")
    assert await node.write(fh, b"hello") == 5
    assert await node.write(fh, b"world", 10) == 5
    assert await node.read(fh) == b"hello\0\0\0\0\0world"
    assert (await node.getattr(ino)).size == 15
    assert await node.state(ino) is VersionState.OPEN
    await node.ask(Opcode.FLUSH, ino, fuse.FLUSH_IN.pack(fh, 0, 0, 0))
    await node.release(fh)
    await node.settle()
    assert node.told == ["local"]
    assert await node.state(ino) is VersionState.LOCAL
    assert (await node.getattr(ino)).size == 15
    assert await node.content(ino) == b"hello\0\0\0\0\0world"
    assert len(list(node.open_files)) == 0


async def test_appending_later_makes_a_new_version_of_the_same_bytes(node: Any) -> None:
    ino = await node.save(b"file", b"first")
    fh = await node.open(ino, os.O_WRONLY | os.O_APPEND)
    await node.write(fh, b"second", 5)
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"firstsecond"
    assert node.segment_count() == 1
    assert len(node.database.files()) == 1


async def test_rewriting_from_nothing_frees_the_old_bytes_when_the_new_ones_are_local(node: Any) -> None:
    ino = await node.save(b"file", b"old")
    fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    await node.write(fh, b"new")
    assert node.segment_count() == 2
    await node.release(fh)
    await node.settle()
    assert await node.content(ino) == b"new"
    assert node.segment_count() == 1


async def test_holes_are_found(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"end", 1 << 20)

    async def seek(offset: int, whence: int) -> int:
        answer = await node.ask(Opcode.LSEEK, ino, fuse.LSEEK_IN.pack(fh, offset, whence, 0))
        return int(fuse.LSEEK_OUT.unpack(answer)[0])

    assert await seek(0, os.SEEK_HOLE) == 0
    assert 0 < await seek(0, os.SEEK_DATA) <= 1 << 20
    assert await seek(1 << 20, os.SEEK_HOLE) == (1 << 20) + 3
    assert await node.errno(seek(2 << 20, os.SEEK_DATA)) == "ENXIO"
    await node.ask(Opcode.FALLOCATE, ino, fuse.FALLOCATE_IN.pack(fh, 0, 2 << 20, 0, 0))
    assert (await node.getattr(ino)).size == 2 << 20


async def test_handles_nobody_gave_out_are_refused(node: Any) -> None:
    assert await node.errno(node.read(4711)) == "EBADF"
    assert await node.errno(node.write(4711, b"x")) == "EBADF"
    assert await node.errno(node.fsync(4711)) == "EBADF"
    await node.release(4711)  # may have been let go before a kill


async def test_only_regular_files_are_opened(node: Any) -> None:
    assert await node.errno(node.open(await node.mkdir(b"directory"))) == "EINVAL"
    assert await node.errno(node.open(99_999)) == "ESTALE"


async def test_a_sync_marks_the_version_durable(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"x")
    inode = await node.namespace.inode(InodeNumber(ino))
    assert not (await node.versions.version(inode.open)).durable
    await node.fsync(fh)
    await node.fsync(fh)
    assert (await node.versions.version(inode.open)).durable
    await node.ask(Opcode.FSYNCDIR, ROOT, fuse.FSYNC_IN.pack(0, 0, 0))


# Removed while in use


@pytest.mark.parametrize("how", ["unlink", "rename over"])
async def test_a_file_in_use_outlives_its_name(node: Any, how: str) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    if how == "unlink":
        await node.unlink(b"file")
    else:
        await node.save(b"other", b"x")
        await node.rename(b"other", b"file")
    await node.settle()
    assert await node.read(fh) == b"content"
    shown = await node.getattr(ino)
    assert (shown.nlink, shown.size) == (0, 7)
    await node.write(fh, b"C")
    await node.fsync(fh)
    assert (await _setattr(node, ino, SetattrField.SIZE, size=3)).size == 3
    assert (await _setattr(node, ino, SetattrField.MODE, mode=0o100600)).mode & 0o777 == 0o600
    second = await node.open(ino, os.O_RDWR)  # through /proc/self/fd
    assert await node.read(second) == b"Con"
    await node.release(fh)
    assert node.database.file(InodeNumber(ino)) is not None
    await node.release(second)
    await node.settle()
    assert node.database.file(InodeNumber(ino)) is None
    assert node.segment_count() == (1 if how == "rename over" else 0)


async def test_a_nameless_file_has_attributes_too(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await _set_xattr(node, ino, b"user.before", b"1")
    await node.unlink(b"file")
    assert await _xattr(node, ino, b"user.before") == b"1"
    await _set_xattr(node, ino, b"user.after", b"2")
    assert await _xattr(node, ino, b"user.after") == b"2"
    assert await node.errno(_set_xattr(node, ino, b"user.after", b"", os.XATTR_CREATE)) == "EEXIST"
    await node.ask(Opcode.REMOVEXATTR, ino, b"user.before\0")
    assert await node.errno(_xattr(node, ino, b"user.before")) == "ENODATA"
    await node.release(fh)


async def test_a_closed_file_goes_with_its_name(node: Any) -> None:
    await node.save(b"sealed", b"content")
    _, fh = await node.create(b"settling")
    await node.release(fh)
    await node.unlink(b"sealed")
    await node.unlink(b"settling")
    await node.settle()
    assert node.segment_count() == 0
    assert node.database.files() == []
    assert node.settler.waiting_count == 0


# Another node


async def test_a_file_that_another_node_writes_is_an_error_while_no_agent_answers(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    ino, fh = await here.create(b"file")
    await here.write(fh, b"content")
    for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        assert await there.errno(there.open(ino, flags)) == "EIO"
    assert await there.errno(_setattr(there, ino, SetattrField.SIZE, size=0)) == "EIO"
    assert await there.errno(there.getattr(ino)) == "EIO"  # its size is asked of a node that does not answer
    assert await here.read(fh) == b"content"
    await here.release(fh)
    await here.settle()
    assert (await there.getattr(ino)).size == 7
    assert await there.errno(there.open(ino, os.O_RDWR)) == "EIO"  # the bytes are with the other node
    taken = await there.open(ino, os.O_RDWR | os.O_TRUNC)  # these are not needed
    await there.write(taken, b"there")
    await there.release(taken)
    await there.settle()
    assert await there.content(ino) == b"there"
    assert (await here.getattr(ino)).size == 5


async def test_names_made_elsewhere_are_seen_at_once(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    await here.mkdir(b"directory")
    shown = await there.lookup(ROOT, b"directory")
    await there.create(b"file", shown.ino)
    assert [entry.name for entry in await here.readdir(shown.ino, await here.opendir(shown.ino), 0)] == [b".", b"..", b"file"]


# What a kill leaves


async def test_a_file_made_just_before_a_kill_can_be_used_after_it(start_node: StartNode) -> None:
    """The name is in the catalog; its segment was not made yet, or nobody wrote down whose it is."""
    node = await start_node()
    for name, with_segment in ((b"without", False), (b"with", True)):
        segment = new_segment_id()
        ino, _, _ = await node.namespace.create_file(InodeNumber(ROOT), name, 0o644, 0, 0, segment)
        if with_segment:
            os.close(node.segments.create(segment, ino))
    node.kill()
    node = await start_node()
    for name in (b"without", b"with"):
        ino, fh = await node.create(name, flags=os.O_RDWR | os.O_TRUNC)  # what the kernel sends again
        await node.write(fh, b"content")
        await node.release(fh)
        await node.settle()
        assert await node.content(ino) == b"content"
        assert await node.state(ino) is VersionState.LOCAL


async def test_a_file_rewritten_elsewhere_under_a_reader_is_never_opened_as_it_was(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"old")
    await node.settle()
    held = await node.open(ino)
    other = Versions(node.kv, StoreId(b"another store id"), 1, lambda: 1)
    opened = await other.open_for_writing(InodeNumber(ino), truncate_to_new_segment=new_segment_id())
    commit = LocalCommit(InodeNumber(ino), opened.vid, 3, b"r" * 16, 4096, 1, release_writer=True)
    assert (await other.commit_local([commit])).vids == {opened.vid}
    assert await node.read(held) == b"old"
    with pytest.raises(ContentUnreachable, match="rewritten on another node"):
        await node.open(ino)
    await node.release(held)
    again = await node.open(ino)
    with pytest.raises(ContentUnreachable):  # the other node does not exist: an error, and not the old bytes
        await node.read(again)


async def _is_durable(node: Any, ino: int) -> bool:
    vid = (await node.namespace.inode(ino)).open
    return bool((await node.versions.version(vid)).durable)


@pytest.mark.parametrize("flag", [os.O_DSYNC, os.O_SYNC])
async def test_a_file_opened_to_be_synced_at_each_write_is_durable_before_the_first(node: Any, flag: int) -> None:
    """In the passthrough lane no write comes here: after a power cut the name must lead to what was written all the same."""
    ino, fh = await node.create(b"new", flags=os.O_RDWR | flag)
    assert await _is_durable(node, ino)
    other, plain = await node.create(b"other")
    assert not await _is_durable(node, other)
    synced = await node.open(other, os.O_WRONLY | flag)
    assert await _is_durable(node, other)
    await node.release(fh, plain, synced)


async def test_a_served_write_that_is_to_be_synced_is(node: Any) -> None:
    """The kernel sends no FSYNC after a write past its page cache, which is how a file opened only for writing is written."""
    ino, fh = await node.create(b"new", flags=os.O_WRONLY)
    await node.write(fh, b"x")
    assert not await _is_durable(node, ino)
    body = fuse.WRITE_IN.pack(fh, 1, 1, 0, 0, os.O_WRONLY | os.O_DSYNC, 0) + b"y"  # pwritev2 with RWF_DSYNC says the same
    await node.ask(Opcode.WRITE, 0, body)
    assert await _is_durable(node, ino)
    await node.release(fh)


async def test_an_open_that_cannot_be_synced_fails_and_leaves_no_handle(node: Any) -> None:
    ino, fh = await node.create(b"file")
    node.open_files.get(ino).sync_failed = True
    assert await node.errno(node.open(ino, os.O_WRONLY | os.O_DSYNC)) == "EIO"
    assert len(node.open_files) == 1
    await node.release(fh)


async def test_a_sealed_file_with_holes_takes_the_blocks_it_took(node: Any) -> None:
    ino, fh = await node.create(b"sparse")
    await node.write(fh, b"x", offset=100 << 20)
    await node.fsync(fh)
    blocks = (await node.getattr(ino)).blocks
    assert blocks < 100
    await node.release(fh)
    await node.settle()
    assert (await node.getattr(ino)).blocks == blocks
    dense = await node.save(b"dense", b"x" * 5000)
    assert (await node.getattr(dense)).blocks == 16


async def test_seeking_to_before_the_file_is_refused_as_on_the_drive(node: Any) -> None:
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        assert await node.errno(node.ask(Opcode.LSEEK, ino, fuse.LSEEK_IN.pack(fh, -1, whence, 0))) == "ENXIO"
    await node.release(fh)


async def test_a_file_made_by_somebody_who_only_reads_it_becomes_local(node: Any) -> None:
    """No writer will close it: it would stay open for ever, busy for other nodes and unprotected."""
    ino, fh = await node.create(b"file", flags=os.O_RDONLY)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    await node.release(fh)
    assert await node.content(ino) == b""


async def test_out_of_descriptors_an_open_says_so_and_leaves_nothing(node: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [await node.create(b"%d" % number) for number in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        refused = ""
        while not refused and len(opened) < 100:
            name = b"%d" % len(opened)
            try:
                opened.append(await node.create(name))
            except OSError as error:
                refused = errno.errorcode[error.errno or 0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert refused == "EMFILE"
    assert await node.errno(node.lookup(ROOT, name)) == "ENOENT"
    await node.release(*(fh for _, fh in opened))
    await node.save(name, b"again")
