"""The geometry against a model that cuts real bytes, and together with the code: every size, every loss."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.replication.codec import Codec, choose_codec
from ckptfs.replication.errors import CodecUnavailable
from ckptfs.replication.stripes import Geometry, stripe_cells

CELL = 64
reproducible = settings(derandomize=True, deadline=None, max_examples=60)


def interesting_sizes(k: int, cell_size: int) -> list[int]:
    stripe = k * cell_size
    around = [base + delta for base in (0, cell_size, stripe, 2 * stripe, stripe + cell_size) for delta in (-1, 0, 1)]
    return sorted({size for size in [*around, 7, 2 * stripe + cell_size // 3, 3 * stripe - 5] if size >= 0})


geometries = st.builds(
    Geometry,
    size=st.integers(0, 400),
    cell_size=st.integers(1, 40),
    data_shards=st.integers(1, 6),
    parity_shards=st.integers(0, 4),
)


@reproducible
@given(geometries, st.integers(0, 2**32))
def test_geometry_is_that_of_a_content_cut_by_hand(geometry: Geometry, seed: int) -> None:
    content = random.Random(seed).randbytes(geometry.size)
    k, m = geometry.data_shards, geometry.parity_shards
    cells = [content[start : start + geometry.cell_size] for start in range(0, len(content), geometry.cell_size)]
    stripes = [cells[start : start + k] for start in range(0, len(cells), k)]
    assert geometry.cell_count == len(cells)
    assert geometry.stripe_count == len(stripes)
    assert geometry.shard_count == k + m
    for index in range(k + m):
        shard = b""
        for number, stripe in enumerate(stripes):
            whole = [*stripe, *[b""] * (k - len(stripe)), *[bytes(max(map(len, stripe)))] * m]
            assert geometry.cell_length(number, index) == len(whole[index])
            assert geometry.cell_offset_in_shard(number, index) == len(shard)
            if index < k:
                offset = geometry.content_offset(number, index)
                assert content[offset : offset + len(whole[index])] == whole[index]
                assert offset <= len(content)
            shard += whole[index]
        assert geometry.shard_length(index) == len(shard)
        assert geometry.shard_cell_count(index) == sum(geometry.cell_length(number, index) > 0 for number in range(len(stripes)))
    for number, stripe in enumerate(stripes):
        assert geometry.code_length(number) == max(map(len, stripe))
        assert geometry.stripe_length(number) == sum(map(len, stripe))
        assert content[geometry.stripe_offset(number) :][: geometry.stripe_length(number)] == b"".join(stripe)


@reproducible
@given(geometries, st.integers(0, 500), st.integers(0, 500))
def test_located_stripes_are_those_that_hold_a_byte_of_the_part(geometry: Geometry, offset: int, length: int) -> None:
    touched = [
        stripe
        for stripe in range(geometry.stripe_count)
        if geometry.stripe_offset(stripe) < min(offset + length, geometry.size)
        and offset < geometry.stripe_offset(stripe) + geometry.stripe_length(stripe)
        and length > 0
    ]
    assert list(geometry.locate(offset, length)) == touched


def test_a_content_of_nothing() -> None:
    empty = Geometry(0, 4096, 4, 2)
    assert (empty.cell_count, empty.stripe_count) == (0, 0)
    assert [empty.shard_length(index) for index in range(6)] == [0] * 6
    assert list(empty.locate(0, 100)) == []
    with pytest.raises(ValueError, match="outside the 0"):
        empty.cell_length(0, 0)


def test_an_example_in_numbers() -> None:
    """10 MiB and 5 bytes at 4+2: eleven cells, three stripes, the last one of two whole cells and one of 5 bytes."""
    mebibyte = 1 << 20
    geometry = Geometry(10 * mebibyte + 5, mebibyte, 4, 2)
    assert (geometry.cell_count, geometry.stripe_count) == (11, 3)
    assert [geometry.cell_length(2, index) for index in range(6)] == [mebibyte, mebibyte, 5, 0, mebibyte, mebibyte]
    assert [geometry.shard_length(index) for index in range(6)] == [
        3 * mebibyte,
        3 * mebibyte,
        2 * mebibyte + 5,
        2 * mebibyte,
        3 * mebibyte,
        3 * mebibyte,
    ]


def test_sizes_beyond_any_file_cost_nothing() -> None:
    geometry = Geometry((1 << 63) - 1, 1 << 20, 4, 2)
    assert sum(geometry.shard_length(index) for index in range(4)) == geometry.size
    assert geometry.locate(geometry.size - 1, 1 << 40) == range(geometry.stripe_count - 1, geometry.stripe_count)


@pytest.mark.parametrize(
    ("size", "cell_size", "k", "m"), [(-1, 1, 1, 1), (1, 0, 1, 1), (1, -4, 1, 1), (1, 1, 0, 1), (1, 1, 250, 7)]
)
def test_impossible_geometries_are_refused(size: int, cell_size: int, k: int, m: int) -> None:
    with pytest.raises(ValueError, match=r"cut|erasure code"):
        Geometry(size, cell_size, k, m)


def test_cells_outside_are_refused() -> None:
    geometry = Geometry(1000, 64, 4, 2)
    for stripe, index in ((-1, 0), (geometry.stripe_count, 0), (0, -1), (0, 6)):
        with pytest.raises(ValueError, match="outside"):
            geometry.cell_length(stripe, index)
        with pytest.raises(ValueError, match="outside"):
            geometry.cell_offset_in_shard(stripe, index)
    with pytest.raises(ValueError, match="parity"):
        geometry.content_offset(0, 4)
    with pytest.raises(ValueError, match="negative"):
        geometry.locate(-1, 5)
    with pytest.raises(ValueError, match="buffer has"):
        stripe_cells(geometry, 0, memoryview(bytearray(255)))


def test_stripe_cells_change_only_what_is_behind_the_content() -> None:
    geometry = Geometry(3 * CELL + 10, CELL, 2, 1)
    buffer = bytearray(b"\xaa" * 3 * CELL)
    first, second = stripe_cells(geometry, 1, memoryview(buffer))
    assert bytes(first) == b"\xaa" * CELL
    assert bytes(second) == b"\xaa" * 10 + bytes(CELL - 10)
    assert buffer[2 * CELL :] == b"\xaa" * CELL


def shards_of(content: bytes, geometry: Geometry, codec: Codec) -> list[bytes]:
    shards = [bytearray() for _ in range(geometry.shard_count)]
    buffer = bytearray(b"\xff" * geometry.data_shards * geometry.cell_size)
    for stripe in range(geometry.stripe_count):
        offset, length = geometry.stripe_offset(stripe), geometry.stripe_length(stripe)
        buffer[:length] = content[offset : offset + length]
        data = stripe_cells(geometry, stripe, memoryview(buffer))
        parity = [bytearray(geometry.code_length(stripe)) for _ in range(geometry.parity_shards)]
        codec.encode(data, parity)
        for index, cell in enumerate((*data, *parity)):
            shards[index] += bytes(cell[: geometry.cell_length(stripe, index)])
    return [bytes(shard) for shard in shards]


def restored(shards: dict[int, bytes], geometry: Geometry, codec: Codec) -> dict[int, bytes]:
    """All shards, from exactly k of them."""
    result = {index: bytearray() for index in range(geometry.shard_count)}
    for stripe in range(geometry.stripe_count):
        code_length = geometry.code_length(stripe)
        cells = {}
        for index, shard in shards.items():
            offset = geometry.cell_offset_in_shard(stripe, index)
            cells[index] = shard[offset : offset + geometry.cell_length(stripe, index)].ljust(code_length, b"\0")
        outputs = {index: bytearray(code_length) for index in result}
        codec.reconstruct(cells, outputs, geometry.data_shards, geometry.parity_shards)
        for index, cell in outputs.items():
            length = geometry.cell_length(stripe, index)
            assert not any(cell[length:]), "what fills up a short cell decodes to zeros"
            result[index] += cell[:length]
    return {index: bytes(shard) for index, shard in result.items()}


@pytest.mark.parametrize("engine", ["isa-l", "numpy"])
@pytest.mark.parametrize(
    ("k", "m"),
    [(1, 1), (2, 1), (3, 2), (4, 2), pytest.param(5, 4, marks=pytest.mark.slow), pytest.param(8, 3, marks=pytest.mark.slow)],
)
def test_every_size_survives_every_loss(engine: str, k: int, m: int) -> None:
    try:
        codec = choose_codec(engine)
    except CodecUnavailable as error:
        pytest.skip(str(error))
    for size in interesting_sizes(k, CELL):
        content = random.Random(size).randbytes(size)
        geometry = Geometry(size, CELL, k, m)
        shards = shards_of(content, geometry, codec)
        assert [len(shard) for shard in shards] == [geometry.shard_length(index) for index in range(k + m)]
        for present in itertools.combinations(range(k + m), k):
            rebuilt = restored({index: shards[index] for index in present}, geometry, codec)
            assert list(rebuilt.values()) == shards
            joined = b"".join(
                rebuilt[index][geometry.cell_offset_in_shard(stripe, index) :][: geometry.cell_length(stripe, index)]
                for stripe in range(geometry.stripe_count)
                for index in range(k)
            )
            assert joined == content
