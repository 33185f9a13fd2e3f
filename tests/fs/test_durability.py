"""How safe a file is said to be, as stores come and go."""

from collections.abc import Collection
from typing import Any

import pytest

from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings, Shard, ShardLayout, Store, StoreState, version_key
from ckptfs.cache.catalog_kv import Delete
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, StoreId, Vid, new_segment_id, new_vid
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.prefixes import Prefix, begin_prefix
from ckptfs.cache.store_registry import register_store, set_state, stores
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions
from ckptfs.fs.durability import Durability

ROOT = InodeNumber(ROOT_INODE)
STORES = [StoreId(bytes([number]) * 16) for number in range(1, 7)]
HOME = STORES[0]


class Cluster:
    """Six stores in a catalog, and files in any state on the first."""

    def __init__(self) -> None:
        self.kv = MemoryCatalog()
        self.namespace = Namespace(self.kv, HOME, 1, lambda: 1)
        self.versions = Versions(self.kv, HOME, 1, lambda: 1)
        self.written: dict[InodeNumber, int] = {}
        self.durability = Durability(self.namespace, self.versions, self.written.get, "rack")

    async def begin(self, racks: dict[int, str] | None = None) -> None:
        await self.namespace.format_if_empty(Settings(FORMAT_VERSION, bytes(16), 4, 2, 1 << 20))
        for number, store in enumerate(STORES):
            labels = {"rack": (racks or {})[number]} if racks else {}
            await register_store(self.kv, store, NodeId(f"node-{number}"), f"127.0.0.1:{number}", "/store", labels)

    async def open_file(self, name: bytes) -> tuple[InodeNumber, Vid]:
        ino, _, vid = await self.namespace.create_file(ROOT, name, 0o644, 0, 0, new_segment_id())
        return ino, vid

    async def local_file(self, name: bytes, size: int = 100) -> tuple[InodeNumber, Vid]:
        ino, vid = await self.open_file(name)
        await self.versions.commit_local([LocalCommit(ino, vid, size, bytes(16), 4096, 1, True)])
        return ino, vid

    async def protected_file(self, name: bytes, holders: list[StoreId], size: int = 100, parity: int = 2) -> InodeNumber:
        ino, vid = await self.local_file(name, size)
        known = {store: revision for store, (_, revision) in (await stores(self.kv)).items()}
        shards = [Shard(store, bytes(16)) for store in holders]
        parity = parity if holders else 0
        commit = ProtectedCommit(
            ino,
            vid,
            ShardLayout.STRIPED,
            len(holders) - parity,
            parity,
            4096,
            shards,
            {store: known[store] for store in holders},
        )
        assert await self.versions.commit_protected([commit]) == {vid}
        return ino

    async def fact(self, ino: InodeNumber, *, gone: Collection[int] = (), known: dict[StoreId, Store] | None = None) -> Any:
        records = known or {store: record for store, (record, _) in (await stores(self.kv)).items()}
        live = {store for number, store in enumerate(STORES) if number not in gone}
        return (await self.durability.states([ino], records, live, 2))[ino]


@pytest.fixture
async def cluster() -> Cluster:
    made = Cluster()
    await made.begin()
    return made


async def test_what_cannot_come_back_is_lost_and_not_unreachable(cluster: Cluster) -> None:
    protected = await cluster.protected_file(b"protected", STORES)
    local, _ = await cluster.local_file(b"local")
    assert [(await cluster.fact(ino, gone={0, 1, 2}))["state"] for ino in (protected, local)] == ["unreachable"] * 2
    for number, state in enumerate((StoreState.LOST, StoreState.REMOVED)):
        await set_state(cluster.kv, STORES[number], state)
    facts = [await cluster.fact(ino, gone={0, 1, 2}) for ino in (protected, local)]
    assert [fact["state"] for fact in facts] == ["unreachable", "lost"]
    await set_state(cluster.kv, STORES[2], StoreState.LOST)
    assert (await cluster.fact(protected, gone={0, 1, 2}))["state"] == "lost"


