"""All of a catalog at one revision, to be written as an archive: of its SQLite file, of a node's replica, or of etcd.

The first two block, and may be read while others use the file.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.catalog_archive import ArchiveHeader, Record
from ckptfs.cache.catalog_connection import BUSY_SECONDS_MAX, check_identity, connect, guarded, translated
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import FORMAT_KEY, SETTINGS_KEY, Settings, check_format, unpack
from ckptfs.cache.catalog_rows import is_right, newest_revision
from ckptfs.cache.errors import CacheError, CatalogUnavailable, DamagedData, StoreError

REPLICA_LAYOUT = 1


class Snapshot(NamedTuple):
    """`records` can be gone through once, while the snapshot is open; it raises `DamagedData` where one fails its checksum."""

    header: ArchiveHeader
    records: Iterable[Record]


def header_of(records: dict[bytes, bytes], revision: int, where: str) -> ArchiveHeader:
    """The header for a catalog with at least these two records. Raises `StoreError` where they say that it is none, or newer."""
    try:
        check_format(records[FORMAT_KEY])
        return ArchiveHeader(unpack(Settings, records[SETTINGS_KEY]).cluster, revision)
    except KeyError:
        raise StoreError(f"{where} is empty, or was never filled to its end: there is no catalog in it") from None


@contextlib.contextmanager
def of_catalog_file(path: Path) -> Iterator[Snapshot]:
    """A catalog on SQLite, also while nodes use it. Raises `StoreError`, `DamagedData`, `CatalogUnavailable`."""
    if not path.exists():
        raise StoreError(f"the catalog {path} does not exist")
    with closing(guarded(os.fspath(path), lambda: connect(os.fspath(path)))) as connection:
        connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS_MAX * 1000)}")
        if not guarded(os.fspath(path), lambda: check_identity(os.fspath(path), connection)):
            raise StoreError(f"the catalog {path} is empty")
        yield from _snapshot(connection, f"the catalog {path}", newest_revision)


@contextlib.contextmanager
def of_replica(path: Path) -> Iterator[Snapshot]:
    """What a node has of a catalog on etcd (`replica.db`). Raises `StoreError`, `DamagedData`, `CatalogUnavailable`."""
    where = f"the replica {path}"
    if not path.exists():
        raise StoreError(f"{where} does not exist")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        try:
            (layout,) = connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DamagedData(f"{where} is damaged ({error})") from None
        if layout != REPLICA_LAYOUT:
            raise StoreError(f"{where} has layout {layout}, this program knows {REPLICA_LAYOUT}")
        yield from _snapshot(connection, where, _replica_revision)


def _replica_revision(connection: sqlite3.Connection) -> int:
    (revision,) = connection.execute("SELECT value FROM meta WHERE name='revision'").fetchone()
    if not revision:
        raise StoreError("the replica was never loaded")
    return int(revision)


def _snapshot(connection: sqlite3.Connection, where: str, revision_of: Callable[[sqlite3.Connection], int]) -> Iterator[Snapshot]:
    try:
        connection.execute("BEGIN")
        revision = revision_of(connection)
        few = dict(_checked(connection, where, " WHERE key>=x'632f' AND key<x'6330'"))  # c/
    except sqlite3.Error as error:
        raise _meaning(where, error) from None
    yield Snapshot(header_of(few, revision, where), _checked(connection, where))


def _checked(connection: sqlite3.Connection, where: str, some: str = "") -> Iterator[Record]:
    try:
        for key, value, check_sum in connection.execute(f"SELECT key, value, check_sum FROM kv{some} ORDER BY key"):
            if not is_right(key, value, check_sum):
                raise DamagedData(f"{where}: record {key!r} is not what was written")
            yield key, value
    except sqlite3.Error as error:
        raise _meaning(where, error) from None


def _meaning(where: str, error: sqlite3.Error) -> CacheError:
    if isinstance(translated(where, error), DamagedData):
        return DamagedData(f"{where} is damaged ({error})")
    return CatalogUnavailable(f"{where} can't be read now ({error})")


async def of_etcd(catalog: EtcdCatalog) -> Snapshot:
    """A catalog on etcd; all of it is in memory then. Raises `StoreError`, `CatalogUnavailable`, `CatalogCompacted`."""
    entries, revision = await catalog.range_at(b"", first=b"")
    few = {entry.key: entry.value for entry in entries if entry.key.startswith(b"c/")}
    header = header_of(few, revision, f"the catalog {catalog.name} on etcd")
    return Snapshot(header, ((entry.key, entry.value) for entry in entries))
