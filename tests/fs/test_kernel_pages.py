"""When an open may leave the kernel the pages it has of a file."""

from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.cache.mount_db import FileState
from ckptfs.fs.kernel_pages import REMEMBERED_MAX, KernelPages
from ckptfs.fs.open_files import FileInUse, Lane


def _file(number: int = 1, vid: bytes = b"v" * 16, segment: bytes | None = b"s" * 16, lane: Lane = Lane.SERVED) -> FileInUse:
    home = None if segment is None else SegmentId(segment)
    return FileInUse(InodeNumber(number), FileState.OPEN, Vid(vid), home, None, 0, lane=lane)


def test_pages_stay_from_one_open_to_the_next_of_the_same_bytes() -> None:
    pages = KernelPages()
    assert not pages.may_stay(_file())  # an earlier daemon may have served other bytes
    assert pages.may_stay(_file())
    assert not pages.may_stay(_file(2))


def test_other_bytes_drop_them() -> None:
    pages = KernelPages()
    for other in (_file(vid=b"w" * 16), _file(segment=b"t" * 16), _file()):
        assert not pages.may_stay(other)
        assert pages.may_stay(other)


def test_what_was_written_past_them_or_read_from_another_node_drops_them() -> None:
    pages = KernelPages()
    for between in (_file(lane=Lane.PASSTHROUGH), _file(segment=None)):
        pages.may_stay(_file())
        assert not pages.may_stay(between)
        assert not pages.may_stay(_file())


def test_only_so_many_files_are_remembered() -> None:
    pages = KernelPages()
    for number in range(REMEMBERED_MAX + 1):
        pages.may_stay(_file(number + 1))
    assert not pages.may_stay(_file(1))
    assert pages.may_stay(_file(REMEMBERED_MAX + 1))
