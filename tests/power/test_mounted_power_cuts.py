"""Real nodes on a real drive whose power is cut amid saving: ext4 drops what it had not written, and replays its journal. So it
does when the drive is set back in the same boot: a snapshot of it takes its place.

`CKPTFS_POWER_CUTS_MOUNTED=50` is the long run. The simulated cuts, which are far more, are in `test_power_cuts.py`.
"""

import fcntl
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import abort_connection, detach, mounts
from ckptfs.fs.node_processes import is_ckptfs
from saving import content

CUTS = int(os.environ.get("CKPTFS_POWER_CUTS_MOUNTED", "3"))
PROGRAM = Path(__file__).parent / "saving.py"

EXT4_IOC_SHUTDOWN = 0x8004587D
EXT4_GOING_FLAGS_NOLOGFLUSH = 2
"""fs/ext4/ext4.h: from now on nothing gets to the drive any more, not even what the journal has in memory."""

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120 + 30 * CUTS)]


def _wait(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: did not come about in time"
        time.sleep(0.02)


class Machine:
    """A cluster on a drive of its own, image and all, that is switched off and on."""

    def __init__(self, drive: Path, image: Path) -> None:
        self._drive = drive
        self._image = image
        self.cluster = LocalCluster(drive)

    def on(self) -> None:
        self.cluster.up(3, ClusterSettings(settle_seconds=0.2), start_seconds=60)

    def cut_the_power(self, *, same_boot: bool = False) -> None:
        """The drive first; then everything that ran dies, and the drive is mounted again; after another boot, or not."""
        pids = [pid for node in self.cluster.nodes for pid in node.processes.pids().values() if pid is not None]
        descriptor = os.open(self._drive, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("=I", EXT4_GOING_FLAGS_NOLOGFLUSH))
        finally:
            os.close(descriptor)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        _wait(lambda: not any(map(is_ckptfs, pids)), "the end of all processes")
        for mounted in [mounted for mounted in mounts() if mounted.mountpoint.is_relative_to(self._drive)]:
            abort_connection(mounted)
            detach(mounted.mountpoint, abort=True)
        _wait(lambda: subprocess.run(["umount", self._drive], capture_output=True).returncode == 0, "the drive's end")
        subprocess.run(["mount", "-o", "loop", self._image, self._drive], check=True)
        if same_boot:
            return
        for label in self._drive.glob("node-*/store/store.json"):
            store = StoreDirectory.open(label.parent)
            SetBackMark(store.store_id, store.uses).clear()
        for database in self._drive.glob("node-*/store/mount.db"):  # the machine's own number of this boot can't be changed
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("UPDATE fact SET value = CAST('another boot' AS BLOB) WHERE name = 'boot_id'")


class Promises:
    """What the programs' lines say of each name."""

    def __init__(self) -> None:
        self._begun: dict[str, list[int]] = defaultdict(list)
        self._safe: dict[str, int] = {}

    def hear(self, lines: str) -> int:
        """How many saves were promised to be safe."""
        heard = 0
        for line in lines.splitlines():
            what, name, number = line.split()
            if what == "begun":
                self._begun[name].append(int(number))
            else:
                self._safe[name] = int(number)
                heard += 1
        return heard

    def check(self, directory: Path) -> None:
        for name, numbers in self._begun.items():
            try:
                found = (directory / name).read_bytes()
            except FileNotFoundError:
                assert name not in self._safe, f"{name} is gone, but save {self._safe[name]} was synced"
                continue
            number = int(found[:64] or -1)
            assert number in numbers, f"{name} shows {number}, which was never saved under it"
            possible = numbers[numbers.index(self._safe[name]) if name in self._safe else 0 :]
            assert number in possible, f"{name} shows save {number}, but {self._safe[name]} was synced"
            assert found == content(number), f"{name} does not show the whole of save {number}"


def test_what_was_promised_is_there_when_the_power_is_back(make_drive: Any, scratch: Path) -> None:
    machine = Machine(make_drive(1024, at=scratch / "cluster"), scratch / "0.img")
    (scratch / "cluster" / "lost+found").rmdir()
    machine.on()
    promised = 0
    everything = [(node, Promises()) for node in (0, 1)]
    for cut in range(CUTS):
        programs = []
        for node, promises in everything:
            directory = machine.cluster.nodes[node].mountpoint / f"of-{node}"
            directory.mkdir(exist_ok=True)
            names = ",".join(f"checkpoint-{number}" for number in range(6))
            command = [sys.executable, str(PROGRAM), str(directory), names, str(100 * cut + node + 1)]
            programs.append((promises, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        time.sleep(1.5 + 0.7 * (cut % 4))
        machine.cut_the_power(same_boot=cut % 2 == 1)
        for promises, program in programs:
            out, _ = program.communicate(timeout=30)
            promised += promises.hear(out)
        machine.on()
        for node, promises in everything:
            promises.check(machine.cluster.nodes[node].mountpoint / f"of-{node}")
    assert promised > 3 * CUTS
    directories = [machine.cluster.nodes[node].mountpoint / f"of-{node}" for node, _ in everything]
    behind, _, _ = wait_until(directories, "protected", 60.0, shown=False)
    assert not behind
    machine.cut_the_power()  # what was protected still is, and is read from the shards of nodes that lost their power as well
    machine.on()
    machine.cluster.kill(0)
    for node, promises in everything:
        promises.check(machine.cluster.nodes[2].mountpoint / f"of-{node}")
