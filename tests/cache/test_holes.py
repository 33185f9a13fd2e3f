"""Holes are hashed without being read, and every hash is that of the bytes."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptfs.cache.checksum import cell_hash, cell_table
from ckptfs.cache.holes import Holes, zero_hash
from ckptfs.cache.segments import hash_cells

CELL = 64 << 10


def test_the_hash_of_zeros() -> None:
    for length in (0, 1, 4096, CELL):
        assert zero_hash(length) == cell_hash(bytes(length))


@pytest.mark.parametrize("seed", range(20))
def test_hashes_of_a_file_with_holes_are_those_of_its_bytes(scratch: Path, seed: int) -> None:
    """Data and holes that begin and end at the borders of cells, beside them, and anywhere."""
    chance = random.Random(seed)
    path = scratch / "sparse"
    with open(path, "w+b", buffering=0) as file:
        file.truncate(chance.choice((20 * CELL, 20 * CELL + 1, 20 * CELL - 4096)))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(20) * CELL + chance.choice((0, 0, -1, 1, 4096, CELL - 1))
            file.seek(max(at, 0))
            file.write(chance.randbytes(chance.choice((1, 4096, CELL, 3 * CELL))))
        content = path.read_bytes()
        table = b"".join(hash_cells(file.fileno(), CELL, first, 7) for first in range(0, 21, 7))
        assert table == cell_table(content, CELL)
        holes = Holes(file.fileno())
        for at in range(0, len(content), CELL):
            if holes.cover(at, min(CELL, len(content) - at)):
                assert not content[at : at + CELL].strip(b"\0")


def test_a_hole_is_passed_over_without_being_read(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(scratch / "sparse", "w+b", buffering=0) as file:
        file.write(b"x")
        file.truncate(1 << 40)
        read: list[int] = []
        preadv = os.preadv

        def noted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            read.append(offset)
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", noted)
        assert hash_cells(file.fileno(), 1 << 20, 0, 1000)[16:] == zero_hash(1 << 20) * 999
        assert read == [0]


def test_what_is_no_hole_or_not_known_counts_as_data(scratch: Path) -> None:
    with open(scratch / "dense", "w+b", buffering=0) as file:
        file.write(bytes(3 * CELL))
        assert not Holes(file.fileno()).cover(0, CELL)
    reader, writer = os.pipe()
    assert not Holes(reader).cover(0, CELL)
    os.close(reader)
    os.close(writer)


def test_units_that_are_wholly_in_holes(scratch: Path) -> None:
    with open(scratch / "sparse", "w+b", buffering=0) as file:
        file.truncate(10 * CELL)
        for at in (0, 3 * CELL + 5, 5 * CELL):
            file.seek(at)
            file.write(b"x")
        os.fsync(file.fileno())
        assert Holes(file.fileno()).whole_units(CELL) == 7
        assert Holes(file.fileno()).whole_units(2 * CELL) == 2
        file.truncate(10 * CELL + 1)
        assert Holes(file.fileno()).whole_units(CELL) == 7
        file.truncate(0)
        assert Holes(file.fileno()).whole_units(CELL) == 0
