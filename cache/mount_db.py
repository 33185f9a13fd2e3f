"""`mount.db`: what the mount process must find again after it was killed. An index, written by one process.

Tables::

    fact(name, value)                         format, boot id, what INIT agreed on
    file(ino, vid, segment, state, size, exposed_ns, backing_id, path_hint, orphan)
                                              one row for each segment whose version isn't protected, and for each file in use
    handle(fh, ino, flags, lane)              one row for each handle the kernel holds
    remote(ino, vid, version, record)         one row for each file in use whose bytes are on another node
    guest(store, incarnation, fh, ino)        one row for each handle that another node's program has to write a file here
    call(store, incarnation, number, value, size_before)
                                              one row for each such write whose outcome that node's kernel may not know
    removed(ino, incarnation, request, record)
                                              one row for each inode, no regular file, that has no name and is in the kernel
    prefix(ino, vid, segment, size, exposed_ns, path_hint)
                                              one row for each prefix of a file being written that waits for protection

`state` is 1 open, 2 local (waits for protection), 3 protected, 4 in use without a name: none is left, or none was given yet.
`exposed_ns` is when its first unprotected byte may have been written, wall time. `fh` is the number of the request the handle was
opened for. `backing_id` is the kernel's, valid as long as the connection, or NULL; negative once the last handle is gone: it was,
or is about to be, closed. `orphan` is the packed record of a file in use without a name, else empty; its row's `size` is the
number of the request that changed that record last. `version` and `record` are the catalog's packed records of the version that
is read and of the inode, as they were when it was opened; in `removed` the record is the inode's newest, `request` the number of
the one that changed it last or 0, and `incarnation` the FUSE connection whose kernel has it: another's rows mean nothing. It may
have its name after all, if the catalog says so. In `guest` and `call`, `incarnation` and `number` are the other node's FUSE
connection and its request; `value` is how much was written, `size_before` -1, or the size of the file before an append that may
have been made.

WAL with synchronous=NORMAL: a killed process loses nothing, a power cut at most the newest rows, never the order. What concerns
handles is committed a little later, and until then is in `mount.notes` (`row_notes`). On a drive that takes no writes any more it
goes on in memory: then a killed process loses what was noted since.
"""

import contextlib
import enum
import errno
import logging
import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, cast
from zlib import crc32

from ckptfs.cache.boot import boot_id, booted_at_seconds
from ckptfs.cache.drive_refusal import copy_in_memory, is_refusal, refuses_writes
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.kept_descriptors import kept_descriptor
from ckptfs.cache.reserve import hold_beyond_end
from ckptfs.cache.row_notes import RowNotes
from ckptfs.cache.sqlite_files import first_damage, log_is_cut
from ckptfs.cache.sqlite_full import is_full
from ckptfs.cache.sqlite_parameters import pass_straight

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
RESERVE_BYTES = 1 << 20
"""What its log holds beyond its end for a full drive: some hundred files that are opened or become local between checkpoints."""

BOOT_FACT = "boot_id"
"""The boot in which it was written last."""

CATALOG_FACT = "catalog_revision"
"""A revision of the catalog that was durable: one that ends before it is not the one this store's files belong to."""

AGREED_FACT = "agreed_revision"
"""A revision of the catalog up to which every row of a file that isn't in use says the same as the catalog."""

MADE_FACT = "made_ns"
"""When this database was made, wall time: what the store had before is known from the catalog only."""

COMMITTED_NOTE_FACT = "committed_note"
"""The number of the newest note that is committed."""

OWED_MAX = 64
"""So many changes wait at most, where they can be committed; and so many are committed in one transaction."""

ROWS_ASKED_FOR_MAX = 250
"""By number, at once."""

_PUT_FILE = "INSERT OR REPLACE INTO file VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)"
_OPENED = "INSERT INTO opened VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_LAST_CLOSED = "DELETE FROM last_handle WHERE fh = ?"
_NOTED = {
    "opened": _OPENED,
    "handle": "INSERT OR REPLACE INTO handle VALUES(?, ?, ?, ?)",
    "closed": "DELETE FROM handle WHERE fh = ?",
    "last closed": _LAST_CLOSED,
    "call": "INSERT OR REPLACE INTO call VALUES(?, ?, ?, ?, ?)",
    "call answered": "DELETE FROM call WHERE store = ? AND incarnation = ? AND number = ?",
    "removed": "INSERT OR REPLACE INTO removed VALUES(?, ?, ?, ?)",
    "removed forgotten": "DELETE FROM removed WHERE ino = ?",
}
"""The changes that are noted first. A name never comes to mean another statement."""

