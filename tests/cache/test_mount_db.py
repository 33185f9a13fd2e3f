"""`mount.db`: rows, exposure, the order versions wait in, other processes' view, and databases that can't be used."""

import shutil
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from ckptfs.cache import boot
from ckptfs.cache.boot import boot_id
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.cache.mount_db import (
    BOOT_FACT,
    OWED_MAX,
    Exposure,
    FileRow,
    FileState,
    HandleRow,
    MountDatabase,
    RemovedRow,
    WaitingVersion,
)
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.sqlite_files import log_is_cut


def _id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _row(number: int, state: FileState = FileState.OPEN, size: int = 0, exposed_ns: int = 0, **fields: object) -> FileRow:
    row = FileRow(
        InodeNumber(number), Vid(_id(number)), SegmentId(_id(number + 1000)), state, size, exposed_ns, None, b"name-%d" % number
    )
    return row._replace(**fields)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mount.db"


@pytest.fixture
def database(path: Path) -> Iterator[MountDatabase]:
    with closing(MountDatabase(path)) as opened:
        yield opened


def test_facts_are_set_again(database: MountDatabase) -> None:
    assert database.fact("boot") is None
    database.set_fact("boot", b"a")
    database.set_fact("boot", b"")
    assert database.fact("boot") == b""


def test_rows_come_back_as_they_were_put_also_from_the_next_process(database: MountDatabase, path: Path) -> None:
    rows = [
        _row(5, FileState.LOCAL, 1 << 40, 30, path_hint=b"\xff/\x00"),
        _row(6, FileState.ORPHAN, 0, 10, orphan=b"record", backing_id=4),
        _row(7, FileState.OPEN, 9, 20),
    ]
    for row in rows:
        database.put_file(row)
    assert database.files() == [rows[1], rows[2], rows[0]]
    assert database.file(InodeNumber(5)) == rows[0]
    assert database.file(InodeNumber(8)) is None
    database.put_file(rows[0]._replace(size=1))
    with closing(MountDatabase(path)) as again:
        assert again.files() == [rows[1], rows[2], rows[0]._replace(size=1)]


def test_a_file_and_its_handle_are_put_together(database: MountDatabase) -> None:
    handle = HandleRow(1 << 40, InodeNumber(5), 0o102001, 1)
    database.put_file(_row(5, backing_id=3), handle)
    database.put_handle(HandleRow(7, InodeNumber(5), 0, 1))
    assert database.handles() == [HandleRow(7, InodeNumber(5), 0, 1), handle]
    database.remove_handle(7)
    database.remove_handle(7)
    assert database.handles() == [handle]
    database.remove_handle_and_backing(handle.fh)
    assert database.handles() == []
    assert database.files() == [_row(5, backing_id=-3)]


def test_what_was_noted_by_a_killed_process_is_committed_by_the_next(path: Path) -> None:
    killed = MountDatabase(path)
    killed.take_over()
    killed.put_file(_row(5, backing_id=3), HandleRow(1, InodeNumber(5), 1, 1))
    assert [row.ino for row in killed.files()] == [5]  # committed: somebody asked
    killed.put_file(_row(6, backing_id=4), HandleRow(2, InodeNumber(6), 1, 1))
    killed.put_handle(HandleRow(3, InodeNumber(5), 0, 1))
    killed.remove_handle_and_backing(2)
    killed.remove_handle(1)
    with closing(MountDatabase(path)) as looking:  # as the supervisor does, and a new release before its turn
        assert [row.ino for row in looking.files()] == [5]
    killed.close()
    for _ in range(2):
        with closing(MountDatabase(path)) as next_one:
            next_one.take_over()
            assert next_one.handles() == [HandleRow(3, InodeNumber(5), 0, 1)]
            assert next_one.files() == [_row(5, backing_id=3), _row(6, backing_id=-4)]


