"""Keeping the catalog's SQLite file in shape, beside its transactions: checkpoints, the log's length, room for a full drive."""

import logging
import os
import sqlite3
import threading
import time

from ckptfs.cache.catalog_connection import connect, patient, transaction
from ckptfs.cache.catalog_rows import count_checkpoint, trim_log
from ckptfs.cache.errors import CatalogUnavailable, DamagedData
from ckptfs.cache.kept_descriptors import kept_descriptor
from ckptfs.cache.record_cache import RecordCache
from ckptfs.cache.reserve import hold_beyond_end, lacking_beyond_end, room_at

log = logging.getLogger(__name__)

WAL_SIZE_BYTES_SOFT = 64 * 1024 * 1024  # a page that is written often is copied once
WAL_SIZE_BYTES_HARD = 256 * 1024 * 1024
CHECKPOINT_PASSES_MAX = 4
CHECKPOINT_FRAMES_LEFT_MAX = 256  # 1 MiB
PAGE_SIZE = 4096
INDEX_GROWTH_BYTES = 32 * 1024  # at once, for 4096 pages of the log
CHECKPOINT_INTERVAL_SECONDS_MIN = 1.0


class CatalogMaintenance:
    """What one process does for the file, in threads of its own.

    `wal` is a descriptor of the write-ahead log, the caller's. `reserve_bytes` is how much room the log holds for a full drive;
    see `hold_room`.
    """

    def __init__(self, path: str, writer_label: str, wal: int, records: RecordCache, reserve_bytes: int) -> None:
        self._path = path
        self._writer_label = writer_label
        self._wal = wal
        self._records = records
        self._reserve_bytes = reserve_bytes
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
        """Hold room for what the log, its index and the database grow by when the drive is full; returns the bytes that lack.

        Blocks shortly. To be called at start and now and then. Raises `OSError` for a drive that is broken rather than full.
        """
        reserve = self._reserve_bytes
        if not reserve:
            return 0
        lacking = hold_beyond_end(self._wal, reserve)
        lacking += hold_beyond_end(kept_descriptor(self._path + "-shm"), 2 * INDEX_GROWTH_BYTES + reserve // 256)
        return lacking + hold_beyond_end(kept_descriptor(self._path), self._database_growth())

    def _database_growth(self) -> int:
        """Twice what copying the log would let the database grow by now (half of it is what must be held), and a little."""
        pending = self._records.database_pages * PAGE_SIZE - os.fstat(kept_descriptor(self._path)).st_size
        return 2 * max(0, pending) + self._reserve_bytes // 4

    def hold_room_quietly(self) -> None:
        """As `hold_room`; a broken drive is logged."""
        try:
            self.hold_room()
        except OSError as error:
            log.warning("catalog_room_not_held path=%s error=%s", self._path, error)

    def when_due(self) -> None:
        """Start the maintenance thread if the write-ahead log has grown. A thread rather than a task, so that the transaction
        that noticed doesn't pay for it."""
        if self._thread is not None and self._thread.is_alive():
            return
        # A small drive, which has a small reserve, has no room for a long log either.
        soft = min(WAL_SIZE_BYTES_SOFT, 2 * self._reserve_bytes or WAL_SIZE_BYTES_SOFT)
        rested = time.monotonic() - self._maintained_at >= CHECKPOINT_INTERVAL_SECONDS_MIN
        if os.fstat(self._wal).st_size >= soft and rested:
            self._maintained_at = time.monotonic()
            task = self._maintain
        elif self._reserve_bytes and self._lacks_room():
            task = self.hold_room_quietly
        else:
            return
        self._thread = threading.Thread(target=task, name="catalog-maintenance", daemon=True)
        self._thread.start()

    def _lacks_room(self) -> bool:
        grown = lacking_beyond_end(self._wal, self._reserve_bytes)
        return bool(grown or lacking_beyond_end(kept_descriptor(self._path), self._database_growth()))

    def _maintain(self) -> None:
        try:
            connection = connect(self._path)
            try:
                # On a drive that is nearly full, what the file is cut by might be taken before it is held again.
                keep_file = room_at(os.path.dirname(os.path.abspath(self._path))).free_bytes < 4 * self._reserve_bytes
                self.checkpoints += checkpoint(connection, self._wal, keep_file=keep_file)
                self.hold_room_quietly()
                patient(self._path, lambda connection: transaction(connection, count_checkpoint), connection)
                while patient(self._path, lambda connection: transaction(connection, trim_log), connection):
                    pass
            finally:
                connection.close()
        except (sqlite3.Error, OSError, CatalogUnavailable, DamagedData) as error:
            self.failures += 1
            self.last_error = str(error)
            log.warning("catalog_checkpoint_failed path=%s writer=%s error=%s", self._path, self._writer_label, error)


def checkpoint(connection: sqlite3.Connection, wal: int, *, keep_file: bool) -> int:
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
