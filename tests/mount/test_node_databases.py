"""The databases of real nodes damaged, lost or replaced: said in one line, mended where that can be done, never a wrong byte."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _ckptfs(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def _refused(node: ClusterNode) -> str:
    code, _, error = _ckptfs("node", "--config", node.config)
    assert code == 1, error
    assert error.startswith("ckptfs: ")
    assert error.count("\n") == 1, error
    assert mounts_at(node.mountpoint) == []
    return error


def _segments(node: ClusterNode) -> set[Path]:
    return {path for path in (node.store / "segments").rglob("*") if path.is_file()}


def _flip(path: Path, part: float, count: int = 400) -> None:
    """Overwrite some bytes in the middle of a page."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(int(size * part) // 4096 * 4096 + 8)
        file.write(b"\xee" * count)


def _protected(cluster: LocalCluster, contents: dict[str, bytes]) -> None:
    """Save the files on node 0 and wait until they are protected."""
    for name, content in contents.items():
        (cluster.nodes[0].mountpoint / name).write_bytes(content)
    code, _, error = _ckptfs("flush", cluster.nodes[0].mountpoint, "--timeout", 50)
    assert code == 0, error


def _read(cluster: LocalCluster, contents: dict[str, bytes]) -> None:
    """Every node has every byte."""
    for node in cluster.nodes:
        for name, content in contents.items():
            assert (node.mountpoint / name).read_bytes() == content, (node.id, name)


SMALL = {f"small-{number:03}": f"{number} ".encode() * (100 + number) for number in range(60)}


# The catalog


def test_a_lost_catalog_costs_no_segment_and_is_taken_back(start_cluster: Any, scratch: Path) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    (node.mountpoint / "file").write_bytes(b"content")
    assert _ckptfs("flush", node.mountpoint, "--to", "local", "--timeout", 30)[0] == 0
    cluster.down(remove=False)
    segments = _segments(node)
    shutil.move(node.catalog, scratch / "catalog.db")
    assert f"the catalog {node.catalog} is gone or empty" in _refused(node)
    node.catalog.touch()
    assert "gone or empty" in _refused(node)
    code, _, error = _ckptfs("cluster", "up", cluster.directory)
    assert code == 1
    assert "gone or empty" in error
    assert _segments(node) == segments
    shutil.move(scratch / "catalog.db", node.catalog)
    cluster.revive(0)
    assert (node.mountpoint / "file").read_bytes() == b"content"


def test_another_cluster_s_catalog_is_refused(start_cluster: Any, scratch: Path) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    (node.mountpoint / "file").write_bytes(b"content")
    cluster.down(remove=False)
    other = LocalCluster(scratch / "other")
    other.up(1, ClusterSettings())
    for number in range(50):
        (other.nodes[0].mountpoint / f"file-{number}").write_bytes(b"x")
    other.down(remove=False)
    kept = node.catalog.read_bytes()
    shutil.copy(other.nodes[0].catalog, node.catalog)
    segments = _segments(node)
    assert "another cluster's" in _refused(node)
    assert _segments(node) == segments
    node.catalog.write_bytes(kept)
    cluster.revive(0)
    assert (node.mountpoint / "file").read_bytes() == b"content"


def test_a_catalog_that_lost_its_log_is_refused_until_it_is_back(start_cluster: Any, scratch: Path) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    for number in range(50):
        (node.mountpoint / f"file-{number}").write_bytes(b"content of %d" % number)

    def noted() -> int:
        with closing(sqlite3.connect(node.store / "mount.db")) as connection:
            row = connection.execute("SELECT value FROM fact WHERE name = 'catalog_revision'").fetchone()
            return int(row[0]) if row else 0

    _wait(lambda: noted() > 50)
    cluster.kill(0)
    log = Path(f"{node.catalog}-wal")
    shutil.move(log, scratch / "log")
    said = _refused(node)
    assert "holds no names: its write-ahead log (catalog.db-wal) is gone or damaged" in said
    assert "no file in any store was touched" in said
    log.unlink(missing_ok=True)
    shutil.move(scratch / "log", log)
    cluster.revive(0)
    for number in range(50):
        assert (node.mountpoint / f"file-{number}").read_bytes() == b"content of %d" % number


