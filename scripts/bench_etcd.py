"""Operations on names with the catalog on one etcd member, beside the same cluster's on SQLite, in turns."""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from operator import truediv
from pathlib import Path
from typing import Any

from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster

NODES = 6
TURNS = 5
UP_SECONDS_MAX = 30.0


def etcd_figures(directory: Path, sqlite_mount: Path, count: int) -> dict[str, Any]:
    """Create and close `count` files in a directory, then stat each by its name, with nothing in the kernel's caches: what is
    measured is what the mount knows. Alternately on a cluster of six nodes on etcd and on one on SQLite; medians of the turns'
    medians, and of their ratios."""
    with _member(directory) as address:
        cluster = LocalCluster(directory / "cluster")
        try:
            cluster.up(NODES, ClusterSettings(catalog=f"etcd://{address}/bench"))
            mounts = {"etcd": cluster.nodes[0].mountpoint, "sqlite": sqlite_mount}
            seconds: dict[str, dict[str, list[list[float]]]] = {name: {"create": [], "stat": []} for name in mounts}
            for turn in range(TURNS + 1):
                for name in list(mounts) if turn % 2 else list(reversed(mounts)):
                    path = mounts[name] / f"bench-etcd-{turn}"
                    created, stated = _one_turn(path, count)
                    if turn:  # the first warms up
                        seconds[name]["create"].append(created)
                        seconds[name]["stat"].append(stated)
        finally:
            if LocalCluster.is_one(cluster.directory):
                cluster.down(remove=True)
    document: dict[str, Any] = {"files": count, "turns": TURNS}
    for what in ("create", "stat"):
        medians = {name: [statistics.median(turn) for turn in found[what]] for name, found in seconds.items()}
        document[f"etcd_{what}"] = {
            f"{name}_milliseconds": round(1000 * statistics.median(found), 3) for name, found in medians.items()
        } | {"ratio": round(statistics.median(map(truediv, medians["etcd"], medians["sqlite"])), 2)}
    return document


def _one_turn(path: Path, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each call."""
    path.mkdir()
    created, stated = [], []
    for number in range(count):
        started = time.perf_counter()
        os.close(os.open(path / f"{number}", os.O_CREAT | os.O_WRONLY))
        created.append(time.perf_counter() - started)
    Path("/proc/sys/vm/drop_caches").write_text("2")  # names and inodes, not file contents
    for number in range(count):
        started = time.perf_counter()
        os.stat(path / f"{number}")
        stated.append(time.perf_counter() - started)
    shutil.rmtree(path)
    return created, stated


@contextlib.contextmanager
def _member(directory: Path) -> Iterator[str]:
    """One etcd member of our own, as Debian packages it, on free loopback ports; its host:port."""
    if shutil.which("etcd") is None:
        raise NotReached("there is no etcd on this machine: apt install etcd-server")
    directory.mkdir(parents=True)
    client, peer = _free_port(), _free_port()
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = ["etcd", "--name", "bench", "--data-dir", os.fspath(directory / "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url]
    command += ["--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"bench={peer_url}"]
    with open(directory / "etcd.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        _wait_until_up(url, process, directory / "etcd.log")
        yield f"127.0.0.1:{client}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + UP_SECONDS_MAX
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=2) as answer:
                if json.load(answer)["health"] == "true":
                    return
        except (OSError, ValueError):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise NotReached(f"etcd did not come up: {log.read_text()[-500:]}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
