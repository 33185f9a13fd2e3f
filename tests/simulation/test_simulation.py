"""Whole clusters with virtual time, one for each seed: see README.md here.

`CKPTFS_SIM_SEEDS=20000` is the long run, `CKPTFS_SIM_SEED=17` repeats one seed. Each process runs its share of the seeds, one
after the other, because the simulation takes an interpreter over. The same seed gives the same run, to the last line of its
trace.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SEEDS = int(os.environ.get("CKPTFS_SIM_SEEDS", "1000"))
ONLY = os.environ.get("CKPTFS_SIM_SEED", "")
CANARY_SEEDS = 150
PROCESSES = len(os.sched_getaffinity(0))
SECONDS_PER_SEED = 3
"""For all processes together, on a machine that has much else to do; 0.4 of a core on one that hasn't."""

RULES = (
    "reclaim_at_unlink",
    "commit_before_the_last_acknowledgement",
    "shard_not_synced",
    "local_not_synced",
    "seal_at_release",
    "counter_instead_of_vid",
    "collect_without_looking",
    "cur_set_at_close",
    "watch_resumed_at_the_compaction",
    "no_operation_key",
    "no_session_compare",
    "return_over_newer",
    "fsync_forgets_the_mark",
    "replaced_rows_are_forgotten",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + SECONDS_PER_SEED * max(SEEDS, 100))]


def begin(*arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.fspath(HERE), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, os.fspath(HERE / "simulate.py"), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(*arguments: str) -> tuple[int, str]:
    process = begin(*arguments)
    try:
        output, _ = process.communicate()
    finally:
        process.kill()
    return process.returncode, output


def test_every_seed_keeps_every_promise() -> None:
    if ONLY:
        code, output = run(ONLY, "1", "--trace")
        assert code == 0, output
        return
    share = -(-SEEDS // PROCESSES)
    processes = [begin(str(1 + done), str(min(share, SEEDS - done))) for done in range(0, SEEDS, share)]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    wrong = [output for process, output in zip(processes, outputs, strict=True) if process.returncode]
    assert not wrong, "\n".join(wrong)


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = run("7", "2", "--trace"), run("7", "2", "--trace")
    without_time = [output.splitlines()[:-1] for _, output in (first, again)]
    assert without_time[0] == without_time[1]
    assert len(without_time[0]) > 50


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_found(rule: str) -> None:
    code, output = run("1", str(CANARY_SEEDS), "--rule", rule)
    assert code == 1, f"{rule} was not found: {output}"
    assert "CKPTFS_SIM_SEED" in output
