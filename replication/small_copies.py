"""Whole copies of small files: `small_copies.db`, SQLite, format 1. One writing process, the agent.

One row is one version's content (below 64 KiB) with what it takes to rebuild its name. A batch of rows is one
transaction, synced to the drive before its roots are returned (`synchronous=FULL`): a thousand small files cost a few
syncs, not a thousand.

The database is no index: it holds the bytes. One that turns out to be damaged, at start or later, is set aside under another
name, and every copy that can still be read of it and fits its hash goes into a new one. What is missing then is missing here
only: m other holders have it, `verify` says so, and `verify --repair` makes it again. `problem` tells it until the operator
has deleted what was set aside.
"""

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ckptfs.cache.boot import booted_at_seconds
from ckptfs.cache.checksum import Buffer, cell_hash, content_root
from ckptfs.cache.drive_refusal import connect_read_only, refuses_writes
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import ID_SIZE, InodeNumber, Vid
from ckptfs.cache.sqlite_files import (
    ASIDE,
    commits_out_of_reach,
    first_damage,
    is_damage,
    readable_rows,
    set_aside,
    were_set_aside,
)
from ckptfs.cache.sqlite_full import is_full
from ckptfs.cache.store import sync_directory
from ckptfs.replication.errors import ShardConflict, ShardDamaged, ShardNotFound, StoreFailed, StoreFull

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
COPY_SIZE_MAX = (64 << 10) - 1
"""The largest content kept as copies, in bytes; larger ones are striped."""
BATCH_COUNT_MAX = 256
PATH_HINT_SIZE_MAX = 4096
CHECKED_BYTES_MAX = 1 << 30
"""The largest database whose pages are all checked at start, which takes about a second; in larger ones damage is found by
who reads."""

MENDED_TIMES_MAX = 3
"""In the life of one process: a drive that damages what is written again and again is to be replaced."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS copies(vid BLOB NOT NULL UNIQUE, ino INTEGER NOT NULL, size INTEGER NOT NULL,"
    " path_hint BLOB NOT NULL, revision INTEGER NOT NULL, root BLOB NOT NULL, stored_at_ns INTEGER NOT NULL,"
    " content BLOB NOT NULL) STRICT"
)
_COLUMNS = "vid, ino, size, path_hint, revision, root, stored_at_ns, content"
_TYPES = (bytes, int, int, bytes, int, bytes, int, bytes)
_PUT = f"INSERT OR REPLACE INTO copies VALUES({', '.join('?' * 8)})"


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


_REMEDY = (
    "copies may be missing here, other nodes have them: ckptfs verify --repair makes them again, then delete what was set aside"
)

_Row = tuple[Vid, InodeNumber, int, bytes, int, bytes, int, Buffer]
"""A row's columns in their order: `HeldCopy`, and the content."""


def copy_root(vid: Vid, content: Buffer) -> bytes:
    """The content root of a version kept as copies: its one cell is the whole content."""
    return content_root(vid, len(content), len(content), cell_hash(content))


def _is_right(vid: object, root: object, size: object, content: object) -> bool:
    """Whether a row's fields belong together. In a damaged database each may be anything."""
    if not (isinstance(vid, bytes) and isinstance(content, bytes) and len(vid) == ID_SIZE and 1 <= len(content) == size):
        return False
    return len(content) <= COPY_SIZE_MAX and copy_root(Vid(vid), content) == root


