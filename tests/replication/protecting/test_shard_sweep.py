"""What a store holds goes when the catalog says that nobody needs it, and not before."""

import os
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import RECOVERED_KEY, Recovered, Recovery, Shard, VersionState, pack
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.cache.versions import RepairedCommit
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_sweep import FACT, WENT_BACK, ShardSweep
from ckptfs.replication.small_copies import SmallCopy

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 8 * 4 * CELL - 5


def put_shard(node: Any, vid: bytes, *, revision: int = 1, finish: bool = True) -> Path:
    """A shard of a version the catalog has never had."""
    header = ShardHeader(Vid(vid), 0, 1, 1, CELL, CELL)
    writer = node.running.shard_store.begin(header)
    cell = os.urandom(CELL)
    writer.write_cell(0, cell, cell_hash(cell))
    if finish:
        writer.finish(ShardFooter(header, cell_hash(cell), cell_hash(cell), InodeNumber(5), b"", revision))
        return Path(node.running.shard_store.path_of(Vid(vid), 0))
    writer.suspend()
    return Path(node.running.shard_store.path_of(Vid(vid), 0) + ".partial")


def held(cluster: Any, vid: bytes) -> int:
    agents = [node.running for node in cluster.nodes]
    shards = sum(row.vid == vid for agent in agents for row in agent.shard_store.list())
    return int(shards + sum(copy.vid == vid for agent in agents for copy in agent.small_copies.list()))


async def sweep_all(cluster: Any) -> None:
    for node in cluster.nodes:
        await node.running.sweep.sweep()


async def test_what_has_no_version_goes(cluster: Any) -> None:
    node = cluster[0]
    whole, partial = put_shard(node, b"w" * 16), put_shard(node, b"p" * 16, finish=False)
    node.running.small_copies.put([SmallCopy(Vid(b"c" * 16), InodeNumber(5), 1, b"", 1, b"x")])
    await node.running.sweep.sweep()
    assert not whole.exists()
    assert not partial.exists()
    assert node.running.small_copies.list() == []
    assert node.running.shard_store.list() == []
    statistics = node.running.sweep.statistics
    assert (statistics.shards_removed, statistics.partials_removed, statistics.copies_removed) == (1, 1, 1)


async def test_what_is_named_or_may_be_stays(cluster: Any) -> None:
    node = cluster[0]
    kept = [await node.save("striped", os.urandom(SIZE)), await node.save("small", b"small")]
    ended = [await node.save("dead", os.urandom(SIZE)), await node.save("dead small", b"dead")]
    await node.protected(*kept, *ended)
    for one, name in zip(ended, ("dead", "dead small"), strict=True):
        await node.delete(one, name)
        assert (await node.version(one)).state is VersionState.DEAD
    node.codec.shut(before_stripe=5)
    local = await node.save("local", os.urandom(SIZE))
    await node.codec.reached()
    before = {one.vid: held(cluster, one.vid) for one in (*kept, *ended)}
    partials = {path for one in cluster.nodes for path in one.store.shards.rglob("*.partial")}
    assert partials
    await sweep_all(cluster)
    assert {one.vid: held(cluster, one.vid) for one in (*kept, *ended)} == before
    assert set(before.values()) == {6, 3}
    assert all(path.exists() for path in partials)
    node.codec.open()
    await node.protected(local)
    for one in (*kept, local):
        assert await cluster[3].content(one) == one.content


async def test_a_shard_that_has_another_holder_goes_after_a_long_time(cluster: Any) -> None:
    node = cluster[0]
    await cluster.up(1)
    saved = await node.save("a", os.urandom(SIZE))
    (before,) = await node.protected(saved)
    names = {one.store.store_id for one in cluster.nodes}
    (spare,) = names - {shard.store for shard in before.shards}
    old = cluster[cluster.number_of(before.shards[2].store)]
    members = await node.running.members.refresh()
    revisions = {member.store: member.revision for member in members if member.store == spare}
    moved = {2: Shard(spare, before.shards[2].root)}
    assert await node.versions.commit_repaired(RepairedCommit(saved.vid, before.shards, moved, revisions))
    for unnamed_seconds, stays in ((3600.0, True), (0.0, False)):
        sweep = sweep_of(cluster, old, unnamed_seconds)
        await sweep.sweep()
        assert old.shard_path(saved, 2).exists() == stays


@pytest.mark.parametrize("how", ["another cluster", "an earlier revision"])
async def test_a_catalog_that_was_replaced_removes_nothing(cluster: Any, how: str) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    await sweep_all(cluster)
    garbage = put_shard(node, b"w" * 16)
    known = node.running.index.fact(FACT)
    other = b"0" * 32 + b" 1" if how == "another cluster" else known.split(b" ")[0] + b" 999999"
    node.running.index.set_fact(FACT, other)
    for _ in range(2):
        await node.running.sweep.sweep()
        assert garbage.exists()
        assert node.running.sweep.statistics.refused
    assert node.running.index.fact(FACT) == other  # until somebody has looked
    assert (await node.ask("status"))["sweep"]["refused"]
    if how == "an earlier revision":  # also in the agent's next life, when its revisions have passed those there were
        node.running.index.set_fact(FACT, known)
        await node.down()
        await node.up()
        await node.running.sweep.sweep()
        assert garbage.exists()
        assert "went back" in node.running.sweep.statistics.refused


