"""Sealing: only what nothing can write to and nothing touched meanwhile, with the root of exactly those bytes."""

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfs.cache.checksum import cell_size_for, cell_table, content_root
from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.cache.seal import SealCandidate, Sealed, Sealer, SealFailed
from ckptfs.cache.segments import Segments

DATA_SHARDS = 4
CELL = 64 << 10
SMALL = 16 << 10

AddSegment = Callable[..., SealCandidate]


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    return Segments(tmp_path)


@pytest.fixture
def sealer(segments: Segments) -> Sealer:
    return Sealer(segments, DATA_SHARDS, CELL, SMALL)


@pytest.fixture
def add(segments: Segments) -> Iterator[AddSegment]:
    """`add(content, still_wanted)`: a segment with these bytes, as a candidate."""
    made: list[SealCandidate] = []

    def make(content: bytes = b"", still_wanted: Callable[[], bool] = lambda: True) -> SealCandidate:
        number = len(made) + 1
        segment = SegmentId(number.to_bytes(16, "big"))
        descriptor = segments.create(segment, InodeNumber(number))
        Path(segments.path_of(segment)).write_bytes(content)
        made.append(SealCandidate(InodeNumber(number), Vid(os.urandom(16)), segment, descriptor, still_wanted))
        return made[-1]

    yield make
    for candidate in made:
        os.close(candidate.descriptor)


@pytest.mark.parametrize(
    "size",
    [
        *(0, 1, SMALL - 1, SMALL, SMALL + 1, 4096 * DATA_SHARDS - 1, 4096 * DATA_SHARDS, 4096 * DATA_SHARDS + 1),
        *(CELL - 1, CELL, CELL + 1, CELL * DATA_SHARDS - 1, CELL * DATA_SHARDS, CELL * DATA_SHARDS + 1, 5 * CELL + 77),
    ],
)
def test_the_root_is_that_of_the_content_at_every_boundary(sealer: Sealer, add: AddSegment, size: int) -> None:
    content = random.Random(size).randbytes(size)
    candidate = add(content)
    (sealed,) = sealer.seal([candidate])
    assert isinstance(sealed, Sealed)
    assert sealed.candidate is candidate
    assert sealed.size == size
    assert sealed.cell_size == cell_size_for(size, DATA_SHARDS, CELL, SMALL)
    assert sealed.root == content_root(candidate.vid, size, sealed.cell_size, cell_table(content, sealed.cell_size))
    assert sealed.mtime_ns == os.fstat(candidate.descriptor).st_mtime_ns


def test_holes_are_zeros(sealer: Sealer, add: AddSegment, segments: Segments) -> None:
    candidate = add()
    os.truncate(segments.path_of(candidate.segment), 3 * CELL)
    (sealed,) = sealer.seal([candidate])
    assert isinstance(sealed, Sealed)
    assert sealed.root == content_root(candidate.vid, 3 * CELL, sealed.cell_size, cell_table(bytes(3 * CELL), sealed.cell_size))


def test_the_same_bytes_under_another_version_have_another_root(sealer: Sealer, add: AddSegment) -> None:
    first, second = sealer.seal([add(b"same"), add(b"same")])
    assert isinstance(first, Sealed)
    assert isinstance(second, Sealed)
    assert first.root != second.root


def test_what_somebody_can_write_to_is_left_out_and_the_rest_is_sealed(
    sealer: Sealer, add: AddSegment, segments: Segments
) -> None:
    written, mapped, quiet = add(b"a" * 5000), add(b"b" * 5000), add(b"c" * 5000)
    with open(segments.path_of(written.segment), "r+b"), open(segments.path_of(mapped.segment), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
        file.close()
        assert [result.candidate for result in sealer.seal([written, mapped, quiet])] == [quiet]
    assert [result.candidate for result in sealer.seal([written, mapped])] == [written]
    mapping.close()
    assert [result.candidate for result in sealer.seal([mapped])] == [mapped]


def test_what_is_no_longer_wanted_is_left_out(sealer: Sealer, add: AddSegment) -> None:
    assert sealer.seal([add(b"x", lambda: False)]) == []
    assert sealer.seal([]) == []


def test_what_stops_being_wanted_while_it_is_hashed_is_left_out(sealer: Sealer, add: AddSegment) -> None:
    answers = iter([True, True, False])
    assert sealer.seal([add(bytes(4 * CELL), lambda: next(answers))]) == []
    assert next(answers, None) is None  # it was asked again after the second cell, and no more


@pytest.mark.parametrize("change", ["longer", "shorter", "same size", "writer stays"])
def test_a_file_that_moves_while_it_is_hashed_is_left_out(
    sealer: Sealer, add: AddSegment, segments: Segments, change: str
) -> None:
    asked = 0
    writers: list[int] = []

    def touch() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:  # once before, then once a cell
            path = segments.path_of(candidate.segment)
            if change == "writer stays":
                writers.append(os.open(path, os.O_WRONLY))
            elif change == "same size":
                with open(path, "r+b") as file:
                    file.write(b"other")
                os.utime(path, ns=(1, 1))
            else:
                os.truncate(path, 3 * CELL if change == "shorter" else 5 * CELL)
        return True

    candidate = add(bytes(4 * CELL), touch)
    assert sealer.seal([candidate]) == []
    for writer in writers:
        os.close(writer)


def test_a_segment_whose_name_cannot_be_synced_has_failed(sealer: Sealer, add: AddSegment, tmp_path: Path) -> None:
    candidate = add(b"x")
    (tmp_path / "00000000").rename(tmp_path / "elsewhere")
    (failed,) = sealer.seal([candidate])
    assert isinstance(failed, SealFailed)
    assert failed.candidate is candidate
    assert isinstance(failed.error, FileNotFoundError)


def test_one_that_is_removed_meanwhile_with_its_directory_is_left_out_and_the_others_sealed(
    sealer: Sealer, add: AddSegment, segments: Segments
) -> None:
    others = [add(b"x"), add(b"y")]
    segment = SegmentId(bytes([0xEE] * 16))
    descriptor = segments.create(segment, InodeNumber(9))
    is_there = [True]

    def removed_once_asked() -> bool:
        segments.remove(segment)
        return is_there.pop() if is_there else False

    removed = SealCandidate(InodeNumber(9), Vid(bytes(16)), segment, descriptor, removed_once_asked)
    results = sealer.seal([others[0], removed, others[1]])
    assert [(type(result), result.candidate) for result in results] == [(Sealed, candidate) for candidate in others]
    assert sealer.hash_prefix(removed) is None
    os.close(descriptor)


def test_one_sealer_seals_larger_and_smaller_ones_in_any_order(sealer: Sealer, add: AddSegment) -> None:
    """The buffer is used again: what a longer file left in it must not get into a shorter one's hash."""
    generator = random.Random(7)
    contents = [generator.randbytes(generator.randrange(5 * CELL)) for _ in range(12)]
    candidates = [add(content) for content in contents]
    for content, candidate, sealed in zip(contents, candidates, sealer.seal(candidates), strict=True):
        assert isinstance(sealed, Sealed)
        assert sealed.root == content_root(candidate.vid, len(content), sealed.cell_size, cell_table(content, sealed.cell_size))


def test_where_no_descriptor_is_left_nothing_has_failed(
    sealer: Sealer, add: AddSegment, segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = add(b"x")

    def open_nothing(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_nothing)
        assert sealer.seal([candidate]) == []
        assert sealer.hash_prefix(candidate) is None
    assert isinstance(sealer.seal([candidate])[0], Sealed)
