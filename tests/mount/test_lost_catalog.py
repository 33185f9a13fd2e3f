"""The catalog is gone, and as many stores as may go: what nodes do with the one that is rebuilt, through real mounts."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli import run
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount]

Start = Callable[..., LocalCluster]
SETTINGS: dict[str, Any] = {"data_shards": 2, "parity_shards": 1, "settle_seconds": 0.1}


def content(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def save(directory: Path, files: dict[str, bytes]) -> None:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    protect(directory)


def protect(path: Path) -> None:
    behind, _, _ = wait_until([path], "protected", 60.0, shown=False)
    assert not behind


def recovered(capsys: pytest.CaptureFixture[str], cluster: LocalCluster, catalog: str) -> dict[str, Any]:
    stores = [str(node.store) for node in cluster.nodes if node.store.exists()]
    capsys.readouterr()
    assert run(["recover", "--to", catalog, *stores, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def copy_catalog(cluster: LocalCluster) -> None:
    """Have one agent write its copy now: a new process does, when the copy it finds is old."""
    node = cluster.nodes[0]
    copy = node.store / "agent" / "catalog.copy"
    os.utime(copy, (0, 0))
    agent = node.processes.pids()["agent"]
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while copy.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


KEPT = {"big": content((3 << 20) + 7, 1), "small": content(1000, 2)}
LATER = {"big": content((2 << 20) + 1, 3), "small": content(500, 4)}


def check(cluster: LocalCluster, found: dict[str, Any]) -> None:
    later = {name: f"/.ckptfs/recovered/{found['state_revision']}/later/{name}" for name in LATER}
    assert {*later.values()} <= {*found["recovered"]}
    for node in cluster.nodes:
        assert sorted(os.listdir(node.mountpoint)) == [".ckptfs", "kept"]  # neither what was deleted, nor what came later
        for name, data in KEPT.items():
            assert (node.mountpoint / "kept" / name).read_bytes() == data
        for name, data in LATER.items():
            assert Path(f"{node.mountpoint}{later[name]}").read_bytes() == data
    assert run(["verify", "--repair", str(cluster.nodes[1].mountpoint)]) == 0
    assert run(["verify", "--deep", str(cluster.nodes[2].mountpoint)]) == 0
    for node in cluster.nodes:
        assert "catalog_recovered" in (node.log / "supervisor.log").read_text()


@pytest.mark.timeout(180)
def test_a_catalog_on_sqlite_is_rebuilt(start_cluster: Start, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = start_cluster(4, **SETTINGS)
    mounts = [node.mountpoint for node in cluster.nodes]
    save(mounts[0] / "kept", KEPT)
    save(mounts[0] / "gone", LATER)
    shutil.rmtree(mounts[0] / "gone")
    copy_catalog(cluster)
    save(mounts[0] / "later", LATER)
    for number in (1, 2, 3):
        cluster.kill(number)
    (mounts[0] / "later" / "closed").write_bytes(b"only in its segment")
    behind, _, _ = wait_until([mounts[0] / "later" / "closed"], "local", 30.0, shown=False)
    assert not behind
    # The catalog says so first, and the node's own index, which is what is found, a moment later.
    mount = cluster.nodes[0].store / "run" / "mount.sock"
    wait_for(lambda: call(mount, {"do": "status"})["open_files"] == 0, "the file is let go")
    cluster.kill(0)
    for path in cluster.directory.glob("catalog.db*"):
        path.unlink()
    shutil.rmtree(cluster.nodes[2].store)
    found = recovered(capsys, cluster, f"sqlite:///{cluster.directory}/catalog.db")
    assert len(found["recovered"]) == 2
    assert len(found["stores_not_given"]) == 1
    (closed,) = found["closed"]
    cluster.up(None, ClusterSettings())
    protect(Path(f"{mounts[0]}{closed}"))
    assert Path(f"{mounts[3]}{closed}").read_bytes() == b"only in its segment"
    check(cluster, found)
    # Taken note of once: the next start is like any other.
    before = (cluster.nodes[0].log / "supervisor.log").read_text().count("catalog_recovered")
    cluster.kill(0)
    cluster.revive(0)
    assert (cluster.nodes[0].log / "supervisor.log").read_text().count("catalog_recovered") == before == 1
    assert (mounts[0] / "kept/big").read_bytes() == KEPT["big"]


@pytest.mark.timeout(180)
def test_a_catalog_on_etcd_is_rebuilt_in_another_etcd(
    start_cluster: Start, make_etcd: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    member = make_etcd()
    place = member.url.replace("http://", "etcd://")
    cluster = start_cluster(4, catalog=f"{place}/run", **SETTINGS)
    mounts = [node.mountpoint for node in cluster.nodes]
    save(mounts[0] / "kept", KEPT)
    save(mounts[0] / "gone", LATER)
    shutil.rmtree(mounts[0] / "gone")
    os.listdir(mounts[3])  # its replica has all of that
    cluster.kill(3)
    save(mounts[0] / "later", LATER)
    for number in range(3):
        cluster.kill(number)
        for path in cluster.nodes[number].store.glob("replica.db*"):
            path.unlink()
    member.kill()
    shutil.rmtree(cluster.nodes[2].store)
    other = make_etcd().url.replace("http://", "etcd://")
    for node in cluster.nodes:
        node.config.write_text(node.config.read_text().replace(place, other))
    found = recovered(capsys, cluster, f"{other}/run")
    assert len(found["recovered"]) == 2
    cluster.up(None, ClusterSettings())
    check(cluster, found)
    save(mounts[1] / "new", KEPT)
    assert (mounts[3] / "new/big").read_bytes() == KEPT["big"]