def test_what_was_noted_in_an_earlier_boot_means_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may take committed rows back, and a note of before would follow on one of after."""
    killed = MountDatabase(path)
    killed.take_over()
    killed.put_handle(HandleRow(1, InodeNumber(5), 0, 1))
    killed.close()
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(boot, "BOOT_ID", tmp_path / "boot_id")
    with closing(MountDatabase(path)) as database:
        database.take_over()
        assert database.handles() == []


def test_no_more_than_some_changes_wait(path: Path) -> None:
    with closing(MountDatabase(path)) as database, closing(MountDatabase(path)) as other:
        database.take_over()
        for number in range(1, OWED_MAX):
            database.put_handle(HandleRow(number, InodeNumber(5), 0, 1))
        assert other.handles() == []
        database.put_handle(HandleRow(OWED_MAX, InodeNumber(5), 0, 1))
        assert len(other.handles()) == OWED_MAX


@pytest.mark.parametrize("seed", range(20))
def test_changes_that_are_committed_together_leave_what_they_leave_one_by_one(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    held: defaultdict[int, list[int]] = defaultdict(list)
    with closing(MountDatabase(tmp_path / "together")) as together, closing(MountDatabase(tmp_path / "alone")) as alone:
        together.take_over()
        for fh in range(1, 150):
            ino = random.randrange(6)
            row, handle = _row(ino, backing_id=random.choice([None, fh])), HandleRow(fh, InodeNumber(ino), 1, 1)
            closed = held[ino].pop(random.randrange(len(held[ino]))) if held[ino] and random.random() < 0.6 else 0
            for database in (together, alone):
                if closed and held[ino]:
                    database.remove_handle(closed)
                elif closed:
                    database.remove_handle_and_backing(closed)
                elif held[ino] and fh % 3:
                    database.put_handle(handle)
                else:
                    database.put_file(row, handle)
            if not closed:
                held[ino].append(fh)
        assert together.handles() == alone.handles()
        assert {row.ino: row for row in together.files()} == {row.ino: row for row in alone.files()}


def test_notes_of_another_database_mean_nothing(path: Path) -> None:
    with closing(MountDatabase(path)) as database:
        database.take_over()
        database.put_handle(HandleRow(1, InodeNumber(5), 0, 1))
    for file in path.parent.glob("mount.db*"):
        file.unlink()
    with closing(MountDatabase(path)) as anew:
        anew.take_over()
        assert anew.handles() == []


def test_a_new_connection_knows_no_handles_and_no_backing_ids(database: MountDatabase) -> None:
    database.put_file(_row(5, backing_id=3), HandleRow(1, InodeNumber(5), 1, 1))
    database.put_file(_row(6, backing_id=4))
    database.forget_handles()
    assert database.handles() == []
    assert database.files() == [_row(5), _row(6)]


def test_a_protected_version_keeps_its_row_only_while_it_is_used(database: MountDatabase) -> None:
    database.put_file(_row(5, FileState.LOCAL), HandleRow(1, InodeNumber(5), 0, 1))
    database.put_file(_row(6, FileState.LOCAL))
    database.put_file(_row(7, FileState.OPEN))
    database.set_protected([Vid(_id(number)) for number in (5, 6, 7, 8)], in_use={Vid(_id(5))})
    assert [(row.ino, row.state) for row in database.files()] == [(5, FileState.PROTECTED), (7, FileState.OPEN)]


def test_states_are_set_by_version_so_that_a_newer_one_is_not_touched(database: MountDatabase) -> None:
    database.put_file(_row(5))
    database.put_file(_row(6, vid=Vid(_id(600))))
    database.set_states([(FileState.LOCAL, 50, InodeNumber(5), Vid(_id(5))), (FileState.LOCAL, 60, InodeNumber(6), Vid(_id(6)))])
    assert [(row.state, row.size) for row in database.files()] == [(FileState.LOCAL, 50), (FileState.OPEN, 0)]


def test_rows_are_removed(database: MountDatabase) -> None:
    for number in range(5, 9):
        database.put_file(_row(number))
    database.remove_files([InodeNumber(5), InodeNumber(7), InodeNumber(99)])
    assert [row.ino for row in database.files()] == [6, 8]


def test_exposure_counts_what_a_death_would_lose(database: MountDatabase) -> None:
    assert database.exposure() == Exposure(0, 0, None)
    database.put_file(_row(5, FileState.OPEN, 1000, 30))  # of that its segment says more
    database.put_file(_row(6, FileState.LOCAL, 10, 40))
    database.put_file(_row(7, FileState.LOCAL, 5, 60))
    database.put_file(_row(8, FileState.PROTECTED, 7, 1))
    database.put_file(_row(9, FileState.ORPHAN, 7, 2))
    assert database.exposure() == Exposure(2, 15, 40)


def test_prefixes_wait_behind_what_is_closed(database: MountDatabase, path: Path) -> None:
    prefix = WaitingVersion(InodeNumber(5), Vid(_id(1)), SegmentId(_id(2)), 7, 1, b"log", is_prefix=True)
    database.put_file(_row(6, FileState.LOCAL, 10, 40))
    database.put_prefix(prefix._replace(vid=Vid(_id(9))))
    database.put_prefix(prefix)
    assert database.prefixes() == [prefix]
    with closing(MountDatabaseReader(path)) as reader:
        assert [(waiting.ino, waiting.is_prefix) for waiting in reader.waiting(9)] == [(6, False), (5, True)]
        assert [waiting.ino for waiting in reader.waiting(1)] == [6]
        database.remove_prefixes([InodeNumber(5), InodeNumber(99)])
        assert [waiting.ino for waiting in reader.waiting(9)] == [6]
    assert database.exposure() == Exposure(1, 10, 40)


def test_versions_wait_in_the_order_of_their_exposure(database: MountDatabase, path: Path) -> None:
    for number, exposed_ns in ((5, 30), (6, 10), (7, 20), (8, 40)):
        database.put_file(_row(number, FileState.LOCAL, number, exposed_ns))
    database.put_file(_row(9, FileState.OPEN, 0, 1))
    with closing(MountDatabaseReader(path)) as reader:
        assert [waiting.ino for waiting in reader.waiting(3)] == [6, 7, 5]
        assert reader.waiting(1) == [WaitingVersion(InodeNumber(6), Vid(_id(6)), SegmentId(_id(1006)), 6, 10, b"name-6")]
        database.set_protected([Vid(_id(6))])
        assert [waiting.ino for waiting in reader.waiting(9)] == [7, 5, 8]


def test_a_reader_that_comes_before_the_writer_finds_nothing(path: Path) -> None:
    with closing(MountDatabaseReader(path)) as reader:
        assert reader.waiting(5) == []
        assert not path.exists()
        path.touch()
        assert reader.waiting(5) == []
        with closing(MountDatabase(path)) as database:
            database.put_file(_row(5, FileState.LOCAL))
            assert [waiting.ino for waiting in reader.waiting(5)] == [5]


def test_a_reader_in_another_process_sees_what_was_put_and_holds_nobody_up(database: MountDatabase, path: Path) -> None:
    database.put_file(_row(5, FileState.LOCAL))
    code = (
        "import sys, pathlib; from ckptfs.cache.mount_db_reader import MountDatabaseReader as R;"
        "r = R(pathlib.Path(sys.argv[1])); [print(len(r.waiting(9)), flush=True) for _ in sys.stdin]"
    )
    command = [sys.executable, "-P", "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for count in (1, 2):
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"%d\n" % count
            database.put_file(_row(6, FileState.LOCAL))
            database.checkpoint()
        process.communicate(timeout=10)


def test_what_was_put_survives_a_kill_at_any_moment(path: Path) -> None:
    """The writer is killed between two rows that go together, again and again: a handle never comes without its file."""
    code = (
        "import sys, pathlib; from ckptfs.cache.mount_db import *;"
        "d = MountDatabase(pathlib.Path(sys.argv[1])); print('ready', flush=True);"
        "i = len(d.handles()) * 7\n"
        "while True:\n"
        "    i += 1\n"
        "    d.put_file(FileRow(i, b'v' * 16, b's' * 16, FileState.OPEN, 0, i, None, b''), HandleRow(i, i, 1, 1))\n"
        "    print(i, flush=True)"
    )
    for kills in range(2):
        with subprocess.Popen([sys.executable, "-P", "-c", code, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(20 + kills)]
            process.kill()
            lines += process.stdout.readlines()
        told = [int(line) for line in lines[1:] if line.endswith(b"\n")]
        with closing(MountDatabase(path)) as database:
            inos = {row.ino for row in database.files()}
            handles = {handle.ino for handle in database.handles()}
        assert handles <= inos
        assert set(told) <= handles


# Databases that can't be used


def _whole(path: Path) -> bytes:
    """A database with rows, checkpointed into its one file."""
    with closing(MountDatabase(path)) as database:
        for number in range(200):
            database.put_file(_row(number + 1, FileState.LOCAL))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["no database", "header", "schema", "cut", "cut between pages", "a page", "another's"])
def test_a_damaged_database_is_refused_by_name_and_left_alone(path: Path, damage: str) -> None:
    whole = _whole(path)
    leaf = whole.index(b"name-77")
    if damage == "another's":
        path.unlink()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE precious(x)")
    else:
        path.write_bytes(
            {
                "no database": b"this is no database, but long enough to be one\n" * 100,
                "header": bytes(100) + whole[100:],
                "schema": whole[:100] + b"\xff" * 900 + whole[1000:],
                "cut": whole[:3000],
                "cut between pages": whole[: len(whole) // 8192 * 4096],
                "a page": whole[: leaf // 4096 * 4096] + b"\xff" * 64 + whole[leaf // 4096 * 4096 + 64 :],
            }[damage]
        )
    before = path.read_bytes()
    with pytest.raises(DamagedData, match="it is rebuilt from the catalog") as caught:
        MountDatabase(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def _whole_log(path: Path, directory: Path) -> Path:
    """A database as a kill leaves it: 20 rows that are in its log only."""
    directory.mkdir()
    with closing(MountDatabase(path)) as database:
        for number in range(20):
            database.put_file(_row(number + 1))
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", directory / f"mount.db{suffix}")
    return directory / "mount.db"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_flipped_bit_in_its_log_is_noticed(path: Path, tmp_path: Path, part: float) -> None:
    killed = _whole_log(path, tmp_path / "killed")
    log = bytearray(Path(f"{killed}-wal").read_bytes())
    log[int(len(log) * part) + 5] ^= 4
    Path(f"{killed}-wal").write_bytes(log)
    with pytest.raises(DamagedData, match=r"mount\.db-wal is damaged"):
        MountDatabase(killed)


def test_a_log_that_a_power_cut_left_out_of_order_is_no_damage(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its newest rows were never synced. What was is there, and what lies behind the gap is not found again after a kill."""
    with closing(MountDatabase(path)) as database:
        database.set_fact(BOOT_FACT, boot_id())
    cut = _whole_log(path, tmp_path / "cut")
    log = bytearray(Path(f"{cut}-wal").read_bytes())
    log[32 + 14 * 4120 : 32 + 15 * 4120] = bytes(4120)
    Path(f"{cut}-wal").write_bytes(log)
    with pytest.raises(DamagedData):
        MountDatabase(cut)
    (tmp_path / "boot_id").write_text("another\n")
    monkeypatch.setattr(boot, "BOOT_ID", tmp_path / "boot_id")
    with closing(MountDatabase(cut)) as database:
        assert 0 < len(database.files()) < 20
        database.set_fact(BOOT_FACT, boot_id())
        assert not log_is_cut(cut)


