"""The catalog engine for the nodes of one machine: one SQLite file in WAL mode, opened by every process.

Tables (layout version 1, kept in `PRAGMA user_version`; `application_id` says that the file is ours)::

    kv    key BLOB PRIMARY KEY, value BLOB, create_rev, mod_rev, session TEXT|NULL, check_sum   WITHOUT ROWID
    log   rev INTEGER PRIMARY KEY, events BLOB    one row a transaction: msgpack [[key, value|nil], …]
    bound session TEXT, key BLOB                  every key ever bound to the session: where to look when it ends, no more
    meta  name TEXT PRIMARY KEY, value            `checkpoints`: written after each checkpoint

`check_sum` is the CRC-32 of key and value: SQLite has none of its own, and a flipped bit in a record must be an error
rather than another record. The newest revision is `max(rev)` of the log, which always keeps its last row.

Why it is built this way. A transaction takes some tens of microseconds, less than the way to a thread and back, so it runs
in the event loop's own thread; but it never waits there: a lock held by another process (SQLITE_BUSY) sends the same
transaction to a worker thread that waits on a connection of its own. Commits are not synced (`synchronous=NORMAL`, no
automatic checkpoint); `make_durable` syncs the write-ahead log beside running transactions, one sync for all who asked
before it began. Checkpoints and trimming the log happen in a thread of their own.

On a full drive names must still go. So the log, its index and the database hold room beyond their ends (`hold_room`), and a
log that can't grow all the same is copied into the database and begun anew, in the room its file has. New names are refused
before they come here.

SQLite's locks are POSIX locks, which a process loses when it closes *any* descriptor of the locked file: nothing here may
close one of the database or the `-shm` (see `kept_descriptors`), only of the `-wal`, which is never locked. Local file systems
only.
"""

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, cast
from zlib import crc32

import msgspec
import trio

from ckptfs.cache.catalog_format import FORMAT_KEY, check_format
from ckptfs.cache.catalog_kv import (
    COMPARES_MAX,
    OPERATIONS_MAX,
    Compare,
    EmptyRange,
    Entry,
    Event,
    Operation,
    Present,
    Put,
    TransactionResult,
    Unchanged,
)
from ckptfs.cache.drive_refusal import connect_read_only, refuses_writes
from ckptfs.cache.errors import CatalogCompacted, CatalogFull, CatalogUnavailable, DamagedData, StoreError
from ckptfs.cache.kept_descriptors import kept_descriptor, open_existing
from ckptfs.cache.record_cache import MISSING, RecordCache, Written
from ckptfs.cache.reserve import hold_beyond_end, lacking_beyond_end, room_at
from ckptfs.cache.sqlite_full import is_full

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1
APPLICATION_ID = 0x636B7066  # "ckpf"
LOG_REVISIONS_KEPT = 100_000
LOG_REVISIONS_TRIMMED_AT_ONCE = 1_000  # about 2 ms of write lock
WAL_SIZE_BYTES_SOFT = 64 * 1024 * 1024  # a page that is written often is copied once
WAL_SIZE_BYTES_HARD = 256 * 1024 * 1024
CHECKPOINT_PASSES_MAX = 4
CHECKPOINT_FRAMES_LEFT_MAX = 256  # 1 MiB
PAGE_SIZE = 4096
WAL_LOOKED_AT_EVERY = 64  # transactions: each adds some 30 KiB
INDEX_GROWTH_BYTES = 32 * 1024  # at once, for 4096 pages of the log
CHECKPOINT_INTERVAL_SECONDS_MIN = 1.0
BUSY_SECONDS_MAX = 10.0
WATCH_POLL_SECONDS = 0.05
WATCH_ROWS_AT_ONCE = 256
RANGE_ROWS_INLINE = 1_000  # about 2 ms; what is longer is read in a thread

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
_GET = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key=?"
_RANGE = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key>=? AND key<? ORDER BY key LIMIT ?"
_COUNT = "SELECT count(*) FROM kv WHERE key>=? AND key<?"
_EXISTS = "SELECT 1 FROM kv WHERE key>=? AND key<? LIMIT 1"
_REVISION_OF = "SELECT mod_rev FROM kv WHERE key=?"
_DELETE = "DELETE FROM kv WHERE key=?"
_NEWEST = "SELECT max(rev) FROM log"
# A written key of which nothing is known is mostly new. An upsert RETURNING what the cache needs takes 15 % longer.
_INSERT = "INSERT INTO kv VALUES(?,?,?,?,?,?) ON CONFLICT(key) DO NOTHING"
_UPDATE = "UPDATE kv SET value=?, mod_rev=?, session=?, check_sum=? WHERE key=?"

