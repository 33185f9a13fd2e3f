"""A save into the mountpoint of a node that is down fails: nothing lies under a mount where nobody finds it."""

import os
from collections.abc import Callable

import pytest

from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]


def _refuses_saves(node: ClusterNode) -> None:
    with pytest.raises(PermissionError):
        (node.mountpoint / "file").write_bytes(b"saved while the node is down")
    with pytest.raises(PermissionError):
        os.makedirs(node.mountpoint / "run" / "step-1", exist_ok=True)
    assert os.listdir(node.mountpoint) == []


@pytest.mark.parametrize(
    "end", [lambda cluster: cluster.kill(0), lambda cluster: cluster.down(remove=False)], ids=["kill", "down"]
)
def test_a_node_that_is_down_takes_no_files_and_comes_back(
    start_cluster: Callable[..., LocalCluster], end: Callable[[LocalCluster], None]
) -> None:
    cluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    end(cluster)
    _refuses_saves(node)
    cluster.revive(0)
    (node.mountpoint / "file").write_bytes(b"saved")
    assert (node.mountpoint / "file").read_bytes() == b"saved"
    cluster.down(remove=True)
    assert not cluster.directory.exists()


def test_the_log_of_a_failed_start_is_that_start_s_alone(start_cluster: Callable[..., LocalCluster]) -> None:
    cluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    cluster.down(remove=False)
    (node.store / "store.json").write_text("{")
    for _ in range(2):
        with pytest.raises(NotReached, match="its log says") as failed:
            cluster.up(None, ClusterSettings())
        assert str(failed.value).count("ckptfs: ") == 1
