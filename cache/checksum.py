"""Checksums of content and shards, version 1, and the size of cells. Pure.

A *cell hash* is xxh3-128 of the cell's bytes, seed 0, 16 bytes big-endian (xxhash's canonical form). The hash of a cell
is only over its bytes; where the cell belongs is covered by the roots, which hash the table of cell hashes together
with everything that gives a cell its meaning. Integers are little-endian::

    content root = xxh3-128( b"ckptfs content 1" | vid 16 | size u64 | cell_size u32 | table )
    shard root   = xxh3-128( b"ckptfs shard 1\\0\\0" | vid 16 | index u8 | data_shards u8 | parity_shards u8 | 0 u8
                             | cell_size u32 | size u64 | table )

Content is cut into consecutive cells of `cell_size` bytes, the last one shorter and never padded; the table holds their
hashes in order. So the content root does not depend on the code. A shard's table holds the hashes of its own cells,
as stored. `size` is always the content's. Empty content has an empty table, and a root all the same.

xxhash releases the GIL for buffers of this size; (m) 45 GB/s on one core for cells of 1 MiB that are in its cache.
"""

import struct
from typing import TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous bytes; other buffers (mmap, numpy) are passed as a memoryview of them."""

HASH_SIZE = 16
CELL_ALIGNMENT_BYTES = 4096

_CONTENT_TAG = b"ckptfs content 1"
_SHARD_TAG = b"ckptfs shard 1\0\0"
_CONTENT_FIELDS = struct.Struct("<16s16sQI")
_SHARD_FIELDS = struct.Struct("<16s16sBBBBIQ")


def cell_hash(data: Buffer) -> bytes:
    """The 16-byte hash of one cell. Does not keep the buffer."""
    return xxhash.xxh3_128_digest(data)


def cell_table(content: Buffer, cell_size: int) -> bytes:
    """The table of cell hashes of content that is wholly in memory. `cell_size` in bytes, at least 1."""
    if cell_size < 1:
        raise ValueError(f"a cell of {cell_size} bytes")
    with memoryview(content).cast("B") as view:
        return b"".join(xxhash.xxh3_128_digest(view[at : at + cell_size]) for at in range(0, len(view), cell_size))


def content_root(vid: bytes, size: int, cell_size: int, table: Buffer) -> bytes:
    """What identifies a version's content: `table` holds the hashes of its cells, in order.

    Raises `ValueError` if the table's length is not that of a content of this size.
    """
    view = memoryview(table).cast("B")
    cells = -(-size // cell_size) if cell_size > 0 else -1
    if len(vid) != 16 or len(view) != cells * HASH_SIZE:
        raise ValueError(f"a table of {len(view)} bytes for content of {size} bytes in cells of {cell_size}")
    digest = xxhash.xxh3_128(_CONTENT_FIELDS.pack(_CONTENT_TAG, vid, size, cell_size))
    digest.update(view)
    return digest.digest()


def shard_root(
    vid: bytes, index: int, data_shards: int, parity_shards: int, cell_size: int, size: int, cell_hashes: Buffer
) -> bytes:
    """What a holder acknowledges for shard `index`: `cell_hashes` holds the hashes of that shard's cells, in order."""
    view = memoryview(cell_hashes).cast("B")
    if len(vid) != 16 or len(view) % HASH_SIZE:
        raise ValueError(f"a vid of {len(vid)} bytes, a table of {len(view)} bytes")
    digest = xxhash.xxh3_128(_SHARD_FIELDS.pack(_SHARD_TAG, vid, index, data_shards, parity_shards, 0, cell_size, size))
    digest.update(view)
    return digest.digest()


def cell_size_for(size: int, data_shards: int, cell_size_max: int, small_file_size: int = 0) -> int:
    """The cell size, in bytes, of content of `size` bytes, so that all data shards carry some of a middling file.

    A multiple of 4096, at most `cell_size_max`. Content smaller than `small_file_size` is kept as whole copies: its one
    cell is the content itself (1 for empty content, so that a cell size is never zero).
    """
    if size < small_file_size:
        return max(size, 1)
    share = -(-size // data_shards)
    aligned = -(-share // CELL_ALIGNMENT_BYTES) * CELL_ALIGNMENT_BYTES
    return min(cell_size_max, max(CELL_ALIGNMENT_BYTES, aligned))
