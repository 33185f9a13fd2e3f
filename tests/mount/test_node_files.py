"""What happens to files on the way from close to local, on a real mount of one node."""

import mmap
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptfs.cache.catalog_format import Inode, Version, inode_key, version_key
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount]


@pytest.fixture
def node(start_cluster: Any) -> ClusterNode:
    """A node whose files stay as they were closed until somebody asks."""
    cluster: LocalCluster = start_cluster(1, settle_seconds=30.0)
    return cluster.nodes[0]


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _ask(node: ClusterNode, **request: object) -> Any:
    return call(node.store / "run" / "mount.sock", dict(request))


def _state(node: ClusterNode, path: Path) -> str:
    ino = path.stat().st_ino
    return str(_ask(node, do="state", inos=[ino])["states"][ino]["state"])


def _settled(node: ClusterNode) -> None:
    """Ask until everything that is closed is local."""

    def nothing_left() -> bool:
        _ask(node, do="settle")
        return bool(_ask(node, do="status")["settling_files"] == 0)

    _wait(nothing_left)


def _segments(node: ClusterNode) -> list[Path]:
    return [path for path in (node.store / "segments").rglob("*") if path.is_file()]


def test_a_closed_file_that_is_deleted_while_it_settles_is_gone(node: ClusterNode) -> None:
    (node.mountpoint / "file").write_bytes(b"x" * 100_000)
    (node.mountpoint / "file").unlink()
    _settled(node)
    _wait(lambda: _segments(node) == [])
    assert os.listdir(node.mountpoint) == []
    assert _ask(node, do="status")["unprotected_files"] == 0


def test_a_file_renamed_while_it_settles_is_local_under_its_new_name(node: ClusterNode) -> None:
    (node.mountpoint / "old").write_bytes(b"content")
    (node.mountpoint / "directory").mkdir()
    (node.mountpoint / "old").rename(node.mountpoint / "directory" / "new")
    _settled(node)
    assert _state(node, node.mountpoint / "directory" / "new") == "local"
    assert (node.mountpoint / "directory" / "new").read_bytes() == b"content"


def test_a_file_replaced_while_it_settles_shows_the_new_one_and_frees_the_old(node: ClusterNode) -> None:
    """How checkpoint writers rotate: the temporary name is renamed over the last one, which was just written too."""
    for turn in range(5):
        (node.mountpoint / "temporary").write_bytes(b"%d" % turn * 10_000)
        (node.mountpoint / "temporary").rename(node.mountpoint / "checkpoint")
        assert (node.mountpoint / "checkpoint").read_bytes() == b"%d" % turn * 10_000
    _settled(node)
    assert _state(node, node.mountpoint / "checkpoint") == "local"
    assert (node.mountpoint / "checkpoint").read_bytes() == b"4" * 10_000
    _wait(lambda: len(_segments(node)) == 1)


def test_a_file_rewritten_while_it_settles_has_only_the_new_bytes(node: ClusterNode) -> None:
    path = node.mountpoint / "file"
    path.write_bytes(b"a long first content")
    path.write_bytes(b"second")
    _settled(node)
    assert path.read_bytes() == b"second"
    path.write_bytes(b"third")  # this time it was local
    assert _state(node, path) == "open"
    _settled(node)
    assert path.read_bytes() == b"third"
    _wait(lambda: len(_segments(node)) == 1)


def test_a_closed_file_is_opened_again_and_appended_to(node: ClusterNode) -> None:
    path = node.mountpoint / "file"
    content = b""
    for turn in range(6):
        with open(path, "ab", buffering=0) as file:
            file.write(b"%d" % turn * 1000)
        content += b"%d" % turn * 1000
        assert path.stat().st_size == len(content)
        if turn % 2:
            _settled(node)
            assert _state(node, path) == "local"
    assert path.read_bytes() == content
    assert len(_segments(node)) == 1


def test_a_reader_keeps_the_bytes_it_opened_when_the_name_is_replaced(node: ClusterNode) -> None:
    path = node.mountpoint / "file"
    path.write_bytes(b"old" * 1000)
    _settled(node)
    with open(path, "rb", buffering=0) as reader:
        (node.mountpoint / "new").write_bytes(b"new")
        (node.mountpoint / "new").rename(path)
        assert path.read_bytes() == b"new"
        assert reader.read() == b"old" * 1000
        assert os.fstat(reader.fileno()).st_nlink == 0
    _settled(node)
    _wait(lambda: len(_segments(node)) == 1)


@pytest.mark.parametrize("sealed_before", [False, True])
def test_a_writable_mapping_that_outlives_close_keeps_the_file_open(node: ClusterNode, sealed_before: bool) -> None:
    path = node.mountpoint / "mapped"
    path.write_bytes(bytes(100_000))
    if sealed_before:
        _settled(node)
        assert _state(node, path) == "local"
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 100_000)
    mapping[:5] = b"first"
    for _ in range(3):
        _ask(node, do="settle")
        time.sleep(0.1)  # it would be local by now if it were sealed
        assert _state(node, path) == "open"
    mapping[50_000:50_006] = b"second"
    mapping.close()
    expected = b"first".ljust(50_000, b"\0") + b"second" + bytes(100_000 - 50_006)
    _wait(lambda: bool(_ask(node, do="settle")["ok"]) and _state(node, path) == "local")
    assert path.read_bytes() == expected
    _check_root(node, path, expected)


def _check_root(node: ClusterNode, path: Path, content: bytes) -> None:
    """The catalog's root is that of these bytes."""
    connection = sqlite3.connect(f"file:{node.catalog}?mode=ro", uri=True)
    find = "SELECT value FROM kv WHERE key = ?"
    inode = msgspec.msgpack.decode(
        connection.execute(find, (inode_key(InodeNumber(path.stat().st_ino)),)).fetchone()[0], type=Inode
    )
    assert inode.cur is not None
    version = msgspec.msgpack.decode(connection.execute(find, (version_key(inode.cur),)).fetchone()[0], type=Version)
    connection.close()
    assert version.root == content_root(inode.cur, len(content), version.cell_size, cell_table(content, version.cell_size))


def test_a_writer_that_never_closes_stays_open_and_the_rest_settles(node: ClusterNode) -> None:
    with open(node.mountpoint / "written", "wb", buffering=0) as file:
        file.write(b"x")
        (node.mountpoint / "closed").write_bytes(b"y")
        _settled(node)
        assert _state(node, node.mountpoint / "written") == "open"
        assert _state(node, node.mountpoint / "closed") == "local"
        file.write(b"x")
    _settled(node)
    assert _state(node, node.mountpoint / "written") == "local"
    assert (node.mountpoint / "written").read_bytes() == b"xx"
