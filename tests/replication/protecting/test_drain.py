"""A node that is to go: what only it has is protected first, in the order that matters, and then its shards leave it."""

import os
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState
from ckptfs.replication import replicator

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 3 * 4 * CELL


async def test_the_newest_complete_checkpoint_is_protected_first(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "STRIPED_IN_PROGRESS_MAX", 1)
    node = cluster[0]
    node.codec.shut()
    under_way = await node.save("under-way", os.urandom(SIZE))
    await node.codec.reached()
    names = ["notes", "step-1.pt", "step-3.pt", "step-4.pt.tmp"]
    saved = {name: await node.save(name, os.urandom(SIZE), wake=False) for name in names}
    report: dict[str, Any] = {}

    async def drain() -> None:
        report.update(await node.ask("drain", deadline=60, leave=False))

    cluster.nursery.start_soon(drain)
    while not node.running.replicator._preferred:
        await trio.sleep(0.01)
    node.codec.open()
    await node.protected(under_way, *saved.values())
    while not report:
        await trio.sleep(0.01)
    assert [(one["path"], one["complete"], one["protected"]) for one in report["checkpoints"]] == [
        ("/step-3.pt", True, True),
        ("/step-1.pt", True, True),
        ("/notes", True, True),
        ("/under-way", True, True),
        ("/step-4.pt.tmp", False, True),
    ]
    assert (report["files"], report["bytes"], report["left_files"], report["left"]) == (5, 5 * SIZE, 0, [])
    entries = {entry.key: entry.mod_revision for entry in await node.kv.range(b"v/")}
    order = sorted(names, key=lambda name: entries[b"v/" + saved[name].vid.hex().encode()])
    assert order == ["step-3.pt", "step-1.pt", "notes", "step-4.pt.tmp"]


async def test_what_was_not_protected_in_time_is_said(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut()
    await node.save("step-1.pt", os.urandom(SIZE))
    await node.codec.reached()
    report = await node.ask("drain", deadline=0.3, leave=False)
    node.codec.open()
    assert (report["files"], report["left_files"], report["left_bytes"]) == (0, 1, SIZE)
    assert report["left"] == [{"path": "/step-1.pt", "bytes": SIZE}]
    assert [one["protected"] for one in report["checkpoints"]] == [False]


@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_a_node_alone_keeps_nobody_waiting(cluster: Any) -> None:
    await cluster[0].save("step-1.pt", os.urandom(SIZE))
    report = await cluster[0].ask("drain", deadline=1e6, leave=False)
    assert report["left_files"] == 1


@pytest.mark.parametrize("cluster", [7], indirect=True)
async def test_a_node_that_leaves_takes_no_new_shards_and_loses_those_it_has(cluster: Any) -> None:
    node = cluster[0]
    saved = [await node.save(name, os.urandom(SIZE)) for name in ("step-1.pt", "step-2.pt", "step-3.pt")]
    before = await node.protected(*saved)
    held = sum(shard.store == node.store.store_id for version in before for shard in version.shards)
    assert (await node.ask("held"))["named"] == held
    report = await node.ask("drain", deadline=60, leave=True)
    assert report["ok"], report
    assert report["left_files"] == 0
    new = await node.save("step-4.pt", os.urandom(SIZE))
    for other in cluster.nodes:
        await other.running.members.refresh(everyone=True)
        await other.running.rebuilder.look()
    assert (await node.ask("held"))["named"] == 0
    for version in await node.protected(*saved, new):
        assert node.store.store_id not in [shard.store for shard in version.shards]
    assert any("this node drains" in problem for problem in (await node.ask("status"))["problems"])
    await node.ask("join_again")
    assert (await node.ask("status"))["problems"] == []
    (member,) = [one for one in node.running.members.known() if one.store == node.store.store_id]
    assert member.state is StoreState.IN
    await node.down()
    for one in [*saved, new]:
        assert await cluster[1].content(one) == one.content
