"""A program on another node has a file open while its home deletes or replaces it, as an evaluator of checkpoints has."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

HOW = ("unlink", "replace", "rename away", "rename away and unlink", "remove the directory")


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _content(seed: int) -> bytes:
    return random.Random(seed).randbytes((1 << 20) + seed)


def _end(path: Path, how: str, new: bytes) -> None:
    if how == "unlink":
        path.unlink()
        path.write_bytes(new)
    elif how == "replace":
        (path.parent / "new").write_bytes(new)
        (path.parent / "new").rename(path)
    elif how == "remove the directory":
        path.unlink()
        path.parent.rmdir()
        path.parent.mkdir()
        path.write_bytes(new)
    else:
        path.rename(path.parent / "away")
        if how.endswith("unlink"):
            (path.parent / "away").unlink()
        path.write_bytes(new)


def _segments(node: ClusterNode) -> list[Path]:
    return [path for path in (node.store / "segments").rglob("*") if path.is_file()]


@pytest.mark.parametrize("state", ["open", "local", "protected"])
@pytest.mark.parametrize("how", HOW)
def test_a_reader_keeps_what_it_opened(cluster: LocalCluster, how: str, state: str) -> None:
    here, there = (cluster.nodes[number].mountpoint / f"{HOW.index(how)}-{state}" for number in (0, 3))
    old, new = _content(1), _content(2)
    here.mkdir()
    (here / "file").write_bytes(old)
    if state != "open":
        assert not wait_until([here], state, 60.0, shown=False)[0]
    with open(there / "file", "rb", buffering=0) as reader:
        assert os.pread(reader.fileno(), 1000, 0) == old[:1000]
        _end(here / "file", how, new)
        assert not wait_until([here], "local", 60.0, shown=False)[0]
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(reader.fileno(), 4 << 20, 0) == old
        _wait(lambda: (there / "file").read_bytes() == new)  # its kernel may know for a second yet what the name led to


def test_a_reader_goes_on_after_its_mount_process_was_killed(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(2, settle_seconds=30.0)
    here, there = cluster.nodes
    content = _content(3)
    (here.mountpoint / "file").write_bytes(content)
    with open(there.mountpoint / "file", "rb", buffering=0) as reader:
        (here.mountpoint / "file").unlink()
        killed = there.processes.pids()["mount"]
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        _wait(lambda: there.processes.pids()["mount"] not in (None, killed))
        assert os.pread(reader.fileno(), 4 << 20, 0) == content
        assert os.fstat(reader.fileno()).st_nlink == 0
        assert len(_segments(here)) == 1
    _wait(lambda: _segments(here) == [])
