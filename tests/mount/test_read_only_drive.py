"""A store's file system that takes no writes any more, as ext4 does after drive errors: reading goes on, saving gets errors."""

import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import NodeNotAnswering, call
from ckptfs.fs.status import nodes_status, places_of_cluster
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

MIB = 1 << 20
OURS = random.Random(1).randbytes(8 * MIB)
THEIRS = random.Random(2).randbytes(8 * MIB)
LITTLE = b"little" * 100


def answers(node: ClusterNode, process: str) -> bool:
    try:
        return bool(call(node.store / "run" / f"{process}.sock", {"do": "status"})["ok"])
    except NodeNotAnswering:
        return False


def turn_read_only(drive: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", drive], check=True)
    with pytest.raises(OSError, match=r"Read-only|Input/output"):
        (drive / "probe").write_bytes(b"x")


@pytest.fixture
def cluster(scratch: Path, make_drive: Any) -> LocalCluster:
    """Three nodes, 2+1; the store of the first on a drive of its own, the catalog elsewhere. Protected: files of two homes."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1, settle_seconds=0.05))
    node = cluster.nodes[0]
    make_drive(128, at=node.store)
    cluster.up(None, ClusterSettings())
    (node.mountpoint / "ours").write_bytes(OURS)
    (node.mountpoint / "ours-little").write_bytes(LITTLE)
    (cluster.nodes[1].mountpoint / "theirs").write_bytes(THEIRS)
    (cluster.nodes[1].mountpoint / "theirs-little").write_bytes(LITTLE)
    behind, _, _ = wait_until([node.mountpoint], "protected", 60.0, shown=False)
    assert not behind
    return cluster


def assert_serves(cluster: LocalCluster) -> None:
    """The first node reads everything and refuses to write, the others read and write; its status says why."""
    node = cluster.nodes[0]
    assert (node.mountpoint / "ours").read_bytes() == OURS
    assert (node.mountpoint / "ours-little").read_bytes() == LITTLE
    assert (node.mountpoint / "theirs").read_bytes() == THEIRS
    assert (node.mountpoint / "theirs-little").read_bytes() == LITTLE
    for write in ((node.mountpoint / "new").write_bytes, (node.mountpoint / "ours").write_bytes):
        with pytest.raises(OSError, match=r"Read-only|Input/output"):
            write(b"x" * 100_000)
    other = cluster.nodes[1].mountpoint
    assert (other / "ours").read_bytes() == OURS
    (other / "written-elsewhere").write_bytes(THEIRS)

    def shown() -> bool:
        problems = nodes_status(places_of_cluster(cluster))[0]["problems"]
        return any(problem.startswith("READ-ONLY") for problem in problems)

    wait_for(shown, "status says it")


def has_ended(node: ClusterNode) -> bool:
    return node.processes.pids()["supervisor"] is None


@pytest.mark.parametrize("how", ["abort", "errors=remount-ro,abort"])
def test_the_mount_and_the_agent_live_on_and_start_again(cluster: LocalCluster, how: str) -> None:
    node = cluster.nodes[0]
    before = node.processes.pids()
    with open(node.mountpoint / "ours", "rb", buffering=0) as held:
        turn_read_only(node.store, how)
        assert_serves(cluster)
        assert node.processes.pids() == before
        for _ in range(2):  # the second time `run/` is covered already
            for role in ("mount", "agent"):
                os.kill(node.processes.pids()[role] or 0, 9)
            wait_for(lambda: answers(node, "mount") and answers(node, "agent"), "processes again")
            assert node.processes.pids()["supervisor"] == before["supervisor"]
            assert held.read(MIB)
            wait_for(lambda: bool(node.peers_in_reach()), "peers")
            assert_serves(cluster)


def test_what_was_not_protected_is_read_and_a_file_being_written_gets_an_error(cluster: LocalCluster) -> None:
    node = cluster.nodes[0]
    for number in (1, 2):
        cluster.kill(number)
    (node.mountpoint / "only-here").write_bytes(OURS)
    with open(node.mountpoint / "open", "wb", buffering=0) as file:
        file.write(THEIRS)
        turn_read_only(node.store, "errors=remount-ro,abort")
        with pytest.raises(OSError, match=r"Read-only|Input/output"):
            file.write(THEIRS)
        assert (node.mountpoint / "open").read_bytes()[: len(THEIRS)] == THEIRS
    before = node.processes.pids()["mount"]
    os.kill(before or 0, 9)
    wait_for(lambda: node.processes.pids()["mount"] not in (None, before) and answers(node, "mount"), "a mount again")
    assert (node.mountpoint / "only-here").read_bytes() == OURS
    for number in (1, 2):
        cluster.revive(number)
    wait_for(lambda: (cluster.nodes[1].mountpoint / "only-here").read_bytes() == OURS, "its home serves it")


@pytest.mark.parametrize("unreadable", ["mount.db", "store.json"])
def test_programs_get_errors_where_the_mount_can_not_start_again(cluster: LocalCluster, unreadable: str) -> None:
    node = cluster.nodes[0]
    turn_read_only(node.store, "abort")
    garbage = node.store.parent / "garbage"
    garbage.write_bytes(b"no database and no label" * 1000)
    subprocess.run(["mount", "--bind", garbage, node.store / unreadable], check=True)
    os.kill(node.processes.pids()["mount"] or 0, 9)
    with pytest.raises(OSError, match=r"Input/output|not connected|aborted|No such file"):
        (node.mountpoint / "theirs").read_bytes()
    wait_for(lambda: has_ended(node), "the end of the node")
    assert (cluster.nodes[1].mountpoint / "ours").read_bytes() == OURS


def test_the_catalog_lies_on_the_same_drive(scratch: Path, make_drive: Any) -> None:
    drive = make_drive(192, at=scratch / "cluster")
    (drive / "lost+found").rmdir()
    cluster = LocalCluster(drive)
    cluster.up(2, ClusterSettings(data_shards=1, parity_shards=1, settle_seconds=0.05))
    node = cluster.nodes[0]
    (node.mountpoint / "ours").write_bytes(OURS)
    behind, _, _ = wait_until([node.mountpoint], "protected", 60.0, shown=False)
    assert not behind
    turn_read_only(drive, "errors=remount-ro,abort")
    for role in ("mount", "agent", ""):
        assert (node.mountpoint / "ours").read_bytes() == OURS
        with pytest.raises(OSError, match=r"Read-only|Input/output"):
            (node.mountpoint / "new").write_bytes(b"x")
        if role:
            os.kill(node.processes.pids()[role] or 0, 9)
            wait_for(lambda: answers(node, "mount") and answers(node, "agent"), "processes again")
