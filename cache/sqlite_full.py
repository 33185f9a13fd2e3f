"""Which of SQLite's errors mean that no space is left."""

import sqlite3


def is_full(error: sqlite3.Error) -> bool:
    """Whether the database, its log or the log's index could not grow. Nothing is damaged; with more room the same succeeds."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
