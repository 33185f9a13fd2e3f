"""The erasure code as mathematics: GF(2^8) and the systematic Cauchy matrix. Pure; the engines do the bulk work.

The field is GF(2^8) with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), addition is xor. The generator matrix has
k + m rows and k columns: row i < k is the unit row (data is stored as it is), row i >= k has 1/(i xor j) in column j.
That is ISA-L's `gf_gen_cauchy1_matrix`. Every k rows of it are independent, so any k cells of a stripe give the rest.

This matrix is part of the on-disk format: shards written with it must stay readable, so it never changes.
"""

from collections.abc import Sequence

POLYNOMIAL = 0x11D
SHARDS_MAX = 256
"""k + m at most: i xor j must be a field element for every row i and column j."""


def _powers() -> tuple[bytes, bytes]:
    """Powers of the generator 2 (twice over, so that a sum of two logarithms needs no modulo) and their logarithms."""
    exponential = bytearray(510)
    logarithm = bytearray(256)
    value = 1
    for power in range(255):
        exponential[power] = exponential[power + 255] = value
        logarithm[value] = power
        value <<= 1
        if value & 0x100:
            value ^= POLYNOMIAL
    return bytes(exponential), bytes(logarithm)


_EXPONENTIAL, _LOGARITHM = _powers()


def multiply(left: int, right: int) -> int:
    """The product of two field elements (0..255)."""
    if left == 0 or right == 0:
        return 0
    return _EXPONENTIAL[_LOGARITHM[left] + _LOGARITHM[right]]


def inverse(element: int) -> int:
    """The reciprocal of a field element. Raises ZeroDivisionError for 0, which has none."""
    if element == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return _EXPONENTIAL[255 - _LOGARITHM[element]]


def check_code(data_shards: int, parity_shards: int) -> None:
    """Raises ValueError unless this k+m is a code: k >= 1, m >= 0, k + m <= 256."""
    if data_shards < 1 or parity_shards < 0 or data_shards + parity_shards > SHARDS_MAX:
        raise ValueError(f"{data_shards}+{parity_shards} is no erasure code: it needs k >= 1, m >= 0, k + m <= {SHARDS_MAX}")


def generator_row(index: int, data_shards: int) -> bytes:
    """Row `index` of the generator matrix: k coefficients, one for each data cell."""
    if index < data_shards:
        return bytes(column == index for column in range(data_shards))
    return bytes(inverse(index ^ column) for column in range(data_shards))


def invert(matrix: Sequence[bytes]) -> list[bytes]:
    """The inverse of a square matrix, given as rows. Raises ZeroDivisionError for a singular one."""
    size = len(matrix)
    rows = [[*row, *(column == index for column in range(size))] for index, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((index for index in range(column, size) if rows[index][column]), None)
        if pivot is None:
            raise ZeroDivisionError("the matrix is singular over GF(2^8)")
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        pivot_row = rows[column] = [multiply(scale, element) for element in rows[column]]
        for index in range(size):
            factor = rows[index][column]
            if index != column and factor:
                rows[index] = [element ^ multiply(factor, other) for element, other in zip(rows[index], pivot_row, strict=True)]
    return [bytes(row[size:]) for row in rows]


def coefficients(data_shards: int, parity_shards: int, present: Sequence[int], wanted: Sequence[int]) -> tuple[bytes, ...]:
    """One row for each `wanted` cell: how it is made from the `present` cells, in their order.

    `present` are exactly k distinct cell indices. Encoding is the case where they are the data cells. Raises ValueError if
    the indices don't fit the code.
    """
    check_code(data_shards, parity_shards)
    total = data_shards + parity_shards
    if any(not 0 <= index < total for index in (*present, *wanted)):
        raise ValueError(f"cell indices {list(present)}, {list(wanted)} go beyond the {total} cells of a stripe")
    if len(present) != data_shards or len(set(present)) != data_shards:
        raise ValueError(f"{data_shards} distinct cells are needed to compute others, not {list(present)}")
    if list(present) == list(range(data_shards)):
        return tuple(generator_row(index, data_shards) for index in wanted)
    data_from_present = invert([generator_row(index, data_shards) for index in present])
    return tuple(_row_times_matrix(generator_row(index, data_shards), data_from_present) for index in wanted)


def _row_times_matrix(row: bytes, matrix: Sequence[bytes]) -> bytes:
    result = [0] * len(matrix)
    for factor, matrix_row in zip(row, matrix, strict=True):
        if factor:
            result = [element ^ multiply(factor, other) for element, other in zip(result, matrix_row, strict=True)]
    return bytes(result)
