"""Checksums: golden values, what each root covers, and the size of cells."""

import pytest
import xxhash

from ckptfs.cache import checksum

VID = bytes(range(16))


def test_golden_values_never_change() -> None:
    assert checksum.cell_hash(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum.cell_hash(b"ckptfs").hex() == "66d8b3e517fa3046b976dd8681909384"
    assert checksum.content_root(VID, 0, 1, b"").hex() == "0faeac630ef44305f6abe5290dedbf7c"
    assert checksum.content_root(VID, 5, 4, bytes(32)).hex() == "955df9622cf202b3d005172e9517437b"
    assert checksum.shard_root(VID, 5, 4, 2, 4096, 100_000, bytes(96)).hex() == "2cb3ae1015baf198b66429e8b46f432f"


def test_a_cell_hash_is_xxh3_128_in_canonical_order() -> None:
    assert checksum.cell_hash(b"abc") == xxhash.xxh3_128_intdigest(b"abc").to_bytes(16, "big")
    assert checksum.cell_hash(memoryview(bytearray(b"abc"))) == checksum.cell_hash(b"abc")


def test_a_table_holds_the_hash_of_each_cell_and_the_last_is_not_padded() -> None:
    content = bytes(range(10))
    assert checksum.cell_table(content, 4) == b"".join(checksum.cell_hash(content[at : at + 4]) for at in (0, 4, 8))
    assert checksum.cell_table(b"", 4) == b""
    with pytest.raises(ValueError, match="a cell of 0 bytes"):
        checksum.cell_table(content, 0)


def test_a_content_root_covers_every_field() -> None:
    table = bytes(range(48))
    roots = {
        checksum.content_root(VID, 10, 4, table),
        checksum.content_root(bytes(16), 10, 4, table),
        checksum.content_root(VID, 11, 4, table),
        checksum.content_root(VID, 10, 5, table[:32]),
        checksum.content_root(VID, 10, 4, table[::-1]),
    }
    assert len(roots) == 5


@pytest.mark.parametrize(("size", "cell_size", "table_size"), [(10, 4, 32), (10, 4, 64), (0, 4, 16), (1, 0, 16), (10, 4, 47)])
def test_a_table_of_another_size_is_refused(size: int, cell_size: int, table_size: int) -> None:
    with pytest.raises(ValueError, match="a table of"):
        checksum.content_root(VID, size, cell_size, bytes(table_size))


def test_a_shard_root_covers_every_field_and_is_no_content_root() -> None:
    table = bytes(range(32))
    base = (VID, 1, 4, 2, 4096, 30_000)
    variants = [base, (bytes(16), *base[1:])]
    for position in range(1, 6):
        changed = list(base)
        changed[position] += 1  # type: ignore[operator]
        variants.append(tuple(changed))  # type: ignore[arg-type]
    roots = {checksum.shard_root(*fields, table) for fields in variants}
    roots.add(checksum.shard_root(*base, table[::-1]))
    roots.add(checksum.content_root(VID, 8192, 4096, table))
    assert len(roots) == 9
    with pytest.raises(ValueError, match="a table of 31 bytes"):
        checksum.shard_root(*base, table[:31])


MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 4096),
        (1, 4096),
        (4 * 4096, 4096),
        (4 * 4096 + 1, 8192),
        (4 * MIB - 1, MIB),
        (4 * MIB, MIB),
        (4 * MIB + 1, MIB),
        (1 << 50, MIB),
    ],
)
def test_cells_shrink_so_that_every_data_shard_carries_some(size: int, expected: int) -> None:
    assert checksum.cell_size_for(size, 4, MIB) == expected


def test_small_content_is_one_cell() -> None:
    assert checksum.cell_size_for(65_535, 4, MIB, small_file_size=65_536) == 65_535
    assert checksum.cell_size_for(65_536, 4, MIB, small_file_size=65_536) == 16_384
    assert checksum.cell_size_for(0, 4, MIB, small_file_size=65_536) == 1
