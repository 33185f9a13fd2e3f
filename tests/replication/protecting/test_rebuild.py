"""Stores that are lost or draining: their shards are made again on others, by one node, and nothing is less safe meanwhile."""

import os
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import FORMAT_VERSION, Shard, ShardLayout, StoreState, Version, VersionState, pack, version_key
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.store_registry import register_store, set_state, stores
from ckptfs.replication import rebuild
from ckptfs.replication.members import Members
from ckptfs.replication.pace import Pace
from ckptfs.replication.rebuild import Rebuilder
from ckptfs.replication.repair import Rebuilt
from ckptfs.replication.shard_moves import Move

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 3 * CELL + 17

slow = pytest.mark.slow


def holder_numbers(cluster: Any, version: Version) -> list[int]:
    return [cluster.number_of(shard.store) for shard in version.shards]


async def declared(cluster: Any, number: int, state: StoreState) -> None:
    node = cluster[number]
    await set_state(node.kv, node.store.store_id, state)


async def look(cluster: Any) -> list[int]:
    """Every node that runs looks once; those that did something."""
    worked = []
    await cluster.elect()
    for node in cluster.nodes:
        if node.agent is not None:
            before = node.agent.rebuilder.statistics.rebuilt_shards
            await node.agent.members.refresh(everyone=True)
            node.agent.rebuilder.look_again()
            await node.agent.rebuilder.look()
            if node.agent.rebuilder.statistics.rebuilt_shards > before:
                worked.append(node.number)
    return worked


@slow
@pytest.mark.parametrize("cluster", [8], indirect=True)
async def test_shards_of_lost_stores_are_made_again_elsewhere(cluster: Any) -> None:
    saved = [await cluster[0].save(f"step-{number}", os.urandom(SIZE + number * CELL)) for number in range(4)]
    saved += [await cluster[0].save(f"small-{number}", os.urandom(1000 + number)) for number in range(9)]
    before = await cluster[0].protected(*saved)
    lost = (0, 5)  # the writer and one more
    await cluster.down(*lost)
    for number in lost:
        await declared(cluster, number, StoreState.LOST)
    assert len(await look(cluster)) == 1
    reader = cluster[3]
    for one, was in zip(saved, before, strict=True):
        version = await reader.version(one)
        numbers = holder_numbers(cluster, version)
        assert len(set(numbers)) == len(numbers)
        assert not set(numbers) & set(lost)
        assert [shard.root for shard in version.shards] == [shard.root for shard in was.shards]
        kept = [index for index, number in enumerate(holder_numbers(cluster, was)) if number not in lost]
        assert all(version.shards[index] == was.shards[index] for index in kept)
    assert await look(cluster) == []
    answer = await reader.ask("verify", inos=[one.ino for one in saved], deep=True)
    assert {file["result"] for file in answer["files"]} == {"ok"}, answer
    await cluster.down(1, 6)  # any two more
    for one in saved:
        assert await reader.content(one) == one.content


@slow
@pytest.mark.parametrize("cluster", [8], indirect=True)
async def test_a_store_that_drains_gives_its_shards_away_and_can_go(cluster: Any) -> None:
    saved = [await cluster[0].save(f"step-{number}", os.urandom(SIZE)) for number in range(4)]
    saved.append(await cluster[0].save("small", os.urandom(1000)))
    before = await cluster[0].protected(*saved)
    leaver = next(number for number in range(1, 8) if all(number in holder_numbers(cluster, one) for one in before[:2]))
    await declared(cluster, leaver, StoreState.DRAINING)
    before_reading = (await cluster.elect()).running.reader.counters.cells_read
    await look(cluster)
    # What still answers is copied: but for the small file nothing is read as a reader would.
    assert (await cluster.elect()).running.reader.counters.cells_read - before_reading <= 1
    for one in saved:
        assert leaver not in holder_numbers(cluster, await cluster[0].version(one))
    await cluster.down(leaver)
    others = [number for number in range(1, 8) if number != leaver][:2]
    await cluster.down(*others)
    for one in saved:
        assert await cluster[0].content(one) == one.content


