"""One run of the simulated cluster for each seed: `python simulate.py 1 200` runs the first 200 seeds, one after the other.

With `--rule NAME` a rule of the product is broken on purpose (`broken_rules`): the run ends at the first seed that shows it.
`--trace` prints what happened. Exit code 1 and the seed where an invariant did not hold.
"""

# ruff: noqa: E402
import argparse
import gc
import logging
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

_real_seconds = time.perf_counter

import virtual_machine

virtual_machine.take_over()

import simulated_drive

simulated_drive.take_over_drives()

import trio
from broken_rules import RULES
from faults import Faults
from invariants import Invariants
from simulated_clients import Clients
from simulated_node import UNNAMED_SECONDS, Cluster, Node
from virtual_machine import run_in_turn, world

from ckptfs.cache import refusal_mark, session_fence
from ckptfs.fs import agent, growing, segment_sweep
from ckptfs.fs.process_start import ignore_broken_leases
from ckptfs.replication import code_raiser, collector
from ckptfs.replication.quiet_threads import QuietThreads

WORK_SECONDS = 10.0
LOSS_SECONDS = 30.0
"""How much longer programs work where a store is lost: its session ends first."""
REST_SECONDS_MAX = 400.0
WHOLE_REST_SHARE = 0.2
"""Of the seeds: what nobody needs any more takes long to go."""
NAMES = "abcde"
CODES = {3: [(2, 1)], 4: [(2, 2), (2, 1)], 5: [(3, 2), (2, 2)]}
COUNTS = (3, 3, 3, 3, 4, 5)


async def _run_quietly(self: QuietThreads, function: Any, *arguments: object) -> Any:
    result = None
    with trio.CancelScope(shield=True):
        result = await run_in_turn(function, *arguments)
    return result


# Here they would measure how long the network was away.
code_raiser.ATTEMPT_SECONDS_MAX = UNNAMED_SECONDS / 2
agent.SWEEP_PAUSE_FACTOR = collector.PAUSE_SHARE = segment_sweep.PAUSE_FACTOR = 1
# What looks again and again does so less often: each look costs as much as in a real cluster, and a second costs nothing here.
agent.MEMBERS_SECONDS, agent.RESERVE_SECONDS, segment_sweep.ROWS_SECONDS, growing.LOOK_SECONDS = 6.0, 60.0, 7.0, 2.5
session_fence.LOOK_SECONDS = 2.0
QuietThreads.run = _run_quietly  # type: ignore[method-assign]


async def _run(seed: int, directory: Path, only: Sequence[str], out: list[Cluster]) -> None:
    chance = Random(f"plan {seed}")
    count = chance.choice(COUNTS)
    async with trio.open_nursery() as nursery:
        cluster = Cluster(directory, nursery, *chance.choice(CODES[count]))
        out.append(cluster)
        cluster.nodes += [Node(cluster, number) for number in range(count)]
        nursery.start_soon(cluster.etcd.run)
        clients = Clients(cluster, Random(f"clients {seed}"), NAMES)
        for node in cluster.nodes:
            await node.start()
        invariants = Invariants(cluster, clients)
        faults = Faults(cluster, clients, invariants, Random(f"faults {seed}"), only)
        await _work(cluster, clients, invariants, faults)
        if not cluster.problems:
            await _rest(cluster, clients, invariants, wholly=chance.random() < WHOLE_REST_SHARE)
        for node in cluster.nodes:
            await node.kill()
        nursery.cancel_scope.cancel()


async def _work(cluster: Cluster, clients: Clients, invariants: Invariants, faults: Faults) -> None:
    ends_at = trio.current_time() + WORK_SECONDS + (LOSS_SECONDS if faults.lose_store in faults.kinds else 0.0)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(clients.work)
        nursery.start_soon(faults.run)
        while trio.current_time() < ends_at and not cluster.problems:
            await trio.sleep(4.0)
            await invariants.look()
        clients.is_ending = True
        faults.ending.set()
        if cluster.problems:
            nursery.cancel_scope.cancel()


async def _rest(cluster: Cluster, clients: Clients, invariants: Invariants, *, wholly: bool) -> None:
    """Nothing goes wrong any more: everything becomes protected, readable everywhere, and, `wholly`, nothing is left over."""
    cluster.note("REST")
    ends_at = trio.current_time() + REST_SECONDS_MAX
    await trio.sleep(3.0)  # whoever waits to ask again asks
    while (reason := invariants.unrest(wholly=wholly)) and not cluster.problems:
        if trio.current_time() > ends_at:
            cluster.problem(f"I15: no rest: {reason}")
            for node in cluster.nodes:
                cluster.note(f"{node.machine.name} {node.state()}")
            break
        await trio.sleep(3.0)
    invariants.check_shards()
    await invariants.look()
    for name in sorted(clients.known):
        for node in cluster.nodes:
            if not await clients.read(node, name) and not clients.known[name].may_be_lost:
                cluster.problem(f"I8: {name} can't be read on {node.machine.name}, though nothing is wrong any more")


def simulate(seed: int, only: Sequence[str] = ()) -> Cluster:
    """One run. Its problems and its trace are in the cluster."""
    clock = world.begin(seed)
    directory = Path(tempfile.mkdtemp(prefix="ckptfs-simulation-", dir="/dev/shm"))
    refusal_mark.RUN = directory / "run"
    out: list[Cluster] = []
    try:
        trio.run(_run, seed, directory, only, out, clock=clock)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        out[0].problem("the simulation itself failed: " + "".join(traceback.format_exception(error)))
    finally:
        world.clock = None
        shutil.rmtree(directory)
        simulated_drive.drives.clear()
    return out[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--rule", default="")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--log", action="store_true")
    arguments = parser.parse_args()
    ignore_broken_leases()
    gc.freeze()
    gc.disable()  # while a seed runs: half a second is not long enough to need it
    if not arguments.log:
        logging.disable()
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    only: tuple[str, ...] = ()
    if arguments.rule:
        break_, only = RULES[arguments.rule]
        break_()
    began = _real_seconds()
    for seed in range(arguments.first, arguments.first + arguments.count):
        cluster = simulate(seed, only)
        gc.collect()
        if arguments.trace:
            print("\n".join(cluster.trace))
        if cluster.problems:
            print(f"CKPTFS_SIM_SEED={seed}")
            print("\n".join(cluster.problems[:5]))
            return 1
    print(f"{arguments.count} seeds in {_real_seconds() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
