"""Walks over a catalog in which single records are damaged."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import DamagedRecord

KEYS = [b"v/%02d" % number for number in range(30)]


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test")
    await catalog.transact([], [Put(key, b"value") for key in [*KEYS, b"u/0", b"w/0"]])
    yield catalog
    await catalog.aclose()


def damage(catalog: SqliteCatalog, *keys: bytes) -> None:
    with closing(sqlite3.connect(catalog.path)) as database, database:
        database.executemany("UPDATE kv SET value = x'00' WHERE key = ?", [(key,) for key in keys])


async def keys_of(catalog: SqliteCatalog, damaged: set[bytes] | None, page_count: int, after: bytes = b"") -> list[bytes]:
    return [entry.key async for entry in scan(catalog, b"v/", after=after, damaged=damaged, page_count=page_count)]


@pytest.mark.parametrize("page_count", [1, 7, 30, 5000])
async def test_what_is_right_is_read_in_pages(catalog: SqliteCatalog, page_count: int) -> None:
    assert await keys_of(catalog, None, page_count) == KEYS
    assert await keys_of(catalog, set(), page_count, KEYS[9]) == KEYS[10:]


@pytest.mark.parametrize("page_count", [1, 7, 30, 5000])
@pytest.mark.parametrize("wrong", [[0], [29], [12], [6, 7], [3, 4, 5, 6, 7, 8, 9], list(range(30))])
async def test_damaged_records_are_passed_over_where_that_is_asked_for(
    catalog: SqliteCatalog, wrong: list[int], page_count: int
) -> None:
    bad = {KEYS[number] for number in wrong}
    damage(catalog, *bad)
    found: set[bytes] = set()
    assert await keys_of(catalog, found, page_count) == [key for key in KEYS if key not in bad]
    assert found == bad
    assert "fails its checksum" in catalog.statistics().damage
    with pytest.raises(DamagedRecord) as caught:
        await keys_of(catalog, None, page_count)
    assert caught.value.key == min(bad)


@pytest.mark.parametrize("field", ["value", "create_rev", "mod_rev", "check_sum"])
@pytest.mark.parametrize("became", ["CAST(x'ff00fe' AS TEXT)", "'words'", "NULL", "0.5", "x'ff'"])
async def test_a_record_whose_field_became_something_else_is_passed_over(catalog: SqliteCatalog, field: str, became: str) -> None:
    """In a damaged page a field may be of any type, and text that is no UTF-8 fails the statement that reads it."""
    with closing(sqlite3.connect(catalog.path)) as database, database:
        database.execute("PRAGMA ignore_check_constraints=ON")
        (made,) = database.execute("SELECT sql FROM sqlite_master WHERE name = 'kv'").fetchone()
        database.execute("PRAGMA writable_schema=ON")
        database.execute(
            "UPDATE sqlite_master SET sql = ? WHERE name = 'kv'", (made.replace("NOT NULL", "").replace("STRICT", ""),)
        )
    with closing(sqlite3.connect(catalog.path)) as database, database:
        database.execute(f"UPDATE kv SET {field} = {became} WHERE key = ?", (KEYS[3],))
    found: set[bytes] = set()
    assert await keys_of(catalog, found, 7) == [key for key in KEYS if key != KEYS[3]]
    assert found == {KEYS[3]}
    with pytest.raises(DamagedRecord):
        await catalog.get(KEYS[3])
    assert (await catalog.get(KEYS[4])) is not None
