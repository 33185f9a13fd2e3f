"""A write-ahead log that SQLite doesn't take whole is told from one that a kill or a power cut left."""

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.sqlite_files import log_is_cut, readable_rows, set_aside, were_set_aside

HEADER, FRAME = 32, 24 + 4096


def _rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM t").fetchone()[0])


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A database as a killed process leaves it: 20 rows, each committed by itself, all of them in its log."""
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t(x)")
        for number in range(20):
            connection.execute("INSERT INTO t VALUES(?)", (b"%d" % number * 1000,))
        copy = tmp_path / "killed" / "a.db"
        copy.parent.mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    return copy


def _wal(path: Path) -> Path:
    return Path(f"{path}-wal")


def test_a_whole_log_and_none_at_all(killed: Path, tmp_path: Path) -> None:
    assert not log_is_cut(killed)
    assert not log_is_cut(tmp_path / "none.db")
    assert _rows(killed) == 20


@pytest.mark.slow
def test_whatever_bit_is_flipped_rows_that_are_lost_are_noticed(killed: Path, tmp_path: Path) -> None:
    """The exceptions are the last frame of the last transaction and, in its header, what says that it commits."""
    whole = _wal(killed).read_bytes()
    frames = (len(whole) - HEADER) // FRAME
    choice = random.Random(1)
    places = [*range(HEADER), *range(HEADER + FRAME, HEADER + FRAME + 24)]
    places += [HEADER + choice.randrange((frames - 2) * FRAME) for _ in range(150)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << choice.randrange(8)
        directory = tmp_path / "flipped"
        directory.mkdir()
        shutil.copy(killed, directory / "a.db")
        (directory / "a.db-wal").write_bytes(damaged)
        cut = log_is_cut(directory / "a.db")
        try:
            rows = _rows(directory / "a.db")
        except sqlite3.OperationalError:
            rows = -1  # the table itself was made in the log
        assert cut == (rows < 20), f"byte {place}: {rows} rows, cut {cut}"
        shutil.rmtree(directory)


def test_what_a_kill_or_a_power_cut_leaves_is_no_damage(killed: Path) -> None:
    whole = _wal(killed).read_bytes()
    frames = (len(whole) - HEADER) // FRAME
    for kept in (0, 1, frames // 2, frames - 1):
        for torn in (b"", whole[HEADER + kept * FRAME :][:100], bytes(3 * FRAME)):
            _wal(killed).write_bytes(whole[: HEADER + kept * FRAME] + torn)
            assert not log_is_cut(killed)


def test_what_is_left_of_an_older_log_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t(x)")
        for number in range(20):
            connection.execute("INSERT INTO t VALUES(?)", (b"%d" % number * 1000,))
        connection.execute("PRAGMA wal_checkpoint(RESTART)")
        connection.execute("INSERT INTO t VALUES(1)")
        assert _wal(path).stat().st_size > 10 * FRAME
        assert not log_is_cut(path)


def test_setting_aside_takes_the_log_along(killed: Path) -> None:
    assert were_set_aside(killed) == []
    aside = set_aside(killed)
    assert not killed.exists()
    assert not _wal(killed).exists()
    assert were_set_aside(killed) == [aside, Path(f"{aside}-wal")]
    assert _rows(aside) == 20
    assert were_set_aside(killed) == [aside]


@pytest.mark.parametrize("damage", ["no page", "a leaf", "an inner page", "two leaves", "the last leaf", "the table's root"])
def test_rows_on_whole_pages_are_read_around_damaged_ones(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t(x, y)")
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO t VALUES(?, ?)", [(number, b"%d" % number * 500) for number in range(3000)])
        connection.execute("COMMIT")
    content = bytearray(path.read_bytes())
    kinds = [content[page * 4096 + (100 if page == 0 else 0)] for page in range(len(content) // 4096)]
    leaves, inner = [page for page, kind in enumerate(kinds) if kind == 13][1:], [p for p, kind in enumerate(kinds) if kind == 5]
    assert len(inner) > 2
    pages = {
        "no page": [],
        "a leaf": leaves[50:51],
        "an inner page": inner[1:2],
        "two leaves": [leaves[30], leaves[80]],
        "the last leaf": leaves[-1:],
        "the table's root": [1],
    }[damage]
    for page in pages:
        content[page * 4096 : (page + 1) * 4096] = b"\xee" * 4096
    path.write_bytes(content)
    with closing(sqlite3.connect(path)) as connection:
        rows = list(readable_rows(connection, "t", "x, y"))
    assert all(y == b"%d" % x * 500 for x, y in rows)
    found = {x for x, _ in rows}
    assert len(found) == len(rows)
    lost_at_most = {"no page": 0, "an inner page": 2800, "the table's root": 3000}.get(damage, 12 * len(pages))
    assert 3000 - lost_at_most <= len(found) <= 3000
    assert (len(found) == 3000) == (damage == "no page")
