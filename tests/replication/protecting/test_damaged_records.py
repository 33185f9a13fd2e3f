"""A record of the catalog that its drive changed costs its own file: what is done for all others goes on."""

import os
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from ckptfs.cache.catalog_format import store_key, version_key
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.store_registry import register_store
from ckptfs.replication.collector import Collector
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import PeerRefused
from ckptfs.replication.holders import Peers
from ckptfs.replication.transport import PlainTransport

pytestmark = pytest.mark.slow

SIZE = 5 * 4 * (16 << 10)


def damage(cluster: Any, key: bytes) -> None:
    with closing(sqlite3.connect(cluster.directory / "catalog.db")) as database, database:
        database.execute("UPDATE kv SET value = x'00' WHERE key = ?", (key,))
        assert database.total_changes == 1


@pytest.mark.parametrize("cluster", [7], indirect=True)
async def test_shards_are_scrubbed_swept_and_made_again_around_it(cluster: Any) -> None:
    node = cluster[0]
    saved = [await node.save(f"step-{number}", os.urandom(SIZE)) for number in range(4)]
    deleted = await node.save("deleted", os.urandom(SIZE))
    for one in await node.protected(*saved, deleted):
        assert one.shards
    await node.delete(deleted, "deleted")
    hurt, *others = sorted(saved, key=lambda one: one.vid)
    damage(cluster, version_key(hurt.vid))
    leader = await cluster.elect()
    leaving = next(one for one in cluster.nodes if one is not leader)
    shards = [path for one in cluster.nodes for path in one.store.shards.rglob(f"{hurt.vid.hex()}.*")]
    assert (await leaving.ask("drain", deadline=60, leave=True))["ok"]
    await leader.running.members.refresh(everyone=True)
    await leader.running.rebuilder.look()
    assert leader.running.rebuilder.statistics.left == 0
    for one in others:
        assert leaving.store.store_id not in [shard.store for shard in (await leader.version(one)).shards]
    for one in cluster.nodes:
        await one.running.scrub.pass_over()
        await one.running.sweep.sweep()
    assert len(shards) == 6
    assert all(path.exists() for path in shards)
    checked = sum(one.running.scrub.statistics().state.last.checked for one in cluster.nodes)
    assert checked == 3 * 6
    # What died may be all that is left of what the damaged record was to replace.
    now = 0.0
    collector = Collector(node.kv, leader.running.members, leader.running.leadership, now=lambda: now)
    assert await collector.collect() == 0
    now = 1e6
    assert await collector.collect() == 0
    assert (collector.statistics.dead, collector.statistics.damaged) == (1, 1)
    problems = "".join((await leader.ask("status"))["problems"])
    assert f"{version_key(hurt.vid)!r} fails its checksum" in problems


async def test_what_waits_behind_it_is_protected(cluster: Any) -> None:
    node = cluster[0]
    await cluster.down(1, 2, 3, 4, 5)
    await node.running.members.refresh(everyone=True)
    hurt = await node.save("hurt", os.urandom(SIZE), wake=False)
    damage(cluster, version_key(hurt.vid))
    for number in range(1, 6):
        await cluster[number].up()
    saved = await node.save("step-1", os.urandom(SIZE))
    await node.protected(saved)
    assert node.running.replicator.waiting_vids() in ([hurt.vid], [hurt.vid, saved.vid])
    assert "fails its checksum" in node.running.replicator.statistics().last_error


async def test_a_peer_of_which_the_record_is_damaged_is_turned_away_for_now(cluster: Any) -> None:
    store = StoreId(b"x" * 16)
    await register_store(cluster[0].kv, store, NodeId("node-9"), "127.0.0.1:1", "/store", {})
    damage(cluster, store_key(store))
    address, cluster_id = cluster[1].running.address, cluster[0].running.cluster.cluster
    peers = Peers(PlainTransport(stall_seconds=5.0), PeerIdentity(cluster_id, store, NodeId("node-9")))
    with pytest.raises(PeerRefused, match="has not joined"):
        await peers.ping(cluster[1].store.store_id, address)
    await peers.aclose()
    assert (await cluster[1].ask("status"))["node"] == "node-1"
