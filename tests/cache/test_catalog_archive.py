"""The archive of a catalog, byte for byte; that nothing else is ever taken for one; and catalogs filled from it.

The vector is format version 1: it never changes.
"""

import io
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.cache import catalog_archive, catalog_snapshot
from ckptfs.cache.catalog_archive import ArchiveHeader, ArchiveReader, open_archive, packed, write_archive
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_fill import batches, fill, recovery_from
from ckptfs.cache.catalog_format import (
    FILLING_KEY,
    RECOVERED_KEY,
    Recovered,
    Settings,
    Version,
    VersionState,
    entry_key,
    pack,
    unpack,
    version_key,
)
from ckptfs.cache.catalog_kv import KeyValue, Put, Unchanged
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_replica import ReplicatedCatalog
from ckptfs.cache.catalog_snapshot import of_catalog_file
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.errors import CatalogCompacted, CatalogUnavailable, DamagedData, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, Vid, new_segment_id
from ckptfs.cache.namespace import Namespace

OpenCatalog = Callable[..., KeyValue]

CLUSTER = b"C" * 16
STORE = StoreId(b"S" * 16)
HEADER = ArchiveHeader(CLUSTER, 4711)
RECORDS = [(b"c/format", b"1"), (b"d/0000000000000001/x", b""), (b"v/" + b"0" * 32, b"value")]
SETTINGS = Settings(1, CLUSTER, 4, 2, 4096)
VECTOR = bytes.fromhex(
    "636b70746361746c010000000000000043434343434343434343434343434343671200000000000000000000000000005dde7d79e20d05e3"
    "d9ba5f29def287b20800000001000000632f666f726d6174311400000000000000642f303030303030303030303030303030312f78220000"
    "0005000000762f303030303030303030303030303030303030303030303030303030303030303076616c7565000000000000000003000000"
    "00000000f6572562eda79093037cb01612718fa6636b707463656e64"
)


def archive_of(records: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(packed(HEADER, records))


def read(data: bytes) -> list[tuple[bytes, bytes]]:
    return list(ArchiveReader(io.BytesIO(data)).records())


def test_the_vector_is_what_it_was() -> None:
    assert archive_of(RECORDS) == VECTOR
    reader = ArchiveReader(io.BytesIO(VECTOR))
    assert (reader.header, reader.count, list(reader.records())) == (HEADER, 3, RECORDS)


def test_what_hangs_on_sessions_is_left_out() -> None:
    others = [b"c/compact", FILLING_KEY, b"h/00/00", b"l/node-0", b"o/node-0/1"]
    assert archive_of(sorted([*RECORDS, *((key, b"x") for key in others)])) == VECTOR


@pytest.mark.parametrize("at", range(len(VECTOR)))
def test_every_flipped_byte_is_found(at: int) -> None:
    damaged = bytearray(VECTOR)
    damaged[at] ^= 0x10
    with pytest.raises(DamagedData):
        read(bytes(damaged))


def test_every_cut_and_everything_behind_the_end_is_found() -> None:
    for length in range(len(VECTOR)):
        with pytest.raises(DamagedData):
            read(VECTOR[:length])
    with pytest.raises(DamagedData):
        read(VECTOR + b"\0")


@given(st.binary(max_size=300))
def test_nothing_else_is_an_archive(data: bytes) -> None:
    for tried in (data, VECTOR[:64] + data):
        try:
            read(tried)
        except (DamagedData, StoreError):
            continue
        assert tried == VECTOR


@given(st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=200)))
def test_round_trip(records: dict[bytes, bytes]) -> None:
    items = sorted((key, value) for key, value in records.items() if catalog_archive.belongs(key))
    assert read(archive_of(items)) == items


def test_records_out_of_order_are_not_written() -> None:
    with pytest.raises(ValueError, match="out of order"):
        archive_of(RECORDS[::-1])


def test_a_newer_format_is_refused() -> None:
    newer = VECTOR[:8] + b"\2" + VECTOR[9:48]
    with pytest.raises(StoreError, match="format 2"):
        read(newer + cell_hash(newer) + VECTOR[64:])


def test_an_archive_takes_the_place_of_an_older_one_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    write_archive(path, HEADER, RECORDS)
    with pytest.raises(ValueError, match="out of order"):
        write_archive(path, HEADER, RECORDS[::-1])
    assert path.read_bytes() == VECTOR
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [name.name for name in tmp_path.iterdir()] == ["archive"]
    path.write_bytes(VECTOR[:-1])
    with pytest.raises(DamagedData, match="archive: "), open_archive(path):
        pass


