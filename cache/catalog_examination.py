"""A look at the catalog's file before anything opens it for writing: whether it is ours, whole, and not older than it was.

It changes nothing, not even the write-ahead log, which the last ordinary connection to close would copy into the database and
delete. So what is refused here can still be brought back.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from zlib import crc32

from ckptfs.cache.catalog_connection import check_identity, guarded
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.sqlite_files import first_damage

CHECKED_BYTES_MAX = 1 << 30
"""The largest catalog of which every record is checked; in larger ones damage is found by who reads."""

BUSY_MILLISECONDS_MAX = 10_000


def examine(path: Path, *, seen_revision: int | None) -> None:
    """`seen_revision` is one that was made durable in this catalog, 0 if only that there was one is known, None if it may be new.

    Raises `StoreError` for a catalog that is foreign, newer, gone or older than that, `DamagedData` for a damaged one.
    """
    if seen_revision is None and os.path.exists(f"{path}-journal"):
        return  # SQLite was cut off in making it, and begins again when it is opened for writing
    if not _holds_anything(path):
        if seen_revision is not None:
            raise StoreError(f"the catalog {path} is gone or empty, and with it all names; {_BRING_BACK}")
        return
    guarded(os.fspath(path), lambda: _examine(path, seen_revision))


_BRING_BACK = "no file in any store was touched, and no node must run before the catalog is brought back from a copy"


def _holds_anything(path: Path) -> bool:
    try:
        return any(os.path.getsize(f"{path}{suffix}") for suffix in ("", "-wal") if os.path.exists(f"{path}{suffix}"))
    except OSError as error:
        raise StoreError(f"the catalog {path} can't be opened: {error.strerror}") from None


def _first_wrong_record(connection: sqlite3.Connection) -> str:
    """What the check of pages passes over: a key that was changed hides its record, and one out of order all that follow it."""
    connection.text_factory = lambda _: None  # keys and values are never text
    before = b""
    for key, value, check_sum in connection.execute("SELECT key, value, check_sum FROM kv"):
        if not (isinstance(key, bytes) and isinstance(value, bytes) and key > before and crc32(value, crc32(key)) == check_sum):
            return f"record {key!r} is not what was written"
        before = key
    return ""


def _examine(path: Path, seen_revision: int | None) -> None:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS_MAX}")
        if not check_identity(os.fspath(path), connection):
            if seen_revision is not None:
                raise StoreError(
                    f"the catalog {path} holds no names: its write-ahead log ({path.name}-wal) is gone or damaged; {_BRING_BACK}"
                )
            return
        if path.stat().st_size <= CHECKED_BYTES_MAX and (damage := first_damage(connection) or _first_wrong_record(connection)):
            raise DamagedData(f"the catalog {path} is damaged ({damage}); {_BRING_BACK}")
        newest = connection.execute("SELECT max(rev) FROM log").fetchone()[0] or 0
        if newest < (seen_revision or 0):
            raise StoreError(
                f"the catalog {path} ends at revision {newest}, but {seen_revision} was durable: it lost its write-ahead log"
                f" ({path.name}-wal), or is an older copy; {_BRING_BACK} that is newer"
            )