def test_an_older_catalog_that_is_accepted_costs_no_segment(start_cluster: Any, scratch: Path) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    (node.mountpoint / "known").write_bytes(b"known")
    _ckptfs("flush", node.mountpoint, "--to", "local", "--timeout", 30)
    cluster.down(remove=False)
    shutil.copy(node.catalog, scratch / "older.db")
    cluster.revive(0)
    (node.mountpoint / "newer").write_bytes(b"newer")
    _ckptfs("flush", node.mountpoint, "--to", "local", "--timeout", 30)
    cluster.down(remove=False)
    segments = _segments(node)
    assert len(segments) == 2
    shutil.copy(scratch / "older.db", node.catalog)
    for path in node.store.glob("mount.db*"):
        path.unlink()
    cluster.revive(0)
    assert os.listdir(node.mountpoint) == ["known"]
    assert (node.mountpoint / "known").read_bytes() == b"known"
    _wait(lambda: "1 segments in" in _ckptfs("status", node.mountpoint)[1])
    assert _segments(node) == segments


def test_a_damaged_catalog_is_refused_by_every_node(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    for number in range(200):
        (cluster.nodes[0].mountpoint / f"file-{number}").write_bytes(b"x")
    cluster.down(remove=False)
    kept = cluster.nodes[0].catalog.read_bytes()
    assert b"file-17" in kept
    cluster.nodes[0].catalog.write_bytes(kept.replace(b"file-17", b"film-17"))  # much of the file is free pages
    for node in cluster.nodes:
        assert f"the catalog {node.catalog} is damaged" in _refused(node)
    cluster.nodes[0].catalog.write_bytes(kept)
    cluster.up(None, ClusterSettings())
    assert len(os.listdir(cluster.nodes[2].mountpoint)) == 200


# Copies of small files


@pytest.mark.parametrize("damage", ["pages", "emptied", "foreign", "the log"])
def test_damaged_copies_are_found_at_start_said_and_made_again(start_cluster: Any, damage: str) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    _protected(cluster, SMALL)
    node = cluster.nodes[1]
    database = node.store / "agent" / "small_copies.db"
    if damage == "the log":
        cluster.kill(1)
        _flip(Path(f"{database}-wal"), 0.3)
    else:
        cluster.down(remove=False)
        if damage == "pages":
            for part in (0.2, 0.5, 0.8):
                _flip(database, part)
        else:
            database.write_bytes(b"" if damage == "emptied" else b"not a database" * 3000)
    cluster.up(None, ClusterSettings())
    _read(cluster, SMALL)
    code, out, _ = _ckptfs("status", cluster.directory)
    assert code == 0
    assert "node-1: small_copies.db was damaged: copies may be missing here, other nodes have them: ckptfs verify --repair" in out
    assert "small_copies_" in (node.log / "agent.log").read_text()
    code, out, _ = _ckptfs("verify", cluster.directory, "--json")
    assert code == 1
    wrong = [file for file in json.loads(out)["files"] if file["result"] != "ok"]
    assert wrong
    assert {len(file["missing"]) + len(file["damaged"]) for file in wrong} == {1}
    code, out, error = _ckptfs("verify", cluster.directory, "--repair")
    assert code == 0, error
    assert f"{len(wrong)} repaired" in out
    assert _ckptfs("verify", cluster.directory)[0] == 0
    for path in node.store.glob("agent/small_copies.db.damaged-*"):
        path.unlink()
    assert "damaged" not in _ckptfs("status", cluster.directory)[1]
    _read(cluster, SMALL)


def test_copies_damaged_under_a_running_node_are_found_by_verify(start_cluster: Any) -> None:
    """Also those that are still in the write-ahead log, and in SQLite's memory."""
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    _protected(cluster, SMALL)
    node = cluster.nodes[2]
    for part in (0.3, 0.5, 0.7):
        _flip(Path(f"{node.store / 'agent' / 'small_copies.db'}-wal"), part, 3000)
    code, out, _ = _ckptfs("verify", cluster.directory, "--json")
    assert code == 1
    assert [file for file in json.loads(out)["files"] if file["result"] in ("damaged", "missing")]
    _read(cluster, SMALL)
    assert _ckptfs("verify", cluster.directory, "--repair")[0] == 0
    assert _ckptfs("verify", cluster.directory)[0] == 0
    cluster.down(remove=False)
    cluster.up(None, ClusterSettings())
    assert _ckptfs("verify", cluster.directory)[0] == 0
    _read(cluster, SMALL)


def test_copies_of_a_newer_release_are_refused(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    cluster.down(remove=False)
    with closing(sqlite3.connect(cluster.nodes[0].store / "agent" / "small_copies.db")) as connection:
        connection.execute("PRAGMA user_version=2")
    assert "small_copies.db has format 2" in _refused(cluster.nodes[0])


# Indexes


@pytest.mark.parametrize("name", ["agent/agent.db", "mount.db"])
@pytest.mark.parametrize("damage", ["gone", "emptied", "foreign", "pages", "cut", "the log", "another format"])
def test_an_index_in_any_state_is_made_anew(start_cluster: Any, name: str, damage: str) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    contents = {"large": os.urandom(3 << 20), "small": b"small"}
    _protected(cluster, contents)
    node = cluster.nodes[0]
    (node.mountpoint / "open").write_bytes(b"not yet protected" * 1000)
    database = node.store / name
    if damage == "the log":
        cluster.kill(0)
        _flip(Path(f"{database}-wal"), 0.3)
    else:
        cluster.down(remove=False)
        if damage == "gone":
            database.unlink()
        elif damage == "emptied":
            database.write_bytes(b"")
        elif damage == "foreign":
            database.write_bytes(b"not a database" * 3000)
        elif damage == "pages":
            _flip(database, 0.5)
        elif damage == "cut":
            os.truncate(database, database.stat().st_size // 2)
        elif name == "agent/agent.db":
            with closing(sqlite3.connect(database)) as connection:
                connection.execute("PRAGMA user_version=2")
        else:
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("UPDATE fact SET value = x'32' WHERE name = 'format'")
            assert "has format 2, this program reads 1; use the release that wrote it" in _refused(node)
            return
    cluster.up(None, ClusterSettings())
    contents["open"] = b"not yet protected" * 1000
    _read(cluster, contents)
    code, _, error = _ckptfs("flush", node.mountpoint, "--timeout", 50)
    assert code == 0, error
    code, out, error = _ckptfs("verify", cluster.directory)
    assert code == 0, out + error


def test_a_mount_process_that_finds_its_index_damaged_ends_the_node_and_the_next_start_is_whole(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    (node.mountpoint / "closed").write_bytes(b"closed" * 1000)
    held = open(node.mountpoint / "held", "wb", buffering=0)  # noqa: SIM115 (closed amid the test)
    held.write(b"held" * 1000)
    os.fsync(held.fileno())
    node.store.joinpath("mount.db").write_bytes(b"not a database" * 3000)
    mount = node.processes.pids()["mount"]
    assert mount is not None
    os.kill(mount, signal.SIGKILL)
    _wait(lambda: node.processes.living() == [])
    assert "is rebuilt from the catalog when the node starts again" in (node.log / "node.log").read_text()
    held.close()
    cluster.revive(0)
    assert (node.mountpoint / "closed").read_bytes() == b"closed" * 1000
    assert (node.mountpoint / "held").read_bytes() == b"held" * 1000