_BRING_BACK = "the bytes of files are safe in the stores: bring it back from a copy"

_encode = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(list[tuple[bytes, bytes | None]]).decode

Result = TypeVar("Result")
Row = tuple[bytes, bytes, int, int, int]


@dataclass(frozen=True)
class CatalogStatistics:
    """Counters since this engine was opened. `transactions_waited`: those that found the lock taken and went to a thread.
    `damage`: the newest record or page that proved to be damaged, or nothing."""

    transactions: int
    transactions_refused: int
    transactions_waited: int
    barriers: int
    barrier_callers: int
    checkpoints: int
    checkpoint_failures: int
    last_error: str
    damage: str


class SqliteCatalog:
    """A `KeyValue` on one SQLite file. Used by one event loop; any number of processes may have the file open.

    `get`, short ranges and `transact` answer without yielding to other tasks unless the database is busy.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        writer_label: str,
        session: str | None = None,
        create: bool = True,
        reserve_bytes: int = 0,
    ) -> "SqliteCatalog":
        """Open the catalog file, creating it when missing and `create`. Blocks; called once at start.

        `writer_label` names this process in log lines. `reserve_bytes` is how much room the log holds for a full drive; see
        `hold_room`. Raises `StoreError` if the file is foreign, newer, or can't be opened, `DamagedData` if it is damaged.
        """
        path = os.fspath(path)
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise StoreError(f"the catalog {path} can't be opened: its directory does not exist")
        if not create and not os.path.exists(path):
            raise StoreError(f"the catalog {path} is gone: no file in any store was touched; bring it back from a copy")
        return cls(path, writer_label, session, reserve_bytes)

    def __init__(self, path: str, writer_label: str, session: str | None, reserve_bytes: int = 0) -> None:
        self.path = path
        self.writer_label = writer_label
        self.session = session
        self._reserve_bytes = reserve_bytes
        self._connection = guarded(path, lambda: _prepare(path))
        self._wal = open_existing(path + "-wal")
        self._records = RecordCache(path)
        self._waiting_writer: sqlite3.Connection | None = None
        self._waiting_reader: sqlite3.Connection | None = None
        self._writer_limit = trio.CapacityLimiter(1)
        self._reader_limit = trio.CapacityLimiter(1)
        self._closed = False
        self._barrier_lock = trio.Lock()
        self._barrier_asked = 0
        self._barrier_covered = 0
        self._barrier_error: str | None = None
        self._barriers = 0
        self._watchers: set[trio.Event] = set()
        self._maintenance: threading.Thread | None = None
        self._maintained_at = float("-inf")
        self._transactions = 0
        self._refused = 0
        self._waited = 0
        self._checkpoints = 0
        self._checkpoint_failures = 0
        self._last_error = ""
        self._damage = ""

    # Reading

    async def get(self, key: bytes) -> Entry | None:
        await trio.lowlevel.checkpoint_if_cancelled()
        records = self._records
        records.refresh()
        known = records.get(key)
        if known is not MISSING:
            return cast(Entry | None, known)
        try:
            entry = _get(self._connection, key)
        except sqlite3.Error as error:
            if not _is_busy(error):
                raise self._noted(_translated(self.path, error)) from error
            return await self._read_in_thread(lambda connection: _get(connection, key))
        except DamagedData as damage:
            raise self._noted(damage) from None
        records.keep(key, entry)
        return entry

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        await trio.lowlevel.checkpoint_if_cancelled()
        first = prefix if after < prefix else after + b"\0"
        end = _prefix_end(prefix)
        inline = RANGE_ROWS_INLINE + 1 if limit is None else min(limit, RANGE_ROWS_INLINE + 1)
        entries = await self._read(lambda connection: _range(connection, first, end, inline))
        if len(entries) <= RANGE_ROWS_INLINE or limit == len(entries):
            return entries
        return await self._read_in_thread(lambda connection: _range(connection, first, end, -1 if limit is None else limit))

    async def count(self, prefix: bytes) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._records.refresh()
        known = self._records.count(prefix)
        if known is not None:
            return known
        header = self._records.header
        count = await self._read(lambda connection: int(connection.execute(_COUNT, (prefix, _prefix_end(prefix))).fetchone()[0]))
        if header == self._records.header:
            self._records.keep_count(prefix, count)
        return count

    async def revision(self) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self._read(_newest)

    async def _read(self, read: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return read(self._connection)
        except sqlite3.Error as error:
            if not _is_busy(error):
                raise self._noted(_translated(self.path, error)) from error
        except DamagedData as damage:
            raise self._noted(damage) from None
        return await self._read_in_thread(read)

    async def _read_in_thread(self, read: Callable[[sqlite3.Connection], Result]) -> Result:
        def run() -> Result:
            if self._waiting_reader is None:
                self._waiting_reader = _connect(self.path)
            return _patient(self.path, lambda connection: read(connection), self._waiting_reader)

        try:
            return await trio.to_thread.run_sync(run, limiter=self._reader_limit)
        except DamagedData as damage:
            raise self._noted(damage) from None

    # Writing

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        if len(compares) > COMPARES_MAX or len(operations) > OPERATIONS_MAX:
            raise ValueError(f"a transaction of {len(compares)} compares and {len(operations)} operations is too long")
        if len({operation.key for operation in operations}) != len(operations):
            raise ValueError("a transaction names one key twice")
        if self.session is None and any(isinstance(operation, Put) and operation.bound_to_session for operation in operations):
            raise ValueError("a key can't be bound to a session: this engine was opened without one")
        changed: dict[bytes, Written | None] = {}
        session = self.session
        return await self._transact(
            lambda connection, known: _apply(connection, known, compares, operations, session, changed), changed
        )

    async def end_session(self, session: str) -> int:
        """Delete every key bound to the session, at one revision; returns how many there were."""
        changed: dict[bytes, Written | None] = {}

        def end(connection: sqlite3.Connection, _known: RecordCache | None) -> TransactionResult:
            bound = "key IN (SELECT key FROM bound WHERE session=?) AND session=?"
            keys = connection.execute(f"SELECT key FROM kv WHERE {bound} ORDER BY key", (session, session)).fetchall()
            connection.execute(f"DELETE FROM kv WHERE {bound}", (session, session))
            connection.execute("DELETE FROM bound WHERE session=?", (session,))
            changed.update((key, None) for (key,) in keys)
            return _logged(connection, _newest(connection), [(key, None) for (key,) in keys])

        await self._transact(end, changed)
        return len(changed)

    async def _transact(
        self, apply: Callable[[sqlite3.Connection, RecordCache | None], TransactionResult], changed: dict[bytes, Written | None]
    ) -> TransactionResult:
        """`changed` is filled by `apply`: how the keys it wrote stand afterwards."""
        await trio.lowlevel.checkpoint_if_cancelled()
        records = self._records

        def apply_with_records(connection: sqlite3.Connection) -> TransactionResult:
            records.refresh()  # under the write lock: what changes after this is only ours
            return apply(connection, records)

        try:
            result = _transaction(self._connection, apply_with_records)
            if result.succeeded:
                records.committed(result.revision, changed)
        except sqlite3.Error as error:
            if not _is_busy(error) and not is_full(error):
                raise self._noted(_translated(self.path, error)) from error
            self._waited += 1
            attempt = self._transact_on_full_drive if is_full(error) else self._transact_patiently
            result = await trio.to_thread.run_sync(attempt, apply, limiter=self._writer_limit)
        self._transactions += 1
        if self._transactions % WAL_LOOKED_AT_EVERY == 0:
            self._maintain_when_due()
        if result.succeeded:
            self.poke()
        else:
            # Whoever lost repeats the transaction: let others run between its attempts.
            self._refused += 1
            await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    def _transact_patiently(
        self, apply: Callable[[sqlite3.Connection, RecordCache | None], TransactionResult]
    ) -> TransactionResult:
        if self._waiting_writer is None:
            self._waiting_writer = _connect(self.path)
        # The records in memory belong to the event loop's thread.
        return _patient(
            self.path,
            lambda connection: _transaction(connection, lambda connection: apply(connection, None)),
            self._waiting_writer,
        )

    def _transact_on_full_drive(
        self, apply: Callable[[sqlite3.Connection, RecordCache | None], TransactionResult]
    ) -> TransactionResult:
        """Begin the log anew in its own file, then as `_transact_patiently`. Raises `CatalogFull` if that is not possible."""
        connection = _connect(self.path)
        deadline = time.monotonic() + BUSY_SECONDS_MAX
        try:
            while not _checkpoint(connection, self._wal, keep_file=True) and time.monotonic() < deadline:
                time.sleep(0.01)  # others are reading what is to be written over
        except sqlite3.Error as error:
            raise self._noted(_translated(self.path, error)) from error
        finally:
            connection.close()
        self._hold_room_quietly()
        return self._transact_patiently(apply)

    async def make_durable(self) -> None:
        """See `KeyValue`. A failed sync is final: the kernel has marked the pages clean, a second sync would lie."""
        self._barrier_asked += 1
        ticket = self._barrier_asked
        async with self._barrier_lock:
            if self._barrier_error is not None:
                raise StoreError(self._barrier_error)
            if self._barrier_covered >= ticket:
                return
            covers = self._barrier_asked
            try:
                await trio.to_thread.run_sync(os.fdatasync, self._wal)
            except OSError as error:
                self._barrier_error = (
                    f"the catalog {self.path} can't be synced ({error}); what it acknowledged as durable before is safe;"
                    " check the drive, then restart the node"
                )
                raise self._noted(StoreError(self._barrier_error)) from error
            self._barriers += 1
            self._barrier_covered = covers

    # Watching

    async def watch(self, after_revision: int) -> AsyncIterator[list[Event]]:
        await trio.lowlevel.checkpoint()
        newest = await self._read(_newest)
        if after_revision > newest:
            raise CatalogCompacted(f"the catalog is at revision {newest}, before {after_revision}: it was restored or replaced")
        seen = after_revision
        while not self._closed:
            changed = trio.Event()
            self._watchers.add(changed)
            try:
                rows = await self._read(partial(_log_after, seen))
                for revision, events in rows:
                    if revision != seen + 1:
                        raise CatalogCompacted(f"the catalog's log begins after revision {seen}")
                    seen = revision
                    yield [Event(revision, key, value) for key, value in _decode_events(events)]
                if not rows:
                    with trio.move_on_after(WATCH_POLL_SECONDS):
                        await changed.wait()
            finally:
                self._watchers.discard(changed)

    def poke(self) -> None:
        """Let running watches look now instead of at their next poll."""
        for watcher in self._watchers:
            watcher.set()

    # Checkpoints

    def hold_room(self) -> int:
        """Hold room for what the log, its index and the database grow by when the drive is full; returns the bytes that lack.

        Blocks shortly. To be called at start and now and then. Raises `OSError` for a drive that is broken rather than full.
        """
        reserve = self._reserve_bytes
        if not reserve:
            return 0
        lacking = hold_beyond_end(self._wal, reserve)
        lacking += hold_beyond_end(kept_descriptor(self.path + "-shm"), 2 * INDEX_GROWTH_BYTES + reserve // 256)
        return lacking + hold_beyond_end(kept_descriptor(self.path), self._database_growth())

    def _database_growth(self) -> int:
        """Twice what copying the log would let the database grow by now (half of it is what must be held), and a little."""
        pending = self._records.database_pages * PAGE_SIZE - os.fstat(kept_descriptor(self.path)).st_size
        return 2 * max(0, pending) + self._reserve_bytes // 4

    def _hold_room_quietly(self) -> None:
        try:
            self.hold_room()
        except OSError as error:
            log.warning("catalog_room_not_held path=%s error=%s", self.path, error)

    def _maintain_when_due(self) -> None:
        """Start the maintenance thread if the write-ahead log has grown. A thread rather than a task, so that the transaction
        that noticed doesn't pay for it."""
        if self._maintenance is not None and self._maintenance.is_alive():
            return
        # A small drive, which has a small reserve, has no room for a long log either.
        soft = min(WAL_SIZE_BYTES_SOFT, 2 * self._reserve_bytes or WAL_SIZE_BYTES_SOFT)
        rested = time.monotonic() - self._maintained_at >= CHECKPOINT_INTERVAL_SECONDS_MIN
        if os.fstat(self._wal).st_size >= soft and rested:
            self._maintained_at = time.monotonic()
            task = self._maintain
        elif self._reserve_bytes and self._lacks_room():
            task = self._hold_room_quietly
        else:
            return
        self._maintenance = threading.Thread(target=task, name="catalog-maintenance", daemon=True)
        self._maintenance.start()

    def _lacks_room(self) -> bool:
        grown = lacking_beyond_end(self._wal, self._reserve_bytes)
        return bool(grown or lacking_beyond_end(kept_descriptor(self.path), self._database_growth()))

    def _maintain(self) -> None:
        try:
            connection = _connect(self.path)
            try:
                # On a drive that is nearly full, what the file is cut by might be taken before it is held again.
                keep_file = room_at(os.path.dirname(os.path.abspath(self.path))).free_bytes < 4 * self._reserve_bytes
                self._checkpoints += _checkpoint(connection, self._wal, keep_file=keep_file)
                self._hold_room_quietly()
                _patient(self.path, lambda connection: _transaction(connection, _count_checkpoint), connection)
                while _patient(self.path, lambda connection: _transaction(connection, _trim_log), connection):
                    pass
            finally:
                connection.close()
        except (sqlite3.Error, OSError, CatalogUnavailable, DamagedData) as error:
            self._checkpoint_failures += 1
            self._last_error = str(error)
            log.warning("catalog_checkpoint_failed path=%s writer=%s error=%s", self.path, self.writer_label, error)

    def statistics(self) -> CatalogStatistics:
        return CatalogStatistics(
            transactions=self._transactions,
            transactions_refused=self._refused,
            transactions_waited=self._waited,
            barriers=self._barriers,
            barrier_callers=self._barrier_asked,
            checkpoints=self._checkpoints,
            checkpoint_failures=self._checkpoint_failures,
            last_error=self._last_error,
            damage=self._damage,
        )

    def _noted(self, error: Exception) -> Exception:
        self._last_error = str(error)
        if isinstance(error, DamagedData):
            self._damage = str(error)
        return error

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.poke()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        if self._maintenance is not None:
            self._maintenance.join()
        for connection in (self._waiting_writer, self._waiting_reader, self._connection):
            if connection is not None:
                connection.close()
        os.close(self._wal)


