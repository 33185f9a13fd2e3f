"""Processes of real nodes that hang (SIGSTOP), are killed in the middle, or whose store is full: writers and readers go on."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

LARGE = 24 << 20


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _ckptfs(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def _stopped(*processes: tuple[ClusterNode, str]) -> Iterator[None]:
    """These processes of these nodes hang meanwhile; their supervisors too, who would start other agents."""
    stopped = [(node, "supervisor") for node, _ in processes] + list(processes)
    pids = [node.processes.pids()[role] for node, role in stopped]
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            assert pid is not None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _agents(nodes: Sequence[ClusterNode]) -> list[tuple[ClusterNode, str]]:
    return [(node, "agent") for node in nodes]


def _flushed(path: Path, seconds: int = 60) -> None:
    code, _, error = _ckptfs("flush", path, "--timeout", seconds)
    assert code == 0, error


def _has_partial(node: ClusterNode) -> bool:
    return any((node.store / "shards").rglob("*.partial"))


def _written(path: Path, size: int = LARGE) -> bytes:
    """Save a file; no write waits for any other node."""
    content = os.urandom(size)
    started = time.monotonic()
    path.write_bytes(content)
    assert time.monotonic() - started < 10
    return content


def test_a_peer_that_hangs_before_a_save_holds_up_neither_it_nor_its_protection(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    path = cluster.nodes[0].mountpoint / "file"
    with _stopped(*_agents(cluster.nodes[3:4])):
        content = _written(path)
        _flushed(path)
        assert (cluster.nodes[5].mountpoint / "file").read_bytes() == content
    _wait(lambda: _ckptfs("verify", path)[0] == 0)
    assert (cluster.nodes[3].mountpoint / "file").read_bytes() == content


def test_a_peer_that_hangs_in_the_middle_of_a_shard_is_replaced(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    path = cluster.nodes[0].mountpoint / "file"
    content = _written(path, 8 * LARGE)
    _wait(lambda: _has_partial(cluster.nodes[3]))
    with _stopped(*_agents(cluster.nodes[3:4])):
        _flushed(path, 90)
        assert (cluster.nodes[4].mountpoint / "file").read_bytes() == content
    _wait(lambda: _ckptfs("verify", path)[0] == 0)


def test_a_peer_killed_in_the_middle_of_a_shard_takes_it_up_again(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    path = cluster.nodes[0].mountpoint / "file"
    content = _written(path, 8 * LARGE)
    _wait(lambda: _has_partial(cluster.nodes[2]))
    agent = cluster.nodes[2].processes.pids()["agent"]
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    _flushed(path, 90)
    assert _ckptfs("verify", path)[0] == 0
    assert (cluster.nodes[1].mountpoint / "file").read_bytes() == content


def test_holders_that_hang_while_their_shards_are_read(start_cluster: Any) -> None:
    """Two of six, the most the code can do without; the reader has part of the file already."""
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    content = _written(cluster.nodes[0].mountpoint / "file", 8 * LARGE)
    _flushed(cluster.nodes[0].mountpoint / "file")
    with open(cluster.nodes[5].mountpoint / "file", "rb", buffering=0) as file:
        assert file.read(1 << 20) == content[: 1 << 20]
        with _stopped(*_agents(cluster.nodes[:2])):
            rest = bytearray()
            longest = 0.0
            while True:
                started = time.monotonic()
                part = file.read(1 << 20)
                longest = max(longest, time.monotonic() - started)
                if not part:
                    break
                rest += part
            assert rest == content[1 << 20 :]
            assert longest < 15


def test_a_home_that_hangs_is_an_error_in_bounded_time_and_no_older_content(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    path = cluster.nodes[0].mountpoint / "file"
    path.write_bytes(b"old" * 100_000)
    _flushed(path)
    elsewhere = cluster.nodes[1].mountpoint / "file"
    with _stopped(*_agents(cluster.nodes)):
        path.write_bytes(b"new" * 100_000)  # what its home does needs no agent
        assert path.read_bytes() == b"new" * 100_000
    with _stopped(*_agents(cluster.nodes[:1])):
        path.write_bytes(b"newest" * 100_000)
        started = time.monotonic()
        with pytest.raises(OSError, match="Input/output") as caught:
            elsewhere.read_bytes()
        assert caught.value.errno == errno.EIO
        assert time.monotonic() - started < 60
        assert "content_unreachable" in (cluster.nodes[1].log / "mount.log").read_text()
    assert elsewhere.read_bytes() == b"newest" * 100_000
    _flushed(path)


def test_an_own_agent_that_hangs_holds_up_nothing_local(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    node = cluster.nodes[0]
    (cluster.nodes[1].mountpoint / "elsewhere").write_bytes(b"e" * 200_000)
    _flushed(cluster.nodes[1].mountpoint)
    with _stopped((node, "agent")):
        for number in range(20):
            (node.mountpoint / f"file-{number}").write_bytes(b"%d" % number * 1000)
        os.rename(node.mountpoint / "file-0", node.mountpoint / "renamed")
        os.unlink(node.mountpoint / "file-1")
        assert (node.mountpoint / "renamed").read_bytes() == b"0" * 1000
        code, _, error = _ckptfs("flush", node.mountpoint, "--to", "local", "--timeout", 60)
        assert code == 0, error
        code, out, _ = _ckptfs("status", node.mountpoint)
        assert code == 0
        assert "the agent process" in out
        assert "doesn't answer" in out
        started = time.monotonic()
        with pytest.raises(OSError, match="Input/output") as raised:
            (node.mountpoint / "elsewhere").read_bytes()
        assert raised.value.errno == errno.EIO
        assert time.monotonic() - started < 40
        code, _, error = _ckptfs("verify", node.mountpoint)
        assert code == 3, error
    _flushed(node.mountpoint)
    assert (node.mountpoint / "elsewhere").read_bytes() == b"e" * 200_000


def test_a_mount_process_that_hangs_is_shown_and_can_be_taken_away(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    (node.mountpoint / "file").write_bytes(b"content")
    with subprocess.Popen([sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", node.mountpoint]) as done:
        assert done.wait(20) == 0
    with _stopped((node, "mount")):
        code, _, error = _ckptfs("status", node.mountpoint)
        assert code == 3
        assert error == "ckptfs: node-0 does not answer\n"
        code, _, error = _ckptfs("status", node.mountpoint / "file")
        assert code == 3
        assert "the mount process of node-0 does not answer" in error
        with subprocess.Popen(
            [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", node.mountpoint], stderr=subprocess.DEVNULL
        ) as waits:
            code, _, error = _ckptfs("umount", "--force", node.mountpoint)
            assert code == 0, error
            assert waits.wait(20) != 0
        assert mounts_at(node.mountpoint) == []
        assert node.processes.living() == []
    cluster.revive(0)
    assert (node.mountpoint / "file").read_bytes() == b"content"


@pytest.fixture
def cluster_with_a_full_disk(scratch: Path) -> Iterator[LocalCluster]:
    """Six nodes, of which node 3 has a drive of its own, full but for its reserve."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(6, ClusterSettings(settle_seconds=0.1))
    node = cluster.nodes[3]
    with open(node.config, "a") as file:
        file.write("\n[space]\nreserve_fraction = 0.8\n")
    node.store.mkdir()
    image = scratch / "disk.img"
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, node.store], check=True)
    try:
        (node.store / "log").mkdir()
        (node.store / "log" / "ballast").write_bytes(bytes(16 << 20))
        cluster.up(None, ClusterSettings())
        yield cluster
    finally:
        cluster.down(remove=False)
        subprocess.run(["umount", node.store], check=True)


def test_a_full_peer_is_passed_over(cluster_with_a_full_disk: LocalCluster) -> None:
    cluster = cluster_with_a_full_disk
    answer = call(cluster.nodes[0].store / "run" / "agent.sock", {"do": "status", "fresh": True})
    assert {store["node"]: store["free_bytes"] for store in answer["stores"]}["node-3"] == 0
    contents = {"large": _written(cluster.nodes[0].mountpoint / "large"), "small": b"small"}
    (cluster.nodes[0].mountpoint / "small").write_bytes(b"small")
    _flushed(cluster.nodes[0].mountpoint)
    assert [path for path in (cluster.nodes[3].store / "shards").rglob("*") if path.is_file()] == []
    for node in cluster.nodes:
        for name, content in contents.items():
            assert (node.mountpoint / name).read_bytes() == content
