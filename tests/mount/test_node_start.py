"""A node that can't run says so in one line, before anything is mounted and without touching what is there."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.bare_mountpoint import set_takes_files
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]


@pytest.fixture
def node(start_cluster: Any) -> ClusterNode:
    """A node that ran and was ended, with one file."""
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    (cluster.nodes[0].mountpoint / "file").write_bytes(b"content")
    cluster.down(remove=False)
    return cluster.nodes[0]


def _refused(node: ClusterNode) -> str:
    """Start the node, which can't run; the one line it says."""
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd="/")
    assert done.returncode in (1, 2), done.stderr
    assert done.stderr.startswith("ckptfs: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert node.processes.living() == []
    assert mounts_at(node.mountpoint) == []
    return done.stderr


def _starts(node: ClusterNode) -> None:
    """It starts as soon as the reason is gone, and has its file."""
    cluster = LocalCluster(node.directory.parent)
    cluster.revive(node.number)
    assert (node.mountpoint / "file").read_bytes() == b"content"


def _line_changed(node: ClusterNode, key: str, value: str) -> None:
    lines = node.config.read_text().splitlines()
    node.config.write_text("\n".join(f"{key} = {value}" if line.startswith(f"{key} =") else line for line in lines) + "\n")


def test_a_mountpoint_that_is_not_there(node: ClusterNode) -> None:
    set_takes_files(node.mountpoint, True)
    node.mountpoint.rmdir()
    assert f"mkdir -p {node.mountpoint}" in _refused(node)
    node.mountpoint.mkdir()
    _starts(node)


def test_a_mountpoint_with_something_in_it(node: ClusterNode) -> None:
    set_takes_files(node.mountpoint, True)
    (node.mountpoint / "precious").write_text("somebody's")
    assert "not empty" in _refused(node)
    assert (node.mountpoint / "precious").read_text() == "somebody's"
    (node.mountpoint / "precious").unlink()
    _starts(node)


def test_a_mountpoint_of_another_file_system(node: ClusterNode) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", node.mountpoint], check=True)
    try:
        assert "another file system" in _refused(node)
    finally:
        subprocess.run(["umount", node.mountpoint], check=True)
    _starts(node)


def test_a_damaged_index_of_the_mount_is_set_aside_and_made_again(node: ClusterNode) -> None:
    database = node.store / "mount.db"
    database.write_bytes(b"not a database" * 1000)
    _starts(node)
    (aside,) = node.store.glob("mount.db.damaged-*[0-9]")
    assert f"mount_db_set_aside as={aside}" in (node.log / "supervisor.log").read_text()


def test_an_index_of_the_mount_of_a_newer_release_is_refused(node: ClusterNode) -> None:
    with closing(sqlite3.connect(node.store / "mount.db")) as connection, connection:
        connection.execute("UPDATE fact SET value = x'32' WHERE name = 'format'")
    assert "has format 2" in _refused(node)


def test_a_catalog_that_is_no_catalog(node: ClusterNode) -> None:
    kept = node.catalog.read_bytes()
    for path in node.catalog.parent.glob("catalog.db*"):
        path.unlink()
    node.catalog.write_bytes(b"not a catalog " * 1000)
    assert str(node.catalog) in _refused(node)
    assert node.catalog.read_bytes() == b"not a catalog " * 1000
    node.catalog.write_bytes(kept)
    _starts(node)


def test_a_configuration_with_a_mistake(node: ClusterNode) -> None:
    _line_changed(node, "settle_seconds", "-1")
    said = _refused(node)
    assert str(node.config) in said
    assert "settle_seconds" in said


def test_a_store_that_is_a_file(node: ClusterNode, scratch: Path) -> None:
    (scratch / "file").touch()
    _line_changed(node, "store", f'"{scratch / "file"}"')
    assert str(scratch / "file") in _refused(node)
    assert os.stat(scratch / "file").st_size == 0
