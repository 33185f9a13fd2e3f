"""Room taken before it is needed: beyond a file's end, and in a file of its own."""

import os
from pathlib import Path

import pytest

from ckptfs.cache.reserve import SPARE_INODES, Reserve, hold_beyond_end, room_at, share_of

MIB = 1 << 20


def test_a_file_holds_room_that_nobody_sees(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    descriptor = os.open(path, os.O_RDWR)
    assert hold_beyond_end(descriptor, 4 * MIB) == 0
    status = os.fstat(descriptor)
    assert status.st_size == 7
    assert status.st_blocks * 512 >= 4 * MIB
    os.pwrite(descriptor, bytes(3 * MIB), 7)
    assert hold_beyond_end(descriptor, 4 * MIB) == 0
    assert os.fstat(descriptor).st_blocks * 512 - os.fstat(descriptor).st_size >= 4 * MIB - 4096, "taken anew below half"
    assert path.read_bytes() == b"content" + bytes(3 * MIB)
    os.close(descriptor)


def test_what_the_drive_does_not_have_is_not_taken_in_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    wanted = 2 * room_at(tmp_path).total_bytes
    assert hold_beyond_end(descriptor, wanted) == wanted // 2
    assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


def test_a_reserve_is_made_given_up_and_made_again(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", 2 * MIB)
    assert reserve.lacking_bytes() == 2 * MIB
    assert reserve.make() == 0
    assert reserve.make() == 0
    assert os.stat(reserve.path).st_blocks * 512 >= 2 * MIB
    assert len(list(tmp_path.iterdir())) == 1 + SPARE_INODES
    reserve.give_up()
    reserve.give_up()
    assert list(tmp_path.iterdir()) == []
    assert reserve.lacking_bytes() == 2 * MIB
    assert reserve.make() == 0
    assert reserve.lacking_bytes() == 0


def test_a_reserve_larger_than_what_is_free_is_not_begun(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve", 2 * room_at(tmp_path).total_bytes)
    assert reserve.make() == reserve.size_bytes
    assert not reserve.path.exists()


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 10), (1.0, 20)])
def test_a_share_has_limits(tmp_path: Path, fraction: float, expected: int) -> None:
    assert share_of(tmp_path, fraction, 10, 20) == expected
