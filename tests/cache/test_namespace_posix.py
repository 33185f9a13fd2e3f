"""The tree against the kernel: the same operations on a real directory, errno by errno, and the same tree afterwards."""

import ctypes
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import Settings
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import (
    DirectoryNotEmpty,
    InvalidMove,
    IsADirectory,
    NameExists,
    NamespaceError,
    NoSuchName,
    NotADirectory,
    NotPermitted,
)
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId, new_segment_id
from ckptfs.cache.namespace import Namespace, RenameFlags

Result = TypeVar("Result")
ERRNO: dict[type[NamespaceError], int] = {
    NoSuchName: errno.ENOENT,
    NameExists: errno.EEXIST,
    NotADirectory: errno.ENOTDIR,
    IsADirectory: errno.EISDIR,
    DirectoryNotEmpty: errno.ENOTEMPTY,
    InvalidMove: errno.EINVAL,
    NotPermitted: errno.EPERM,
}
AT_FDCWD = -100
TARGET = b"leads/nowhere"
paths = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=4).map(tuple)
Parts = tuple[bytes, ...]


def driven(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine over the engine in memory, which never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("it waited")


def renameat2(old: str, new: str, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


class TreeAgainstKernel(RuleBasedStateMachine):
    """Every rule does one thing in both worlds and compares the outcome; afterwards both trees must look the same."""

    counts_directories = True

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir=self.base)
        self.kv = MemoryCatalog()
        self.tree = Namespace(self.kv, StoreId(b"A" * 16), 1, count(1).__next__)
        driven(self.tree.format_if_empty(Settings(1, b"C" * 16, 4, 2, 1 << 20)))

    base: str | None = None

    def teardown(self) -> None:
        self.directory.cleanup()

    def real(self, path: Parts) -> str:
        return os.path.join(self.directory.name, *(os.fsdecode(part) for part in path))

    async def parent(self, path: Parts) -> InodeNumber:
        """Where the last part of the path is looked for, as the kernel finds it."""
        ino = ROOT_INODE
        for part in path[:-1]:
            ino, inode = await self.tree.lookup(ino, part)
            if stat.S_ISLNK(inode.mode):
                raise NoSuchName("a link that leads nowhere")
            if not inode.is_directory:
                raise NotADirectory("not a directory on the way")
        return ino

    def both(self, ours: Callable[[], Coroutine[Any, Any, object]], real: Callable[[], object]) -> None:
        expected = found = 0
        try:
            real()
        except OSError as error:
            expected = error.errno or 0
        revision = driven(self.kv.revision())
        try:
            driven(ours())
        except NamespaceError as error:
            found = ERRNO[type(error)]
        assert errno.errorcode.get(found, found) == errno.errorcode.get(expected, expected)
        if found:
            assert driven(self.kv.revision()) == revision

    @rule(path=paths)
    def create(self, path: Parts) -> None:
        async def ours() -> None:
            await self.tree.create_file(await self.parent(path), path[-1], 0o644, 0, 0, new_segment_id())

        self.both(ours, lambda: os.close(os.open(self.real(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY)))

    @rule(path=paths)
    def mkdir(self, path: Parts) -> None:
        async def ours() -> None:
            await self.tree.make_directory(await self.parent(path), path[-1], 0o755, 0, 0)

        self.both(ours, lambda: os.mkdir(self.real(path)))

    @rule(path=paths)
    def symlink(self, path: Parts) -> None:
        async def ours() -> None:
            await self.tree.make_symlink(await self.parent(path), path[-1], TARGET, 0, 0)

        self.both(ours, lambda: os.symlink(TARGET, os.fsencode(self.real(path))))

    @rule(path=paths, new=paths)
    def link(self, path: Parts, new: Parts) -> None:
        async def ours() -> None:
            ino, _ = await self.tree.lookup(await self.parent(path), path[-1])
            await self.tree.link(ino, await self.parent(new), new[-1])

        self.both(ours, lambda: os.link(self.real(path), self.real(new), follow_symlinks=False))

    @rule(path=paths)
    def unlink(self, path: Parts) -> None:
        async def ours() -> None:
            await self.tree.unlink(await self.parent(path), path[-1])

        self.both(ours, lambda: os.unlink(self.real(path)))

    @rule(path=paths)
    def rmdir(self, path: Parts) -> None:
        async def ours() -> None:
            await self.tree.rmdir(await self.parent(path), path[-1])

        self.both(ours, lambda: os.rmdir(self.real(path)))

    @rule(old=paths, new=paths, flags=st.sampled_from([0, 0, 1, 2, 3]))
    def rename(self, old: Parts, new: Parts, flags: int) -> None:
        async def ours() -> None:
            if flags == RenameFlags.NOREPLACE | RenameFlags.EXCHANGE:
                raise InvalidMove("the kernel refuses these before it looks at any name")
            old_parent, new_parent = await self.parent(old), await self.parent(new)
            await self.tree.rename(old_parent, old[-1], new_parent, new[-1], RenameFlags(flags))

        self.both(ours, lambda: renameat2(self.real(old), self.real(new), flags))

    @invariant()
    def trees_are_the_same(self) -> None:
        real: dict[Parts, tuple[int, int]] = {}
        numbers: dict[Parts, int] = {}
        for directory, directories, files in os.walk(self.directory.name):
            relative = Path(directory).relative_to(self.directory.name).parts
            for name in [*directories, *files, *([] if relative else ["."])]:
                path = tuple(os.fsencode(part) for part in (*relative, name))
                status = os.lstat(os.path.join(directory, name))
                nlink = status.st_nlink if self.counts_directories or not stat.S_ISDIR(status.st_mode) else 0
                real[path] = (stat.S_IFMT(status.st_mode), nlink)
                numbers[path] = status.st_ino
        ours, our_numbers = driven(self.walked())
        assert ours == real
        pairs = {(numbers[path], our_numbers[path]) for path in real}
        assert len(pairs) == len(set(our_numbers.values())) == len(set(numbers.values()))
        assert driven(catalog_problems(self.kv)) == []

    async def walked(self) -> tuple[dict[Parts, tuple[int, int]], dict[Parts, int]]:
        found: dict[Parts, tuple[int, int]] = {}
        numbers: dict[Parts, int] = {}
        waiting: list[tuple[Parts, InodeNumber]] = [((b".",), ROOT_INODE)]
        while waiting:
            path, ino = waiting.pop()
            inode = await self.tree.inode(ino)
            nlink = await self.tree.nlink(ino, inode) if self.counts_directories or not inode.is_directory else 0
            found[path] = (stat.S_IFMT(inode.mode), nlink)
            numbers[path] = ino
            if inode.is_directory:
                above = () if path == (b".",) else path
                waiting += [((*above, item.name), item.ino) for item in await self.tree.readdir(ino)]
        return found, numbers


@pytest.mark.slow
def test_the_tree_answers_as_the_kernel_does(tmp_path: Path) -> None:
    (tmp_path / "probe" / "below").mkdir(parents=True)

    class Machine(TreeAgainstKernel):
        base = str(tmp_path)
        counts_directories = os.stat(tmp_path / "probe").st_nlink == 3

    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=int(os.environ.get("CKPTFS_EXAMPLES", "150")), stateful_step_count=40, deadline=None),
    )
