"""A node that is away too long: what its files show meanwhile, and again when it returns."""

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli import run
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.status import path_standing

pytestmark = [pytest.mark.slow, pytest.mark.mount]


def content(seed: int, size_bytes: int = 200_000) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def wait(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def standing(node: ClusterNode, of: str) -> str:
    answer = call(node.store / "run/agent.sock", {"do": "status"})
    return str(next(store["standing"] for store in answer["stores"] if store["node"] == of))


def state(path: Path) -> str:
    return path_standing(path).state


@pytest.fixture(params=["sqlite", "etcd"])
def lossy_cluster(request: pytest.FixtureRequest, start_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """2+2 on four nodes, which are declared lost after a second."""
    catalog = None
    if request.param == "etcd":
        etcd: Any = request.getfixturevalue("etcd")
        catalog = f"{etcd.url.replace('http://', 'etcd://')}/test-{os.urandom(4).hex()}"
    return start_cluster(4, catalog=catalog, data_shards=2, parity_shards=2, settle_seconds=0.1, repair_after_seconds=1.0)


def test_a_lost_node_takes_only_what_nobody_else_had_and_brings_it_back(
    lossy_cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = lossy_cluster
    first, *_, last = cluster.nodes
    here, there = first.mountpoint, last.mountpoint
    for step in (1, 2):
        (there / f"run/global_step{step}").mkdir(parents=True)
    (there / "run/global_step1/model.pt").write_bytes(content(1))
    (there / "run/latest").write_text("global_step2")
    for name in ("protected", "rolled-back", "conflict"):
        (there / name).write_bytes(content(1))
    assert not wait_until([there], "protected", 60.0, shown=False)[0]
    # Nothing is protected from now on, and nobody starts other agents.
    others = [pid for role in ("supervisor", "agent") for node in cluster.nodes[:3] if (pid := node.processes.pids()[role])]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    (there / "rolled-back").write_bytes(content(2))
    (there / "conflict").write_bytes(content(3))
    (there / "new").write_bytes(content(4))
    (there / "run/global_step2/model.pt").write_bytes(content(6))
    new = ("rolled-back", "conflict", "new", "run/global_step2/model.pt")
    wait(lambda: [state(there / name) for name in new] == ["local"] * 4)

    cluster.kill(3)
    for pid in reversed(others):
        os.kill(pid, signal.SIGCONT)
    wait(lambda: standing(first, "node-3") == "lost")
    wait(lambda: state(here / "new") == "lost")
    assert (here / "protected").read_bytes() == content(1)
    wait(lambda: path_standing(here / "rolled-back").files[0].is_rolled_back)
    assert (here / "rolled-back").read_bytes() == content(1)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        (here / "new").read_bytes()
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError), open(here / "new", "ab"):  # noqa: PT011
        pass
    wait(lambda: state(here / "run") == "lost")
    assert sorted(path_standing(here).as_json()["lost"]) == [str(here / "new"), str(here / "run/global_step2/model.pt")]
    assert run(["rollback", str(here)]) == 1  # it was saved a moment ago: somebody may go on with it
    capsys.readouterr()
    assert run(["rollback", str(here), "--now", "--json"]) == 0
    ((rolled_back,),) = [one["set_aside"] for one in json.loads(capsys.readouterr().out)["runs"]]
    assert sorted(os.listdir(here / "run")) == ["global_step1", "latest"]
    assert (here / "run/latest").read_text() == "global_step1"
    (here / "conflict").write_bytes(content(5))
    of = ["--of", str(cluster.directory)]
    assert run(["nodes", "list", "--json", *of]) == 0
    listed = json.loads(capsys.readouterr().out)["nodes"]
    assert [(one["node"], one["standing"]) for one in listed if one["standing"] != "up"] == [("node-3", "lost")]
    assert sum(one["leads"] for one in listed) == 1
    assert run(["nodes", "remove", "node-0", *of]) == 1
    assert "node-0 is up: stop it first" in capsys.readouterr().err
    assert run(["nodes", "remove", "node-3", *of]) == 1
    refused = capsys.readouterr().err
    assert "only node-3 has the newest content of 3 files" in refused
    assert "new" in refused
    assert "rolled-back" in refused

    cluster.up(None, ClusterSettings())
    wait(lambda: standing(first, "node-3") == "up")
    assert (here / "rolled-back").read_bytes() == content(2)
    assert (here / "new").read_bytes() == content(4)
    assert (Path(rolled_back["to"]) / "model.pt").read_bytes() == content(6)
    assert (there / "conflict").read_bytes() == content(5)
    (name,) = os.listdir(here / ".ckptfs/conflicts")
    assert (here / ".ckptfs/conflicts" / name).read_bytes() == content(3)
    assert not wait_until([here], "protected", 60.0, shown=False)[0]
