"""What programs do with a file's bytes, in both lanes, at home and read on another node: as on the drive itself.

A walker compares call by call with a plain directory; CKPTFS_WALKS=100 makes more walks, CKPTFS_WALK_SEED repeats one.
"""

import contextlib
import errno
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.local_socket import call

WALKS = int(os.environ.get("CKPTFS_WALKS", "3"))
WALK_SEED = int(os.environ.get("CKPTFS_WALK_SEED", str(time.time_ns() % 1_000_000)))
WALK_STEPS = 250
OPEN_FILES = int(os.environ.get("CKPTFS_OPEN_FILES", "400"))
"""10000 is the long run."""
WALKER = Path(__file__).parent / "data_walker.py"

pytestmark = [pytest.mark.slow, pytest.mark.mount]


class Sides:
    """An empty directory in the mount, as the writing and as another node see it, and a plain one beside it."""

    def __init__(self, cluster: LocalCluster, plain: Path) -> None:
        self.cluster = cluster
        self.here = Path(tempfile.mkdtemp(dir=cluster.nodes[0].mountpoint))
        self.there = cluster.nodes[1].mountpoint / self.here.name
        self.plain = plain

    def same(self, work: Callable[[Path], Any]) -> Any:
        """What the work gives in both directories, where it must be the same; an `OSError` too."""
        ours, theirs = _outcome(work, self.here), _outcome(work, self.plain)
        assert ours == theirs
        return theirs

    def same_there(self) -> None:
        """Every file is protected and reads the same on the other node, and here again."""
        behind, _, _ = wait_until([self.here], "protected", 60.0, shown=False)
        assert not behind
        names = sorted(os.listdir(self.plain))
        for directory in (self.there, self.here):
            assert sorted(os.listdir(directory)) == names
            for name in names:
                assert (directory / name).read_bytes() == (self.plain / name).read_bytes()


def _outcome(work: Callable[[Path], Any], directory: Path) -> Any:
    try:
        return work(directory)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@pytest.fixture
def sides(lane_cluster: LocalCluster, scratch: Path) -> Iterator[Sides]:
    sides = Sides(lane_cluster, scratch)
    yield sides
    shutil.rmtree(sides.here)


@pytest.mark.timeout(60 + 20 * WALKS)
@pytest.mark.parametrize("walk", range(WALKS))
def test_every_call_does_what_it_does_on_the_drive(sides: Sides, walk: int) -> None:
    seed = str(WALK_SEED + walk)
    command = [sys.executable, WALKER, sides.here, sides.plain, seed, str(WALK_STEPS)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"CKPTFS_WALK_SEED={seed}\n{done.stderr[-6000:]}"
    sides.same_there()


@pytest.mark.timeout(120)
def test_nor_does_a_killed_mount_process_change_any_of_it(sides: Sides) -> None:
    chance, node = random.Random(WALK_SEED), sides.cluster.nodes[0]
    command = [sys.executable, WALKER, sides.here, sides.plain, str(WALK_SEED), str(2 * WALK_STEPS)]
    walk = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    while walk.poll() is None and not any(sides.plain.iterdir()):
        time.sleep(0.001)
    kills = 0
    while walk.poll() is None and kills < 20:  # the first in the walk's first steps, however quick the machine is
        if (pid := node.processes.pids()["mount"]) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            walk.wait(chance.uniform(0.1, 0.5))
    _, said = walk.communicate(timeout=60)
    assert walk.returncode == 0, f"CKPTFS_WALK_SEED={WALK_SEED}\n{said[-6000:]}"
    assert kills
    sides.same_there()


def test_every_append_of_several_processes_is_there_whole_and_once(sides: Sides) -> None:
    code = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)\n"
        "for turn in range(300):\n"
        "    record = b'%s.%03d.' % (sys.argv[2].encode(), turn) + sys.argv[2].encode() * (turn % 50 * 7) + b'\\n'\n"
        "    assert os.write(file, record) == len(record)\n"
    )
    path = sides.here / "log"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abcd"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    expected = sorted(f"{name}.{turn:03}." + name * (turn % 50 * 7) for name in "abcd" for turn in range(300))
    lines = path.read_text().splitlines()
    assert sorted(lines) == expected
    for name in "abcd":
        assert [line for line in lines if line[0] == name] == sorted(line for line in expected if line[0] == name)
    assert (sides.there / "log").read_text().splitlines() == lines


