"""What holds back the removal of dead versions, and what must not: a catalog in memory, and the leader's walk over it."""

from itertools import count
from typing import Any

import pytest

from ckptfs.cache.catalog_format import Settings, Shard, ShardLayout
from ckptfs.cache.catalog_kv import TransactionResult
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, Vid, new_segment_id
from ckptfs.cache.lost_stores import be_in_again, declare_lost, roll_back
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store_registry import register_store, session_label, stores
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions
from ckptfs.replication.collector import GRACE_SECONDS, Collector
from ckptfs.replication.leadership import Leadership
from ckptfs.replication.members import Members

ME, OTHER = StoreId(b"A" * 16), StoreId(b"B" * 16)


class Cluster:
    """Two stores, and the leader's collector."""

    def __init__(self) -> None:
        self.kv = MemoryCatalog(session_label(ME, 1))
        clock = count(1000).__next__
        self.tree = Namespace(self.kv, ME, 1, clock)
        self.mine, self.theirs = Versions(self.kv, ME, 1, clock), Versions(self.kv, OTHER, 1, clock)
        self.now = 0.0
        self.members = Members(ME, lambda: stores(self.kv), self._ping, lambda: 1 << 30)
        self.leadership = Leadership(self.kv, ME, 1, self.members.seconds_away)
        self.collector = Collector(self.kv, self.members, self.leadership, now=lambda: self.now)

    async def _ping(self, store: StoreId, address: str) -> int:
        return 1 << 30

    async def start(self) -> None:
        await self.tree.format_if_empty(Settings(1, b"C" * 16, 1, 1, 4096))
        for number, store in enumerate((ME, OTHER)):
            await register_store(self.kv, store, NodeId(f"n{number}"), "127.0.0.1:1", "/s", {})
        await self.leadership.look()

    async def make(self, name: bytes) -> tuple[InodeNumber, Vid]:
        made = await self.tree.create_file(ROOT_INODE, name, 0o644, 0, 0, new_segment_id())
        return made.ino, made.vid

    async def local(self, versions: Versions, ino: InodeNumber, vid: Vid) -> None:
        assert (await versions.commit_local([LocalCommit(ino, vid, 10, b"r" * 16, 4096, 500, True)])).vids == {vid}

    async def save(self, name: bytes) -> tuple[InodeNumber, Vid]:
        ino, vid = await self.make(name)
        await self.local(self.mine, ino, vid)
        return ino, vid

    async def die(self) -> None:
        """A protected file is deleted."""
        ino, vid = await self.save(b"dead")
        revisions = {store: revision for store, (_, revision) in (await stores(self.kv)).items()}
        shards = [Shard(store, b"r" * 16) for store in (ME, OTHER)]
        commit = ProtectedCommit(ino, vid, ShardLayout.STRIPED, 1, 1, 4096, shards, revisions)
        assert await self.mine.commit_protected([commit]) == {vid}
        await self.tree.unlink(ROOT_INODE, b"dead")

    async def collect(self) -> int:
        await self.members.refresh()
        seen = await self.collector.collect()
        self.now += GRACE_SECONDS
        return seen + await self.collector.collect()


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await cluster.start()
    return cluster


async def test_what_is_only_local_or_open_holds_back(cluster: Cluster) -> None:
    await cluster.save(b"local")
    await cluster.die()
    assert await cluster.collect() == 0
    await cluster.tree.unlink(ROOT_INODE, b"local")
    await cluster.make(b"open")
    assert await cluster.collect() == 1
    await cluster.die()
    assert await cluster.collect() == 0


async def test_what_a_file_would_fall_back_to_holds_back(cluster: Cluster) -> None:
    await cluster.save(b"local")
    await cluster.die()
    await cluster.make(b"new")
    await cluster.tree.rename(ROOT_INODE, b"new", ROOT_INODE, b"local")
    assert await cluster.collect() == 0


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_removed", [False, True])
async def test_what_no_file_names_holds_nothing_back(cluster: Cluster, is_open: bool, is_removed: bool) -> None:
    """A store that was lost and is in again has a version of a file that somebody has written since."""
    tree = Namespace(cluster.kv, OTHER, 1, cluster.tree.now_ns)
    made = await tree.create_file(ROOT_INODE, b"f", 0o644, 0, 0, new_segment_id())
    if not is_open:
        await cluster.local(cluster.theirs, made.ino, made.vid)
    await cluster.die()
    assert await cluster.collect() == 0
    assert await declare_lost(cluster.kv, cluster.leadership.compare(), OTHER)
    assert len([one async for one in roll_back(cluster.kv, cluster.leadership.compare(), OTHER)]) == 1
    await cluster.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    if is_removed:
        await cluster.tree.unlink(ROOT_INODE, b"f")
    await be_in_again(cluster.kv, OTHER)
    assert await cluster.mine.version(made.vid) is not None
    assert await cluster.collect() == 1


@pytest.mark.parametrize("returns", ["not", "before", "amid"])
async def test_what_a_store_that_returns_has_holds_back_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, returns: str
) -> None:
    """Also where the leader hasn't looked at the members since, and where it returns while the walk is on its way."""
    tree = Namespace(cluster.kv, OTHER, 1, cluster.tree.now_ns)
    made = await tree.create_file(ROOT_INODE, b"f", 0o644, 0, 0, new_segment_id())
    await cluster.local(cluster.theirs, made.ino, made.vid)
    await cluster.die()
    assert await declare_lost(cluster.kv, cluster.leadership.compare(), OTHER)
    await cluster.members.refresh()
    assert await cluster.collector.collect() == 0
    cluster.now += GRACE_SECONDS
    if returns == "before":
        await be_in_again(cluster.kv, OTHER)
    if returns == "amid":
        transact = cluster.kv.transact

        async def come_back_first(*arguments: Any) -> TransactionResult:
            monkeypatch.undo()
            await be_in_again(cluster.kv, OTHER)
            return await transact(*arguments)

        monkeypatch.setattr(cluster.kv, "transact", come_back_first)
    assert await cluster.collector.collect() == (returns == "not")
    assert await cluster.collector.collect() == 0
