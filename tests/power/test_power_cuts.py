"""Power cuts at random moments, on a drive that forgets what was not synced: what was promised must be there afterwards.

Each seed decides what a workload does; each of its cuts, when the power goes and what of the unsynced effects is left.
`CKPTFS_POWER_CUTS=5000` is the long run, `CKPTFS_POWER_SEED=17` begins with that seed, `CKPTFS_POWER_SEED=17/4` makes only that
cut of it again. The programs under record run real store code on real files; what SQLite writes is recorded with the rest.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

import canaries
import file_workload
import shard_workload
from ckptfs.cache import boot, mount_db, refusal_mark
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs import last_use
from ckptfs.fs.process_start import ignore_broken_leases
from ckptfs.replication import small_copies
from ckptfs.replication.errors import ShardNotFound
from file_promises import Promises
from forgetful_drive import Event, ForgetfulDrive, events

CUTS = int(os.environ.get("CKPTFS_POWER_CUTS", "90"))
CUTS_EACH = 30
SEED, _, ONLY = os.environ.get("CKPTFS_POWER_SEED", "1").partition("/")
SEEDS = range(int(SEED), int(SEED) + (1 if ONLY else -(-CUTS // CUTS_EACH)))
CANARY_SEEDS = range(1, 25)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100 + CUTS)]

Check = Callable[[Path, int, list[tuple[bool, dict[str, Any]]]], list[str]]
"""The problems of a store after a power cut, given the marks before it, in a directory with that cut's number."""

_nodes = file_workload.bare_nodes()


