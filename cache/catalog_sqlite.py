"""The catalog engine for the nodes of one machine: one SQLite file in WAL mode, opened by every process.

Tables (layout version 1, kept in `PRAGMA user_version`; `application_id` says that the file is ours)::

    kv    key BLOB PRIMARY KEY, value BLOB, create_rev, mod_rev, session TEXT|NULL, check_sum   WITHOUT ROWID
    log   rev INTEGER PRIMARY KEY, events BLOB    one row a transaction: msgpack [[key, value|nil], …]
    bound session TEXT, key BLOB                  every key ever bound to the session: where to look when it ends, no more
    meta  name TEXT PRIMARY KEY, value            `checkpoints`: written after each checkpoint; `slack-<n>`: see `catalog_room`

`check_sum` is the CRC-32 of key and value: SQLite has none of its own, and a flipped bit in a record must be an error
rather than another record. The newest revision is `max(rev)` of the log, which always keeps its last row.

Why it is built this way. A transaction takes some tens of microseconds, less than the way to a thread and back, so it runs
in the event loop's own thread; but it never waits there: a lock held by another process (SQLITE_BUSY) sends the same
transaction to a worker thread that waits on a connection of its own. Commits are not synced (`synchronous=NORMAL`, no
automatic checkpoint); `make_durable` syncs the write-ahead log beside running transactions, one sync for all who asked
before it began. Checkpoints and trimming the log happen in a thread of their own (`catalog_maintenance`).

On a full drive names must still go: see `catalog_room`. A log that can't grow is copied into the database and begun anew, in the
room its file has. New names are refused before they come here.

SQLite's locks are POSIX locks, which a process loses when it closes *any* descriptor of the locked file: nothing here may
close one of the database or the `-shm` (see `kept_descriptors`), only of the `-wal`, which is never locked. Local file systems
only.
"""

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from ckptfs.cache.catalog_connection import BUSY_SECONDS_MAX, connect, guarded, is_busy, patient, prepare, transaction, translated
from ckptfs.cache.catalog_kv import (
    COMPARES_MAX,
    Compare,
    Entry,
    Event,
    Operation,
    TransactionResult,
    check_transaction,
    prefix_end,
)
from ckptfs.cache.catalog_maintenance import CatalogMaintenance, checkpoint
from ckptfs.cache.catalog_rows import (
    COUNT,
    apply_changes,
    log_events,
    newest_revision,
    read_entries,
    read_entry,
    read_log,
    read_range,
    skip_revisions,
)
from ckptfs.cache.errors import CatalogCompacted, DamagedData, SessionEnded, StoreError
from ckptfs.cache.kept_descriptors import open_existing
from ckptfs.cache.record_cache import MISSING, NEIGHBOURS_SUFFIX_SIZE, RecordCache, Written
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.sqlite_full import is_full

log = logging.getLogger(__name__)

WAL_LOOKED_AT_EVERY = 64  # transactions: each adds some 30 KiB
WATCH_POLL_SECONDS = 0.05
READ_AHEAD_AFTER = 3
READ_AHEAD_ROWS = 256
RANGE_ROWS_INLINE = 1_000  # about 2 ms; what is longer is read in a thread

_decode_events = msgspec.msgpack.Decoder(list[tuple[bytes, bytes | None]]).decode

