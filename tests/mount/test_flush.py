"""`flush` waits for the work only, whichever node has the bytes."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

SETTLE_SECONDS = 60.0


@pytest.fixture
def cluster(start_cluster: Any) -> LocalCluster:
    """Nothing settles by itself while a test runs."""
    made: LocalCluster = start_cluster(3, settle_seconds=SETTLE_SECONDS)
    return made


def _flush(path: Path) -> float:
    """How long it took."""
    started = time.monotonic()
    behind, _, _ = wait_until([path], "protected", SETTLE_SECONDS / 2, shown=False)
    assert behind == []
    return time.monotonic() - started


@pytest.mark.parametrize("number", [0, 2])
def test_it_hurries_the_node_that_has_the_bytes(cluster: LocalCluster, number: int) -> None:
    directory = cluster.nodes[0].mountpoint / "directory"
    directory.mkdir()
    for turn in range(3):  # written again and again: the wait after the last time is lifted too
        (directory / "file").write_bytes(b"%d" % turn * 100_000)
        (directory / f"other-{turn}").write_bytes(b"x")
        _flush(cluster.nodes[number].mountpoint / "directory")


def test_it_hurries_what_is_closed_while_it_waits(cluster: LocalCluster) -> None:
    path = cluster.nodes[0].mountpoint / "file"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 100_000)
        flushing = threading.Thread(target=_flush, args=(cluster.nodes[1].mountpoint / "file",))
        flushing.start()
        time.sleep(2)  # so that it has told the nodes already
        assert flushing.is_alive()
    flushing.join(SETTLE_SECONDS / 2)
    assert not flushing.is_alive()
    assert wait_until([path], "protected", 0.0, shown=False)[0] == []
