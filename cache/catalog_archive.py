"""A whole catalog in one file, as it was at one revision: the archive, format version 1.

`ckptfs export` writes one, `ckptfs import` and `ckptfs recover` read it, and each node of a SQLite cluster keeps one in its store
(`catalog.copy`). All integers are little-endian, hashes are xxh3-128, 16 bytes (`checksum`).

Header, 64 bytes::

    offset size type  field
         0    8 bytes magic            b"ckptcatl"
         8    2 u16   format version   1
        10    6       zero
        16   16 bytes cluster          the cluster's id, as in `c/settings`
        32    8 u64   revision         of the catalog, at which all of it holds
        40    8       zero
        48   16 hash  of bytes 0 .. 47

Records, each key greater than the one before it::

         0    4 u32   key_length       1 .. 1024
         4    4 u32   value_length     at most 16 MiB
         8            key, value

Trailer, the last 40 bytes::

         0    8       zero             no record has a key of no length
         8    8 u64   count            of records
        16   16 hash  of the whole file up to here
        32    8 bytes magic            b"ckptcend"

An archive is valid if and only if header and trailer hash right, every zero above is zero, the records are in order and as many
as the trailer says, and the file ends with the trailer. It is read to its end before anything of it is believed.

Left out are keys that mean nothing in another catalog: those bound to sessions (`l/`, `h/`, `r/`), answers to requests of a
connection (`o/`), how far this engine's history was cut, and whether it is being filled. Readers refuse other format versions.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from ckptfs.cache.catalog_format import FILLING_KEY, HOLD_PREFIX, REPLICA_PREFIX, SESSION_PREFIX
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import ID_SIZE
from ckptfs.cache.store import sync_directory

FORMAT_VERSION = 1
KEY_SIZE_MAX = 1024
VALUE_SIZE_MAX = 16 << 20

_HEADER = struct.Struct("<8sH6x16sQ8x")
_RECORD = struct.Struct("<II")
_END = struct.Struct("<8xQ")
_MAGIC = b"ckptcatl"
_END_MAGIC = b"ckptcend"
_HASH_SIZE = 16
_LEFT_OUT = (SESSION_PREFIX, HOLD_PREFIX, REPLICA_PREFIX, b"o/", b"c/compact", FILLING_KEY)

Record = tuple[bytes, bytes]
"""Key and value."""


class ArchiveHeader(NamedTuple):
    """Whose catalog it is, and as of which revision."""

    cluster: bytes
    revision: int


def belongs(key: bytes) -> bool:
    """Whether the key is part of an archive."""
    return not key.startswith(_LEFT_OUT)


def pack_header(header: ArchiveHeader) -> bytes:
    """The first 64 bytes."""
    if len(header.cluster) != ID_SIZE:
        raise ValueError(f"a cluster's id of {len(header.cluster)} bytes")
    fields = _HEADER.pack(_MAGIC, FORMAT_VERSION, header.cluster, header.revision)
    return fields + cell_hash(fields)


def unpack_header(data: bytes) -> ArchiveHeader:
    """The header in the first 64 bytes. Raises `DamagedData`, and `StoreError` for another format version."""
    size = _HEADER.size
    if len(data) != size + _HASH_SIZE or data[:8] != _MAGIC:
        raise DamagedData("not a catalog archive: its first bytes are foreign")
    if cell_hash(data[:size]) != data[size:]:
        raise DamagedData("the archive's header fails its hash")
    _, version, cluster, revision = _HEADER.unpack(data[:size])
    if version != FORMAT_VERSION:
        raise StoreError(f"the archive has format {version}, this program reads {FORMAT_VERSION}: use the release that wrote it")
    if pack_header(ArchiveHeader(cluster, revision)) != data:
        raise DamagedData("the archive's header has bits set that must be zero")
    return ArchiveHeader(cluster, revision)


def packed(header: ArchiveHeader, records: Iterable[Record]) -> Iterator[bytes]:
    """The archive's bytes, piece by piece. The records come in the order of their keys; those that don't belong are left out.

    Raises `ValueError` for records out of order, or larger than can be.
    """
    digest = xxhash.xxh3_128()
    count, before = 0, b""
    piece = pack_header(header)
    digest.update(piece)
    yield piece
    for key, value in records:
        if not belongs(key):
            continue
        if not before < key or len(key) > KEY_SIZE_MAX or len(value) > VALUE_SIZE_MAX:
            raise ValueError(f"record {key[:80]!r} of {len(value)} bytes is out of order, or too large")
        piece = b"".join((_RECORD.pack(len(key), len(value)), key, value))
        digest.update(piece)
        yield piece
        count, before = count + 1, key
    piece = _END.pack(count)
    digest.update(piece)
    yield piece + digest.digest() + _END_MAGIC


def unpacked(read: Callable[[int], bytes]) -> Iterator[Record]:
    """The records of the archive whose bytes `read(length)` gives from its beginning; the header is hashed, not looked at.

    Raises `DamagedData`, perhaps after the last record only: nothing may be believed before the iterator has ended.
    """
    digest = xxhash.xxh3_128()
    digest.update(read(_HEADER.size + _HASH_SIZE))
    count, before = 0, b""
    while True:
        head = _read_exactly(read, _RECORD.size)
        key_length, value_length = _RECORD.unpack(head)
        digest.update(head)
        if not key_length:
            break
        if key_length > KEY_SIZE_MAX or value_length > VALUE_SIZE_MAX:
            raise DamagedData(f"the archive claims a record of {key_length} + {value_length} bytes")
        both = _read_exactly(read, key_length + value_length)
        digest.update(both)
        key = both[:key_length]
        if not before < key or not belongs(key):
            raise DamagedData(f"the archive's record {key[:80]!r} is out of order, or doesn't belong there")
        yield key, both[key_length:]
        count, before = count + 1, key
    rest = _read_exactly(read, 8)
    digest.update(rest)
    end = _read_exactly(read, _HASH_SIZE + len(_END_MAGIC))
    if end != digest.digest() + _END_MAGIC:
        raise DamagedData("the archive fails its hash")
    if head + rest != _END.pack(count) or read(1):
        raise DamagedData("the archive doesn't end where it should")


def _read_exactly(read: Callable[[int], bytes], length: int) -> bytes:
    data = read(length)
    if len(data) != length:
        raise DamagedData("the archive is cut off")
    return data


def write_archive(path: Path, header: ArchiveHeader, records: Iterable[Record]) -> int:
    """Put an archive in place of what the path holds; mode 0600, for it has all names. Returns its bytes. Raises `OSError`."""
    temporary = path.with_name(f"{path.name}.new")
    size = 0
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
            for piece in packed(header, records):
                size += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)
    return size


class ArchiveReader:
    """An archive that was read to its end and found right. Raises `DamagedData`, `StoreError`."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` is kept, not closed."""
        self._file = file
        self.header, self.count = self._check()

    def records(self) -> Iterator[Record]:
        """All of it again, in the order of keys; raises `DamagedData` if the file isn't what it was."""
        self._file.seek(0)
        yield from unpacked(self._file.read)

    def _check(self) -> tuple[ArchiveHeader, int]:
        self._file.seek(0)
        header = unpack_header(self._file.read(_HEADER.size + _HASH_SIZE))
        return header, sum(1 for _ in self.records())


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[ArchiveReader]:
    """The archive at the path, checked as a whole. Raises `DamagedData`, `StoreError`, naming the file."""
    with contextlib.ExitStack() as held:
        try:
            reader = ArchiveReader(held.enter_context(open(path, "rb")))
        except OSError as error:
            raise StoreError(f"{path} can't be read: {error.strerror}") from None
        except DamagedData as damage:
            raise DamagedData(f"{path}: {damage}") from None
        yield reader