# Functions below run in whichever thread owns the connection they are given.


def _connect(path: str) -> sqlite3.Connection:
    # Opening reads the file, and waits for another process that is opening it; a transaction of this connection never waits.
    if os.path.exists(path) and refuses_writes(os.path.dirname(os.path.abspath(path))):
        connection = connect_read_only(Path(path))
    else:
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS_MAX, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA cache_size=-8192")
        connection.execute("PRAGMA busy_timeout=0")
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(path: str) -> sqlite3.Connection:
    """A connection to the catalog file, made ready: ours, of a layout we know, in WAL mode."""
    connection = _connect(path)
    try:
        connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS_MAX * 1000)}")
        if not check_identity(path, connection):
            _patient(path, lambda connection: connection.execute("PRAGMA journal_mode=WAL").fetchone(), connection)
            _transaction(connection, lambda connection: _create(path, connection))
            _sync_directory(os.path.dirname(os.path.abspath(path)))
        (mode,) = _patient(path, lambda connection: connection.execute("PRAGMA journal_mode=WAL").fetchone(), connection)
        if mode != "wal":
            raise StoreError(f"the catalog {path} can't use a write-ahead log here (got {mode}): use a local file system")
        entry = _get(connection, FORMAT_KEY)
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


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _transaction(connection: sqlite3.Connection, apply: Callable[[sqlite3.Connection], Result]) -> Result:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = apply(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return result


def _apply(
    connection: sqlite3.Connection,
    known: RecordCache | None,
    compares: Sequence[Compare],
    operations: Sequence[Operation],
    session: str | None,
    changed: dict[bytes, Written | None],
) -> TransactionResult:
    """Compare and apply; `changed` is given each key as the transaction leaves it.

    `known` is current, because it was refreshed under the write lock: every statement it saves is 5 µs of the lock.
    """
    changed.clear()
    execute = connection.execute
    newest = known.newest if known is not None else None
    if newest is None:
        newest = _newest(connection)
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
    return _logged(connection, newest, events)


def _logged(connection: sqlite3.Connection, newest: int, events: list[tuple[bytes, bytes | None]]) -> TransactionResult:
    if not events:
        return TransactionResult(True, newest)
    connection.execute("INSERT INTO log VALUES(?,?)", (newest + 1, _encode(events)))
    return TransactionResult(True, newest + 1)


def _holds(connection: sqlite3.Connection, known: RecordCache | None, compare: Compare) -> bool:
    if isinstance(compare, EmptyRange):
        return connection.execute(_EXISTS, (compare.prefix, _prefix_end(compare.prefix))).fetchone() is None
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


def _newest(connection: sqlite3.Connection) -> int:
    return connection.execute(_NEWEST).fetchone()[0] or 0


def _get(connection: sqlite3.Connection, key: bytes) -> Entry | None:
    row = connection.execute(_GET, (key,)).fetchone()
    return None if row is None else _checked(row)


def _range(connection: sqlite3.Connection, first: bytes, end: bytes, limit: int) -> list[Entry]:
    return [_checked(row) for row in connection.execute(_RANGE, (first, end, limit))]


def _log_after(revision: int, connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
    return connection.execute(
        "SELECT rev, events FROM log WHERE rev>? ORDER BY rev LIMIT ?", (revision, WATCH_ROWS_AT_ONCE)
    ).fetchall()


def _checked(row: Row) -> Entry:
    key, value, created, modified, check_sum = row
    try:
        right = crc32(value, crc32(key)) == check_sum
    except TypeError:  # in a damaged page they may be anything
        right = False
    if not right:
        raise DamagedData(f"the catalog's record {key!r} fails its checksum; other files are not touched by that")
    return Entry(key, value, created, modified)


def _prefix_end(prefix: bytes) -> bytes:
    """The smallest key greater than every key with this prefix. Keys are ASCII up to names, so 0xff x 300 is past all of them."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\xff" * 300


def _checkpoint(connection: sqlite3.Connection, wal: int, *, keep_file: bool) -> int:
    """Copy the write-ahead log into the database, and empty it if that shuts writers out for a moment only. 1 if it is empty.

    With `keep_file` the log's file stays as long as it is and is written again from its beginning.

    While one pass copies and syncs, writers append; after a few there is little left, unless they are busier than the drive. Then
    it waits for the next time, and only a log that has grown far too long is emptied at the writers' expense.
    """
    for _ in range(CHECKPOINT_PASSES_MAX):
        (_, frames, copied) = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if frames - copied <= CHECKPOINT_FRAMES_LEFT_MAX:
            break
    else:
        if os.fstat(wal).st_size < WAL_SIZE_BYTES_HARD:
            return 0
    connection.execute("PRAGMA busy_timeout=50")
    (busy, _, _) = connection.execute(f"PRAGMA wal_checkpoint({'RESTART' if keep_file else 'TRUNCATE'})").fetchone()
    connection.execute("PRAGMA busy_timeout=0")
    return 0 if busy else 1


def _count_checkpoint(connection: sqlite3.Connection) -> None:
    """The first write after a checkpoint syncs the new header of the log: it happens here, not in an event loop."""
    connection.execute("UPDATE meta SET value=value+1 WHERE name='checkpoints'")


def _trim_log(connection: sqlite3.Connection) -> bool:
    """Delete some of the rows that are older than what is kept; whether there may be more."""
    keep_after = _newest(connection) - LOG_REVISIONS_KEPT
    return (
        connection.execute(
            "DELETE FROM log WHERE rev IN (SELECT rev FROM log WHERE rev<=? ORDER BY rev LIMIT ?)",
            (keep_after, LOG_REVISIONS_TRIMMED_AT_ONCE),
        ).rowcount
        == LOG_REVISIONS_TRIMMED_AT_ONCE
    )


def _patient(path: str, work: Callable[[sqlite3.Connection], Result], connection: sqlite3.Connection) -> Result:
    """Run the work, again while the database is locked. SQLite's own waiting starts at 1 ms and grows to 100 ms, for a lock
    that is held for 0.1 ms; short random pauses let many processes take turns."""
    deadline = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            return work(connection)
        except sqlite3.Error as error:
            if not _is_busy(error):
                raise _translated(path, error) from error
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
        translated = _translated(path, error)
        if isinstance(translated, CatalogUnavailable) and not _is_busy(error):
            raise StoreError(f"the catalog {path} can't be opened: {error}") from error
        raise translated from error
    except UnicodeDecodeError as error:  # of SQLite's own message, which names what it found in place of a name
        raise DamagedData(f"the catalog {path} is damaged ({error.reason}); {_BRING_BACK}") from error


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_busy(error: sqlite3.Error) -> bool:
    return _primary_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _translated(path: str, error: sqlite3.Error) -> Exception:
    code = _primary_code(error)
    no_text = code == 0 and "Could not decode" in str(error)  # Python's word for bytes that became text
    if no_text or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedData(f"the catalog {path} is damaged ({error}); {_BRING_BACK}")
    if is_full(error):
        return CatalogFull(f"the catalog {path} can't grow: no space left on its file system")
    if isinstance(error, sqlite3.ProgrammingError):
        return CatalogUnavailable(f"the catalog {path} is closed here ({error})")
    return CatalogUnavailable(f"the catalog {path} can't be used now: {error}")
