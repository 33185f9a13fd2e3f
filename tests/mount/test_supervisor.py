"""The supervisor's own death, with a service manager and without, and a running node that goes on with another release."""

import array
import contextlib
import errno
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckptfs
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import Message, call
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]

PROGRAMS = Path(__file__).parent / "kill_soak_programs.py"


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _status(node: ClusterNode) -> Message:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


def _ckptfs(*arguments: object, python: Path | str = sys.executable) -> "subprocess.CompletedProcess[str]":
    command = [str(python), "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd="/")


@contextmanager
def _programs(mountpoint: Path, *kinds: str) -> Iterator[None]:
    """Programs that work in the mount meanwhile, and must be content with all its answers."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", PROGRAMS, kind, mountpoint / f"{kind}-{number}", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, kind in enumerate(kinds)
    ]
    try:
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "begins\n", f"{program.args!r} ended"
        yield
        for program in programs:
            output, errors = program.communicate("end\n", timeout=60)
            assert program.returncode == 0, f"{program.args!r}\n{errors[-3000:]}"
            assert json.loads(output)["turns"] > 0
    finally:
        for program in programs:
            program.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead mount goes with that
                program.wait(10)


class ServiceManager:
    """What systemd does for a service with `Type=notify` and a descriptor store: sd_notify(3) and sd_listen_fds(3)."""

    def __init__(self, directory: Path) -> None:
        self.kept: dict[str, int] = {}
        self.said: list[str] = []
        self._path = directory / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._socket.setblocking(False)

    def start(self, node: ClusterNode) -> "subprocess.Popen[bytes]":
        names = list(self.kept)
        # In the child the kept descriptors become 3, 4, … whatever their numbers are here.
        moves = "".join(f" {number}<&{self.kept[name]}" for number, name in enumerate(names, 3))
        script = f'export LISTEN_PID=$$; exec "$@"{moves}'
        environment = os.environ | {
            "NOTIFY_SOCKET": str(self._path),
            "LISTEN_FDS": str(len(names)),
            "LISTEN_FDNAMES": ":".join(names),
        }
        command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
        with open(node.log / "node.log", "ab") as log:
            return subprocess.Popen(
                ["bash", "-c", script, "bash", *command],  # dash knows only descriptors of one digit
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=list(self.kept.values()),
                env=environment,
                start_new_session=True,
                cwd="/",
            )

    def listen(self) -> None:
        """Take what was said since."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * 8))
            except BlockingIOError:
                return
            lines = data.decode().split("\n")
            self.said += lines
            facts = dict(line.split("=", 1) for line in lines)
            if "FDSTORE" in facts:
                ((_, _, rights),) = ancillary
                (self.kept[facts["FDNAME"]],) = array.array("i", rights)
            if "FDSTOREREMOVE" in facts:
                os.close(self.kept.pop(facts["FDNAME"]))

    def has_heard(self, word: str) -> bool:
        self.listen()
        return word in self.said

    def close(self) -> None:
        for descriptor in self.kept.values():
            os.close(descriptor)
        self._socket.close()


@pytest.fixture
def manager(scratch: Path) -> Iterator[ServiceManager]:
    with contextlib.closing(ServiceManager(scratch)) as made:
        yield made


def _kill_supervisor(node: ClusterNode) -> None:
    supervisor = node.processes.pids()["supervisor"]
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    _wait(lambda: node.processes.living() == [])


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_programs_do_not_notice_the_supervisor_s_death_under_a_service_manager(
    scratch: Path, manager: ServiceManager, passthrough: str
) -> None:
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1, ClusterSettings(settle_seconds=0.1, passthrough=passthrough))
    node = cluster.nodes[0]
    with open(node.config, "a") as config:  # the last section is [mount]
        config.write("attribute_timeout_seconds = 0\n")  # whoever asks about the mountpoint waits for the node, itself included
    process = manager.start(node)
    try:
        _wait(lambda: manager.has_heard("READY=1") and node.answers())
        incarnation = _status(node)["incarnation"]
        with _programs(node.mountpoint, "names", "rewriting", "holding"):
            for _ in range(3):
                time.sleep(random.uniform(0.1, 0.5))  # so that it is killed amid work
                _kill_supervisor(node)
                process.wait(10)
                manager.listen()
                assert len(manager.kept) == 1
                process = manager.start(node)
                _wait(node.answers)
        assert _status(node)["incarnation"] == incarnation
        assert len(mounts_at(node.mountpoint)) == 1
        assert (node.log / "supervisor.log").read_text().count("connection_taken_over") == 3
        assert _ckptfs("umount", node.mountpoint).returncode == 0
        assert process.wait(10) == 0
        assert manager.has_heard("STOPPING=1")
        assert manager.kept == {}
    finally:
        process.terminate()
        process.wait(30)


def test_a_connection_that_is_dead_is_not_taken_over(scratch: Path, manager: ServiceManager) -> None:
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1, ClusterSettings(settle_seconds=0.1))
    node = cluster.nodes[0]
    process = manager.start(node)
    try:
        _wait(node.answers)
        (node.mountpoint / "file").write_bytes(b"content")
        manager.listen()
        _kill_supervisor(node)
        process.wait(10)
        subprocess.run(["umount", "--lazy", node.mountpoint], check=True)  # what the kept descriptor is of is gone
        process = manager.start(node)
        _wait(node.answers)
        assert (node.mountpoint / "file").read_bytes() == b"content"
        manager.listen()
        assert len(manager.kept) == 1
        assert "connection_taken_over" not in (node.log / "supervisor.log").read_text()
    finally:
        process.terminate()
        process.wait(30)