REMEDY = "it is rebuilt from the catalog when the node starts again, and what was closed is safe"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS fact(name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS file(
    ino INTEGER PRIMARY KEY, vid BLOB NOT NULL, segment BLOB NOT NULL, state INTEGER NOT NULL, size INTEGER NOT NULL,
    exposed_ns INTEGER NOT NULL, backing_id INTEGER, path_hint BLOB NOT NULL, orphan BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS file_waiting ON file(exposed_ns) WHERE state = 2;
CREATE TABLE IF NOT EXISTS handle(fh INTEGER PRIMARY KEY, ino INTEGER NOT NULL, flags INTEGER NOT NULL, lane INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS prefix(
    ino INTEGER PRIMARY KEY, vid BLOB NOT NULL, segment BLOB NOT NULL, size INTEGER NOT NULL, exposed_ns INTEGER NOT NULL,
    path_hint BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS remote(ino INTEGER PRIMARY KEY, vid BLOB NOT NULL, version BLOB NOT NULL, record BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS guest(
    store BLOB, incarnation INTEGER, fh INTEGER, ino INTEGER NOT NULL, PRIMARY KEY(store, incarnation, fh)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS call(
    store BLOB, incarnation INTEGER, number INTEGER, value INTEGER NOT NULL, size_before INTEGER NOT NULL,
    PRIMARY KEY(store, incarnation, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed(
    ino INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, request INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS file_local ON file(vid) WHERE state = 2;
CREATE VIEW IF NOT EXISTS opened AS
    SELECT *, 0 AS fh, 0 AS flags, 0 AS lane FROM file;
CREATE TRIGGER IF NOT EXISTS opened_put INSTEAD OF INSERT ON opened BEGIN
    INSERT OR REPLACE INTO file VALUES(
        NEW.ino, NEW.vid, NEW.segment, NEW.state, NEW.size, NEW.exposed_ns, NEW.backing_id, NEW.path_hint, NEW.orphan);
    INSERT OR REPLACE INTO handle VALUES(NEW.fh, NEW.ino, NEW.flags, NEW.lane);
END;
CREATE VIEW IF NOT EXISTS last_handle AS SELECT * FROM handle;
CREATE TRIGGER IF NOT EXISTS last_handle_closed INSTEAD OF DELETE ON last_handle BEGIN
    DELETE FROM handle WHERE fh = OLD.fh;
    UPDATE file SET backing_id = -abs(backing_id) WHERE ino = OLD.ino;
END;
"""
# On the path of every create: the views make two changes one statement, half the cost of BEGIN, two statements and COMMIT, and no
# index has an entry of a file that is open.


class FileState(enum.IntEnum):
    """`file.state`."""

    OPEN = 1
    LOCAL = 2
    PROTECTED = 3
    ORPHAN = 4


class _Owed(NamedTuple):
    """A change that is to be committed. `note` is the number of its note, 0 if it has none."""

    statement: str
    rows: Sequence[Sequence[object]]
    note: int = 0


def _shortened(changes: Sequence[_Owed]) -> Sequence[_Owed]:
    """Changes that leave the same: where a file's row is written once with a handle, and its last close is among them too, that
    is the row as the close leaves it. Most files that are made are closed soon."""
    ended = {change.rows[0][0] for change in changes if change.statement == _LAST_CLOSED}
    if not ended or not all(change.note for change in changes):  # else something else may be said of the file in between
        return changes
    opens = Counter(change.rows[0][0] for change in changes if change.statement == _OPENED)
    shorter: list[_Owed] = []
    known: set[object] = set()
    for change in changes:
        row = change.rows[0]
        if change.statement == _OPENED and row[9] in ended and opens[row[0]] == 1:
            known.add(row[9])
            backing_id = cast(int | None, row[6])
            closed = None if backing_id is None else -abs(backing_id)
            shorter.append(_Owed(_PUT_FILE, [(*row[:6], closed, *row[7:9])]))
        elif change.statement != _LAST_CLOSED or row[0] not in known:
            shorter.append(change)
    return shorter


class FileRow(NamedTuple):
    """One row of `file`."""

    ino: InodeNumber
    vid: Vid
    segment: SegmentId
    state: FileState
    size: int
    exposed_ns: int
    backing_id: int | None
    path_hint: bytes
    orphan: bytes = b""


class HandleRow(NamedTuple):
    """One row of `handle`: `flags` are those of open(2)."""

    fh: int
    ino: InodeNumber
    flags: int
    lane: int


class RemoteRow(NamedTuple):
    """One row of `remote`."""

    ino: InodeNumber
    vid: Vid
    version: bytes
    record: bytes


class GuestRow(NamedTuple):
    """One row of `guest`."""

    store: StoreId
    incarnation: int
    fh: int
    ino: InodeNumber


class CallRow(NamedTuple):
    """One row of `call`."""

    store: StoreId
    incarnation: int
    number: int
    value: int
    size_before: int


class RemovedRow(NamedTuple):
    """One row of `removed`."""

    ino: InodeNumber
    incarnation: int
    request: int
    record: bytes


class WaitingVersion(NamedTuple):
    """A local version that waits for protection, or a prefix of one that is being written. `path_hint` is its name when it was
    last created or renamed."""

    ino: InodeNumber
    vid: Vid
    segment: SegmentId
    size: int
    exposed_ns: int
    path_hint: bytes
    is_prefix: bool = False


class Exposure(NamedTuple):
    """What a death of this node would lose now: so many files, bytes of them, unprotected since (wall time, None without
    files)."""

    files: int
    bytes: int
    oldest_ns: int | None


def connect_mount_db(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection of its own. Raises `StoreError`."""
    pass_straight()
    try:
        if read_only:
            connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
        else:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA busy_timeout=10000")
        return connection
    except sqlite3.Error as error:
        raise StoreError(f"{path} can't be opened ({error})") from None


def _is_of_earlier_boot(path: Path) -> bool:
    """Whether it was written last before this machine was started. Then it is no damage that its newest rows, which were never
    synced, got to the drive out of their order."""
    try:
        with contextlib.closing(connect_mount_db(path, read_only=True)) as connection:
            row = connection.execute("SELECT value FROM fact WHERE name = ?", (BOOT_FACT,)).fetchone()
    except sqlite3.OperationalError:
        row = None  # not even its tables are there
    except sqlite3.Error:
        return False
    if row is None:
        return os.stat(f"{path}-wal").st_mtime < booted_at_seconds()
    return bytes(row[0]) != boot_id()


def _no_room(path: Path) -> StoreError:
    return StoreError(f"{path}: no space is left on its file system; the node needs a little to start: free some")


class MountDatabase:
    """The writer. Calls take some ten microseconds and never wait for a disk. `in_memory`: the drive takes no writes any more."""

    def __init__(self, path: Path, *, was_set_back: bool = False) -> None:
        """Open the database, making it if absent; `was_set_back`: it may have lost what was not synced in this boot.

        Raises `DamagedData` for one that another may take the place of: damaged, shortened or of something else; `StoreError` for
        one of another format, or that can't be opened now.
        """
        try:
            cut = log_is_cut(path)
            if cut and not was_set_back and not _is_of_earlier_boot(path):
                raise DamagedData(f"{path}-wal is damaged; {REMEDY}")
        except OSError as error:
            raise StoreError(f"{path} can't be opened: {error.strerror}") from None
        self._path = path
        self._owed: deque[_Owed] = deque()
        self._notes: RowNotes | None = None
        self._last_note = 0
        self._facts: dict[str, bytes] = {}
        self.in_memory = False
        if reason := refuses_writes(path.parent):
            self._connection = self._copy_in_memory(reason)
        else:
            self._connection = connect_mount_db(path, read_only=False)
        try:
            tables = {name for (name,) in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and "fact" not in tables:
                raise DamagedData(f"{path} is a database of something else; {REMEDY}")
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("PRAGMA wal_autocheckpoint=0")
            if damage := first_damage(self._connection):
                raise DamagedData(f"{path} is damaged ({damage}); {REMEDY}")
            if cut and not self.in_memory:  # else what lies behind the cut would be taken for damage of this boot
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.executescript(_SCHEMA)
            known = self.fact("format")
            if known is None:
                self.set_fact("format", b"%d" % FORMAT_VERSION)
                self.set_fact(MADE_FACT, b"%d" % time.time_ns())
            elif known != b"%d" % FORMAT_VERSION:
                raise StoreError(
                    f"{path} has format {known.decode()}, this program reads {FORMAT_VERSION}; use the release that wrote it"
                )
        except sqlite3.DatabaseError as error:
            self._connection.close()
            if is_full(error):
                raise _no_room(path) from None
            raise DamagedData(f"{path} is damaged ({error}); {REMEDY}") from None
        except UnicodeDecodeError as error:  # of SQLite's own message
            self._connection.close()
            raise DamagedData(f"{path} is damaged ({error.reason}); {REMEDY}") from None
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """What was noted and not committed stays so; see `take_over`."""
        self._close_notes()
        self._connection.close()

    def _close_notes(self) -> None:
        if self._notes is not None:
            self._notes.close()
            self._notes = None

    def take_over(self) -> None:
        """Commit what a process that was killed had noted, and note changes from now on. Called when no other process uses the
        database any more; before that, every change is committed at once."""
        if self._notes is not None or self.in_memory:
            return
        committed, made = self.fact(COMMITTED_NOTE_FACT), self.fact(MADE_FACT)
        self._last_note = int(committed or b"0")
        try:
            # Of this boot: a power cut takes committed rows back, and the numbers of their notes are given out again.
            notes = RowNotes(self._path.with_name("mount.notes"), int(made or b"0") ^ crc32(boot_id()))
        except OSError as error:  # no room: then a little slower
            log.warning("no_notes path=%s error=%s", self._path, error)
            return
        for note in notes.read(self._last_note):
            if note.change in _NOTED:
                self._owed.append(_Owed(_NOTED[note.change], [note.values], note.number))
            self._last_note = note.number
        self._notes = notes
        self.settle_debts()

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database. Waits for the disk: for a thread, on a connection of its own.

        What a full drive has no room for, or one that failed does not take, stays in the log.
        """
        if self.in_memory:
            return
        with contextlib.closing(connect_mount_db(self._path, read_only=False)) as connection:
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.OperationalError as error:
                if not is_full(error) and not is_refusal(error):
                    raise

    def hold_room(self) -> None:
        """Have room for what is written down on a full drive; blocks shortly: for a thread. Raises `OSError` for a broken one."""
        if self.in_memory:
            return
        with open(f"{self._path}-wal", "r+b") as wal:
            hold_beyond_end(wal.fileno(), RESERVE_BYTES)
        for path in (f"{self._path}-shm", str(self._path)):
            hold_beyond_end(kept_descriptor(path), RESERVE_BYTES // 4)

    def fact(self, name: str) -> bytes | None:
        """The fact's value, or None."""
        if name in self._facts:
            return self._facts[name]
        row = self._connection.execute("SELECT value FROM fact WHERE name = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def set_fact(self, name: str, value: bytes) -> None:
        """Set the fact; on a full drive it is written down as soon as there is room."""
        self._facts[name] = value
        self._owe("INSERT OR REPLACE INTO fact VALUES(?, ?)", [(name, value)])

    def forget_fact(self, name: str) -> None:
        """As if it had never been set."""
        self._facts.pop(name, None)
        self._owe("DELETE FROM fact WHERE name = ?", [(name,)])

    def put_file(self, row: FileRow, handle: HandleRow | None = None) -> None:
        """Set the file's row, and add the handle, in one transaction; on a full drive, as soon as there is room."""
        if handle is None:
            self._owe(_PUT_FILE, [row])
            return
        self._note("opened", (*row, handle.fh, handle.flags, handle.lane))

    def put_handle(self, handle: HandleRow) -> None:
        """Add the handle; on a full drive, as soon as there is room: what was saved must be readable there."""
        self._note("handle", handle)

    def remove_handle(self, fh: int) -> None:
        self._note("closed", (fh,))

    def remove_handle_and_backing(self, fh: int) -> None:
        """The last handle of a file is gone, and its backing id is to be closed."""
        self._note("last closed", (fh,))

    def put_prefix(self, waiting: WaitingVersion) -> None:
        """Set the row of the file's prefix; on a full drive, as soon as there is room."""
        self._owe("INSERT OR REPLACE INTO prefix VALUES(?, ?, ?, ?, ?, ?)", [waiting[:6]])

    def remove_prefixes(self, inos: Iterable[InodeNumber]) -> None:
        self._owe("DELETE FROM prefix WHERE ino = ?", [(ino,) for ino in inos])

    def prefixes(self) -> list[WaitingVersion]:
        """Every row: at most one for each file in use."""
        rows = self._connection.execute("SELECT * FROM prefix ORDER BY ino")
        return [WaitingVersion._make((*row, True)) for row in rows]

    def put_remote(self, row: RemoteRow) -> None:
        """Set the row of a file whose bytes are on another node; on a full drive, as soon as there is room."""
        self._owe("INSERT OR REPLACE INTO remote VALUES(?, ?, ?, ?)", [row])

    def remove_remotes(self, inos: Iterable[InodeNumber]) -> None:
        self._owe("DELETE FROM remote WHERE ino = ?", [(ino,) for ino in inos])

    def remotes(self) -> list[RemoteRow]:
        """Every row: bounded by what is in use."""
        return [RemoteRow(*row) for row in self._connection.execute("SELECT * FROM remote ORDER BY ino")]

    def put_guest(self, row: GuestRow) -> None:
        self._owe("INSERT OR REPLACE INTO guest VALUES(?, ?, ?, ?)", [row])

    def remove_guest(self, row: GuestRow) -> None:
        self._owe("DELETE FROM guest WHERE store = ? AND incarnation = ? AND fh = ?", [row[:3]])

    def guests(self) -> list[GuestRow]:
        self.settle_debts()
        return [GuestRow._make(row) for row in self._connection.execute("SELECT * FROM guest")]

    def put_call(self, row: CallRow) -> None:
        self._note("call", row)

    def remove_call(self, store: StoreId, incarnation: int, number: int) -> None:
        self._note("call answered", (store, incarnation, number))

    def remove_calls(self, store: StoreId, incarnation: int) -> None:
        self._owe("DELETE FROM call WHERE store = ? AND incarnation = ?", [(store, incarnation)])

    def calls(self) -> list[CallRow]:
        self.settle_debts()
        return [CallRow._make(row) for row in self._connection.execute("SELECT * FROM call")]

    def put_removed_inode(self, row: RemovedRow) -> None:
        self._note("removed", row)

    def forget_removed_inode(self, ino: InodeNumber) -> None:
        self._note("removed forgotten", (ino,))

    def removed_inodes(self, incarnation: int) -> list[RemovedRow]:
        """Those that the kernel of this FUSE connection may still have; the rows of others go."""
        self._owe("DELETE FROM removed WHERE incarnation <> ?", [(incarnation,)])
        return [RemovedRow._make(row) for row in self._connection.execute("SELECT * FROM removed ORDER BY ino")]

    def forget_guests(self) -> None:
        """What they wrote last may be gone, so none of them may go on as if it were there."""
        self._owe("DELETE FROM guest", [()])
        self._owe("DELETE FROM call", [()])

    def set_states(self, changes: Iterable[tuple[FileState, int, InodeNumber, Vid]]) -> None:
        """Set (state, size) of the rows of these inodes that have these versions."""
        self._owe("UPDATE file SET state = ?, size = ? WHERE ino = ? AND vid = ?", list(changes))

    def set_protected(self, vids: Iterable[Vid], in_use: Container[Vid] = ()) -> None:
        """These versions are safe on peers: their rows go, unless the file is in use."""
        kept: list[tuple[Vid]] = []
        gone: list[tuple[Vid]] = []
        for vid in vids:
            (kept if vid in in_use else gone).append((vid,))
        self._owe("UPDATE file SET state = 3 WHERE vid = ? AND state = 2", kept)
        self._owe("DELETE FROM file WHERE vid = ? AND state = 2", gone)

    def remove_files(self, inos: Iterable[InodeNumber]) -> None:
        self._owe("DELETE FROM file WHERE ino = ?", [(ino,) for ino in inos])

    def remove_row(self, row: FileRow) -> None:
        """Remove the row, unless the inode has another by now."""
        self._owe("DELETE FROM file WHERE ino = ? AND vid = ? AND state = ?", [(row.ino, row.vid, row.state)])

    def settle_debts(self) -> bool:
        """Make the changes that a full drive has put off, in their order; whether none is left.

        They follow facts committed in the catalog, so they can't be refused; after a kill, recovery finds the same facts.
        """
        while self._owed:
            some = list(islice(self._owed, OWED_MAX))
            try:
                self._commit(some)
            except sqlite3.OperationalError as error:
                if is_full(error):
                    return False
                if self.in_memory or not is_refusal(error):
                    raise
                file, self._connection = self._connection, self._copy_in_memory(str(error))
                file.close()
                self._close_notes()
                continue
            for _ in some:
                self._owed.popleft()
        if self._notes is not None:
            self._notes.begin_again()
        return True

    def _copy_in_memory(self, reason: str) -> sqlite3.Connection:
        """Raises `DamagedData` where not even that can be read: then what programs have open is not known any more."""
        try:
            memory = copy_in_memory(self._path)
        except sqlite3.Error as error:
            raise DamagedData(f"the drive of {self._path} takes no writes ({reason}) and it can't be read ({error})") from None
        self.in_memory = True
        log.error(
            "mount_db_in_memory path=%s reason=%s: the drive takes no writes; reading goes on, files opened from now on are not"
            " known after a kill of the mount process; copy away what is not protected, then repair or replace the drive",
            self._path,
            reason,
        )
        return memory

    def _owe(self, statement: str, rows: Sequence[Sequence[object]]) -> None:
        self._owed.append(_Owed(statement, rows))
        self.settle_debts()

    def _note(self, change: str, row: Sequence[object]) -> None:
        """Make the change outlive this process now; it is committed with others, before anybody reads."""
        noted = 0
        if self._notes is not None:
            try:
                self._notes.add(self._last_note + 1, change, row)
                self._last_note = noted = self._last_note + 1
            except OSError as error:
                if error.errno != errno.ENOSPC:  # else the drive is full, and has been for a while
                    log.warning("not_noted path=%s error=%s", self._path, error.strerror)
        self._owed.append(_Owed(_NOTED[change], [row], noted))
        if not noted or len(self._owed) >= OWED_MAX:
            self.settle_debts()

    def _commit(self, changes: Sequence[_Owed]) -> None:
        if len(changes) == 1 and len(changes[0].rows) == 1 and not changes[0].note:
            self._connection.execute(changes[0].statement, changes[0].rows[0])
            return
        self._connection.execute("BEGIN")
        try:
            for statement, alike in groupby(_shortened(changes), lambda change: change.statement):
                self._connection.executemany(statement, [row for change in alike for row in change.rows])
            if note := max(change.note for change in changes):
                self._connection.execute("INSERT OR REPLACE INTO fact VALUES(?, ?)", (COMMITTED_NOTE_FACT, b"%d" % note))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def files(self) -> list[FileRow]:
        """Every row: bounded by what is in use or not yet protected."""
        return self._rows("SELECT * FROM file ORDER BY exposed_ns")

    def _rows(self, select: str, values: Sequence[object] = ()) -> list[FileRow]:
        self.settle_debts()
        return [FileRow(r[0], r[1], r[2], FileState(r[3]), *r[4:]) for r in self._connection.execute(select, values)]

    def files_in_use(self) -> list[FileRow]:
        """The rows of files that are not just local: open, removed, or with handles. Bounded by what is in use."""
        self.settle_debts()
        rows = self._connection.execute(
            "SELECT * FROM file WHERE state <> 2 OR ino IN (SELECT ino FROM handle) ORDER BY exposed_ns"
        ).fetchall()
        return [FileRow(r[0], r[1], r[2], FileState(r[3]), *r[4:]) for r in rows]

    def file(self, ino: InodeNumber) -> FileRow | None:
        self.settle_debts()
        row = self._connection.execute("SELECT * FROM file WHERE ino = ?", (ino,)).fetchone()
        return None if row is None else FileRow(row[0], row[1], row[2], FileState(row[3]), *row[4:])

    def files_of(self, inos: Iterable[InodeNumber]) -> list[FileRow]:
        """The rows of those of the inodes that have one."""
        wanted, found = list(inos), []
        for start in range(0, len(wanted), ROWS_ASKED_FOR_MAX):
            some = wanted[start : start + ROWS_ASKED_FOR_MAX]
            found += self._rows(f"SELECT * FROM file WHERE ino IN ({','.join('?' * len(some))})", some)
        return found

    def handles(self) -> list[HandleRow]:
        self.settle_debts()
        return [HandleRow(*row) for row in self._connection.execute("SELECT * FROM handle ORDER BY fh")]

    def forget_handles(self) -> None:
        """A new connection: the kernel holds none of the old handles and backing ids. Raises `StoreError` on a full drive."""
        self.take_over()
        self.settle_debts()
        try:
            self._connection.execute("DELETE FROM handle")
            self._connection.execute("DELETE FROM remote")
            self._connection.execute("UPDATE file SET backing_id = NULL")
        except sqlite3.OperationalError as error:
            raise _no_room(self._path) if is_full(error) else error from None

    def exposure(self) -> Exposure:
        """That of what is local. What of open files isn't protected only their segments say."""
        count, size, oldest = self._connection.execute(
            "SELECT count(*), coalesce(sum(size), 0), min(exposed_ns) FROM file WHERE state = 2"
        ).fetchone()
        return Exposure(count, size, oldest)
