"""Whole copies of small files: `small_copies.db`, SQLite, format 1. One writing process, the agent.

One row is one version's content (below 64 KiB) with what it takes to rebuild its name. A batch of rows is one
transaction, synced to the drive before its roots are returned (`synchronous=FULL`): a thousand small files cost a few
syncs, not a thousand. The database is not an index: it holds the bytes, so a damaged one is an error, never made anew.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.checksum import Buffer, cell_hash, content_root
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import ID_SIZE, InodeNumber, Vid
from ckptfs.cache.sqlite_full import is_full
from ckptfs.replication.errors import ShardConflict, ShardDamaged, ShardNotFound, StoreFailed, StoreFull

FORMAT_VERSION = 1
COPY_SIZE_MAX = (64 << 10) - 1
"""The largest content kept as copies, in bytes; larger ones are striped."""
BATCH_COUNT_MAX = 256
PATH_HINT_SIZE_MAX = 4096


class SmallCopy(NamedTuple):
    """One version's whole content. `size` is its length; `path_hint` and `revision` as in a shard's footer."""

    vid: Vid
    ino: InodeNumber
    size: int
    path_hint: bytes
    revision: int
    content: Buffer


class HeldCopy(NamedTuple):
    """A row without its content."""

    vid: Vid
    ino: InodeNumber
    size: int
    path_hint: bytes
    revision: int
    root: bytes
    stored_at_ns: int


_Row = tuple[Vid, InodeNumber, int, bytes, int, bytes, int, Buffer]
"""A row's columns in their order: `HeldCopy`, and the content."""


def copy_root(vid: Vid, content: Buffer) -> bytes:
    """The content root of a version kept as copies: its one cell is the whole content."""
    return content_root(vid, len(content), len(content), cell_hash(content))


def _is_right(vid: Vid, root: bytes, size: int, content: bytes) -> bool:
    """Whether a row's fields belong together."""
    return 1 <= len(content) == size and copy_root(vid, content) == root


