"""The tree against the kernel: the same operations on a real directory, errno by errno, and the same tree afterwards."""

import ctypes
import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

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
NAMES = (b"a", b"b", b"c")
DEPTH_MAX = 4
STEPS = 400
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


class TreeAgainstKernel:
    """Every step does one thing in both worlds and compares the outcome; afterwards both trees must look the same."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.choose = random.Random(seed)
        self.directory = str(directory)
        self.existing: list[Parts] = []
        self.directories: list[Parts] = [()]
        self.errors: Counter[tuple[str, int]] = Counter()
        self.history: list[str] = []
        # Not every file system counts subdirectories in st_nlink.
        self.counts_directories = os.stat(directory.parent).st_nlink > 2
        self.kv = MemoryCatalog()
        self.tree = Namespace(self.kv, StoreId(b"A" * 16), 1, count(1).__next__)
        driven(self.tree.format_if_empty(Settings(1, b"C" * 16, 4, 2, 1 << 20)))

    def step(self) -> None:
        operation = self.choose.choices(
            ["create", "mkdir", "symlink", "link", "unlink", "rmdir", "rename"], [3, 5, 1, 2, 2, 2, 8]
        )[0]
        self.history.append(operation)
        getattr(self, operation)()
        self.compare()

    def path(self) -> Parts:
        """Mostly one that exists, or could be made where a directory exists; sometimes any."""
        kind = self.choose.random()
        if kind < 0.5 and self.existing:
            path = self.choose.choice(self.existing)
        elif kind < 0.9:
            path = (*self.choose.choice(self.directories), self.choose.choice(NAMES))
        else:
            path = tuple(self.choose.choices(NAMES, k=self.choose.randint(1, DEPTH_MAX)))
        path = path[:DEPTH_MAX]
        self.history.append("/".join(map(os.fsdecode, path)))
        return path

    def real(self, path: Parts) -> str:
        return os.path.join(self.directory, *(os.fsdecode(part) for part in path))

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
        self.errors[real.__qualname__.split(".")[1], found] += 1
        if found:
            assert driven(self.kv.revision()) == revision

    def create(self) -> None:
        path = self.path()

        async def ours() -> None:
            await self.tree.create_file(await self.parent(path), path[-1], 0o644, 0, 0, new_segment_id())

        self.both(ours, lambda: os.close(os.open(self.real(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY)))

    def mkdir(self) -> None:
        path = self.path()

        async def ours() -> None:
            await self.tree.make_directory(await self.parent(path), path[-1], 0o755, 0, 0)

        self.both(ours, lambda: os.mkdir(self.real(path)))

    def symlink(self) -> None:
        path = self.path()

        async def ours() -> None:
            await self.tree.make_symlink(await self.parent(path), path[-1], TARGET, 0, 0)

        self.both(ours, lambda: os.symlink(TARGET, os.fsencode(self.real(path))))

    def link(self) -> None:
        path, new = self.path(), self.path()

        async def ours() -> None:
            ino, _ = await self.tree.lookup(await self.parent(path), path[-1])
            await self.tree.link(ino, await self.parent(new), new[-1])

        self.both(ours, lambda: os.link(self.real(path), self.real(new), follow_symlinks=False))

    def unlink(self) -> None:
        path = self.path()

        async def ours() -> None:
            await self.tree.unlink(await self.parent(path), path[-1])

        self.both(ours, lambda: os.unlink(self.real(path)))

    def rmdir(self) -> None:
        path = self.path()

        async def ours() -> None:
            await self.tree.rmdir(await self.parent(path), path[-1])

        self.both(ours, lambda: os.rmdir(self.real(path)))

    def rename(self) -> None:
        old, new, flags = self.path(), self.path(), self.choose.choice([0, 0, 0, 1, 2, 2, 3])
        self.history.append(str(flags))

        async def ours() -> None:
            if flags == RenameFlags.NOREPLACE | RenameFlags.EXCHANGE:
                raise InvalidMove("the kernel refuses these before it looks at any name")
            old_parent, new_parent = await self.parent(old), await self.parent(new)
            await self.tree.rename(old_parent, old[-1], new_parent, new[-1], RenameFlags(flags))

        self.both(ours, lambda: renameat2(self.real(old), self.real(new), flags))

    def compare(self) -> None:
        real: dict[Parts, tuple[int, int]] = {}
        numbers: dict[Parts, int] = {}
        for directory, directories, files in os.walk(self.directory):
            relative = Path(directory).relative_to(self.directory).parts
            for name in [*directories, *files, *([] if relative else ["."])]:
                path = tuple(os.fsencode(part) for part in (*relative, name))
                status = os.lstat(os.path.join(directory, name))
                nlink = status.st_nlink if self.counts_directories or not stat.S_ISDIR(status.st_mode) else 0
                real[path] = (stat.S_IFMT(status.st_mode), nlink)
                numbers[path] = status.st_ino
        ours, our_numbers = driven(self.walked())
        assert ours == real
        self.existing = [path for path in real if path != (b".",)]
        self.directories = [(), *(path for path in self.existing if stat.S_ISDIR(real[path][0]))]
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
@pytest.mark.parametrize("seed", range(int(os.environ.get("CKPTFS_WALKS", "8"))))
def test_the_tree_answers_as_the_kernel_does(tmp_path: Path, seed: int) -> None:
    (tmp_path / "tree").mkdir()
    world = TreeAgainstKernel(tmp_path / "tree", seed)
    try:
        for _ in range(STEPS):
            world.step()
    except BaseException as error:
        error.add_note(" ".join(world.history[-40:]))
        raise
    # The walk is worth something only if it meets what is difficult.
    met = {(operation, errno.errorcode.get(code, "")) for operation, code in world.errors}
    assert {("rename", ""), ("rename", "EINVAL"), ("rename", "ENOTEMPTY"), ("rename", "EEXIST"), ("link", "EPERM")} <= met
    assert {("rename", "ENOTDIR"), ("rename", "EISDIR"), ("rmdir", ""), ("rmdir", "ENOTEMPTY"), ("unlink", "EISDIR")} <= met
