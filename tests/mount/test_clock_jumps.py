"""A clock that is set, forwards or back, while nodes run: nothing is lost, refused or put off, and nothing goes early."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call
from waiting import wait_for
from wrong_clock import WrongClock

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

CONTENT = random.Random(1).randbytes(4 << 20)
YEAR_SECONDS = 366 * 24 * 3600


def protect(*paths: Path) -> None:
    behind, _, _ = wait_until(list(paths), "protected", 60.0, shown=False)
    assert not behind


SetClock = Callable[[int], None]


@pytest.fixture
def set_clock(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """`set_clock(seconds)`: the wall clock of what is started from here on is so far ahead; the kernel's own goes on."""
    clock = WrongClock(scratch)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)
    return clock.set


def year_of() -> int:
    return int(subprocess.run(["date", "+%Y"], capture_output=True, text=True, check=True).stdout)


def status_of(node: ClusterNode) -> dict[str, Any]:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


@pytest.mark.parametrize("years", [20, -20])
def test_a_clock_that_is_set_loses_and_delays_nothing(start_cluster: Any, set_clock: SetClock, years: int) -> None:
    cluster: LocalCluster = start_cluster(3, data_shards=2, parity_shards=1, settle_seconds=0.1)
    node, other = cluster.nodes[:2]
    home = node.mountpoint
    (home / "before").write_bytes(CONTENT)
    with open(home / "open", "wb", buffering=0) as file:
        file.write(CONTENT)
        os.fsync(file.fileno())
        this_year = year_of()
        set_clock(years * YEAR_SECONDS)
        assert abs(year_of() - this_year - years) <= 1, "the clock of what is started is set"
        file.write(CONTENT)
        (home / "unsynced").write_bytes(CONTENT)
        killed = node.processes.pids()["mount"]
        os.kill(killed or 0, 9)
        file.write(CONTENT)
        (home / "directory").mkdir()
        assert node.processes.pids()["mount"] != killed
        (home / "unsynced").rename(home / "directory" / "moved")
    protect(home)
    # The catalog says so first, the mount is told a moment later.
    wait_for(lambda: status_of(node)["oldest_unprotected_seconds"] is None, "nothing that is unprotected")
    assert status_of(node)["problems"] == []
    cluster.kill(0)
    assert (other.mountpoint / "open").read_bytes() == CONTENT * 3
    cluster.revive(0)
    set_clock(0)  # and back
    (home / "directory" / "after").write_bytes(CONTENT)
    protect(home)
    for name in ("before", "directory/moved", "directory/after"):
        assert (home / name).read_bytes() == CONTENT
        assert (other.mountpoint / name).read_bytes() == CONTENT
        (home / name).unlink()
    assert (home / "open").read_bytes() == CONTENT * 3
    segments = node.store / "segments"
    wait_for(lambda: sum(path.is_file() for path in segments.rglob("*")) == 1, "the segments of what was deleted go")
    shards = list((node.store / "shards").rglob("*"))
    assert any(path.is_file() for path in shards), "what was deleted just now is kept for a while"
