"""Damage to what only its home has is found while it lies there, and what is right or being written is left alone."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.ids import new_segment_id
from ckptfs.cache.versions import Versions
from ckptfs.replication import segment_scrub
from ckptfs.replication.pace import Pace
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.segment_scrub import SegmentScrub

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("cluster", [1], indirect=True)]

CELL = 16 << 10
SIZE = 9 * CELL + 5


def path_of(node: Any, saved: Any) -> Path:
    return Path(node.segments.path_of(saved.segment))


def flip(path: Path, offset: int) -> None:
    content = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(bytes([content[offset] ^ 1]))


@pytest.mark.parametrize("read_bytes", [CELL, 4 * CELL, 8 << 20])
async def test_a_damaged_only_copy_is_known(cluster: Any, monkeypatch: pytest.MonkeyPatch, read_bytes: int) -> None:
    monkeypatch.setattr(segment_scrub, "READ_BYTES", read_bytes)
    node = cluster[0]
    right, wrong, short, gone = [await node.save(name, os.urandom(SIZE)) for name in ("right", "wrong", "short", "gone")]
    flip(path_of(node, wrong), SIZE - 3)
    os.truncate(path_of(node, short), SIZE - 1)
    path_of(node, gone).unlink()
    await node.running.segment_scrub.pass_over()
    damaged = [(await node.version(one)).damaged for one in (right, wrong, short, gone)]
    assert damaged == [False, True, True, True]
    statistics = node.running.segment_scrub.statistics
    assert (statistics.checked, statistics.damaged) == (4, 3)
    assert statistics.last_ended_ns
    status = await node.ask("status")
    assert status["segment_scrub"]["damaged"] == 3
    assert status["damaged_count"] == 3

    flip(path_of(node, wrong), SIZE - 3)  # somebody has put it back
    await node.running.segment_scrub.pass_over()
    assert not (await node.version(wrong)).damaged
    assert (statistics.checked, statistics.damaged) == (8, 3)


async def test_what_is_written_anew_meanwhile_is_not_called_damaged(cluster: Any) -> None:
    """It is opened for writing, and changed, between the look at the catalog and the drive's answer."""
    node = cluster[0]
    saved = await node.save("log", os.urandom(SIZE))
    scrub = node.running.segment_scrub

    class Interfering(Versions):
        async def version(self, vid: Any) -> Any:
            found = await super().version(vid)
            await node.versions.open_for_writing(saved.ino, truncate_to_new_segment=None)
            flip(path_of(node, saved), 5)
            return found

    scrub._versions = Interfering(node.kv, node.store.store_id, 1, node.namespace.now_ns)
    await scrub.pass_over()
    assert scrub.statistics.damaged == 0
    inode = await node.namespace.inode(saved.ino)
    assert not (await node.versions.version(inode.open)).damaged


async def test_holes_cost_nothing_and_all_else_its_time(cluster: Any, autojump_clock: Any) -> None:
    node = cluster[0]
    segment = new_segment_id()
    os.close(node.segments.create(segment, 5))
    with open(node.segments.path_of(segment), "wb") as file:
        file.truncate(1000 * CELL)
        file.write(os.urandom(10 * CELL))
    spent: list[int] = []

    class Counting(Pace):
        async def spend(self, size_bytes: int) -> None:
            spent.append(size_bytes)

    with QuietThreads(1) as threads:
        scrub = SegmentScrub(
            node.kv, node.versions, node.segments, node.store.store_id, threads, lambda: 0, Counting(0), period_seconds=0
        )
        homes = segment_scrub._Paced(scrub._segments, threads, Counting(0))
        size, table = await homes.segment_hashes(node.store.store_id, segment, CELL, 0, 1000)
    assert (size, len(table)) == (1000 * CELL, 1000 * 16)
    assert sum(spent) == 10 * CELL
