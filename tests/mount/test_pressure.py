"""A node short of descriptors or memory, whose drive has a quota or fails, or whose clock is set: programs get errors that
say so, or wait; nothing that was acknowledged is lost, and all of it goes on when the pressure ends."""

import contextlib
import errno
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(8 * MIB)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not come about in time"
        time.sleep(0.02)


def mount_status(node: ClusterNode) -> dict[str, Any]:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


def pid_of(node: ClusterNode, role: str) -> int:
    pid = node.processes.pids()[role]
    assert pid is not None
    return pid


def protect(*paths: Path) -> None:
    behind, _, _ = wait_until(list(paths), "protected", 60.0, shown=False)
    assert not behind


def test_a_mount_short_of_descriptors_refuses_opens_and_nothing_else(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(2, data_shards=1, parity_shards=1, settle_seconds=0.1)
    node = cluster.nodes[0]
    home = node.mountpoint
    (home / "before").write_bytes(CONTENT)
    processes = node.processes.pids()
    resource.prlimit(pid_of(node, "mount"), resource.RLIMIT_NOFILE, (200, 200))
    numbers = []
    with contextlib.ExitStack() as opened:
        files: list[Any] = []
        while True:
            try:
                files.append(opened.enter_context(open(home / f"file-{len(files)}", "wb", buffering=0)))
            except OSError as error:
                numbers.append(error.errno)
                break
        assert numbers == [errno.ENFILE]
        assert 50 < len(files) < 200
        assert any("programs get ENFILE" in problem for problem in mount_status(node)["problems"])
        with pytest.raises(OSError, match="Too many open files in system"):
            (home / "before").read_bytes()
        for file in files:
            file.write(b"content")
            os.fsync(file.fileno())
        (home / "directory").mkdir()
        (home / f"file-{len(files) - 1}").rename(home / "directory" / "moved")
        assert (cluster.nodes[1].mountpoint / "before").read_bytes() == CONTENT
    for number in range(300):  # each waits for those before it to be sealed, where it must
        (home / f"small-{number}").write_bytes(b"%d" % number)
    assert (home / "before").read_bytes() == CONTENT
    protect(home)
    assert not any("ENFILE" in problem for problem in mount_status(node)["problems"])
    assert (cluster.nodes[1].mountpoint / "directory" / "moved").read_bytes() == b"content"
    assert (cluster.nodes[1].mountpoint / "small-299").read_bytes() == b"299"
    assert node.processes.pids() == processes
