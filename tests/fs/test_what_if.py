"""What would be left of files without certain nodes."""

from collections.abc import Collection
from typing import Any

import pytest

from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings, Shard, ShardLayout, StoreState
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, Vid, new_segment_id
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store_registry import register_store, set_state, stores
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions
from ckptfs.fs.cli_whatif import describe
from ckptfs.fs.what_if import WhatIf

STORES = [StoreId(bytes([number]) * 16) for number in range(1, 8)]


class Cluster:
    """Seven stores; files that were written on the first."""

    def __init__(self) -> None:
        self.kv = MemoryCatalog()
        self.namespace = Namespace(self.kv, STORES[0], 1, lambda: 1)
        self.versions = Versions(self.kv, STORES[0], 1, lambda: 1)

    async def begin(self) -> None:
        await self.namespace.format_if_empty(Settings(FORMAT_VERSION, bytes(16), 4, 2, 1 << 20))
        for number, store in enumerate(STORES):
            await register_store(self.kv, store, NodeId(f"node-{number}"), f"127.0.0.1:{number}", "/store", {})

    async def local(self, name: bytes, size: int = 100) -> tuple[InodeNumber, Vid]:
        ino, _, vid = await self.namespace.create_file(InodeNumber(ROOT_INODE), name, 0o644, 0, 0, new_segment_id())
        await self.versions.commit_local([LocalCommit(ino, vid, size, bytes(16), 4096, 1, True)])
        return ino, vid

    async def protect(
        self, ino: InodeNumber, vid: Vid, holders: Collection[int], layout: ShardLayout = ShardLayout.STRIPED
    ) -> None:
        known = {store: revision for store, (_, revision) in (await stores(self.kv)).items()}
        shards = [Shard(STORES[number], bytes(16)) for number in holders]
        k = 1 if layout is ShardLayout.COPIES else len(shards) - 2
        commit = ProtectedCommit(ino, vid, layout, k, len(shards) - k, 4096, shards, known)
        assert await self.versions.commit_protected([commit]) == {vid}

    async def outcome(self, ino: InodeNumber, lose: Collection[int], away: Collection[int] = ()) -> Any:
        records = {store: record for store, (record, _) in (await stores(self.kv)).items()}
        live = {store for number, store in enumerate(STORES) if number not in away}
        facts = await WhatIf(self.namespace, self.versions).outcomes([ino], records, live, {STORES[number] for number in lose})
        return facts[ino]


@pytest.fixture
async def cluster() -> Cluster:
    made = Cluster()
    await made.begin()
    return made


async def test_what_is_local_goes_with_its_home(cluster: Cluster) -> None:
    ino, _ = await cluster.local(b"file")
    kept = await cluster.outcome(ino, [1, 2])
    assert (kept["outcome"], kept["from"], kept["nodes"], kept["bytes"]) == ("survives", "home", ["node-0"], 100)
    assert (await cluster.outcome(ino, [0]))["outcome"] == "lost"
    assert (await cluster.outcome(ino, [1], away=[0]))["outcome"] == "unreachable"


async def test_shards_survive_as_many_losses_as_there_is_parity(cluster: Cluster) -> None:
    ino, vid = await cluster.local(b"file")
    await cluster.protect(ino, vid, range(1, 7))
    assert (await cluster.outcome(ino, [1, 2, 3]))["from"] == "home"
    kept = await cluster.outcome(ino, [0, 1, 2])
    assert (kept["outcome"], kept["from"], kept["nodes"]) == ("survives", "shards", ["node-3", "node-4", "node-5", "node-6"])
    assert (await cluster.outcome(ino, [0, 1, 2, 3]))["outcome"] == "lost"
    assert (await cluster.outcome(ino, [0, 1, 2], away=[3]))["outcome"] == "unreachable"
    await set_state(cluster.kv, STORES[3], StoreState.LOST)
    assert (await cluster.outcome(ino, [0, 1, 2], away=[3]))["outcome"] == "lost"


async def test_whole_copies_survive_on_any_one(cluster: Cluster) -> None:
    ino, vid = await cluster.local(b"file")
    await cluster.protect(ino, vid, [1, 2, 3], ShardLayout.COPIES)
    assert (await cluster.outcome(ino, [0, 1, 2]))["nodes"] == ["node-3"]
    assert (await cluster.outcome(ino, [0, 1, 2, 3]))["outcome"] == "lost"


async def test_of_a_rewritten_file_the_protected_content_is_left(cluster: Cluster) -> None:
    ino, vid = await cluster.local(b"file", 50)
    await cluster.protect(ino, vid, range(1, 7))
    opened = await cluster.versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
    assert (await cluster.outcome(ino, [1]))["open"]
    older = await cluster.outcome(ino, [0])
    assert (older["outcome"], older["bytes"], older["from"]) == ("older", 50, "shards")
    await cluster.versions.commit_local([LocalCommit(ino, opened.vid, 70, bytes(16), 4096, 1, True)])
    assert (await cluster.outcome(ino, [0]))["outcome"] == "older"
    assert (await cluster.outcome(ino, [5], away=[0]))["outcome"] == "unreachable", "what is newer may come back"


def test_training_resumes_from_the_newest_complete_checkpoint_that_survives() -> None:
    files = [(number, f"/mnt/run/step-{number}/model.pt", 10) for number in (1, 2, 3, 4)]
    files.append((5, "/mnt/run/step-4/optimizer.pt", 10))
    facts: dict[int, Any] = {ino: {"outcome": "survives", "from": "shards", "nodes": ["b"], "open": False} for ino, _, _ in files}
    facts[3] |= {"outcome": "lost"}
    facts[5] |= {"outcome": "lost", "open": True}
    document = describe("/mnt", files, facts, ["a"])
    assert (document["files"], document["survive"], document["from"]) == (5, 3, {"shards on b": 30})
    (run,) = document["resume"]
    assert (run["newest"], run["resumes_from"], run["step"]) == ("step-3", "step-2", 2)
    assert run["newest_lacks"] == ["/mnt/run/step-3/model.pt"]
    assert "is being written" in run["incomplete"][0]["why"]
