"""Agents that gave up root, in real nodes: what the kernel says of them, whose the files are, and that everything works."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.agent_user import agent_user
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.process_start import last_user

pytestmark = [pytest.mark.slow, pytest.mark.mount]

BIG = random.Random(1).randbytes((3 << 20) + 7)
SMALL = random.Random(2).randbytes(3000)
KEPT = 1 << 2 | 1 << 28  # CAP_DAC_READ_SEARCH, CAP_LEASE


def _ckptfs(*arguments: object) -> str:
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _agent_pid(node: ClusterNode) -> int:
    pid = node.processes.pids()["agent"]
    assert pid is not None
    return pid


def _user_of(store: Path) -> int:
    """Whom a cluster's agents are to run as."""
    uid = agent_user("", StoreDirectory.open(store).cluster or b"").uid
    assert uid != 0
    return uid


def _check_rights(node: ClusterNode, uid: int) -> None:
    lines = (line.split() for line in Path(f"/proc/{_agent_pid(node)}/status").read_text().splitlines() if line)
    status = {name.rstrip(":"): values for name, *values in lines}
    assert status["Uid"] == [str(uid)] * 4
    assert status["Groups"] == []
    assert [int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")] == [KEPT, KEPT, KEPT, 0, 0]
    assert status["NoNewPrivs"] == ["1"]
    answer = call(node.store / "run" / "agent.sock", {"do": "status"})
    assert answer["user"]["uid"] == last_user(node.store / "run", "agent") == uid


def _check_owners(cluster: LocalCluster, uid: int) -> None:
    """Root's is all that lies beside what is the agent's, and so are the directories all of that is in."""
    for node in cluster.nodes:
        for path in (node.store, *node.store.rglob("*"), node.log, *node.log.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                place = path.relative_to(node.directory).parts[1:]
                is_the_agents = place[:1] in (("agent",), ("shards",), ("copies",))
                shared = place in (("run", "mount.sock"), ("run", "agent.failed"))
                assert os.lstat(path).st_uid == (uid if is_the_agents or shared else 0), path
    assert [path.stat().st_uid for path in cluster.directory.glob("catalog.db*")] == [uid] * 3


def _as_an_earlier_release_leaves_it(cluster: LocalCluster) -> None:
    """The stores of a cluster that is down, as one that ran its agents as root has them."""
    for node in cluster.nodes:
        for name in ("agent.db", "small_copies.db", "catalog.copy"):
            (node.store / name).unlink(missing_ok=True)
        for path in (node.store / "agent").iterdir():
            path.rename(node.store / path.name)
        (node.store / "agent").rmdir()
        (node.log / "agent.log").unlink()
        shutil.rmtree(node.log / "agent")
        (node.store / "run" / "agent.failed").unlink()
        (node.store / "run" / "agent.pid").write_text("1 1\n")
        for path in (node.store, *node.store.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)
    for path in cluster.directory.glob("catalog.db*"):
        os.chown(path, 0, 0)


def test_the_whole_path_goes_with_agents_that_gave_up_root_and_over_a_store_of_an_earlier_release(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    first, second, third = cluster.nodes
    uid = _user_of(first.store)
    (first.mountpoint / "big").write_bytes(BIG)
    (first.mountpoint / "small").write_bytes(SMALL)
    _ckptfs("flush", first.mountpoint, "--timeout", 60)
    for node in cluster.nodes:
        _check_rights(node, uid)
    _check_owners(cluster, uid)
    document = json.loads(_ckptfs("status", cluster.directory, "--json"))
    assert {node["agent"]["user"]["uid"] for node in document["nodes"]} == {uid}

    # A local copy is made, read by the mount process, and evicted.
    assert (third.mountpoint / "big").read_bytes() == BIG
    copies = third.store / "copies"
    assert [path for path in copies.rglob("*") if path.is_file()]
    _wait(lambda: bool(call(third.store / "run" / "agent.sock", {"do": "keep_free", "bytes": 1 << 60})["ok"]))
    _wait(lambda: not [path for path in copies.rglob("*") if path.is_file()])

    # A shard and the home's segment, which is root's, are damaged and made anew.
    shard = next(path for path in (second.store / "shards").rglob("*") if path.is_file())
    segment = next(path for path in (first.store / "segments").rglob("*") if path.is_file() and path.stat().st_size == len(BIG))
    for path in (shard, segment):
        with open(path, "r+b") as file:
            file.seek(8192)
            file.write(bytes(8192))
    assert "repaired" in _ckptfs("verify", cluster.directory, "--deep", "--repair")
    _ckptfs("verify", cluster.directory, "--deep")

    pid = _agent_pid(second)
    os.kill(pid, signal.SIGKILL)
    _wait(lambda: second.processes.pids()["agent"] not in (None, pid) and second.peers_in_reach() == 3)
    _check_rights(second, uid)

    cluster.down(remove=False)
    _as_an_earlier_release_leaves_it(cluster)
    cluster.up(None, ClusterSettings())
    for node in cluster.nodes:
        _check_rights(node, uid)
    _check_owners(cluster, uid)
    _ckptfs("verify", cluster.directory, "--deep")
    (second.mountpoint / "later").write_bytes(SMALL)
    _ckptfs("flush", second.mountpoint, "--timeout", 60)

    cluster.kill(0)
    cluster.kill(1)
    for name, content in (("big", BIG), ("small", SMALL), ("later", SMALL)):
        assert (third.mountpoint / name).read_bytes() == content