def _open(path: Path) -> sqlite3.Connection:
    """The database, made if absent. Raises `DamagedData`, and `StoreError` for one that isn't ours or can't be opened."""
    refused = path.exists() and refuses_writes(path.parent)
    try:
        database = connect_read_only(path) if refused else sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            database.text_factory = bytes
            found = database.execute("PRAGMA user_version").fetchone()[0]
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if found not in (0, FORMAT_VERSION):
                raise StoreError(f"{path} has format {found}, this program reads {FORMAT_VERSION}; nothing was changed")
            if tables and b"copies" not in tables:
                raise StoreError(f"{path} is a database of something else; nothing was changed: move it away")
            if not refused:
                database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            database.execute("PRAGMA cache_size=-2048")
            if path.stat().st_size <= CHECKED_BYTES_MAX and (damage := first_damage(database)):
                raise DamagedData(damage)
            if (not tables or not found) and not refused:
                database.execute("BEGIN IMMEDIATE")
                database.execute(_TABLE)
                database.execute(f"PRAGMA user_version={FORMAT_VERSION}")
                database.execute("COMMIT")
        except BaseException:
            database.close()
            raise
    except sqlite3.Error as error:
        if is_damage(error):
            raise DamagedData(str(error)) from None
        if is_full(error):
            raise StoreError(
                f"{path}: no space is left on its file system; the node needs a little to start: free some"
            ) from None
        raise StoreError(f"{path} can't be opened ({error}); nothing was changed") from None
    except UnicodeDecodeError as error:  # of SQLite's own message
        raise DamagedData(f"its schema makes no sense: {error.reason}") from None
    return database


def check_format(path: Path) -> None:
    """Raise `StoreError` for a database of another format. Looks at nothing but its first bytes, and only before it is opened."""
    with contextlib.suppress(OSError):
        with open(path, "rb") as file:
            head = file.read(100)
        found = int.from_bytes(head[60:64], "big")  # https://sqlite.org/fileformat2.html, the user version
        if len(head) == 100 and head.startswith(b"SQLite format 3\0") and found not in (0, FORMAT_VERSION):
            raise StoreError(f"{path} has format {found}, this program reads {FORMAT_VERSION}; nothing was changed")


def _keep_right(rows: Iterator[tuple[Any, ...]], target: sqlite3.Connection) -> int:
    """Put the rows that prove themselves into the target, as far as there is room; how many."""
    while batch := list(islice(rows, BATCH_COUNT_MAX)):
        right = [row for row in batch if _is_right(row[0], row[5], row[2], row[7]) and tuple(map(type, row)) == _TYPES]
        target.execute("BEGIN")
        try:
            target.executemany(_PUT, right)
            target.execute("COMMIT")
        except sqlite3.OperationalError as error:
            target.execute("ROLLBACK")
            log.error("small_copies_not_kept error=%s", error)
            break
    count: int = target.execute("SELECT count(*) FROM copies").fetchone()[0]
    return count


def _new_name(path: Path) -> Path:
    return Path(f"{path}.new")


