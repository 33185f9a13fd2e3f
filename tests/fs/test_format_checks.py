"""Formats that open, and formats that don't: every cut and every wrong length is named."""

import json
import struct
import zipfile
from pathlib import Path

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
