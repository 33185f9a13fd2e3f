"""The path itself: save on one node, protect, lose any two nodes, read on a third. Real processes, mounts and sockets."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]


def _ckptfs(*arguments: object, timeout: float = 90) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command, run from a directory that has nothing to do with it."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
    )
    return done.returncode, done.stdout, done.stderr


def _json(*arguments: object) -> Any:
    code, out, error = _ckptfs(*arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _content(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def test_a_protected_file_outlives_its_writer_and_one_more_node(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    first, third = cluster.nodes[0].mountpoint, cluster.nodes[2].mountpoint
    big, small = _content((30 << 20) + 7), _content(1000, 1)
    (first / "run").mkdir()
    (first / "run" / "big").write_bytes(big)
    (first / "run" / "small").write_bytes(small)

    assert _json("flush", first / "run", "--timeout", 60)["reached"]
    standing = _json("status", first / "run")
    assert standing == {
        "path": str(first / "run"),
        "state": "protected",
        "protected_m": 2,
        "bytes": len(big) + 1000,
        "files": 2,
        "damaged": [],
        "away": [],
        "lost": [],
        "rolled_back": [],
        "problems": [],
    }
    assert _json("verify", first / "run")["ok"]

    for number in (0, 1):
        code, _, error = _ckptfs("cluster", "kill", cluster.directory, number)
        assert code == 0, error
    nodes = _json("status", cluster.directory)["nodes"]
    assert [node["alive"] for node in nodes] == [False, False, True, True, True, True]
    assert nodes[0]["processes"] == {"supervisor": None, "mount": None, "agent": None}

    assert (third / "run" / "big").read_bytes() == big
    assert (third / "run" / "small").read_bytes() == small
    assert _json("status", third / "run" / "big")["protected_m"] == 0

    for number in (0, 1):
        assert _ckptfs("cluster", "revive", cluster.directory, number)[0] == 0
    assert (first / "run" / "big").read_bytes() == big
    _wait(lambda: _json("status", third / "run" / "big")["protected_m"] == 2)


def test_any_two_nodes_may_go(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    content = _content((6 << 20) + 4097)
    (cluster.nodes[0].mountpoint / "file").write_bytes(content)
    assert _ckptfs("flush", cluster.nodes[0].mountpoint, "--timeout", 60)[0] == 0
    for lost in ((2, 3), (4, 5), (0, 5)):
        for number in lost:
            cluster.kill(number)
        reader = next(node for node in cluster.nodes if node.number not in lost and node.number != 0)
        assert (reader.mountpoint / "file").read_bytes() == content, lost
        cluster.up(None, ClusterSettings())


def test_status_of_a_cluster_and_of_a_mountpoint_has_what_programs_rely_on(cluster: LocalCluster) -> None:
    nodes = _json("status", cluster.directory)["nodes"]
    assert [node["id"] for node in nodes] == [f"node-{number}" for number in range(6)]
    for node in nodes:
        assert node["alive"] is True
        assert node["lane"] in ("passthrough", "served")
        assert all(isinstance(node["processes"][role], int) for role in ("supervisor", "mount", "agent"))
        assert isinstance(node["unprotected_bytes"], int)
        assert node["oldest_unprotected_seconds"] is None or node["oldest_unprotected_seconds"] >= 0
    (one,) = _json("status", cluster.nodes[4].mountpoint)["nodes"]
    assert one["id"] == "node-4"
    assert one["mountpoint"] == str(cluster.nodes[4].mountpoint)


def test_a_file_that_is_still_written_is_not_protected(cluster: LocalCluster) -> None:
    path = cluster.nodes[0].mountpoint / "still-written"
    with open(path, "wb", buffering=0) as file:
        file.write(b"x" * 100_000)
        assert _json("status", path)["state"] == "open"
        code, out, error = _ckptfs("flush", path, "--timeout", 0.5, "--json")
        assert code == 1
        assert json.loads(out)["behind"] == [{"path": str(path), "state": "open"}]
        assert error.count("\n") == 1
    assert _json("flush", path, "--timeout", 60)["reached"]
    path.unlink()


def test_the_agent_comes_back_when_it_is_killed(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    node = cluster.nodes[0]
    content = _content(20 << 20)
    (node.mountpoint / "file").write_bytes(content)
    killed = node.processes.pids()["agent"]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert (node.mountpoint / "file").read_bytes() == content
    _wait(lambda: node.processes.pids()["agent"] not in (None, killed))
    assert _ckptfs("flush", node.mountpoint, "--timeout", 60)[0] == 0
    assert (cluster.nodes[3].mountpoint / "file").read_bytes() == content


def test_what_was_synced_is_there_after_the_node_was_killed(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    node = cluster.nodes[0]
    content = _content(5 << 20)
    with open(node.mountpoint / "synced", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        cluster.kill(0)
        with contextlib.suppress(OSError):
            file.close()
    cluster.revive(0)
    assert (node.mountpoint / "synced").read_bytes() == content


def test_a_cluster_goes_down_comes_up_and_has_everything(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    content = _content(3 << 20)
    (cluster.nodes[1].mountpoint / "file").write_bytes(content)
    assert _ckptfs("cluster", "down", cluster.directory)[0] == 0
    assert not os.listdir(cluster.nodes[1].mountpoint)
    assert all(not node.processes.living() for node in cluster.nodes)
    assert len(_json("cluster", "up", cluster.directory)["started"]) == 3
    assert _json("cluster", "up", cluster.directory)["started"] == []
    for node in cluster.nodes:
        assert (node.mountpoint / "file").read_bytes() == content


def test_a_shard_that_was_changed_on_disk_is_found_and_never_read(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    content = _content(8 << 20)
    (cluster.nodes[0].mountpoint / "file").write_bytes(content)
    assert _ckptfs("flush", cluster.nodes[0].mountpoint, "--timeout", 60)[0] == 0
    shards = [path for path in (cluster.nodes[4].store / "shards").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert shards
    for shard in shards:
        with open(shard, "r+b") as file:
            file.seek(shard.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
    cluster.kill(0)
    code, out, _ = _ckptfs("verify", cluster.nodes[2].mountpoint, "--json")
    assert code == 1
    assert json.loads(out)["ok"] is False
    assert (cluster.nodes[2].mountpoint / "file").read_bytes() == content


@contextlib.contextmanager
def _config(cluster: LocalCluster, number: int, **changed: str) -> Iterator[Path]:
    """A configuration like that of a node of the cluster, with some lines replaced."""
    lines = cluster.nodes[number].config.read_text().splitlines()
    for key, value in changed.items():
        lines = [f"{key} = {json.dumps(value)}" if line.startswith(f"{key} =") else line for line in lines]
    path = cluster.directory / "changed.toml"
    path.write_text("\n".join(lines) + "\n")
    yield path
    path.unlink()


def _refused(config: Path) -> str:
    """Start a node that can't run; the one line it says."""
    code, _, error = _ckptfs("node", "--config", config, timeout=30)
    assert code in (1, 2), error
    assert error.startswith("ckptfs: ")
    assert error.count("\n") == 1, error
    return error