def test_what_a_kill_left_in_its_log_is_taken_up(path: Path, tmp_path: Path) -> None:
    with closing(MountDatabase(_whole_log(path, tmp_path / "killed"))) as database:
        assert len(database.files()) == 20


def test_a_reader_that_can_not_read_does_not_say_that_nothing_waits(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE file(ino)")
    with closing(MountDatabaseReader(path)) as reader, pytest.raises(StoreError, match="can't be read now"):
        reader.waiting(5)


def test_another_process_is_told_of_damage(path: Path) -> None:
    whole = _whole(path)
    leaf = whole.index(b"name-77") // 4096 * 4096
    path.write_bytes(whole[:leaf] + b"\xff" * 64 + whole[leaf + 64 :])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    with closing(MountDatabaseReader(path)) as reader, pytest.raises(DamagedData, match="is damaged"):
        reader.waiting(1000)


def test_a_database_of_a_newer_format_is_refused_and_left_alone(path: Path) -> None:
    with closing(MountDatabase(path)) as database:
        database.set_fact("format", b"2")
    with pytest.raises(StoreError, match=r"has format 2, .* use the release that wrote it"):
        MountDatabase(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT value FROM fact WHERE name = 'format'").fetchone() == (b"2",)


def test_a_directory_in_its_place_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StoreError, match="can't be opened"):
        MountDatabase(path)


def test_a_put_takes_microseconds(database: MountDatabase) -> None:
    started = time.perf_counter()
    for number in range(1, 301):
        database.put_file(_row(number), HandleRow(number, InodeNumber(number), 1, 1))
    assert time.perf_counter() - started < 0.3  # 1 ms each; about 30 µs where nothing else runs


def test_a_database_from_before_removed_inodes_were_kept_opens(tmp_path: Path) -> None:
    with closing(MountDatabase(tmp_path / "mount.db")):
        pass
    with closing(sqlite3.connect(tmp_path / "mount.db")) as older:
        older.execute("DROP TABLE removed")
    with closing(MountDatabase(tmp_path / "mount.db")) as database:
        database.take_over()
        rows = [RemovedRow(InodeNumber(5), 1, 0, b"record"), RemovedRow(InodeNumber(6), 1, 8, b"other")]
        for row in rows:
            database.put_removed_inode(row)
        database.forget_removed_inode(InodeNumber(6))
        assert database.removed_inodes(1) == rows[:1]
        assert database.removed_inodes(2) == []  # another connection's kernel has none of them
        assert database.removed_inodes(1) == []
