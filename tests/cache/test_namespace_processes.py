"""Several processes on one SQLite catalog: nothing is lost, nothing is half done, whoever is killed whenever."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import Settings
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ROOT_INODE, StoreId
from ckptfs.cache.namespace import Namespace

pytestmark = pytest.mark.slow

PRELUDE = """
import itertools, os, random, sys, time
import trio
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import NamespaceError, NameExists, NoSuchName
from ckptfs.cache.ids import ROOT_INODE as ROOT, new_segment_id
from ckptfs.cache.namespace import Namespace, RenameFlags
from ckptfs.cache.versions import LocalCommit, Versions

path, number = sys.argv[1], int(sys.argv[2])
store = bytes([number + 1]) * 16

async def main():
    kv = SqliteCatalog.open(path, writer_label=str(number))
    tree = Namespace(kv, store, 1, time.time_ns)
    versions = Versions(kv, store, 1, time.time_ns)
    print("ready", flush=True)
    sys.stdin.readline()
    await work(kv, tree, versions)
    await kv.aclose()
"""

MAKE_THE_SAME_DIRECTORIES = """
async def work(kv, tree, versions):
    made = 0
    for round_ in range(40):
        parent = ROOT
        for depth in range(2):
            name = b"%d-%d" % (round_, depth)
            try:
                parent, _ = await tree.make_directory(parent, name, 0o755, 0, 0)
                made += 1
            except NameExists:
                parent, _ = await tree.lookup(parent, name)
        await tree.create_file(parent, b"rank-%d" % number, 0o644, 0, 0, new_segment_id())
    print("made", made, flush=True)
"""

COUNT = """
async def work(kv, tree, versions):
    for _ in range(200):
        while True:
            entry = await kv.get(b"c/test")
            value = b"%d" % (int(entry.value) + 1)
            if (await kv.transact([Unchanged(b"c/test", entry.mod_revision)], [Put(b"c/test", value)])).succeeded:
                break
    print("made", 200, flush=True)
"""

CHANGE_AT_RANDOM = """
async def work(kv, tree, versions):
    choose = random.Random(os.urandom(8))
    directories = [ROOT]
    names = [b"a", b"b", b"c", b"d", b"e"]
    print("made", 0, flush=True)
    while True:
        parent, name = choose.choice(directories), choose.choice(names)
        other, new = choose.choice(directories), choose.choice(names)
        try:
            match choose.randrange(7):
                case 0:
                    made = await tree.create_file(parent, name, 0o644, 0, 0, new_segment_id())
                    await versions.commit_local([LocalCommit(made.ino, made.vid, 1, b"r" * 16, 4096, 1, True)])
                case 1:
                    directories = [*directories[-20:], (await tree.make_directory(parent, name, 0o755, 0, 0))[0]]
                case 2:
                    await tree.unlink(parent, name)
                case 3:
                    await tree.rmdir(parent, name)
                case 4:
                    await tree.rename(parent, name, other, new, RenameFlags(choose.choice([0, 0, 1, 2])))
                case 5:
                    await tree.link((await tree.lookup(parent, name))[0], other, new)
                case 6:
                    ino, inode = await tree.lookup(parent, name)
                    if inode.is_directory:
                        directories = [*directories[-20:], ino]
                    else:
                        opened = await versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
                        await versions.commit_local([LocalCommit(ino, opened.vid, 1, b"r" * 16, 4096, 1, True)])
        except NamespaceError:
            directories = directories if ROOT in directories else [ROOT, *directories]
"""


def start(catalog: Path, number: int, work: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + work + "\ntrio.run(main)\n", str(catalog), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def go(processes: "list[subprocess.Popen[str]]") -> None:
    """Let all of them begin at once."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def made(process: "subprocess.Popen[str]") -> int:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return int(output.split()[1])


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    async def create() -> None:
        kv = SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test")
        await Namespace(kv, StoreId(b"A" * 16), 1, time.time_ns).format_if_empty(Settings(1, b"C" * 16, 4, 2, 1 << 20))
        await kv.aclose()

    trio.run(create)
    return tmp_path / "catalog.db"


def test_eight_processes_make_the_same_directories(catalog: Path) -> None:
    """What torch.distributed ranks do: makedirs(exist_ok=True) of one path, then a file each."""
    processes = [start(catalog, number, MAKE_THE_SAME_DIRECTORIES) for number in range(8)]
    go(processes)
    assert sum(made(process) for process in processes) == 80

    async def check() -> None:
        kv = SqliteCatalog.open(catalog, writer_label="test")
        assert await catalog_problems(kv) == []
        tree = Namespace(kv, StoreId(b"A" * 16), 1, time.time_ns)
        for round_ in range(40):
            outer, _ = await tree.lookup(ROOT_INODE, b"%d-0" % round_)
            inner, _ = await tree.lookup(outer, b"%d-1" % round_)
            assert {item.name for item in await tree.readdir(inner)} == {b"rank-%d" % number for number in range(8)}
        assert await tree.nlink(ROOT_INODE, await tree.inode(ROOT_INODE)) == 42
        await kv.aclose()

    trio.run(check)


def test_four_processes_count_without_losing_one(catalog: Path) -> None:
    async def look(expected: bytes | None) -> int:
        kv = SqliteCatalog.open(catalog, writer_label="test")
        if expected is None:
            await kv.transact([], [Put(b"c/test", b"0")])
        else:
            entry = await kv.get(b"c/test")
            assert entry is not None
            assert entry.value == expected
        revision = await kv.revision()
        await kv.aclose()
        return revision

    before = trio.run(look, None)
    processes = [start(catalog, number, COUNT) for number in range(4)]
    go(processes)
    assert sum(made(process) for process in processes) == 800
    assert trio.run(look, b"800") - before == 800


def test_killed_at_any_moment_the_catalog_is_whole(catalog: Path) -> None:
    seed = random.randrange(2**32)
    choose = random.Random(seed)

    async def check() -> int:
        kv = SqliteCatalog.open(catalog, writer_label="test")
        assert await catalog_problems(kv) == [], f"seed {seed}"
        revision = await kv.revision()
        await kv.aclose()
        return revision

    revision = 0
    for _ in range(6):
        processes = [start(catalog, number, CHANGE_AT_RANDOM) for number in range(3)]
        try:
            go(processes)
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "made 0\n"
            for process in processes:
                time.sleep(choose.uniform(0.02, 0.2))  # the moment of the kill, not a synchronization
                process.send_signal(signal.SIGKILL)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        after = trio.run(check)
        assert after > revision
        revision = after
    assert revision > 500
