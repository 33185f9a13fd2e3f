"""Fixtures that start real nodes with real mounts, and the rules every run keeps: no skip in CI, nothing left behind.

A mount that hangs can't be ended by killing who waits for it. So every wait here is bounded, and teardown aborts the FUSE
connection first, then unmounts, kills by recorded pid, and removes the directory; also when the test failed half-way.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from ckptfs.cache.errors import StoreError
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.bare_mountpoint import set_takes_files
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import abort_connection, detach, mounts
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.process_start import ignore_broken_leases

ignore_broken_leases()  # tests do in this process what a mount process does, and lose leases like one

IN_CI = os.environ.get("CI") == "true"
SCRATCH_PREFIX = "ckptfs-test-"
SCRATCH_PARENT = Path(os.environ.get("CKPTFS_TEST_DIRECTORY", "/var/tmp"))
"""A real disk: passthrough and leases are tested on what stores lie on, not on a /tmp in memory."""

START_SECONDS = 60.0
LINES_OF_A_LOG = 40
"""How many of each are shown of a test that failed."""

settings.register_profile("ckptfs", settings.default, deadline=None)  # an example that is slow here shows a busy machine
settings.load_profile("ckptfs")


def missing_for_mounts() -> str | None:
    """What this machine lacks for a real mount, or None."""
    if os.geteuid() != 0:
        return "not root: mounting needs it"
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_for_mounts()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("mount"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    _no_skip_in_ci(report)
    if report.failed:
        report.sections += _ends_of_logs(item)
    return report  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: pytest.CollectReport = yield  # type: ignore[assignment]
    _no_skip_in_ci(report)
    return report  # type: ignore[return-value]


def _no_skip_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """With CI=true a skip is a failure: what was not tested there was tested nowhere."""
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not allow: {reason}"


def _ends_of_logs(item: pytest.Item) -> list[tuple[str, str]]:
    """What the nodes of the test logged last: a failure that comes once in a hundred runs tells all it can."""
    found = []
    for path in sorted(item.funcargs["scratch"].glob("cluster/*/log/*.log")) if "scratch" in item.funcargs else []:  # type: ignore[attr-defined]
        if not path.exists():  # the link to an agent's that has logged nothing yet
            continue
        lines = path.read_text(errors="replace").splitlines()[-LINES_OF_A_LOG:]
        found.append((f"end of {path.parent.parent.name}/{path.name}", "\n".join(lines)))
    return found


def leftovers() -> list[str]:
    """Mounts and directories of this run's tests that are still there."""
    own = f"{SCRATCH_PREFIX}{os.getpid()}-"
    found = [f"the mount {mounted.mountpoint}" for mounted in mounts() if own in str(mounted.mountpoint)]
    return found + [f"the directory {path}" for path in SCRATCH_PARENT.glob(f"{own}*")]


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """At the end of the run no mount, process or directory of a test may be left; what is left is cleaned up, and an error.

    What a run that was killed left behind is cleaned up by the next one.
    """
    for path in SCRATCH_PARENT.glob(f"{SCRATCH_PREFIX}*-*"):
        pid = path.name.removeprefix(SCRATCH_PREFIX).split("-")[0]
        if not os.path.exists(f"/proc/{pid}"):
            remove_scratch(path)
    yield
    found = leftovers()
    for path in SCRATCH_PARENT.glob(f"{SCRATCH_PREFIX}{os.getpid()}-*"):
        remove_scratch(path)
    assert not found, f"left behind: {', '.join(found)}"


