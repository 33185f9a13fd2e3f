"""A new node that can't run on what its configuration names: one line that says why, and nothing made or mounted."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.mount_table import mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]


@pytest.fixture
def node(scratch: Path) -> ClusterNode:
    """A node that has only its configuration. Its log goes where it goes by default: into the store."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1)
    node = cluster.nodes[0]
    node.log.rmdir()
    lines = node.config.read_text().splitlines()
    node.config.write_text("".join(f"{line}\n" for line in lines if not line.startswith("log_directory")))
    return node


def _set(node: ClusterNode, key: str, value: object) -> None:
    """Change a key of `[node]`, or add it."""
    lines = [line for line in node.config.read_text().splitlines() if not line.startswith(f"{key} =")]
    lines.insert(lines.index("[node]") + 1, f"{key} = {json.dumps(value)}")
    node.config.write_text("\n".join(lines) + "\n")


def _add(node: ClusterNode, text: str) -> None:
    node.config.write_text(f"{node.config.read_text()}\n{text}\n")


def _tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def _refused(node: ClusterNode, *, through: Sequence[str] = (), code: int = 1) -> str:
    """Start the node, which can't run; the one line it says."""
    command = [*through, sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd="/")
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("ckptfs: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert mounts_at(node.mountpoint) == []
    assert node.processes.living() == []
    return done.stderr


def _refused_untouched(node: ClusterNode, *, through: Sequence[str] = (), code: int = 1) -> str:
    """As `_refused`; nothing is made for a node that can't run."""
    before = _tree(node.directory.parent)
    said = _refused(node, through=through, code=code)
    assert _tree(node.directory.parent) == before
    return said


@contextmanager
def _mounted(kind: str, directory: Path, options: str = "") -> Iterator[None]:
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", kind, *(["-o", options] if options else []), "none", directory], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_store_below_a_file(node: ClusterNode, scratch: Path) -> None:
    (scratch / "cluster" / "file").touch()
    _set(node, "store", str(scratch / "cluster" / "file" / "store"))
    assert "file/store can't be used: Not a directory" in _refused_untouched(node)


def test_a_store_where_nobody_may_write(node: ClusterNode, scratch: Path) -> None:
    other = scratch / "cluster" / "somebody's"
    other.mkdir()
    os.chown(other, 65534, 65534)
    _set(node, "store", str(other / "store"))
    without = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
    assert "store can't be used: Permission denied" in _refused_untouched(node, through=without)


def test_a_store_on_a_file_system_that_is_read_only(node: ClusterNode) -> None:
    cluster = LocalCluster(node.directory.parent)
    node.log.mkdir()
    with _mounted("tmpfs", node.store, "size=64m"):
        cluster.revive(0)
        cluster.down(remove=False)
        subprocess.run(["mount", "-o", "remount,ro", node.store], check=True)
        assert "can't be written to: Read-only file system" in _refused_untouched(node)
        _set(node, "store", str(node.store / "other"))
        assert "other can't be used: Read-only file system" in _refused_untouched(node)


def test_a_store_on_a_file_system_without_extended_attributes(node: ClusterNode, scratch: Path) -> None:
    with _mounted("ramfs", scratch / "drive"):
        _set(node, "store", str(scratch / "drive" / "store"))
        said = _refused(node)
        assert "Operation not supported" in said
        assert "ext4 and xfs" in said
        assert list((scratch / "drive" / "store" / "segments").rglob("*")) == []


def test_an_unfit_mountpoint_is_found_before_a_store_is_made(node: ClusterNode) -> None:
    (node.mountpoint / "precious").touch()
    assert "not empty" in _refused_untouched(node)


@pytest.mark.parametrize("key", ["catalog", "log_directory"])
def test_what_would_lie_in_the_own_mount(node: ClusterNode, key: str) -> None:
    path = str(node.mountpoint / "inside")
    _set(node, key, f"sqlite:///{path}" if key == "catalog" else path)
    assert f"node.{key}: it can't lie in the node's own mount" in _refused_untouched(node, code=2)


def test_a_log_that_can_not_be_written(node: ClusterNode, scratch: Path) -> None:
    (scratch / "file").touch()
    _set(node, "log_directory", str(scratch / "file"))
    assert "node.log_directory" in _refused(node, code=2)


def test_an_address_that_is_taken(node: ClusterNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        _set(node, "listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert "Address already in use" in _refused_untouched(node, code=2)


def test_an_erasure_code_library_that_is_not_installed(node: ClusterNode) -> None:
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    libraries = {os.path.realpath(line.split()[-1]) for line in found.splitlines() if "libisal.so.2 " in line}
    _add(node, '[protection]\ncodec = "isa-l"')
    hidden = "".join(f"mount --bind /dev/null {library} && " for library in libraries)
    said = _refused_untouched(node, through=("unshare", "--mount", "sh", "-c", f'{hidden} exec "$@"', "sh"), code=2)
    assert "apt install libisal2" in said


def test_a_catalog_in_a_directory_that_is_not_there(node: ClusterNode, scratch: Path) -> None:
    _set(node, "catalog", f"sqlite:///{scratch}/none/catalog.db")
    assert "its directory does not exist" in _refused(node)


@pytest.mark.parametrize("passthrough", ["auto", "on"])
def test_a_store_the_kernel_passes_nothing_through_to(node: ClusterNode, scratch: Path, passthrough: str) -> None:
    """On an overlay, as in many containers: `auto` serves and says why, `on` refuses to run."""
    layers = [scratch / name for name in ("lower", "upper", "work")]
    for layer in layers:
        layer.mkdir()
    _add(node, f'[mount]\npassthrough = "{passthrough}"')
    with _mounted("overlay", node.store, "lowerdir={},upperdir={},workdir={}".format(*layers)):
        cluster = LocalCluster(node.directory.parent)
        if passthrough == "on":
            assert 'mount.passthrough is "on"' in _refused(node)
            return
        node.log.mkdir()
        cluster.revive(0)
        try:
            (node.mountpoint / "file").write_bytes(b"content")
            assert (node.mountpoint / "file").read_bytes() == b"content"
            status = subprocess.run(
                [sys.executable, "-P", "-m", "ckptfs.fs.cli", "status", node.mountpoint],
                capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
            assert "served: the kernel passes nothing through to the store's file system" in status
        finally:
            cluster.down(remove=False)
