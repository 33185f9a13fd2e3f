"""Connections to the catalog's SQLite file: making one, taking the write lock, and what SQLite's errors mean.

The functions run in whichever thread owns the connection they are given.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckptfs.cache.catalog_format import FORMAT_KEY, check_format
from ckptfs.cache.catalog_rows import BRING_BACK, read_entry
from ckptfs.cache.drive_refusal import connect_read_only, refuses_writes
from ckptfs.cache.errors import CatalogFull, CatalogUnavailable, DamagedData, StoreError
from ckptfs.cache.sqlite_full import is_full
from ckptfs.cache.sqlite_parameters import pass_straight
from ckptfs.cache.store import sync_directory

LAYOUT_VERSION = 1
APPLICATION_ID = 0x636B7066  # "ckpf"
BUSY_SECONDS_MAX = 10.0

_SCHEMA = (
    "CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB NOT NULL, create_rev INTEGER NOT NULL, mod_rev INTEGER NOT NULL,"
    " session TEXT, check_sum INTEGER NOT NULL) WITHOUT ROWID",
    # An index of kv(session), even a partial one, makes every transaction 20 % slower.
    "CREATE TABLE bound(session TEXT NOT NULL, key BLOB NOT NULL, PRIMARY KEY(session, key)) WITHOUT ROWID",
    "CREATE TABLE log(rev INTEGER PRIMARY KEY, events BLOB NOT NULL)",
    "CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "INSERT INTO meta VALUES('checkpoints', 0)",
    f"PRAGMA application_id={APPLICATION_ID}",
    f"PRAGMA user_version={LAYOUT_VERSION}",
)

Result = TypeVar("Result")


def connect(path: str) -> sqlite3.Connection:
    """A connection that never waits for a lock and never syncs by itself."""
    pass_straight()
    # Opening reads the file, and waits for another process that is opening it; a transaction of this connection never waits.
    if os.path.exists(path) and refuses_writes(os.path.dirname(os.path.abspath(path))):
        connection = connect_read_only(Path(path))
    else:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False)
    # A damaged record's field may have become text that is none; it is to be found wrong, and not to fail what else is read.
    connection.text_factory = _lenient_text
    try:
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA cache_size=-8192")
        connection.execute("PRAGMA busy_timeout=0")
    except BaseException:
        connection.close()
        raise
    return connection


def _lenient_text(field: bytes) -> str:
    return field.decode(errors="replace")


def prepare(path: str) -> sqlite3.Connection:
    """A connection to the catalog file, made ready: ours, of a layout we know, in WAL mode."""
    connection = connect(path)
    try:
        connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS_MAX * 1000)}")
        if not check_identity(path, connection):
            patient(path, lambda connection: connection.execute("PRAGMA journal_mode=WAL").fetchone(), connection)
            transaction(connection, lambda connection: _create(path, connection))
            sync_directory(Path(os.path.abspath(path)).parent)
        (mode,) = patient(path, lambda connection: connection.execute("PRAGMA journal_mode=WAL").fetchone(), connection)
        if mode != "wal":
            raise StoreError(f"the catalog {path} can't use a write-ahead log here (got {mode}): use a local file system")
        entry = read_entry(connection, FORMAT_KEY)
        if entry is not None:
            check_format(entry.value)
        connection.execute("PRAGMA busy_timeout=0")
    except BaseException:
        connection.close()
        raise
    return connection


def check_identity(path: str, connection: sqlite3.Connection) -> bool:
    """Whether the tables exist; False for a new, empty file. Raises `StoreError` for what isn't ours or is newer."""
    (layout,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == 0 and layout == 0 and tables == 0:
        return False
    if application != APPLICATION_ID:
        raise StoreError(f"{path} is a SQLite database, but not a ckptfs catalog; name another file")
    if layout > LAYOUT_VERSION:
        raise StoreError(f"the catalog {path} has layout {layout}, this program knows {LAYOUT_VERSION}: upgrade ckptfs here")
    return True


def _create(path: str, connection: sqlite3.Connection) -> None:
    if not check_identity(path, connection):
        for statement in _SCHEMA:
            connection.execute(statement)


def transaction(connection: sqlite3.Connection, apply: Callable[[sqlite3.Connection], Result]) -> Result:
    """Run it under the write lock and commit, or roll back what it did."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = apply(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def patient(path: str, work: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
    """Run the work, again while the database is locked. SQLite's own waiting starts at 1 ms and grows to 100 ms, for a lock
    that is held for 0.1 ms; short random pauses let many processes take turns."""
    deadline = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            return work(connection)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise translated(path, error) from error
            if time.monotonic() > deadline:
                raise CatalogUnavailable(
                    f"the catalog {path} was locked for {BUSY_SECONDS_MAX:.0f} s: another process holds it, perhaps stopped"
                ) from error
        time.sleep(random.uniform(0.0001, 0.001))


def guarded(path: str, work: Callable[[], Result]) -> Result:
    """Do something to the file; its errors become `StoreError`, `DamagedData` or, while it is locked, `CatalogUnavailable`."""
    try:
        return work()
    except sqlite3.Error as error:
        meaning = translated(path, error)
        if isinstance(meaning, CatalogUnavailable) and not is_busy(error):
            raise StoreError(f"the catalog {path} can't be opened: {error}") from error
        raise meaning from error
    except UnicodeDecodeError as error:  # of SQLite's own message, which names what it found in place of a name
        raise DamagedData(f"the catalog {path} is damaged ({error.reason}); {BRING_BACK}") from error


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else holds the lock that is needed."""
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def translated(path: str, error: sqlite3.Error) -> Exception:
    """The error in our words: `DamagedData`, `CatalogFull` or `CatalogUnavailable`."""
    code = _primary_code(error)
    no_text = code == 0 and "Could not decode" in str(error)  # Python's word for bytes that became text
    if no_text or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedData(f"the catalog {path} is damaged ({error}); {BRING_BACK}")
    if is_full(error):
        return CatalogFull(f"the catalog {path} can't grow: no space left on its file system")
    if isinstance(error, sqlite3.ProgrammingError):
        return CatalogUnavailable(f"the catalog {path} is closed here ({error})")
    return CatalogUnavailable(f"the catalog {path} can't be used now: {error}")