# A signal to the mount process alone


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_a_signal_to_the_mount_process_does_not_end_the_node(start_cluster: Any, passthrough: str) -> None:
    node: ClusterNode = start_cluster(1, settle_seconds=0.1, passthrough=passthrough).nodes[0]
    before, incarnation = node.processes.pids(), _status(node)["incarnation"]
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
    with _programs(node.mountpoint, "names", "rewriting", "holding"):
        for number in signals:
            mount = node.processes.pids()["mount"]
            assert mount is not None
            os.kill(mount, number)
            _wait(lambda mount=mount: node.processes.pids()["mount"] not in (None, mount) and node.answers())  # type: ignore[misc]
    status, after = _status(node), node.processes.pids()
    assert (status["incarnation"], status["unexpected_errors"]) == (incarnation, 0)
    assert (after["supervisor"], after["agent"]) == (before["supervisor"], before["agent"])
    log = (node.log / "supervisor.log").read_text()
    assert log.count("process_ended role=mount") == len(signals)
    assert "unmounted_from_outside" not in log
    subprocess.run(["umount", node.mountpoint], check=True)  # which ends it
    _wait(lambda: node.processes.living() == [])
    assert "unmounted_from_outside" in (node.log / "supervisor.log").read_text()


# Another release


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_a_running_node_goes_on_with_another_release(
    start_cluster: Any, make_release: Any, scratch: Path, passthrough: str
) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1, passthrough=passthrough)
    node = cluster.nodes[0]
    python = make_release(scratch / "release", "99.1")
    before, incarnation = node.processes.pids(), _status(node)["incarnation"]
    with _programs(node.mountpoint, "names", "rewriting", "holding"):
        done = _ckptfs("node", "upgrade", "--config", node.config, "--json", python=python)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["version"] == "99.1"
        status = _status(node)
        assert (status["version"], status["incarnation"]) == ("99.1", incarnation)
        _wait(lambda: None not in node.processes.pids().values())
        after = node.processes.pids()
        assert after["supervisor"] == before["supervisor"]  # the same process, with another program
        assert after["mount"] != before["mount"]
        assert after["agent"] != before["agent"]
        assert str(scratch / "release") in Path(f"/proc/{after['supervisor']}/cmdline").read_text()
        # The next one: back to this installation, with a mount process that dies right after.
        assert _ckptfs("node", "upgrade", "--config", node.config).returncode == 0
        again = node.processes.pids()["mount"]
        assert again is not None
        assert again != after["mount"]
        os.kill(again, signal.SIGKILL)
        _wait(lambda: node.processes.pids()["mount"] not in (None, again) and node.answers())
        assert _status(node)["version"] == ckptfs.__version__
    assert _status(node)["unexpected_errors"] == 0
    assert len(mounts_at(node.mountpoint)) == 1
    assert _ckptfs("umount", node.mountpoint).returncode == 0
    assert node.processes.living() == []


# What is added to a module of the other release, and a part of why it can't take over.
UNFIT = {
    "its mount process dies": (
        "fs/config",
        "def load_handed_config(path: object) -> None:\n    raise OSError('broken')",
        "did not start",
    ),
    "it has another format": ("cache/mount_db", "FORMAT_VERSION = 2", "has format 1, this program reads 2"),
    "it can't serve the connection": (
        "fs/fuse_session",
        "WANTED = WANTED & ~InitFlag.PARALLEL_DIROPS",
        "flags 0x40000, which this release does not know",
    ),
}


@pytest.mark.parametrize("how", UNFIT)
def test_a_release_that_cannot_take_over_changes_nothing(start_cluster: Any, make_release: Any, scratch: Path, how: str) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    module, text, words = UNFIT[how]
    python = make_release(scratch / "release", "99.1", {module: f"\n{text}\n"})
    before = node.processes.pids()
    with _programs(node.mountpoint, "names"):
        done = _ckptfs("node", "upgrade", "--config", node.config, python=python)
        assert done.returncode == 1
        assert "goes on with its old release" in done.stderr
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert node.processes.pids() == before
        assert before["mount"] is not None
        os.kill(before["mount"], signal.SIGKILL)  # and what is started from now on is the old release
        _wait(lambda: node.processes.pids()["mount"] not in (None, before["mount"]) and node.answers())
        assert _status(node)["version"] == ckptfs.__version__
    assert _ckptfs("node", "upgrade", "--config", node.config).returncode == 0


def test_a_node_that_does_not_run_is_not_upgraded(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1)
    cluster.down(remove=False)
    done = _ckptfs("node", "upgrade", "--config", cluster.nodes[0].config)
    assert done.returncode == 3
    assert "does not run" in done.stderr


# A kernel that can't send requests again


def test_where_requests_cannot_be_repeated_programs_get_errors_rather_than_wait_for_ever(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    (node.mountpoint / "file").write_bytes(b"content")
    with sqlite3.connect(node.store / "mount.db", timeout=10) as database:  # as on a kernel before Linux 6.9
        (stored,) = database.execute("SELECT value FROM fact WHERE name = 'negotiated'").fetchone()
        agreed = json.dumps(json.loads(stored) | {"resend": False}).encode()
        database.execute("UPDATE fact SET value = ? WHERE name = 'negotiated'", (agreed,))
    database.close()
    with open(node.mountpoint / "held", "wb", buffering=0) as held:
        mount = node.processes.pids()["mount"]
        assert mount is not None
        os.kill(mount, signal.SIGKILL)
        _wait(lambda: node.processes.living() == [])
        with pytest.raises(OSError, match=r"not connected|connection abort") as caught:
            os.fsync(held.fileno())
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert "can't send again" in (node.log / "mount.log").read_text()
    assert "can't send again" in (node.log / "node.log").read_text()
    cluster.revive(0)
    assert (node.mountpoint / "file").read_bytes() == b"content"
