"""The code against an independent implementation: pyeclib's `isa_l_rs_cauchy`, which brings its own libraries."""

import random

import pytest
from pyeclib.ec_iface import ECDriver

from ckptfs.replication.codec import choose_codec
from ckptfs.replication.errors import CodecUnavailable

FRAGMENT_HEADER_SIZE = 80


@pytest.mark.parametrize("engine", ["isa-l", "numpy"])
@pytest.mark.parametrize("size", [1, 31, 4096, 10_007])
@pytest.mark.parametrize(("k", "m"), [(4, 2), (8, 3), (5, 4)])
def test_fragments_are_our_cells(k: int, m: int, size: int, engine: str) -> None:
    try:
        codec = choose_codec(engine)
    except CodecUnavailable as error:
        pytest.skip(str(error))
    content = random.Random(size).randbytes(size)
    fragments = [
        bytes(fragment[FRAGMENT_HEADER_SIZE:]) for fragment in ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy").encode(content)
    ]
    length = len(fragments[0])
    data = [content[index * length :][:length].ljust(length, b"\0") for index in range(k)]
    assert fragments[:k] == data
    parity = [bytearray(length) for _ in range(m)]
    codec.encode(data, parity)
    assert fragments[k:] == [bytes(cell) for cell in parity]

    lost = {index: bytearray(length) for index in range(m)}
    codec.reconstruct({index: fragments[index] for index in range(m, k + m)}, lost, k, m)
    assert [bytes(cell) for cell in lost.values()] == fragments[:m]
