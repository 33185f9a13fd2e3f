"""A replica of a catalog on etcd: names that are known are read on this machine, in microseconds.

One process of a node keeps it, in one SQLite file (`replica.db`)::

    kv    key BLOB PRIMARY KEY, value BLOB, create_rev, mod_rev, check_sum   WITHOUT ROWID
    meta  name TEXT PRIMARY KEY, value     `revision`: how far it has come, 0 until it was loaded; `catalog`: of which one

It is fed by etcd's watch: one revision, one transaction, its number with it (R19). A read says what was true at the replica's
revision, which lags by the watch, about a millisecond. Where that isn't enough, `catch_up` first: the barrier of R6, one for all
who ask before it is sent. A transaction returns when the replica has it, so everybody sees their own.

It holds nothing of its own: a file that is damaged, of another catalog, or too old for etcd's history is made anew. On a drive
that is full, or takes no writes, it goes on in memory, for deleting needs it too; the file stays what it was until there is room.
"""

import logging
import os
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import trio

from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_kv import COMPARES_MAX, Compare, Entry, Event, Operation, TransactionResult, prefix_end
from ckptfs.cache.catalog_rows import Row, is_right
from ckptfs.cache.drive_refusal import is_refusal
from ckptfs.cache.errors import CatalogCompacted, CatalogReplaced, CatalogUnavailable, DamagedData
from ckptfs.cache.reserve import room_at
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.sqlite_full import is_full

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1
ROWS_INLINE = 1_000
LAG_SECONDS_MAX = 30.0
RETRY_SECONDS = 1.0
FILE_RETRY_SECONDS = 30.0
"""How often a replica in memory is tried to be put into its file again."""

CHECKPOINT_PAGES = 4096
PAGE_BYTES = 4096

_SCHEMA = f"""
CREATE TABLE kv(key BLOB PRIMARY KEY, value BLOB NOT NULL, create_rev INTEGER NOT NULL, mod_rev INTEGER NOT NULL,
    check_sum INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
INSERT INTO meta VALUES('revision', 0), ('catalog', '');
PRAGMA user_version={LAYOUT_VERSION};
"""
_GET = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key=?"
_GET_SOME = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key IN ({})"
_RANGE = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv WHERE key>=? AND key<? ORDER BY key LIMIT ?"
_COUNT = "SELECT count(*) FROM kv WHERE key>=? AND key<?"
_PUT = (
    "INSERT INTO kv VALUES(?,?,?,?,?) ON CONFLICT(key) DO UPDATE SET value=excluded.value, mod_rev=excluded.mod_rev,"
    " check_sum=excluded.check_sum"
)
_SET = "UPDATE meta SET value=? WHERE name=?"
_META = "SELECT name, value FROM meta"
_ALL = "SELECT key, value, create_rev, mod_rev, check_sum FROM kv"

EventListener = Callable[[list[Event]], None]
CommitListener = Callable[[int], None]


