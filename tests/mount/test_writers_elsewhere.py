"""Programs on several nodes write one file, through the kernel: appends, ranges, truncation, and the death of a mount process."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

APPENDER = """
import os, sys
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for number in range(count):
    line = b"%s:%d:%s\\n" % (name.encode(), number, b"x" * (37 + number * 13 % 200))
    assert os.write(fd, line) == len(line)
os.close(fd)
"""

RANK = """
import os, sys
path, rank, ranks, parts = sys.argv[1], *map(int, sys.argv[2:])
fd = os.open(path, os.O_WRONLY | os.O_CREAT)
for part in range(parts):
    data = bytes([rank + 1]) * 10007
    assert os.pwrite(fd, data, (part * ranks + rank) * len(data)) == len(data)
os.fsync(fd)
os.close(fd)
"""


def _start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, text=True)


def _end(programs: Sequence["subprocess.Popen[str]"], seconds: float = 60) -> None:
    for program in programs:
        _, printed = program.communicate(timeout=seconds)
        assert program.returncode == 0, printed


def _expected_lines(names: Sequence[str], count: int) -> list[bytes]:
    return sorted(
        b"%s:%d:%s" % (name.encode(), number, b"x" * (37 + number * 13 % 200)) for name in names for number in range(count)
    )


def _paths(cluster: LocalCluster, name: str) -> list[Path]:
    return [node.mountpoint / name for node in cluster.nodes]


def test_appends_from_several_nodes(cluster: LocalCluster) -> None:
    paths = _paths(cluster, "appended")
    names = ["a", "b", "c", "a2"]
    _end([_start(APPENDER, paths[number % 3], name, 150) for number, name in enumerate(names)])
    for path in paths[:4]:
        content = path.read_bytes()
        assert sorted(content.splitlines()) == _expected_lines(names, 150)
        assert path.stat().st_size == len(content)


def test_ranks_on_several_nodes_save_one_file(cluster: LocalCluster) -> None:
    paths, ranks, parts = _paths(cluster, "shared"), 8, 20
    _end([_start(RANK, paths[rank % 4], rank, ranks, parts) for rank in range(ranks)])
    expected = b"".join(bytes([rank + 1]) * 10007 for _ in range(parts) for rank in range(ranks))
    for path in paths:
        assert path.read_bytes() == expected
    assert not wait_until([paths[0]], "protected", 60.0, shown=False)[0]
    assert paths[5].read_bytes() == expected


@pytest.mark.parametrize("writes", [0, 1])
def test_truncation_and_rewriting_under_open_readers(lane_cluster: LocalCluster, writes: int) -> None:
    """By the home or by the other node; each node has a reader, who began before it."""
    paths = _paths(lane_cluster, f"rewritten-{writes}")
    with open(paths[0], "wb", buffering=0) as own:
        own.write(b"first content")
        readers = [os.open(path, os.O_RDONLY) for path in paths]
        try:
            assert [os.pread(reader, 100, 0) for reader in readers] == [b"first content"] * 2
            with open(paths[writes], "wb", buffering=0) as writer:
                assert [os.fstat(reader).st_size for reader in readers] == [0, 0]
                assert [os.pread(reader, 100, 0) for reader in readers] == [b"", b""]
                for length in (6, 4000, 100_000):
                    data = os.urandom(length)
                    os.pwrite(writer.fileno(), data, 0)
                    assert [os.pread(reader, length, 0) for reader in readers] == [data] * 2
                    assert [os.lseek(reader, 0, os.SEEK_END) for reader in readers] == [length] * 2
                os.ftruncate(writer.fileno(), 5)
                assert [os.pread(reader, 100, 0) for reader in readers] == [data[:5]] * 2
                os.posix_fallocate(writer.fileno(), 0, 10)
                assert [os.fstat(reader).st_size for reader in readers] == [10, 10]
        finally:
            for reader in readers:
                os.close(reader)
    assert [path.read_bytes() for path in paths] == [data[:5] + bytes(5)] * 2


def test_writing_by_turns(lane_cluster: LocalCluster) -> None:
    """Each sees what the other has just written, also past its own pages; a shared mapping to write is refused."""
    paths = _paths(lane_cluster, "by-turns")
    with open(paths[0], "w+b", buffering=0) as own, open(paths[1], "r+b", buffering=0) as other:
        files = [own, other]
        for turn in range(20):
            data = b"%07d\n" % turn
            os.pwrite(files[turn % 2].fileno(), data, 4092)  # over the border of a page
            assert [os.pread(file.fileno(), 8, 4092) for file in files] == [data] * 2
            assert [path.read_bytes()[4092:] for path in paths] == [data] * 2
        with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
            mmap.mmap(other.fileno(), 4096)
        os.fsync(other.fileno())


def test_no_line_is_lost_or_doubled_when_mount_processes_are_killed(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(2, settle_seconds=0.2)
    paths = _paths(cluster, "log")
    paths[0].touch()
    programs = [_start(APPENDER, path, name, 1500) for path, name in zip(paths, ("here", "there"), strict=True)]
    deadline = time.monotonic() + 40
    for number in range(6):
        node, name = cluster.nodes[number % 2], ("mount", "agent")[number // 2 % 2]
        size = paths[number % 2].stat().st_size
        while paths[number % 2].stat().st_size < size + 4000 and any(program.poll() is None for program in programs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed = node.processes.pids()[name]
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        while node.processes.pids()[name] in (None, killed):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    _end(programs)
    for path in paths:
        assert sorted(path.read_bytes().splitlines()) == _expected_lines(["here", "there"], 1500)
    assert not wait_until([paths[0]], "local", 60.0, shown=False)[0]
