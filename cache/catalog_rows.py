"""What is read and written in the catalog's SQLite file: its statements, on a connection whoever calls owns.

The tables stand in `catalog_sqlite`.
"""

import sqlite3
from collections.abc import Sequence
from zlib import crc32

import msgspec

from ckptfs.cache.catalog_kv import (
    Compare,
    EmptyRange,
    Entry,
    Operation,
    Present,
    Put,
    TransactionResult,
    Unchanged,
    prefix_end,
)
from ckptfs.cache.errors import DamagedRecord
from ckptfs.cache.record_cache import MISSING, RecordCache, Written
from ckptfs.cache.session_fence import SessionFence

LOG_REVISIONS_TRIMMED_AT_ONCE = 1_000  # about 2 ms of write lock
WATCH_ROWS_AT_ONCE = 256

_GET = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key=?"
_RANGE = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key>=? AND key<? ORDER BY key LIMIT ?"
COUNT = "SELECT count(*) FROM kv WHERE key>=? AND key<?"
_GET_SOME = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key IN ({})"
_EXISTS = "SELECT 1 FROM kv WHERE key>=? AND key<? LIMIT 1"
_REVISION_OF = "SELECT mod_rev FROM kv WHERE key=?"
_DELETE = "DELETE FROM kv WHERE key=?"
_NEWEST = "SELECT max(rev) FROM log"
# A written key of which nothing is known is mostly new. An upsert RETURNING what the cache needs takes 15 % longer.
_INSERT = "INSERT INTO kv VALUES(?,?,?,?,?,?) ON CONFLICT(key) DO NOTHING"
_UPDATE = "UPDATE kv SET value=?, mod_rev=?, session=?, check_sum=? WHERE key=?"

BRING_BACK = "the bytes of files are safe in the stores: bring it back from a copy"

_encode = msgspec.msgpack.Encoder().encode

Row = tuple[bytes, bytes, int, int, int]


def apply_changes(
    connection: sqlite3.Connection,
    known: RecordCache | None,
    compares: Sequence[Compare],
    operations: Sequence[Operation],
    session: str | None,
    changed: dict[bytes, Written | None],
    fence: SessionFence | None = None,
) -> TransactionResult:
    """Compare and apply; `changed` is given each key as the transaction leaves it. Raises `SessionEnded` because of the fence.

    `known` is current, because it was refreshed under the write lock: every statement it saves is 5 µs of the lock.
    """
    changed.clear()
    execute = connection.execute
    newest = known.newest if known is not None else None
    if newest is None:
        newest = newest_revision(connection)
    if fence is not None and operations and not _holds(connection, known, fence.compare):
        raise fence.ended()
    for compare in compares:
        if not _holds(connection, known, compare):
            return TransactionResult(False, newest)
    revision = newest + 1
    events: list[tuple[bytes, bytes | None]] = []
    for operation in operations:
        key = operation.key
        if isinstance(operation, Put):
            value = operation.value
            owner = session if operation.bound_to_session else None
            check_sum = crc32(value, crc32(key))
            created = False
            if known is None or not isinstance(known.get(key), Entry):
                created = execute(_INSERT, (key, value, revision, revision, owner, check_sum)).rowcount == 1
            if not created:
                execute(_UPDATE, (value, revision, owner, check_sum, key))
            changed[key] = Written(value, revision, created)
            if owner is not None:
                execute("INSERT OR IGNORE INTO bound VALUES(?,?)", (owner, key))
            events.append((key, value))
        elif execute(_DELETE, (key,)).rowcount:
            events.append((key, None))
            changed[key] = None
    return log_events(connection, newest, events)


def log_events(connection: sqlite3.Connection, newest: int, events: list[tuple[bytes, bytes | None]]) -> TransactionResult:
    if not events:
        return TransactionResult(True, newest)
    connection.execute("INSERT INTO log VALUES(?,?)", (newest + 1, _encode(events)))
    return TransactionResult(True, newest + 1)


