"""How a content is cut into cells, stripes and shards. Pure arithmetic.

The content is cut into consecutive cells of `cell_size` bytes; the last one may be shorter. Data cell number c is cell
c % k of stripe c // k. The last stripe may lack data cells: their length is 0. Data cells are stored as they are, so
shard i < k is every k-th cell of the content, back to back. A parity cell is as long as the longest data cell of its stripe,
which is the first; to compute it, shorter data cells count as if filled up with zeros.
"""

from dataclasses import dataclass

from ckptfs.replication.cauchy import check_code


@dataclass(frozen=True, slots=True)
class Geometry:
    """The places of all bytes of one version. Sizes, lengths and offsets in bytes. Cells are named by stripe and index:
    index < k is data, k <= index < k + m parity. A content of size 0 has no stripes and empty shards.

    Raises ValueError for a size, cell size or code that can't be, and (all methods) for a stripe or index outside.
    """

    size: int
    cell_size: int
    data_shards: int
    parity_shards: int

    def __post_init__(self) -> None:
        check_code(self.data_shards, self.parity_shards)
        if self.size < 0 or self.cell_size < 1:
            raise ValueError(f"a content of {self.size} bytes in cells of {self.cell_size} can't be cut")

    @property
    def cell_count(self) -> int:
        """Data cells that hold content."""
        return -(-self.size // self.cell_size)

    @property
    def stripe_count(self) -> int:
        return -(-self.cell_count // self.data_shards)

    @property
    def whole_stripe_count(self) -> int:
        """Stripes, from the first, whose cells all have `cell_size` bytes: all but the last, or all."""
        return self.size // (self.data_shards * self.cell_size)

    @property
    def shard_count(self) -> int:
        return self.data_shards + self.parity_shards

    def cell_length(self, stripe: int, index: int) -> int:
        """Bytes stored for this cell: `cell_size`, less at the end of the content, 0 for a data cell beyond it."""
        self._check_stripe(stripe)
        self._check_index(index)
        first_byte = (stripe * self.data_shards + (index if index < self.data_shards else 0)) * self.cell_size
        return max(0, min(self.cell_size, self.size - first_byte))

    def code_length(self, stripe: int) -> int:
        """The one length all cells of this stripe have for the code: that of its parity cells."""
        return self.cell_length(stripe, 0)

    def shard_cell_count(self, index: int) -> int:
        """Cells of this shard that are not empty: those of stripes 0 up to this count. It is the length of its hash table."""
        self._check_index(index)
        if index >= self.data_shards:
            return self.stripe_count
        return max(0, -(-(self.cell_count - index) // self.data_shards))

    def shard_length(self, index: int) -> int:
        """Bytes of all cells of this shard together."""
        count = self.shard_cell_count(index)
        if count == 0:
            return 0
        return (count - 1) * self.cell_size + self.cell_length(count - 1, index)

    def cell_offset_in_shard(self, stripe: int, index: int) -> int:
        """Where this cell begins among the cells of its shard. Only the last cell of a shard can be short, so all before are
        whole; for an empty cell it is the shard's length."""
        self._check_stripe(stripe)
        return min(stripe * self.cell_size, self.shard_length(index))

    def content_offset(self, stripe: int, index: int) -> int:
        """Where this data cell begins in the content; for an empty cell, the content's size."""
        self._check_stripe(stripe)
        self._check_index(index)
        if index >= self.data_shards:
            raise ValueError(f"cell {index} of a {self.data_shards}+{self.parity_shards} stripe is parity: it holds no content")
        return min((stripe * self.data_shards + index) * self.cell_size, self.size)

    def stripe_offset(self, stripe: int) -> int:
        """Where this stripe's content begins in the content."""
        return self.content_offset(stripe, 0)

    def stripe_length(self, stripe: int) -> int:
        """Bytes of content in this stripe: its data cells together, which are consecutive in the content."""
        return min(self.data_shards * self.cell_size, self.size - self.stripe_offset(stripe))

    def locate(self, offset: int, length: int) -> range:
        """The stripes that hold any byte of this part of the content; what lies beyond the end is ignored."""
        if offset < 0 or length < 0:
            raise ValueError(f"offset {offset} and length {length} of a part can't be negative")
        end = min(offset + length, self.size)
        if offset >= end:
            return range(0)
        stripe_size = self.data_shards * self.cell_size
        return range(offset // stripe_size, -(-end // stripe_size))

    def _check_stripe(self, stripe: int) -> None:
        if not 0 <= stripe < self.stripe_count:
            raise ValueError(f"stripe {stripe} is outside the {self.stripe_count} of this version")

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.shard_count:
            raise ValueError(f"cell {index} is outside a {self.data_shards}+{self.parity_shards} stripe")


def stripe_cells(geometry: Geometry, stripe: int, buffer: memoryview) -> list[memoryview]:
    """The k data cells of a stripe, as the code wants them: of equal length, zeros behind the content.

    `buffer` begins with the stripe's content and has room for k whole cells; the results are parts of it. Only what is behind
    the content is changed. To store or send a data cell take `cell_length` bytes of it. Raises ValueError if the buffer is
    too small.
    """
    if buffer.nbytes < geometry.data_shards * geometry.cell_size:
        raise ValueError(f"a stripe needs {geometry.data_shards} x {geometry.cell_size} bytes, the buffer has {buffer.nbytes}")
    code_length = geometry.code_length(stripe)
    cells = []
    for index in range(geometry.data_shards):
        cell = buffer[index * geometry.cell_size :][:code_length]
        filled = geometry.cell_length(stripe, index)
        if filled < code_length:
            cell[filled:] = bytes(code_length - filled)
        cells.append(cell)
    return cells
