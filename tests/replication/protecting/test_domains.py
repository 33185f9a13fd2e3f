"""Failure domains that are racks: shards are spread over them when a file is protected and when shards are made again."""

import os
from typing import Any

import msgspec
import pytest

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.store_registry import set_state

pytestmark = pytest.mark.slow

SIZE = 3 * 4 * (16 << 10) + 17
RACKS = {number: f"r{number % 4}" for number in range(8)}


@pytest.mark.parametrize("cluster", [0], indirect=True)
async def test_no_two_shards_of_a_file_are_in_one_rack(cluster: Any) -> None:
    cluster.settings = msgspec.structs.replace(cluster.settings, data_shards=1, parity_shards=2, failure_domain="rack")
    cluster.labels = {number: {"rack": rack} for number, rack in RACKS.items()}
    await cluster.up(8)
    saved = [await cluster[0].save(f"step-{number}", os.urandom(SIZE)) for number in range(8)]
    saved += [await cluster[0].save(f"small-{number}", os.urandom(500)) for number in range(8)]
    before = await cluster[0].protected(*saved)
    used = [[RACKS[cluster.number_of(shard.store)] for shard in version.shards] for version in before]
    assert all(len(set(racks)) == len(racks) == 3 for racks in used)
    # A whole rack goes: what it had is made again in the one that has none of it, and only there.
    for number in (3, 7):
        await cluster.down(number)
        await set_state(cluster[0].kv, cluster[number].store.store_id, StoreState.LOST)
    for node in cluster.nodes:
        if node.agent is not None:
            await node.agent.members.refresh(everyone=True)
            await node.agent.rebuilder.look()
    for one in saved:
        racks = [RACKS[cluster.number_of(shard.store)] for shard in (await cluster[0].version(one)).shards]
        assert sorted(racks) == ["r0", "r1", "r2"]
    assert len({cluster.number_of(shard.store) for one in saved for shard in (await cluster[0].version(one)).shards}) == 6
