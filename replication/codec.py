"""What an erasure-code engine does, and which one is used.

An engine turns k cells into others; cells of one call have one length, any length. Padding the short cells at the end of
a content is the caller's part (`stripes.stripe_cells`).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from ckptfs.replication.cauchy import coefficients
from ckptfs.replication.errors import CodecUnavailable

# Importing numpy starts a thread for each core, for linear algebra that nothing here does, and an agent with threads can't give
# up root.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import numpy.typing as npt

Cell = bytes | bytearray | memoryview
"""Contiguous bytes that are only read."""

WritableCell = bytearray | memoryview
"""Contiguous writable bytes that are filled. They must not overlap any cell that is read in the same call."""

CellArray = npt.NDArray[np.uint8]

PATTERNS_MAX = 256
"""Patterns of lost cells whose tables an engine keeps. 8+3 has 231 of up to three losses; at 768 bytes each that is 200 KB."""


class Codec(Protocol):
    """An erasure-code engine. Safe to use from several threads at once; both calls do their bulk work without the
    interpreter's lock, so a caller gives them a thread. No buffer is kept after a call returns; after an exception the
    contents of the buffers to fill are undefined."""

    @property
    def name(self) -> str:
        """For people: `isa-l` or `numpy`."""

    def encode(self, data: Sequence[Cell], parity: Sequence[WritableCell]) -> None:
        """Fills the m parity cells from the k data cells. Raises ValueError if the lengths differ or a cell to fill is
        read-only, in which case nothing was written."""

    def reconstruct(self, cells: Mapping[int, Cell], wanted: Mapping[int, WritableCell], k: int, m: int) -> None:
        """Fills the wanted cells (data or parity, by their index in the stripe) from exactly k others.

        It can't tell whether the given cells are right: the caller has checked their hashes. Raises ValueError if there
        are not k of them, an index is outside the code, the lengths differ or a cell to fill is read-only."""


class MatrixCodec(ABC):
    """The part all engines share: arguments are checked, and the matrix for a pattern of cells is worked out once."""

    def __init__(self) -> None:
        self._tables = lru_cache(maxsize=PATTERNS_MAX)(self._make_tables)

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    def encode(self, data: Sequence[Cell], parity: Sequence[WritableCell]) -> None:
        k, m = len(data), len(parity)
        self._compute(k, m, tuple(range(k)), tuple(range(k, k + m)), data, parity)

    def reconstruct(self, cells: Mapping[int, Cell], wanted: Mapping[int, WritableCell], k: int, m: int) -> None:
        present, missing = tuple(sorted(cells)), tuple(sorted(wanted))
        self._compute(k, m, present, missing, [cells[index] for index in present], [wanted[index] for index in missing])

    def _compute(
        self,
        k: int,
        m: int,
        present: tuple[int, ...],
        wanted: tuple[int, ...],
        inputs: Sequence[Cell],
        outputs: Sequence[WritableCell],
    ) -> None:
        tables = self._tables(k, m, present, wanted)
        sources, targets = _arrays(inputs), _arrays(outputs)
        length = sources[0].size
        if any(array.size != length for array in (*sources, *targets)):
            raise ValueError(f"cells of one stripe differ in length: {[array.size for array in (*sources, *targets)]} bytes")
        if not all(array.flags.writeable for array in targets):
            raise ValueError("a cell to fill is read-only")
        if targets and length:
            self._multiply(tables, sources, targets)

    def _make_tables(self, k: int, m: int, present: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
        return self._prepare(coefficients(k, m, present, wanted))

    @abstractmethod
    def _prepare(self, rows: tuple[bytes, ...]) -> Any:
        """What `_multiply` wants to know about this matrix: immutable, for it is shared by threads."""

    @abstractmethod
    def _multiply(self, tables: Any, sources: list[CellArray], targets: list[CellArray]) -> None:
        """Fills every target (at least one, not empty): the sum of the sources, each times its coefficient in that row."""


def _arrays(cells: Iterable[Cell]) -> list[CellArray]:
    """The cells' bytes as arrays, without a copy."""
    return [np.frombuffer(cell, np.uint8) for cell in cells]


def choose_codec(preference: str) -> Codec:
    """The engine for a configured preference: `isa-l`, `numpy`, or `auto`, which is ISA-L where its library can be loaded.

    The name of the result says which it is; the caller logs it, for numpy is ten times slower. Raises `CodecUnavailable`
    with the remedy if `isa-l` is asked for and can't be had, ValueError for any other preference.
    """
    # The engines build on this module; and a node that uses numpy never loads the library.
    from ckptfs.replication.codec_isal import IsalCodec
    from ckptfs.replication.codec_numpy import NumpyCodec

    match preference:
        case "isa-l":
            return IsalCodec()
        case "numpy":
            return NumpyCodec()
        case "auto":
            try:
                return IsalCodec()
            except CodecUnavailable:
                return NumpyCodec()
    raise ValueError(f"codec {preference!r} is unknown; choose auto, isa-l or numpy")