class ReplicatedCatalog:
    """A `KeyValue` that reads from its replica and changes its origin. `run` feeds it; reads wait until it was loaded.

    `on_events` is told every change once it can be read here, `on_commit` the revisions of this handle's own transactions.
    """

    def __init__(self, origin: EtcdCatalog, path: Path) -> None:
        self._origin = origin
        self._path = path
        self.on_events: EventListener | None = None
        self.on_commit: CommitListener | None = None
        self._in_memory = False
        self._connection = self._opened()
        self._revision = self._loaded_revision()
        self._advanced = trio.Event()
        self._barrier = trio.Lock()
        self._barriers_asked = 0
        self._barriers_done = 0
        self._reload = False
        self._to_file = False
        self._following = trio.CancelScope()
        self._running: trio.CancelScope | None = None
        self._ended = trio.Event()
        self.trouble = ""
        """Why the replica can't be fed now, or nothing."""

    def _opened(self) -> sqlite3.Connection:
        try:
            return self._file()
        except sqlite3.OperationalError as error:
            if not _takes_nothing(error):
                raise
            self._note_memory(error)
            return _memory()

    def _note_memory(self, error: sqlite3.Error) -> None:
        log.warning("replica_in_memory path=%s reason=%s: until the drive takes it", self._path, error)
        self._in_memory = True

    def _file(self) -> sqlite3.Connection:
        """The file, made if it isn't there or can't be used. Raises `sqlite3.OperationalError` where the drive takes nothing."""
        try:
            connection = self._connected()
            (layout,) = connection.execute("PRAGMA user_version").fetchone()
            if layout == LAYOUT_VERSION:
                connection.execute("SELECT 1 FROM kv LIMIT 1").fetchone()
                return connection
            connection.close()
        except sqlite3.DatabaseError as error:
            if _takes_nothing(error):
                raise
            log.warning("replica_made_anew path=%s error=%s", self._path, error)
        self._remove()
        connection = self._connected()
        connection.executescript(_SCHEMA)
        return connection

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(f"{self._path}{suffix}")

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        return connection

    def _loaded_revision(self) -> int:
        meta = dict(self._connection.execute(_META))
        return int(meta["revision"]) if meta["catalog"] == self._origin.name else 0

    @property
    def position(self) -> int:
        """The revision that is read here now."""
        return self._revision

    # Reading

    async def get(self, key: bytes) -> Entry | None:
        await self._loaded()
        rows = self._read(_GET, [key])
        return self._entry(rows[0]) if rows else None

    async def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        await self._loaded()
        found: dict[bytes, Entry] = {}
        for start in range(0, len(keys), COMPARES_MAX):
            some = keys[start : start + COMPARES_MAX]
            rows = self._read(_GET_SOME.format(",".join("?" * len(some))), some)
            found |= {row[0]: self._entry(row) for row in rows}
        return list(map(found.get, keys))

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        await self._loaded()
        first = prefix if after < prefix else after + b"\0"
        found: list[Entry] = []
        # In pieces: other requests are answered between them.
        while limit is None or len(found) < limit:
            at_once = ROWS_INLINE if limit is None else min(limit - len(found), ROWS_INLINE)
            rows = self._read(_RANGE, [first, prefix_end(prefix), at_once])
            found += map(self._entry, rows)
            if len(rows) < at_once:
                break
            first = found[-1].key + b"\0"
            await trio.lowlevel.checkpoint()
        return found

    async def count(self, prefix: bytes) -> int:
        await self._loaded()
        ((count,),) = self._read(_COUNT, [prefix, prefix_end(prefix)])
        return int(count)

    def _read(self, statement: str, parameters: Sequence[bytes | int]) -> list[Any]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            self._load_anew()
            raise DamagedData(f"the replica {self._path} is damaged ({error}); it is made anew from the catalog") from None

    def _entry(self, row: tuple[bytes, bytes, int, int, int]) -> Entry:
        key, value, created, modified, check_sum = row
        if not is_right(key, value, check_sum):
            self._load_anew()
            raise DamagedData(f"the replica {self._path} has a damaged record; it is made anew from the catalog")
        return Entry(key, value, created, modified)

    def _load_anew(self) -> None:
        """The file is damaged. A process that ends because of it, or before it was loaded, must not find it as good again."""
        self._reload = True
        with suppress(sqlite3.DatabaseError):
            self._connection.execute(_SET, (0, "revision"))
        self._following.cancel()

    async def _loaded(self) -> None:
        if self._revision:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await self._reached(1)

    async def revision(self) -> int:
        return await self._origin.revision()

    def is_short_of_room(self) -> bool:
        return self._origin.is_short_of_room()

    async def catch_up(self) -> None:
        """Return once reads here see every transaction that returned, anywhere, before this call (R6)."""
        self._barriers_asked += 1
        mine = self._barriers_asked
        async with self._barrier:
            if self._barriers_done >= mine:
                return
            asked = self._barriers_asked
            await self._reached(await self._origin.revision())
            self._barriers_done = asked

    async def _reached(self, revision: int) -> None:
        with trio.move_on_after(LAG_SECONDS_MAX):
            while self._revision < revision:
                await self._advanced.wait()
            return
        raise CatalogUnavailable(
            f"the replica of the catalog is at revision {self._revision} and hears nothing of {revision}"
            f" ({self.trouble or 'etcd sends no events'}); the operation can be repeated"
        )

    # Changing

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        result = await self._origin.transact(compares, operations)
        if result.succeeded and self.on_commit is not None:
            self.on_commit(result.revision)
        await self._reached(result.revision)  # also of a refused one: what it was refused for can be read here then
        return result

    def fence_with(self, fence: SessionFence) -> None:
        self._origin.fence_with(fence)

    async def make_durable(self) -> None:
        await self._origin.make_durable()

    def watch(self, after_revision: int) -> AsyncGenerator[list[Event], None]:
        return self._origin.watch(after_revision)

    # Feeding

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Feed the replica until cancelled; started when it has been loaded and has caught up."""
        ended = self._ended = trio.Event()
        self._revision = self._loaded_revision()  # another process may have fed the file since it was opened here
        try:
            async with trio.open_nursery() as nursery:
                self._running = nursery.cancel_scope
                nursery.start_soon(self._feed)
                nursery.start_soon(self._leave_memory)
                await self.catch_up()
                task_status.started()
        finally:
            ended.set()

    async def _feed(self) -> None:
        while True:
            try:
                if self._to_file:
                    await self._try_file()
                if not self._revision or self._reload:
                    await self._load()
                await self._follow()
            except CatalogCompacted as compacted:
                log.warning("replica_too_old reason=%s: it is loaded anew", compacted)
                self._reload = True
            except CatalogReplaced as replaced:
                self.trouble = str(replaced)
                log.error("catalog_replaced reason=%s", replaced)
                await trio.sleep(RETRY_SECONDS)
            except CatalogUnavailable as error:
                self.trouble = str(error)
                log.warning("replica_not_fed reason=%s", error)
                await trio.sleep(RETRY_SECONDS)
            except sqlite3.OperationalError as error:
                if self._in_memory or not _takes_nothing(error):
                    raise
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                self._note_memory(error)
                await self._use(_memory)

    async def _use(self, make: Callable[[], sqlite3.Connection]) -> None:
        """Another database with the content of this one, at the same revision, so that no event is missed by it; in a thread."""
        connection = await trio.to_thread.run_sync(self._copied, make)
        self._connection.close()
        self._connection = connection

    def _copied(self, make: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
        meta = dict(self._connection.execute(_META))
        connection = make()
        try:
            _fill(connection, self._connection.execute(_ALL), meta)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _leave_memory(self) -> None:
        while True:
            await trio.sleep(FILE_RETRY_SECONDS)
            if self._in_memory and self._has_room():
                self._to_file = True
                self._following.cancel()  # the feeder does it: nothing may change meanwhile

    def _has_room(self) -> bool:
        """Whether the file and its log fit, and not just so."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        return room_at(self._path.parent).free_bytes > (3 * int(pages) + CHECKPOINT_PAGES) * PAGE_BYTES

    async def _try_file(self) -> None:
        self._to_file = False
        try:
            await self._use(self._file)
        except sqlite3.OperationalError as error:
            if not _takes_nothing(error):
                raise
            return
        self._in_memory = False
        log.info("replica_in_its_file_again path=%s", self._path)

    async def _load(self) -> None:
        entries, revision = await self._origin.range_at(b"", first=b"")
        rows = [(e.key, e.value, e.create_revision, e.mod_revision, crc32(e.value, crc32(e.key))) for e in entries]
        if self._in_memory:
            meta: dict[str, str | int] = {"revision": revision, "catalog": self._origin.name}
            memory = _memory()
            await trio.to_thread.run_sync(_fill, memory, rows, meta)
            self._connection.close()
            self._connection = memory
        else:
            await trio.to_thread.run_sync(self._replace, rows, revision)
        self._reload = False
        self._advance(revision)
        log.info("replica_loaded keys=%d revision=%d", len(rows), revision)

    def _replace(self, rows: list[tuple[bytes, bytes, int, int, int]], revision: int) -> None:
        """In a thread, and over a connection of its own: those who read meanwhile see all that was there before.

        Raises `sqlite3.DatabaseError` where the file's pages are damaged, after it has removed the file: the process ends and the
        next one makes it anew.
        """
        with closing(self._connected()) as connection:
            try:
                _fill(connection, rows, {"revision": revision, "catalog": self._origin.name})
            except sqlite3.OperationalError:
                raise  # a full drive, say
            except sqlite3.DatabaseError:
                self._remove()
                raise

    async def _follow(self) -> None:
        with trio.CancelScope() as self._following:
            async with aclosing(self._origin.follow(self._revision)) as transactions:
                async for revision, events in transactions:
                    self._apply(revision, events)
                    self.trouble = ""
                    self._advance(revision)
                    if events and self.on_events is not None:
                        self.on_events(events)

    def _apply(self, revision: int, events: Sequence[Event]) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        for event in events:
            if event.value is None:
                connection.execute("DELETE FROM kv WHERE key=?", (event.key,))
            else:
                connection.execute(_PUT, (event.key, event.value, revision, revision, crc32(event.value, crc32(event.key))))
        connection.execute(_SET, (revision, "revision"))
        connection.execute("COMMIT")

    def _advance(self, revision: int) -> None:
        self._revision = revision
        self._advanced.set()
        self._advanced = trio.Event()

    async def aclose(self) -> None:
        """End `run`, and close the replica and its origin."""
        if self._running is not None:
            self._running.cancel()
            with trio.CancelScope(shield=True):
                await self._ended.wait()
        await self._origin.aclose()
        self._connection.close()


def _fill(connection: sqlite3.Connection, rows: Iterable[Row], meta: Mapping[str, str | int]) -> None:
    """Replace all that is in the database, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("DELETE FROM kv")
    connection.executemany(_PUT, rows)
    connection.executemany(_SET, [(value, name) for name, value in meta.items()])
    connection.execute("COMMIT")


def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.executescript(_SCHEMA)
    return connection


def _takes_nothing(error: sqlite3.Error) -> bool:
    """Whether it is the drive: nothing is damaged."""
    return is_full(error) or is_refusal(error)
