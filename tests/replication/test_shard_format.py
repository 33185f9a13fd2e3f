"""The shard file's bytes: golden vectors, round trips, every flipped byte, every cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.cache import checksum
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.replication import shard_format
from ckptfs.replication.errors import ShardDamaged
from ckptfs.replication.shard_format import ShardFooter, ShardHeader

VID = Vid(bytes(range(16)))


def footer_for(header: ShardHeader, path: bytes = b"run/model.pt") -> ShardFooter:
    own = b"".join(checksum.cell_hash(b"own%d" % number) for number in range(header.cell_count))
    content = b"".join(checksum.cell_hash(b"content%d" % number) for number in range(header.content_cell_count))
    return ShardFooter(header, own, content, InodeNumber(7), path, 99)


EXAMPLE = ShardHeader(VID, 1, 2, 1, 4096, 4096 * 5 + 10)


def test_golden_header() -> None:
    packed = shard_format.pack_header(EXAMPLE)
    assert packed[:48].hex() == (
        "636b707473687264" "0100" "01" "02" "01" "000000" "000102030405060708090a0b0c0d0e0f" "00100000"
        "00000000" "0a50000000000000"
    )  # fmt: skip
    assert packed[48:].hex() == "9b1b2fd032850a89da92d084034cb95b"


def test_golden_footer() -> None:
    packed = shard_format.pack_footer(footer_for(EXAMPLE))
    assert len(packed) == EXAMPLE.footer_length(12) + 32
    assert packed[:104].hex() == (
        "636b7074666f6f74" "0100" "01" "02" "01" "00" "0c00" "000102030405060708090a0b0c0d0e0f" "00100000" "03000000"
        "0a50000000000000" "0600000000000000" "0700000000000000" "6300000000000000"
        "dcaeed3363b3cc5a6d246d12d8161e6e766563205a802b7569d7a97ab0083e9f"
    )  # fmt: skip
    assert packed[-32:].hex() == "040100000000000040acd569b241b4b107fd91cd153edadf636b7074656e640a"
    assert packed.endswith(b"ckptend\n")


headers = st.builds(
    lambda k, m, index, cell_size, size: ShardHeader(VID, index % (k + m), k, m, cell_size, size),
    st.integers(1, 10),
    st.integers(0, 4),
    st.integers(0, 13),
    st.sampled_from([1, 7, 4096, 65_535, 1 << 20]),
    st.integers(1, 3000),
)


@given(headers, st.binary(max_size=40))
def test_what_was_packed_is_unpacked(header: ShardHeader, path: bytes) -> None:
    footer = footer_for(header, path)
    packed = shard_format.pack_header(header)
    assert shard_format.unpack_header(packed) == header
    assert shard_format.unpack_header(packed.ljust(4096, b"\0")) == header
    end = shard_format.pack_footer(footer)
    assert shard_format.unpack_trailer(end[-32:]) == len(end)
    assert shard_format.unpack_footer(header, end) == footer


@given(st.integers(1, 10), st.integers(0, 4), st.sampled_from([1, 3, 4096]), st.integers(1, 2_000))
def test_the_cells_of_all_data_shards_are_the_content(k: int, m: int, cell_size: int, size: int) -> None:
    shards = [ShardHeader(VID, index, k, m, cell_size, size) for index in range(k + m)]
    assert sum(shard.cells_length for shard in shards[:k]) == size
    assert sum(shard.cell_count for shard in shards[:k]) == shards[0].content_cell_count
    for shard in shards:
        lengths = [shard.cell_length(stripe) for stripe in range(shard.stripe_count)]
        assert [length > 0 for length in lengths] == [stripe < shard.cell_count for stripe in range(len(lengths))]
        assert sum(lengths) == shard.cells_length
        assert all(length == cell_size for length in lengths[: shard.cell_count - 1])
    for parity in shards[k:]:
        for stripe in range(parity.stripe_count):
            assert parity.cell_length(stripe) == max(shard.cell_length(stripe) for shard in shards[:k])


def test_a_shard_of_short_content_may_have_no_cells() -> None:
    header = ShardHeader(VID, 9, 10, 2, 8192, 65_536)
    assert (header.cell_count, header.cells_length, header.cell_length(0)) == (0, 0, 0)
    footer = footer_for(header)
    assert shard_format.unpack_footer(header, shard_format.pack_footer(footer)) == footer


def test_every_flipped_byte_of_a_header_is_found() -> None:
    packed = bytearray(shard_format.pack_header(EXAMPLE).ljust(4096, b"\0"))
    for at in range(len(packed)):
        packed[at] ^= 0x10
        with pytest.raises(ShardDamaged):
            shard_format.unpack_header(packed)
        packed[at] ^= 0x10


def test_every_flipped_bit_of_a_footer_is_found() -> None:
    packed = bytearray(shard_format.pack_footer(footer_for(EXAMPLE)))
    for at in range(len(packed)):
        for bit in range(8):
            packed[at] ^= 1 << bit
            with pytest.raises(ShardDamaged):
                shard_format.unpack_footer(EXAMPLE, packed)
            packed[at] ^= 1 << bit


def test_every_cut_and_every_addition_is_found() -> None:
    head, end = shard_format.pack_header(EXAMPLE), shard_format.pack_footer(footer_for(EXAMPLE))
    for length in range(len(end)):
        with pytest.raises(ShardDamaged):
            shard_format.unpack_footer(EXAMPLE, end[:length])
        with pytest.raises(ShardDamaged):
            shard_format.unpack_footer(EXAMPLE, end[len(end) - length :])
    for length in range(len(head)):
        with pytest.raises(ShardDamaged):
            shard_format.unpack_header(head[:length])
    with pytest.raises(ShardDamaged):
        shard_format.unpack_footer(EXAMPLE, end + b"\0")


def test_a_footer_of_another_shard_is_refused() -> None:
    other = ShardHeader(VID, 0, 2, 1, 4096, 4096 * 5 + 10)
    with pytest.raises(ShardDamaged, match="another shard"):
        shard_format.unpack_footer(other, shard_format.pack_footer(footer_for(EXAMPLE)))


@given(st.binary(max_size=300))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ShardDamaged):
        shard_format.unpack_header(data)
    with pytest.raises(ShardDamaged):
        shard_format.unpack_footer(EXAMPLE, data)
    with pytest.raises(ShardDamaged):
        shard_format.unpack_footer(EXAMPLE, data + b"\x70\0\0\0\0\0\0\0" + bytes(16) + b"ckptend\n")


@pytest.mark.parametrize(
    "fields",
    [
        (b"short", 0, 1, 0, 1, 1),
        (VID, 3, 2, 1, 1, 1),
        (VID, -1, 2, 1, 1, 1),
        (VID, 0, 0, 1, 1, 1),
        (VID, 0, 200, 56, 1, 1),
        (VID, 0, 2, -1, 1, 1),
        (VID, 0, 2, 1, 0, 1),
        (VID, 0, 2, 1, (4 << 20) + 1, 1),
        (VID, 0, 2, 1, 4096, 0),
        (VID, 0, 2, 1, 4096, 1 << 63),
        (VID, 0, 2, 1, 1, 1 << 40),
    ],
)
def test_impossible_headers_are_refused(fields: tuple[Vid, int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"a vid|a code|shard|a cell|content"):
        ShardHeader(*fields)


def test_a_right_hash_over_wrong_fields_is_refused() -> None:
    fields = bytearray(shard_format.pack_header(EXAMPLE)[:48])
    for at, value, message in [(8, 2, "format 2"), (13, 1, "must be zero"), (36, 1, "must be zero"), (10, 9, "no sense")]:
        changed = bytearray(fields)
        changed[at] = value
        with pytest.raises(ShardDamaged, match=message):
            shard_format.unpack_header(bytes(changed) + checksum.cell_hash(bytes(changed)))


def test_three_tebibytes_fit_and_much_more_is_refused_before_bytes_flow() -> None:
    assert ShardHeader(VID, 0, 4, 2, 1 << 20, 3 << 40).stripe_count == 3 << 18
    with pytest.raises(ValueError, match="too many cells"):
        ShardHeader(VID, 0, 4, 2, 1 << 20, 5 << 40)
