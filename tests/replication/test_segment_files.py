"""Segments read and hashed where they lie, and whose fault it is when that can't be done."""

import errno
import os
from pathlib import Path

import pytest

from ckptfs.cache.checksum import HASH_SIZE, cell_table
from ckptfs.cache.ids import SegmentId
from ckptfs.cache.segments import UNREADABLE
from ckptfs.replication.errors import PeerRefused, RefusalReason, ShardDamaged, ShardNotFound
from ckptfs.replication.segment_files import SegmentFiles

CELL = 4096
CONTENT = os.urandom(5 * CELL + 100)
SEGMENT, OTHER = SegmentId(b"s" * 16), SegmentId(b"o" * 16)


class InterruptedHashing(Exception):
    pass


class Paths:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path_of(self, segment: SegmentId) -> str:
        return f"{self._directory}/{segment.hex()}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / SEGMENT.hex()
    found.write_bytes(CONTENT)
    return found


@pytest.fixture
def files(tmp_path: Path, path: Path) -> SegmentFiles:
    return SegmentFiles(Paths(tmp_path))


def hashes(files: SegmentFiles, first: int = 0, count: int = 100, segment: SegmentId = SEGMENT) -> tuple[int, bytes]:
    return files.hashes(segment, CELL, first, count, lambda: None)


def test_bytes_and_size_are_what_they_are_now(files: SegmentFiles, path: Path) -> None:
    buffer = bytearray(3 * CELL)
    assert files.read(SEGMENT, 10, memoryview(buffer)) == 3 * CELL
    assert buffer == CONTENT[10 : 10 + 3 * CELL]
    assert files.read(SEGMENT, len(CONTENT) - 7, memoryview(buffer)) == 7
    assert files.read(SEGMENT, len(CONTENT), memoryview(buffer)) == 0
    assert files.status(SEGMENT).size == len(CONTENT)


def test_cells_are_hashed_as_far_as_there_are_such(files: SegmentFiles, path: Path) -> None:
    table = cell_table(CONTENT, CELL)
    assert hashes(files) == (len(CONTENT), table)
    assert hashes(files, 4, 100) == (len(CONTENT), table[4 * HASH_SIZE :])
    assert hashes(files, 2, 1) == (len(CONTENT), table[2 * HASH_SIZE : 3 * HASH_SIZE])
    assert hashes(files, 6, 100) == (len(CONTENT), b"")
    path.write_bytes(b"")
    assert hashes(files) == (0, b"")


def test_hashing_ends_when_it_is_not_wanted_any_more(files: SegmentFiles) -> None:
    asked = []

    def still_wanted() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise InterruptedHashing

    with pytest.raises(InterruptedHashing):
        files.hashes(SEGMENT, CELL, 0, 100, still_wanted)
    assert len(asked) == 3


def test_a_cell_the_drive_does_not_give_has_no_hash_and_the_others_have(
    files: SegmentFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 2 * CELL:
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    table = cell_table(CONTENT, CELL)
    expected = table[: 2 * HASH_SIZE] + UNREADABLE + table[3 * HASH_SIZE :]
    assert hashes(files) == (len(CONTENT), expected)
    with pytest.raises(ShardDamaged, match="can't be read"):
        files.read(SEGMENT, 2 * CELL, memoryview(bytearray(10)))


def test_what_is_not_there_and_what_is_no_file(files: SegmentFiles, path: Path) -> None:
    for ask in (
        lambda: files.status(OTHER),
        lambda: hashes(files, segment=OTHER),
        lambda: files.read(OTHER, 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(ShardNotFound):
            ask()
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ShardDamaged, match="can't be opened"):
        files.status(SEGMENT)


def test_a_node_out_of_descriptors_calls_no_segment_damaged(files: SegmentFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called damaged isn't read any more: never for a reason that has nothing to do with it."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(PeerRefused) as caught:
        hashes(files)
    assert (caught.value.reason, caught.value.retryable) == (RefusalReason.BUSY, True)
