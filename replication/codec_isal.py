"""The erasure code by Intel's ISA-L, through ctypes: the engine for production.

ctypes releases the interpreter's lock during a call, so cells can be encoded in a thread while others send.
"""

import ctypes

from ckptfs.replication.cauchy import generator_row, multiply
from ckptfs.replication.codec import CellArray, MatrixCodec
from ckptfs.replication.errors import CodecUnavailable

LIBRARY = "libisal.so.2"
"""The name with the ABI's number, as the loader knows it. `ctypes.util.find_library` would start a subprocess to find it."""

REMEDY = "install ISA-L (Debian and Ubuntu: apt install libisal2) or set codec to numpy, which is slower"

_TABLE_SIZE = 32
"""Bytes of table ISA-L keeps for a coefficient (erasure_code.h)."""

_LENGTH_MAX = (1 << 31) - 1
"""Lengths are a C int."""


class IsalCodec(MatrixCodec):
    """ISA-L's erasure code: 14 GB/s of data a core at 4+2 and cells of 1 MiB, measured on a Xeon with AVX-512.

    The tables are always made by the library that uses them, because their layout depends on its version and on the CPU.
    Raises `CodecUnavailable` if the library can't be loaded, lacks a function or computes another code.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        super().__init__()
        try:
            loaded = ctypes.CDLL(library)
            self._init_tables = loaded.ec_init_tables
            self._encode_data = loaded.ec_encode_data
        except (OSError, AttributeError) as error:
            raise CodecUnavailable(f"the erasure-code library {library} can't be used ({error}); {REMEDY}") from None
        # void ec_init_tables(int k, int rows, unsigned char *a, unsigned char *gftbls)
        self._init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
        self._init_tables.restype = None
        # void ec_encode_data(int len, int k, int rows, unsigned char *gftbls, unsigned char **data, unsigned char **coding)
        pointers = ctypes.POINTER(ctypes.c_void_p)
        self._encode_data.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_char_p, pointers, pointers]
        self._encode_data.restype = None
        self._check_code(library)

    @property
    def name(self) -> str:
        return "isa-l"

    def _prepare(self, rows: tuple[bytes, ...]) -> bytes:
        if not rows:
            return b""
        tables = ctypes.create_string_buffer(_TABLE_SIZE * len(rows) * len(rows[0]))
        self._init_tables(len(rows[0]), len(rows), b"".join(rows), tables)
        return tables.raw

    def _multiply(self, tables: bytes, sources: list[CellArray], targets: list[CellArray]) -> None:
        length = sources[0].size
        if length > _LENGTH_MAX:
            raise ValueError(f"a cell of {length} bytes is more than ISA-L takes at a time ({_LENGTH_MAX})")
        self._encode_data(length, len(sources), len(targets), tables, _pointers(sources), _pointers(targets))

    def _check_code(self, library: str) -> None:
        """Parity nobody can decode would be found only at a restore: so a small stripe is computed both ways first.

        97 bytes: long enough for the widest vector code (64 bytes), with an odd rest."""
        data = [bytes((37 * position + 101 * column + 7) % 256 for position in range(97)) for column in range(4)]
        parity = [bytearray(97), bytearray(97)]
        self.encode(data, parity)
        for index, cell in enumerate(parity, start=4):
            row = generator_row(index, 4)
            for position in range(97):
                expected = 0
                for coefficient, column in zip(row, data, strict=True):
                    expected ^= multiply(coefficient, column[position])
                if cell[position] != expected:
                    raise CodecUnavailable(f"the library {library} computes another erasure code; {REMEDY}")


def _pointers(arrays: list[CellArray]) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of the arrays, which the caller keeps alive. (`array.ctypes.data` would cost three times as much.)"""
    return (ctypes.c_void_p * len(arrays))(*(array.__array_interface__["data"][0] for array in arrays))
