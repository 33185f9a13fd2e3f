"""A cluster whose catalog is on etcd: one namespace on all nodes; what happens while etcd is away, and when it is another one."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount]

Start = Callable[..., LocalCluster]


@pytest.fixture
def start_on_etcd(start_cluster: Start, etcd: Any) -> Start:
    """As `start_cluster`, 2+2, with a catalog of its own in the run's etcd, or in `member`."""

    def start(nodes: int = 4, *, member: Any = None, **settings: object) -> LocalCluster:
        place = (member or etcd).url.replace("http://", "etcd://")
        catalog = f"{place}/test-{os.urandom(4).hex()}"
        return start_cluster(nodes, catalog=catalog, data_shards=2, parity_shards=2, settle_seconds=0.1, **settings)

    return start


def content(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def protect(path: Path) -> None:
    behind, _, _ = wait_until([path], "protected", 60.0, shown=False)
    assert not behind


@contextmanager
def stopped(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_file_outlives_its_writer_and_one_more_node(start_on_etcd: Start) -> None:
    cluster = start_on_etcd()
    mounts = [node.mountpoint for node in cluster.nodes]
    big, small = content((8 << 20) + 7, 1), content(1000, 2)
    (mounts[0] / "run").mkdir()
    (mounts[0] / "run/big").write_bytes(big)
    assert (mounts[1] / "run/big").read_bytes() == big  # closed here, open there: through its home, not protected yet
    (mounts[1] / "run/small").write_bytes(small)
    os.rename(mounts[1] / "run", mounts[1] / "checkpoint-1")
    assert os.listdir(mounts[2]) == ["checkpoint-1"]
    protect(mounts[2] / "checkpoint-1")
    cluster.kill(0)
    cluster.kill(1)
    assert (mounts[2] / "checkpoint-1/big").read_bytes() == big
    assert (mounts[3] / "checkpoint-1/small").read_bytes() == small
    cluster.up(None, ClusterSettings())
    assert (mounts[0] / "checkpoint-1/big").read_bytes() == big


RANK = """
import os, sys
mount, rank = sys.argv[1:]
directory = f"{mount}/step-1/shards"
os.makedirs(directory, exist_ok=True)
with open(f"{directory}/.{rank}.tmp", "wb") as file:
    file.write(rank.encode() * 1000)
os.rename(f"{directory}/.{rank}.tmp", f"{directory}/{rank}")
print(len(os.listdir(directory)))
"""


def test_ranks_on_all_nodes_save_into_one_directory(start_on_etcd: Start) -> None:
    """makedirs with exist_ok at once everywhere; after all have ended, no name is missing or stale on any node."""
    cluster = start_on_etcd()
    mounts = [node.mountpoint for node in cluster.nodes]
    ranks = [f"rank-{number}" for number in range(16)]
    running = [
        subprocess.Popen([sys.executable, "-c", RANK, mounts[number % len(mounts)], rank], stdout=subprocess.PIPE)
        for number, rank in enumerate(ranks)
    ]
    for process in running:
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
    for mount in mounts:
        assert sorted(os.listdir(mount / "step-1/shards")) == sorted(ranks)
        for rank in ranks[::5]:
            assert (mount / "step-1/shards" / rank).read_bytes() == rank.encode() * 1000


def test_programs_on_several_nodes_write_one_file(start_on_etcd: Start) -> None:
    """They make it, append to it and sync it at once; then one rewrites it while the others have it open."""
    cluster = start_on_etcd(3)
    paths = [node.mountpoint / "log" for node in cluster.nodes]
    failures: list[BaseException] = []

    def append(number: int) -> None:
        try:
            file = os.open(paths[number % 3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                for line in range(60):
                    os.write(file, b"%d:%d\n" % (number, line))
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    expected = sorted(b"%d:%d" % (number, line) for number in range(6) for line in range(60))
    for path in paths:
        assert sorted(path.read_bytes().splitlines()) == expected
    protect(paths[2])
    readers = [os.open(path, os.O_RDONLY) for path in paths]
    try:
        for number, path in enumerate(paths):
            data = content(10_000 + number, number)
            path.write_bytes(data)
            assert [other.read_bytes() for other in paths] == [data] * 3
    finally:
        for reader in readers:
            os.close(reader)


def test_open_files_go_on_while_etcd_is_away(start_on_etcd: Start, make_etcd: Callable[[], Any]) -> None:
    member = make_etcd()
    cluster = start_on_etcd(3, member=member)
    here, there = cluster.nodes[0].mountpoint, cluster.nodes[1].mountpoint
    data = content(4 << 20, 3)
    made = threading.Event()

    def make() -> None:
        os.mkdir(here / "waited")
        made.set()

    thread = threading.Thread(target=make, daemon=True)
    with open(here / "log", "wb") as file:
        file.write(data)
        with stopped(member.process):
            started = time.monotonic()
            file.write(data)
            file.flush()
            thread.start()
            descriptor = os.dup(file.fileno())
            os.close(descriptor)  # FLUSH
            file.close()
            assert time.monotonic() - started < 5
            assert not made.is_set()
    assert made.wait(60)
    assert (there / "waited").is_dir()
    protect(here / "log")
    assert (there / "log").read_bytes() == data * 2


def test_an_agent_that_hangs_is_started_again_before_its_node_is_taken_for_away(start_on_etcd: Start) -> None:
    cluster = start_on_etcd(4)
    node = cluster.nodes[0]
    agent = node.processes.pids()["agent"]
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    saved = 0

    def is_another() -> bool:
        nonlocal saved
        (node.mountpoint / f"{saved}.tmp").write_bytes(b"%d" % saved)
        os.rename(node.mountpoint / f"{saved}.tmp", node.mountpoint / f"{saved}")
        saved += 1
        return node.processes.pids()["agent"] not in (None, agent)

    wait_for(is_another, "another agent", 60)
    protect(node.mountpoint)
    supervisor = (node.log / "supervisor.log").read_text()
    assert "agent_hangs" in supervisor
    assert "session_ended" not in supervisor
    assert len(os.listdir(cluster.nodes[1].mountpoint)) == saved


def test_an_etcd_that_stays_away_is_an_error_and_comes_back(start_on_etcd: Start, make_etcd: Callable[[], Any]) -> None:
    member = make_etcd()
    cluster = start_on_etcd(1, member=member)
    (node,) = cluster.nodes
    (node.mountpoint / "a").write_bytes(b"a")
    cluster.down(remove=False)
    node.config.write_text(node.config.read_text() + "\n[etcd]\nwait_seconds = 1.0\n")
    cluster.up(None, ClusterSettings())
    member.kill()
    with pytest.raises(OSError, match="Input/output error") as caught:
        (node.mountpoint / "b").write_bytes(b"b")
    assert caught.value.errno == errno.EIO
    log = (node.log / "mount.log").read_text()
    assert "did not answer for 1 s" in log
    member.start()
    assert (node.mountpoint / "a").read_bytes() == b"a"
    (node.mountpoint / "b").write_bytes(b"b")
    assert (node.mountpoint / "b").read_bytes() == b"b"


def test_an_etcd_that_lost_its_data_is_refused_at_the_start(start_on_etcd: Start, make_etcd: Callable[[], Any]) -> None:
    member = make_etcd()
    cluster = start_on_etcd(1, member=member)
    (node,) = cluster.nodes
    for number in range(20):
        (node.mountpoint / f"{number}").write_bytes(b"x")
    cluster.down(remove=False)
    member.kill()
    (member.directory / "data").rename(member.directory / "before")
    member.start()
    with pytest.raises(Exception, match="made anew, or set back"):
        cluster.up(None, ClusterSettings())
    member.kill()
    (member.directory / "data").rename(member.directory / "other")
    (member.directory / "before").rename(member.directory / "data")
    member.start()
    cluster.up(None, ClusterSettings())
    assert len(os.listdir(node.mountpoint)) == 20


NAMES = """
import os, sys, time
directory, label, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
end, count = time.monotonic() + seconds, 0
while time.monotonic() < end:
    path = f"{directory}/{label}-{count}"
    with open(path, "wb") as file:
        file.write(path.encode())
    os.rename(path, path + ".done")
    with open(path + ".done", "rb") as file:
        assert file.read() == path.encode()
    os.unlink(path + ".done")
    count += 1
print(count)
"""


def test_the_mount_process_may_be_killed_while_nodes_change_names_in_one_directory(start_on_etcd: Start) -> None:
    cluster = start_on_etcd(2)
    (cluster.nodes[0].mountpoint / "both").mkdir()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", NAMES, node.mountpoint / "both", f"{number}-{label}", "12"], stdout=subprocess.PIPE
        )
        for number, node in enumerate(cluster.nodes)
        for label in ("a", "b")
    ]
    processes = cluster.nodes[0].processes
    killed = 0
    deadline = time.monotonic() + 60
    while any(process.poll() is None for process in running) and killed < 5:
        assert time.monotonic() < deadline, "the mount did not come back"
        pid = processes.pids()["mount"]
        if pid is not None and cluster.nodes[0].answers():
            os.kill(pid, signal.SIGKILL)
            killed += 1
        time.sleep(0.2)  # between two kills, so that work is amid them
    for process in running:
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert int(process.stdout.read()) > 0
        process.stdout.close()
    assert killed >= 2
    assert os.listdir(cluster.nodes[1].mountpoint / "both") == []
