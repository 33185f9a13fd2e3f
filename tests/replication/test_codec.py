"""Both engines by the same tests, and against each other."""

import ctypes
import itertools
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptfs.replication.cauchy import generator_row, multiply
from ckptfs.replication.codec import CellArray, Codec, choose_codec
from ckptfs.replication.codec_isal import LIBRARY, IsalCodec
from ckptfs.replication.codec_numpy import NumpyCodec
from ckptfs.replication.errors import CodecUnavailable

SEED = 1604


def load(name: str) -> Codec:
    try:
        return choose_codec(name)
    except CodecUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["isa-l", "numpy"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return load(request.param)


def full_stripe(codec: Codec, k: int, m: int, length: int, seed: int = SEED) -> list[bytes]:
    """Random data cells and their parity."""
    generator = random.Random(seed)
    data = [generator.randbytes(length) for _ in range(k)]
    parity = [bytearray(b"\xaa" * length) for _ in range(m)]
    codec.encode(data, parity)
    return [*data, *(bytes(cell) for cell in parity)]


def rebuild(codec: Codec, stripe: list[bytes], present: tuple[int, ...], wanted: tuple[int, ...], k: int) -> list[bytes]:
    outputs = {index: bytearray(b"\x55" * len(stripe[0])) for index in wanted}
    codec.reconstruct({index: stripe[index] for index in present}, outputs, k, len(stripe) - k)
    return [bytes(outputs[index]) for index in wanted]


def check_every_loss(k: int, m: int) -> int:
    """67 bytes: one step of the widest vector code, and a rest."""
    isal, oracle = load("isa-l"), load("numpy")
    stripe = full_stripe(isal, k, m, 67)
    assert stripe == full_stripe(oracle, k, m, 67)
    generator = random.Random(SEED)
    patterns = 0
    for loss_count in range(m + 1):
        for lost in itertools.combinations(range(k + m), loss_count):
            alive = [index for index in range(k + m) if index not in lost]
            present = tuple(generator.sample(alive, k))
            expected = [stripe[index] for index in lost]
            assert rebuild(isal, stripe, present, lost, k) == expected
            assert rebuild(oracle, stripe, present, lost, k) == expected
            patterns += 1
    return patterns


@pytest.mark.parametrize(("k", "m"), [(1, 0), (1, 1), (1, 4), (2, 1), (3, 2), (4, 2)])
def test_engines_agree_for_every_loss(k: int, m: int) -> None:
    check_every_loss(k, m)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 11))
def test_engines_agree_for_every_loss_of_every_code(k: int) -> None:
    for m in range(5):
        patterns = check_every_loss(k, m)
    assert patterns == sum(len(list(itertools.combinations(range(k + 4), count))) for count in range(5))


def test_parity_by_definition(codec: Codec) -> None:
    stripe = full_stripe(codec, 3, 2, 5)
    for index in (3, 4):
        for position in range(5):
            expected = 0
            for column, coefficient in enumerate(generator_row(index, 3)):
                expected ^= multiply(coefficient, stripe[column][position])
            assert stripe[index][position] == expected


def test_parity_of_released_shards_never_changes(codec: Codec) -> None:
    parity = [bytearray(8), bytearray(8)]
    codec.encode([b"ckptfs-0", b"stripe-1", b"cell---2", b"golden-3"], parity)
    assert [cell.hex() for cell in parity] == ["8c6400bf4ac1c9ce", "0dd8dd43920ac9ee"]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 255, 4095, 4097, 65535, 65536, 65537])
def test_every_length(codec: Codec, length: int) -> None:
    stripe = full_stripe(codec, 4, 2, length, seed=length)
    assert stripe == full_stripe(NumpyCodec(), 4, 2, length, seed=length)
    assert rebuild(codec, stripe, (1, 3, 4, 5), (0, 2), 4) == [stripe[0], stripe[2]]


def test_cells_at_any_address(codec: Codec) -> None:
    """Cells of one stripe are parts of one buffer, and the last cell of a content puts the next at an odd place."""
    length = 1001
    stripe = full_stripe(codec, 3, 2, length)
    buffer = bytearray(b"\xee" * 6 * (length + 1))
    cells = [memoryview(buffer)[index * (length + 1) + 1 :][:length] for index in range(5)]
    for cell, content in zip(cells[:3], stripe, strict=False):
        cell[:] = content
    codec.encode([cell.toreadonly() for cell in cells[:3]], cells[3:])
    assert [bytes(cell) for cell in cells] == stripe
    assert all(buffer[index * (length + 1)] == 0xEE for index in range(6)), "wrote beside a cell"


