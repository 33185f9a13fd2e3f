"""Nodes as they are on several machines: each in a network namespace of its own, etcd beside them, certificates between them."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterSettings
from ckptfs.replication.certificates import CertificateAuthority, write_node
from machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(240)]


@pytest.fixture
def machines(scratch: Path, make_etcd: Callable[..., Any]) -> Iterator[Machines]:
    """Four machines with a node each, 2+2, that reach each other."""
    if shutil.which("nsenter") is None or shutil.which("ip") is None:
        pytest.skip("no ip and nsenter: machines are network namespaces")
    made = Machines(scratch / "cluster", 4)
    made.directory.mkdir()
    try:
        made.build()
        etcd = make_etcd(host=f"{made.subnet}.1")
        catalog = etcd.url.replace("http://", "etcd://") + "/machines"
        made.configure(ClusterSettings(catalog=catalog, data_shards=2, parity_shards=2, settle_seconds=0.1))
        for number in range(4):
            made.start(number)
        made.wait_ready(4)
        yield made
    finally:
        for node in made.nodes:
            node.processes.kill()
        made.tear_down()


def protect(path: Path) -> None:
    behind, _, _ = wait_until([path], "protected", 60.0, shown=False)
    assert not behind


def test_two_of_four_machines_may_go(machines: Machines) -> None:
    mounts = [node.mountpoint for node in machines.nodes]
    data = random.Random(1).randbytes((6 << 20) + 5)
    (mounts[0] / "model.pt").write_bytes(data)
    assert (mounts[3] / "model.pt").read_bytes() == data
    protect(mounts[0] / "model.pt")
    machines.nodes[0].kill()
    machines.cut(1)
    assert (mounts[2] / "model.pt").read_bytes() == data
    (mounts[2] / "after").write_bytes(b"after")
    machines.cut(1, off=False)
    machines.start(0)
    machines.wait_ready(4)
    for mount in mounts:
        assert (mount / "after").read_bytes() == b"after"
        assert (mount / "model.pt").read_bytes() == data


def test_a_machine_without_its_cable_goes_on_with_what_is_open(machines: Machines) -> None:
    here, there = machines.nodes[0].mountpoint, machines.nodes[2].mountpoint
    data = random.Random(2).randbytes(3 << 20)
    with open(here / "log", "wb") as file:
        file.write(data)
        machines.cut(0)
        started = time.monotonic()
        file.write(data)
        file.flush()
        file.close()
        assert time.monotonic() - started < 5
    assert (there.parent / "mnt").is_dir()
    (there / "meanwhile").write_bytes(b"x")
    machines.cut(0, off=False)
    protect(here / "log")
    assert (there / "log").read_bytes() == data * 2
    assert (here / "meanwhile").read_bytes() == b"x"


def test_a_stranger_gets_nothing(machines: Machines, scratch: Path) -> None:
    """A node with certificates of another authority, on the same network: none of its requests is answered."""
    stranger = CertificateAuthority.create(scratch / "strange", "strange")
    node = machines.nodes[3]
    (machines.nodes[0].mountpoint / "a").write_bytes(bytes(200_000))
    protect(machines.nodes[0].mountpoint / "a")
    node.kill()
    write_node(stranger, node.id, [machines.address(3)], node.directory / "tls")
    machines.start(3)
    deadline = time.monotonic() + 60
    log = machines.nodes[0].log / "agent.log"
    while "peer-not-trusted" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert node.peers_in_reach() in (None, 1)
