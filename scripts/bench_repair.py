"""How fast the shards of a lost node are made again on others, and what six nodes cost that have nothing to do."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import trio
from bench_bare import copy_shards
from bench_memory import peak_resident_mb

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import set_state
from ckptfs.fs.catalog import open_catalog
from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.config import load_config
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import NodeNotAnswering, call

BLOCK_SIZE = 1 << 20
FILES = 8
NODES = 7
SECONDS_MAX = 300.0
IDLE_SETTLE_SECONDS = 12.0
IDLE_SECONDS = 20.0


def repair_figures(directory: Path, size_bytes: int) -> dict[str, Any]:
    """Seven nodes hold files at 4+2. One is killed and declared lost; its shards, copied over loopback and synced
    (`copy_shards`), are the measure: the faster of two tries."""
    cluster = LocalCluster(directory)
    try:
        cluster.prepare(NODES, ClusterSettings())
        for node in cluster.nodes:
            with open(node.config, "a") as config:
                config.write("\n[repair]\nbytes_per_second_max = 0\n")
        cluster.up(NODES, ClusterSettings())
        mount = cluster.nodes[0].mountpoint
        block = os.urandom(BLOCK_SIZE)
        for number in range(FILES):
            with open(mount / f"{number}", "wb", buffering=0) as file:
                for place in range(size_bytes // FILES // BLOCK_SIZE):
                    file.write((number << 32 | place).to_bytes(8, "little") + block[8:])
        wait_until([mount], "protected", None, shown=False)
        lost = cluster.nodes[-1]
        cluster.kill(lost.number)
        shards = [path for path in (lost.store / "shards").rglob("*") if path.is_file()]
        (directory / "copy").mkdir()
        copied, copy_used = min(copy_shards(shards, directory / "copy") for _ in range(2))
        before = _processor_seconds(cluster)
        trio.run(_declare_lost, lost)
        found = _rebuilt(cluster)
        after = _processor_seconds(cluster)
        memory = max(peak_resident_mb(pid) for node in cluster.nodes for pid in node.processes.living())
    finally:
        if LocalCluster.is_one(directory):
            cluster.down(remove=True)
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "files": FILES,
        "bytes": found["rebuilt_bytes"],
        "shards": found["rebuilt_shards"],
        "seconds": round(found["busy_seconds"], 3),
        "copy_seconds": round(copied, 3),
        "ratio": round(found["busy_seconds"] / copied, 2),
        "processor_seconds": round(sum(after.values()) - sum(before.values()), 2),
        "copy_processor_seconds": round(copy_used, 2),
        "peak_mb": round(memory, 1),
    }


async def _declare_lost(node: ClusterNode) -> None:
    kv = open_catalog(load_config(node.config), "bench")
    await set_state(kv, StoreDirectory.open(node.store).store_id, StoreState.LOST)
    await kv.aclose()


def _rebuilt(cluster: LocalCluster) -> dict[str, Any]:
    """The statistics of the node that has made the shards again."""
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        for node in cluster.nodes[:-1]:
            try:
                found: dict[str, Any] = call(node.store / "run" / "agent.sock", {"do": "status"})["rebuild"]
            except NodeNotAnswering:
                continue
            if found["rebuilt_shards"] and not found["left"]:
                return found
        time.sleep(0.2)
    raise NotReached(f"the shards of the lost node were not made again in {SECONDS_MAX:.0f} s")


def idle_figures(cluster: LocalCluster) -> dict[str, Any]:
    """The processor time of each node's processes, as a share of one core, while nothing is done."""
    time.sleep(IDLE_SETTLE_SECONDS)
    before, started = _processor_seconds(cluster), time.monotonic()
    time.sleep(IDLE_SECONDS)
    after, seconds = _processor_seconds(cluster), time.monotonic() - started
    shares = {node: (after[node] - before[node]) / seconds for node in after}
    return {"nodes": len(shares), "share_of_core_max": round(max(shares.values()), 4), "shares": list(shares.values())}


def _processor_seconds(cluster: LocalCluster) -> dict[str, float]:
    found = {}
    for node in cluster.nodes:
        found[node.id] = 0.0
        for pid in node.processes.living():
            # In nanoseconds: what an idle process uses in twenty seconds is a few clock ticks.
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[node.id] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found
