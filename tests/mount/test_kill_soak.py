"""The mount process killed, or replaced by an upgrade, at random moments while programs do everything they do with a file system:
nobody may notice.

`CKPTFS_SOAK_KILLS=200 scripts/test tests/mount/test_kill_soak.py -s` is the long run; `CKPTFS_SOAK_SEED` repeats one.
"""

import contextlib
import hashlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import Message, call

KILLS = int(os.environ.get("CKPTFS_SOAK_KILLS", "10"))
SEED = int(os.environ.get("CKPTFS_SOAK_SEED", str(time.time_ns() % 1_000_000)))
SECONDS_PER_KILL = 8
"""At most, on a machine that does much else."""
PROGRAMS = Path(__file__).parent / "kill_soak_programs.py"
UPGRADES = 0.07
"""The share of turns in which the node is upgraded instead, to this same release: its mount process is replaced, and half of the
times killed in the middle of that."""
SHARED = {"racing": "race", "counting": "count", "logging": "log"}
KINDS = (
    *("names", "names", "checkpoints", "sharded", "rewriting", "holding", "listing"),
    *("racing", "racing", "racing", "counting", "counting", "logging", "logging"),
)

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(180 + SECONDS_PER_KILL * KILLS)]


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _status(node: ClusterNode) -> Message:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


def _wait_for_change(path: Path) -> None:
    """Return within microseconds of a change of the file's beginning, or after a while. SQLite counts commits in its `-shm` file;
    in `mount.notes` the first note after each pause is written there."""
    deadline = time.monotonic() + 2
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 48, prot=mmap.PROT_READ) as shared:
        before = shared[:48]
        while shared[:48] == before and time.monotonic() < deadline:
            pass


def _kill_again_and_again(node: ClusterNode, programs: list["subprocess.Popen[str]"], chance: random.Random) -> None:
    """Some kills come amid the start of the process that follows the one killed before, some amid the work of programs, and most
    of those just after a commit: when a request is carried out and not yet answered."""
    killed: int | None = None
    for _ in range(KILLS):
        _wait(lambda killed=killed: node.processes.pids()["mount"] not in (None, killed))  # type: ignore[misc]
        killed = node.processes.pids()["mount"]
        assert killed is not None
        if chance.random() < UPGRADES:
            _upgrade(node, chance)
            continue
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0, 0.5))
        else:
            _wait(node.answers)
            time.sleep(chance.uniform(0, 1))
            # Names are in the catalog, handles in the notes and then in mount.db.
            commits = [Path(f"{database}-shm") for database in (node.catalog, node.store / "mount.db")]
            _wait_for_change(chance.choice([*commits, node.store / "mount.notes"]))
        os.kill(killed, signal.SIGKILL)
        if ended := [program.args for program in programs if program.poll() is not None]:
            pytest.fail(f"a program ended by itself: {ended}")


