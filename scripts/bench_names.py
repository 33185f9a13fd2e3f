"""The part of `scripts/bench` that looks at a directory of 100,000 files which the kernel knows nothing of.

Making them through the mount, protecting and deleting them would take minutes, and only looking at them is measured. So their
records are written into the catalog, as those of empty, protected files.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import trio

from ckptfs.cache.catalog_format import (
    FORMAT_VERSION,
    NO_SEGMENT,
    Inode,
    Version,
    VersionState,
    entry_key,
    inode_key,
    pack,
    version_key,
)
from ckptfs.cache.catalog_kv import Delete, Put
from ckptfs.cache.catalog_records import entry_put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ID_SIZE, InodeNumber, StoreId, Vid

PROCESSES = 2
"""That stat at once, each its half of the files: as many as this machine has cores, so that the mount has somebody waiting."""
MODE = 0o100644
FIRST_INODE = 1 << 40
"""No node comes to numbers as large."""
AT_ONCE = 60


def _name(number: int) -> bytes:
    return b"%06d" % number


def _vid(number: int) -> Vid:
    return Vid((number + 1).to_bytes(ID_SIZE, "big"))


async def _fill(catalog: Path, directory: InodeNumber, count: int) -> None:
    kv = SqliteCatalog.open(catalog, writer_label="bench")
    now = time.time_ns()
    for start in range(0, count, AT_ONCE):
        records = []
        for number in range(start, min(start + AT_ONCE, count)):
            ino, vid = InodeNumber(FIRST_INODE + number), _vid(number)
            inode = Inode(FORMAT_VERSION, MODE, 0, 0, now, now, now, cur=vid, prot=vid)
            version = Version(
                FORMAT_VERSION, ino, VersionState.PROTECTED, StoreId(bytes(ID_SIZE)), NO_SEGMENT, True, root=bytes(ID_SIZE)
            )
            records += [Put(inode_key(ino), pack(inode)), Put(version_key(vid), pack(version))]
        await kv.transact([], records)
        for number in range(start, min(start + AT_ONCE, count)):  # a name's cookie is the revision it was made at
            await kv.transact([], [entry_put(directory, _name(number), InodeNumber(FIRST_INODE + number), MODE)])
    await kv.aclose()


async def _clear(catalog: Path, directory: InodeNumber, count: int) -> None:
    kv = SqliteCatalog.open(catalog, writer_label="bench")
    for start in range(0, count, AT_ONCE // 2):
        numbers = range(start, min(start + AT_ONCE // 2, count))
        keys = [entry_key(directory, _name(number)) for number in numbers]
        keys += [inode_key(InodeNumber(FIRST_INODE + number)) for number in numbers]
        keys += [version_key(_vid(number)) for number in numbers]
        await kv.transact([], [Delete(key) for key in keys])
    await kv.aclose()


@contextmanager
def files_in_mount(directory: Path, catalog: Path, count: int) -> Iterator[None]:
    """Inside, the new directory in a mount has so many files."""
    directory.mkdir()
    ino = InodeNumber(directory.stat().st_ino)
    trio.run(_fill, catalog, ino, count)
    try:
        yield
    finally:
        trio.run(_clear, catalog, ino, count)
        directory.rmdir()


@contextmanager
def files_in_plain(directory: Path, count: int) -> Iterator[None]:
    """The same in a plain directory."""
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / os.fsdecode(_name(number)), os.O_CREAT | os.O_WRONLY, MODE & 0o777))
    try:
        yield
    finally:
        for number in range(count):
            os.unlink(directory / os.fsdecode(_name(number)))
        directory.rmdir()


def stat_seconds(directory: Path, count: int) -> float:
    """Seconds for `PROCESSES` processes to stat every file once, in the order they were made."""
    each = -(-count // PROCESSES)
    ranges = [range(start, min(start + each, count)) for start in range(0, count, each)]
    return _cold_seconds(lambda: in_processes([partial(_stat, directory, part) for part in ranges]))


def list_seconds(directory: Path, count: int) -> float:
    """Seconds for one process to list the directory and stat each file as it comes (os.scandir)."""

    def work() -> None:
        with os.scandir(directory) as entries:
            found = sum(1 for entry in entries if entry.stat().st_mode == MODE)
        assert found == count, f"{directory} shows {found} files of {count}"

    return _cold_seconds(work)


def _stat(directory: Path, numbers: range) -> None:
    for number in numbers:
        os.stat(f"{directory}/{number:06d}")


def _cold_seconds(work: Callable[[], None]) -> float:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("2")  # names and inodes, not file contents
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_processes(works: list[Callable[[], None]]) -> None:
    """Run each in a forked process of its own, at once. Raises `RuntimeError` if one fails."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process of the benchmark failed; its error stands above")
