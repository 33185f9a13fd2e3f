"""The shard file, format version 1. Pure.

A shard is everything one holder keeps of one version: its header, its cells back to back, and a footer that makes the
file valid. Together the shards describe the file they are of, so that content and names can be rebuilt without a
catalog. All integers are little-endian, hashes are 16 bytes (`cache.checksum`).

Header, 4096 bytes, so that cells are aligned to pages::

    offset size type  field
         0    8 bytes magic                b"ckptshrd"
         8    2 u16   format version       1
        10    1 u8    index                which shard; data shards are 0 .. data_shards - 1, parity follows
        11    1 u8    data_shards          at least 1
        12    1 u8    parity_shards        data_shards + parity_shards <= 255
        13    3       zero
        16   16 bytes vid
        32    4 u32   cell_size            bytes; 1 .. 4 MiB
        36    4       zero
        40    8 u64   size                 of the content, in bytes; at least 1 (empty content has no shards)
        48   16 hash  of bytes 0 .. 47
        64 4032       zero

Cells. The content's cell c is data cell `c % data_shards` of stripe `c // data_shards`. A data shard stores its cells
unpadded; the parity cells of a stripe are as long as its longest data cell. So every cell but a shard's last is
`cell_size` long and cell s begins at 4096 + s * cell_size; a data shard may have one cell fewer than there are stripes,
and a shard of a short content may have none at all.

Footer, directly after the last cell::

         0    8 bytes magic                b"ckptfoot"
         8    2 u16   format version       1
        10    1 u8    index                |
        11    1 u8    data_shards          |
        12    1 u8    parity_shards        |  as in the header
        13    1       zero                 |
        14    2 u16   path_length          at most 4096
        16   16 bytes vid                  |
        32    4 u32   cell_size            |
        36    4 u32   cell_count           of this shard
        40    8 u64   size                 as in the header
        48    8 u64   content_cell_count   of the content
        56    8 u64   ino                  the inode number, for rebuilding names; a hint
        64    8 u64   revision             of the catalog, as of when the version was sealed
        72   16 hash  shard_root           over the first table (`checksum.shard_root`)
        88   16 hash  content_root         over the second table (`checksum.content_root`)
       104   16 * cell_count          cell hashes of this shard
         .   16 * content_cell_count  cell hashes of the content, so that decoded cells can be checked
         .   path_length              the path as of sealing, without its leading slash; a hint for people

Trailer, the last 32 bytes of the file::

         0    8 u64   footer_length        without the trailer; at most 64 MiB
         8   16 hash  of the footer followed by bytes 0 .. 7 of the trailer
        24    8 bytes magic                b"ckptend\\n"

A file is valid if and only if header and footer hash right, the footer repeats the header's fields, both roots match
their tables, all lengths are those that follow from `size`, and the file ends with the trailer and is not longer. Every
zero above must be zero. A cell is valid if it hashes to its entry in the first table. A file without a valid footer was
never acknowledged.

Readers refuse other format versions. A later version may give a meaning to the zeros only together with a new number.
"""

import struct
from dataclasses import dataclass

import xxhash

from ckptfs.cache import checksum
from ckptfs.cache.checksum import HASH_SIZE, Buffer
from ckptfs.cache.ids import ID_SIZE, InodeNumber, Vid
from ckptfs.replication.errors import ShardDamaged

FORMAT_VERSION = 1
HEADER_SIZE = 4096
HEADER_FIELDS_SIZE = 64
TRAILER_SIZE = 32
PATH_HINT_SIZE_MAX = 4096
CELL_SIZE_MAX = 4 << 20
SHARDS_MAX = 255
FOOTER_SIZE_MAX = 64 << 20
"""Bounds what a footer may take in memory: enough for content of 3 TiB in cells of 1 MiB at k = 4."""

