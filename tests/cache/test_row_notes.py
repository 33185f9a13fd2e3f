"""`mount.notes`: what a killed process has written down, whole and in order, or not at all."""

import errno
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.row_notes import SIZE_BYTES, Note, RowNotes

OWNER = 7


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mount.notes"


@pytest.fixture
def notes(path: Path) -> Iterator[RowNotes]:
    with closing(RowNotes(path, OWNER)) as opened:
        yield opened


def _left(path: Path, committed: int = 0, owner: int = OWNER) -> list[Note]:
    with closing(RowNotes(path, owner)) as opened:
        return opened.read(committed)


def test_a_note_has_this_form(notes: RowNotes, path: Path) -> None:
    notes.add(1, "closed", [5])
    assert path.read_bytes()[:34].hex() == "1a000000075d29c4" + "0700000000000000" + "0100000000000000" + "92a6636c6f7365649105"


def test_what_was_noted_is_found(notes: RowNotes, path: Path) -> None:
    rows: list[list[object]] = [[1, None, b"\xff", 1 << 62], [2], []]
    for number, row in enumerate(rows, 1):
        notes.add(number, "opened", row)
    assert _left(path) == [Note(number, "opened", row) for number, row in enumerate(rows, 1)]
    assert [note.number for note in _left(path, committed=2)] == [3]
    assert _left(path, committed=3) == []


def test_notes_follow_what_was_found(path: Path) -> None:
    for number in (1, 2, 3):
        with closing(RowNotes(path, OWNER)) as opened:
            opened.read(0)
            opened.add(number, "closed", [number])
    assert [note.number for note in _left(path)] == [1, 2, 3]


def test_older_notes_behind_newer_ones_are_passed_over(notes: RowNotes, path: Path) -> None:
    for number in range(1, 6):
        notes.add(number, "closed", [number])
    notes.begin_again()
    notes.add(6, "closed", [6])
    assert [note.number for note in _left(path, committed=5)] == [6]


def test_notes_that_do_not_go_on_from_what_is_committed_are_passed_over(notes: RowNotes, path: Path) -> None:
    for number in range(4, 7):
        notes.add(number, "closed", [number])
    assert _left(path, committed=2) == []
    assert [note.number for note in _left(path, committed=3)] == [4, 5, 6]


def test_another_owner_finds_nothing(notes: RowNotes, path: Path) -> None:
    notes.add(1, "closed", [1])
    assert _left(path, owner=OWNER + 1) == []


def test_a_note_that_is_damaged_ends_them(notes: RowNotes, path: Path) -> None:
    for number in (1, 2, 3):
        notes.add(number, "closed", [number])
    whole = path.read_bytes()
    size = whole.index(b"closed", whole.index(b"closed") + 1) - whole.index(b"closed")
    for offset in range(3 * size):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert [note.number for note in _left(path)] == [1, 2, 3][: offset // size]
        path.write_bytes(whole[:offset])
        assert [note.number for note in _left(path)] == [1, 2, 3][: offset // size]


def test_a_full_file_says_so(notes: RowNotes, path: Path) -> None:
    content = bytes(SIZE_BYTES // 4)
    for number in (1, 2, 3):
        notes.add(number, "opened", [content])
    with pytest.raises(OSError, match="full") as caught:
        notes.add(4, "opened", [content])
    assert caught.value.errno == errno.ENOSPC
    notes.add(4, "closed", [4])
    assert path.stat().st_size == SIZE_BYTES
    assert [note.number for note in _left(path)] == [1, 2, 3, 4]