async def test_an_open_file_is_as_large_as_it_is_now(cluster: Cluster) -> None:
    ino, _ = await cluster.open_file(b"file")
    cluster.written[ino] = 4711
    assert await cluster.fact(ino) == {
        "state": "open",
        "protected_m": 0,
        "bytes": 4711,
        "home": "node-0",
        "prefix_bytes": 0,
        "away": [],
    }
    assert (await cluster.fact(ino, gone={0}))["state"] == "unreachable"


async def test_what_of_an_open_file_is_protected(cluster: Cluster) -> None:
    ino, vid = await cluster.open_file(b"file")
    cluster.written[ino] = 4711
    prefix, inode = new_vid(), await cluster.namespace.inode(ino)
    assert await begin_prefix(cluster.kv, HOME, ino, vid, Prefix(prefix, 4000, bytes(16), 4096, 1, inode))
    assert (await cluster.fact(ino))["prefix_bytes"] == 0
    known = {store: revision for store, (_, revision) in (await stores(cluster.kv)).items()}
    shards = [Shard(store, bytes(16)) for store in STORES]
    commit = ProtectedCommit(ino, prefix, ShardLayout.STRIPED, 4, 2, 4096, shards, known)
    assert await cluster.versions.commit_protected([commit]) == {prefix}
    fact = await cluster.fact(ino)
    assert (fact["state"], fact["protected_m"], fact["bytes"], fact["prefix_bytes"]) == ("open", 0, 4711, 4000)
    fact = await cluster.fact(ino, gone={0, 1})
    assert (fact["state"], fact["prefix_bytes"]) == ("unreachable", 4000)
    assert (await cluster.fact(ino, gone={0, 1, 2}))["prefix_bytes"] == 0


async def test_the_nodes_that_are_away_are_named_and_no_size_is_made_up(cluster: Cluster) -> None:
    ino, _ = await cluster.open_file(b"open")
    fact = await cluster.fact(ino, gone={0})
    assert (fact["state"], fact["bytes"], fact["away"]) == ("unreachable", None, ["node-0"])
    assert (await cluster.fact(ino))["bytes"] is None, "written on another node: its attributes say"
    ino = await cluster.protected_file(b"file", STORES)
    assert (await cluster.fact(ino))["away"] == []
    assert (await cluster.fact(ino, gone={4, 5}))["away"] == ["node-4", "node-5"]
    assert (await cluster.fact(ino, gone={0, 1, 2}))["away"] == ["node-0", "node-1", "node-2"]
    records = {store: record for store, (record, _) in (await stores(cluster.kv)).items()}
    lost = records[STORES[2]]
    known = {**records, STORES[2]: Store(FORMAT_VERSION, lost.node, StoreState.LOST, lost.address, lost.directory)}
    assert (await cluster.fact(ino, gone={0, 1, 2}, known=known))["away"] == ["node-0", "node-1"], "nobody can start node-2"


async def test_a_local_file_is_where_it_was_written(cluster: Cluster) -> None:
    ino, _ = await cluster.local_file(b"file", 7)
    assert await cluster.fact(ino) == {
        "state": "local",
        "protected_m": 0,
        "bytes": 7,
        "home": "node-0",
        "prefix_bytes": 0,
        "away": [],
    }
    assert (await cluster.fact(ino, gone={0}))["state"] == "unreachable"
    assert (await cluster.fact(ino, gone={1, 2, 3, 4, 5}))["state"] == "local"


@pytest.mark.parametrize(
    ("gone", "survives", "state"),
    [
        (set(), 2, "protected"),
        ({0}, 1, "degraded"),
        ({4, 5}, 0, "degraded"),
        ({3, 4, 5}, 0, "degraded"),  # its home still gives the bytes
        ({0, 1, 2}, 0, "unreachable"),
        ({0, 1, 2, 3, 4, 5}, 0, "unreachable"),
    ],
)
async def test_a_protected_file_survives_what_is_left(cluster: Cluster, gone: set[int], survives: int, state: str) -> None:
    ino = await cluster.protected_file(b"file", STORES)
    fact = await cluster.fact(ino, gone=gone)
    assert (fact["state"], fact["protected_m"]) == (state, survives)


