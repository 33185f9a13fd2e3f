"""Nodes that are lost, drained or told to end, on both catalogs: their shards are made again, and nothing goes with them."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import set_state
from ckptfs.fs.catalog import open_catalog
from ckptfs.fs.cli import run
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.config import load_config
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.status import path_standing
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount]


@pytest.fixture(params=["sqlite", "etcd"])
def cluster(request: pytest.FixtureRequest, start_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """Four nodes, 1+1."""
    catalog = None
    if request.param == "etcd":
        catalog = request.getfixturevalue("etcd").url.replace("http://", "etcd://") + f"/test-{os.urandom(4).hex()}"
    return start_cluster(4, catalog=catalog, data_shards=1, parity_shards=1, settle_seconds=0.1)


def declare_lost(node: ClusterNode) -> None:
    async def declare() -> None:
        kv = open_catalog(load_config(node.config), "test")
        await set_state(kv, StoreDirectory.open(node.store).store_id, StoreState.LOST)
        await kv.aclose()

    trio.run(declare)


def agent(node: ClusterNode, do: str, **fields: Any) -> dict[str, Any]:
    return dict(call(node.store / "run" / "agent.sock", {"do": do, **fields}))


def test_one_node_after_the_other_goes_and_every_byte_stays(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = cluster.nodes
    run_directory = nodes[0].mountpoint / "run"
    contents: dict[Path, bytes] = {}
    for step in (1, 2, 3):
        (run_directory / f"step-{step}").mkdir(parents=True)
        for name, size in (("model.pt", 1_500_000 + step), ("config.json", 900)):
            contents[Path("run") / f"step-{step}" / name] = content = os.urandom(size)
            (nodes[0].mountpoint / "run" / f"step-{step}" / name).write_bytes(content)
    assert wait_until([run_directory], "protected", 60.0, shown=False)[0] == []

    # What would be lost is known before it is.
    assert run(["whatif", "--lose", "node-3", str(nodes[2].mountpoint), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not document["assumed"]
    answer = call(nodes[2].store / "run" / "mount.sock", {"do": "what_if"})  # a question without sense ends nothing
    assert not answer["ok"]
    assert "its log has the details" in answer["message"]
    (resume,) = document["resume"]
    assert (document["files"], document["survive"], resume["newest"], resume["step"]) == (6, 6, "step-3", 3)
    assert run(["whatif", "--lose", "node-0,node-1,node-2,node-3", str(nodes[2].mountpoint)]) == 1
    assert "no complete checkpoint would survive" in capsys.readouterr().out
    assert run(["whatif", "--lose", "node-7", str(run_directory)]) == 2
    assert run(["status", str(cluster.directory)]) == 0
    assert "if any one of these nodes died now, no closed file would be lost" in capsys.readouterr().out

    # A node is lost: its shards are made again.
    cluster.kill(3)
    declare_lost(nodes[3])
    wait_for(lambda: path_standing(run_directory).state == "protected", "the shards of the lost node made again", 40)
    assert run(["verify", str(run_directory), "--json"]) == 0
    capsys.readouterr()

    # Another one is drained: it holds nothing any more.
    (nodes[2].mountpoint / "run" / "late").write_bytes(b"late" * 1000)
    contents[Path("run/late")] = b"late" * 1000
    assert run(["drain", str(nodes[2].mountpoint), "--deadline", "60s", "--json"]) == 0
    drained = json.loads(capsys.readouterr().out)
    assert (drained["state"], drained["held"], drained["left_files"]) == ("draining", 0, 0)
    cluster.kill(2)
    assert path_standing(run_directory).state == "protected"

    # The writer is told to end, and gives away first what only it has.
    contents[Path("run/last")] = os.urandom(300_000)
    (nodes[0].mountpoint / "run" / "last").write_bytes(contents[Path("run/last")])
    supervisor = nodes[0].processes.pids()["supervisor"]
    assert supervisor is not None
    os.kill(supervisor, signal.SIGTERM)
    assert nodes[0].processes.wait_ended(time.monotonic() + 40)
    for path, content in contents.items():
        assert (nodes[1].mountpoint / path).read_bytes() == content