def test_a_wanted_cell_may_be_a_present_one(codec: Codec) -> None:
    stripe = full_stripe(codec, 2, 2, 40)
    assert rebuild(codec, stripe, (1, 3), (0, 1, 2, 3), 2) == stripe


def test_nothing_wanted(codec: Codec) -> None:
    codec.encode([b"abc"], [])
    codec.reconstruct({0: b"abc"}, {}, 1, 1)


@pytest.mark.parametrize("lengths", [(5, 5, 6, 5), (5, 5, 5, 4), (0, 0, 5, 5)])
def test_cells_of_different_length_are_refused(codec: Codec, lengths: tuple[int, int, int, int]) -> None:
    parity = [bytearray(lengths[2]), bytearray(lengths[3])]
    with pytest.raises(ValueError, match="differ in length"):
        codec.encode([b"x" * lengths[0], b"y" * lengths[1]], parity)
    assert not any(map(any, parity))


def test_a_read_only_target_is_refused(codec: Codec) -> None:
    target = bytes(4)
    with pytest.raises(ValueError, match="read-only"):
        codec.encode([b"data"], [memoryview(target)])
    assert target == bytes(4)


def test_too_few_or_foreign_cells_are_refused(codec: Codec) -> None:
    stripe = full_stripe(codec, 3, 2, 16)
    for present in ((0, 1), (0, 1, 3, 4)):
        with pytest.raises(ValueError, match="distinct cells"):
            rebuild(codec, stripe, present, (2,), 3)
    with pytest.raises(ValueError, match="beyond"):
        codec.reconstruct({0: stripe[0], 1: stripe[1], 5: stripe[4]}, {2: bytearray(16)}, 3, 2)
    with pytest.raises(ValueError, match="erasure code"):
        codec.encode([], [bytearray(4)])


def test_one_engine_serves_several_threads(codec: Codec) -> None:
    stripe = full_stripe(codec, 4, 2, 70_000)
    patterns = list(itertools.combinations(range(6), 4)) * 2

    def one(present: tuple[int, ...]) -> bool:
        wanted = tuple(index for index in range(6) if index not in present)
        return rebuild(codec, stripe, present, wanted, 4) == [stripe[index] for index in wanted]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, patterns))


def test_working_memory_does_not_grow_with_the_cells(codec: Codec) -> None:
    data, parity = [bytes(2 << 20)] * 4, [bytearray(2 << 20) for _ in range(2)]
    codec.encode([b"warm"] * 4, [bytearray(4), bytearray(4)])
    tracemalloc.start()
    try:
        codec.encode(data, parity)
        assert tracemalloc.get_traced_memory()[1] < 600_000
    finally:
        tracemalloc.stop()


def test_the_matrix_is_isa_ls_own() -> None:
    load("isa-l")
    library = ctypes.CDLL(LIBRARY)
    for k, m in ((1, 1), (4, 2), (8, 3), (10, 4), (100, 50)):
        matrix = ctypes.create_string_buffer((k + m) * k)
        library.gf_gen_cauchy1_matrix(matrix, k + m, k)
        assert matrix.raw == b"".join(generator_row(index, k) for index in range(k + m))


def test_choices() -> None:
    assert choose_codec("numpy").name == "numpy"
    assert choose_codec("auto").name in ("isa-l", "numpy")
    assert load("isa-l").name == "isa-l"
    with pytest.raises(ValueError, match="choose auto, isa-l or numpy"):
        choose_codec("jerasure")


@pytest.mark.parametrize("library", ["libisal-of-another-planet.so.2", "libc.so.6"])
def test_a_missing_or_foreign_library_is_named_with_the_remedy(library: str) -> None:
    with pytest.raises(CodecUnavailable, match=rf"{library}.*apt install libisal2"):
        IsalCodec(library)


def test_auto_falls_back_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert choose_codec("auto").name == "numpy"
    with pytest.raises(CodecUnavailable, match="no such file"):
        choose_codec("isa-l")


def test_a_library_that_computes_another_code_is_refused() -> None:
    load("isa-l")

    class OneBitWrong(IsalCodec):
        def _multiply(self, tables: bytes, sources: list[CellArray], targets: list[CellArray]) -> None:
            super()._multiply(tables, sources, targets)
            targets[1][96] ^= 1

    with pytest.raises(CodecUnavailable, match="another erasure code"):
        OneBitWrong()