@slow
@pytest.mark.parametrize("cluster", [7], indirect=True)
async def test_a_damaged_shard_that_leaves_is_made_of_the_others(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    index = next(index for index in range(6) if holder_numbers(cluster, version)[index] != 0)
    leaver = cluster[holder_numbers(cluster, version)[index]]
    with open(leaver.shard_path(saved, index), "r+b") as file:
        file.seek(4096 + 2 * CELL + 5)
        file.write(b"wrong")
    await declared(cluster, leaver.number, StoreState.DRAINING)
    await look(cluster)
    await leaver.down()
    answer = await cluster[0].ask("verify", inos=[saved.ino], deep=True)
    assert answer["files"][0]["result"] == "ok", answer


@slow
async def test_what_has_no_place_stays_and_what_is_nowhere_is_named_lost(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    small = await cluster[0].save("small", os.urandom(1000))
    await cluster[0].protected(saved, small)
    await cluster.down(0)
    await declared(cluster, 0, StoreState.LOST)
    assert small.ino not in [ino for node in cluster.nodes[1:] for ino in node.running.rebuilder.statistics.lost]
    await look(cluster)
    leader = (await cluster.elect()).running.rebuilder
    assert (leader.statistics.left, leader.statistics.homeless, leader.statistics.lost_count) == (1, 1, 0)
    await cluster.down(1, 2)
    for number in (1, 2):
        await declared(cluster, number, StoreState.LOST)
    await look(cluster)
    leader = (await cluster.elect()).running.rebuilder
    assert (leader.statistics.lost_count, leader.statistics.lost) == (1, [saved.ino])
    (report,) = (await cluster[4].ask("verify", inos=[saved.ino], repair=True))["files"]
    assert report["result"] == "lost", report
    (problem,) = [said for said in (await (await cluster.elect()).ask("status"))["problems"] if "model.pt" in said]
    assert "model.pt" in problem


@slow
@pytest.mark.parametrize("cluster", [8], indirect=True)
async def test_another_node_goes_on_where_a_leader_ended(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    numbers = holder_numbers(cluster, version)
    leads = (await cluster.elect()).number
    lost = next(number for number in numbers[4:] if number != leads)  # a parity shard, which is encoded
    await cluster.down(lost)
    await declared(cluster, lost, StoreState.LOST)
    leader = await cluster.elect()
    leader.codec.shut(before_stripe=3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leader.running.rebuilder.look)
        await leader.codec.reached()
        nursery.cancel_scope.cancel()
        leader.codec.open()
    assert (await cluster[0].version(saved)).shards == version.shards
    await leader.down()
    assert await look(cluster) == [(await cluster.elect()).number]
    reader = await cluster.elect()
    after = await reader.version(saved)
    assert lost not in holder_numbers(cluster, after)
    assert [shard.root for shard in after.shards] == [shard.root for shard in version.shards]


# ---- what is first, and how fast


class Records:
    """A catalog of versions and stores; what the mover is given."""

    def __init__(self) -> None:
        self.kv = MemoryCatalog()
        self.moves: list[Move] = []
        self.is_known = True
        self.stores = [StoreId(bytes([number]) * 16) for number in range(1, 10)]

    async def begin(self, lost: int) -> None:
        for number, store in enumerate(self.stores):
            await register_store(self.kv, store, NodeId(f"node-{number}"), f"127.0.0.1:{number}", "/store", {})
            if number < lost:
                await set_state(self.kv, store, StoreState.LOST)

    async def version(self, name: int, holders: list[int], k: int = 4) -> Vid:
        vid = Vid(bytes([name]) * 16)
        shards = [Shard(self.stores[number], bytes([9]) * 16) for number in holders]
        version = Version(
            FORMAT_VERSION, InodeNumber(name), VersionState.PROTECTED, self.stores[0], SegmentId(vid), True, 1000, bytes(16),
            ShardLayout.STRIPED, k, len(holders) - k, 4096, shards,
        )  # fmt: skip
        await self.kv.transact([], [Put(version_key(vid), pack(version))])
        return vid

    def rebuilder(self) -> Rebuilder:
        async def ping(store: StoreId, address: str) -> int:
            return 1 << 30

        async def listed() -> Any:
            return await stores(self.kv)

        async def move(moves: Any, note: Any, *, without: frozenset[StoreId]) -> None:
            for one in moves:
                self.moves.append(one)
                note(one, Rebuilt({}, dict.fromkeys(one.indices, "full")))

        mover: Any = type("Mover", (), {"move": staticmethod(move)})()
        members = Members(self.stores[-1], listed, ping, lambda: 1 << 30)
        return Rebuilder(self.kv, members, mover, lambda: True, look_seconds=1.0, may_repair=self.may_repair)

    async def may_repair(self) -> bool:
        return self.is_known


async def test_the_most_exposed_versions_are_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "MOVES_MAX", 2)
    records = Records()
    await records.begin(lost=2)
    one_gone = [await records.version(number, [0, 2, 3, 4, 5, 6]) for number in range(1, 6)]
    two_gone = await records.version(6, [0, 1, 3, 4, 5, 6])
    await records.version(7, [2, 3, 4, 5, 6, 7])
    rebuilder = records.rebuilder()
    await rebuilder.look()
    assert [move.vid for move in records.moves] == [two_gone, *one_gone]
    assert [move.indices for move in records.moves] == [(0, 1)] + 5 * [(0,)]
    assert (rebuilder.statistics.stuck, rebuilder.statistics.left, rebuilder.statistics.last_error) == (6, 6, "full")


async def test_a_version_with_too_few_shards_left_anywhere_is_lost_and_not_tried() -> None:
    records = Records()
    await records.begin(lost=3)
    await records.version(1, [0, 1, 2, 4, 5, 6])
    await records.version(2, [0, 1, 3, 4, 5, 6])
    rebuilder = records.rebuilder()
    await rebuilder.look()
    assert [move.version.ino for move in records.moves] == [2]
    assert (rebuilder.statistics.lost_count, rebuilder.statistics.lost) == (1, [1])


async def test_nothing_moves_on_the_word_of_a_catalog_that_went_back() -> None:
    records = Records()
    await records.begin(lost=1)
    await records.version(1, [0, 1, 2, 4, 5, 6])
    records.is_known = False
    rebuilder = records.rebuilder()
    await rebuilder.look()
    assert records.moves == []
    assert "not the one this store knows" in rebuilder.statistics.last_error
    records.is_known = True
    await rebuilder.look()
    assert records.moves == [], "it is asked again in a minute"
    rebuilder.look_again()
    await rebuilder.look()
    assert len(records.moves) == 1


async def test_a_pace_is_kept_by_all_that_share_it(autojump_clock: trio.testing.MockClock) -> None:
    pace = Pace(1000)
    started = trio.current_time()

    async def work() -> None:
        for _ in range(5):
            await pace.spend(500)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        nursery.start_soon(work)
    assert trio.current_time() - started == pytest.approx(5.0)
