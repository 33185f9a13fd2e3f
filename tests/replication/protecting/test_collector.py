"""Shards of what was deleted or replaced: when they go, and when they must not."""

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import VersionState, hold_key
from ckptfs.cache.catalog_kv import Delete, Put
from ckptfs.cache.ids import SegmentId
from ckptfs.replication import collector as module
from ckptfs.replication.collector import OPEN_COUNTS_SECONDS, Collector, CollectorStatistics, DeadVersion, Frontier

pytestmark = pytest.mark.slow

BIG = 300_000


async def collected(kv: Any, members: Any, leadership: Any, after_seconds: float) -> tuple[int, CollectorStatistics]:
    """How many keys go in a walk so long after one that saw what is dead."""
    now = 0.0
    collector = Collector(kv, members, leadership, now=lambda: now)
    assert await collector.collect() == 0
    now = after_seconds
    return await collector.collect(), collector.statistics


async def collect(cluster: Any, *, after_seconds: float = 601.0, sweep: bool = True) -> int:
    """Two walks of every node, the second so much later, and then a sweep of every store."""
    count = 0
    for node in cluster.nodes:
        if node.agent is None:
            continue
        await node.running.members.refresh()
        agent = node.running
        await agent.leadership.look()
        count += (await collected(agent.collector._kv, agent.members, agent.leadership, after_seconds))[0]
    for node in cluster.nodes:
        if sweep and node.agent is not None:
            await node.running.sweep.sweep()
    return count


def shards_of(cluster: Any, *saved: Any) -> int:
    """How many shard files and copies the stores have of them."""
    vids = {one.vid.hex() for one in saved}
    files = sum(path.name.split(".")[0] in vids for node in cluster.nodes for path in node.store.shards.rglob("*.*"))
    copies = sum(
        row.vid in {one.vid for one in saved} for node in cluster.nodes for row in node.running.small_copies.list(b"", 1000)
    )
    return files + copies


@pytest.mark.parametrize("size", [BIG, 1000])
async def test_what_was_deleted_goes_after_the_grace(cluster: Any, size: int) -> None:
    first = cluster[0]
    saved, kept = await first.save("a", os.urandom(size)), await first.save("b", os.urandom(size))
    await first.protected(saved, kept)
    before = shards_of(cluster, saved)
    assert before >= 3
    await first.delete(saved, "a")
    assert await collect(cluster, after_seconds=599) == 0
    assert shards_of(cluster, saved) == before
    assert await collect(cluster) == 1
    assert shards_of(cluster, saved) == 0
    assert await first.versions.version(saved.vid) is None
    assert await cluster[1].content(kept) == kept.content
    assert await collect(cluster) == 0


async def test_the_grace_is_no_matter_of_the_clock_that_stamped_the_death(cluster: Any) -> None:
    first = cluster[0]
    saved = await first.save("a", os.urandom(BIG))
    await first.protected(saved)
    first.namespace.now_ns = lambda: time.time_ns() - 3600 * 10**9
    await first.delete(saved, "a")
    assert await collect(cluster, after_seconds=599) == 0
    assert await collect(cluster) == 1


async def test_what_was_replaced_stays_until_its_replacement_is_protected(cluster: Any) -> None:
    first = cluster[0]
    saved = await first.save("model.pt", os.urandom(BIG))
    await first.protected(saved)
    again = await first.rewrite(saved, os.urandom(BIG))
    await first.protected(again)
    await first.settled()
    old = await first.versions.version(saved.vid)
    assert old is None or old.state is VersionState.DEAD
    assert await collect(cluster) == 1
    assert shards_of(cluster, saved) == 0
    assert await cluster[2].content(again) == again.content


async def test_nothing_goes_while_what_was_saved_before_its_death_is_only_local(cluster: Any) -> None:
    """The last protected checkpoint is deleted right after the next one was closed: it stays until that one is protected."""
    first = cluster[0]
    old = await first.save("step-1", os.urandom(BIG))
    await first.protected(old)
    for node in cluster.nodes[1:]:
        await node.down()
    new = await first.save("step-2", os.urandom(BIG))
    await first.delete(old, "step-1")
    later = await first.save("step-3", os.urandom(BIG))  # begun after the death: it holds nothing up
    assert await collect(cluster, after_seconds=10 * OPEN_COUNTS_SECONDS, sweep=False) == 0
    for node in cluster.nodes[1:]:
        await node.up()
    await first.protected(new, later)
    assert await collect(cluster) == 1
    assert shards_of(cluster, old) == 0


async def test_an_open_file_holds_up_for_an_hour(cluster: Any) -> None:
    first = cluster[0]
    old = await first.save("step-1", os.urandom(BIG))
    await first.protected(old)
    await first.open("log", b"x")
    await first.delete(old, "step-1")
    assert await collect(cluster, after_seconds=OPEN_COUNTS_SECONDS - 60) == 0
    assert await collect(cluster, after_seconds=OPEN_COUNTS_SECONDS + 60) == 1


