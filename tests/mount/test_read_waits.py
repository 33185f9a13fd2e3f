"""Reads that meet a process that is just being restarted, here or at the file's home: they wait for it, and only so long.

The supervisor is stopped (SIGSTOP) while its agent is dead, so that the agent stays away for exactly as long as the test wants.
"""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.remote_content import READ_WAIT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.mount]

CONTENT = random.Random(3).randbytes(40 << 20)
FAR = 36 << 20
"""Beyond what the kernel reads ahead of the beginning."""

STILL_WAITING_SECONDS = 1.0
"""For how long a read is seen to wait before what it waits for comes back."""


class Read:
    """A read in a thread of its own: `result` are the bytes, or the errno."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        self.result: bytes | int | None = None
        self.seconds = 0.0
        self._read = read
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self.result = self._read()
        except OSError as error:
            self.result = error.errno
        self.seconds = time.monotonic() - started

    def waits(self) -> bool:
        self._thread.join(STILL_WAITING_SECONDS)
        return self._thread.is_alive()

    def ended(self) -> bytes | int | None:
        self._thread.join(2 * READ_WAIT_SECONDS + 20)
        assert not self._thread.is_alive()
        return self.result


@contextmanager
def agent_away(node: ClusterNode) -> Iterator[None]:
    """Inside, the node has no agent; afterwards its supervisor starts another."""
    pids = node.processes.pids()
    supervisor, agent = pids["supervisor"], pids["agent"]
    assert supervisor is not None
    assert agent is not None
    os.kill(supervisor, signal.SIGSTOP)
    try:
        os.kill(agent, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _runs(agent):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield
    finally:
        os.kill(supervisor, signal.SIGCONT)


def _runs(pid: int) -> bool:
    """Whether the process is more than a zombie, which a stopped parent leaves."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@contextmanager
def opened(path: Any) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_read_waits_for_an_agent_that_is_restarted(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    home, reader = cluster.nodes[0], cluster.nodes[1]
    (home.mountpoint / "file").write_bytes(CONTENT)
    assert not wait_until([home.mountpoint / "file"], "protected", 60.0, shown=False)[0]
    with opened(reader.mountpoint / "file") as file:
        assert os.pread(file, 4096, 0) == CONTENT[:4096]
        with agent_away(reader):
            read = Read(lambda: os.pread(file, 4096, FAR))
            assert read.waits()
        assert read.ended() == CONTENT[FAR : FAR + 4096]
        assert read.seconds < READ_WAIT_SECONDS


def test_a_read_waits_for_a_home_whose_agent_is_restarted(start_cluster: Any) -> None:
    """What is being written is at its home only."""
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    home, reader = cluster.nodes[0], cluster.nodes[1]
    with open(home.mountpoint / "file", "wb", buffering=0) as writer:
        writer.write(CONTENT)
        with opened(reader.mountpoint / "file") as file:
            assert os.pread(file, 4096, 0) == CONTENT[:4096]
            with agent_away(home):
                read = Read(lambda: os.pread(file, 4096, FAR))
                assert read.waits()
            assert read.ended() == CONTENT[FAR : FAR + 4096]


def test_a_read_waits_for_a_home_that_is_started_again(start_cluster: Any) -> None:
    """All of its processes: what was closed there, and not protected yet, comes back with it."""
    cluster: LocalCluster = start_cluster(3, settle_seconds=30.0)
    home, reader = cluster.nodes[0], cluster.nodes[1]
    (home.mountpoint / "file").write_bytes(CONTENT)
    with opened(reader.mountpoint / "file") as file:
        assert os.pread(file, 4096, 0) == CONTENT[:4096]
        cluster.kill(0)
        read = Read(lambda: os.pread(file, 4096, FAR))
        assert read.waits()
        cluster.revive(0)
        assert read.ended() == CONTENT[FAR : FAR + 4096]


def test_a_read_of_what_stays_away_ends_with_an_error(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=30.0)
    home, reader = cluster.nodes[0], cluster.nodes[1]
    (home.mountpoint / "file").write_bytes(CONTENT)
    with opened(reader.mountpoint / "file") as file:
        assert os.pread(file, 4096, 0) == CONTENT[:4096]
        cluster.kill(0)
        read = Read(lambda: os.pread(file, 4096, FAR))
        assert read.ended() == errno.EIO
        assert READ_WAIT_SECONDS - 1 < read.seconds < READ_WAIT_SECONDS + 10
    assert "content_unreachable" in (reader.log / "mount.log").read_text()