@pytest.mark.parametrize(
    ("holders", "parity", "gone", "state"),
    [
        (2, 1, {2, 3, 4, 5}, "protected"),  # all that two stores can carry
        (2, 1, {3, 4, 5}, "degraded"),  # three could carry two parity shards
        (2, 1, set(), "degraded"),
        (3, 2, set(), "protected"),  # a smaller code that survives as much
    ],
)
async def test_what_was_protected_with_less_parity_than_could_be_is_degraded(
    cluster: Cluster, holders: int, parity: int, gone: set[int], state: str
) -> None:
    ino = await cluster.protected_file(b"file", STORES[:holders], parity=parity)
    fact = await cluster.fact(ino, gone=gone)
    assert (fact["state"], fact["protected_m"]) == (state, parity)


async def test_damage_is_said_as_long_as_nothing_else_has_the_content(cluster: Cluster) -> None:
    ino, vid = await cluster.local_file(b"file")
    version = await cluster.versions.version(vid)
    assert version is not None
    await cluster.versions.mark_damaged(vid, version.segment, True)
    assert (await cluster.fact(ino))["state"] == "damaged"
    assert (await cluster.fact(ino, gone={0}))["state"] == "damaged"


async def test_a_protected_file_with_a_damaged_segment_is_as_safe_as_its_shards(cluster: Cluster) -> None:
    ino = await cluster.protected_file(b"file", STORES)
    vid = (await cluster.namespace.inode(ino)).cur
    assert vid is not None
    version = await cluster.versions.version(vid)
    assert version is not None
    await cluster.versions.mark_damaged(vid, version.segment, True)
    assert (await cluster.fact(ino))["state"] == "protected"
    assert (await cluster.fact(ino, gone={5}))["state"] == "degraded"
    assert (await cluster.fact(ino, gone={3, 4, 5}))["state"] == "unreachable"


async def test_stores_declared_lost_do_not_count_even_if_they_answer(cluster: Cluster) -> None:
    ino = await cluster.protected_file(b"file", STORES)
    records = {store: record for store, (record, _) in (await stores(cluster.kv)).items()}
    lost = records[STORES[5]]
    known = {**records, STORES[5]: Store(FORMAT_VERSION, lost.node, StoreState.LOST, lost.address, lost.directory)}
    assert (await cluster.fact(ino, known=known))["protected_m"] == 1
    del known[STORES[5]]
    assert (await cluster.fact(ino, known=known))["protected_m"] == 1


async def test_holders_in_one_failure_domain_die_together() -> None:
    cluster = Cluster()
    await cluster.begin(dict(enumerate(["r1", "r1", "r2", "r2", "r3", "r3"])))
    ino = await cluster.protected_file(b"file", STORES)
    assert (await cluster.fact(ino))["protected_m"] == 1
    assert (await cluster.fact(ino, gone={0}))["protected_m"] == 0


async def test_an_empty_protected_file_is_as_safe_as_the_catalog(cluster: Cluster) -> None:
    ino = await cluster.protected_file(b"file", [], size=0)
    fact = await cluster.fact(ino, gone={1, 2, 3, 4, 5})
    assert (fact["state"], fact["protected_m"], fact["bytes"]) == ("protected", 2, 0)


async def test_a_file_without_content_is_lost(cluster: Cluster) -> None:
    ino, vid = await cluster.open_file(b"file")
    await cluster.kv.transact([], [Delete(version_key(vid))])
    assert (await cluster.fact(ino))["state"] == "lost"


async def test_a_file_opened_again_shows_the_version_that_is_written(cluster: Cluster) -> None:
    ino = await cluster.protected_file(b"file", STORES)
    await cluster.versions.open_for_writing(ino, truncate_to_new_segment=SegmentId(b"n" * 16))
    assert (await cluster.fact(ino))["state"] == "open"


async def test_only_regular_files_that_exist_have_a_state(cluster: Cluster) -> None:
    directory, _ = await cluster.namespace.make_directory(ROOT, b"directory", 0o755, 0, 0)
    link, _ = await cluster.namespace.make_symlink(ROOT, b"link", b"target", 0, 0)
    ino, _ = await cluster.open_file(b"file")
    found = await cluster.durability.states([ROOT, directory, link, ino, InodeNumber(9999)], {}, set(), 2)
    assert set(found) == {ino}
    assert found[ino]["home"] == HOME.hex()  # a store nobody knows