@pytest.mark.parametrize("by", ["vid", "segment"])
async def test_what_is_read_elsewhere_stays(cluster: Any, by: str) -> None:
    first = cluster[0]
    saved = await first.save("a", os.urandom(BIG))
    await first.protected(saved)
    await first.delete(saved, "a")
    key = hold_key(SegmentId(saved.vid) if by == "vid" else saved.segment, cluster[2].store.store_id)
    await first.kv.transact([], [Put(key, b"")])
    assert await collect(cluster) == 0
    assert shards_of(cluster, saved) == 6
    await first.kv.transact([], [Delete(key)])
    assert await collect(cluster) == 1


async def test_however_many_are_dead_all_go_after_one_grace(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only those that a walk remembers, each of them after a grace of its own that began when those before it were gone."""
    monkeypatch.setattr(module, "DEAD_MAX", 3)
    monkeypatch.setattr(module, "BATCH_COUNT", 4)
    first = cluster[0]
    saved = [await first.save(f"file-{number}", b"content", wake=False) for number in range(20)]
    first.running.replicator.wake()
    await first.protected(*saved)
    for number, one in enumerate(saved):
        await first.delete(one, f"file-{number}")
    held = [hold_key(SegmentId(one.vid), cluster[2].store.store_id) for one in (saved[4], saved[11])]
    await first.kv.transact([], [Put(key, b"") for key in held])
    assert await collect(cluster, after_seconds=599) == 0
    assert await collect(cluster, sweep=False) == 18, "but not what is read elsewhere"
    await first.kv.transact([], [Delete(key) for key in held])
    assert await collect(cluster) == 2
    assert shards_of(cluster, *saved) == 0


async def test_what_dies_later_has_a_grace_of_its_own(cluster: Any) -> None:
    first = cluster[0]
    earlier, later = await first.save("a", b"x"), await first.save("b", b"y")
    await first.protected(earlier, later)
    agent = (await cluster.elect()).running
    now = 0.0
    collector = Collector(agent.collector._kv, agent.members, agent.leadership, now=lambda: now)
    await first.delete(earlier, "a")
    assert await collector.collect() == 0
    await first.delete(later, "b")
    for moment, count in ((599.0, 0), (601.0, 1), (1198.0, 0), (1200.0, 1), (9000.0, 0)):
        now = moment
        assert await collector.collect() == count
    assert len(collector._walks) == 2, "an hour of them"


async def test_one_node_does_it(cluster: Any) -> None:
    first = cluster[0]
    saved = await first.save("a", os.urandom(BIG))
    await first.protected(saved)
    await first.delete(saved, "a")
    walked = []
    for node in cluster.nodes:
        await node.running.leadership.look()
        await node.running.collector.collect()
        walked.append(node.running.collector.statistics.dead)
    assert sorted(walked) == [0, 0, 0, 0, 0, 1]


async def test_full_stores_get_room_before_the_frontier_the_oldest_first(cluster: Any) -> None:
    first = cluster[0]
    old = await first.save("step-1", os.urandom(BIG))
    await first.protected(old)
    await first.open("log", b"x")
    await first.delete(old, "step-1")
    for node in cluster.nodes:
        await node.running.leadership.look()
    agent = next(node.running for node in cluster.nodes if node.running.leadership.is_held)
    full = [member._replace(free_bytes=0) for member in await agent.members.refresh()]

    class Full:
        own_store = agent.members.own_store

        def known(self) -> Sequence[Any]:
            return full

    members: Any = Full()
    assert (await collected(agent.collector._kv, members, agent.leadership, 599))[0] == 0
    count, statistics = await collected(agent.collector._kv, members, agent.leadership, 601)
    assert (count, statistics.early) == (1, 1)


async def test_it_runs_in_the_agent(cluster: Any) -> None:
    for node in cluster.nodes:
        await node.down()
        node.collect_seconds, node.grace_seconds = 0.01, 0.0
        await node.up()
    first = cluster[0]
    saved = await first.save("a", os.urandom(BIG))
    await first.protected(saved)
    await first.delete(saved, "a")
    with trio.fail_after(20):
        while await first.versions.version(saved.vid) is not None:
            await trio.sleep(0.01)


def test_the_frontier_is_the_oldest_that_waits() -> None:
    died: Any = DeadVersion(10, None, None)  # type: ignore[arg-type]
    never = float("inf")
    assert Frontier(never, never).allows(died, 0)
    assert Frontier(11, 11).allows(died, 0)
    assert not Frontier(10, never).allows(died, 1e9)
    assert not Frontier(9, never).allows(died, 1e9)
    assert not Frontier(never, 9).allows(died, OPEN_COUNTS_SECONDS - 1)
    assert Frontier(never, 9).allows(died, OPEN_COUNTS_SECONDS)