@pytest.fixture(autouse=True)
def another_boot(place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Everything was written before this machine was started."""
    caplog.set_level(logging.CRITICAL, "ckptfs")
    ignore_broken_leases()
    monkeypatch.setattr(refusal_mark, "RUN", place / "run")
    boot_id = place / "boot_id"
    boot_id.write_text("another\n")
    monkeypatch.setattr(boot, "BOOT_ID", boot_id)
    for module in (mount_db, last_use, small_copies):
        monkeypatch.setattr(module, "booted_at_seconds", lambda: time.time() + 60)


def problems_of(log: Path, seed: int, check: Check) -> Iterator[str]:
    """Cut the power at moments the seed chooses, and say what is wrong afterwards."""
    recorded = list(events(log))
    chance = Random(seed)
    cuts = sorted(chance.randrange(1, len(recorded) + 1) for _ in range(CUTS_EACH))
    drives = [ForgetfulDrive(journal=False), ForgetfulDrive(journal=True)]
    marks: list[tuple[bool, dict[str, Any]]] = []
    at = 0
    for number, cut in enumerate(cuts):
        for event in recorded[at:cut]:
            _happen(event, drives, marks)
        at = cut
        if ONLY and number != int(ONLY):
            continue
        left = log.parent / f"cut-{number}"
        drives[number % 2].cut(Random(f"{seed}/{number}"), left)
        try:
            problems = check(left, number, marks)
        except Exception as error:
            if ONLY:
                raise
            problems = [f"{type(error).__name__}: {error}"]
        shutil.rmtree(left)
        for problem in problems:
            yield f"CKPTFS_POWER_SEED={seed}/{number}, after event {cut} of {len(recorded)}: {problem}"


def _happen(event: Event, drives: list[ForgetfulDrive], marks: list[tuple[bool, dict[str, Any]]]) -> None:
    if event.word == "mark":
        what, text = event.fields[0].split(" ", 1)
        marks.append((what == "begun", json.loads(text)))
        return
    for drive in drives:
        drive.apply(event)


# Files


async def _contents(node: Any) -> dict[str, bytes]:
    found = {}
    listing = await node.opendir(1)
    cookie = 0
    while entries := await node.readdir(1, listing, cookie):
        for entry in entries:
            cookie = entry.cookie
            if entry.name not in (b".", b".."):
                found[entry.name.decode()] = await node.content(entry.ino)
    return found


async def _recover(left: Path, *, is_new: bool) -> tuple[dict[str, bytes], list[str]]:
    """Start a node on what is left; what its names show, and what is amiss with it."""
    await file_workload.start_like_the_supervisor(left)
    problems = []
    async with _nodes.bare_nodes(left) as start:
        node = await start(new_connection=True)
        found = await _contents(node)
        problems += await catalog_problems(node.kv)
        await node.settle()
        problems += await catalog_problems(node.kv)
        sweep = file_workload.sweep_of(node)
        await sweep.sweep_rows()
        await sweep.sweep_segments()
        await node.reclaimer.drain()
        if await _contents(node) != found:
            problems.append("files show something else when they are sealed and what is left over is swept")
        inodes = {(await node.lookup(1, name.encode())).ino for name in found}
        rows = {row.ino for row in node.database.files()}
        if rows != inodes:
            problems.append(f"rows of {rows}, but the files are {inodes}")
        # One that lost its label as well is left alone: see SegmentSweep.
        labelled = [path for path in node.store.segments.rglob("*") if path.is_file() and os.listxattr(path)]
        if not is_new and len(labelled) != len(inodes):
            problems.append(f"{len(labelled)} segments of {len(inodes)} files")
        if damaged := [path.name for path in left.rglob("*.damaged-*")]:
            problems.append(f"taken for damaged: {damaged}")
    return found, problems


def check_files(left: Path, number: int, marks: list[tuple[bool, dict[str, Any]]]) -> list[str]:
    """A third of the cuts takes the node's own databases along (R21)."""
    is_new = number % 3 == 0
    if is_new:
        for path in (*left.glob("a/mount.db*"), *left.glob("a/agent/agent.db*")):
            path.unlink()
    promises = Promises()
    for is_begun, mark in marks:
        if is_begun:
            promises.begun(mark)
        else:
            promises.answered()
    found, problems = trio.run(lambda: _recover(left, is_new=is_new))
    if broken := promises.broken_by(found):
        problems.append(f"a promise is broken: {broken}")
    return problems


@pytest.mark.parametrize("seed", SEEDS)
def test_files(record: Callable[..., Path], seed: int) -> None:
    """Names and contents of a node that programs save into, through kills, reboots, checkpoints and sweeps."""
    assert not list(problems_of(record("file_workload.py", seed), seed, check_files))


def check_files_in_the_same_boot(left: Path, number: int, marks: list[tuple[bool, dict[str, Any]]]) -> list[str]:
    """A copy of the store is put in its place, after this boot has gone on with it for a while."""
    boots = sum(not is_begun and mark["do"] == "reboot" for is_begun, mark in marks)
    boot.BOOT_ID.write_text(f"boot {boots}\n")
    refusal_mark.RUN.mkdir(exist_ok=True)
    for label in left.glob("a/store.json"):
        uses = refusal_mark.RUN / f"{StoreDirectory.open(label.parent).store_id.hex()}.uses"
        uses.write_bytes((1 << 60).to_bytes(8, "little"))
    return check_files(left, number, marks)


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_files_of_a_store_that_was_set_back_in_the_same_boot(
    record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for module in (mount_db, last_use, small_copies):
        monkeypatch.setattr(module, "booted_at_seconds", lambda: 0.0)
    assert not list(problems_of(record("file_workload.py", seed), seed, check_files_in_the_same_boot))


@pytest.mark.parametrize("canary", canaries.FILES, ids=lambda canary: canary.__name__)
def test_a_broken_order_of_files_is_caught(record: Callable[..., Path], canary: Callable[[], None]) -> None:
    records = (record("file_workload.py", seed, canary.__name__) for seed in CANARY_SEEDS)
    assert any(any(problems_of(log, seed, check_files)) for seed, log in zip(CANARY_SEEDS, records, strict=False))


# Shards and copies


def check_shards(left: Path, number: int, marks: list[tuple[bool, dict[str, Any]]]) -> list[str]:
    if number % 3 == 0:
        for path in left.glob("a/agent/agent.db*"):
            path.unlink()
    shards: dict[int, int] = {}
    copies: dict[int, int] = {}
    for is_begun, mark in marks:
        if mark["do"] == "delete":
            del shards[mark["number"]]
        elif mark["do"] == "delete copies":
            del copies[mark["number"]]
        elif not is_begun and mark["do"] == "put":
            shards[mark["number"]] = mark["size"]
        elif not is_begun:
            copies.update(zip(mark["numbers"], mark["sizes"], strict=True))
    problems = []
    stores = shard_workload.Stores(left)
    for shard, size in shards.items():
        _, _, footer = shard_workload.shard_of(shard, size)
        try:
            with stores.shards.open(footer.header.vid, 1) as reader:
                whole = all(reader.check_cells()) and reader.footer == footer
            row = stores.index.get(footer.header.vid, 1)
        except ShardNotFound:
            problems.append(f"shard {shard}, which was acknowledged, is gone")
            continue
        if not whole or row is None or row.root != footer.root:
            problems.append(f"shard {shard}, which was acknowledged, is damaged or not in the index")
    for copy, size in copies.items():
        try:
            if stores.copies.get(shard_workload.vid_of(copy))[1] != shard_workload.content(copy, size):
                problems.append(f"copy {copy} is another")
        except ShardNotFound:
            problems.append(f"copy {copy}, which was acknowledged, is gone")
    if stores.recovered.damaged:
        problems.append(f"damaged: {stores.recovered.damaged}")
    if stores.copies.problem:
        problems.append(f"taken for damaged: {stores.copies.problem}")
    stores.close()
    return problems


@pytest.mark.parametrize("seed", SEEDS)
def test_shards(record: Callable[..., Path], seed: int) -> None:
    assert not list(problems_of(record("shard_workload.py", seed), seed, check_shards))


@pytest.mark.parametrize("canary", canaries.SHARDS, ids=lambda canary: canary.__name__)
def test_a_broken_order_of_shards_is_caught(record: Callable[..., Path], canary: Callable[[], None]) -> None:
    records = (record("shard_workload.py", seed, canary.__name__) for seed in CANARY_SEEDS)
    assert any(any(problems_of(log, seed, check_shards)) for seed, log in zip(CANARY_SEEDS, records, strict=False))