async def test_two_looks_at_the_catalog_at_once_do_not_see_it_go_back(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, and a repair that asks: what the one read before the other must not be compared with what that noted."""
    node = cluster[0]
    sweep, kv = node.running.sweep, node.running.sweep._kv
    make_durable, others_done = kv.make_durable, trio.Event()

    async def look_again() -> None:
        assert await sweep.knows_catalog()
        others_done.set()

    async with trio.open_nursery() as nursery:

        async def meanwhile() -> None:
            monkeypatch.undo()
            await node.save("newer", b"newer")
            nursery.start_soon(look_again)
            while not others_done.is_set() and not sweep._knowing.statistics().tasks_waiting:
                await trio.lowlevel.checkpoint()
            await make_durable()

        monkeypatch.setattr(kv, "make_durable", meanwhile)
        assert await sweep.knows_catalog()
    assert others_done.is_set()
    assert not sweep.statistics.refused
    assert node.running.index.fact(WENT_BACK) is None


async def test_a_shard_from_a_later_revision_than_the_catalog_has_stays(cluster: Any) -> None:
    node = cluster[0]
    later = put_shard(node, b"l" * 16, revision=await node.kv.revision() + 1000)
    await node.running.sweep.sweep()
    assert later.exists()


async def test_a_recovered_catalog_takes_nothing_of_the_time_it_does_not_know(cluster: Any) -> None:
    """And it ends that nothing was removed because the catalog went back: recovering it was how that was settled."""
    node = cluster[0]
    now = await node.kv.revision()
    node.running.index.set_fact(WENT_BACK, b"the catalog went back")
    garbage, later = put_shard(node, b"w" * 16, revision=now), put_shard(node, b"l" * 16, revision=now + 1)
    copies = [SmallCopy(Vid(bytes([at]) * 16), InodeNumber(5), 1, b"", now + at, b"x") for at in (0, 1)]
    node.running.small_copies.put(copies)
    for _ in range(4):
        await node.kv.transact([], [Put(b"c/something", b"")])
    await node.running.sweep.sweep()
    assert garbage.exists()
    recovered = Recovered(1, [Recovery(b"R" * 16, now, now + 3)])
    await node.kv.transact([], [Put(RECOVERED_KEY, pack(recovered))])
    await node.running.sweep.sweep()
    assert not garbage.exists()
    assert later.exists()
    assert [copy.vid for copy in node.running.small_copies.list()] == [copies[1].vid]
    statistics = node.running.sweep.statistics
    assert (statistics.shards_removed, statistics.copies_removed, statistics.kept_of_unknown_time) == (1, 1, 2)
    node.running.index.set_fact(WENT_BACK, b"again")
    await node.running.sweep.sweep()
    assert node.running.sweep.statistics.refused == "again", "one recovery settles it once"


def sweep_of(cluster: Any, node: Any, unnamed_seconds: float) -> ShardSweep:
    agent = node.running
    return ShardSweep(
        node.kv,
        node.versions,
        agent.shard_store,
        agent.small_copies,
        agent.index,
        node.store.store_id,
        cluster.settings.cluster,
        unnamed_seconds=unnamed_seconds,
    )


def damage_footer(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")


@pytest.mark.parametrize("index_is_lost", [False, True])
async def test_what_nobody_needs_goes_though_its_footer_is_damaged(cluster: Any, index_is_lost: bool) -> None:
    """After a long time: when it was put, and so whether the catalog has forgotten something, it does not say any more."""
    node = cluster[0]
    garbage, whole = put_shard(node, b"w" * 16), put_shard(node, b"x" * 16)
    damage_footer(garbage)
    if index_is_lost:
        node.running.index.remove([(Vid(b"w" * 16), 0), (Vid(b"x" * 16), 0)])
        assert len(node.running.shard_store.recover().damaged) == 1
    later = sweep_of(cluster, node, 3600.0)
    await later.sweep()
    assert garbage.exists()
    assert not whole.exists()
    assert (later.statistics.kept_damaged, later.statistics.shards_removed) == (1, 1)
    now = sweep_of(cluster, node, 0.0)
    await now.sweep()
    assert not garbage.exists()
    assert (now.statistics.kept_damaged, now.statistics.shards_removed) == (0, 1)
    assert node.running.shard_store.list() == []


async def test_a_damaged_one_stays_where_the_catalog_was_recovered(cluster: Any) -> None:
    node = cluster[0]
    garbage = put_shard(node, b"w" * 16)
    damage_footer(garbage)
    now = await node.kv.revision()
    await node.kv.transact([], [Put(RECOVERED_KEY, pack(Recovered(1, [Recovery(b"R" * 16, now, now + 3)])))])
    sweep = sweep_of(cluster, node, 0.0)
    await sweep.sweep()
    assert garbage.exists()
    assert sweep.statistics.kept_damaged == 1


async def test_what_can_not_be_removed_holds_up_nothing_else(cluster: Any) -> None:
    node = cluster[0]
    odd, whole = put_shard(node, b"w" * 16), put_shard(node, b"x" * 16)
    odd.unlink()
    odd.mkdir()
    sweep = sweep_of(cluster, node, 0.0)
    await sweep.sweep()
    assert not whole.exists()
    assert sweep.statistics.kept_damaged == 1


async def test_an_agent_sweeps_by_itself(cluster: Any) -> None:
    node = cluster[0]
    garbage = put_shard(node, b"w" * 16)
    cluster.sweep_seconds = 0.05
    await node.down()
    await node.up()
    with trio.fail_after(30):
        while garbage.exists():
            await trio.sleep(0.01)