def skip_revisions(connection: sqlite3.Connection, revision: int) -> TransactionResult:
    """Go on after this revision, unless the catalog is that far: a row of the log without events."""
    newest = newest_revision(connection)
    if newest >= revision:
        return TransactionResult(True, newest)
    connection.execute("INSERT INTO log VALUES(?,?)", (revision, _encode([])))
    return TransactionResult(True, revision)


def _holds(connection: sqlite3.Connection, known: RecordCache | None, compare: Compare) -> bool:
    if isinstance(compare, EmptyRange):
        return connection.execute(_EXISTS, (compare.prefix, prefix_end(compare.prefix))).fetchone() is None
    entry = MISSING if known is None else known.get(compare.key)
    if isinstance(entry, Entry):
        revision = entry.mod_revision
    elif entry is None:
        revision = 0
    else:
        row = connection.execute(_REVISION_OF, (compare.key,)).fetchone()
        revision = 0 if row is None else row[0]
    if isinstance(compare, Present):
        return revision != 0
    assert isinstance(compare, Unchanged)
    return bool(revision == compare.mod_revision)


def newest_revision(connection: sqlite3.Connection) -> int:
    """The newest revision; 0 for an empty catalog."""
    return connection.execute(_NEWEST).fetchone()[0] or 0


def read_entry(connection: sqlite3.Connection, key: bytes) -> Entry | None:
    """The entry of the key, or None. Raises `DamagedData`."""
    row = connection.execute(_GET, (key,)).fetchone()
    return None if row is None else _checked(row)


def read_entries(connection: sqlite3.Connection, keys: Sequence[bytes]) -> dict[bytes, Entry]:
    """The entries of those keys that exist. Raises `DamagedData`."""
    rows = connection.execute(_GET_SOME.format(",".join("?" * len(keys))), keys)
    return {row[0]: _checked(row) for row in rows}


def read_range(connection: sqlite3.Connection, first: bytes, end: bytes, limit: int) -> list[Entry]:
    """Entries from `first` to before `end`; a limit of -1 is none. Raises `DamagedData`."""
    return [_checked(row) for row in connection.execute(_RANGE, (first, end, limit))]


def read_log(revision: int, connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    """Some rows of the log after the revision: revision and packed events."""
    return connection.execute(
        "SELECT rev, events FROM log WHERE rev>? ORDER BY rev LIMIT ?", (revision, WATCH_ROWS_AT_ONCE)
    ).fetchall()


def is_right(key: bytes, value: bytes, check_sum: int) -> bool:
    """Whether a row is as it was written. In a damaged page its fields may be anything."""
    try:
        return crc32(value, crc32(key)) == check_sum
    except TypeError:
        return False


def _checked(row: Row) -> Entry:
    key, value, created, modified, check_sum = row
    if not (is_right(key, value, check_sum) and type(created) is type(modified) is int):
        key = key if isinstance(key, bytes) else b""  # nobody can tell then where to go on
        raise DamagedRecord(key, f"the catalog's record {key!r} fails its checksum; other files are not touched by that")
    return Entry(key, value, created, modified)


def count_checkpoint(connection: sqlite3.Connection) -> None:
    """The first write after a checkpoint syncs the new header of the log: it happens here, not in an event loop."""
    connection.execute("UPDATE meta SET value=value+1 WHERE name='checkpoints'")


def trim_log(connection: sqlite3.Connection, kept: int) -> bool:
    """Delete some of the rows that are older than the newest `kept`; whether there may be more."""
    keep_after = newest_revision(connection) - kept
    return (
        connection.execute(
            "DELETE FROM log WHERE rev IN (SELECT rev FROM log WHERE rev<=? ORDER BY rev LIMIT ?)",
            (keep_after, LOG_REVISIONS_TRIMMED_AT_ONCE),
        ).rowcount
        == LOG_REVISIONS_TRIMMED_AT_ONCE
    )
