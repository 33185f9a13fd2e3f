"""What the mount costs, measured against the plain directory beside it on the same file system. Run it through `scripts/bench`.

Every comparison is made in turns in one run, and the medians are shown. It prints the machine's facts, because no figure
means anything without them.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench_bare import receive_shards, send_shards
from bench_etcd import etcd_figures
from bench_memory import peak_resident_mb
from bench_names import PROCESSES, files_in_mount, files_in_plain, in_processes, list_seconds, stat_seconds
from bench_repair import idle_figures, repair_figures
from bench_restart import restart_figures
from rich.console import Console
from rich.table import Table

from ckptfs import __version__
from ckptfs.fs.cli_errors import CommandError, NotReached
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.cli_output import human_bytes
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import mounts_at
from ckptfs.fs.node_processes import ROLES
from ckptfs.fs.status import node_status, place_of_mount

BLOCK_SIZE = 1 << 20
DATA_SHARDS, PARITY_SHARDS = 4, 2
SMALL_FILE_SIZE = 1024
WRITERS = 4
WRITERS_PAIRS = 3
"""Every turn waits for its files to be protected, and the whole run is to take minutes."""
SEGMENT_GONE_SECONDS_MAX = 120
PARTS = (
    "save",
    "write",
    "read",
    "small",
    "writers",
    "names",
    "etcd",
    "restart",
    "served",
    "idle",
    "protect",
    "restore",
    "repair",
)

LIMITS = {
    "save": ("ratio_max", 1.05),
    "write": ("ratio_max", 1.05),
    "read": ("ratio_max", 1.05),
    "small": ("files_per_second_min", 1000),
    "writers": ("files_per_second_min", 3000),
    "stat": ("files_per_second_min", 20_000),
    "list": ("files_per_second_min", 50_000),
    "etcd_create": ("milliseconds_max", 10.0),
    "etcd_stat": ("ratio_max", 1.25),
    "restart": ("seconds_max", 1.0),
    "served": ("served_ratio_max", 1 / 0.3),
    "protect": ("share_of_bare_loop_min", 0.5),
    "restore": ("share_of_bare_shards_min", 0.5),
    "idle": ("share_of_core_max", 0.01),
    "repair": ("ratio_max", 2.0),
    "memory": ("peak_mb_max", 150),
}
"""What must be reached, by part."""


@dataclass(frozen=True)
class Sizes:
    """How much work one run is."""

    file_bytes: int
    protect_bytes: int
    small_files: int
    etcd_files: int
    names: int
    pairs: int


class Bench:
    """The parts. Each returns its figures as JSON, and leaves the directories empty."""

    def __init__(self, cluster: LocalCluster, plain: Path, sizes: Sizes, memory: "MemoryPeaks") -> None:
        self._cluster = cluster
        self._memory = memory
        self._mount = cluster.nodes[0].mountpoint
        self._plain = plain
        self._sizes = sizes

    def save(self) -> dict[str, Any]:
        """torch.save of one state dict."""
        import torch

        tensor_bytes = 16 << 20
        count = max(1, self._sizes.file_bytes // tensor_bytes)
        state = {f"layers.{index}.weight": torch.randn(min(tensor_bytes, self._sizes.file_bytes) // 4) for index in range(count)}
        return self._pairs(lambda path: torch.save(state, path), self._sizes.file_bytes)

    def write(self) -> dict[str, Any]:
        """1 MiB blocks into a new file, opened and closed."""
        block = os.urandom(BLOCK_SIZE)

        def work(path: Path) -> None:
            with open(path, "wb", buffering=0) as file:
                for _ in range(self._sizes.file_bytes // BLOCK_SIZE):
                    file.write(block)

        return self._pairs(work, self._sizes.file_bytes)

    def read(self) -> dict[str, Any]:
        """1 MiB blocks from a file whose pages are in memory, opened and closed."""
        block = os.urandom(BLOCK_SIZE)
        for directory in (self._mount, self._plain):
            with open(directory / "bench-read", "wb", buffering=0) as file:
                for _ in range(self._sizes.file_bytes // BLOCK_SIZE):
                    file.write(block)
        buffer = bytearray(BLOCK_SIZE)

        def work(path: Path) -> None:
            with open(path.with_name("bench-read"), "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        wait_until([self._mount / "bench-read"], "protected", None, shown=False)  # so that nothing works in the background
        work(self._mount / "x")
        work(self._plain / "x")
        figures = self._pairs(work, self._sizes.file_bytes)
        for directory in (self._mount, self._plain):
            (directory / "bench-read").unlink()
        return figures

    def small(self) -> dict[str, Any]:
        """Create, write 1 KiB, close, through the mount of one node. That the others idle on the same machine matters little:
        all their processes and this node's agent took less than 6 % of two cores."""
        return self._small(lambda path: self._make_small(path, self._sizes.small_files), self._sizes.pairs)

    def writers(self) -> dict[str, Any]:
        """The same number of files by several processes at once, each in a directory of its own."""
        each = self._sizes.small_files // WRITERS

        def work(path: Path) -> None:
            path.mkdir()
            in_processes([partial(self._make_small, path / f"{writer}", each) for writer in range(WRITERS)])

        return self._small(work, min(self._sizes.pairs, WRITERS_PAIRS))

    def _make_small(self, path: Path, count: int) -> None:
        content = os.urandom(SMALL_FILE_SIZE)
        path.mkdir()
        for number in range(count):
            with open(path / f"{number}", "wb", buffering=0) as file:
                file.write(content)

    def _small(self, work: Callable[[Path], None], pairs: int) -> dict[str, Any]:
        figures = self._pairs(work, None, pairs)
        for name in ("mount", "plain"):
            figures[f"{name}_files_per_second"] = round(self._sizes.small_files / figures[f"{name}_seconds"])
        return figures

    def names(self) -> dict[str, Any]:
        """Every file of a large directory looked at, with nothing of it in the kernel's caches: by name, and by listing it.

        The faster of two turns counts: the other of the two may have grown a cache.
        """
        count = self._sizes.names
        mount, plain = self._mount / "bench-names", self._plain / "bench-names"
        figures: dict[str, Any] = {"files": count, "processes": PROCESSES}
        with files_in_mount(mount, self._cluster.nodes[0].catalog, count), files_in_plain(plain, count):
            for part, seconds_of in (("stat", stat_seconds), ("list", list_seconds)):
                best = {"mount": float("inf"), "plain": float("inf")}
                for _ in range(2):
                    for name, directory in (("mount", mount), ("plain", plain)):
                        best[name] = min(best[name], seconds_of(directory, count))
                figures[part] = {f"{name}_files_per_second": round(count / seconds) for name, seconds in best.items()}
                figures[part]["ratio"] = round(best["mount"] / best["plain"], 2)
        return figures

    def etcd(self) -> dict[str, Any]:
        """Operations on names with the catalog on one etcd member."""
        return etcd_figures(self._plain.parent / "etcd", self._mount, self._sizes.etcd_files)

    def restart(self) -> dict[str, Any]:
        """What a call waits for when the mount process is killed, with many files known."""
        return restart_figures(self._plain.with_name("alone"), self._sizes.names)

    def served(self) -> dict[str, Any]:
        """`write` and `read` on nodes that serve every byte, as those of ordinary users and on kernels before 6.9 do."""
        with _cluster(self._plain.parent / "served", 2, ClusterSettings(passthrough="off")) as cluster:
            bench = Bench(cluster, self._plain, self._sizes, self._memory)
            return {"write": bench.write(), "read": bench.read()}

    def idle(self) -> dict[str, Any]:
        """What the six nodes cost that have nothing to do."""
        return idle_figures(self._cluster)

    def repair(self) -> dict[str, Any]:
        """The shards of a lost node made again on others, against copying them."""
        return repair_figures(self._plain.parent / "repair", self._sizes.protect_bytes)

    def protect(self) -> dict[str, Any]:
        """From close to protected, against a bare loop over six loopback connections into six synced files.

        `wait_until` asks the node not to wait for a re-open, so all of the time is work.
        """
        size_bytes = self._sizes.protect_bytes
        bare = send_shards(size_bytes, self._plain, DATA_SHARDS, PARITY_SHARDS)
        block = os.urandom(BLOCK_SIZE)
        with open(self._mount / "bench-protect", "wb", buffering=0) as file:
            for number in range(size_bytes // BLOCK_SIZE):
                file.write(number.to_bytes(8, "little") + block[8:])
        before, started = self._processor_seconds(), time.monotonic()
        wait_until([self._mount / "bench-protect"], "protected", None, shown=True)
        seconds = time.monotonic() - started
        after = self._processor_seconds()
        return {
            "bytes": size_bytes,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(size_bytes / seconds),
            "bare_loop_seconds": round(bare, 3),
            "bare_loop_bytes_per_second": round(size_bytes / bare),
            "share_of_bare_loop": round(bare / seconds, 3),
            "processor_seconds": {name: round(after[name] - before[name], 2) for name in after},
            "processor_seconds_available": round(seconds * (os.cpu_count() or 1), 2),
        }

    def restore(self) -> dict[str, Any]:
        """The protected file read through a third node's mount, its writer and one more node dead, against the shards it is made
        of, sent straight from their files over as many loopback connections.

        As in `_pairs` memory was found before: the copy that the reader's node makes is as large as the file, and so is what the
        kernel keeps of it. In a virtual machine that the host has yet to give memory, that alone takes seconds.
        """
        self._memory.look()
        for number in (0, 1):
            self._cluster.kill(number)
        shards = [_largest_shard(node.store) for node in self._cluster.nodes[2:]]
        bare = receive_shards(shards)
        path = self._cluster.nodes[2].mountpoint / "bench-protect"
        _find_memory(self._plain / "bench-memory", 2 * self._sizes.protect_bytes)
        before, own = self._processor_seconds(), time.process_time()
        buffer, size_bytes, started = bytearray(4 << 20), 0, time.monotonic()
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                size_bytes += count
        seconds = time.monotonic() - started
        after = self._processor_seconds() | {"reader": time.process_time()}
        if size_bytes != self._sizes.protect_bytes:
            raise NotReached(f"{path} gave {size_bytes} bytes of {self._sizes.protect_bytes}")
        path.unlink()
        return {
            "bytes": size_bytes,
            "seconds": round(seconds, 3),
            "bytes_per_second": round(size_bytes / seconds),
            "bare_shards_seconds": round(bare, 3),
            "bare_shards_bytes_per_second": round(size_bytes / bare),
            "share_of_bare_shards": round(bare / seconds, 3),
            "processor_seconds": {name: round(after[name] - before.get(name, own), 2) for name in after},
        }

    def _pairs(self, work: Callable[[Path], None], size_bytes: int | None, pairs: int | None = None) -> dict[str, Any]:
        """Run it in both directories in turns, changing who begins, after one turn that isn't counted.

        Nothing works in the background meanwhile. A big file is deleted before its node begins to protect it, and the fastest
        of three counts: in a virtual machine the host may take a second to find memory for the page cache, for either
        directory. Directories of small files are protected, and deleted at the end: for minutes after a delete, ext4 looks for a
        free inode past every one freed lately, a hundred times slower.
        """
        seconds: dict[str, list[float]] = {"mount": [], "plain": []}
        directories = {"mount": self._mount, "plain": self._plain}
        trees: list[Path] = []
        for turn in range((pairs or self._sizes.pairs) + 1):
            for name in ("mount", "plain") if turn % 2 == 0 else ("plain", "mount"):
                path = directories[name] / f"bench-{turn}"
                tries = [self._timed(work, path)]
                if path.is_dir():
                    trees.append(path)
                    if name == "mount":
                        wait_until([path], "protected", None, shown=False)
                else:
                    tries += [self._timed(work, path) for _ in range(2)]
                if turn > 0:
                    seconds[name].append(min(tries))
        for tree in trees:
            shutil.rmtree(tree)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        figures: dict[str, Any] = {f"{name}_seconds": round(value, 4) for name, value in medians.items()}
        figures["ratio"] = round(medians["mount"] / medians["plain"], 3)
        figures["runs"] = {name: [round(value, 4) for value in values] for name, values in seconds.items()}
        if size_bytes is not None:
            figures["bytes"] = size_bytes
            figures |= {f"{name}_bytes_per_second": round(size_bytes / value) for name, value in medians.items()}
        return figures

    def _timed(self, work: Callable[[Path], None], path: Path) -> float:
        """Seconds the work takes; what it makes is deleted, unless it is a directory."""
        os.sync()
        segments = self._count_segments()
        started = time.perf_counter()
        work(path)
        seconds = time.perf_counter() - started
        if not path.is_dir():
            path.unlink(missing_ok=True)
            self._wait_for_segments(segments)
        return seconds

    def _count_segments(self) -> int:
        return sum(1 for _ in (self._cluster.nodes[0].store / "segments").glob("*/*"))

    def _wait_for_segments(self, count: int) -> None:
        """Until a deleted file's segment is gone from the drive."""
        deadline = time.monotonic() + SEGMENT_GONE_SECONDS_MAX
        while self._count_segments() > count:
            if time.monotonic() > deadline:
                raise NotReached(f"the segment of a deleted file is still there after {SEGMENT_GONE_SECONDS_MAX} s")
            time.sleep(0.05)

    def _processor_seconds(self) -> dict[str, float]:
        """Seconds of processor time so far: of the writer's agent, of the other agents, of all mount processes."""
        ticks = os.sysconf("SC_CLK_TCK")
        found = {"writer_agent": 0.0, "other_agents": 0.0, "mounts": 0.0}
        for node in self._cluster.nodes:
            for role, pid in node.processes.pids().items():
                if pid is None or role == "supervisor":
                    continue
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
                    name = "mounts" if role == "mount" else ("writer_agent" if node.number == 0 else "other_agents")
                    found[name] += (int(fields[11]) + int(fields[12])) / ticks
        return found


def _find_memory(path: Path, size_bytes: int) -> None:
    """Have the kernel's cache hold so much, and let go of it."""
    block = bytes(BLOCK_SIZE)
    with open(path, "wb", buffering=0) as file:
        for _ in range(size_bytes // BLOCK_SIZE):
            file.write(block)
    path.unlink()


def _largest_shard(store: Path) -> Path:
    return max((path for path in (store / "shards").glob("*/*") if path.is_file()), key=lambda path: path.stat().st_size)


class MemoryPeaks:
    """The peak resident memory of the cluster's processes by role, in MB; `look` before any of them ends."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.peak_mb = dict.fromkeys(ROLES, 0.0)

    def look(self) -> None:
        for node in self._cluster.nodes:
            for role, pid in node.processes.pids().items():
                if pid is not None:
                    self.peak_mb[role] = max(self.peak_mb[role], peak_resident_mb(pid))


def machine_facts(directory: Path) -> dict[str, Any]:
    """What the figures depend on."""
    processor = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [fields for fields in mounted if directory.is_relative_to(fields[1])]
    file_system = max(inside, key=lambda fields: len(fields[1]))[2]
    return {
        "kernel": platform.release(),
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": file_system,
        "python": platform.python_version(),
        "ckptfs": __version__,
    }


def main() -> int:
    arguments = _parse()
    directory: Path = arguments.directory / f"ckptfs-bench-{os.getpid()}"
    try:
        document = _run(directory, arguments)
    except CommandError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    document["reached"] = _reached(document)
    if arguments.json:
        json.dump(document, sys.stdout, indent=2)
        print()
    else:
        _print(document)
    return 0 if all(document["reached"].values()) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("/var/tmp"), help="where to work; a local disk (default: /var/tmp)"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the bytes: to see that it works, not to quote")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _run(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = Sizes(1 << 30, 4 << 30, 5000, 200, 100_000, 5)
    if arguments.quick:
        sizes = Sizes(64 << 20, 256 << 20, 500, 50, 10_000, 3)
    parts = [part for part in PARTS if arguments.only is None or part in arguments.only]
    if "restore" in parts and "protect" not in parts:
        parts.insert(parts.index("restore"), "protect")
    needed, free = 8 * sizes.protect_bytes, shutil.disk_usage(arguments.directory).free
    if free < needed:
        raise NotReached(f"{arguments.directory} has {human_bytes(free)} free, this takes {human_bytes(needed)}; use --directory")
    with _cluster(directory, DATA_SHARDS + PARITY_SHARDS, ClusterSettings()) as cluster:
        memory = MemoryPeaks(cluster)
        plain = directory / "plain"
        plain.mkdir()
        status = node_status(place_of_mount(mounts_at(cluster.nodes[0].mountpoint)[-1]))
        bench = Bench(cluster, plain, sizes, memory)
        document: dict[str, Any] = {
            "machine": machine_facts(directory),
            "lane": status["lane"],
            "lane_reason": status["lane_reason"],
            "codec": (status["agent"] or {}).get("codec"),
            "quick": arguments.quick,
        }
        for part in parts:
            print(f"{part} …", file=sys.stderr, flush=True)
            document[part] = getattr(bench, part)()
        for whole, part in (("names", "stat"), ("names", "list"), ("etcd", "etcd_create"), ("etcd", "etcd_stat")):
            if whole in document:
                document[part] = document[whole].pop(part)
        memory.look()
    document["memory"] = {f"{role}_peak_mb": round(peak, 1) for role, peak in memory.peak_mb.items()}
    return document


@contextlib.contextmanager
def _cluster(directory: Path, nodes: int, settings: ClusterSettings) -> Iterator[LocalCluster]:
    cluster = LocalCluster(directory / "cluster")
    try:
        cluster.up(nodes, settings)
        yield cluster
    finally:
        if LocalCluster.is_one(cluster.directory):
            cluster.down(remove=True)
        shutil.rmtree(directory, ignore_errors=True)


def _reached(document: dict[str, Any]) -> dict[str, bool]:
    """Whether each part that was measured is within its limit."""
    found = {}
    for part, (kind, limit) in LIMITS.items():
        if part not in document:
            continue
        figures = document[part]
        if kind == "ratio_max":
            found[part] = figures["ratio"] <= limit
        elif kind == "served_ratio_max":
            found[part] = max(figures["write"]["ratio"], figures["read"]["ratio"]) <= limit
        elif kind == "files_per_second_min":
            found[part] = figures["mount_files_per_second"] >= limit
        elif kind == "share_of_core_max":
            found[part] = figures["share_of_core_max"] < limit
        elif kind == "milliseconds_max":
            found[part] = figures["etcd_milliseconds"] <= limit
        elif kind == "seconds_max":
            found[part] = figures["seconds"] <= limit
        elif kind.startswith("share_of_bare_"):
            found[part] = figures[kind.removesuffix("_min")] >= limit
        else:
            found[part] = max(figures.values()) < limit
    return found


def _print(document: dict[str, Any]) -> None:
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    facts = document["machine"]
    hardware = f"{facts['processor']}, {facts['cores']} cores, {human_bytes(facts['memory_bytes'])}"
    software = f"Linux {facts['kernel']}, {facts['file_system']}, Python {facts['python']}, ckptfs {facts['ckptfs']}"
    out.print(f"{hardware}; {software}; {document['lane']} lane, codec {document['codec']}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "mount", "plain directory", "ratio", "limit", ""):
        table.add_column(heading)
    for part in ("save", "write", "read"):
        if part in document:
            figures = document[part]
            rates = [f"{figures[f'{name}_bytes_per_second'] / 1e9:.2f} GB/s" for name in ("mount", "plain")]
            table.add_row(_what(part, figures["bytes"]), *rates, f"{figures['ratio']:.3f}", "≤ 1.05", _mark(document, part))
    for part in ("write", "read"):
        if "served" in document:
            figures = document["served"][part]
            rates = [f"{figures[f'{name}_bytes_per_second'] / 1e9:.2f} GB/s" for name in ("mount", "plain")]
            what = f"{_what(part, figures['bytes'])}, served"
            table.add_row(what, *rates, f"{figures['ratio']:.3f}", "≤ 3.33 (rate ≥ 0.3)", _mark(document, "served"))
    for part, what in (
        ("small", "create, write 1 KiB, close"),
        ("writers", f"the same, {WRITERS} writers"),
        ("stat", f"stat, cold, {PROCESSES} processes"),
        ("list", "list and stat, cold"),
    ):
        if part in document:
            figures = document[part]
            rates = [f"{figures[f'{name}_files_per_second']} files/s" for name in ("mount", "plain")]
            limit = f"≥ {LIMITS[part][1]:.0f} files/s"
            table.add_row(what, *rates, f"{figures['ratio']:.2f}", limit, _mark(document, part))
    out.print(table)
    for part, what in (("etcd_create", "create and close"), ("etcd_stat", "stat of a known name, cold")):
        if part in document:
            figures = document[part]
            limit = f"≤ {LIMITS[part][1]:.0f} ms" if part == "etcd_create" else f"ratio ≤ {LIMITS[part][1]}"
            out.print(
                f"{what}, catalog on one etcd member, p50: {figures['etcd_milliseconds']:.2f} ms, on SQLite"
                f" {figures['sqlite_milliseconds']:.2f} ms, ratio {figures['ratio']:.2f} (limit {limit}) {_mark(document, part)}"
            )
    if "restart" in document:
        figures = document["restart"]
        out.print(
            f"the mount process killed, {figures['inodes']} files known: a call waits {figures['seconds']:.2f} s "
            f"(limit ≤ {LIMITS['restart'][1]:.0f} s) {_mark(document, 'restart')}"
        )
    if "protect" in document:
        figures = document["protect"]
        out.print(
            f"protect {human_bytes(figures['bytes'])} at 4+2: {figures['bytes_per_second'] / 1e9:.2f} GB/s, "
            f"bare loop {figures['bare_loop_bytes_per_second'] / 1e9:.2f} GB/s, share {figures['share_of_bare_loop']:.2f} "
            f"(limit ≥ 0.5) {_mark(document, 'protect')}"
        )
        used = figures["processor_seconds"]
        out.print(
            f"  processor seconds: writer's agent {used['writer_agent']}, other agents {used['other_agents']}, "
            f"mounts {used['mounts']}, of {figures['processor_seconds_available']} there were"
        )
    if "restore" in document:
        figures = document["restore"]
        out.print(
            f"restore {human_bytes(figures['bytes'])}, two nodes dead: {figures['bytes_per_second'] / 1e9:.2f} GB/s; its shards"
            f" straight over loopback {figures['bare_shards_bytes_per_second'] / 1e9:.2f}, share"
            f" {figures['share_of_bare_shards']:.2f} (limit ≥ 0.5) {_mark(document, 'restore')}"
        )
        used = ", ".join(f"{name} {seconds}" for name, seconds in figures["processor_seconds"].items())
        out.print(f"  processor seconds: {used}")
    if "repair" in document:
        figures = document["repair"]
        out.print(
            f"repair of a lost node, {human_bytes(figures['bytes'])} of shards: {figures['seconds']:.2f} s, copying them "
            f"{figures['copy_seconds']:.2f} s, ratio {figures['ratio']:.2f} (limit ≤ 2) {_mark(document, 'repair')}"
        )
        out.print(
            f"  processor seconds: {figures['processor_seconds']}, copying {figures['copy_processor_seconds']}, peak memory "
            f"{figures['peak_mb']:.0f} MB"
        )
    if "idle" in document:
        share = document["idle"]["share_of_core_max"]
        out.print(f"idle: {share:.2%} of a core a node at most (limit < 1 %) {_mark(document, 'idle')}")
    peaks = ", ".join(f"{role} {document['memory'][f'{role}_peak_mb']:.0f} MB" for role in ROLES)
    out.print(f"peak resident memory of a process: {peaks} (limit < 150 MB) {_mark(document, 'memory')}")


def _what(part: str, size_bytes: int) -> str:
    words = {"save": "torch.save", "write": "1 MiB writes", "read": "1 MiB reads"}
    return f"{words[part]}, {human_bytes(size_bytes)}"


def _mark(document: dict[str, Any], part: str) -> str:
    return "reached" if document["reached"][part] else "NOT REACHED"


if __name__ == "__main__":
    sys.exit(main())
