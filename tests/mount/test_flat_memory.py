"""The memory of a node's processes over the life of a mount: it does not grow with the files that come and go, or stay.

A long run, with a line a tenth of it:
`CKPTFS_FLAT_MEMORY_FILES=1000000 scripts/test tests/mount/test_flat_memory.py -s`. A short run shows gross faults only:
caches are filled by some ten thousand files. What a file leaves in the mount process `tests/fs/test_flat_memory.py` tells.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call

FILES = int(os.environ.get("CKPTFS_FLAT_MEMORY_FILES", "300"))

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120 + FILES / 20)]
ROUNDS = 10
WARM_UP_FILES = min(2 * FILES, 20_000)
"""Until the caches of records and of database pages are full, or as full as a short run makes them."""

BYTES_PER_FILE_MAX = 50
SLACK_BYTES = 24 << 20
"""What the caches take: 8 MiB of the catalog's pages for each connection to it, 2 MiB of those of `mount.db`, 20,000 records."""

PROTECTED_SECONDS_MAX = 60 + FILES / 100

LIVE_FILES = 500
IN_DIRECTORY = 1000
CONTENT = b"x" * 1024


def path_of(directory: Path, number: int) -> Path:
    return directory / str(number // IN_DIRECTORY) / str(number)


def keep(directory: Path, numbers: range) -> None:
    for number in numbers:
        path = path_of(directory, number)
        path.parent.mkdir(exist_ok=True)
        with open(path, "xb", buffering=0) as file:
            file.write(CONTENT)


def rotate(directory: Path, numbers: range) -> None:
    """Each file lives until so many others were made."""
    for number in numbers:
        keep(directory, range(number, number + 1))
        if number >= LIVE_FILES:
            old = path_of(directory, number - LIVE_FILES)
            old.unlink()
            if (number - LIVE_FILES) % IN_DIRECTORY == IN_DIRECTORY - 1:
                old.parent.rmdir()


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def sizes_at_rest(node: ClusterNode) -> dict[str, int]:
    """The processes' own memory in bytes, when everything is protected."""
    deadline = time.monotonic() + PROTECTED_SECONDS_MAX
    while True:
        status = call(node.store / "run" / "mount.sock", {"do": "status"})
        if not status["settling_files"] and not status["unprotected_files"]:
            return {role: anonymous_bytes(pid or 0) for role, pid in node.processes.pids().items()}
        assert time.monotonic() < deadline, f"not protected in time: {status}"
        time.sleep(0.1)


@pytest.mark.parametrize("use", [rotate, keep])
def test_flat_memory(start_cluster: Any, use: Callable[[Path, range], None]) -> None:
    cluster: LocalCluster = start_cluster(2, data_shards=1, parity_shards=1, settle_seconds=0.1)
    node = cluster.nodes[0]
    directory = node.mountpoint / "files"
    directory.mkdir()
    began = time.monotonic()
    use(directory, range(WARM_UP_FILES))
    first = sizes_at_rest(node)
    done = WARM_UP_FILES
    for _ in range(ROUNDS):
        use(directory, range(done, done + FILES // ROUNDS))
        done += FILES // ROUNDS
        now = sizes_at_rest(node) if FILES > 20_000 else {}
        print(
            f"{use.__name__} files={done} seconds={time.monotonic() - began:.0f}", *(f"{r}={s >> 10}KiB" for r, s in now.items())
        )
    last = sizes_at_rest(node)
    for role, size in last.items():
        grown = size - first[role]
        assert grown < SLACK_BYTES + BYTES_PER_FILE_MAX * FILES, f"{role} grew by {grown >> 10} KiB over {FILES} files"