def test_no_transaction_has_two_names_of_one_directory() -> None:
    """They would have one place in readdir."""
    names = [(entry_key(InodeNumber(directory), b"%03d" % number), b"v") for directory in (1, 2) for number in range(50)]
    cut = list(batches([*names, *((b"i/%016x" % number, b"v" * 10) for number in range(500))]))
    for batch in cut:
        directories = [operation.key[:18] for operation in batch if operation.key.startswith(b"d/")]
        assert len(directories) == len(set(directories))
        assert len(batch) <= 100
    assert sum(map(len, cut)) == 600


async def a_tree(kv: KeyValue, files: int = 300) -> Namespace:
    namespace = Namespace(kv, STORE, 1, time.time_ns)
    await namespace.format_if_empty(SETTINGS)
    directory, _ = await namespace.make_directory(ROOT_INODE, b"dir", 0o755, 0, 0)
    for number in range(files):
        await namespace.create_file(directory, b"%04d" % number, 0o644, 0, 0, new_segment_id())
    return namespace


def records_of(entries: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    return {key: value for key, value in entries if catalog_archive.belongs(key) and not key.startswith(b"c/")}


async def test_a_filled_catalog_says_what_the_other_said_and_goes_on_beyond_it(
    kv: KeyValue, open_catalog: OpenCatalog, tmp_path: Path
) -> None:
    if isinstance(kv, ReplicatedCatalog):
        kv = kv._origin  # a catalog is filled before any node has a replica
    source = MemoryCatalog()
    namespace = await a_tree(source)
    entries = [(entry.key, entry.value) for entry in await source.range(b"")]
    header = ArchiveHeader(CLUSTER, await source.revision())
    recovery = recovery_from(header, b"R" * 16, seen_revision=5000)
    count = await fill(kv, "here", header, entries, recovery)
    assert count == len(entries)

    filled = open_catalog()
    now = [(entry.key, entry.value) for entry in await filled.range(b"")]
    assert records_of(now) == records_of(entries)
    assert unpack(Recovered, dict(now)[RECOVERED_KEY]).recoveries == [recovery]
    assert recovery.begins_at > 10**9
    if not isinstance(filled, MemoryCatalog):
        assert await filled.revision() > recovery.begins_at
        assert all(entry.mod_revision > recovery.begins_at for entry in await filled.range(b""))
        async with aclosing(filled.watch(header.revision)) as events:
            with pytest.raises(CatalogCompacted):
                await anext(events)
    assert await catalog_problems(filled) == []

    again = Namespace(filled, STORE, 2, time.time_ns)
    assert await again.settings() == SETTINGS
    directory, _ = await again.lookup(ROOT_INODE, b"dir")
    items = await again.readdir(directory)
    assert len({item.cookie for item in items}) == len(items) == 300
    new = await again.create_file(directory, b"new", 0o644, 0, 0, new_segment_id())
    assert new.ino >= 1 << 24, "numbers that may be in use since the state was taken aren't given out again"
    entry = await filled.get(b"i/%016x" % new.ino)
    assert entry is not None
    result = await filled.transact([Unchanged(entry.key, entry.mod_revision)], [Put(b"x", b"")])
    assert result.succeeded
    async with aclosing(filled.watch(result.revision - 1)) as events:
        assert b"x" in [event.key for event in await anext(events)]
    await namespace.kv.aclose()


async def test_only_an_empty_catalog_is_filled(kv: KeyValue) -> None:
    await a_tree(kv, 1)
    before = await kv.range(b"")
    with pytest.raises(StoreError, match="not empty"):
        await fill(kv, "here", HEADER, RECORDS, recovery_from(HEADER, b"R" * 16))
    assert await kv.range(b"") == before


async def test_a_half_filled_catalog_is_no_catalog_until_it_is_filled_anew(kv: KeyValue) -> None:
    source = MemoryCatalog()
    await a_tree(source, 20)
    entries = [(entry.key, entry.value) for entry in await source.range(b"")]
    header = ArchiveHeader(CLUSTER, 100)

    def cut_off() -> list[tuple[bytes, bytes]]:
        return [*entries[:30], (b"v/not a version", b"")]

    with pytest.raises(DamagedData):
        await fill(kv, "here", header, cut_off(), recovery_from(header, b"1" * 16))
    namespace = Namespace(kv, STORE, 1, time.time_ns)
    with pytest.raises(StoreError, match="half filled"):
        await namespace.format_if_empty(SETTINGS)
    await fill(kv, "here", header, entries, recovery_from(header, b"2" * 16))
    assert await kv.get(FILLING_KEY) is None
    assert records_of([(entry.key, entry.value) for entry in await kv.range(b"")]) == records_of(entries)


async def test_two_that_fill_one_catalog_do_not_mix(kv: KeyValue) -> None:
    source = MemoryCatalog()
    await a_tree(source, 20)
    entries = [(entry.key, entry.value) for entry in await source.range(b"")]
    header = ArchiveHeader(CLUSTER, 100)
    await kv.transact([], [Put(FILLING_KEY, b"somebody")])
    mark = await kv.get(FILLING_KEY)
    assert mark is not None
    await fill(kv, "here", header, entries, recovery_from(header, b"2" * 16))
    late = await kv.transact([Unchanged(FILLING_KEY, mark.mod_revision)], [Put(b"d/late", b"")])
    assert not late.succeeded


async def test_the_dead_come_after_what_waits_for_protection(kv: KeyValue) -> None:
    """So that none of them is reclaimed before what replaced it is protected (R1)."""
    source = MemoryCatalog()
    namespace = await a_tree(source, 5)
    dead = Version(1, InodeNumber(9), VersionState.DEAD, STORE, SegmentId(bytes(16)))
    await source.transact([], [Put(version_key(Vid(bytes(16))), pack(dead))])
    entries = [(entry.key, entry.value) for entry in await source.range(b"")]
    header = ArchiveHeader(CLUSTER, 100)
    await fill(kv, "here", header, entries, recovery_from(header, b"2" * 16))
    versions = await kv.range(b"v/")
    by_state = {unpack(Version, entry.value).state: entry.mod_revision for entry in versions}
    assert by_state[VersionState.DEAD] > max(
        entry.create_revision for entry in versions if unpack(Version, entry.value).state is VersionState.OPEN
    )
    await namespace.kv.aclose()


async def test_records_of_another_cluster_or_of_no_catalog_are_refused(kv: KeyValue) -> None:
    source = MemoryCatalog()
    await a_tree(source, 1)
    entries = [(entry.key, entry.value) for entry in await source.range(b"")]
    other = ArchiveHeader(b"D" * 16, 100)
    with pytest.raises(DamagedData, match="another cluster"):
        await fill(kv, "here", other, entries, recovery_from(other, b"2" * 16))
    with pytest.raises(DamagedData, match="lack"):
        await fill(kv, "here", HEADER, RECORDS[:2], recovery_from(HEADER, b"2" * 16))


async def test_a_snapshot_of_a_file_is_of_one_revision_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    kv = SqliteCatalog.open(path, writer_label="test")
    namespace = await a_tree(kv, 10)
    revision = await kv.revision()
    with of_catalog_file(path) as snapshot:
        records = iter(snapshot.records)
        first = next(records)
        await namespace.create_file(ROOT_INODE, b"later", 0o644, 0, 0, new_segment_id())
        rest = list(records)
    assert snapshot.header == ArchiveHeader(CLUSTER, revision)
    assert entry_key(ROOT_INODE, b"later") not in dict([first, *rest])
    assert len(rest) > 30
    await kv.aclose()


def test_what_is_no_catalog_gives_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"), of_catalog_file(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").write_bytes(b"x" * 8192)
    with pytest.raises((StoreError, DamagedData, CatalogUnavailable)), of_catalog_file(tmp_path / "other"):
        pass


async def test_a_file_the_drive_does_not_give_gives_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of SQLite's own would end the agent that makes the copy."""
    path = tmp_path / "catalog.db"
    kv = SqliteCatalog.open(path, writer_label="test")
    await a_tree(kv, 10)
    await kv.aclose()

    def fail(*_: object) -> bool:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(catalog_snapshot, "check_identity", fail)
        with pytest.raises(StoreError, match="disk I/O error"), of_catalog_file(path):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(catalog_snapshot, "newest_revision", fail)
        with pytest.raises(CatalogUnavailable, match="can't be read now"), of_catalog_file(path):
            pass
