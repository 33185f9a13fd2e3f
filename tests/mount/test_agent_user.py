"""Agents that gave up root, in real nodes: what the kernel says of them, whose the files are, and that everything works."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.agent_user import agent_user
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.process_start import last_user
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount]

BIG = random.Random(1).randbytes((3 << 20) + 7)
SMALL = random.Random(2).randbytes(3000)
KEPT = 1 << 2 | 1 << 28  # CAP_DAC_READ_SEARCH, CAP_LEASE


def _verify(*arguments: object) -> str:
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "verify", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _agent_pid(node: ClusterNode) -> int:
    pid = node.processes.pids()["agent"]
    assert pid is not None
    return pid


def _user_of(store: Path) -> int:
    """Whom a cluster's agents are to run as."""
    uid = agent_user("", StoreDirectory.open(store).cluster or b"", "127.0.0.1:0").uid
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


@contextlib.contextmanager
def _kept_by_its_drive(path: Path) -> Iterator[None]:
    subprocess.run(["chattr", "+i", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


def test_the_whole_path_goes_with_agents_that_gave_up_root_and_over_stores_of_an_earlier_release(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(2, data_shards=1, parity_shards=1, settle_seconds=0.05)
    first, second = cluster.nodes
    uid = _user_of(first.store)
    (first.mountpoint / "big").write_bytes(BIG)
    (first.mountpoint / "small").write_bytes(SMALL)
    assert wait_until([first.mountpoint], "protected", 60.0, shown=False)[0] == []
    for node in cluster.nodes:
        _check_rights(node, uid)
    _check_owners(cluster, uid)

    # A local copy is made, read by the mount process, and evicted.
    assert (second.mountpoint / "big").read_bytes() == BIG
    copies = second.store / "copies"
    assert [path for path in copies.rglob("*") if path.is_file()]
    wait_for(lambda: bool(call(second.store / "run/agent.sock", {"do": "keep_free", "bytes": 1 << 60})["ok"]), "room", 60)
    wait_for(lambda: not [path for path in copies.rglob("*") if path.is_file()], "the end of the copy", 60)

    # A shard and the home's segment, which is root's, are damaged and made anew.
    shards = [next(path for path in (node.store / "shards").rglob("*") if path.is_file()) for node in cluster.nodes]
    segment = next(path for path in (first.store / "segments").rglob("*") if path.is_file() and path.stat().st_size == len(BIG))
    for path in (shards[1], segment):
        with open(path, "r+b") as file:
            file.seek(8192)
            file.write(bytes(8192))
    assert "repaired" in _verify(cluster.directory, "--deep", "--repair")

    # One drive keeps the owners of what an earlier release left.
    cluster.down(remove=False)
    _as_an_earlier_release_leaves_it(cluster)
    with _kept_by_its_drive(shards[0]):
        cluster.up(None, ClusterSettings())
        _check_rights(second, uid)
        user = call(first.store / "run/agent.sock", {"do": "status"})["user"]
        assert (user["uid"], os.stat(f"/proc/{_agent_pid(first)}").st_uid) == (0, 0)
        assert f"{shards[0]} can't be given to the number {uid} (Operation not permitted)" in user["why"]
        (first.mountpoint / "later").write_bytes(SMALL)
        assert wait_until([first.mountpoint], "protected", 60.0, shown=False)[0] == []
        cluster.kill(0)
    for name, content in (("big", BIG), ("small", SMALL), ("later", SMALL)):
        assert (second.mountpoint / name).read_bytes() == content