class SmallCopies:
    """The copies a store holds. Blocking, safe to use from several threads."""

    def __init__(self, path: Path, *, reserve_bytes: int = 0, free_bytes: Callable[[], int] | None = None) -> None:
        """Open the database, making it if absent. `free_bytes` says how much shards and copies may still take.

        Raises `StoreError` for a damaged database or one of another format, and on a full drive.
        """
        self._lock = threading.Lock()
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes
        self._failed = ""
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=FULL")
                self._database.execute("PRAGMA cache_size=-2048")
                found = self._database.execute("PRAGMA user_version").fetchone()[0]
                if found not in (0, FORMAT_VERSION):
                    raise StoreError(f"{path} has format {found}, this program reads {FORMAT_VERSION}; nothing was changed")
                self._database.execute(
                    "CREATE TABLE IF NOT EXISTS copies(vid BLOB NOT NULL UNIQUE, ino INTEGER NOT NULL, size INTEGER NOT NULL,"
                    " path_hint BLOB NOT NULL, revision INTEGER NOT NULL, root BLOB NOT NULL, stored_at_ns INTEGER NOT NULL,"
                    " content BLOB NOT NULL) STRICT"
                )
                if not found:
                    self._database.execute(f"PRAGMA user_version={FORMAT_VERSION}")
            except BaseException:
                self._database.close()
                raise
        except sqlite3.DatabaseError as error:
            if is_full(error):
                raise StoreError(
                    f"{path}: no space is left on its file system; the node needs a little to start: free some"
                ) from None
            raise StoreError(
                f"{path} can't be read ({error}); move it aside: other nodes hold the same copies, and repair makes them again"
            ) from None

    def put(self, copies: Sequence[SmallCopy]) -> list[bytes]:
        """Store a batch in one synced transaction and return the content roots, computed from what is stored.

        A right copy that is there already is kept, a damaged one replaced. Raises `ShardConflict` (other content under this
        vid; nothing of the batch was stored), `StoreFull`, `StoreFailed`, `ValueError` (empty, too large, too many).
        """
        if len(copies) > BATCH_COUNT_MAX:
            raise ValueError(f"a batch of {len(copies)} copies")
        now = time.time_ns()
        rows: list[_Row] = []
        roots: list[bytes] = []
        for copy in copies:
            if len(copy.vid) != ID_SIZE or not 1 <= len(copy.content) <= COPY_SIZE_MAX or len(copy.content) != copy.size:
                raise ValueError(f"a copy of {copy.size} bytes with {len(copy.content)}, vid {copy.vid.hex()}")
            if len(copy.path_hint) > PATH_HINT_SIZE_MAX:
                raise ValueError(f"a path of {len(copy.path_hint)} bytes")
            root = copy_root(copy.vid, copy.content)
            roots.append(root)
            rows.append((copy.vid, copy.ino, copy.size, copy.path_hint, copy.revision, root, now, copy.content))
        with self._lock:
            if self._failed:
                raise StoreFailed(self._failed)
            if self._free_bytes is not None and sum(copy.size for copy in copies) + self._reserve_bytes > self._free_bytes():
                raise StoreFull("the copies don't fit into the space left for shards")
            try:
                self._store(rows)
            except sqlite3.Error as error:
                raise self._error(error) from None
        return roots

    def get(self, vid: Vid) -> tuple[HeldCopy, bytes]:
        """One copy, checked against its root. Raises `ShardNotFound`, `ShardDamaged`."""
        try:
            with self._lock:
                row = self._database.execute(
                    "SELECT vid, ino, size, path_hint, revision, root, stored_at_ns, content FROM copies WHERE vid = ?", (vid,)
                ).fetchone()
        except sqlite3.Error as error:
            raise ShardDamaged(f"the small copies can't be read: {error}") from None
        if row is None:
            raise ShardNotFound(f"no copy of {vid.hex()} in this store")
        held, content = HeldCopy(*row[:7]), bytes(row[7])
        if not _is_right(vid, held.root, held.size, content):
            raise ShardDamaged(f"the copy of {vid.hex()} fails its hash")
        return held, content

    def delete(self, vids: Iterable[Vid]) -> None:
        """Remove copies; the catalog's fact that nobody needs them comes first (R22)."""
        with self._lock:
            self._in_transaction("DELETE FROM copies WHERE vid = ?", [(vid,) for vid in vids])

    def list(self, after: bytes = b"", limit: int = 1000) -> list[HeldCopy]:
        """Rows after that vid, in order of vids, without their content."""
        with self._lock:
            rows = self._database.execute(
                "SELECT vid, ino, size, path_hint, revision, root, stored_at_ns FROM copies WHERE vid > ? ORDER BY vid LIMIT ?",
                (after, limit),
            ).fetchall()
        return [HeldCopy(*row) for row in rows]

    def count(self) -> tuple[int, int]:
        """How many copies, and the bytes of their contents."""
        with self._lock:
            row = self._database.execute("SELECT count(*), coalesce(sum(size), 0) FROM copies").fetchone()
        return int(row[0]), int(row[1])

    def close(self) -> None:
        """Close the file; no other call may follow."""
        with self._lock:
            self._database.close()

    def _store(self, rows: Sequence[_Row]) -> None:
        """A row that is there is written again: it may come from a process that died before its sync, and only a commit that
        changes something is synced."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                there = self._database.execute("SELECT root, size, content FROM copies WHERE vid = ?", (row[0],)).fetchone()
                if there is not None and there[0] != row[5] and _is_right(row[0], *there):
                    raise ShardConflict("a copy with other content is stored under this vid")
                self._database.execute(f"INSERT OR REPLACE INTO copies VALUES({', '.join('?' * 8)})", row)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _in_transaction(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._database.executemany(statement, rows)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _error(self, error: sqlite3.Error) -> Exception:
        if is_full(error):
            return StoreFull("the store ran full; nothing of the batch was kept")
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        message = f"{self._path} can't be written: {error}"
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY):
            self._failed = f"{message}; replace the drive"  # a failed sync is final, as for shards
        return StoreFailed(message)
