"""The tree: what each operation answers, and what it leaves in the catalog."""

import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import NAME_SIZE_MAX, TARGET_SIZE_MAX, Settings, VersionState, inode_key, version_key
from ckptfs.cache.catalog_kv import KeyValue, Put
from ckptfs.cache.errors import (
    AttributesTooLarge,
    DamagedData,
    DirectoryNotEmpty,
    InvalidMove,
    IsADirectory,
    NameExists,
    NameTooLong,
    NoSuchAttribute,
    NoSuchName,
    NotADirectory,
    NotPermitted,
    StoreError,
    TooManyLinks,
)
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, new_segment_id
from ckptfs.cache.inode_changes import XATTRS_SIZE_BYTES_MAX, with_xattr, without_xattr
from ckptfs.cache.namespace import INODE_BLOCK_COUNT, LINKS_MAX, AttributeChanges, Created, Namespace, RenameFlags, XattrFlags

OpenCatalog = Callable[..., Any]
ROOT = ROOT_INODE
STORE = StoreId(b"A" * 16)
SETTINGS = Settings(1, b"C" * 16, 4, 2, 1 << 20)


@pytest.fixture
async def tree(kv: KeyValue) -> AsyncIterator[Namespace]:
    """An empty tree whose clock shows 1000, 1001, …; the catalog must be consistent at the end."""
    namespace = Namespace(kv, STORE, 1, count(1000).__next__)
    await namespace.format_if_empty(SETTINGS)
    yield namespace
    assert await catalog_problems(kv) == []


async def make(tree: Namespace, name: bytes, parent: InodeNumber = ROOT) -> Created:
    return await tree.create_file(parent, name, 0o644, 7, 8, new_segment_id())


async def make_dir(tree: Namespace, name: bytes, parent: InodeNumber = ROOT) -> InodeNumber:
    return (await tree.make_directory(parent, name, 0o755, 7, 8))[0]


async def names(tree: Namespace, directory: InodeNumber = ROOT) -> list[bytes]:
    return sorted(item.name for item in await tree.readdir(directory))


# Formatting


async def test_an_unformatted_catalog_is_refused(kv: KeyValue) -> None:
    tree = Namespace(kv, STORE, 1, lambda: 1)
    with pytest.raises(StoreError, match="empty"):
        await tree.settings()
    with pytest.raises(NoSuchName):
        await tree.inode(ROOT)


async def test_formatting_again_changes_nothing(tree: Namespace) -> None:
    await make(tree, b"f")
    revision = await tree.kv.revision()
    assert await tree.format_if_empty(Settings(1, b"D" * 16, 2, 1, 4096)) == SETTINGS
    assert await tree.kv.revision() == revision
    root = await tree.inode(ROOT)
    assert (root.mode, root.uid, root.gid, root.parent) == (stat.S_IFDIR | 0o755, 0, 0, ROOT)
    assert await tree.nlink(ROOT, root) == 2


async def test_a_newer_catalog_is_refused(tree: Namespace) -> None:
    await tree.kv.transact([], [Put(b"c/format", b"2")])
    with pytest.raises(StoreError, match="upgrade"):
        await tree.settings()


# Making and looking


async def test_a_new_file_is_open_for_writing_here(tree: Namespace) -> None:
    segment = SegmentId(b"G" * 16)
    ino, inode, vid = await tree.create_file(ROOT, b"f", stat.S_IFREG | 0o4640, 7, 8, segment)
    assert ino == 2
    assert await tree.lookup(ROOT, b"f") == (ino, inode)
    assert (inode.mode, inode.uid, inode.gid, inode.nlink, inode.size) == (stat.S_IFREG | 0o4640, 7, 8, 1, 0)
    assert inode.writer is not None
    assert (inode.writer.store, inode.writer.incarnation, inode.open, inode.cur) == (STORE, 1, vid, None)
    assert inode.atime_ns == inode.mtime_ns == inode.ctime_ns >= 1000
    assert await tree.kv.get(version_key(vid)) is not None


async def test_what_is_not_there(tree: Namespace) -> None:
    file = await make(tree, b"f")
    with pytest.raises(NoSuchName):
        await tree.lookup(ROOT, b"nothing")
    with pytest.raises(NotADirectory):
        await tree.lookup(file.ino, b"below")
    with pytest.raises(NoSuchName):
        await tree.lookup(InodeNumber(999), b"below")
    with pytest.raises(NoSuchName):
        await tree.inode(InodeNumber(999))
    with pytest.raises(NameTooLong):
        await tree.lookup(ROOT, b"x" * (NAME_SIZE_MAX + 1))


