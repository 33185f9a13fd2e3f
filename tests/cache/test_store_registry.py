"""Stores of a catalog in which the record of one is damaged."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.catalog_format import Settings, StoreState, store_key
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store_registry import UNREADABLE, begin_session, register_store, session_label, set_state, stores
from ckptfs.cache.store_removal import remove_node

FIRST, SECOND, THIRD = (StoreId(bytes([number]) * 16) for number in (1, 2, 3))
STAND_IN = NodeId("damaged-02020202")


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session_label(SECOND, 1))
    await Namespace(catalog, FIRST, 1, lambda: 1).format_if_empty(Settings(1, b"C" * 16, 4, 2, 4096))
    for number, store in enumerate((FIRST, SECOND, THIRD)):
        await register_store(catalog, store, NodeId(f"n{number}"), "127.0.0.1:1", "/s", {})
    yield catalog
    await catalog.aclose()


async def damage(catalog: SqliteCatalog, how: str) -> None:
    if how == "no record":
        await catalog.transact([], [Put(store_key(SECOND), b"nonsense")])
        return
    with closing(sqlite3.connect(catalog.path)) as database, database:
        database.execute("UPDATE kv SET value = x'00' WHERE key = ?", (store_key(SECOND),))


@pytest.mark.parametrize("how", ["no record", "check sum"])
async def test_a_damaged_record_takes_no_other_store_along_and_is_not_taken_for_gone(catalog: SqliteCatalog, how: str) -> None:
    before = await stores(catalog)
    await damage(catalog, how)
    found = await stores(catalog)
    assert {store: found[store] for store in (FIRST, THIRD)} == {store: before[store] for store in (FIRST, THIRD)}
    record, revision = found[SECOND]
    assert (record.node, record.state, record.address, revision) == (STAND_IN, StoreState.IN, "", UNREADABLE)
    with pytest.raises(DamagedData):
        await set_state(catalog, SECOND, StoreState.LOST)


@pytest.mark.parametrize("how", ["no record", "check sum"])
async def test_an_operator_may_take_out_the_store_of_a_damaged_record_when_its_node_has_ended(
    catalog: SqliteCatalog, how: str
) -> None:
    await begin_session(catalog, NodeId("n1"), SECOND, 1)
    await damage(catalog, how)
    with pytest.raises(StoreError, match="is up"):
        await remove_node(catalog, STAND_IN, force=True)
    await catalog.end_session(session_label(SECOND, 1))
    assert await remove_node(catalog, STAND_IN, force=False) == []
    record, revision = (await stores(catalog))[SECOND]
    assert record.state is StoreState.REMOVED
    assert revision > 0
