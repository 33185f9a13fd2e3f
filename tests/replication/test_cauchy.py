"""The field and the matrix, against definitions that are slow and obvious."""

import itertools
import random

import pytest

from ckptfs.replication.cauchy import check_code, coefficients, generator_row, inverse, invert, multiply


def carryless_product(left: int, right: int) -> int:
    """Schoolbook multiplication of polynomials, then reduction by 0x11d."""
    product = 0
    for bit in range(8):
        if right >> bit & 1:
            product ^= left << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def matrix_product(left: list[bytes], right: list[bytes]) -> list[bytes]:
    result = []
    for row in left:
        cells = []
        for column in range(len(right[0])):
            total = 0
            for factor, other in zip(row, right, strict=True):
                total ^= carryless_product(factor, other[column])
            cells.append(total)
        result.append(bytes(cells))
    return result


def unit_matrix(size: int) -> list[bytes]:
    return [bytes(column == row for column in range(size)) for row in range(size)]


def test_products_are_those_of_the_polynomial() -> None:
    assert all(multiply(left, right) == carryless_product(left, right) for left in range(0, 256, 5) for right in range(256))


def test_every_element_but_zero_has_an_inverse() -> None:
    assert all(carryless_product(element, inverse(element)) == 1 for element in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_the_matrix_of_released_shards_never_changes() -> None:
    assert [generator_row(index, 4).hex() for index in range(6)] == [
        "01000000",
        "00010000",
        "00000100",
        "00000001",
        "47a77aba",
        "a747ba7a",
    ]
    assert generator_row(10, 8).hex() == "dd98ad9d5d963daa"


def test_inversion() -> None:
    generator = random.Random(20)
    inverted = 0
    for size in range(1, 9):
        matrix = [generator.randbytes(size) for _ in range(size)]
        try:
            result = invert(matrix)
        except ZeroDivisionError:
            continue
        inverted += 1
        assert matrix_product(matrix, result) == unit_matrix(size)
        assert invert(result) == matrix
    assert inverted >= 6


def test_inversion_exchanges_rows_for_a_pivot() -> None:
    permutation = [bytes([0, 0, 1]), bytes([1, 0, 0]), bytes([0, 1, 0])]
    assert matrix_product(permutation, invert(permutation)) == unit_matrix(3)


def test_a_singular_matrix_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        invert([bytes([1, 2]), bytes([2, 4])])


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 4), (4, 2), (5, 4)])
def test_coefficients_of_every_k_cells_give_the_generator_rows_back(k: int, m: int) -> None:
    everything = list(range(k + m))
    rows = [generator_row(index, k) for index in everything]
    for present in itertools.permutations(everything, k) if k <= 2 else itertools.combinations(everything, k):
        computed = list(coefficients(k, m, present, everything))
        assert matrix_product(computed, [rows[index] for index in present]) == rows


@pytest.mark.parametrize(
    ("present", "wanted"),
    [
        ((0, 1, 2), (3,)),
        ((0, 1, 2, 3, 4), (5,)),
        ((0, 1, 2, 2), (3,)),
        ((0, 1, 2, 6), (3,)),
        ((0, 1, 2, -1), (3,)),
        ((0, 1, 2, 3), (6,)),
        ((0, 1, 2, 3), (-1,)),
    ],
)
def test_cells_that_do_not_fit_the_code(present: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cell"):
        coefficients(4, 2, present, wanted)


@pytest.mark.parametrize(("k", "m"), [(0, 2), (-1, 2), (4, -1), (200, 57)])
def test_codes_that_can_not_be(k: int, m: int) -> None:
    with pytest.raises(ValueError, match="erasure code"):
        check_code(k, m)


def test_the_widest_code() -> None:
    check_code(200, 56)
    assert len(coefficients(200, 56, range(200), range(200, 256))) == 56
