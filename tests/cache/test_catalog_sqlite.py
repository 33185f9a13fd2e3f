"""What is particular to the SQLite engine: its file, its locks, its log, what a crash leaves."""

import os
import shutil
import sqlite3
import threading
from contextlib import aclosing, closing
from pathlib import Path

import pytest
import trio
import trio.testing

from ckptfs.cache import catalog_connection, catalog_maintenance, catalog_room, catalog_rows, catalog_sqlite
from ckptfs.cache.catalog_format import FORMAT_KEY
from ckptfs.cache.catalog_kv import Delete, Entry, Present, Put, Unchanged
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CatalogCompacted, CatalogFull, CatalogUnavailable, DamagedData, StoreError
from ckptfs.cache.ids import StoreId
from ckptfs.cache.reserve import Room
from ckptfs.cache.versions import Versions

WAL_HEADER_SIZE = 32
WAL_FRAME_SIZE = 24 + 4096


def opened(path: Path) -> SqliteCatalog:
    return SqliteCatalog.open(path, writer_label="test")


async def test_content_survives_closing(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    await kv.transact([], [Put(b"a", b"1")])
    await kv.aclose()
    await kv.aclose()
    kv = opened(tmp_path / "c.db")
    assert await kv.get(b"a") == Entry(b"a", b"1", 1, 1)
    assert await kv.revision() == 1
    await kv.aclose()


async def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    await kv.aclose()
    with pytest.raises(CatalogUnavailable, match="closed"):
        await kv.get(b"a")
    with pytest.raises(CatalogUnavailable, match="closed"):
        await kv.transact([], [Put(b"a", b"")])


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="directory does not exist"):
        opened(tmp_path / "nowhere" / "c.db")


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(DamagedData, match="damaged"):
        opened(tmp_path / "c.db")


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "c.db") as connection:
        connection.execute("CREATE TABLE something(x)")
    connection.close()
    with pytest.raises(StoreError, match="not a ckptfs catalog"):
        opened(tmp_path / "c.db")
    connection = sqlite3.connect(tmp_path / "c.db")
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
    connection.close()


def test_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.db").mkdir()
    with pytest.raises(StoreError, match="can't be opened"):
        opened(tmp_path / "c.db")


