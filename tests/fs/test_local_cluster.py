"""What a cluster writes before any node runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.config import load_config
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster


def test_every_node_gets_a_valid_configuration_of_its_own(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / 'a "quoted" näme 😀')
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1, passthrough="off", settle_seconds=0.5))
    configs = [load_config(node.config) for node in cluster.nodes]
    assert [config.node.id for config in configs] == ["node-0", "node-1", "node-2"]
    assert len({config.store for config in configs}) == len({config.mountpoint for config in configs}) == 3
    assert {config.catalog_path for config in configs} == {cluster.directory / "catalog.db"}
    assert {(config.protection.data_shards, config.protection.parity_shards) for config in configs} == {(2, 1)}
    assert {(config.mount.passthrough, config.mount.settle_seconds) for config in configs} == {("off", 0.5)}


def test_a_cluster_grows_and_does_not_shrink(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.prepare(2)
    cluster.prepare(4)
    assert len(cluster.nodes) == 4
    cluster.prepare(None)
    assert len(cluster.nodes) == 4
    with pytest.raises(WrongUse, match="has 4 nodes"):
        cluster.prepare(3)


def test_what_contradicts_the_cluster_there_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1, passthrough="off"))
    before = [node.config.read_text() for node in cluster.nodes]
    for settings, words in (
        (ClusterSettings(data_shards=4), "data_shards 2, not 4"),
        (ClusterSettings(parity_shards=2), "parity_shards 1, not 2"),
        (ClusterSettings(passthrough="on"), "passthrough off, not on"),
    ):
        for node_count in (None, 5):
            with pytest.raises(WrongUse, match=words):
                cluster.prepare(node_count, settings)
    assert [node.config.read_text() for node in cluster.nodes] == before
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1))


def test_a_node_that_is_added_is_configured_as_the_others(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1, passthrough="off", settle_seconds=0.5))
    cluster.prepare(4)
    configs = [load_config(node.config) for node in cluster.nodes]
    assert len(configs) == 4
    assert len({(config.protection, config.mount) for config in configs}) == 1


def test_a_directory_with_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(WrongUse, match="not empty"):
        LocalCluster(tmp_path).prepare(3)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_down_with_remove_takes_only_what_is_its_own(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.prepare(2)
    (tmp_path / "notes").touch()
    cluster.down(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_down_twice_is_no_error(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    cluster.prepare(2)
    cluster.down(remove=False)
    cluster.down(remove=False)
    assert len(cluster.nodes) == 2


def test_a_new_cluster_that_does_not_start_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotReached("node-0 did not mount in time")

    monkeypatch.setattr(LocalCluster, "_start", fail)
    cluster = LocalCluster(tmp_path / "a b")
    with pytest.raises(NotReached, match=f"did not mount in time\n.*`ckptfs cluster down '{cluster.directory}' --remove`"):
        cluster.up(1, ClusterSettings())
    with pytest.raises(NotReached, match=r"did not mount in time$"):  # it may hold something by now
        cluster.up(1, ClusterSettings())
    cluster.down(remove=True)
    assert not cluster.directory.exists()


def test_a_node_that_was_just_started_is_found_without_its_pid_file(tmp_path: Path) -> None:
    """Who was interrupted while starting a cluster, and takes it down at once, leaves no node behind."""
    cluster = LocalCluster(tmp_path / "c")
    cluster.prepare(1)
    (node,) = cluster.nodes
    program = [sys.executable, "-c", "import sys; sys.stdin.read()", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as started:
        cluster.down(remove=True)
        assert started.wait(timeout=60) == -9
    assert not cluster.directory.exists()
