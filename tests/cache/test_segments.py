"""Segments: where they lie, what they say about themselves, and the lease as the truth about who may still write."""

import errno
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.cache.errors import DamagedData
from ckptfs.cache.ids import InodeNumber, SegmentId, new_segment_id
from ckptfs.cache.segments import ATTRIBUTE, Segments, has_no_writer

SEGMENT = SegmentId(bytes(range(16)))
INO = InodeNumber(77)


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    return Segments(tmp_path)


@pytest.fixture
def descriptor(segments: Segments) -> Iterator[int]:
    """The read-only descriptor of a new segment."""
    made = segments.create(SEGMENT, INO)
    yield made
    os.close(made)


def test_a_new_segment_is_empty_private_and_labelled(segments: Segments, descriptor: int, tmp_path: Path) -> None:
    path = tmp_path / "00010203" / SEGMENT.hex()
    assert segments.path_of(SEGMENT) == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == 0
    assert os.getxattr(path, ATTRIBUTE) == b"\x01" + (77).to_bytes(8, "little")
    assert segments.inode_of(descriptor) == INO
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")


def test_a_segment_is_never_made_twice(segments: Segments, descriptor: int) -> None:
    os.truncate(segments.path_of(SEGMENT), 5)
    with pytest.raises(FileExistsError):
        segments.create(SEGMENT, INO)
    assert os.fstat(descriptor).st_size == 5


@pytest.mark.parametrize("size", [0, 15, 17])
def test_an_id_of_another_length_leads_nowhere(segments: Segments, size: int) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        segments.path_of(SegmentId(bytes(size)))


@pytest.mark.parametrize("label", [b"", b"\x01", b"\x02" + bytes(8), b"\x00" + bytes(8), struct.pack("<BQQ", 1, 2, 3)])
def test_a_label_that_is_not_ours_is_refused(segments: Segments, descriptor: int, label: bytes) -> None:
    os.setxattr(segments.path_of(SEGMENT), ATTRIBUTE, label)
    with pytest.raises(DamagedData, match="left alone"):
        segments.inode_of(descriptor)


def test_a_file_without_a_label_is_refused(segments: Segments, descriptor: int) -> None:
    os.removexattr(segments.path_of(SEGMENT), ATTRIBUTE)
    with pytest.raises(DamagedData, match="left alone"):
        segments.inode_of(descriptor)


def test_removing_takes_the_directory_with_the_last_one_only(segments: Segments, tmp_path: Path) -> None:
    other = SegmentId(SEGMENT[:15] + b"\xff")
    for segment in (SEGMENT, other):
        os.close(segments.create(segment, INO))
    segments.remove(SEGMENT)
    assert os.listdir(tmp_path / "00010203") == [other.hex()]
    segments.remove(SEGMENT)  # gone already
    segments.remove(other)
    assert os.listdir(tmp_path) == []


def test_a_directory_removed_while_a_segment_is_made_in_it_is_made_again(segments: Segments) -> None:
    window = os.urandom(4)
    ended = threading.Event()

    def make_and_remove() -> None:
        while not ended.is_set():
            segment = SegmentId(window + os.urandom(12))
            os.close(segments.create(segment, INO))
            segments.remove(segment)

    thread = threading.Thread(target=make_and_remove)
    thread.start()
    try:
        ends = time.monotonic() + 0.2
        while time.monotonic() < ends:
            segment = SegmentId(window + os.urandom(12))
            os.close(segments.create(segment, INO))
            segments.remove(segment)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_segment_made_from_a_copy_has_its_bytes(segments: Segments, tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "copy").write_bytes(content)
    descriptor = segments.create_from(SEGMENT, INO, str(tmp_path / "copy"))
    assert os.pread(descriptor, size + 1, 0) == content
    assert segments.inode_of(descriptor) == INO
    assert has_no_writer(descriptor)
    os.close(descriptor)


def test_nothing_is_left_of_a_segment_whose_copy_is_not_there(segments: Segments, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        segments.create_from(SEGMENT, INO, str(tmp_path / "none"))
    assert os.listdir(tmp_path) == []


def test_syncing_takes_any_number_and_says_whose_directory_is_gone(segments: Segments, descriptor: int) -> None:
    gone = SegmentId(bytes([0xEE] * 16))
    assert segments.sync_names([]) == set()
    assert segments.sync_names([SEGMENT, SEGMENT]) == set()
    assert segments.sync_names([gone, SEGMENT, gone]) == {gone}
    segments.sync_name(SEGMENT)
    with pytest.raises(FileNotFoundError):
        segments.sync_name(gone)


# The lease


def test_readers_are_no_writers(segments: Segments, descriptor: int) -> None:
    with open(segments.path_of(SEGMENT), "rb"):
        assert has_no_writer(descriptor)
        assert has_no_writer(descriptor)  # the lease was given back


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_a_descriptor_for_writing_is_seen_until_its_last_duplicate_is_closed(
    segments: Segments, descriptor: int, flags: int
) -> None:
    writer = os.open(segments.path_of(SEGMENT), flags)
    assert not has_no_writer(descriptor)
    duplicate = os.dup(writer)
    os.close(writer)
    assert not has_no_writer(descriptor)
    os.close(duplicate)
    assert has_no_writer(descriptor)


def test_a_writer_in_another_process_is_seen(segments: Segments, descriptor: int) -> None:
    code = "import sys; file = open(sys.argv[1], 'r+b'); print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, segments.path_of(SEGMENT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        assert not has_no_writer(descriptor)
        process.communicate(timeout=10)
    assert has_no_writer(descriptor)


def test_a_shared_writable_mapping_outlives_its_descriptor_and_is_seen(segments: Segments, descriptor: int) -> None:
    path = segments.path_of(SEGMENT)
    os.truncate(path, 4096)
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 4096)
    assert not has_no_writer(descriptor)
    mapping[:5] = b"after"
    mapping.close()
    assert has_no_writer(descriptor)
    assert os.pread(descriptor, 5, 0) == b"after"


def test_a_mapping_for_reading_is_no_writer(segments: Segments, descriptor: int) -> None:
    os.truncate(segments.path_of(SEGMENT), 4096)
    with open(segments.path_of(SEGMENT), "rb") as file:
        mapping = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ)
    assert has_no_writer(descriptor)
    mapping.close()


def test_a_lease_that_cannot_be_asked_for_is_an_error_not_an_answer(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError, match="Invalid argument") as caught:
        has_no_writer(reading)
    assert caught.value.errno == errno.EINVAL
    os.close(reading)
    os.close(writing)


def test_ids_of_one_time_lie_together() -> None:
    first, second = new_segment_id(), new_segment_id()
    assert first != second
    assert abs(int.from_bytes(first[:4], "big") - int.from_bytes(second[:4], "big")) <= 1
