"""Locks of programs on one node, in both lanes: as on the drive itself, also across a kill of the mount process.

The kernel keeps them: no lock is ever asked of the mount process.
"""

import contextlib
import errno
import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

HOLDER = """
import fcntl, os, struct, sys
file = os.open(sys.argv[1], os.O_RDWR)
kind, begin, length = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, begin, length, 0)
if kind == "flock":
    fcntl.flock(file, fcntl.LOCK_EX)
else:
    fcntl.fcntl(file, fcntl.F_SETLKW if kind == "posix" else fcntl.F_OFD_SETLKW, whole)
print("locked", flush=True)
for line in sys.stdin:
    if line == "wait for 0-9\\n":
        try:
            fcntl.fcntl(file, fcntl.F_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 10, 0))
            print("got it", flush=True)
        except OSError as error:
            print(error.errno, flush=True)
    elif line == "unlock\\n":
        os.close(file)
        print("unlocked", flush=True)
"""


class Holder:
    """Another process that takes a lock as soon as it can; `tell` has it answer a line."""

    def __init__(self, path: Path, kind: str, begin: int = 0, length: int = 0) -> None:
        command = [sys.executable, "-c", HOLDER, path, kind, begin, length]
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(lane_cluster: LocalCluster) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=lane_cluster.nodes[0].mountpoint))
    file = directory / "locked"
    file.write_bytes(bytes(100))
    yield file
    file.unlink()
    directory.rmdir()


@pytest.fixture
def hold(path: Path) -> Iterator[Callable[..., Holder]]:
    """`hold("posix", 0, 10)`: another process that has the lock."""
    holders = []

    def start(kind: str, begin: int = 0, length: int = 0, *, waits: bool = False) -> Holder:
        holders.append(Holder(path, kind, begin, length))
        if not waits:
            assert holders[-1].heard() == "locked"
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()


def _lock(kind: int, begin: int = 0, length: int = 0) -> bytes:
    return struct.pack("hhqqi4x", kind, 0, begin, length, 0)


def _conflict(path: Path, begin: int, length: int) -> tuple[int, int, int, int] | None:
    """What F_GETLK says is in the way of a write lock: its type, begin, length and process."""
    with open(path, "r+b") as file:
        kind, _, at, size, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, _lock(fcntl.F_WRLCK, begin, length)))
        return None if kind == fcntl.F_UNLCK else (kind, at, size, pid)


def _is_free(path: Path) -> bool:
    with open(path, "r+b") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _kill_mount(node: ClusterNode) -> None:
    before = node.processes.pids()["mount"]
    assert before is not None
    os.kill(before, signal.SIGKILL)
    _wait(lambda: node.processes.pids()["mount"] not in (None, before) and node.answers())


def test_flock_excludes_waits_and_ends_with_its_process(path: Path, hold: Callable[..., Holder]) -> None:
    first = hold("flock")
    assert not _is_free(path)
    second = hold("flock", waits=True)
    first.process.kill()
    assert second.heard() == "locked"
    second.tell("unlock")
    assert second.heard() == "unlocked"
    assert _is_free(path)


def test_ranges_of_bytes_who_has_them_and_that_any_close_gives_them_back(path: Path, hold: Callable[..., Holder]) -> None:
    holder = hold("posix", 10, 20)
    assert _conflict(path, 0, 10) is None
    assert _conflict(path, 29, 100) == (fcntl.F_WRLCK, 10, 20, holder.process.pid)
    with open(path, "r+b") as file, open(path, "r+b") as other:
        with pytest.raises((BlockingIOError, PermissionError)):
            fcntl.fcntl(file, fcntl.F_SETLK, _lock(fcntl.F_WRLCK, 15, 1))
        fcntl.fcntl(file, fcntl.F_SETLK, _lock(fcntl.F_WRLCK, 50, 10))
        waiting = hold("posix", 55, 1, waits=True)
        other.close()  # POSIX: any descriptor of the file
        assert waiting.heard() == "locked"
    holder.tell("unlock")
    assert holder.heard() == "unlocked"
    assert _conflict(path, 10, 20) is None


def test_locks_of_open_file_descriptions(path: Path, hold: Callable[..., Holder]) -> None:
    holder = hold("ofd", 0, 10)
    assert _conflict(path, 0, 1) == (fcntl.F_WRLCK, 0, 10, -1)
    with open(path, "r+b") as first, open(path, "r+b") as second:
        fcntl.fcntl(first, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, 20, 10))
        with pytest.raises(BlockingIOError):  # another description of the same process
            fcntl.fcntl(second, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, 20, 10))
    holder.end()
    assert _conflict(path, 0, 100) is None


def test_two_that_wait_for_each_other_are_told(path: Path, hold: Callable[..., Holder]) -> None:
    with open(path, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETLK, _lock(fcntl.F_WRLCK, 0, 10))
        holder = hold("posix", 10, 10)
        holder.tell("wait for 0-9")
        _wait(lambda: " -> " in _lock_lines(holder.process.pid))
        with pytest.raises(OSError, match="deadlock") as deadlock:
            fcntl.fcntl(file, fcntl.F_SETLKW, _lock(fcntl.F_WRLCK, 10, 10))
        assert deadlock.value.errno == errno.EDEADLK
        fcntl.fcntl(file, fcntl.F_SETLK, _lock(fcntl.F_UNLCK, 0, 10))
        assert holder.heard() == "got it"


def _lock_lines(pid: int) -> str:
    """/proc/locks, as far as it is about the process; `->` marks a lock that is waited for."""
    return "".join(line for line in Path("/proc/locks").read_text().splitlines(keepends=True) if f" {pid} " in line)


@pytest.mark.parametrize("kind", ["flock", "posix", "ofd"])
def test_a_lock_outlives_the_mount_process_and_so_does_waiting_for_it(
    lane_cluster: LocalCluster, path: Path, hold: Callable[..., Holder], kind: str
) -> None:
    holder, waiting = hold(kind), hold(kind, waits=True)
    _wait(lambda: " -> " in _lock_lines(waiting.process.pid) or kind == "ofd")
    _kill_mount(lane_cluster.nodes[0])
    if kind == "flock":
        assert not _is_free(path)
    else:
        assert _conflict(path, 0, 10) is not None
    holder.tell("unlock")
    assert holder.heard() == "unlocked"
    assert waiting.heard() == "locked"


def test_a_lease_is_refused_while_others_have_the_file_open_and_broken_by_who_opens_it(path: Path) -> None:
    with open(path, "rb") as file:
        with open(path, "r+b"), pytest.raises(BlockingIOError):
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        before = signal.signal(signal.SIGIO, lambda *_: None)
        try:
            with pytest.raises(BlockingIOError):
                os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        finally:
            signal.signal(signal.SIGIO, before)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    with open(path, "r+b"):
        pass
