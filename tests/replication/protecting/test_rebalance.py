"""Nodes that were added get shards of what there is, and no file has a shard less on the way."""

import os
from dataclasses import asdict
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import FORMAT_VERSION, Shard, ShardLayout, StoreState, Version, VersionState
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.fs.cli_rebalance import not_done
from ckptfs.replication.members import Member
from ckptfs.replication.rebalance import Balance, Rebalancer

STORES = [StoreId(bytes([number]) * 16) for number in range(1, 9)]
GIB = 1 << 30


def member(number: int, free_bytes: int, *, domain: str = "", live: bool = True) -> Member:
    return Member(STORES[number], NodeId(f"node-{number}"), domain or f"node-{number}", "", StoreState.IN, 1, live, free_bytes)


def version(holders: list[int], size: int = 4 * GIB) -> Version:
    shards = [Shard(STORES[number], bytes(16)) for number in holders]
    return Version(
        FORMAT_VERSION, InodeNumber(5), VersionState.PROTECTED, STORES[0], SegmentId(bytes(16)), True, size, bytes(16),
        ShardLayout.STRIPED, len(holders) - 2, 2, 1 << 20, shards,
    )  # fmt: skip


def vid(number: int) -> Vid:
    return Vid(number.to_bytes(16, "big"))


def test_an_empty_store_gets_its_share_and_no_more() -> None:
    members = [*(member(number, 20 * GIB) for number in range(6)), member(6, 100 * GIB)]
    named = dict.fromkeys(STORES[:6], 80 * GIB)
    balance = Balance(named, members)
    moves = [move for number in range(80) if (move := balance.move(vid(number), version([0, 1, 2, 3, 4, 5]))) is not None]
    given = [len([move for move in moves if move.indices == (number,)]) for number in range(6)]
    assert 66 <= sum(given) <= 70  # 480 GiB over seven stores of 100
    assert max(given) - min(given) <= 1
    assert all(move.without == frozenset(STORES[:6]) for move in moves)


def test_nothing_moves_between_stores_that_are_about_as_full() -> None:
    members = [member(number, (20 + number) * GIB) for number in range(7)]
    balance = Balance(dict.fromkeys(STORES[:7], 80 * GIB), members)
    assert balance.is_even
    assert balance.move(vid(1), version([0, 1, 2, 3, 4, 5])) is None


def test_a_store_in_a_domain_that_has_a_shard_takes_none() -> None:
    members = [*(member(number, 20 * GIB) for number in range(6)), member(6, 100 * GIB, domain="node-3")]
    balance = Balance(dict.fromkeys(STORES[:6], 80 * GIB), members)
    move = balance.move(vid(1), version([0, 1, 2, 3, 4, 5]))
    assert move is None
    balance.excess[STORES[3]] += GIB
    move = balance.move(vid(1), version([0, 1, 2, 3, 4, 5]))
    assert move is not None
    assert move.indices == (3,)


def test_two_shards_in_one_domain_part_however_full_stores_are() -> None:
    members = [member(number, 50 * GIB, domain="rack" if number < 2 else "") for number in range(7)]
    balance = Balance(dict.fromkeys(STORES[:7], 50 * GIB), members)
    move = balance.move(vid(1), version([0, 1, 2, 3, 4, 5]))
    assert move is not None
    assert move.indices[0] in (0, 1)
    assert STORES[6] not in move.without


def test_stores_that_are_away_neither_give_nor_take() -> None:
    members = [
        member(0, 10 * GIB, live=False),
        *(member(number, 20 * GIB) for number in range(1, 6)),
        member(6, 90 * GIB, live=False),
    ]
    balance = Balance(dict.fromkeys(STORES[:6], 80 * GIB), members)
    assert balance.move(vid(1), version([0, 1, 2, 3, 4, 5])) is None


async def test_a_run_that_was_cut_off_is_not_called_done() -> None:
    async def away() -> bool:
        raise CatalogUnavailable("not now")

    unused: Any = None
    rebalancer = Rebalancer(unused, unused, unused, away)
    with pytest.raises(CatalogUnavailable):
        await rebalancer.rebalance()
    statistics = asdict(rebalancer.statistics) | {"life": rebalancer.life}
    assert not statistics["running"]
    assert "it was cut off: not now" in not_done(rebalancer.life, statistics)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_an_agent_that_was_started_anew_does_not_answer_for_the_run_before(cluster: Any) -> None:
    node = cluster[0]
    life = (await node.ask("rebalance"))["life"]
    with trio.fail_after(60):
        while (statistics := (await node.ask("status"))["rebalance"])["running"]:
            await trio.sleep(0.01)
    assert not_done(life, statistics) == ""
    await node.down()
    await node.up()
    assert "started anew" in not_done(life, (await node.ask("status"))["rebalance"])


@pytest.mark.slow
async def test_shards_move_to_nodes_that_were_added(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.repairs_reads = False
    saved = [await cluster[0].save(f"step-{number}", os.urandom(300_000)) for number in range(8)]
    saved += [await cluster[0].save(f"small-{number}", os.urandom(6000)) for number in range(8)]
    before = await cluster[0].protected(*saved)
    await cluster.up(2)
    for node in cluster.nodes:
        # As drives of a megabyte would say; all of them lie on one large one here.
        monkeypatch.setattr(node.running.shard_store, "free_bytes", lambda: 900_000)
    agent = cluster[2].running
    monkeypatch.setattr(cluster[2].running.members, "_own_free_bytes", lambda: 900_000)
    await agent.rebalancer.rebalance()
    statistics = agent.rebalancer.statistics
    assert statistics.failed == 0, statistics
    assert statistics.moved_shards > 5
    fill = list(statistics.after.values())
    assert max(fill) - min(fill) < max(statistics.before.values()) - min(statistics.before.values())
    for one, was in zip(saved, before, strict=True):
        now = await cluster[0].version(one)
        assert [shard.root for shard in now.shards] == [shard.root for shard in was.shards]
        assert len({shard.store for shard in now.shards}) == len(was.shards)
        assert sum(new != old for new, old in zip(now.shards, was.shards, strict=True)) <= 1
    answer = await cluster[1].ask("verify", inos=[one.ino for one in saved], deep=True)
    assert {file["result"] for file in answer["files"]} == {"ok"}