def remove_scratch(directory: Path) -> None:
    """Free everything under the directory, whatever state it is in, and remove it."""
    inside = [mounted for mounted in mounts() if mounted.mountpoint.is_relative_to(directory)]
    for mounted in inside:
        abort_connection(mounted)
    # Not by rglob, which fails on a mount that was just aborted; walk passes over it.
    stores = {Path(at) / "store" for at, names, _ in os.walk(directory) if "store" in names} | {m.store for m in inside}
    left = [pid for store in stores for pid in NodeProcesses(store).kill()]
    for mounted in inside:
        detach(mounted.mountpoint, abort=True)
    still = [mounted for mounted in mounts() if mounted.mountpoint.is_relative_to(directory)]
    assert not still, f"can't unmount {still}"  # before the removal: it must never walk into a mount
    for label in directory.rglob("store.json"):
        with contextlib.suppress(StoreError):
            store = StoreDirectory.open(label.parent)
            RefusalMark(store.store_id, store.path).clear()
            SetBackMark(store.store_id, store.uses).clear()
    mounted_drives = [Path(line.split()[1]) for line in Path("/proc/self/mounts").read_text().splitlines()]
    for drive in reversed(mounted_drives):
        if drive.is_relative_to(directory):
            subprocess.run(["umount", "--lazy", drive], check=True)  # the run itself may keep a catalog's files open
    for mountpoint in directory.rglob("mnt"):
        set_takes_files(mountpoint, True)
    shutil.rmtree(directory)
    assert not left, f"processes {left} did not die"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty directory on a real disk."""
    directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=SCRATCH_PARENT))
    yield directory
    remove_scratch(directory)


MakeDrive = Callable[..., Path]


@pytest.fixture
def make_drive(scratch: Path) -> MakeDrive:
    """`make_drive(64)`: an ext4 file system of its own of so many MiB, mounted at a directory of the scratch one; `inodes`: how
    many files it can have; `at`: where. It goes with the scratch directory."""

    def make(mebibytes: int, *, inodes: int | None = None, at: Path | None = None) -> Path:
        drive = at or scratch / "drive"
        drive.mkdir(exist_ok=True)
        image = scratch / f"{len(list(scratch.glob('*.img')))}.img"
        with open(image, "wb") as file:
            file.truncate(mebibytes << 20)
        more = [] if inodes is None else ["-N", str(inodes)]
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", *more, image], check=True)
        subprocess.run(["mount", "-o", "loop", image, drive], check=True)
        return drive

    return make


StartCluster = Callable[..., LocalCluster]


@pytest.fixture
def start_cluster(scratch: Path) -> StartCluster:
    """Call it to have a cluster of your own that is up: `start_cluster(nodes=6, settle_seconds=0.1)`."""

    def start(nodes: int = 6, **settings: object) -> LocalCluster:
        cluster = LocalCluster(scratch / "cluster")
        cluster.up(nodes, ClusterSettings(**settings), start_seconds=START_SECONDS)  # type: ignore[arg-type]
        return cluster

    return start


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A six-node cluster (4+2) shared by all tests of the run that kill nothing and only write into directories of their own."""
    yield from _shared_cluster(6, ClusterSettings(settle_seconds=0.2))


@pytest.fixture(scope="session", params=["passthrough", "served"])
def lane_cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Two nodes, in the one lane and in the other, shared as `cluster` is; their mount processes may be killed."""
    passthrough = "on" if request.param == "passthrough" else "off"
    yield from _shared_cluster(2, ClusterSettings(settle_seconds=0.2, passthrough=passthrough))


def _shared_cluster(nodes: int, settings: ClusterSettings) -> Iterator[LocalCluster]:
    directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=SCRATCH_PARENT))
    shared = LocalCluster(directory / "cluster")
    try:
        shared.up(nodes, settings, start_seconds=START_SECONDS)
        yield shared
    finally:
        remove_scratch(directory)


SHARED = {"cluster", "lane_cluster", "place"}
"""Fixtures whose mounts other tests use too."""


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees a test that hangs in a mount: the call gets an error, so that pytest's timeout can end the test.

    Mounts that other tests use are left alone where the test has only its own: the failure of one is not to be that of all.
    """
    if request.node.get_closest_marker("mount") is None:
        yield
        return
    limit = request.node.get_closest_marker("timeout")
    seconds = float(limit.args[0]) if limit and limit.args else float(request.config.getini("timeout"))
    own = request.node.funcargs
    timer = threading.Timer(seconds - 5, lambda: free_mounts(None if SHARED & {*request.fixturenames} else own.get("scratch")))
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()
    timer.join()


def free_mounts(directory: Path | None) -> None:
    """Abort the FUSE connections of this run's mounts: of those in this directory, or of all."""
    own = str(directory or SCRATCH_PARENT / f"{SCRATCH_PREFIX}{os.getpid()}-")
    for mounted in mounts():
        if str(mounted.mountpoint).startswith(own):
            abort_connection(mounted)


class EtcdServer:
    """One etcd member of our own on loopback ports that were free; `pause` and `kill` it as you like."""

    def __init__(self, directory: Path, host: str = "127.0.0.1") -> None:
        self.directory = directory
        client, peer = free_port(), free_port()
        self.url = f"http://{host}:{client}"
        self._command = ["etcd", "--name", "test", "--data-dir", str(directory / "data"), "--log-level", "error"]
        self._command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        self._command += ["--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls"]
        self._command += [f"http://127.0.0.1:{peer}", "--initial-cluster", f"test=http://127.0.0.1:{peer}"]
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        with open(self.directory / "log", "ab") as output:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2) as answer:
                    if json.load(answer)["health"] == "true":
                        return self.process
            except (OSError, ValueError):
                assert self.process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline, "etcd did not come up in 30 s"
                time.sleep(0.02)

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, object] = json.load(answer)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One member, for all tests of a run; each takes a catalog of its own in it."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.kill()


@pytest.fixture
def make_etcd(tmp_path: Path) -> Iterator[Callable[..., EtcdServer]]:
    """Starts members, each a cluster of its own, for a test that does something to them."""
    started: list[EtcdServer] = []

    def make(host: str = "127.0.0.1") -> EtcdServer:
        directory = tmp_path / f"etcd-{len(started)}"
        directory.mkdir()
        started.append(EtcdServer(directory, host))
        return started[-1]

    yield make
    for server in started:
        server.kill()
