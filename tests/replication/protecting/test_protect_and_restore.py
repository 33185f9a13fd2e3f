"""From local to protected and back, with six real stores and servers."""

import itertools
import os

import pytest

from ckptfs.cache.catalog_format import ShardLayout

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 3 * CELL + 17


async def test_a_file_becomes_protected_and_is_read_elsewhere(cluster) -> None:  # type: ignore[no-untyped-def]
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    assert version.layout is ShardLayout.STRIPED
    assert (version.data_shards, version.parity_shards) == (4, 2)
    assert len({shard.store for shard in version.shards}) == 6
    for node in cluster.nodes:
        assert await node.content(saved) == saved.content


@pytest.mark.parametrize("lost", list(itertools.combinations(range(6), 2)))
async def test_any_two_stores_may_be_lost(cluster, lost: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    small = await cluster[0].save("config.json", os.urandom(100))
    await cluster[0].protected(saved, small)
    await cluster.down(*lost)
    reader = next(node for node in cluster.nodes if node.number not in lost)
    assert await reader.content(saved) == saved.content
    assert await reader.content(small) == small.content
