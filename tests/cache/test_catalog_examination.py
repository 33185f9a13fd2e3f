"""A catalog is looked at before it is opened: what is damaged, foreign, newer, gone or older than it was is refused untouched."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.catalog_connection import LAYOUT_VERSION
from ckptfs.cache.catalog_examination import examine
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CacheError, DamagedData, StoreError

RECORDS = 400
PAGE = 4096


async def _filled(path: Path, records: int = RECORDS) -> SqliteCatalog:
    kv = SqliteCatalog.open(path, writer_label="test")
    for number in range(records):
        await kv.transact([], [Put(b"k/%05d" % number, b"value of %d" % number * 10)])
    return kv


def _files(path: Path) -> dict[str, bytes]:
    """What there is; an empty log says nothing."""
    contents = {name: (path.parent / name).read_bytes() for name in os.listdir(path.parent) if not name.endswith("-shm")}
    return {name: content for name, content in contents.items() if content or not name.endswith("-wal")}


def _refused(path: Path, kind: type[CacheError], words: str, seen_revision: int | None = 0) -> None:
    before = _files(path)
    with pytest.raises(kind, match=words) as caught:
        examine(path, seen_revision=seen_revision)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _files(path) == before


async def test_one_that_a_power_cut_left_half_made_is_begun_again(tmp_path: Path) -> None:
    """SQLite makes a database with a journal to roll back, which is not done by reading it."""
    path = tmp_path / "c.db"
    with closing(sqlite3.connect(tmp_path / "whole.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA cache_size=1")
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE t(x)")
        connection.executemany("INSERT INTO t VALUES(?)", [(bytes(3000),)] * 50)  # so that it spills
        shutil.copy(tmp_path / "whole.db", path)
        shutil.copy(tmp_path / "whole.db-journal", f"{path}-journal")
        connection.execute("ROLLBACK")
    examine(path, seen_revision=None)
    kv = SqliteCatalog.open(path, writer_label="test")
    assert await kv.revision() == 0
    await kv.aclose()


async def test_a_new_catalog_and_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    examine(path, seen_revision=None)
    assert os.listdir(tmp_path) == []
    kv = await _filled(path)
    examine(path, seen_revision=RECORDS)  # while others use it
    await kv.aclose()
    before = _files(path)
    examine(path, seen_revision=RECORDS)
    assert _files(path) == before


@pytest.mark.parametrize("how", ["gone", "empty", "formatted anew"])
async def test_a_catalog_that_lost_everything(tmp_path: Path, how: str) -> None:
    path = tmp_path / "c.db"
    if how == "empty":
        path.touch()
    if how == "formatted anew":
        await (await _filled(path, 1)).aclose()
        _refused(path, StoreError, "ends at revision 1, but 5 was durable", seen_revision=5)
    else:
        _refused(path, StoreError, "is gone or empty, and with it all names; no file in any store was touched")


async def test_a_lost_write_ahead_log(tmp_path: Path) -> None:
    """What was committed since the last checkpoint is in it alone."""
    path = tmp_path / "c.db"
    await (await _filled(path, 100)).aclose()
    kv = await _filled(path, 200)
    (tmp_path / "killed").mkdir()
    killed = tmp_path / "killed" / "c.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    await kv.aclose()
    examine(killed, seen_revision=300)
    Path(f"{killed}-wal").unlink()
    _refused(killed, StoreError, "ends at revision 100, but 300 was durable: it lost its write-ahead log", seen_revision=300)


async def test_a_damaged_write_ahead_log_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    kv = await _filled(path, 200)
    (tmp_path / "killed").mkdir()
    killed = tmp_path / "killed" / "c.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    await kv.aclose()
    log = bytearray(Path(f"{killed}-wal").read_bytes())
    log[len(log) // 2] ^= 1
    Path(f"{killed}-wal").write_bytes(log)
    _refused(killed, StoreError, r"ends at revision \d+, but 200 was durable", seen_revision=200)


def _swapped(content: bytearray) -> bytearray:
    return content[: 2 * PAGE] + content[3 * PAGE : 4 * PAGE] + content[2 * PAGE : 3 * PAGE] + content[4 * PAGE :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: bytearray(b"not a database, but long enough" * 1000),
        lambda content: content[: len(content) // 2],
        lambda content: content[: len(content) // 2 // PAGE * PAGE],
        lambda content: bytearray(PAGE) + content[PAGE:],
        lambda content: content[: 3 * PAGE] + bytearray(PAGE) + content[4 * PAGE :],
        _swapped,
    ],
    ids=["foreign", "cut", "cut between pages", "no header", "a page of zeros", "pages swapped"],
)
async def test_a_damaged_catalog(tmp_path: Path, damage: Callable[[bytearray], bytearray]) -> None:
    path = tmp_path / "c.db"
    await (await _filled(path)).aclose()
    path.write_bytes(damage(bytearray(path.read_bytes())))
    _refused(path, DamagedData, "is damaged")


async def test_another_s_database_and_one_of_a_newer_release(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE precious(x)")
    _refused(path, StoreError, "not a ckptfs catalog")
    path.unlink()
    await (await _filled(path, 1)).aclose()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={LAYOUT_VERSION + 1}")
    _refused(path, StoreError, "upgrade")


@pytest.mark.slow
async def test_no_flipped_bit_shows_other_names_or_values(tmp_path: Path) -> None:
    """Either it is refused at start, or every record reads as it was or is an error: none is silently missing or another."""
    path = tmp_path / "c.db"
    await (await _filled(path)).aclose()
    whole = path.read_bytes()
    expected = {b"k/%05d" % number: b"value of %d" % number * 10 for number in range(RECORDS)}
    choice = random.Random(11)
    silent = []
    for turn in range(1500):
        content = bytearray(whole)
        page = choice.randrange(len(content) // PAGE) * PAGE
        place = page + choice.randrange(choice.choice([16, 200, PAGE]))
        content[place] ^= 1 << choice.randrange(8)
        path.write_bytes(content)
        try:
            examine(path, seen_revision=RECORDS)
            kv = SqliteCatalog.open(path, writer_label="test")
        except CacheError:
            continue
        try:
            listed = {entry.key: entry.value for entry in await kv.range(b"k/")}
            if listed != expected:
                silent.append((turn, place, "range"))
        except CacheError:
            pass
        for key in choice.sample(sorted(expected), 20):
            try:
                entry = await kv.get(key)
            except CacheError:
                continue
            if entry is None or entry.value != expected[key]:
                silent.append((turn, place, key.decode()))
        await kv.aclose()
    assert silent == []
