"""A node's mount is taken away when nobody uses it; else it stays, and its users are named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]

USER = """
import mmap, os, sys
top = sys.argv[1]
how = sys.argv[2]
if how == "directory":
    os.chdir(top)
elif how == "mapping":
    with open(top + "/file", "r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
elif how == "nameless":
    kept = open(top + "/file", "r+b")
    os.unlink(top + "/file")
else:
    kept = [open(top + f"/file-{number}", "wb") for number in range(5)]
print("ready", flush=True)
sys.stdin.readline()
"""


def _umount(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "umount", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def node(start_cluster: Any) -> ClusterNode:
    node: ClusterNode = start_cluster(1, settle_seconds=0.1).nodes[0]
    (node.mountpoint / "file").write_bytes(bytes(4096))
    return node


@pytest.mark.parametrize("how", ["directory", "mapping", "nameless", "files"])
def test_who_uses_the_mount_is_named_and_the_node_goes_on(node: ClusterNode, how: str) -> None:
    command = [sys.executable, "-c", USER, str(node.mountpoint), how]
    before = node.processes.pids()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
        done = _umount(node.mountpoint)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"({user.pid}: {node.mountpoint}" in done.stderr
        document = json.loads(_umount(node.mountpoint, "--json").stdout)
        ((pid, paths),) = ((found["pid"], found["paths"]) for found in document["users"])
        assert pid == user.pid
        expected = {
            "directory": [""],
            "mapping": ["/file"],
            "nameless": ["/file (deleted)"],
            "files": [f"/file-{number}" for number in range(5)],
        }[how]
        assert paths == [f"{node.mountpoint}{path}" for path in expected]
        if how == "files":
            assert "file-2 and 2 more" in done.stderr
        (node.mountpoint / "another").write_bytes(b"the node goes on")
        assert node.processes.pids() == before
        user.communicate("end\n", timeout=30)
    assert _umount(node.mountpoint).returncode == 0
    assert mounts_at(node.mountpoint) == []
    assert node.processes.living() == []
    assert "mount_in_use" not in (node.log / "supervisor.log").read_text()


def test_a_mount_inside_is_named(node: ClusterNode, scratch: Path) -> None:
    inside = node.mountpoint / "with space"
    inside.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", inside], check=True)
    try:
        done = _umount(node.mountpoint)
        assert done.returncode == 1
        assert f"the mount {inside} inside it" in done.stderr
    finally:
        subprocess.run(["umount", inside], check=True)
    assert _umount(node.mountpoint).returncode == 0


def test_by_force_it_ends_all_the_same(node: ClusterNode) -> None:
    with open(node.mountpoint / "held", "wb", buffering=0) as held:
        held.write(b"content")
        assert _umount(node.mountpoint, "--force").returncode == 0
        assert mounts_at(node.mountpoint) == []
        assert node.processes.living() == []
    log = (node.log / "supervisor.log").read_text()
    assert f"mount_in_use mountpoint={node.mountpoint} by " in log
    assert f"({os.getpid()}: {node.mountpoint}/held)" in log


def test_the_drive_below_can_be_unmounted_when_the_cluster_is_down(make_drive: Any, scratch: Path) -> None:
    drive = make_drive(256, at=scratch / "drive")
    cluster = LocalCluster(drive / "cluster")
    for number in range(3):
        cluster.up(2, ClusterSettings(data_shards=1, parity_shards=1, settle_seconds=0.05))
        for node in cluster.nodes:
            (node.mountpoint / f"{node.id}-{number}").write_bytes(bytes(4 << 20))
        if number == 1:
            for node in cluster.nodes:
                node.kill()
        else:
            cluster.down(remove=False)
        subprocess.run(["umount", drive], check=True)
        subprocess.run(["mount", "-o", "loop", scratch / "0.img", drive], check=True)