async def test_dot_and_dot_dot(tree: Namespace) -> None:
    inner = await make_dir(tree, b"inner", await make_dir(tree, b"outer"))
    assert (await tree.lookup(inner, b"."))[0] == inner
    assert (await tree.lookup(inner, b".."))[0] == (await tree.lookup(ROOT, b"outer"))[0]
    assert (await tree.lookup(ROOT, b".."))[0] == ROOT


Make = Callable[[Namespace, InodeNumber, bytes], Awaitable[object]]
MAKERS: dict[str, Make] = {
    "create": lambda tree, parent, name: tree.create_file(parent, name, 0o644, 0, 0, new_segment_id()),
    "mkdir": lambda tree, parent, name: tree.make_directory(parent, name, 0o755, 0, 0),
    "mknod": lambda tree, parent, name: tree.make_node(parent, name, stat.S_IFIFO | 0o644, 0, 0, 0),
    "symlink": lambda tree, parent, name: tree.make_symlink(parent, name, b"target", 0, 0),
}


@pytest.mark.parametrize("operation", MAKERS)
async def test_errors_of_making(tree: Namespace, operation: str) -> None:
    make_it = MAKERS[operation]
    file = await make(tree, b"f")
    gone = await make_dir(tree, b"gone")
    await tree.rmdir(ROOT, b"gone")
    revision = await tree.kv.revision()
    for error, parent, name in (
        (NameExists, ROOT, b"f"),
        (NameExists, ROOT, b"."),
        (NameExists, ROOT, b".."),
        (NotADirectory, file.ino, b"x"),
        (NoSuchName, gone, b"x"),
        (NoSuchName, ROOT, b""),
        (NameTooLong, ROOT, b"x" * (NAME_SIZE_MAX + 1)),
        (InvalidMove, ROOT, b"a/b"),
        (InvalidMove, ROOT, b"a\0b"),
    ):
        with pytest.raises(error):
            await make_it(tree, parent, name)
    assert await tree.kv.revision() == revision
    longest = bytes(range(1, 47)) + bytes(range(48, 256)) + b"x"
    assert len(longest) == NAME_SIZE_MAX
    await make_it(tree, ROOT, longest)
    assert longest in await names(tree)


async def test_symbolic_links(tree: Namespace) -> None:
    ino, inode = await tree.make_symlink(ROOT, b"s", b"../some where\xff", 1, 2)
    assert stat.S_ISLNK(inode.mode)
    assert (inode.target, inode.size, inode.uid, inode.gid) == (b"../some where\xff", 14, 1, 2)
    assert await tree.inode(ino) == inode
    await tree.make_symlink(ROOT, b"long", b"x" * TARGET_SIZE_MAX, 1, 2)
    with pytest.raises(NameTooLong):
        await tree.make_symlink(ROOT, b"longer", b"x" * (TARGET_SIZE_MAX + 1), 1, 2)
    with pytest.raises(NoSuchName):
        await tree.make_symlink(ROOT, b"empty", b"", 1, 2)


async def test_nodes(tree: Namespace) -> None:
    _, inode = await tree.make_node(ROOT, b"null", stat.S_IFCHR | 0o666, 0x103, 1, 2)
    assert (inode.mode, inode.rdev) == (stat.S_IFCHR | 0o666, 0x103)
    for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, 0):
        with pytest.raises(NotPermitted):
            await tree.make_node(ROOT, b"x", kind | 0o644, 0, 0, 0)


async def test_a_set_group_id_directory_hands_its_group_on(tree: Namespace) -> None:
    directory = await make_dir(tree, b"d")
    await tree.set_attributes(directory, AttributeChanges(mode=0o2775, gid=50))
    file = await make(tree, b"f", directory)
    assert (file.inode.uid, file.inode.gid, file.inode.mode) == (7, 50, stat.S_IFREG | 0o644)
    _, below = await tree.make_directory(directory, b"below", 0o700, 7, 8)
    assert (below.uid, below.gid, below.mode) == (7, 50, stat.S_IFDIR | 0o2700)