async def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    await kv.aclose()
    connection = sqlite3.connect(tmp_path / "c.db")
    connection.execute(f"PRAGMA user_version={catalog_connection.LAYOUT_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError, match="upgrade"):
        opened(tmp_path / "c.db")


async def test_a_newer_catalog_format_is_refused(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    await kv.transact([], [Put(FORMAT_KEY, b"2")])
    await kv.aclose()
    with pytest.raises(StoreError, match="has format 2"):
        opened(tmp_path / "c.db")


async def test_a_flipped_bit_in_a_record_is_an_error(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    await kv.transact([], [Put(b"k/good", b"intact"), Put(b"k/bad", b"a value that will be hit")])
    await kv.aclose()
    content = (tmp_path / "c.db").read_bytes()
    assert content.count(b"that will be hit") >= 1
    (tmp_path / "c.db").write_bytes(content.replace(b"that will be hit", b"that will be hiu"))
    kv = opened(tmp_path / "c.db")
    assert await kv.get(b"k/good") == Entry(b"k/good", b"intact", 1, 1)
    with pytest.raises(DamagedData, match="k/bad"):
        await kv.get(b"k/bad")
    with pytest.raises(DamagedData, match="k/bad"):
        await kv.range(b"k/")
    await kv.aclose()


async def test_a_damaged_page_is_an_error(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    for number in range(200):
        await kv.transact([], [Put(b"k/%d" % number, b"v" * 100)])
    await kv.aclose()
    content = bytearray((tmp_path / "c.db").read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xee" * 64
    (tmp_path / "c.db").write_bytes(content)

    async def read() -> None:
        kv = opened(tmp_path / "c.db")
        try:
            await kv.range(b"k/")
        finally:
            await kv.aclose()

    with pytest.raises(DamagedData, match="damaged"):
        await read()


async def test_a_lock_held_by_another_does_not_hold_up_the_loop(tmp_path: Path) -> None:
    kv = opened(tmp_path / "c.db")
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    done = []

    async def change() -> None:
        await kv.transact([], [Put(b"a", b"1")])
        done.append(True)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            await trio.testing.wait_all_tasks_blocked()
            assert await kv.get(b"a") is None  # the loop runs, and readers are not held up
            assert not done
            other.execute("COMMIT")
    other.close()
    assert done == [True]
    assert kv.statistics().transactions_waited == 1
    await kv.aclose()


async def test_a_lock_held_for_too_long_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = opened(tmp_path / "c.db")
    monkeypatch.setattr(catalog_connection, "BUSY_SECONDS_MAX", 0.02)
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CatalogUnavailable, match="locked"):
        await kv.transact([], [Put(b"a", b"1")])
    other.execute("ROLLBACK")
    other.close()
    assert (await kv.transact([Unchanged(b"a", 0)], [Put(b"a", b"1")])).succeeded
    await kv.aclose()


async def test_one_barrier_serves_all_who_asked_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = opened(tmp_path / "c.db")
    gate = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: gate.wait(5))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kv.make_durable)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(10):
            nursery.start_soon(kv.make_durable)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
    assert kv.statistics().barriers == 2  # the ten came after the first had begun: one more for all of them
    assert kv.statistics().barrier_callers == 11
    await kv.aclose()


async def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = opened(tmp_path / "c.db")
    with monkeypatch.context() as patched:

        def fail(_: int) -> None:
            raise OSError(5, "Input/output error")

        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(StoreError, match="can't be synced"):
            await kv.make_durable()
    with pytest.raises(StoreError, match="can't be synced"):
        await kv.make_durable()
    assert "can't be synced" in kv.statistics().last_error
    await kv.aclose()


async def test_the_log_is_checkpointed_and_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_maintenance, "WAL_SIZE_BYTES_SOFT", 256 * 1024)
    monkeypatch.setattr(catalog_sqlite, "WAL_LOOKED_AT_EVERY", 8)
    monkeypatch.setattr(catalog_maintenance, "CHECKPOINT_INTERVAL_SECONDS_MIN", 0.0)
    monkeypatch.setattr(catalog_maintenance, "LOG_REVISIONS_KEPT", 50)
    monkeypatch.setattr(catalog_rows, "LOG_REVISIONS_TRIMMED_AT_ONCE", 20)
    kv = opened(tmp_path / "c.db")
    for number in range(400):
        await kv.transact([], [Put(b"k/%d" % number, b"v" * 500)])
    await trio.to_thread.run_sync(kv._maintenance.join)
    kv._maintenance._maintain()
    assert kv.statistics().checkpoints >= 1
    assert kv.statistics().checkpoint_failures == 0
    assert os.path.getsize(tmp_path / "c.db-wal") < 256 * 1024
    assert await kv.count(b"k/") == 400
    assert await kv.revision() == 400
    with pytest.raises(CatalogCompacted):
        async with aclosing(kv.watch(0)) as events:
            await anext(events)
    async with aclosing(kv.watch(350)) as events:
        assert (await anext(events))[0].revision == 351
    await kv.aclose()


@pytest.mark.slow
async def test_a_cut_write_ahead_log_leaves_a_whole_number_of_transactions(tmp_path: Path) -> None:
    """A power cut keeps some prefix of what was not synced: whatever it is, no transaction is there in part."""
    kv = opened(tmp_path / "c.db")
    synced = 0
    for number in range(30):
        await kv.transact([], [Put(b"n", b"%d" % number), Put(b"a/%d" % number, b"x" * 300), Put(b"b/%d" % number, b"y" * 300)])
        if number == 9:
            await kv.make_durable()
            synced = os.path.getsize(tmp_path / "c.db-wal")
    wal = (tmp_path / "c.db-wal").read_bytes()
    database = (tmp_path / "c.db").read_bytes()
    seen = set()
    frames = range(WAL_HEADER_SIZE, len(wal) + 1, WAL_FRAME_SIZE)
    for cut in [*frames[::3], *(frame - 100 for frame in frames[1::3]), frames[-1]]:
        copy = tmp_path / f"copy-{cut}"
        copy.mkdir()
        (copy / "c.db").write_bytes(database)
        # What was not kept reads as zeros, as on a file system that had extended the file.
        (copy / "c.db-wal").write_bytes(wal[:cut] + bytes(len(wal) - cut))
        reopened = opened(copy / "c.db")
        entry = await reopened.get(b"n")
        count = 0 if entry is None else int(entry.value) + 1
        seen.add(count)
        assert await reopened.revision() == count
        assert await reopened.count(b"a/") == await reopened.count(b"b/") == count
        assert count >= 10 or cut < synced
        assert (await reopened.transact([Present(b"n")] if count else [], [Put(b"after", b"")])).revision == count + 1
        await reopened.aclose()
        shutil.rmtree(copy)
    assert {0, 10, 30} <= seen
    await kv.aclose()


def _statements(kv: SqliteCatalog) -> list[str]:
    """What is asked of the database from now on."""
    asked: list[str] = []
    kv._connection.set_trace_callback(asked.append)
    return asked


async def test_neighbours_asked_for_one_by_one_are_read_together(tmp_path: Path) -> None:
    kv, other = opened(tmp_path / "c.db"), opened(tmp_path / "c.db")
    keys = [b"d/1/file-%04d" % number for number in range(300)]
    for start in range(0, len(keys), 100):
        await other.transact([], [Put(key, b"v" + key) for key in keys[start : start + 100]])
    asked = _statements(kv)
    for key in keys:
        entry = await kv.get(key)
        assert entry is not None
        assert entry.value == b"v" + key
    assert len(asked) == 3 * 4  # of each hundred three, and then all of it
    assert await kv.get(b"d/1/file-01xx") is None
    assert len(asked) == 3 * 4  # it is known what isn't there
    await kv.transact([Unchanged(b"d/1/file-01xx", 0)], [Put(b"d/1/file-01xx", b"mine"), Delete(keys[120])])
    entry = await kv.get(b"d/1/file-01xx")
    assert entry is not None
    assert entry.value == b"mine"
    assert await kv.get(keys[120]) is None
    await other.transact([], [Put(b"d/1/file-01yy", b"another's")])
    assert await kv.get(b"d/1/file-01yy") is not None
    await other.transact([], [Put(keys[50], b"newer")])
    entry = await kv.get(keys[50])
    assert entry is not None
    assert entry.value == b"newer"
    await kv.aclose()
    await other.aclose()


async def test_a_damaged_neighbour_is_an_error_of_its_own_key(tmp_path: Path) -> None:
    kv, other = opened(tmp_path / "c.db"), opened(tmp_path / "c.db")
    keys = [b"d/1/file-%04d" % number for number in range(10)]
    await other.transact([], [Put(key, b"v") for key in keys])
    other._connection.execute("UPDATE kv SET value=x'00' WHERE key=?", (keys[7],))
    for key in (*keys[:7], *keys[8:]):
        assert await kv.get(key) is not None
    with pytest.raises(DamagedData, match="file-0007"):
        await kv.get(keys[7])
    with pytest.raises(DamagedData, match="file-0007"):
        await kv.get_many(keys)
    await kv.aclose()
    await other.aclose()


async def test_slack_is_free_pages_inside_and_is_made_again_when_half_of_it_is_used(tmp_path: Path) -> None:
    kv = SqliteCatalog.open(tmp_path / "c.db", writer_label="test", reserve_bytes=8 << 20)

    def free_pages() -> int:
        with closing(sqlite3.connect(kv.path)) as connection:
            return int(connection.execute("PRAGMA freelist_count").fetchone()[0])

    def rows() -> list[str]:
        with closing(sqlite3.connect(kv.path)) as connection:
            return [name for (name,) in connection.execute("SELECT name FROM meta")]

    assert kv.hold_room() == 0
    assert 512 <= free_pages() <= 520, "a quarter of the reserve"
    for number in range(2000):
        await kv.transact([], [Put(b"k/%d" % number, b"v" * 3000)])
    for _ in range(3):  # if the last ones used up what was made for them, the next one that looks sees it, and begins one thing
        await trio.to_thread.run_sync(kv._maintenance.join)
        for _ in range(catalog_sqlite.WAL_LOOKED_AT_EVERY):
            await kv.transact([], [Put(b"k/0", b"v" * 3000)])
    await trio.to_thread.run_sync(kv._maintenance.join)
    assert free_pages() > 200, "made again meanwhile"
    assert rows() == ["checkpoints"]
    assert not kv.is_short_of_room()
    with closing(sqlite3.connect(kv.path)) as connection:
        connection.execute("INSERT INTO meta VALUES('slack-7', 'left by a killed process')")
        connection.commit()
    kv._maintenance._slack_looked_at = float("-inf")
    for _ in range(2):
        for number in range(300):
            await kv.transact([], [Put(b"l/%d" % number, b"v" * 3000)])
        await trio.to_thread.run_sync(kv._maintenance._maintain)
    assert rows() == ["checkpoints"]
    assert await kv.count(b"k/") == 2000
    await kv.aclose()


async def test_whether_the_log_is_cut_hangs_on_the_room_when_it_was_copied(tmp_path: Path) -> None:
    """The drive may have become full meanwhile, and what cutting the log gives back would be anybody's."""
    kv = SqliteCatalog.open(tmp_path / "c.db", writer_label="test", reserve_bytes=1 << 20)
    assert kv.hold_room() == 0
    for number in range(100):
        await kv.transact([], [Put(b"k/%d" % number, b"v" * 3000)])
    await trio.to_thread.run_sync(kv._maintenance.join)
    database, log = Path(kv.path), Path(f"{kv.path}-wal")
    held = log.stat().st_blocks * 512
    size_when_asked = []

    def is_scarce() -> bool:
        size_when_asked.append(database.stat().st_size)
        return True

    with closing(catalog_connection.connect(kv.path)) as connection, open(log, "rb") as file:
        assert catalog_maintenance.checkpoint(connection, file.fileno(), keep_file=is_scarce) == 1
    assert size_when_asked[0] > 300_000, "all of it was copied"
    assert log.stat().st_blocks * 512 == held
    await kv.aclose()


async def test_what_can_wait_waits_on_a_full_drive_until_slack_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(1 << 40, 1 << 40, 1 << 20)
    monkeypatch.setattr(catalog_room, "room_at", lambda path: room)
    kv = SqliteCatalog.open(tmp_path / "c.db", writer_label="test", reserve_bytes=8 << 20)
    kv.hold_room()
    assert not kv.is_short_of_room()
    room = Room(1 << 20, 1 << 40, 1 << 20)
    assert not kv.is_short_of_room(), "the slack is whole"
    for number in range(400):
        await kv.transact([], [Put(b"k/%d" % number, b"v" * 3000)])
    assert kv.is_short_of_room()
    with pytest.raises(CatalogFull, match="tried again"):
        await Versions(kv, StoreId(bytes(16)), 1, lambda: 1).commit_local([])
    room = Room(1 << 40, 1 << 40, 1 << 20)
    kv._maintenance._slack_looked_at = float("-inf")
    kv.hold_room()
    assert not kv.is_short_of_room()
    await kv.aclose()


async def test_catalogs_that_come_and_go_leave_no_descriptor(tmp_path: Path) -> None:
    """SQLite removes the files of a database's log with its last connection."""
    before: list[str] = []
    for turn in range(3):
        first = SqliteCatalog.open(tmp_path / "c.db", writer_label="first")
        second = SqliteCatalog.open(tmp_path / "c.db", writer_label="second")
        await first.transact([], [Put(b"key", b"%d" % turn)])
        await first.aclose()
        assert (await second.get(b"key")) is not None
        await second.aclose()
        before = before or os.listdir("/proc/self/fd")
        assert len(os.listdir("/proc/self/fd")) == len(before)
