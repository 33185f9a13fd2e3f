"""What happens to a file, to holders and to the node while it is being protected."""

import mmap
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState, VersionState
from ckptfs.cache.ids import ROOT_INODE
from ckptfs.cache.namespace import RenameFlags
from ckptfs.cache.store_registry import set_state
from ckptfs.replication.replicator import ALONE_SECONDS

pytestmark = pytest.mark.slow

CELL = 16 << 10
STRIPES = 8
SIZE = STRIPES * 4 * CELL - 5


def held_shards(cluster: Any, vid: bytes) -> int:
    return sum(row.vid == vid for node in cluster.nodes for row in node.running.shard_store.list())


async def until(condition: Any) -> None:
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.01)


async def test_deleted_meanwhile(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    await node.delete(saved, "a")
    node.codec.open()
    await until(lambda: node.running.replicator.statistics().in_progress == 0)
    assert await node.versions.version(saved.vid) is None
    assert node.running.replicator.statistics().versions_protected == 0
    assert held_shards(cluster, saved.vid) == 0
    assert node.told == []


async def test_renamed_meanwhile_changes_nothing(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    await node.namespace.rename(ROOT_INODE, b"a", ROOT_INODE, b"b", RenameFlags(0))
    node.codec.open()
    await node.protected(saved)
    assert await cluster[3].content(saved) == saved.content


async def test_replaced_by_rename_meanwhile(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    old = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    new = await node.save("a.tmp", os.urandom(SIZE), wake=False)
    await node.namespace.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a", RenameFlags(0))
    node.mount_db.remove_files([old.ino])
    node.codec.open()
    await node.protected(new)
    version = await node.versions.version(old.vid)
    assert version is None or version.state is not VersionState.PROTECTED
    assert await cluster[3].content(new) == new.content


async def test_what_a_replacement_that_was_lost_shows_again_is_protected(cluster: Any) -> None:
    """Its home may still have it under the number of the file that was replaced."""
    node = cluster[0]
    await node.down()
    old = await node.save("a", os.urandom(SIZE), wake=False)
    new = await cluster[1].open("a.tmp", b"never synced")
    await cluster[1].namespace.rename(ROOT_INODE, b"a.tmp", ROOT_INODE, b"a", RenameFlags(0))
    assert (await cluster[1].versions.drop_open_versions([(new.ino, new.vid)])).shown == [new.ino]
    await node.up()
    await node.protected(old)
    await node.settled()
    assert await cluster[3].content(old) == old.content


async def test_rewritten_meanwhile(cluster: Any) -> None:
    """In place: the same segment under a new version. The first attempt must not commit, whatever it had read so far."""
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    first = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    second = await node.rewrite(first, os.urandom(SIZE - CELL))
    node.codec.open()
    await node.protected(second)
    assert await node.versions.version(first.vid) is None
    assert held_shards(cluster, first.vid) == 0
    assert await cluster[3].content(second) == second.content


async def test_opened_for_writing_meanwhile(cluster: Any) -> None:
    """A writer that the catalog doesn't know yet (a mapping, a handle): the attempt is void, the next one succeeds."""
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    writer = os.open(node.segments.path_of(saved.segment), os.O_RDWR)
    mapping = mmap.mmap(writer, 4096)
    os.close(writer)
    node.codec.open()
    await until(lambda: node.running.replicator.statistics().attempts_void > 0)
    assert (await node.version(saved)).state is VersionState.LOCAL
    mapping.close()
    node.running.replicator.wake()
    await node.protected(saved)
    assert await cluster[3].content(saved) == saved.content


async def test_bytes_that_changed_by_themselves_are_loud_and_never_protected(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE), wake=False)
    small = await node.save("b", os.urandom(100), wake=False)
    for one in (saved, small):
        with open(node.segments.path_of(one.segment), "r+b") as file:
            file.write(bytes([one.content[0] ^ 1]))
    node.running.replicator.wake()
    await until(lambda: node.running.replicator.statistics().segments_damaged >= 2)
    for one in (saved, small):
        assert (await node.version(one)).state is VersionState.LOCAL
    await until(lambda: "SegmentDamaged" in node.running.replicator.statistics().last_error)  # the catalog is told first


async def test_a_holder_dies_in_the_middle_and_the_code_gets_smaller(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    await cluster.down(4)
    node.codec.open()
    (version,) = await node.protected(saved)
    assert (version.data_shards, version.parity_shards) == (3, 2)
    assert cluster[4].store.store_id not in {shard.store for shard in version.shards}
    assert await cluster[3].content(saved) == saved.content
    assert "3+2" in node.running.replicator.statistics().short_of


async def test_a_holder_restarts_in_the_middle_and_keeps_its_shard(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    await cluster.down(4)
    await cluster[4].up()
    node.codec.open()
    (version,) = await node.protected(saved)
    assert (version.data_shards, version.parity_shards) == (4, 2)
    assert await cluster[3].content(saved) == saved.content


async def test_a_holder_that_leaves_before_the_commit_voids_the_attempt(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=STRIPES - 1)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    await set_state(node.kv, cluster[5].store.store_id, StoreState.DRAINING)
    node.codec.open()
    (version,) = await node.protected(saved)
    assert cluster[5].store.store_id not in {shard.store for shard in version.shards}
    assert await cluster[3].content(saved) == saved.content


async def test_the_agent_restarts_in_the_middle(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut(before_stripe=5)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.down)
        await trio.sleep(0.05)
        node.codec.open()  # a thread can't be cancelled: the end waits for it
    assert (await node.version(saved)).state is VersionState.LOCAL
    await node.up()
    await node.protected(saved)
    await node.settled()
    assert node.told == [saved.vid]
    assert await cluster[3].content(saved) == saved.content


async def test_a_mount_that_does_not_hear_is_told_after_a_restart(cluster: Any) -> None:
    node = cluster[0]
    node.hears = False
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    assert node.told == []
    await node.down()
    node.hears = True
    await node.up()
    await node.settled()
    assert node.told == [saved.vid]
    assert node.running.replicator.statistics().versions_protected == 0, "it was protected before"


async def test_a_busy_catalog_loses_nothing(cluster: Any) -> None:
    """Another process holds the catalog's write lock while shards are complete."""
    node = cluster[0]
    node.codec.shut(before_stripe=STRIPES - 1)
    saved = await node.save("a", os.urandom(SIZE))
    await node.codec.reached()
    other = sqlite3.connect(cluster.directory / "catalog.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    node.codec.open()
    await until(lambda: held_shards(cluster, saved.vid) == 6)
    await trio.sleep(0.2)
    assert (await node.version(saved)).state is VersionState.LOCAL
    other.execute("ROLLBACK")
    other.close()
    await node.protected(saved)


async def test_a_catalog_that_is_away_loses_nothing(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE), wake=False)
    node.agent_kv.failures_left = 2
    node.running.replicator.wake()
    await node.protected(saved)
    assert node.agent_kv.failures_left == 0
    assert node.running.replicator.statistics().attempts_failed == 2


async def test_a_thousand_small_files_in_few_batches(cluster: Any) -> None:
    node = cluster[0]
    files = [await node.save(f"f{number}", os.urandom(number % 4000), wake=False) for number in range(1000)]
    node.running.replicator.wake()
    await node.protected(*files)
    await node.settled()
    assert sorted(node.told) == sorted(one.vid for one in files)
    for one in files[::50]:
        assert await cluster[5].content(one) == one.content
    holders = [len((await node.version(one)).shards) for one in files]
    assert holders == [3 if one.content else 0 for one in files]


async def test_a_small_files_holder_away_is_passed_over(cluster: Any) -> None:
    node = cluster[0]
    await cluster.down(1, 2)
    files = [await node.save(f"f{number}", os.urandom(100), wake=False) for number in range(20)]
    node.running.replicator.wake()
    for version in await node.protected(*files):
        assert len(version.shards) == 3
        assert not {cluster[1].store.store_id, cluster[2].store.store_id} & {shard.store for shard in version.shards}


async def test_a_file_rewritten_again_and_again_is_not_protected_every_time(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    again = await node.rewrite(saved, os.urandom(SIZE))
    await trio.sleep(0.3)
    assert (await node.version(again)).state is VersionState.LOCAL
    assert (await node.ask("wake", urgent=True))["ok"]
    await node.protected(again)


async def test_who_waits_on_another_node_hurries_the_one_that_has_the_bytes(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    await node.protected(saved)
    again = await node.rewrite(saved, os.urandom(SIZE))
    assert (await cluster[3].ask("wake", urgent=True, nodes=["node-2"]))["ok"]
    await trio.sleep(0.3)  # it would be protected by now
    assert (await node.version(again)).state is VersionState.LOCAL
    assert node.settled_count == 0
    assert (await cluster[3].ask("wake", urgent=True, nodes=["node-0", "none"]))["ok"]
    await node.protected(again)
    await until(lambda: node.settled_count == 1)


@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_one_node_protects_nothing_and_says_so(cluster: Any) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    small = await node.save("b", b"x")
    empty = await node.save("c", b"")
    await node.protected(empty)  # by the catalog
    await until(lambda: node.running.replicator.statistics().waiting_count == 2)
    for one in (saved, small):
        assert (await node.version(one)).state is VersionState.LOCAL
    status = await node.ask("status")
    assert "1+0 at most" in status["short_of"]
    assert status["replicator"]["attempts_failed"] == 0
    (problem,) = status["problems"]
    assert problem.startswith("2 files wait for protection: 4+2 needs 6 failure domains, 1 is live")
    await cluster.up(1)
    for version in await node.protected(saved, small):
        assert len(version.shards) == 2


@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_a_node_alone_does_not_look_at_every_new_file(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = cluster[0]
    await node.save("a", b"x")
    await until(lambda: node.running.replicator.statistics().short_of != "")
    looks = 0
    waiting = node.waiting.waiting

    def counted(limit: int) -> Any:
        nonlocal looks
        looks += 1
        return waiting(limit)

    monkeypatch.setattr(node.waiting, "waiting", counted)
    began = trio.current_time()
    for _ in range(100):
        node.running.replicator.wake()
        await trio.sleep(0.005)
    assert looks <= 2 + (trio.current_time() - began) / ALONE_SECONDS


@pytest.mark.parametrize(("cluster", "code"), [(2, (1, 1)), (3, (1, 2)), (5, (3, 2))], indirect=["cluster"])
async def test_small_clusters_get_the_code_they_can_carry(cluster: Any, code: tuple[int, int]) -> None:
    node = cluster[0]
    saved = await node.save("a", os.urandom(SIZE))
    small = await node.save("b", b"x")
    version, copies = await node.protected(saved, small)
    assert (version.data_shards, version.parity_shards) == code
    assert len(copies.shards) == code[1] + 1
    assert await cluster[1].content(saved) == saved.content
    assert "at most" in (await node.ask("status"))["short_of"]


async def test_nothing_is_sent_for_a_file_that_is_open(cluster: Any, tmp_path: Path) -> None:
    node = cluster[0]
    writer: int | None = None
    saved = await node.save("a", os.urandom(SIZE), wake=False)
    writer = os.open(node.segments.path_of(saved.segment), os.O_WRONLY)
    node.running.replicator.wake()
    await until(lambda: node.running.replicator.statistics().attempts_void > 0)
    assert held_shards(cluster, saved.vid) == 0
    os.close(writer)
    await node.protected(saved)