async def test_link_counts_of_directories(tree: Namespace) -> None:
    directory = await make_dir(tree, b"d")
    other = await make_dir(tree, b"e")

    async def nlink(ino: InodeNumber) -> int:
        return await tree.nlink(ino, await tree.inode(ino))

    assert (await nlink(ROOT), await nlink(directory)) == (4, 2)
    await make_dir(tree, b"x", directory)
    await make_dir(tree, b"y", directory)
    await make(tree, b"f", directory)
    assert (await nlink(directory), await nlink(other)) == (4, 2)
    await tree.rename(directory, b"x", other, b"x")
    assert (await nlink(directory), await nlink(other)) == (3, 3)
    await tree.rename(directory, b"y", other, b"x")
    assert (await nlink(directory), await nlink(other)) == (2, 3)
    await tree.rmdir(other, b"x")
    assert (await nlink(ROOT), await nlink(directory), await nlink(other)) == (4, 2, 2)


async def test_times_of_directories(tree: Namespace) -> None:
    directory = await make_dir(tree, b"d")
    before = await tree.inode(directory)
    file = await make(tree, b"f", directory)
    after = await tree.inode(directory)
    assert after.mtime_ns == after.ctime_ns == file.inode.mtime_ns > before.mtime_ns
    assert after.atime_ns == before.atime_ns
    chosen = await tree.set_attributes(directory, AttributeChanges(mtime_ns=5, atime_ns=6))
    assert (chosen.mtime_ns, chosen.atime_ns) == (5, 6)
    assert chosen.ctime_ns > after.ctime_ns
    assert await tree.inode(directory) == chosen
    await tree.set_attributes(directory, AttributeChanges(mtime_ns=10**18))
    await tree.unlink(directory, b"f")
    assert 1000 < (await tree.inode(directory)).mtime_ns < 2000
    assert (await tree.lookup(ROOT, b"d"))[1] == await tree.inode(directory)


async def test_inode_numbers_come_in_blocks_and_are_never_used_twice(open_catalog: OpenCatalog) -> None:
    kv = open_catalog()
    one, two = Namespace(kv, STORE, 1, lambda: 1), Namespace(open_catalog(), STORE, 1, lambda: 1)
    await one.format_if_empty(SETTINGS)
    numbers = [(await make(one, b"a")).ino, (await make(two, b"b")).ino, (await make(one, b"c")).ino]
    assert numbers == [2, 2 + INODE_BLOCK_COUNT, 3]
    three = Namespace(kv, STORE, 2, lambda: 1)
    assert (await make(three, b"d")).ino == 2 + 2 * INODE_BLOCK_COUNT


# Directories read


async def test_cookies_stay(tree: Namespace) -> None:
    for number in range(20):
        await make(tree, b"%d" % number)
    before = {item.name: item.cookie for item in await tree.readdir(ROOT)}
    assert len(set(before.values())) == 20
    assert min(before.values()) > 2
    for number in range(0, 20, 3):
        await tree.unlink(ROOT, b"%d" % number)
    await make(tree, b"new")
    items = await tree.readdir(ROOT)
    assert [item.cookie for item in items] == sorted(item.cookie for item in items)
    assert items[-1].name == b"new"
    assert {item.name: item.cookie for item in items[:-1]}.items() <= before.items()


async def test_cookies_of_exchanged_names_differ(tree: Namespace) -> None:
    await make(tree, b"a")
    await make(tree, b"b")
    await tree.rename(ROOT, b"a", ROOT, b"b", RenameFlags.EXCHANGE)
    cookies = [item.cookie for item in await tree.readdir(ROOT)]
    assert len(set(cookies)) == 2


async def test_readdir_says_kinds_and_errors(tree: Namespace) -> None:
    file = await make(tree, b"f")
    directory = await make_dir(tree, b"d")
    await tree.make_symlink(ROOT, b"s", b"t", 0, 0)
    assert {item.name: item.kind for item in await tree.readdir(ROOT)} == {
        b"f": stat.S_IFREG,
        b"d": stat.S_IFDIR,
        b"s": stat.S_IFLNK,
    }
    assert await tree.readdir(directory) == []
    with pytest.raises(NotADirectory):
        await tree.readdir(file.ino)
    await tree.rmdir(ROOT, b"d")
    with pytest.raises(NoSuchName):
        await tree.readdir(directory)


# Links and removal


async def test_hard_links(tree: Namespace) -> None:
    file = await make(tree, b"f")
    linked = await tree.link(file.ino, ROOT, b"g")
    assert linked.nlink == 2
    assert await tree.lookup(ROOT, b"g") == (file.ino, linked)
    removed = await tree.unlink(ROOT, b"f")
    assert (removed.ino, removed.last, removed.inode_after.nlink, removed.dead) == (file.ino, False, 1, [])
    removed = await tree.unlink(ROOT, b"g")
    assert (removed.last, removed.inode_after.nlink) == (True, 0)
    assert [(vid, version.state) for vid, version in removed.dead] == [(file.vid, VersionState.OPEN)]
    with pytest.raises(NoSuchName):
        await tree.inode(file.ino)
    with pytest.raises(NoSuchName):
        await tree.link(file.ino, ROOT, b"h")