def _upgrade(node: ClusterNode, chance: random.Random) -> None:
    _wait(node.answers)
    mount = node.processes.pids()["mount"]
    assert mount is not None
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "upgrade", "--config", str(node.config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as upgrade:
        is_killed = chance.random() < 0.5
        if is_killed:
            time.sleep(chance.uniform(0.3, 1.5))
            with contextlib.suppress(ProcessLookupError):
                os.kill(mount, signal.SIGKILL)
        _, errors = upgrade.communicate(timeout=90)
    assert upgrade.returncode == 0 or (is_killed and "goes on with its old release" in errors), errors
    print(f"upgrade {'with a kill ' if is_killed else ''}ended with {upgrade.returncode}")


class Victims:
    """Programs that are killed too, one after another, wherever they are: what they leave must be whole and owned by nobody."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir()
        self._directory = directory
        self._chance = random.Random(seed)
        self._ended = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.count += 1
            kind = self._chance.choice(["names", "rewriting"])
            with _program(kind, self._directory / f"{self.count}", self.count) as victim:
                self._ended.wait(self._chance.uniform(0.1, 2))
                victim.kill()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def _program(kind: str, directory: Path, seed: int) -> "subprocess.Popen[str]":
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-W", "ignore", str(PROGRAMS), kind, str(directory), str(seed)]
    return subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def _problems(node: ClusterNode) -> tuple[list[str], int]:
    """What is wrong in the catalog, and how many notes of requests are in it."""

    async def run() -> tuple[list[str], int]:
        kv = SqliteCatalog.open(node.catalog, writer_label="test")
        try:
            return await catalog_problems(kv), len(await kv.range(b"o/"))
        finally:
            await kv.aclose()

    return trio.run(run)


def _files(mountpoint: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in mountpoint.rglob("*") if path.is_file()}


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_nobody_notices_that_the_mount_process_is_killed(start_cluster: Any, passthrough: str) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.2, passthrough=passthrough)
    node = cluster.nodes[0]
    print(f"\nseed {SEED}, {KILLS} kills")
    directories = [node.mountpoint / SHARED.get(kind, f"{kind}-{number}") for number, kind in enumerate(KINDS)]
    programs = [
        _program(kind, directory, SEED + number) for number, (kind, directory) in enumerate(zip(KINDS, directories, strict=True))
    ]
    victims = Victims(node.mountpoint / "victims", SEED)
    said: list[dict[str, Any]] = []
    try:
        failure: BaseException | None = None
        try:
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == "begins\n", f"{program.args!r} ended"
            _kill_again_and_again(node, programs, random.Random(SEED))
            _wait(node.answers)
        except BaseException as error:
            failure = error
        for program in programs:
            output, errors = program.communicate("end\n", timeout=90)
            assert program.returncode == 0, f"{program.args!r}\n{errors[-3000:]}"
            said.append(json.loads(output))
        if failure is not None:
            raise failure
    finally:
        victims.end()
        for program in programs:
            program.kill()
            program.wait(30)
    log = (node.log / "mount.log").read_text()
    events = {name: log.count(name) for name in ("mount_ready", "answered_again", "opened_again", "unfinished_version_dropped")}
    turns: dict[str, list[int]] = {}
    for kind, one in zip(KINDS, said, strict=True):
        turns.setdefault(kind, []).append(one["turns"])
    print(f"turns {turns}, log {events}")
    assert min(one["turns"] for one in said) > 0
    expected = {path: digest for one in said for path, digest in one["left"].items()}

    race = node.mountpoint / "race"
    won = [int(line) for path in (race / "wins").iterdir() for line in path.read_text().split()]
    assert len(won) == len(set(won)), "a name was won twice"
    assert sorted(won) == sorted(int(path.name) for path in race.glob("shared/*/*")), "a name without a winner"

    for path in (node.mountpoint / "count").iterdir():
        assert int.from_bytes(path.read_bytes(), "little") == sum(turns["counting"]), f"{path.name} let two in at once"
    lines: dict[int, list[int]] = {}
    for line in (node.mountpoint / "log" / "log").read_text().splitlines():
        pid, number, _ = line.split(" ")
        lines.setdefault(int(pid), []).append(int(number))
    writers = [one for kind, one in zip(KINDS, said, strict=True) if kind == "logging"]
    assert lines == {one["pid"]: list(range(1, one["turns"] + 1)) for one in writers}

    for directory in (*SHARED.values(), "victims"):
        expected |= _files(node.mountpoint / directory)
    assert _files(node.mountpoint) == expected
    call(node.store / "run" / "mount.sock", {"do": "settle"})
    _wait(lambda: _status(node)["settling_files"] == 0)
    _wait(lambda: _status(node)["open_files"] == 0)  # a handle nobody knows of would keep its file from being protected
    assert _files(node.mountpoint) == expected
    assert _status(node)["unexpected_errors"] == 0
    assert "request_failed" not in log
    assert "Traceback" not in log
    problems, notes = _problems(node)
    assert problems == []
    assert notes <= 100

    supervisor = node.processes.pids()["supervisor"]
    assert supervisor is not None
    assert node.processes.ask_supervisor_to_end()
    assert node.processes.wait_ended(time.monotonic() + 30)
    cluster.revive(0)
    assert _files(node.mountpoint) == expected
    assert _problems(node) == ([], 0)
