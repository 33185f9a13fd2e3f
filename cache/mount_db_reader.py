"""Another process's view of `mount.db`: the versions that wait for protection."""

import sqlite3
from pathlib import Path

from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.mount_db import REMEDY, WaitingVersion, connect_mount_db


class MountDatabaseReader:
    """What waits there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def waiting(self, limit: int) -> list[WaitingVersion]:
        """The local versions that have waited longest, and behind them prefixes; none while the database doesn't exist yet.

        Raises `DamagedData`, and `StoreError` where it can't be read now.
        """
        if self._connection is None:
            if not self._path.exists():
                return []
            self._connection = connect_mount_db(self._path, read_only=True)
        try:
            rows = self._connection.execute(
                "SELECT ino, vid, segment, size, exposed_ns, path_hint FROM file WHERE state = 2 ORDER BY exposed_ns LIMIT ?",
                (limit,),
            ).fetchall()
            prefixes = self._connection.execute(
                "SELECT * FROM prefix ORDER BY exposed_ns LIMIT ?", (limit - len(rows),)
            ).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):  # the writer hasn't made its tables yet
                return []
            raise StoreError(f"{self._path} can't be read now: {error}") from None
        except sqlite3.DatabaseError as error:
            raise DamagedData(f"{self._path} is damaged ({error}); {REMEDY}") from None
        return [WaitingVersion(*row) for row in rows] + [WaitingVersion._make((*row, True)) for row in prefixes]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