async def test_errors_of_linking(tree: Namespace) -> None:
    file = await make(tree, b"f")
    directory = await make_dir(tree, b"d")
    with pytest.raises(NameExists):
        await tree.link(file.ino, ROOT, b"d")
    with pytest.raises(NotPermitted):
        await tree.link(directory, ROOT, b"g")
    with pytest.raises(NotADirectory):
        await tree.link(file.ino, file.ino, b"g")


async def test_links_end_somewhere(tree: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LINKS_MAX == 65_000
    monkeypatch.setattr("ckptfs.cache.namespace.LINKS_MAX", 3)
    file = await make(tree, b"f")
    await tree.link(file.ino, ROOT, b"g")
    await tree.link(file.ino, ROOT, b"h")
    with pytest.raises(TooManyLinks):
        await tree.link(file.ino, ROOT, b"i")


async def test_errors_of_removing(tree: Namespace) -> None:
    await make(tree, b"f")
    directory = await make_dir(tree, b"d")
    await make(tree, b"inside", directory)
    for error, operation, name in (
        (NoSuchName, tree.unlink, b"nothing"),
        (IsADirectory, tree.unlink, b"d"),
        (IsADirectory, tree.unlink, b"."),
        (NoSuchName, tree.rmdir, b"nothing"),
        (NotADirectory, tree.rmdir, b"f"),
        (DirectoryNotEmpty, tree.rmdir, b"d"),
        (DirectoryNotEmpty, tree.rmdir, b".."),
        (InvalidMove, tree.rmdir, b"."),
    ):
        with pytest.raises(error):
            await operation(ROOT, name)


async def test_a_removed_directory_leaves_nothing(tree: Namespace) -> None:
    before = {entry.key for entry in await tree.kv.range(b"")}
    directory = await make_dir(tree, b"d")
    await make(tree, b"f", directory)
    await tree.unlink(directory, b"f")
    await tree.rmdir(ROOT, b"d")
    assert {entry.key for entry in await tree.kv.range(b"")} - before == {b"t/0000000000000001"}


# Rename


async def test_rename_moves_and_keeps_the_inode(tree: Namespace) -> None:
    file = await make(tree, b"f")
    directory = await make_dir(tree, b"d")
    renamed = await tree.rename(ROOT, b"f", directory, b"g")
    assert (renamed.ino, renamed.replaced) == (file.ino, None)
    assert await names(tree) == [b"d"]
    ino, inode = await tree.lookup(directory, b"g")
    assert ino == file.ino
    assert inode.ctime_ns > file.inode.ctime_ns
    assert inode.mtime_ns == file.inode.mtime_ns
    times = {(await tree.inode(where)).mtime_ns for where in (ROOT, directory)}
    assert times == {inode.ctime_ns}


async def test_rename_replaces(tree: Namespace) -> None:
    old, new = await make(tree, b"old"), await make(tree, b"new")
    renamed = await tree.rename(ROOT, b"old", ROOT, b"new")
    assert renamed.replaced is not None
    assert (renamed.replaced.ino, renamed.replaced.last) == (new.ino, True)
    assert [vid for vid, _ in renamed.replaced.dead] == [new.vid]
    assert await names(tree) == [b"new"]
    assert (await tree.lookup(ROOT, b"new"))[0] == old.ino


async def test_rename_over_one_of_several_names(tree: Namespace) -> None:
    await make(tree, b"old")
    new = await make(tree, b"new")
    await tree.link(new.ino, ROOT, b"other")
    renamed = await tree.rename(ROOT, b"old", ROOT, b"new")
    assert renamed.replaced is not None
    assert (renamed.replaced.last, renamed.replaced.inode_after.nlink, renamed.replaced.dead) == (False, 1, [])
    assert (await tree.inode(new.ino)).open == new.vid


async def test_rename_between_names_of_one_inode_does_nothing(tree: Namespace) -> None:
    file = await make(tree, b"f")
    await tree.link(file.ino, ROOT, b"g")
    revision = await tree.kv.revision()
    for flags in (RenameFlags(0), RenameFlags.EXCHANGE):
        assert (await tree.rename(ROOT, b"f", ROOT, b"g", flags)).replaced is None
        assert (await tree.rename(ROOT, b"f", ROOT, b"f", flags)).replaced is None
    assert await tree.kv.revision() == revision
    assert await names(tree) == [b"f", b"g"]


async def test_errors_of_rename(tree: Namespace) -> None:
    await make(tree, b"f")
    full = await make_dir(tree, b"full")
    below = await make_dir(tree, b"below", full)
    await make_dir(tree, b"empty")
    both = RenameFlags.NOREPLACE | RenameFlags.EXCHANGE
    none, noreplace, exchange = RenameFlags(0), RenameFlags.NOREPLACE, RenameFlags.EXCHANGE
    for error, old_parent, old, new_parent, new, flags in (
        (NoSuchName, ROOT, b"nothing", ROOT, b"x", none),
        (NoSuchName, ROOT, b"f", ROOT, b"nothing", exchange),
        (NameExists, ROOT, b"f", ROOT, b"empty", noreplace),
        (NameExists, ROOT, b"f", ROOT, b"f", noreplace),
        (IsADirectory, ROOT, b"f", ROOT, b"empty", none),
        (NotADirectory, ROOT, b"empty", ROOT, b"f", none),
        (DirectoryNotEmpty, ROOT, b"empty", ROOT, b"full", none),
        (DirectoryNotEmpty, full, b"below", ROOT, b"full", none),
        (InvalidMove, ROOT, b"full", full, b"x", none),
        (InvalidMove, ROOT, b"full", below, b"x", none),
        (InvalidMove, ROOT, b"full", full, b"below", none),
        (InvalidMove, ROOT, b"full", full, b"below", exchange),
        (InvalidMove, full, b"below", ROOT, b"full", exchange),
        (InvalidMove, ROOT, b"f", ROOT, b"x", both),
        (InvalidMove, ROOT, b".", ROOT, b"x", none),
        (NameTooLong, ROOT, b"f", ROOT, b"x" * 256, none),
    ):
        with pytest.raises(error):
            await tree.rename(old_parent, old, new_parent, new, flags)
    for flags in (RenameFlags(8), RenameFlags.EXCHANGE | RenameFlags.WHITEOUT):
        with pytest.raises(InvalidMove):
            await tree.rename(ROOT, b"f", ROOT, b"full", flags)


async def test_a_whiteout_takes_the_old_name(tree: Namespace) -> None:
    directory = await make_dir(tree, b"d")
    file = await make(tree, b"f")
    for parent, name in ((ROOT, b"same"), (directory, b"other")):
        old = b"f" if name == b"same" else b"same"
        await tree.rename(ROOT, old, parent, name, RenameFlags.WHITEOUT, (7, 8))
        assert (await tree.lookup(parent, name))[0] == file.ino
        left = (await tree.lookup(ROOT, old))[1]
        assert (left.mode, left.rdev, left.uid, left.gid, left.nlink) == (stat.S_IFCHR, 0, 7, 8, 1)
    cookies = [item.cookie for item in await tree.readdir(ROOT)]
    assert len(set(cookies)) == len(cookies) == 3


async def test_directories_move_with_all_below(tree: Namespace) -> None:
    a, b = await make_dir(tree, b"a"), await make_dir(tree, b"b")
    inner = await make_dir(tree, b"inner", a)
    file = await make(tree, b"f", inner)
    await tree.rename(a, b"inner", b, b"moved")
    assert (await tree.lookup(inner, b".."))[0] == b
    assert (await tree.lookup(inner, b"f"))[0] == file.ino
    await tree.rename(b, b"moved", ROOT, b"a")  # over an empty directory
    assert await names(tree) == [b"a", b"b"]
    assert (await tree.lookup(ROOT, b"a"))[0] == inner


async def test_exchange(tree: Namespace) -> None:
    a, b = await make_dir(tree, b"a"), await make_dir(tree, b"b")
    inner = await make_dir(tree, b"x", a)
    file = await make(tree, b"y", b)
    await tree.rename(a, b"x", b, b"y", RenameFlags.EXCHANGE)
    assert (await tree.lookup(a, b"x"))[0] == file.ino
    assert (await tree.lookup(b, b"y"))[0] == inner
    assert (await tree.lookup(inner, b".."))[0] == b
    await tree.rename(ROOT, b"a", ROOT, b"b", RenameFlags.EXCHANGE)
    assert (await tree.lookup(ROOT, b"a"))[0] == b
    await tree.rename(ROOT, b"a", ROOT, b"c", RenameFlags.NOREPLACE)
    assert await names(tree) == [b"b", b"c"]


# Attributes


async def test_attributes(tree: Namespace) -> None:
    file = await make(tree, b"f")
    changed = await tree.set_attributes(file.ino, AttributeChanges(mode=0o100600, uid=1, gid=2, atime_ns=3, mtime_ns=4, size=5))
    assert (changed.mode, changed.uid, changed.gid, changed.atime_ns, changed.mtime_ns, changed.size) == (
        stat.S_IFREG | 0o600,
        1,
        2,
        3,
        4,
        5,
    )
    assert changed.ctime_ns > file.inode.ctime_ns
    assert (changed.writer, changed.open) == (file.inode.writer, file.vid)
    assert await tree.inode(file.ino) == changed
    assert (await tree.set_attributes(file.ino, AttributeChanges(ctime_ns=77))).ctime_ns == 77
    directory = await make_dir(tree, b"d")
    with pytest.raises(NotPermitted):
        await tree.set_attributes(directory, AttributeChanges(size=0))
    with pytest.raises(NoSuchName):
        await tree.set_attributes(InodeNumber(999), AttributeChanges(mode=0o600))


async def test_extended_attributes(tree: Namespace) -> None:
    file = await make(tree, b"f")

    async def set_xattr(name: bytes, value: bytes, flags: XattrFlags = XattrFlags(0)) -> None:  # noqa: B008
        await tree.change(file.ino, lambda inode: with_xattr(inode, file.ino, name, value, flags, 50))

    async def remove_xattr(ino: InodeNumber, name: bytes) -> None:
        await tree.change(ino, lambda inode: without_xattr(inode, ino, name, 60))

    await set_xattr(b"user.a", b"\0\xff")
    await set_xattr(b"user.b", b"", XattrFlags.CREATE)
    await set_xattr(b"user.a", b"2", XattrFlags.REPLACE)
    assert (await tree.inode(file.ino)).xattrs == {b"user.a": b"2", b"user.b": b""}
    for error, name, value, flags in (
        (NameExists, b"user.a", b"", XattrFlags.CREATE),
        (NoSuchAttribute, b"user.c", b"", XattrFlags.REPLACE),
        (NameTooLong, b"user." + b"x" * 251, b"", XattrFlags(0)),
        (AttributesTooLarge, b"user.c", b"x" * XATTRS_SIZE_BYTES_MAX, XattrFlags(0)),
        (NameExists, b"user.a", b"", XattrFlags.CREATE | XattrFlags.REPLACE),
        (NoSuchAttribute, b"user.c", b"", XattrFlags.CREATE | XattrFlags.REPLACE),
        (InvalidMove, b"user.c", b"", XattrFlags(4)),
    ):
        with pytest.raises(error):
            await set_xattr(name, value, flags)
    await remove_xattr(file.ino, b"user.a")
    assert (await tree.inode(file.ino)).xattrs == {b"user.b": b""}
    with pytest.raises(NoSuchAttribute):
        await remove_xattr(file.ino, b"user.a")
    with pytest.raises(NoSuchName):
        await remove_xattr(InodeNumber(999), b"user.a")


async def test_a_dangling_name_is_damage(kv: KeyValue) -> None:
    tree = Namespace(kv, STORE, 1, lambda: 1)
    await tree.format_if_empty(SETTINGS)
    file = await make(tree, b"f")
    entry = await kv.get(b"d/0000000000000001/f")
    await tree.unlink(ROOT, b"f")
    assert entry is not None
    await kv.transact([], [Put(entry.key, entry.value)])
    with pytest.raises(DamagedData, match="does not exist"):
        await tree.lookup(ROOT, b"f")
    assert await catalog_problems(kv) == [f"name b'f' in 1 leads to inode {file.ino}, which does not exist"]


async def test_many_inodes_at_once(kv: KeyValue) -> None:
    tree = Namespace(kv, STORE, 1, count(1000).__next__)
    await tree.format_if_empty(SETTINGS)
    files = [(await make(tree, b"f%d" % number)).ino for number in range(3)]
    directory = await make_dir(tree, b"d")
    await make(tree, b"inside", directory)  # its times are a record of their own
    damaged = (await make(tree, b"damaged")).ino
    await kv.transact([], [Put(inode_key(damaged), b"nonsense")])
    await tree.unlink(ROOT, b"f1")
    found = await tree.inodes([*files, directory, damaged])
    assert found == {ino: await tree.inode(ino) for ino in (files[0], files[2], directory)}
