"""How long a call waits that needs the mount process, when that is killed while many files are known."""

import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call

KILLS = 7
DIRECTORY_FILES = 5000
SECONDS_MAX = 300.0
"""For the files to be made and to become local, and for each new mount process."""


def restart_figures(directory: Path, count: int) -> dict[str, Any]:
    """A node alone, so that every file waits for protection and none is forgotten: its mount process is killed `KILLS` times, and
    each time a mkdir waits for the next one. The median counts."""
    cluster = LocalCluster(directory)
    try:
        cluster.up(1, ClusterSettings())
        node = cluster.nodes[0]
        for number in range(0, count, DIRECTORY_FILES):
            _make(node.mountpoint / f"{number}", min(DIRECTORY_FILES, count - number))
        _wait_until_local(node)
        seconds = [_waited(node, node.mountpoint / f"kill-{number}") for number in range(KILLS)]
    finally:
        if LocalCluster.is_one(directory):
            cluster.down(remove=True)
    return {
        "inodes": count,
        "seconds": round(statistics.median(seconds), 3),
        "runs": [round(one, 3) for one in seconds],
    }


def _make(directory: Path, count: int) -> None:
    directory.mkdir()
    for number in range(count):
        os.mknod(directory / f"{number}", 0o644)


def _wait_until_local(node: ClusterNode) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    call(node.store / "run" / "mount.sock", {"do": "settle"})
    while call(node.store / "run" / "mount.sock", {"do": "status"})["settling_files"]:
        if time.monotonic() > deadline:
            raise NotReached(f"the files did not become local in {SECONDS_MAX:.0f} s")
        time.sleep(0.2)


def _waited(node: ClusterNode, path: Path) -> float:
    """Seconds that a mkdir takes which is called as the mount process is killed."""
    mount = node.processes.pids()["mount"]
    if mount is None:
        raise NotReached(f"{node.id} has no mount process")
    os.kill(mount, signal.SIGKILL)
    started = time.monotonic()
    path.mkdir()
    seconds = time.monotonic() - started
    deadline = time.monotonic() + SECONDS_MAX
    while node.processes.pids()["mount"] in (None, mount):
        if time.monotonic() > deadline:
            raise NotReached(f"{node.id} has no new mount process")
        time.sleep(0.05)
    return seconds
