"""Nodes of two releases in one cluster, upgraded one by one while files are saved and read; and one that nobody understands."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.status import Place
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount]

NEWER = "\nPROTOCOL_VERSION_MAX = 3\n"
FOREIGN = "\nPROTOCOL_VERSION_MIN = PROTOCOL_VERSION_MAX = 9\n"


def upgrade(node: ClusterNode, python: Path | str) -> None:
    command = [str(python), "-P", "-m", "ckptfs.fs.cli", "node", "upgrade", "--config", str(node.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd="/")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: None not in node.processes.pids().values() and node.answers(), "the upgraded node", 60)


def problems(node: ClusterNode) -> str:
    place = Place(node.id, node.store, node.mountpoint)  # which waits for an agent that is just being started
    return "\n".join(place.ask("agent", {"do": "status", "look": True}, restart_seconds=60.0)["problems"])


def save_and_read(cluster: LocalCluster, label: str) -> None:
    """Every node saves, reads what the others saved before it is protected and after, and writes into a file of the first."""
    mounts = [node.mountpoint for node in cluster.nodes]
    saved = {f"{label}-{number}": os.urandom(300_000) for number in range(len(mounts))}
    log = f"{label}-log"
    with open(mounts[0] / log, "wb", buffering=0) as file:
        for number, mount in enumerate(mounts):
            (mount / f"{label}-{number}").write_bytes(saved[f"{label}-{number}"])
            with open(mount / log, "ab", buffering=0) as elsewhere:
                elsewhere.write(b"%d\n" % number)
        assert os.fstat(file.fileno()).st_size == 2 * len(mounts)
    for _ in ("as they were closed", "as they are protected"):
        for mount in mounts:
            assert {name: (mount / name).read_bytes() for name in saved} == saved
            assert (mount / log).read_bytes() == b"0\n1\n2\n"
        assert wait_until([mounts[0]], "protected", 60.0, shown=False)[0] == []


def test_nodes_are_upgraded_one_by_one_while_programs_save_and_read(start_cluster: Any, make_release: Any, scratch: Path) -> None:
    cluster: LocalCluster = start_cluster(3, data_shards=1, parity_shards=2, settle_seconds=0.1)
    newer = make_release(scratch / "newer", "99.1", {"replication/peer_messages": NEWER})
    for number, node in enumerate(cluster.nodes):
        upgrade(node, newer)
        save_and_read(cluster, f"with-{number}")
    programs = [call(node.store / "run/mount.sock", {"do": "status"})["version"] for node in cluster.nodes]
    assert programs == ["99.1"] * 3
    for node in cluster.nodes:
        assert "speaks protocol" not in (node.log / "agent.log").read_text()

    # One whose protocol the others don't speak: both sides say so, and all is well again when it goes back.
    first, last = cluster.nodes[0], cluster.nodes[2]
    upgrade(last, make_release(scratch / "foreign", "99.9", {"replication/peer_messages": FOREIGN}))
    words = "(ckptfs 99.9) speaks protocol 9 to 9, "
    wait_for(lambda: "node-2 can't be talked to" in problems(first), "the refusal in the old one's status", 60)
    wait_for(lambda: problems(last).count("can't be talked to") == 2, "the refusals in the new one's status", 60)
    assert "upgrade the older one" in problems(first)
    assert f"node-2 {words}node-0 (ckptfs 99.1) 1 to 3: upgrade the older one" in problems(last)
    for node in (first, last):
        log = (node.log / "agent.log").read_text()
        assert "peer-refused" in log  # as it was asked
        assert "peer-unreachable" in log  # and as it asked
        assert "upgrade the older one" in log
    (first.mountpoint / "meanwhile").write_bytes(b"m" * 300_000)
    upgrade(last, sys.executable)
    wait_for(lambda: "can't be talked to" not in problems(first) + problems(last), "the cluster as it was", 60)
    assert (last.mountpoint / "meanwhile").read_bytes() == b"m" * 300_000
    save_and_read(cluster, "after")
    verified = subprocess.run(
        [sys.executable, "-P", "-m", "ckptfs.fs.cli", "verify", first.mountpoint, "--deep", "--json"],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout
    assert json.loads(verified.stdout)["ok"]
