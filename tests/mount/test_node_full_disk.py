"""A store's disk full to the last block: programs are told so, nothing that was there suffers, deleting makes room again."""

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.reserve import room_at
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(60)]

DISK_MB = 64


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


@pytest.fixture
def small_disk_node(scratch: Path, make_drive: Any) -> ClusterNode:
    """A node whose store lies on a file system of its own of 64 MB."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1, ClusterSettings(settle_seconds=0.05))
    node = cluster.nodes[0]
    make_drive(DISK_MB, at=node.store)
    cluster.up(None, ClusterSettings())
    return node


def _fill_with_files(mountpoint: Path, size_bytes: int, count_max: int) -> tuple[list[Path], list[str]]:
    """New files of this size until thirty in a row failed; the whole ones, and the error numbers."""
    whole: list[Path] = []
    errors: list[str] = []
    failed = 0
    for number in range(count_max):
        path = mountpoint / f"{size_bytes}-{number}"
        try:
            path.write_bytes(b"%d" % (number % 10) * size_bytes)
            whole.append(path)
            failed = 0
        except OSError as error:
            errors.append(errno.errorcode[error.errno or 0])
            failed += 1
            if failed == 30:
                break
    return whole, errors


def test_a_disk_full_to_the_last_block_tells_writers_so_and_deleting_makes_room(small_disk_node: ClusterNode) -> None:
    """Not one large file, which leaves room for names and records, but small ones until nothing at all fits."""
    node = small_disk_node
    before = random.Random(3).randbytes(5 << 20)
    (node.mountpoint / "before").write_bytes(before)
    large, errors = _fill_with_files(node.mountpoint, 4 << 20, 40)
    small, more = _fill_with_files(node.mountpoint, 4096, 3000)
    errors += more
    assert set(errors) == {"ENOSPC"}
    assert (node.mountpoint / "before").read_bytes() == before
    for path in (*large, *small[:200]):
        assert path.read_bytes() == path.name.split("-")[1][-1].encode() * int(path.name.split("-")[0]), path
    assert node.answers()

    for path in sorted(node.mountpoint.iterdir()):
        if path.name != "before":
            path.unlink()
    assert [path.name for path in node.mountpoint.iterdir()] == ["before"]
    _wait(lambda: room_at(node.mountpoint).free_bytes > 20 << 20)
    (node.mountpoint / "after").write_bytes(before)
    ino = (node.mountpoint / "after").stat().st_ino
    socket = node.store / "run" / "mount.sock"
    _wait(lambda: bool(call(socket, {"do": "state", "inos": [ino]})["states"][ino]["state"] == "local"))
    assert (node.mountpoint / "after").read_bytes() == before
    assert (node.mountpoint / "before").read_bytes() == before


def test_a_node_on_a_full_disk_starts_again(small_disk_node: ClusterNode, scratch: Path) -> None:
    node = small_disk_node
    (node.mountpoint / "before").write_bytes(b"content")
    _fill_with_files(node.mountpoint, 1 << 20, 200)
    _fill_with_files(node.mountpoint, 4096, 2000)
    cluster = LocalCluster(scratch / "cluster")
    cluster.kill(0)
    cluster.revive(0)
    assert (node.mountpoint / "before").read_bytes() == b"content"
    for path in sorted(node.mountpoint.iterdir()):
        if path.name != "before":
            path.unlink()
    _wait(lambda: room_at(node.mountpoint).free_bytes > 20 << 20)
    (node.mountpoint / "after").write_bytes(b"after")
