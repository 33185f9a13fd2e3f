"""Everything that machines do to a cluster, at once, while it works: nothing that was acknowledged is lost or wrong, ever.

Five machines on etcd. Writers save as training does, readers on other nodes check every byte, commands verify, repair, drain and
rebalance; and a schedule that the seed decides kills, freezes and cuts off nodes (one way too), slows their cables, fills their
drives, flips bits in shards, sets their clocks, and lets them start again in any order. In the end all that is taken back, and
everything must come to rest.

`CKPTFS_CHAOS_SEEDS=20 CKPTFS_CHAOS_SECONDS=120 scripts/test tests/mount/test_chaos.py -s` is the long run; `CKPTFS_CHAOS_SEED`
names the first one, `CKPTFS_CHAOS_LOGS` a directory for logs. A seed repeats the schedule, not the moments at which processes
meet it.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import ShardLayout, Version, VersionState, unpack, vid_of_key
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.versions import Versions
from ckptfs.fs.catalog import open_catalog
from ckptfs.fs.config import load_config
from ckptfs.fs.local_cluster import ClusterSettings
from ckptfs.fs.local_socket import NodeNotAnswering, call
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_sweep import ShardSweep
from ckptfs.replication.small_copies import SmallCopies
from machine_faults import MachineFaults, schedule
from machines import Machines
from waiting import wait_for
from wrong_clock import WrongClock

SEED = int(os.environ.get("CKPTFS_CHAOS_SEED", "33"))
SEEDS = int(os.environ.get("CKPTFS_CHAOS_SEEDS", "1"))
SECONDS = float(os.environ.get("CKPTFS_CHAOS_SECONDS", "10"))
KEEP_LOGS = os.environ.get("CKPTFS_CHAOS_LOGS", "")
"""A directory to which the nodes' logs and the writers' journals are copied in the end."""

REST_SECONDS = 150
"""At most, on a machine that does much else, until all is protected and right."""

NODES = 5
WRITERS = 3
READERS = 3
DRIVE_MEBIBYTES = 3072
COMMANDS = (
    *("repair", "repair", "drain", "drain", "rebalance", "rebalance", "verify", "flush"),
    *("status", "status file", "whatif", "list"),
)
PROGRAMS = Path(__file__).parent / "chaos_programs.py"

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.chaos, pytest.mark.timeout(240 + REST_SECONDS + 2 * SECONDS)]


class Chosen(NamedTuple):
    """What a seed decides but for the schedule. `rolls_back`: nodes that are away for some seconds are declared lost."""

    rolls_back: bool
    settle_seconds: float
    passthrough: str
    wait_seconds: float
    scrub_days: float

    @classmethod
    def by(cls, chance: random.Random) -> "Chosen":
        rolls_back = chance.random() < 0.3
        return cls(
            rolls_back,
            chance.choice([0.1, 2.0]),
            chance.choice(["auto", "off"]),
            chance.choice([2.0, 30.0]),
            chance.choice([1e-4, 7]),
        )


class Cluster(NamedTuple):
    machines: Machines
    faults: MachineFaults
    journals: Path


@pytest.fixture
def make_chaos(scratch: Path, make_drive: Any, make_etcd: Callable[..., Any]) -> Iterator[Callable[[Chosen], Cluster]]:
    """Machines with a drive and a clock each, and a node that runs."""
    machines = Machines(scratch / "cluster", NODES)

    def make(chosen: Chosen) -> Cluster:
        for tool in ("nsenter", "ip", "tc"):
            if shutil.which(tool) is None:
                pytest.skip(f"no {tool}: machines are network namespaces")
        machines.directory.mkdir()
        machines.build()
        etcd = make_etcd(host=f"{machines.subnet}.1")
        repair_after = 4.0 if chosen.rolls_back else 600.0
        machines.configure(
            ClusterSettings(
                catalog=etcd.url.replace("http://", "etcd://") + "/chaos",
                data_shards=2,
                parity_shards=2,
                settle_seconds=chosen.settle_seconds,
                passthrough=chosen.passthrough,
                repair_after_seconds=repair_after,
            )
        )
        (scratch / "clocks").mkdir()
        clocks = [WrongClock(scratch / "clocks") for _ in range(NODES)]
        for node in machines.nodes:
            more = f"[repair]\nscrub_days = {chosen.scrub_days}\n[etcd]\nwait_seconds = {chosen.wait_seconds}\n"
            node.config.write_text(node.config.read_text() + more)
            make_drive(DRIVE_MEBIBYTES, at=node.store)
        faults = MachineFaults(machines, etcd, clocks, [node.store for node in machines.nodes])
        for number in range(NODES):
            faults.start(number)
        machines.wait_ready(NODES)
        (scratch / "journals").mkdir()
        return Cluster(machines, faults, scratch / "journals")

    yield make
    for node in machines.nodes:
        node.processes.kill()
    machines.tear_down()
    if KEEP_LOGS:
        kept = Path(KEEP_LOGS) / scratch.name
        for directory in [scratch / "journals", *(node.log for node in machines.nodes)]:
            with contextlib.suppress(FileNotFoundError):
                shutil.copytree(directory, kept / str(directory.relative_to(scratch)).replace("/", "-"))


Program = subprocess.Popen[str]


def start_program(kind: str, cluster: Cluster, node: int, seed: int, number: int, *options: str) -> Program:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    words = [kind, cluster.machines.nodes[node].mountpoint, cluster.journals, seed, number, *options]
    return subprocess.Popen([sys.executable, "-W", "ignore", PROGRAMS, *map(str, words)], text=True, **pipes)  # type: ignore[call-overload, no-any-return]


def said_at_end(program: Program) -> dict[str, int]:
    output, errors = program.communicate("end\n", timeout=120)
    assert program.returncode == 0, f"{program.args!r}\n{errors[-4000:]}"
    return dict(json.loads(output))


class Operator:
    """Somebody who runs one command after the other, on any node, whatever state it is in."""

    def __init__(self, machines: Machines, chance: random.Random) -> None:
        self._machines = machines
        self._chance = chance
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self.codes: dict[str, list[int]] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._chance.uniform(0, 1)):
                self._turn(self._chance.choice(self._machines.nodes).mountpoint)
        except BaseException as error:
            self._failure = error

    def _turn(self, mount: Path) -> None:
        other = self._chance.choice(self._machines.nodes)
        command = self._chance.choice(COMMANDS)
        words: dict[str, tuple[object, ...]] = {
            "status": ("status", mount),
            "status file": ("status", mount / "w0"),
            "verify": ("verify", mount),
            "repair": ("verify", mount, "--deep", "--repair"),
            "flush": ("flush", mount, "--timeout", 3),
            "drain": ("drain", mount, "--deadline", "4s"),
            "rebalance": ("rebalance", mount),
            "whatif": ("whatif", mount, "--lose", other.id),
            "list": ("nodes", "list", "--of", mount),
        }
        code, document, error = ckptfs(*words[command], "--json")
        self.codes.setdefault(command, []).append(code)
        assert code in (0, 1, 2, 3), (words[command], code, error)
        assert "Traceback" not in error, error
        assert code == 0 or error or "error" in document, (words[command], document, "not said why")
        if command in ("verify", "repair") and code == 1 and "files" in document:
            gone = [
                one
                for one in document["files"]
                if one["result"] == "lost" or (one["result"] == "damaged" and not one["protected"])
            ]
            assert not gone, gone
        if command == "drain" and code in (0, 1):
            self._chance.random() < 0.5 and self._ended.wait(self._chance.uniform(0, 3))
            self.codes.setdefault("drain --cancel", []).append(ckptfs("drain", mount, "--cancel", "--json")[0])

    def end(self) -> None:
        """Raises what went wrong."""
        self._ended.set()
        self._thread.join(180)
        assert not self._thread.is_alive(), "a command did not end"
        if self._failure is not None:
            raise self._failure


def ckptfs(*words: object, timeout: float = 170) -> tuple[int, dict[str, Any], str]:
    """Exit code, the document of --json, and standard error."""
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/")
    try:
        return done.returncode, json.loads(done.stdout), done.stderr
    except ValueError:
        raise AssertionError(f"{words}: exit code {done.returncode}, {done.stdout!r}, {done.stderr[-3000:]!r}") from None


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_nothing_that_machines_do_loses_or_changes_a_byte(make_chaos: Callable[[Chosen], Cluster], seed: int) -> None:
    chance = random.Random(seed)
    chosen = Chosen.by(chance)
    faults = schedule(chance, SECONDS, NODES)
    print(f"\nseed {seed}: {chosen}", *faults, sep="\n  ")
    cluster = make_chaos(chosen)
    options = ["rolls-back"] if chosen.rolls_back else []
    programs = [start_program("write", cluster, number % NODES, seed, number, *options) for number in range(WRITERS)]
    programs += [start_program("read", cluster, (number + 2) % NODES, seed, number, *options) for number in range(READERS)]
    operator = Operator(cluster.machines, random.Random(seed))
    try:
        with contextlib.ExitStack() as healed:
            healed.callback(operator.end)
            healed.callback(cluster.faults.heal)
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == "begins\n", program.communicate()[1][-4000:]
            cluster.faults.run(faults, lambda: any(program.poll() is not None for program in programs))
        said = [said_at_end(program) for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait(60)
    print(f"happened {cluster.faults.happened}\nwriters {said[:WRITERS]}\nreaders {said[WRITERS:]}\ncommands {operator.codes}")
    assert sum(one["done"] for one in said[:WRITERS])
    assert sum(one["checked"] for one in said[WRITERS:])
    come_to_rest(cluster)
    for number in range(NODES):
        said_at_end(start_program("check", cluster, number, seed, number, *options))
    mend_what_drives_did(cluster)
    look_at_logs(cluster)
    assert_stores_are_the_catalog(cluster)


def come_to_rest(cluster: Cluster) -> None:
    """All nodes run, know each other, are members that take shards, and everything is protected."""
    machines, faults = cluster.machines, cluster.faults

    def all_answer() -> bool:
        for number in range(NODES):
            faults.start(number)
        return all(node.answers() for node in machines.nodes)

    def all_take_shards() -> bool:
        return all_answer() and all(ckptfs("drain", node.mountpoint, "--cancel", "--json")[0] == 0 for node in machines.nodes)

    wait_for(all_answer, "all mounts", REST_SECONDS)
    wait_for(all_take_shards, "all take shards again", REST_SECONDS)
    wait_for(lambda: all_answer() and all(standings(node) == {"up"} for node in machines.nodes), "all nodes up", REST_SECONDS)
    code, document, error = ckptfs("flush", machines.nodes[0].mountpoint, "--timeout", REST_SECONDS, "--json")
    assert code == 0, (document, error)


def standings(node: Any) -> set[str]:
    try:
        answer = call(node.store / "run" / "agent.sock", {"do": "status"})
    except NodeNotAnswering:
        return {"no answer"}
    return (
        {store["standing"] if store["live"] else "away" for store in answer["stores"]}
        if answer.get("ok", True)
        else {"no answer"}
    )


def mend_what_drives_did(cluster: Cluster) -> None:
    """One repair is enough, and needed for nothing but the bits that were flipped. What a fault cut short is no zip file."""
    mount = cluster.machines.nodes[1].mountpoint
    for options, results in ((("--repair",), {"ok", "repaired", "format"}), ((), {"ok", "format"})):
        _, document, error = ckptfs("verify", mount, "--deep", *options, "--json")
        assert not (wrong := [file for file in document["files"] if file["result"] not in results]), (wrong, error)
    code, status, error = ckptfs("status", mount, "--json")
    assert code == 0, error
    assert not status["nodes"][0]["problems"], status["nodes"][0]["problems"]


def look_at_logs(cluster: Cluster) -> None:
    for node in cluster.machines.nodes:
        status = call(node.store / "run" / "mount.sock", {"do": "status"})
        assert status["unexpected_errors"] == 0, status
        for log in node.log.glob("*.log"):
            text = log.read_text(errors="replace")
            assert "Traceback" not in text, f"{log}: {text[text.index('Traceback') :][:3000]}"


def assert_stores_are_the_catalog(cluster: Cluster) -> None:
    """Every shard that the catalog names is where it says, and what it doesn't name goes."""
    machines = cluster.machines
    for node in machines.nodes:
        assert node.processes.ask_supervisor_to_end()
    deadline = time.monotonic() + 60
    assert all(node.processes.wait_ended(deadline) for node in machines.nodes)

    async def look() -> None:
        kv = open_catalog(load_config(machines.nodes[0].config), "test")
        try:
            assert await catalog_problems(kv) == []
            versions = {vid_of_key(entry.key): unpack(Version, entry.value) for entry in await kv.range(b"v/")}
            states = {version.state for version in versions.values()}
            assert states <= {VersionState.PROTECTED, VersionState.DEAD}, states
            for node in machines.nodes:
                store = StoreDirectory.open(node.store)
                index = AgentDatabase(store.agent_db)
                shards, copies = ShardStore(store.shards, index), SmallCopies(store.small_copies_db)
                shards.recover()
                found = Versions(kv, store.store_id, 0, time.time_ns)
                settings = await Namespace(kv, store.store_id, 0, time.time_ns).settings()
                sweep = ShardSweep(kv, found, shards, copies, index, store.store_id, settings.cluster, unnamed_seconds=0.0)
                await sweep.sweep()
                assert sweep.statistics.refused == ""
                held = {(row.vid, row.index) for row in shards.list(limit=1_000_000)} | {
                    (row.vid, -1) for row in copies.list(b"", 1_000_000)
                }
                named = {
                    (vid, -1 if version.layout is ShardLayout.COPIES else number)
                    for vid, version in versions.items()
                    for number, shard in enumerate(version.shards)
                    if shard.store == store.store_id and version.state is VersionState.PROTECTED
                }
                of_dead = {(vid, number) for vid, number in held if versions[vid].state is VersionState.DEAD}
                assert named <= held, f"{node.id} lacks {[(vid.hex(), number) for vid, number in named - held]}"
                assert held - of_dead <= named, (
                    f"{node.id} keeps {[(vid.hex(), number) for vid, number in held - of_dead - named]}"
                )
                copies.close()
                index.close()
        finally:
            await kv.aclose()

    trio.run(look)
