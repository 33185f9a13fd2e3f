"""Nodes as they are on several machines: each in a network namespace of its own, etcd beside them, certificates between them."""

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings
from ckptfs.replication.certificates import CertificateAuthority, write_node

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(240)]


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, timeout=20)


class Machines:
    """A bridge, and one network namespace a machine on it: 10.77.N.1 is the bridge, 10.77.N.11 the first machine."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.tag = f"ck{os.getpid() % 100_000}"
        self.subnet = f"10.77.{random.randrange(1, 250)}"
        self.nodes = [ClusterNode(directory, number) for number in range(count)]

    def address(self, number: int) -> str:
        return f"{self.subnet}.{11 + number}"

    def namespace(self, number: int) -> str:
        return f"{self.tag}n{number}"

    def build(self) -> None:
        ip("link", "add", f"{self.tag}b", "type", "bridge")
        ip("address", "add", f"{self.subnet}.1/24", "dev", f"{self.tag}b")
        ip("link", "set", f"{self.tag}b", "up")
        for number in range(len(self.nodes)):
            namespace, outer = self.namespace(number), f"{self.tag}v{number}"
            ip("netns", "add", namespace)
            ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", outer, "master", f"{self.tag}b", "up")
            for command in (["address", "add", f"{self.address(number)}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                ip("-n", namespace, *command)
            ip("-n", namespace, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        for number in range(len(self.nodes)):  # a namespace stays as long as a process in it, so its cable goes first
            for command in (("link", "delete", f"{self.tag}v{number}"), ("netns", "delete", self.namespace(number))):
                with contextlib.suppress(subprocess.CalledProcessError):
                    ip(*command)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "delete", f"{self.tag}b")

    def cut(self, number: int, *, off: bool = True) -> None:
        """Take the machine's cable out, or put it in again."""
        ip("link", "set", f"{self.tag}v{number}", "down" if off else "up")

    def configure(self, catalog: str) -> None:
        authority = CertificateAuthority.create(self.directory / "ca", "test")
        settings = ClusterSettings(catalog=catalog, data_shards=2, parity_shards=2, settle_seconds=0.1)
        for number, node in enumerate(self.nodes):
            node.write_config(settings)
            write_node(authority, node.id, [self.address(number)], node.directory / "tls")
            files = {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key", "crl": "crl.pem"}
            lines = [f'{key} = "{node.directory}/tls/{name}"' for key, name in files.items()]
            text = node.config.read_text().replace("[node]", f'[node]\nlisten = "{self.address(number)}:7070"', 1)
            node.config.write_text("\n".join([text, "[tls]", *lines, ""]))

    def start(self, number: int) -> None:
        node = self.nodes[number]
        with open(node.log / "node.log", "ab") as log:
            command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
            subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace(number)}", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ).returncode = 0  # it is ended by its pid file

    def wait_ready(self, live: int) -> None:
        deadline = time.monotonic() + 90
        waiting = list(self.nodes)
        while waiting := [node for node in waiting if not node.answers() or (node.peers_in_reach() or 0) < live]:
            assert time.monotonic() < deadline, f"{waiting[0].id}: {waiting[0].log_tail()}"
            time.sleep(0.1)


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
        made.configure(etcd.url.replace("http://", "etcd://") + "/machines")
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