_HEADER = struct.Struct("<8sHBBB3x16sI4xQ")
_FOOTER = struct.Struct("<8sHBBBxH16sIIQQQQ16s16s")
_TRAILER = struct.Struct("<Q16s8s")
_HEADER_MAGIC = b"ckptshrd"
_FOOTER_MAGIC = b"ckptfoot"
_TRAILER_MAGIC = b"ckptend\n"


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What is known of a shard before its first byte flows. `size` is the whole content's, in bytes.

    Raises `ValueError` for values no shard can have.
    """

    vid: Vid
    index: int
    data_shards: int
    parity_shards: int
    cell_size: int
    size: int

    def __post_init__(self) -> None:
        if len(self.vid) != ID_SIZE:
            raise ValueError(f"a vid of {len(self.vid)} bytes")
        if self.data_shards < 1 or self.parity_shards < 0 or not self.data_shards + self.parity_shards <= SHARDS_MAX:
            raise ValueError(f"a code of {self.data_shards}+{self.parity_shards} shards")
        if not 0 <= self.index < self.data_shards + self.parity_shards:
            raise ValueError(f"shard {self.index} of {self.data_shards}+{self.parity_shards}")
        if not 1 <= self.cell_size <= CELL_SIZE_MAX:
            raise ValueError(f"a cell of {self.cell_size} bytes")
        if not 1 <= self.size < 1 << 63:
            raise ValueError(f"content of {self.size} bytes")
        if self.footer_length(PATH_HINT_SIZE_MAX) > FOOTER_SIZE_MAX:
            raise ValueError(f"content of {self.size} bytes has too many cells of {self.cell_size} bytes")

    @property
    def content_cell_count(self) -> int:
        return -(-self.size // self.cell_size)

    @property
    def stripe_count(self) -> int:
        return -(-self.content_cell_count // self.data_shards)

    @property
    def cell_count(self) -> int:
        """Cells this shard stores; those of stripes `cell_count` and up would be empty."""
        if self.index >= self.data_shards:
            return self.stripe_count
        return max(0, -(-(self.content_cell_count - self.index) // self.data_shards))

    def cell_length(self, stripe: int) -> int:
        """Bytes of this shard's cell of that stripe; 0 where it has none."""
        first = stripe * self.data_shards
        cell = first + self.index if self.index < self.data_shards else first
        return min(self.cell_size, max(0, self.size - cell * self.cell_size))

    def cell_offset(self, stripe: int) -> int:
        """Where that cell begins in the shard file."""
        return HEADER_SIZE + stripe * self.cell_size

    @property
    def cells_length(self) -> int:
        """Bytes of all cells together."""
        count = self.cell_count
        return 0 if count == 0 else (count - 1) * self.cell_size + self.cell_length(count - 1)

    def footer_length(self, path_length: int) -> int:
        """Bytes of the footer without its trailer."""
        return _FOOTER.size + HASH_SIZE * (self.cell_count + self.content_cell_count) + path_length

    def file_length(self, path_length: int = PATH_HINT_SIZE_MAX) -> int:
        """Bytes of the whole shard file; at most, if the path isn't known yet."""
        return HEADER_SIZE + self.cells_length + self.footer_length(path_length) + TRAILER_SIZE


@dataclass(frozen=True, slots=True)
class ShardFooter:
    """What is known of a shard after its last byte. `cell_hashes` is the table of this shard's own cells (only those it
    stores), `content_hashes` that of all cells of the content; `path_hint` and `ino` are for people and for recovery."""

    header: ShardHeader
    cell_hashes: bytes
    content_hashes: bytes
    ino: InodeNumber
    path_hint: bytes = b""
    revision: int = 0

    def __post_init__(self) -> None:
        header = self.header
        if len(self.cell_hashes) != header.cell_count * HASH_SIZE:
            raise ValueError(f"{len(self.cell_hashes)} bytes of cell hashes for {header.cell_count} cells")
        if len(self.content_hashes) != header.content_cell_count * HASH_SIZE:
            raise ValueError(f"{len(self.content_hashes)} bytes of content hashes for {header.content_cell_count} cells")
        if len(self.path_hint) > PATH_HINT_SIZE_MAX:
            raise ValueError(f"a path of {len(self.path_hint)} bytes")

    @property
    def root(self) -> bytes:
        """The shard root, computed."""
        header = self.header
        return checksum.shard_root(
            header.vid,
            header.index,
            header.data_shards,
            header.parity_shards,
            header.cell_size,
            header.size,
            self.cell_hashes,
        )

    @property
    def content_root(self) -> bytes:
        """The content root, computed."""
        return checksum.content_root(self.header.vid, self.header.size, self.header.cell_size, self.content_hashes)

    def cell_hash(self, stripe: int) -> bytes:
        """The hash of this shard's cell of that stripe."""
        return self.cell_hashes[stripe * HASH_SIZE : (stripe + 1) * HASH_SIZE]

    def content_cell_hash(self, cell: int) -> bytes:
        """The hash of the content's cell of that number (stripe * data_shards + index)."""
        return self.content_hashes[cell * HASH_SIZE : (cell + 1) * HASH_SIZE]


def pack_header(header: ShardHeader) -> bytes:
    """The header's first 64 bytes; the rest of its 4096 is zero."""
    fields = _HEADER.pack(
        _HEADER_MAGIC,
        FORMAT_VERSION,
        header.index,
        header.data_shards,
        header.parity_shards,
        header.vid,
        header.cell_size,
        header.size,
    )
    return fields + checksum.cell_hash(fields)