@pytest.mark.parametrize("size", [1 << 20, 1_000_003])
def test_dd_with_direct_writes_also_a_tail_that_fills_no_block(sides: Sides, size: int) -> None:
    source = sides.plain / "source"
    source.write_bytes(os.urandom(size))
    shutil.copy(source, sides.here / "source")

    def copy(directory: Path) -> bytes:
        for flag, name in (("oflag=direct", "copy"), ("iflag=direct", "again")):
            command = [
                "dd",
                f"if={directory / ('source' if name == 'copy' else 'copy')}",
                f"of={directory / name}",
                "bs=64K",
                flag,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
        return (directory / "again").read_bytes()

    assert sides.same(copy) == source.read_bytes()
    sides.same_there()


def test_direct_reads_and_writes_of_whole_blocks_mix_with_others(sides: Sides) -> None:
    def work(directory: Path) -> bytes:
        with mmap.mmap(-1, 1 << 20) as page, contextlib.ExitStack() as stack:
            direct = os.open(directory / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            stack.callback(os.close, direct)
            page[:] = b"d" * len(page)
            assert os.pwrite(direct, page, 0) == len(page)
            with open(directory / "file", "r+b", buffering=0) as plain:
                plain.seek(4096)
                plain.write(b"p" * 4096)
                assert os.preadv(direct, [page], 0) == len(page)
                os.pwrite(direct, memoryview(page)[:4096], 8192)
                return page[:] + plain.read(8192)

    sides.same(work)


def test_sizes_that_no_file_can_have(sides: Sides) -> None:
    def refusals(directory: Path) -> list[Any]:
        def in_file(work: Callable[[int], Any]) -> Any:
            def run(_: Path) -> Any:
                descriptor = os.open(directory / "file", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    return work(descriptor)
                finally:
                    os.close(descriptor)

            return _outcome(run, directory)

        return [
            in_file(lambda file: os.ftruncate(file, 1 << 44)),
            in_file(lambda file: os.ftruncate(file, 1 << 62)),
            in_file(lambda file: os.ftruncate(file, -1)),
            in_file(lambda file: os.pwrite(file, b"x", 1 << 44)),
            in_file(lambda file: os.posix_fallocate(file, 1 << 44, 4096)),
            in_file(lambda file: os.posix_fallocate(file, 0, 0)),
            in_file(lambda file: os.fstat(file).st_size),
        ]

    assert sides.same(refusals)[0] == "EFBIG"


def _program(code: str) -> Callable[[Path], tuple[int, str]]:
    """A process of its own in a directory: how it ended, and what it printed."""

    def run(directory: Path) -> tuple[int, str]:
        command = [sys.executable, "-c", f"import errno, mmap, os, resource, signal\n{code}"]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout

    return run


def test_the_file_size_limit_of_a_process(sides: Sides) -> None:
    code = """
def shown(call, *arguments):
    try:
        print(call.__name__, call(*arguments), flush=True)
    except OSError as error:
        print(call.__name__, errno.errorcode[error.errno], flush=True)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
file = os.open("file", os.O_RDWR | os.O_CREAT, 0o600)
shown(os.pwrite, file, bytes(8_000), 4_000)
shown(os.pwrite, file, b"x", 10_000)
shown(os.ftruncate, file, 10_001)
shown(os.posix_fallocate, file, 9_000, 2_000)
print(os.fstat(file).st_size, flush=True)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
os.pwrite(file, b"x", 10_000)
"""
    ended, printed = sides.same(_program(code))
    assert ended == -signal.SIGXFSZ
    assert printed.splitlines()[:3] == ["pwrite 6000", "pwrite EFBIG", "ftruncate EFBIG"]


def test_a_file_cut_while_it_is_mapped(sides: Sides) -> None:
    """The page with the new end has zeros behind it, what grows again is zeros, and what lies beyond the end is SIGBUS."""
    code = """
page = mmap.PAGESIZE
file = open("file", "w+b", buffering=0)
file.write(b"x" * 5 * page)
mapping = mmap.mmap(file.fileno(), 0)
file.truncate(page + 100)
print(mapping[page:2 * page].hex(), flush=True)
file.truncate(5 * page)
mapping[4 * page] = 7
mapping.flush()
file.seek(0)
print(mapping[:].hex(), file.read().hex(), flush=True)
file.truncate(2 * page)
mapping[3 * page]
"""
    ended, _ = sides.same(_program(code))
    assert ended == -signal.SIGBUS
    sides.same_there()


def test_a_mapping_is_the_file(sides: Sides) -> None:
    """Two processes that map it and one that reads and writes it see each other's bytes at once."""
    path = sides.here / "file"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    code = "import mmap, sys\nfile = open(sys.argv[1], 'r+b')\nmapping = mmap.mmap(file.fileno(), 0)\n"
    code += (
        "mapping[5000:5004] = b'them'\nprint(mapping[100:104].decode(), flush=True)\ninput()\nprint(mapping[9000:9007].decode())"
    )
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[100:104] = b"here"
        other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=-1, stdout=-1, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert (mapping[5000:5004], os.pread(file.fileno(), 4, 5000)) == (b"them", b"them")
        os.pwrite(file.fileno(), b"written", 9000)
        assert other.communicate("\n", timeout=30)[0] == "written\n"
        content = mapping[:]
    assert path.read_bytes() == content
    behind, _, _ = wait_until([path], "protected", 60.0, shown=False)
    assert not behind
    assert (sides.there / "file").read_bytes() == content


def test_64_writers_in_many_files_and_in_one(sides: Sides) -> None:
    part = 40_000

    def write(number: int) -> None:
        data = bytes([number + 1]) * part
        with open(sides.here / f"file-{number}", "wb", buffering=0) as file:
            for offset in range(0, part, 5000):
                file.write(data[offset : offset + 5000])
        descriptor = os.open(sides.here / "one", os.O_WRONLY | os.O_CREAT, 0o600)
        for offset in range(0, part, 5000):
            os.pwrite(descriptor, data[offset : offset + 5000], number * part + offset)
        os.close(descriptor)

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(write, range(64)))
    for number in range(64):
        (sides.plain / f"file-{number}").write_bytes(bytes([number + 1]) * part)
    (sides.plain / "one").write_bytes(b"".join(bytes([number + 1]) * part for number in range(64)))
    sides.same_there()


@pytest.mark.timeout(60 + OPEN_FILES // 20)
def test_many_files_open_at_once(sides: Sides) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, OPEN_FILES + 1000), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        files = [stack.enter_context(open(sides.here / f"{number}", "w+b", buffering=0)) for number in range(OPEN_FILES)]
        for number, file in enumerate(files):
            file.write(b"%d" % number)
        for number, file in enumerate(files):
            assert os.pread(file.fileno(), 20, 0) == b"%d" % number
    assert len(os.listdir(sides.there)) == OPEN_FILES
    assert (sides.there / f"{OPEN_FILES - 1}").read_bytes() == b"%d" % (OPEN_FILES - 1)


def test_what_is_read_again_is_in_memory_until_it_changes_wherever(sides: Sides) -> None:
    """Opened anew a file is not fetched anew, in whichever lane; and never read as it was before another node rewrote it."""
    size = 4 << 20
    here, there = sides.here / "file", sides.there / "file"

    def requests() -> int:
        return int(call(sides.cluster.nodes[0].store / "run" / "mount.sock", {"do": "status"})["requests"])

    for turn in range(3):
        writer, reader = (here, there) if turn != 1 else (there, here)
        data = bytes([turn + 1]) * size
        writer.write_bytes(data)
        assert reader.read_bytes() == data
        assert here.read_bytes() == data
        if turn == 0:
            before = requests()
            for _ in range(5):
                assert here.read_bytes() == data
            assert requests() - before < 40  # opened, closed, and its attributes; five times four MiB would be more
        with open(writer, "r+b", buffering=0) as file:
            file.seek(size // 2)
            file.write(b"changed in place")
        for path in (writer, reader, writer):
            assert path.read_bytes()[size // 2 :][:16] == b"changed in place"


GIB = 1 << 30


def test_a_sparse_file_costs_what_is_in_it(sides: Sides) -> None:
    """Data at its ends, at borders of cells and beside them; protected, it takes no more than that, and is read anywhere."""
    size = 30 * GIB + 4711
    parts = {0: b"begin", (1 << 20) - 2: b"over a border", 7 * GIB: b"x" * (1 << 20), 12 * GIB + 5: b"y" * 3, size - 3: b"end"}
    before = _stored(sides.cluster)
    with open(sides.here / "sparse", "wb", buffering=0) as file:
        for at, data in parts.items():
            os.pwrite(file.fileno(), data, at)
    behind, _, _ = wait_until([sides.here], "protected", 60.0, shown=False)
    assert not behind
    assert _stored(sides.cluster) - before < 64 << 20
    for directory in (sides.here, sides.there):
        status = (directory / "sparse").stat()
        assert (status.st_size, status.st_blocks * 512 < 4 << 20) == (size, True)
        _check_parts(directory / "sparse", parts)


def test_a_file_beyond_2_tib(sides: Sides) -> None:
    """Local at once, for terabytes of zeros are not read, nor is any other file held up; on two nodes it is not protected."""
    size = 5 << 39
    parts = {0: b"begin", 1 << 41: b"beyond", size - 3: b"end"}
    with open(sides.here / "huge", "wb", buffering=0) as file:
        for at, data in parts.items():
            os.pwrite(file.fileno(), data, at)
    (sides.here / "after").write_bytes(b"is not held up")
    behind, _, _ = wait_until([sides.here], "local", 30.0, shown=False)
    assert not behind
    assert (sides.there / "huge").stat().st_size == (sides.here / "huge").stat().st_size == size
    _check_parts(sides.here / "huge", parts)
    with open(sides.here / "huge", "r+b", buffering=0) as file:
        assert os.lseek(file.fileno(), 1 << 40, os.SEEK_DATA) == 1 << 41
        file.truncate((1 << 41) + 3)
        file.seek(1 << 41)
        assert file.read() == b"bey"


def _check_parts(path: Path, parts: dict[int, bytes]) -> None:
    with open(path, "rb", buffering=0) as file:
        for at, data in parts.items():
            start = max(at - 100, 0)
            file.seek(start)
            assert file.read(at - start + len(data)) == bytes(at - start) + data


def _stored(cluster: LocalCluster) -> int:
    """Bytes that all shards take."""
    found = 0
    for node in cluster.nodes:
        for path in (node.store / "shards").rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                found += path.stat().st_blocks * 512
    return found
