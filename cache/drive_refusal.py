"""A drive that takes no writes any more, as ext4 does after errors: what can be read of it is still served.

The file system may say so in its mount flags or not (an aborted journal), so a write is tried that leaves nothing behind.
"""

import contextlib
import errno
import os
import sqlite3
from pathlib import Path

_REFUSALS = (errno.EROFS, errno.EIO)


def refuses_writes(directory: str | os.PathLike[str]) -> str:
    """Why no file can be made in the directory, or "": also where it is only full. Blocks shortly."""
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in _REFUSALS:
            return os.strerror(error.errno)
    return ""


def is_refusal(error: sqlite3.Error) -> bool:
    """Whether the drive failed or takes no writes: not that it is full, or the file locked or damaged."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code != sqlite3.SQLITE_IOERR_SHMSIZE and code & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)


def connect_read_only(path: Path) -> sqlite3.Connection:
    """The database on a drive that takes no writes: nobody else writes it either. Raises `sqlite3.Error`."""
    wal = Path(f"{path}-wal")
    whole = not wal.exists() or not wal.stat().st_size  # then there may be no index of the log, and none can be made
    options = "immutable=1" if whole else "readonly_shm=1"
    uri = f"{path.absolute().as_uri()}?mode=ro&{options}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def copy_in_memory(path: Path) -> sqlite3.Connection:
    """A database in memory with the content of the file, which nobody else writes: for small ones. Raises `sqlite3.Error`."""
    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        with contextlib.closing(connect_read_only(path)) as file:
            file.backup(memory)
    except BaseException:
        memory.close()
        raise
    return memory