def unpack_header(data: Buffer) -> ShardHeader:
    """The header in these bytes: its first 64, or all 4096, whose rest must be zero. Raises `ShardDamaged`."""
    data = bytes(data)
    if len(data) not in (HEADER_FIELDS_SIZE, HEADER_SIZE):
        raise ShardDamaged(f"a shard header of {len(data)} bytes")
    magic, version, index, data_shards, parity_shards, vid, cell_size, size = _HEADER.unpack_from(data)
    if magic != _HEADER_MAGIC:
        raise ShardDamaged("not a shard: its first bytes are foreign")
    if checksum.cell_hash(data[: _HEADER.size]) != data[_HEADER.size : HEADER_FIELDS_SIZE]:
        raise ShardDamaged("the shard's header fails its hash")
    if version != FORMAT_VERSION:
        raise ShardDamaged(f"the shard has format {version}, this program reads {FORMAT_VERSION}")
    if any(data[HEADER_FIELDS_SIZE:]):
        raise ShardDamaged("the space after the shard's header isn't zero")
    try:
        header = ShardHeader(Vid(vid), index, data_shards, parity_shards, cell_size, size)
    except ValueError as error:
        raise ShardDamaged(f"the shard's header makes no sense: {error}") from None
    if pack_header(header) != data[:HEADER_FIELDS_SIZE]:
        raise ShardDamaged("the shard's header has bits set that must be zero")
    return header


def pack_footer(footer: ShardFooter) -> bytes:
    """Footer and trailer, as they end the file."""
    header = footer.header
    fields = _FOOTER.pack(
        _FOOTER_MAGIC,
        FORMAT_VERSION,
        header.index,
        header.data_shards,
        header.parity_shards,
        len(footer.path_hint),
        header.vid,
        header.cell_size,
        header.cell_count,
        header.size,
        header.content_cell_count,
        footer.ino,
        footer.revision,
        footer.root,
        footer.content_root,
    )
    body = b"".join((fields, footer.cell_hashes, footer.content_hashes, footer.path_hint))
    length = struct.pack("<Q", len(body))
    return b"".join((body, length, _footer_hash(body, length), _TRAILER_MAGIC))


def unpack_trailer(data: Buffer) -> int:
    """The length of footer and trailer together, from the file's last 32 bytes. Raises `ShardDamaged`."""
    if len(data) != TRAILER_SIZE:
        raise ShardDamaged("the shard is cut off before its footer")
    length, _, magic = _TRAILER.unpack(data)
    if magic != _TRAILER_MAGIC:
        raise ShardDamaged("the shard has no footer: it was never completed, or is cut off")
    if not _FOOTER.size <= length <= FOOTER_SIZE_MAX:
        raise ShardDamaged(f"the shard claims a footer of {length} bytes")
    return int(length) + TRAILER_SIZE


def unpack_footer(header: ShardHeader, data: Buffer) -> ShardFooter:
    """The footer in these bytes (footer and trailer), checked against the shard's header. Raises `ShardDamaged`."""
    data = bytes(data)
    if unpack_trailer(data[-TRAILER_SIZE:]) != len(data):
        raise ShardDamaged("the shard's footer is not as long as its trailer says")
    body = data[:-TRAILER_SIZE]
    length, digest, _ = _TRAILER.unpack(data[-TRAILER_SIZE:])
    if _footer_hash(body, struct.pack("<Q", length)) != digest:
        raise ShardDamaged("the shard's footer fails its hash")
    fields = _FOOTER.unpack_from(body)
    magic, version, index, data_shards, parity_shards, path_length, vid, cell_size, cell_count, size, content_count = fields[:11]
    ino, revision, root, content_root = fields[11:]
    if magic != _FOOTER_MAGIC or version != FORMAT_VERSION:
        raise ShardDamaged("the shard's footer isn't one of this format")
    own = (vid, index, data_shards, parity_shards, cell_size, size)
    if own != (header.vid, header.index, header.data_shards, header.parity_shards, header.cell_size, header.size):
        raise ShardDamaged("the shard's footer belongs to another shard than its header")
    if (cell_count, content_count) != (header.cell_count, header.content_cell_count):
        raise ShardDamaged("the shard's footer counts other cells than follow from its size")
    if header.footer_length(path_length) != len(body) or body[13]:
        raise ShardDamaged("the shard's footer is not as long as its fields say")
    own_end = _FOOTER.size + cell_count * HASH_SIZE
    content_end = own_end + content_count * HASH_SIZE
    try:
        footer = ShardFooter(
            header,
            body[_FOOTER.size : own_end],
            body[own_end:content_end],
            InodeNumber(ino),
            body[content_end:],
            revision,
        )
    except ValueError as error:
        raise ShardDamaged(f"the shard's footer makes no sense: {error}") from None
    if footer.root != root or footer.content_root != content_root:
        raise ShardDamaged("the shard's footer contradicts itself: a root doesn't match its table")
    return footer


def _footer_hash(body: Buffer, length: bytes) -> bytes:
    digest = xxhash.xxh3_128(body)
    digest.update(length)
    return digest.digest()
