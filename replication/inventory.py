"""What a store holds that a lost catalog can be rebuilt from: read from its files while its node is down, changing nothing.

An inventory can be kept in a file, to be carried to where the catalog is rebuilt: magic `b"ckptinv\\n"`, a hash of all that
follows (xxh3-128, 16 bytes), then the `Inventory` in msgpack. It is valid if the hash is right and the record can be read.
Readers refuse other format versions.
"""

import contextlib
import io
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec

from ckptfs.cache.catalog_archive import ArchiveHeader, ArchiveReader, open_archive, packed
from ckptfs.cache.catalog_snapshot import of_replica
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.errors import CacheError, DamagedData, StoreError
from ckptfs.cache.ids import ID_SIZE, InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.mount_db import CATALOG_FACT, FileState
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.replication.errors import PeerRefused, ShardDamaged, ShardNotFound
from ckptfs.replication.shard_reader import ShardReader
from ckptfs.replication.small_copies import HeldCopy, right_copies

FORMAT_VERSION = 1
MAGIC = b"ckptinv\n"
_ID = msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)


class FoundShard(msgspec.Struct, array_like=True, frozen=True):
    """One shard file whose header and footer are right; its cells were not read."""

    vid: Annotated[Vid, _ID]
    index: int
    data_shards: int
    parity_shards: int
    cell_size: int
    size: int
    ino: InodeNumber
    revision: int
    root: Annotated[bytes, _ID]
    content_root: Annotated[bytes, _ID]
    path_hint: bytes
    stored_at_ns: int


class FoundCopy(msgspec.Struct, array_like=True, frozen=True):
    """One whole copy of a small file, whose bytes are right."""

    vid: Annotated[Vid, _ID]
    ino: InodeNumber
    size: int
    revision: int
    root: Annotated[bytes, _ID]
    path_hint: bytes
    stored_at_ns: int


class FoundSegment(msgspec.Struct, array_like=True, frozen=True):
    """One segment: its size, and when it was last written."""

    segment: Annotated[SegmentId, _ID]
    size: int
    mtime_ns: int


class FoundClosed(msgspec.Struct, array_like=True, frozen=True):
    """One file that was closed and hashed here, and waits for protection, as `mount.db` says: its bytes are in that segment."""

    vid: Annotated[Vid, _ID]
    ino: InodeNumber
    segment: Annotated[SegmentId, _ID]
    path_hint: bytes


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What one store holds. `cluster` is None before its node first joined one; `seen_revision` is one the catalog had, 0 if none
    was noted. `archive` is the newest state of the catalog that lies there, as an archive, or empty; `archive_source` where it
    was. `damaged` counts shards whose header or footer can't be read, `trouble` says what else could not be."""

    format: int
    store: Annotated[StoreId, _ID]
    node: NodeId
    directory: str
    cluster: bytes | None
    seen_revision: int
    shards: list[FoundShard]
    copies: list[FoundCopy]
    segments: list[FoundSegment]
    closed: list[FoundClosed]
    damaged: int
    archive: bytes
    archive_source: str
    trouble: list[str]

    @property
    def state(self) -> ArchiveReader | None:
        """The state of the catalog that lies there. Raises `DamagedData`."""
        return ArchiveReader(io.BytesIO(self.archive)) if self.archive else None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Inventory)


def pack_inventory(inventory: Inventory) -> bytes:
    """The bytes of an inventory's file."""
    body = _encoder.encode(inventory)
    return MAGIC + cell_hash(body) + body


def unpack_inventory(data: bytes) -> Inventory:
    """The inventory in these bytes. Raises `DamagedData`, and `StoreError` for another format version."""
    start = len(MAGIC) + 16
    if not data.startswith(MAGIC):
        raise DamagedData("not an inventory: its first bytes are foreign")
    body = memoryview(data)[start:]
    if cell_hash(body) != data[len(MAGIC) : start]:
        raise DamagedData("the inventory fails its hash")
    try:
        inventory = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedData(f"the inventory can't be read: {error}") from None
    if inventory.format != FORMAT_VERSION:
        raise StoreError(f"the inventory has format {inventory.format}, this program reads {FORMAT_VERSION}")
    return inventory


