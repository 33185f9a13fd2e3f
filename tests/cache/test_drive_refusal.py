"""What counts as a drive that takes no writes, and what is still read from one."""

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.drive_refusal import connect_read_only, copy_in_memory, is_refusal, refuses_writes


def _error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("said by SQLite")
    error.sqlite_errorcode = code
    return error


def _refusing(number: int) -> Callable[..., int]:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_directory_that_takes_files_refuses_nothing_and_stays_empty(tmp_path: Path) -> None:
    assert refuses_writes(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_a_drive_that_takes_no_writes_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _refusing(number))
        said = refuses_writes(tmp_path)
    assert said == os.strerror(number)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EOPNOTSUPP])
def test_a_full_drive_is_none_that_takes_no_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _refusing(number))
        said = refuses_writes(tmp_path)
    assert said == ""


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        (sqlite3.SQLITE_READONLY, True),
        (sqlite3.SQLITE_READONLY_DBMOVED, True),
        (sqlite3.SQLITE_IOERR, True),
        (sqlite3.SQLITE_IOERR_FSYNC, True),
        (sqlite3.SQLITE_IOERR_SHMSIZE, False),  # the shared index can't grow: the drive is full
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_NOTADB, False),
    ],
)
def test_which_errors_of_a_database_are_the_drive_s(code: int, refused: bool) -> None:
    assert is_refusal(_error(code)) is refused


def test_an_error_without_a_code_is_not_the_drive_s() -> None:
    assert not is_refusal(sqlite3.ProgrammingError("a bug of ours"))


def _database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE fact (name TEXT)")
    connection.execute("INSERT INTO fact VALUES ('one')")
    return connection


@pytest.mark.parametrize("open_log", [False, True])
def test_a_database_is_read_with_its_log_and_not_written(tmp_path: Path, open_log: bool) -> None:
    path = tmp_path / "with space?.db"
    with closing(_database(path)) as writer:
        if not open_log:
            writer.close()
        before = {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)}
        with closing(connect_read_only(path)) as connection:
            assert connection.execute("SELECT name FROM fact").fetchall() == [("one",)]
            with pytest.raises(sqlite3.OperationalError):
                connection.execute("INSERT INTO fact VALUES ('two')")
        assert {name: os.stat(tmp_path / name).st_mtime_ns for name in os.listdir(tmp_path)} == before


def test_a_copy_in_memory_takes_changes_that_the_file_does_not_get(tmp_path: Path) -> None:
    path = tmp_path / "small.db"
    _database(path).close()
    before = path.read_bytes()
    with closing(copy_in_memory(path)) as memory:
        memory.execute("INSERT INTO fact VALUES ('two')")
        assert memory.execute("SELECT count(*) FROM fact").fetchone() == (2,)
    assert path.read_bytes() == before


def test_there_is_no_copy_of_what_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "foreign.db").write_bytes(b"not a database" * 500)
    with pytest.raises(sqlite3.DatabaseError):
        copy_in_memory(tmp_path / "foreign.db")
    with pytest.raises(sqlite3.Error):
        copy_in_memory(tmp_path / "none.db")
