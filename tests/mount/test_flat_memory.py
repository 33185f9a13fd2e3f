"""The memory of a node's processes over the life of a mount: it does not grow with the files that come and go, or stay.

A long run: `CKPTFS_FLAT_MEMORY_FILES=1000000 scripts/test tests/mount/test_flat_memory.py --timeout 3600`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(240)]

FILES = int(os.environ.get("CKPTFS_FLAT_MEMORY_FILES", "20000"))
WARM_UP_FILES = 5_000
"""Until the caches of records and of database pages are full."""

BYTES_PER_FILE_MAX = 100
SLACK_BYTES = 8 << 20
"""What the allocator keeps, or not, from one look to the next."""

LIVE_FILES = 500
CONTENT = b"x" * 1024


def rotate(directory: Path, count: int) -> None:
    """Make so many files, each of which lives until so many others were made."""
    directory.mkdir()
    for number in range(count):
        with open(directory / str(number), "xb", buffering=0) as file:
            file.write(CONTENT)
        if number >= LIVE_FILES:
            (directory / str(number - LIVE_FILES)).unlink()


def keep(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(count):
        if number % 1000 == 0:
            (directory / str(number // 1000)).mkdir()
        with open(directory / str(number // 1000) / str(number), "xb", buffering=0) as file:
            file.write(CONTENT)


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def settled_sizes(node: ClusterNode) -> dict[str, int]:
    """The processes' own memory when nothing is under way, in bytes."""
    deadline = time.monotonic() + 60
    while call(node.store / "run" / "mount.sock", {"do": "status"})["settling_files"]:
        assert time.monotonic() < deadline, "the files don't become local"
        time.sleep(0.1)
    return {role: anonymous_bytes(pid or 0) for role, pid in node.processes.pids().items()}


@pytest.mark.parametrize("use", [rotate, keep])
def test_memory_is_flat(start_cluster: Any, use: Callable[[Path, int], None]) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.2)
    node = cluster.nodes[0]
    use(node.mountpoint / "warm-up", WARM_UP_FILES)
    before = settled_sizes(node)
    use(node.mountpoint / "files", FILES)
    after = settled_sizes(node)
    for role, size in after.items():
        grown = size - before[role]
        assert grown < SLACK_BYTES + BYTES_PER_FILE_MAX * FILES, f"{role} grew by {grown >> 10} KiB over {FILES} files"
