"""What was protected with a smaller code, while few nodes were there, is protected with the full one when they are back."""

import os
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState, VersionState
from ckptfs.cache.store_registry import set_state

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 8 * 4 * CELL - 5


async def until(condition: Any) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


async def code_of(node: Any, saved: Any) -> tuple[int, int]:
    version = await node.version(saved)
    return version.data_shards, version.parity_shards


async def raised(node: Any, *saved: Any, code: tuple[int, int] = (4, 2)) -> None:
    with trio.fail_after(60):
        for one in saved:
            while await code_of(node, one) != (code if len(one.content) > 1000 else (1, 2)):
                await trio.sleep(0.01)


async def restart(cluster: Any, *numbers: int) -> None:
    """With raising on."""
    cluster.raise_unchanged_seconds = 0.2
    for number in numbers:
        await cluster[number].down()
        await cluster[number].up()


def held(cluster: Any, vid: bytes) -> int:
    """Complete shards and copies of the version on all nodes that are up."""
    nodes = [node.running for node in cluster.nodes if node.agent is not None]
    shards = sum(row.vid == vid for agent in nodes for row in agent.shard_store.list())
    return int(shards + sum(copy.vid == vid for agent in nodes for copy in agent.small_copies.list()))


@pytest.mark.parametrize(("cluster", "before"), [(2, (1, 1)), (3, (1, 2)), (5, (3, 2))], indirect=["cluster"])
async def test_everything_gets_the_full_code(cluster: Any, before: tuple[int, int]) -> None:
    node = cluster[0]
    files = [await node.save(f"f{number}", os.urandom(SIZE + number)) for number in range(3)]
    files += [await node.save("small", b"small"), await node.save("empty", b"")]
    await node.protected(*files)
    assert await code_of(node, files[0]) == before
    await cluster.up(6 - len(cluster.nodes))
    await restart(cluster, 0)
    await raised(node, *files[:4])
    for one in files:
        version = await node.version(one)
        assert version.state is VersionState.PROTECTED
        assert len({shard.store for shard in version.shards}) == (6 if len(one.content) > 1000 else 3 if one.content else 0)
    await cluster.down(0, 1)
    for one in files:
        for reader in (2, 5):
            assert await cluster[reader].content(one) == one.content


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_the_oldest_first_and_nothing_while_something_waits(cluster: Any) -> None:
    node = cluster[0]
    files = [await node.save(f"f{number}", os.urandom(SIZE)) for number in range(3)]
    for one in files:
        await node.protected(one)
    await cluster.up(3)
    await restart(cluster, 0)
    order: list[Any] = []
    waiting = await node.save("new", os.urandom(SIZE))
    with trio.fail_after(60):
        while len(order) < 3:
            for one in files:
                if one not in order and await code_of(node, one) == (4, 2):
                    assert (await node.version(waiting)).state is VersionState.PROTECTED
                    order.append(one)
            await trio.sleep(0.001)
    assert sorted(order, key=files.index) == files
    assert await code_of(node, waiting) == (4, 2)


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_it_survives_no_less_on_the_way(cluster: Any) -> None:
    """In the middle, with the old holders alone, it is read; and afterwards with any four of the six."""
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    (before,) = await node.protected(saved)
    await cluster.up(3)
    node.codec.shut(before_stripe=5)
    await restart(cluster, 0)
    await node.codec.reached()
    assert await node.version(saved) == before
    await cluster.down(3, 4, 5)
    assert await cluster[1].content(saved) == saved.content
    node.codec.open()
    for number in (3, 4, 5):
        await cluster[number].up()
    await raised(node, saved)
    assert held(cluster, saved.vid) >= 6
    for pair in ((0, 1), (2, 3), (4, 5)):
        await cluster.down(*pair)
        reader = cluster[(pair[1] + 1) % 6]
        reader.drop_copies()
        assert await reader.content(saved) == saved.content
        for number in pair:
            await cluster[number].up()


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("how", ["deleted", "rewritten"])
async def test_a_version_that_ends_meanwhile_is_not_raised(cluster: Any, how: str) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    await cluster.up(3)
    node.codec.shut(before_stripe=5)
    await restart(cluster, 0)
    await node.codec.reached()
    if how == "deleted":
        await node.delete(saved, "a")
    else:
        again = await node.rewrite(saved, os.urandom(SIZE))
    node.codec.open()
    await until(lambda: node.running.raiser.statistics.last_error != "")
    if how == "rewritten":
        await raised(node, again)
        assert await cluster[5].content(again) == again.content
    assert node.running.raiser.statistics.raised == 0
    assert (await node.version(saved)).data_shards == 1


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_while_the_home_is_away_a_holder_raises_it(cluster: Any) -> None:
    node = cluster[0]
    saved, small = await node.save("a", os.urandom(SIZE)), await node.save("b", b"small")
    await node.protected(saved, small)
    await cluster.up(4)
    await cluster.down(0)
    await restart(cluster, 1, 2, 3, 4, 5, 6)
    await raised(node, saved, small)
    assert node.store.store_id not in [shard.store for shard in (await node.version(saved)).shards]
    raisers = [cluster[number].running.raiser for number in range(1, 7)]
    await until(lambda: sum(one.statistics.raised for one in raisers) == 1)  # three copies are what there can be
    assert await cluster[6].content(saved) == saved.content


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("segment", ["damaged", "gone", "carried on"])
async def test_without_its_segment_it_is_raised_from_its_shards(cluster: Any, segment: str) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    path = node.segments.path_of(saved.segment)
    if segment == "damaged":
        with open(path, "r+b") as file:
            file.write(bytes([saved.content[0] ^ 1]))
    elif segment == "gone":
        os.unlink(path)
    else:
        await node.versions.open_for_writing(saved.ino, truncate_to_new_segment=None)
        os.truncate(path, 0)
    await cluster.up(3)
    await restart(cluster, 0)
    await raised(node, saved)
    assert (await node.version(saved)).damaged == (segment == "damaged")
    await cluster.down(0, 1)
    assert await cluster[2].content(saved) == saved.content


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_a_holder_that_leaves_before_the_commit_voids_it(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    await cluster.up(4)
    node.codec.shut(before_stripe=7)
    await restart(cluster, 0)
    await node.codec.reached()
    await set_state(node.kv, cluster[5].store.store_id, StoreState.DRAINING)
    node.codec.open()
    await raised(node, saved)
    assert cluster[5].store.store_id not in [shard.store for shard in (await node.version(saved)).shards]


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_what_has_no_space_is_tried_again(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    await cluster.up(3)
    full = True
    for number in (3, 4, 5):
        store = cluster[number].running.shard_store
        free_bytes = store.free_bytes
        store.free_bytes = lambda free_bytes=free_bytes: 0 if full else free_bytes()
    await restart(cluster, 0)
    await until(lambda: node.running.raiser.statistics.left == 1)
    await until(lambda: "larger code" in node.running.raiser.statistics.last_error)
    full = False
    await raised(node, saved)
    await until(lambda: node.running.raiser.statistics.left == 0)


async def test_the_full_code_is_never_made_smaller(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    await cluster.down(4, 5)
    await restart(cluster, 0)
    later = await node.save("b", os.urandom(SIZE))
    await node.protected(later)
    assert await code_of(node, later) == (2, 2)
    await trio.sleep(0.5)  # it would be made smaller by now
    assert await code_of(node, saved) == (4, 2)
    await cluster[4].up()
    await cluster[5].up()
    await raised(node, later)
