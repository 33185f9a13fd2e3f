"""Room on the drive that the SQLite catalog's files have before they need it, so that names can go when the drive is full.

The log and its index hold room beyond their ends: a transaction writes some 30 KiB into the log. When that is used up the log is
copied into the database and written again from its beginning, in the file it has. The database must not grow then: SQLite cuts
it to its length whenever all of the log is copied, so what it holds beyond its end may be gone. So it has free pages inside, the
*slack*, made by rows of `meta` that are put and taken out again; new pages come from there first. While the drive has room slack
is made again and again; new names, which would use it up, are refused before the drive is full.
"""

import os
import sqlite3
from collections.abc import Callable

from ckptfs.cache.kept_descriptors import kept_descriptor
from ckptfs.cache.reserve import hold_beyond_end, lacking_beyond_end, room_at

PAGE_SIZE = 4096
INDEX_GROWTH_BYTES = 32 * 1024  # at once, for 4096 pages of the log
SLACK_LEAVES_BYTES = 2 << 20  # more than is left where new names are refused
SLACK_BYTES_AT_ONCE = 1 << 20  # a few ms of write lock


class CatalogRoom:
    """The room of one catalog. `reserve_bytes` is the log's; with 0 nothing is held. Blocking, safe to use from several threads.

    `database_pages` says how many pages the database will have when all of the log is copied. Methods raise `OSError` for a drive
    that is broken rather than full.
    """

    def __init__(self, path: str, log: int, database_pages: Callable[[], int], reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self._path = path
        self._directory = os.path.dirname(os.path.abspath(path))
        self._log = log
        self._database_pages = database_pages

    def is_scarce(self) -> bool:
        """Whether so little is free that what is given back may be taken by others before it is held again."""
        return room_at(self._directory).free_bytes < 4 * self.reserve_bytes

    def hold(self) -> int:
        """Have the files hold what they should; returns the bytes that lack, 0 unless the drive is full."""
        if not self.reserve_bytes:
            return 0
        lacking = hold_beyond_end(self._log, self.reserve_bytes)
        index_bytes = 2 * INDEX_GROWTH_BYTES + self.reserve_bytes // 256
        lacking += hold_beyond_end(kept_descriptor(self._path + "-shm"), index_bytes)
        hold_beyond_end(kept_descriptor(self._path), self._database_growth())
        return lacking

    def lacks(self) -> bool:
        """Whether `hold` has something to do."""
        if not self.reserve_bytes:
            return False
        log_lacks = lacking_beyond_end(self._log, self.reserve_bytes)
        return bool(log_lacks or lacking_beyond_end(kept_descriptor(self._path), self._database_growth()))

    def _database_growth(self) -> int:
        """Twice what copying the log lets the database grow by (half of it is what must be held), and a little."""
        pending = self._database_pages() * PAGE_SIZE - os.fstat(kept_descriptor(self._path)).st_size
        return 2 * max(0, pending) + self.reserve_bytes // 4

    def wants_slack(self, connection: sqlite3.Connection) -> bool:
        """Whether less than half of the slack is left, and the drive has room for more. Raises `sqlite3.Error`."""
        lacking = self._slack_lacks(connection)
        return lacking > self.reserve_bytes // 8 and room_at(self._directory).free_bytes > lacking + SLACK_LEAVES_BYTES

    def is_short(self, connection: sqlite3.Connection) -> bool:
        """Whether less than half of the slack is left, and the drive has no room for more. Raises `sqlite3.Error`."""
        return self._slack_lacks(connection) > self.reserve_bytes // 8 and self.is_scarce()

    def put_slack(self, connection: sqlite3.Connection, number: int) -> bool:
        """In a transaction: put that row, from 0 on; False if all are there. They take what is free, and more as it lacks."""
        size = min(SLACK_BYTES_AT_ONCE, self.reserve_bytes // 4 - number * SLACK_BYTES_AT_ONCE)
        if size <= 0:
            return False
        connection.execute("INSERT OR REPLACE INTO meta VALUES(?, zeroblob(?))", (f"slack-{number}", size))
        return True

    @staticmethod
    def free_slack(connection: sqlite3.Connection) -> None:
        """In a transaction: take all rows out, also those that a killed process left."""
        connection.execute("DELETE FROM meta WHERE name >= 'slack-' AND name < 'slack.'")

    def _slack_lacks(self, connection: sqlite3.Connection) -> int:
        (free_pages,) = connection.execute("PRAGMA freelist_count").fetchone()
        return max(0, self.reserve_bytes // 4 - int(free_pages) * PAGE_SIZE)