class SmallCopies:
    """The copies a store holds. Blocking, safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        expected: bool = False,
        reserve_bytes: int = 0,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Open the database, making it if absent; with `expected` that it is absent is a problem too. `free_bytes` says how much
        shards and copies may still take.

        Raises `StoreError` for a database of another format, one that can't be opened, and on a full drive.
        """
        self._lock = threading.Lock()
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes
        self._failed = ""
        self._mended_times = 0
        new = _new_name(path)
        try:
            if new.exists() and not path.exists():  # killed just before the last step of making it anew
                os.rename(new, path)
            if expected and (not path.exists() or not path.stat().st_size):
                log.error("small_copies_gone path=%s: %s", path, _REMEDY)
                Path(f"{path}{ASIDE}{time.time_ns()}").touch()
            cut_off = commits_out_of_reach(path)
            # Each commit is synced before the next one begins: so a power cut leaves one at most.
            by_power_cut = cut_off == 1 and os.stat(f"{path}-wal").st_mtime < booted_at_seconds()
            if cut_off and not by_power_cut:
                log.error("small_copies_log_cut path=%s-wal: it is damaged, or a power cut hit its last write; %s", path, _REMEDY)
                shutil.copyfile(f"{path}-wal", f"{path}{ASIDE}{time.time_ns()}-wal")
        except OSError as error:
            raise StoreError(f"{path} can't be opened: {error.strerror}; nothing was changed") from None
        try:
            self._database = _open(path)
        except DamagedData as damage:
            self._database = self._made_anew(damage, None)
        if by_power_cut and not refuses_writes(path.parent):  # else it would be found again, and taken for damage of this boot
            with contextlib.suppress(sqlite3.OperationalError):
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._evidence = were_set_aside(path)

    @property
    def problem(self) -> str:
        """What an operator has to do about this database; empty if nothing."""
        return f"{self._path.name} was damaged: {_REMEDY}" if any(path.exists() for path in self._evidence) else ""

    def _made_anew(self, damage: Exception, damaged: sqlite3.Connection | None) -> sqlite3.Connection:
        """Another database with the copies that can be read of the damaged one, which is set aside. Raises `StoreError`."""
        log.error("small_copies_damaged path=%s damage=%s", self._path, damage)
        new = _new_name(self._path)
        try:
            for path in (new, Path(f"{new}-wal"), Path(f"{new}-shm")):
                path.unlink(missing_ok=True)
            with closing(_open(new)) as target, closing(sqlite3.connect(self._path, isolation_level=None)) as source:
                source.text_factory = bytes
                kept = _keep_right(readable_rows(source, "copies", _COLUMNS), target)
            if damaged is not None:
                damaged.close()
            aside = set_aside(self._path)
            os.rename(new, self._path)
            sync_directory(self._path.parent)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"{self._path} is damaged ({damage}) and can't be made anew: {error}; it was left as it is"
            ) from None
        log.error("small_copies_made_anew path=%s kept=%d aside=%s: %s", self._path, kept, aside, _REMEDY)
        return _open(self._path)

    def _mend(self, error: sqlite3.Error) -> None:
        """Go on with a database made anew if the error says that this one is damaged, else raise the error."""
        if not is_damage(error) or self._mended_times >= MENDED_TIMES_MAX:
            raise error
        self._mended_times += 1
        self._database = self._made_anew(error, self._database)
        self._evidence = were_set_aside(self._path)

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
                try:
                    self._store(rows)
                except sqlite3.Error as error:
                    self._mend(error)
                    self._store(rows)
            except sqlite3.Error as error:
                raise self._error(error) from None
            except StoreError as error:
                raise StoreFailed(str(error)) from None
        return roots

    def get(self, vid: Vid) -> tuple[HeldCopy, bytes]:
        """One copy, checked against its root, from the file and not from SQLite's memory: what was damaged since shows.

        Raises `ShardNotFound`, `ShardDamaged`.
        """
        try:
            with self._lock:
                try:
                    row = self._row(vid)
                except sqlite3.Error as error:
                    self._mend(error)
                    row = self._row(vid)
        except (sqlite3.Error, StoreError) as error:
            raise ShardDamaged(f"the small copies can't be read: {error}") from None
        if row is None:
            raise ShardNotFound(f"no copy of {vid.hex()} in this store")
        held, content = HeldCopy(*row[:7]), row[7]
        if held.vid != vid or not _is_right(vid, held.root, held.size, content):
            raise ShardDamaged(f"the copy of {vid.hex()} fails its hash")
        return held, content

    def _row(self, vid: Vid) -> Any:
        self._database.execute("PRAGMA shrink_memory")
        return self._database.execute(f"SELECT {_COLUMNS} FROM copies WHERE vid = ?", (vid,)).fetchone()

    def delete(self, copies: Iterable[tuple[Vid, int]]) -> int:
        """Remove copies, each by its `stored_at_ns` too: one that was put again since stays. Returns how many went. The
        catalog's fact that nobody needs them comes first (R22)."""
        with self._lock:
            return self._in_transaction("DELETE FROM copies WHERE vid = ? AND stored_at_ns = ?", list(copies))

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
                self._database.execute(_PUT, row)
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _in_transaction(self, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            count = self._database.executemany(statement, rows).rowcount
            self._database.execute("COMMIT")
            return count
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
        return StoreFailed(self._failed or message)


def right_copies(path: Path) -> Iterator[HeldCopy]:
    """The copies that fit their hash, of a database that nobody uses, which may be damaged; one may come twice. Changes nothing.

    Raises `sqlite3.Error` for what is no such database.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as database:
        database.text_factory = bytes
        for row in readable_rows(database, "copies", _COLUMNS):
            if tuple(map(type, row)) == _TYPES and _is_right(row[0], row[5], row[2], row[7]):
                yield HeldCopy(*row[:7])
