"""The files of a SQLite database in WAL mode, looked at from outside: what SQLite itself passes over in silence.

At its start SQLite reads the write-ahead log up to the first frame whose checksum is wrong and ignores the rest, which is right
after a power cut and silent when a synced frame was damaged later. The checksums tell the two apart: each continues that of the
frame before it, so a commit frame that continues its predecessor beyond the end of the valid chain was written into a whole log,
and what it committed is lost (https://sqlite.org/fileformat2.html, "The Write-Ahead Log"). Only the last transaction may look
like that after a power cut, if its pages reached the drive out of order: nobody was told that it is safe.
"""

import contextlib
import os
import sqlite3
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_MAGIC = 0x377F0682
"""Its lowest bit says that checksums are computed over big-endian words."""

_PAGE_SIZE = 4096
"""That of every database of ours, for a log whose header can't be believed."""

ASIDE = ".damaged-"
"""What follows the name of a database that was set aside; then the wall time in nanoseconds."""

ROWS_LOOKED_FOR_MAX = 1_000_000
"""Lookups between two damaged pages: some seconds."""

ROWS_BEHIND_MAX = 10_000
"""Lookups behind a damaged page when the table's end is damaged too."""

Sums = tuple[int, int]


def log_is_cut(database: Path) -> bool:
    """Whether the write-ahead log holds committed transactions that SQLite will not reach. As `commits_out_of_reach`."""
    return commits_out_of_reach(database) > 0


def commits_out_of_reach(database: Path) -> int:
    """How many committed transactions of the write-ahead log SQLite will not reach. Takes 0.1 ms a page.

    Call it before this process opens the database, for closing any descriptor takes SQLite's locks along. Raises `OSError`.
    """
    try:
        log = Path(f"{database}-wal").read_bytes()
    except FileNotFoundError:
        return 0
    if len(log) < _HEADER.size + _FRAME.size:
        return 0
    magic, _, page_size, _, salt_1, salt_2, *stored = _HEADER.unpack_from(log)
    big_endian = bool(magic & 1)
    before: Sums = (stored[0], stored[1])
    reached = magic & ~1 == _MAGIC and _checksum(log[: _HEADER.size - 8], (0, 0), big_endian) == before
    if not reached:  # SQLite passes over all of it
        page_size, big_endian = _PAGE_SIZE, sys.byteorder == "big"
        salt_1, salt_2 = _FRAME.unpack_from(log, _HEADER.size)[2:4]
    size = _FRAME.size + page_size
    count = 0
    for offset in range(_HEADER.size, len(log) - size + 1, size):
        _, committed_pages, *salts, sum_1, sum_2 = _FRAME.unpack_from(log, offset)
        right = False
        if salts == [salt_1, salt_2]:
            right = _checksum(log[offset : offset + 8] + log[offset + _FRAME.size : offset + size], before, big_endian) == (
                sum_1,
                sum_2,
            )
        count += bool(right and committed_pages and not reached)
        reached = reached and right
        before = (sum_1, sum_2)
    return count


def _checksum(data: bytes, sums: Sums, big_endian: bool) -> Sums:
    words = array("I", data)
    if big_endian != (sys.byteorder == "big"):
        words.byteswap()
    first, second = sums
    pairs = iter(words)
    for even, odd in zip(pairs, pairs, strict=True):
        first = (first + even + second) & 0xFFFFFFFF
        second = (second + odd + first) & 0xFFFFFFFF
    return first, second


def set_aside(database: Path) -> Path:
    """Rename a closed database, with its log, so that another can take its place; returns its new name. Raises `OSError`."""
    aside = Path(f"{database}{ASIDE}{time.time_ns()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(f"{database}-wal", f"{aside}-wal")
    os.rename(database, aside)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{database}-shm")
    return aside


def were_set_aside(database: Path) -> list[Path]:
    """What was set aside of databases of this name and is still there."""
    return sorted(database.parent.glob(f"{database.name}{ASIDE}*"))


def readable_rows(connection: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[Any, ...]]:
    """Every row of a damaged table with rowids that can still be reached: from its beginning and its end up to the damage, and
    one by one what lies between. In no order; a row may come twice, and its values may be wrong."""
    select = f"SELECT rowid, {columns} FROM {table}"
    first = 0
    try:
        for row in connection.execute(f"{select} WHERE rowid > 0 ORDER BY rowid"):
            first = row[0]
            yield row[1:]
        return
    except sqlite3.DatabaseError:
        last = first + ROWS_BEHIND_MAX
    with contextlib.suppress(sqlite3.DatabaseError):
        for row in connection.execute(f"{select} WHERE rowid > ? ORDER BY rowid DESC", (first,)):
            last = row[0]
            yield row[1:]
    if first == 0 and last == ROWS_BEHIND_MAX:
        return  # not one row: it is the table itself that can't be reached
    for rowid in range(first + 1, min(last, first + ROWS_LOOKED_FOR_MAX)):
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from (row[1:] for row in connection.execute(f"{select} WHERE rowid = ?", (rowid,)))


def first_damage(connection: sqlite3.Connection) -> str:
    """What a check of all pages finds wrong first, on one line; empty if nothing. Raises `sqlite3.DatabaseError`."""
    (answer,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
    return "" if text == "ok" else " ".join(text.split())


def is_damage(error: sqlite3.Error) -> bool:
    """Whether SQLite says that a file's content is wrong: not that the drive failed, is full, or locked."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
