"""The index of the shards a store holds: `agent.db`, SQLite, format 1. One writing process, the agent.

Only an index, and which catalog its shards belong to: the shard files are the truth. It is synced lazily, so after a power cut
it may lag behind; damaged or of another format, it is made anew. `ShardStore.recover` makes it agree with the files again.
"""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.drive_refusal import copy_in_memory, refuses_writes
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import Vid
from ckptfs.cache.sqlite_full import is_full

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class HeldShard:
    """One complete shard: the root that was acknowledged, the bytes of its file, and when it was stored (wall time). The root is
    empty where the footer could not be read as the index was made anew."""

    vid: Vid
    index: int
    root: bytes
    file_bytes: int
    stored_at_ns: int


class Held(NamedTuple):
    """How much is held in all."""

    shards: int
    file_bytes: int


class AgentDatabase:
    """The index. Blocking, safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Open the index, empty if it was absent, damaged or of another format: see `made_anew`. Raises `StoreError` on a full
        drive."""
        self._lock = threading.Lock()
        existed = path.exists()
        try:
            if existed and refuses_writes(path.parent):  # its files say again what is noted now
                self._database = self._prepare(copy_in_memory(path))
            else:
                self._database = self._open(path)
            self.made_anew = not existed
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter of SQLite's own message
            if isinstance(error, sqlite3.Error) and is_full(error):
                raise StoreError(
                    f"{path}: no space is left on its file system; the node needs a little to start: free some"
                ) from None
            if refuses_writes(path.parent):
                self._database = self._open(Path(":memory:"))
            else:
                for suffix in ("", "-wal", "-shm"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{path}{suffix}")
                self._database = self._open(path)
            self.made_anew = True

    @classmethod
    def _open(cls, path: Path) -> sqlite3.Connection:
        return cls._prepare(sqlite3.connect(path, isolation_level=None, check_same_thread=False))

    @staticmethod
    def _prepare(database: sqlite3.Connection) -> sqlite3.Connection:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute("PRAGMA cache_size=-1024")
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT_VERSION):
                raise sqlite3.DatabaseError(f"agent.db has format {found}")
            database.execute(
                "CREATE TABLE IF NOT EXISTS shards(vid BLOB NOT NULL, shard INTEGER NOT NULL, root BLOB NOT NULL,"
                " file_bytes INTEGER NOT NULL, stored_at_ns INTEGER NOT NULL, PRIMARY KEY(vid, shard)) WITHOUT ROWID, STRICT"
            )
            database.execute("CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID, STRICT")
            if not found:
                database.execute(f"PRAGMA user_version={FORMAT_VERSION}")
            if database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise sqlite3.DatabaseError("agent.db fails its check")
            database.execute("SELECT vid, shard, root, file_bytes, stored_at_ns FROM shards LIMIT 1").fetchone()
        except BaseException:
            database.close()
            raise
        return database

    def add(self, shards: Iterable[HeldShard]) -> None:
        """Enter these shards, in one transaction; an older row of the same shard is replaced. Raises `sqlite3.Error`."""
        self._in_transaction("INSERT OR REPLACE INTO shards VALUES(?, ?, ?, ?, ?)", map(astuple, shards))

    def remove(self, shards: Iterable[tuple[Vid, int]]) -> None:
        """Strike these shards out, in one transaction. Raises `sqlite3.Error`."""
        self._in_transaction("DELETE FROM shards WHERE vid = ? AND shard = ?", shards)

    def _in_transaction(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany(statement, rows)
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full drive ends it
                    self._database.execute("ROLLBACK")
                raise

    def get(self, vid: Vid, index: int) -> HeldShard | None:
        """The row of one shard."""
        with self._lock:
            row = self._database.execute("SELECT * FROM shards WHERE vid = ? AND shard = ?", (vid, index)).fetchone()
        return None if row is None else HeldShard(*row)

    def list(self, after: tuple[bytes, int] = (b"", -1), limit: int = 1000) -> list[HeldShard]:
        """Rows after that vid and index, in their order: ask again with the last one's to go on."""
        with self._lock:
            rows = self._database.execute(
                "SELECT * FROM shards WHERE (vid, shard) > (?, ?) ORDER BY vid, shard LIMIT ?", (*after, limit)
            ).fetchall()
        return [HeldShard(*row) for row in rows]

    def fact(self, name: str) -> bytes | None:
        """What was noted under this name, or None."""
        with self._lock:
            row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def set_fact(self, name: str, value: bytes) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO facts VALUES(?, ?)", (name, value))

    def held(self) -> Held:
        """Count and bytes of all rows."""
        with self._lock:
            return Held(*self._database.execute("SELECT count(*), coalesce(sum(file_bytes), 0) FROM shards").fetchone())

    def close(self) -> None:
        """Close the file; no other call may follow."""
        with self._lock:
            self._database.close()