Result = TypeVar("Result")


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
        self._connection = guarded(path, lambda: prepare(path))
        self._wal = open_existing(path + "-wal")
        self._records = RecordCache(path)
        self._waiting_writer: sqlite3.Connection | None = None
        self._waiting_reader: sqlite3.Connection | None = None
        self._writer_limit = trio.CapacityLimiter(1)
        self._reader_limit = trio.CapacityLimiter(1)
        self._closed = False
        self._fence: SessionFence | None = None
        self._barrier_lock = trio.Lock()
        self._barrier_asked = 0
        self._barrier_covered = 0
        self._barrier_error: str | None = None
        self._barriers = 0
        self._watchers: set[trio.Event] = set()
        self._maintenance = CatalogMaintenance(path, writer_label, self._wal, self._records, reserve_bytes)
        self._transactions = 0
        self._refused = 0
        self._waited = 0
        self._last_error = ""
        self._damage = ""

    # Reading

    async def catch_up(self) -> None:
        """Nothing to do: reads go straight to the file."""

    def known(self, key: bytes) -> Any:
        """The key's entry or None if that is in memory and as of now, else `MISSING`."""
        return self._records.current(key)

    def known_count(self, prefix: bytes) -> int | None:
        """As `count`, if that is in memory and as of now."""
        self._records.refresh()
        return self._records.count(prefix)

    async def get(self, key: bytes) -> Entry | None:
        records = self._records
        known: Entry | None = records.current(key)
        if known is not MISSING:
            return known
        records.refresh()
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            entry = read_entry(self._connection, key)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise self._noted(translated(self.path, error)) from error
            return await self._read_in_thread(lambda connection: read_entry(connection, key))
        except DamagedData as damage:
            raise self._noted(damage) from None
        records.keep(key, entry)
        if records.missed(key) == READ_AHEAD_AFTER:
            self._read_ahead(key)
        return entry

    def _read_ahead(self, key: bytes) -> None:
        """Who asked for some neighbours one by one will ask for the others: together they cost a tenth. And where all of them
        are known, so is what isn't there: nobody makes a file without looking for it first."""
        group = key[:-NEIGHBOURS_SUFFIX_SIZE]
        with contextlib.suppress(sqlite3.Error, DamagedData):  # whoever asks for what is damaged is told
            entries = read_range(self._connection, group, prefix_end(group), READ_AHEAD_ROWS + 1)
            self._records.keep_neighbours(key, entries, all_of_them=len(entries) <= READ_AHEAD_ROWS)

    async def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        await trio.lowlevel.checkpoint_if_cancelled()
        entries: list[Entry | None] = []
        for start in range(0, len(keys), COMPARES_MAX):
            some = keys[start : start + COMPARES_MAX]
            found = await self._read(partial(read_entries, keys=some))
            entries += map(found.get, some)
        return entries

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        await trio.lowlevel.checkpoint_if_cancelled()
        first = prefix if after < prefix else after + b"\0"
        end = prefix_end(prefix)
        inline = RANGE_ROWS_INLINE + 1 if limit is None else min(limit, RANGE_ROWS_INLINE + 1)
        entries = await self._read(lambda connection: read_range(connection, first, end, inline))
        if len(entries) <= RANGE_ROWS_INLINE or limit == len(entries):
            return entries
        return await self._read_in_thread(lambda connection: read_range(connection, first, end, -1 if limit is None else limit))

    async def count(self, prefix: bytes) -> int:
        self._records.refresh()
        known = self._records.count(prefix)
        if known is not None:
            return known
        await trio.lowlevel.checkpoint_if_cancelled()
        header = self._records.header
        count = await self._read(lambda connection: int(connection.execute(COUNT, (prefix, prefix_end(prefix))).fetchone()[0]))
        if header == self._records.header:
            self._records.keep_count(prefix, count)
        return count

    async def revision(self) -> int:
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self._read(newest_revision)

    async def _read(self, read: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return read(self._connection)
        except sqlite3.Error as error:
            if not is_busy(error):
                raise self._noted(translated(self.path, error)) from error
        except DamagedData as damage:
            raise self._noted(damage) from None
        return await self._read_in_thread(read)

    async def _read_in_thread(self, read: Callable[[sqlite3.Connection], Result]) -> Result:
        def run() -> Result:
            if self._waiting_reader is None:
                self._waiting_reader = connect(self.path)
            return patient(self.path, lambda connection: read(connection), self._waiting_reader)

        try:
            return await trio.to_thread.run_sync(run, limiter=self._reader_limit)
        except DamagedData as damage:
            raise self._noted(damage) from None

    # Writing

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        check_transaction(compares, operations, self.session)
        changed: dict[bytes, Written | None] = {}
        session, fence = self.session, self._fence
        return await self._transact(
            lambda connection, known: apply_changes(connection, known, compares, operations, session, changed, fence), changed
        )

    def transact_together(
        self, transactions: Sequence[tuple[Sequence[Compare], Sequence[Operation]]]
    ) -> list[TransactionResult | SessionEnded] | None:
        """What `transact` would give for each of them, one after the other, with one commit for all: it costs as much as what
        is committed. None where that would take waiting: then nothing was changed, and `transact` waits."""
        records = self._records
        results: list[TransactionResult | SessionEnded] = []

        def apply(connection: sqlite3.Connection) -> None:
            records.refresh()
            for compares, operations in transactions:
                changed: dict[bytes, Written | None] = {}
                try:
                    result = apply_changes(connection, records, compares, operations, self.session, changed, self._fence)
                except SessionEnded as ended:
                    results.append(ended)
                    continue
                if result.succeeded:
                    records.written(result.revision, changed)
                results.append(result)

        try:
            transaction(self._connection, apply)
        except BaseException as error:
            records.forget()  # what was written for the next of them to be compared with
            if isinstance(error, sqlite3.Error):
                return None
            raise
        records.follow_commit()
        self._count(len(transactions))
        self.poke()
        return results

    def fence_with(self, fence: SessionFence) -> None:
        self._fence = fence

    async def begin_at(self, revision: int) -> None:
        """Have the revisions of a catalog that is being filled go on after this one. Nothing happens if they are that far."""
        await self._transact(lambda connection, _: skip_revisions(connection, revision), {})

    async def end_session(self, session: str) -> int:
        """Delete every key bound to the session, at one revision; returns how many there were."""
        changed: dict[bytes, Written | None] = {}

        def end(connection: sqlite3.Connection, _known: RecordCache | None) -> TransactionResult:
            bound = "key IN (SELECT key FROM bound WHERE session=?) AND session=?"
            keys = connection.execute(f"SELECT key FROM kv WHERE {bound} ORDER BY key", (session, session)).fetchall()
            connection.execute(f"DELETE FROM kv WHERE {bound}", (session, session))
            connection.execute("DELETE FROM bound WHERE session=?", (session,))
            changed.update((key, None) for (key,) in keys)
            return log_events(connection, newest_revision(connection), [(key, None) for (key,) in keys])

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
            result = transaction(self._connection, apply_with_records)
            if result.succeeded:
                records.committed(result.revision, changed)
        except sqlite3.Error as error:
            if not is_busy(error) and not is_full(error):
                raise self._noted(translated(self.path, error)) from error
            self._waited += 1
            attempt = self._transact_on_full_drive if is_full(error) else self._transact_patiently
            result = await trio.to_thread.run_sync(attempt, apply, limiter=self._writer_limit)
        self._count(1)
        if result.succeeded:
            self.poke()
        else:
            # Whoever lost repeats the transaction: let others run between its attempts.
            self._refused += 1
            await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    def _count(self, transactions: int) -> None:
        before = self._transactions // WAL_LOOKED_AT_EVERY
        self._transactions += transactions
        if self._transactions // WAL_LOOKED_AT_EVERY != before:
            self._maintenance.when_due(self._connection)

    def _transact_patiently(
        self, apply: Callable[[sqlite3.Connection, RecordCache | None], TransactionResult]
    ) -> TransactionResult:
        if self._waiting_writer is None:
            self._waiting_writer = connect(self.path)
        # The records in memory belong to the event loop's thread.
        return patient(
            self.path,
            lambda connection: transaction(connection, lambda connection: apply(connection, None)),
            self._waiting_writer,
        )

    def _transact_on_full_drive(
        self, apply: Callable[[sqlite3.Connection, RecordCache | None], TransactionResult]
    ) -> TransactionResult:
        """Begin the log anew in its own file, then as `_transact_patiently`. Raises `CatalogFull` if that is not possible."""
        connection = connect(self.path)
        deadline = time.monotonic() + BUSY_SECONDS_MAX
        try:
            while not checkpoint(connection, self._wal, keep_file=lambda: True) and time.monotonic() < deadline:
                time.sleep(0.01)  # others are reading what is to be written over
        except sqlite3.Error as error:
            log.warning("catalog_log_not_begun_anew path=%s error=%s", self.path, error)
            raise self._noted(translated(self.path, error)) from error
        finally:
            connection.close()
        self._maintenance.hold_room_quietly()
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

    async def watch(self, after_revision: int) -> AsyncGenerator[list[Event], None]:
        await trio.lowlevel.checkpoint()
        newest = await self._read(newest_revision)
        if after_revision > newest:
            raise CatalogCompacted(f"the catalog is at revision {newest}, before {after_revision}: it was restored or replaced")
        seen = after_revision
        while not self._closed:
            changed = trio.Event()
            self._watchers.add(changed)
            try:
                rows = await self._read(partial(read_log, seen))
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

    def hold_room(self) -> int:
        """See `CatalogMaintenance.hold_room`."""
        return self._maintenance.hold_room()

    def is_short_of_room(self) -> bool:
        """See `KeyValue`."""
        return self._maintenance.is_short_of_room(self._connection)

    def statistics(self) -> CatalogStatistics:
        return CatalogStatistics(
            transactions=self._transactions,
            transactions_refused=self._refused,
            transactions_waited=self._waited,
            barriers=self._barriers,
            barrier_callers=self._barrier_asked,
            checkpoints=self._maintenance.checkpoints,
            checkpoint_failures=self._maintenance.failures,
            last_error=self._last_error or self._maintenance.last_error,
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
        self._maintenance.join()
        for connection in (self._waiting_writer, self._waiting_reader, self._connection):
            if connection is not None:
                connection.close()
        self._records.close()
        os.close(self._wal)
