"""A node in little memory: it is slower, or its processes are killed for it; what programs see is right, and all of it."""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(32 * MIB)
MEMORY_BYTES = 130 * MIB
OWN_BYTES_MAX = 150 * MIB
"""Of the three processes of a node, without what the page cache has for them."""


def protect(*paths: Path) -> None:
    behind, _, _ = wait_until(list(paths), "protected", 60.0, shown=False)
    assert not behind


class MemoryGroup:
    """A cgroup inside the one this process is in."""

    def __init__(self, path: Path, limit: Path) -> None:
        self.path = path
        self._limit = limit

    def set_limit(self, size_bytes: int) -> None:
        """Raises `OSError` where the kernel can't free as much."""
        self._limit.write_text(str(size_bytes))

    def leave_no_room(self) -> None:
        """Set the limit to what they have now and can't give back."""
        with contextlib.suppress(OSError):
            for mebibytes in range(256, 1, -1):
                self.set_limit(mebibytes * MIB)

    def hold(self, node: ClusterNode) -> None:
        """The node's supervisor, without the memory it has, and the others anew, with theirs."""
        before = node.processes.pids()
        (self.path / "cgroup.procs").write_text(str(before["supervisor"]))
        for role in ("mount", "agent"):
            os.kill(before[role] or 0, 9)
        wait_for(
            lambda: all(pid and (pid != before[role] or role == "supervisor") for role, pid in node.processes.pids().items()),
            "the processes in the group",
        )
        (node.mountpoint / "group").mkdir()  # the mount answers

    def kills(self) -> int:
        """How many processes the kernel has killed for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                fields = (line.split() for line in (self.path / name).read_text().splitlines())
                return next(int(value) for key, value in fields if key == "oom_kill")
        raise AssertionError("no count of kills")


def made_group() -> MemoryGroup | None:
    """None where this machine lets nobody make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        base, limit = {
            "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            "": ("/sys/fs/cgroup", "memory.max"),
        }.get(controllers, ("", ""))
        path = Path(f"{base}{own}", f"ckptfs-test-{os.getpid()}")
        if not base or not (path.parent / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            path.mkdir()
            if os.access(path / limit, os.W_OK):
                return MemoryGroup(path, path / limit)
            path.rmdir()
    return None


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """Its processes end with it."""
    made = made_group()
    if made is None:
        pytest.skip("no cgroup with a memory limit can be made inside this one")
    yield made
    procs = made.path / "cgroup.procs"
    deadline = time.monotonic() + 20
    while pids := procs.read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    made.path.rmdir()


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_a_node_in_little_memory_saves_protects_and_reads_more_than_it_has(start_cluster: Any, group: MemoryGroup) -> None:
    cluster: LocalCluster = start_cluster(3, data_shards=2, parity_shards=1, settle_seconds=0.1)
    node, other = cluster.nodes[:2]
    group.set_limit(MEMORY_BYTES)
    group.hold(node)
    for number in range(4):
        (node.mountpoint / f"ours-{number}").write_bytes(CONTENT)
        (other.mountpoint / f"theirs-{number}").write_bytes(CONTENT)
    protect(node.mountpoint)
    for number in range(4):
        assert (other.mountpoint / f"ours-{number}").read_bytes() == CONTENT
        assert (node.mountpoint / f"theirs-{number}").read_bytes() == CONTENT
    assert group.kills() == 0
    pids = node.processes.pids()
    sizes = {role: anonymous_bytes(pid or 0) for role, pid in pids.items()}
    assert sum(sizes.values()) < OWN_BYTES_MAX, sizes
    scores = {role: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for role, pid in pids.items()}
    assert scores["agent"] > scores["mount"] > scores["supervisor"]


def test_a_node_whose_processes_are_killed_for_memory_goes_on_and_says_why(start_cluster: Any, group: MemoryGroup) -> None:
    cluster: LocalCluster = start_cluster(2, data_shards=1, parity_shards=1, settle_seconds=0.1)
    node, other = cluster.nodes
    supervisor = node.processes.pids()["supervisor"]
    group.hold(node)
    with open(node.mountpoint / "held", "wb", buffering=0) as file:
        file.write(CONTENT)
        group.leave_no_room()
        for number in range(4):
            (node.mountpoint / f"ours-{number}").write_bytes(CONTENT)
            (other.mountpoint / f"theirs-{number}").write_bytes(CONTENT)
        wait_for(lambda: group.kills() > 0, "a process that is killed for memory")
        file.write(CONTENT)
        group.set_limit(1 << 40)
    saved = [path for path in node.mountpoint.iterdir() if path.is_file()]
    assert len(saved) == 9
    assert (node.mountpoint / "held").read_bytes() == CONTENT * 2
    protect(node.mountpoint)
    for path in saved:
        expected = CONTENT * 2 if path.name == "held" else CONTENT
        assert (other.mountpoint / path.name).read_bytes() == expected
    assert node.processes.pids()["supervisor"] == supervisor
    assert "killed_for_memory" in (node.log / "supervisor.log").read_text()
