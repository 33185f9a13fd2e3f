"""The history of a catalog on etcd is cut far behind every node that lives, by a leader, and by nobody else."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
import trio
import trio.testing

from ckptfs.cache import catalog_history
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import FORMAT_VERSION, Session, pack, pack_number, replica_key, session_key
from ckptfs.cache.catalog_history import cut_history, note_progress
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import CatalogCompacted
from ckptfs.cache.etcd_gateway import EtcdGateway
from ckptfs.cache.ids import NodeId, StoreId, new_store_id

KEPT = 20


async def test_progress_is_noted_when_it_is_some(autojump_clock: trio.testing.MockClock) -> None:
    kv, store, revisions = MemoryCatalog("session"), new_store_id(), [5]
    noted: list[bytes] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(note_progress, kv, store, lambda: revisions[-1])
        await trio.sleep(catalog_history.NOTE_SECONDS / 2)
        for revision in (5, 900, 1_004, 1_005, 1_006, 2_004, 2_005):
            revisions.append(revision)
            await trio.sleep(catalog_history.NOTE_SECONDS)
            entry = await kv.get(replica_key(store))
            assert entry is not None
            noted.append(entry.value)
        nursery.cancel_scope.cancel()
    assert noted == [b"5", b"5", b"5", b"1005", b"1005", b"1005", b"2005"]


@pytest.mark.slow
class TestCut:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalog_history, "REVISIONS_KEPT", KEPT)

    async def live(self, kv: EtcdCatalog, name: str) -> StoreId:
        store = new_store_id()
        await kv.transact([], [Put(session_key(NodeId(name)), pack(Session(FORMAT_VERSION, store, 1)))])
        return store

    async def test_behind_the_slowest_that_lives(self, make_etcd: Callable[..., Any]) -> None:
        kv = EtcdCatalog(EtcdGateway([make_etcd().url]), "test")
        slow, fast = await self.live(kv, "slow"), await self.live(kv, "fast")
        begin = await kv.revision()
        for number in range(4 * KEPT):
            await kv.transact([], [Put(b"k/1", b"%d" % number)])
        newest = await kv.revision()
        assert await cut_history(kv, []) == 0, "neither has said how far it is"
        await kv.transact([], [Put(replica_key(fast), pack_number(newest))])
        assert await cut_history(kv, []) == 0, "one has not"
        await kv.transact([], [Put(replica_key(slow), pack_number(begin + 3 * KEPT))])
        assert await cut_history(kv, [Unchanged(b"c/leader", 12345)]) == 0, "it does not lead"
        assert await cut_history(kv, []) == begin + 2 * KEPT
        assert await cut_history(kv, []) == 0, "there is little to cut"
        async with aclosing(kv.watch(begin)) as watch:
            with pytest.raises(CatalogCompacted):
                await anext(watch)
        async with aclosing(kv.watch(begin + 2 * KEPT)) as watch:
            assert (await anext(watch))[0].revision == begin + 2 * KEPT + 1
        await kv.aclose()
