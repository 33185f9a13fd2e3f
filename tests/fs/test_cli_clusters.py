"""Two clusters on one machine: no command takes a node of one for that of the other."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.ids import NodeId
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs import mount_table, status
from ckptfs.fs.cli import run
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.local_socket import Message, serve
from ckptfs.fs.mount_table import Mounted

CLUSTERS = {"a": b"a" * 16, "b": b"b" * 16}


@pytest.fixture
def two_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Stores of two nodes each of two clusters, all mounted as far as the kernel's table says; the first store of each."""
    found: list[Mounted] = []
    first: dict[str, Path] = {}
    for name, cluster in CLUSTERS.items():
        for number in range(2):
            directory = tmp_path / name / f"node-{number}"
            store = StoreDirectory.create_or_open(directory / "store", NodeId(f"node-{number}"))
            store.join(cluster, "catalog")
            found.append(Mounted(directory / "mnt", store.path, (0, 1)))
            first.setdefault(name, store.path)
    for module in (status, mount_table):
        monkeypatch.setattr(module, "mounts", lambda: found)
    monkeypatch.setattr(status, "DEFAULT_CONFIG", tmp_path / "none.toml")
    return first


@pytest.mark.parametrize(
    "arguments",
    [
        ["nodes", "list"],
        ["nodes", "admit", "node-9", "00" * 32],
        ["nodes", "remove", "node-0"],
        ["rebalance"],
        ["whatif", "--lose", "node-0"],
        ["drain"],
    ],
)
def test_what_concerns_one_cluster_is_refused_where_none_is_named(
    arguments: list[str], two_clusters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for store in two_clusters.values():
        assert str(store.parent / "mnt") in error


def _stores(*names: str) -> list[dict[str, Any]]:
    same = {"standing": "up", "live": True, "leads": False, "domain": "", "address": "", "store": "", "free_bytes": 0}
    return [same | {"node": name} for name in names]


async def test_the_cluster_that_is_named_is_asked(
    two_clusters: dict[str, Path], nursery: trio.Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    for name, store in two_clusters.items():

        async def answer(request: Message, name: str = name) -> Message:
            asked.append((name, request["do"]))
            return {"ok": True, "stores": _stores("node-10", "node-2"), "removed": True, "files": []}

        await nursery.start(serve, store / "run/agent.sock", answer)
    of_b = ["--of", str(two_clusters["b"].parent / "mnt"), "--json"]
    assert await trio.to_thread.run_sync(run, ["nodes", "list", *of_b]) == 0
    assert [node["node"] for node in json.loads(capsys.readouterr().out)["nodes"]] == ["node-2", "node-10"]
    assert await trio.to_thread.run_sync(run, ["nodes", "remove", "node-7", *of_b]) == 0
    assert asked == [("b", "status"), ("b", "remove_node")]
    nursery.cancel_scope.cancel()


def test_status_shows_each_cluster_by_itself(two_clusters: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 3
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("cluster ")]
    assert heads == [
        f"cluster {CLUSTERS[name].hex()[:8]}, mounted in {store.parent.parent}" for name, store in two_clusters.items()
    ]
    assert sum(line.startswith("nothing is known") for line in lines) == 2
    assert run(["status", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["at_risk"] is None
    assert [cluster["cluster"] for cluster in document["clusters"]] == [cluster.hex() for cluster in CLUSTERS.values()]
    assert [len(cluster["stores"]) for cluster in document["clusters"]] == [2, 2]
    assert document["clusters"][1]["at_risk"]["unknown"] == ["node-0", "node-1"]


@pytest.mark.slow
def test_a_watch_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    LocalCluster(tmp_path / "c").prepare(1)
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "status", str(tmp_path / "c"), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert watch.stdout.readline().startswith("node")
        watch.stdout.close()
        try:
            assert watch.wait(timeout=60) == 1
        finally:
            watch.kill()
        assert watch.stderr.read() == ""
