"""Formats that open, and formats that don't: every cut and every wrong length is named."""

import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from ckptfs.fs.format_checks import check_format


def _safetensors(path: Path, data: bytes) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_good_files_and_unknown_ones_pass(tmp_path: Path) -> None:
    _safetensors(tmp_path / "m.safetensors", b"x" * 100)
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("data", b"y" * 1000)
    (tmp_path / "anything").write_bytes(b"\x00\x01")
    (tmp_path / "empty").touch()
    assert [check_format(path) for path in sorted(tmp_path.iterdir())] == [None] * 4


def test_a_safetensors_file_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    _safetensors(path, b"x" * 20)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert check_format(path), length
    path.write_bytes(whole + b"more")
    assert check_format(path)


def test_a_zip_file_with_a_changed_member_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", b"y" * 1000)
    changed = bytearray(path.read_bytes())
    changed[500] ^= 1
    path.write_bytes(changed)
    assert "data" in (check_format(path) or "")
    path.write_bytes(changed[:400])
    assert check_format(path)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    assert "can't be read" in (check_format(tmp_path / "none.npy") or "")


def _npy(descr: str, shape: str, data: bytes, *, version: int = 1) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


@pytest.mark.parametrize(
    ("descr", "shape", "size"),
    [
        ("'<f4'", "(5, 7)", 140),
        ("'<U3'", "(2,)", 24),
        ("'|b1'", "()", 1),
        ("'<M8[ns]'", "(3,)", 24),
        ("[('a', '<i2'), ('b', '<f8', (2, 2))]", "(3,)", 102),
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_numpy_file_cut_anywhere_is_named(tmp_path: Path, descr: str, shape: str, size: int, version: int) -> None:
    path = tmp_path / "a.npy"
    whole = _npy(descr, shape, b"x" * size, version=version)
    path.write_bytes(whole)
    assert check_format(path) is None
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        assert check_format(path), length


def test_arrays_of_objects_and_several_arrays_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(_npy("'|O'", "(1000,)", b"pickle"))
    assert check_format(path) is None
    path.write_bytes(_npy("'<f4'", "(2,)", b"x" * 8) * 2)
    assert check_format(path) is None


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("user_block", [0, 512, 2048])
def test_an_hdf5_file_cut_short_is_named(tmp_path: Path, version: int, user_block: int) -> None:
    end = user_block + 4000
    head = b"\x89HDF\r\n\x1a\n" + bytes([version])
    head += bytes([0, 0, 0, 0, 8, 8]).ljust((24 if version == 0 else 28) - 9, b"\0") if version < 2 else bytes([8, 8, 0])
    head += struct.pack("<QQQQ", user_block, 2**64 - 1, end, 96) if version < 2 else struct.pack("<QQQQ", user_block, 1, end, 96)
    whole = (bytes(user_block) + head).ljust(end, b"d")
    path = tmp_path / "m.h5"
    path.write_bytes(whole)
    assert check_format(path) is None
    for length in (1, user_block + 4, user_block + 20, end // 2, end - 1):
        path.write_bytes(whole[:length])
        assert check_format(path), length


def test_names_that_promise_a_format_are_held_to_it(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"not a zip")
    assert check_format(tmp_path / "m.pt")
    (tmp_path / "m.pt").write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2))
    assert check_format(tmp_path / "m.pt") is None, "torch before 1.6"
    (tmp_path / "m.npz").write_bytes(b"xx")
    assert "zip" in (check_format(tmp_path / "m.npz") or "")


def test_what_real_libraries_write_passes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "a.npy", numpy.zeros((3, 5), dtype="<f2"))
    numpy.save(tmp_path / "o.npy", numpy.array([{}, None], dtype=object), allow_pickle=True)
    numpy.save(tmp_path / "s.npy", numpy.zeros(2, dtype=[("a", "<i2"), ("b", "<f8", (2, 2))]))
    numpy.savez(tmp_path / "z.npz", a=numpy.zeros(3))
    assert [check_format(path) for path in sorted(tmp_path.iterdir())] == [None] * 4
