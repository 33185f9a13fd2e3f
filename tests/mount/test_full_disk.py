"""The store's disk full in the middle of a save: the writer is told, what was there stays, the mount lives on."""

import io
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

DISK_MB = 96


@pytest.fixture
def small_disk_cluster(scratch: Path, make_drive: Any) -> LocalCluster:
    """Three nodes; the store of node 0 lies on a file system of its own of 96 MB."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(3, ClusterSettings(settle_seconds=0.1))
    make_drive(DISK_MB, at=cluster.nodes[0].store)
    cluster.up(None, ClusterSettings())
    return cluster


def _fill(file: io.FileIO) -> None:
    """Write until the disk is full; a short write is what comes before the error."""
    for _ in range(3 * DISK_MB):
        file.write(bytes(1 << 20))


def _free_bytes(path: Path) -> int:
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def test_a_full_disk_reaches_the_writer_and_nobody_else(small_disk_cluster: LocalCluster) -> None:
    mountpoint = small_disk_cluster.nodes[0].mountpoint
    before = random.Random(5).randbytes(10 << 20)
    (mountpoint / "before").write_bytes(before)
    with open(mountpoint / "too-big", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        _fill(file)
    assert (mountpoint / "before").read_bytes() == before
    assert _free_bytes(mountpoint) < 4 << 20

    (mountpoint / "too-big").unlink()
    deadline = time.monotonic() + 10
    while _free_bytes(mountpoint) < len(before) + (1 << 20):
        assert time.monotonic() < deadline, "the deleted file's space did not come back"
        time.sleep(0.02)
    (mountpoint / "after").write_bytes(before)
    assert (mountpoint / "after").read_bytes() == before
    assert small_disk_cluster.nodes[0].answers()
    assert sorted(os.listdir(small_disk_cluster.nodes[1].mountpoint)) == ["after", "before"]
