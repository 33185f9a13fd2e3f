"""Keeping the catalog's SQLite file in shape, beside its transactions: checkpoints, the log's length, room for a full drive."""

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import count

from ckptfs.cache.catalog_connection import connect, patient, transaction
from ckptfs.cache.catalog_room import CatalogRoom
from ckptfs.cache.catalog_rows import count_checkpoint, trim_log
from ckptfs.cache.errors import CatalogUnavailable, DamagedData
from ckptfs.cache.record_cache import RecordCache

log = logging.getLogger(__name__)

WAL_SIZE_BYTES_SOFT = 64 * 1024 * 1024  # a page that is written often is copied once
WAL_SIZE_BYTES_HARD = 256 * 1024 * 1024
CHECKPOINT_PASSES_MAX = 4
CHECKPOINT_FRAMES_LEFT_MAX = 256  # 1 MiB
CHECKPOINT_INTERVAL_SECONDS_MIN = 1.0
SLACK_LOOKED_AT_SECONDS = 5.0
LOG_REVISIONS_KEPT = 100_000
LOG_REVISIONS_KEPT_WHEN_SHORT = 1_000


class CatalogMaintenance:
    """What one process does for the file, in threads of its own.

    `wal` is a descriptor of the write-ahead log, the caller's. `reserve_bytes` is how much room the log holds for a full drive;
    see `hold_room`.
    """

    def __init__(self, path: str, writer_label: str, wal: int, records: RecordCache, reserve_bytes: int) -> None:
        self._path = path
        self._writer_label = writer_label
        self._wal = wal
        self._room = CatalogRoom(path, wal, lambda: records.database_pages, reserve_bytes)
        self._slack_looked_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._maintained_at = float("-inf")
        self.checkpoints = 0
        self.failures = 0
        self.last_error = ""

    def join(self) -> None:
        """Wait for what is being done."""
        if self._thread is not None:
            self._thread.join()

    def hold_room(self) -> int:
        """Have room for what must go on when the drive is full (see `catalog_room`); returns the bytes that lack.

        Blocks shortly. To be called at start and now and then. Raises `OSError` for a drive that is broken rather than full.
        """
        lacking = self._room.hold()
        if time.monotonic() - self._slack_looked_at >= SLACK_LOOKED_AT_SECONDS:
            self._slack_looked_at = time.monotonic()
            self._make_slack_quietly()
        return lacking

    def is_short_of_room(self, connection: sqlite3.Connection) -> bool:
        """See `KeyValue`."""
        try:
            return self._room.is_short(connection)
        except (sqlite3.Error, OSError):
            return False  # whatever it is, the transaction will say

    def _make_slack_quietly(self) -> None:
        try:
            connection = connect(self._path)
            try:
                self._make_slack(connection)
            finally:
                connection.close()
        except (sqlite3.Error, OSError, CatalogUnavailable, DamagedData) as error:
            log.info("catalog_slack_not_made path=%s error=%s", self._path, error)  # the next time

    def _make_slack(self, connection: sqlite3.Connection) -> None:
        if self._room.is_short(connection):
            # Old rows of the log are whole pages, and every removal of a name adds a row.
            self._trim(connection, min(LOG_REVISIONS_KEPT, LOG_REVISIONS_KEPT_WHEN_SHORT))
        if not self._room.wants_slack(connection):
            return
        try:
            for number in count():
                put = partial(self._room.put_slack, number=number)
                if not patient(self._path, partial(transaction, apply=put), connection):
                    break
        finally:
            patient(self._path, partial(transaction, apply=self._room.free_slack), connection)
        self._room.hold()

    def _trim(self, connection: sqlite3.Connection, kept: int) -> None:
        trim = partial(trim_log, kept=kept)
        while patient(self._path, partial(transaction, apply=trim), connection):
            pass

    def hold_room_quietly(self) -> None:
        """As `hold_room`, of room beyond the files' ends only; a broken drive is logged."""
        try:
            self._room.hold()
        except OSError as error:
            log.warning("catalog_room_not_held path=%s error=%s", self._path, error)

    def when_due(self, connection: sqlite3.Connection) -> None:
        """Start the maintenance thread if the write-ahead log has grown, or room is to be made. A thread rather than a task, so
        that the transaction that noticed doesn't pay for it. `connection` is the caller's, to look with."""
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            task = self._due(connection)
        except (sqlite3.Error, OSError) as error:  # the transaction stands: the next one looks again
            log.warning("catalog_not_looked_at path=%s error=%s", self._path, error)
            return
        if task is not None:
            self._thread = threading.Thread(target=task, name="catalog-maintenance", daemon=True)
            self._thread.start()

    def _due(self, connection: sqlite3.Connection) -> Callable[[], None] | None:
        # A small drive, which has a small reserve, has no room for a long log either.
        soft = min(WAL_SIZE_BYTES_SOFT, 2 * self._room.reserve_bytes or WAL_SIZE_BYTES_SOFT)
        rested = time.monotonic() - self._maintained_at >= CHECKPOINT_INTERVAL_SECONDS_MIN
        if os.fstat(self._wal).st_size >= soft and rested:
            self._maintained_at = time.monotonic()
            return self._maintain
        if self._room.lacks():
            return self.hold_room_quietly
        if self._room.wants_slack(connection) or self._room.is_short(connection):
            return self._make_slack_quietly
        return None

    def _maintain(self) -> None:
        try:
            connection = connect(self._path)
            try:
                self.checkpoints += checkpoint(connection, self._wal, keep_file=self._room.is_scarce)
                self.hold_room_quietly()
                self._make_slack(connection)
                patient(self._path, lambda connection: transaction(connection, count_checkpoint), connection)
                self._trim(connection, LOG_REVISIONS_KEPT)
            finally:
                connection.close()
        except (sqlite3.Error, OSError, CatalogUnavailable, DamagedData) as error:
            self.failures += 1
            self.last_error = str(error)
            log.warning("catalog_checkpoint_failed path=%s writer=%s error=%s", self._path, self._writer_label, error)


def checkpoint(connection: sqlite3.Connection, wal: int, *, keep_file: Callable[[], bool]) -> int:
    """Copy the write-ahead log into the database, and empty it if that shuts writers out for a moment only. 1 if it is empty.

    If `keep_file` says so in the end, the log's file stays as long as it is and is written again from its beginning: a drive can
    become full while the log is copied, and what cutting the file gives back others may take.

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
    (busy, _, _) = connection.execute(f"PRAGMA wal_checkpoint({'RESTART' if keep_file() else 'TRUNCATE'})").fetchone()
    connection.execute("PRAGMA busy_timeout=0")
    return 0 if busy else 1