def test_a_store_in_use_by_a_running_node_is_refused(cluster: LocalCluster, scratch: Path) -> None:
    (scratch / "mnt").mkdir()
    with _config(cluster, 0, mountpoint=str(scratch / "mnt")) as config:
        assert "already runs" in _refused(config)


def test_a_store_of_another_node_is_refused(cluster: LocalCluster, scratch: Path) -> None:
    (scratch / "mnt").mkdir()
    with _config(cluster, 0, mountpoint=str(scratch / "mnt"), id="other") as config:
        assert "belongs to node 'node-0'" in _refused(config)


def test_unfit_mountpoints_are_refused(cluster: LocalCluster, scratch: Path) -> None:
    (scratch / "full").mkdir()
    (scratch / "full" / "file").touch()
    store = str(scratch / "store")
    for mountpoint, words in (
        (scratch / "none", "none"),
        (scratch / "full" / "file", "not a directory"),
        (scratch / "full", "not empty"),
        (cluster.nodes[1].mountpoint, "already"),
    ):
        with _config(cluster, 0, mountpoint=str(mountpoint), store=store, id="other") as config:
            assert words in _refused(config)
    assert (cluster.nodes[1].processes.living()) != []


def test_a_store_of_a_newer_format_is_refused(cluster: LocalCluster, scratch: Path) -> None:
    (scratch / "mnt").mkdir()
    (scratch / "store").mkdir()
    label = {"format": 99, "store": "00" * 16, "node": "other"}
    (scratch / "store" / "store.json").write_text(json.dumps(label))
    with _config(cluster, 0, mountpoint=str(scratch / "mnt"), store=str(scratch / "store"), id="other") as config:
        assert "format 99" in _refused(config)
    assert [path.name for path in (scratch / "store").iterdir()] == ["store.json"]


def test_the_mount_process_comes_back_when_it_is_killed(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    content = _content(8 << 20)
    (node.mountpoint / "closed").write_bytes(content)
    with open(node.mountpoint / "open", "wb", buffering=0) as file:
        file.write(content[: 4 << 20])
        killed = node.processes.pids()["mount"]
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        file.write(content[4 << 20 :])
    _wait(lambda: node.processes.pids()["mount"] not in (None, killed) and node.answers())
    assert (node.mountpoint / "closed").read_bytes() == content
    assert (node.mountpoint / "open").read_bytes() == content
    assert _ckptfs("flush", node.mountpoint, "--to", "local", "--timeout", 30)[0] == 0


def test_names_of_any_bytes_are_shown_as_they_are(cluster: LocalCluster) -> None:
    directory = cluster.nodes[1].mountpoint / "any names"
    directory.mkdir()
    for name in (b"[red]no markup[bold]", b":smile:", "näme 😀".encode(), b"\xff\xfe not UTF-8"):
        with open(os.fsencode(directory) + b"/" + name, "wb") as file:
            file.write(b"x" * 1000)
    code, out, error = _ckptfs("flush", directory, "--timeout", 0)
    assert code in (0, 1)
    assert "Traceback" not in error
    assert _ckptfs("flush", directory, "--timeout", 60)[0] == 0
    code, out, error = _ckptfs("status", directory / "[red]no markup[bold]")
    assert (code, out[:10]) == (0, "protected:"), error
    code, out, error = _ckptfs("verify", directory, "--json")
    assert code == 0, error
    assert {os.path.basename(file["path"]) for file in json.loads(out)["files"]} == {
        "[red]no markup[bold]", ":smile:", "näme 😀", "\udcff\udcfe not UTF-8",
    }  # fmt: skip
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_who_may_not_ask_is_told_so(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1)
    os.chown(cluster.nodes[0].store / "run", 65534, 65534)
    without = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
    command = [*without, sys.executable, "-P", "-m", "ckptfs.fs.cli", "status", str(cluster.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert "run this as root" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
