"""Fixtures that start real nodes with real mounts, and the rules every run keeps: no skip in CI, nothing left behind.

A mount that hangs can't be ended by killing who waits for it. So every wait here is bounded, and teardown aborts the FUSE
connection first, then unmounts, kills by recorded pid, and removes the directory; also when the test failed half-way.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import abort_connection, detach, mounts
from ckptfs.fs.node_processes import NodeProcesses

IN_CI = os.environ.get("CI") == "true"
SCRATCH_PREFIX = "ckptfs-test-"
SCRATCH_PARENT = Path(os.environ.get("CKPTFS_TEST_DIRECTORY", "/var/tmp"))
"""A real disk: passthrough and leases are tested on what stores lie on, not on a /tmp in memory."""

START_SECONDS = 60.0


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


def leftovers() -> list[str]:
    """Mounts and directories of tests that are still there."""
    found = [f"the mount {mounted.mountpoint}" for mounted in mounts() if SCRATCH_PREFIX in str(mounted.mountpoint)]
    return found + [f"the directory {path}" for path in SCRATCH_PARENT.glob(f"{SCRATCH_PREFIX}{os.getpid()}-*")]


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """At the end of the run no mount, process or directory of a test may be left; what is left is cleaned up, and an error."""
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
    left = [pid for store in {*(m.store for m in inside), *directory.rglob("store")} for pid in NodeProcesses(store).kill()]
    for mounted in inside:
        detach(mounted.mountpoint, abort=True)
    still = [mounted for mounted in mounts() if mounted.mountpoint.is_relative_to(directory)]
    assert not still, f"can't unmount {still}"  # before the removal: it must never walk into a mount
    shutil.rmtree(directory)
    assert not left, f"processes {left} did not die"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """An empty directory on a real disk."""
    directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=SCRATCH_PARENT))
    yield directory
    remove_scratch(directory)


@pytest.fixture(scope="module")
def module_scratch() -> Iterator[Path]:
    """As `scratch`, shared by the tests of one file."""
    directory = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=SCRATCH_PARENT))
    yield directory
    remove_scratch(directory)


StartCluster = Callable[..., LocalCluster]


@pytest.fixture
def start_cluster(scratch: Path) -> StartCluster:
    """Call it to have a cluster of your own that is up: `start_cluster(nodes=6, settle_seconds=0.1)`."""

    def start(nodes: int = 6, **settings: object) -> LocalCluster:
        cluster = LocalCluster(scratch / "cluster")
        cluster.up(nodes, ClusterSettings(**settings), start_seconds=START_SECONDS)  # type: ignore[arg-type]
        return cluster

    return start


@pytest.fixture(scope="module")
def cluster(module_scratch: Path) -> LocalCluster:
    """A six-node cluster (4+2) shared by the tests of one file, none of which may kill a node."""
    shared = LocalCluster(module_scratch / "cluster")
    shared.up(6, ClusterSettings(settle_seconds=0.2), start_seconds=START_SECONDS)
    return shared


@pytest.fixture
def mount(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the test's own in the mount of node 0 of the shared cluster."""
    yield from own_directory(cluster.nodes[0].mountpoint, request)


def own_directory(parent: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh directory named after the test; removed at the end."""
    name = "".join(character if character.isalnum() else "-" for character in request.node.name)
    directory = Path(tempfile.mkdtemp(prefix=f"{name[:60]}-", dir=parent))
    yield directory
    shutil.rmtree(directory)