def take_inventory(path: Path) -> Inventory:
    """Look at all a store holds. Blocks, for some 0.1 ms a shard. Raises `StoreError` for what is no store, one in use, or
    one this user can't read."""
    store = StoreDirectory.open(path)
    if store.is_in_use():
        raise StoreError(f"a node runs on the store {path}; end all nodes first")
    shards, damaged = _shards(store.shards)
    trouble: list[str] = []
    archive, source = _newest_state(store, trouble)
    seen_revision, closed = _noted_by_mount(store.mount_db, trouble)
    copies: list[FoundCopy] = []
    if store.small_copies_db.exists():
        try:
            copies = [_found(copy) for copy in right_copies(store.small_copies_db)]
        except (sqlite3.Error, DamagedData) as error:
            trouble.append(f"{store.small_copies_db} can't be read: {error}")
    return Inventory(
        format=FORMAT_VERSION,
        store=store.store_id,
        node=store.node,
        directory=str(path.absolute()),
        cluster=store.cluster,
        seen_revision=seen_revision,
        shards=shards,
        copies=copies,
        segments=list(_segments(store.segments)),
        closed=closed,
        damaged=damaged,
        archive=archive,
        archive_source=source,
        trouble=trouble,
    )


def _shards(directory: Path) -> tuple[list[FoundShard], int]:
    found: list[FoundShard] = []
    damaged = 0
    for fan in sorted(directory.iterdir()) if directory.exists() else ():
        for name in sorted(os.listdir(fan)) if fan.is_dir() else ():
            digits, _, number = name.partition(".")
            if len(digits) != 2 * ID_SIZE or not number.isdecimal():
                continue
            try:
                with ShardReader(f"{fan}/{name}", Vid(bytes.fromhex(digits)), int(number)) as reader:
                    header, footer = reader.header, reader.footer
                    found.append(
                        FoundShard(
                            header.vid, header.index, header.data_shards, header.parity_shards, header.cell_size, header.size,
                            footer.ino, footer.revision, footer.root, footer.content_root, footer.path_hint,
                            reader.held().stored_at_ns,
                        )
                    )  # fmt: skip
            except (ShardDamaged, ShardNotFound, ValueError):
                damaged += 1
            except PeerRefused as refused:
                raise StoreError(f"{fan}/{name}: {refused.message}; nothing was changed") from None
    return found, damaged


def _found(copy: HeldCopy) -> FoundCopy:
    return FoundCopy(copy.vid, copy.ino, copy.size, copy.revision, copy.root, copy.path_hint, copy.stored_at_ns)


def _segments(directory: Path) -> Iterator[FoundSegment]:
    if not directory.exists():
        return
    segments = Segments(directory)
    for segment in segments.all():
        with contextlib.suppress(OSError):
            status = os.stat(segments.path_of(segment))
            yield FoundSegment(segment, status.st_size, status.st_mtime_ns)


def _newest_state(store: StoreDirectory, trouble: list[str]) -> tuple[bytes, str]:
    """Of the copy of a SQLite catalog and the replica of one on etcd, whichever came further."""
    candidates: list[tuple[int, bytes, str]] = []
    if store.catalog_copy.exists():
        try:
            with open_archive(store.catalog_copy) as archive:
                candidates.append((archive.header.revision, store.catalog_copy.read_bytes(), str(store.catalog_copy)))
        except CacheError as error:
            trouble.append(str(error))
    if store.replica_db.exists():
        try:
            with of_replica(store.replica_db) as snapshot:
                data = b"".join(packed(*snapshot))
                candidates.append((snapshot.header.revision, data, str(store.replica_db)))
        except (CacheError, sqlite3.Error) as error:
            trouble.append(str(error))
    _, data, source = max(candidates, default=(0, b"", ""))
    return data, source


def _noted_by_mount(mount_db: Path, trouble: list[str]) -> tuple[int, list[FoundClosed]]:
    """A revision that the catalog has had, 0 if none is known, and the files that wait for protection."""
    if not mount_db.exists():
        return 0, []
    try:
        with closing(sqlite3.connect(f"{mount_db.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            row = connection.execute("SELECT value FROM fact WHERE name=?", (CATALOG_FACT,)).fetchone()
            waiting = connection.execute(
                "SELECT vid, ino, segment, path_hint FROM file WHERE state=?", (int(FileState.LOCAL),)
            ).fetchall()
            return int(row[0]) if row else 0, [FoundClosed(*one) for one in waiting]
    except (sqlite3.Error, ValueError, TypeError) as error:
        trouble.append(f"{mount_db} can't be read ({error}): what was closed last and never protected is not known")
        return 0, []


def state_header(inventory: Inventory) -> ArchiveHeader | None:
    """Whose state of the catalog lies in the store, and as of when."""
    state = inventory.state
    return None if state is None else state.header
