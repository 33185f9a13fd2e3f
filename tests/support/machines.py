"""Machines: network namespaces on a bridge, with a node of the cluster in each, and what can be done to their cables."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings
from ckptfs.replication.certificates import CertificateAuthority, write_node

NOTHING_PASSES = ("rate", "8bit", "burst", "10", "limit", "10")
"""Of tc-tbf(8): no packet is as small as the bucket, so each is dropped."""


def ip(*arguments: object) -> None:
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True, timeout=20)


def tc(*arguments: object) -> None:
    subprocess.run(["tc", *map(str, arguments)], check=True, capture_output=True, timeout=20)


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

    def limit_sent(self, number: int, *bucket: str) -> None:
        """What the machine sends goes through a token bucket, as of tc-tbf(8); without one at full speed again."""
        if bucket:
            tc("-n", self.namespace(number), "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)
        else:
            tc("-n", self.namespace(number), "qdisc", "delete", "dev", "eth0", "root")

    def limit_received(self, number: int, *bucket: str) -> None:
        """As `limit_sent`, what it receives."""
        if bucket:
            tc("qdisc", "replace", "dev", f"{self.tag}v{number}", "root", "tbf", *bucket)
        else:
            tc("qdisc", "delete", "dev", f"{self.tag}v{number}", "root")

    def configure(self, settings: ClusterSettings) -> None:
        authority = CertificateAuthority.create(self.directory / "ca", "test")
        for number, node in enumerate(self.nodes):
            node.write_config(settings)
            write_node(authority, node.id, [self.address(number)], node.directory / "tls")
            files = {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key", "crl": "crl.pem"}
            lines = [f'{key} = "{node.directory}/tls/{name}"' for key, name in files.items()]
            text = node.config.read_text().replace("[node]", f'[node]\nlisten = "{self.address(number)}:7070"', 1)
            node.config.write_text("\n".join([text, "[tls]", *lines, ""]))

    def start(self, number: int, environment: Mapping[str, str] | None = None) -> None:
        node = self.nodes[number]
        with open(node.log / "node.log", "ab") as log:
            command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)]
            subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace(number)}", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=None if environment is None else {**os.environ, **environment},
            ).returncode = 0  # it is ended by its pid file

    def wait_ready(self, live: int) -> None:
        deadline = time.monotonic() + 90
        waiting = list(self.nodes)
        while waiting := [node for node in waiting if not node.answers() or (node.peers_in_reach() or 0) < live]:
            assert time.monotonic() < deadline, f"{waiting[0].id}: {waiting[0].log_tail()}"
            time.sleep(0.1)
