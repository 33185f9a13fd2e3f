"""The table of files in use: lanes, backing ids, handles, and descriptors that live as long as somebody needs them."""

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trio
import trio.testing

from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.cache.mount_db import FileState, HandleRow, MountDatabase
from ckptfs.cache.segments import Segments
from ckptfs.fs.backing import BackingFiles
from ckptfs.fs.open_files import FileInUse, Lane, OpenFiles

_uniques = itertools.count(2, 2)


class KernelTable(BackingFiles):
    """What the kernel keeps of registrations: which file each id stands for. Refuses what it is told to."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.files: dict[int, int] = {}
        self.given = 0
        self.refuses = 0

    def register(self, descriptor: int) -> int:
        if self.refuses:
            raise OSError(self.refuses, os.strerror(self.refuses))
        self.given += 1
        self.files[self.given] = os.fstat(descriptor).st_ino
        return self.given

    def close(self, backing_id: int) -> None:
        self.files.pop(backing_id, None)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[MountDatabase]:
    with closing(MountDatabase(tmp_path / "mount.db")) as opened:
        yield opened


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    (tmp_path / "segments").mkdir()
    return Segments(tmp_path / "segments")


@pytest.fixture
def kernel() -> KernelTable:
    return KernelTable()


@pytest.fixture
def open_files(database: MountDatabase, segments: Segments, kernel: KernelTable) -> Iterator[OpenFiles]:
    table = OpenFiles(database, segments, kernel)
    yield table
    for file in table:
        for descriptor in (file.descriptor, file.write_descriptor, file.copy_descriptor):
            if descriptor is not None:
                os.close(descriptor)


def _file(open_files: OpenFiles, segments: Segments, number: int = 5, state: FileState = FileState.OPEN) -> FileInUse:
    segment = SegmentId(number.to_bytes(16, "big"))
    descriptor = segments.create(segment, InodeNumber(number))
    file = FileInUse(InodeNumber(number), state, Vid(number.to_bytes(16, "big")), segment, descriptor, 1)
    open_files.add(file)
    return file


def _remote(open_files: OpenFiles, number: int = 6) -> FileInUse:
    file = FileInUse(InodeNumber(number), FileState.PROTECTED, Vid(bytes(16)), None, None, 0)
    open_files.add(file)
    return file


def test_the_first_handle_registers_the_file_and_the_last_gives_the_id_back(
    open_files: OpenFiles, segments: Segments, kernel: KernelTable, database: MountDatabase
) -> None:
    file = _file(open_files, segments)
    first = open_files.open_handle(next(_uniques), file, os.O_WRONLY, store_row=True)
    second = open_files.open_handle(next(_uniques), file, os.O_RDONLY, store_row=False)
    assert (file.lane, file.handles, file.writers, file.backing_id) == (Lane.PASSTHROUGH, 2, 1, 1)
    assert kernel.given == 1
    assert database.handles() == [
        HandleRow(first.fh, file.ino, os.O_WRONLY, Lane.PASSTHROUGH),
        HandleRow(second.fh, file.ino, os.O_RDONLY, Lane.PASSTHROUGH),
    ]
    row = database.file(file.ino)
    assert row is not None
    assert row.backing_id == 1
    open_files.close_handle(first)
    assert (file.lane, file.handles, file.writers) == (Lane.PASSTHROUGH, 1, 0)
    assert kernel.files
    open_files.close_handle(second)
    assert (file.lane, file.backing_id, kernel.files) == (Lane.NONE, None, {})
    assert database.handles() == []
    assert database.file(file.ino) == row._replace(backing_id=-1)


def test_an_id_is_written_down_as_given_back_before_it_is(
    open_files: OpenFiles, segments: Segments, kernel: KernelTable, database: MountDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an open that comes between a kill and the repeated release would be answered with a closed id, which is EIO."""
    file = _file(open_files, segments)
    handle = open_files.open_handle(next(_uniques), file, os.O_RDWR, store_row=True)

    def killed(backing_id: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel, "close", killed)
    with pytest.raises(KeyboardInterrupt):
        open_files.close_handle(handle)
    assert database.handles() == []
    (row,) = database.files()
    assert row.backing_id == -1


def test_ids_that_nobody_wrote_down_are_closed_by_the_next_process(
    open_files: OpenFiles, segments: Segments, kernel: KernelTable
) -> None:
    file = _file(open_files, segments)
    assert file.descriptor is not None
    kernel.register(file.descriptor)  # by a process that was killed before it could write that down
    open_files.open_handle(next(_uniques), file, os.O_RDWR, store_row=True)
    open_files.try_passthrough()
    assert set(kernel.files) == {file.backing_id}


def test_a_reader_of_a_local_file_has_its_backing_id_written_down(
    open_files: OpenFiles, segments: Segments, database: MountDatabase
) -> None:
    file = _file(open_files, segments, state=FileState.LOCAL)
    open_files.open_handle(next(_uniques), file, os.O_RDONLY, store_row=False)
    row = database.file(file.ino)
    assert row is not None
    assert row.backing_id == file.backing_id == 1


def test_what_the_kernel_refuses_changes_nothing(
    open_files: OpenFiles, segments: Segments, kernel: KernelTable, database: MountDatabase
) -> None:
    file = _file(open_files, segments)
    kernel.refuses = errno.ENOMEM
    with pytest.raises(OSError, match="allocate memory"):
        open_files.open_handle(next(_uniques), file, os.O_WRONLY, store_row=True)
    assert (file.lane, file.handles, file.writers, file.backing_id) == (Lane.NONE, 0, 0, None)
    assert (database.handles(), database.files(), len(open_files)) == ([], [], 0)


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EOPNOTSUPP, errno.EPERM])
def test_where_the_kernel_backs_nothing_everything_is_served(
    database: MountDatabase, segments: Segments, kernel: KernelTable, number: int
) -> None:
    refused: list[int | None] = []
    open_files = OpenFiles(database, segments, kernel, lambda error: refused.append(error.errno))
    kernel.refuses = number
    first, second = _file(open_files, segments), _file(open_files, segments, 6)
    for file in (first, second):
        open_files.open_handle(next(_uniques), file, os.O_WRONLY, store_row=True)
        assert (file.lane, file.backing_id) == (Lane.SERVED, None)
    open_files.try_passthrough()
    assert refused == [number]
    assert len(segments.all()) == 2


def test_whether_the_kernel_backs_files_is_tried_with_one_that_goes(
    open_files: OpenFiles, segments: Segments, kernel: KernelTable
) -> None:
    open_files.try_passthrough()
    assert (kernel.given, kernel.files, segments.all()) == (1, {}, [])


def test_the_lane_stays_until_the_last_handle_closes(open_files: OpenFiles, segments: Segments, kernel: KernelTable) -> None:
    file = _remote(open_files)
    reader = open_files.open_handle(next(_uniques), file, os.O_RDONLY, store_row=False)
    mine = _file(open_files, segments)
    file.segment, file.descriptor = mine.segment, os.dup(mine.descriptor or 0)  # this node became its home
    writer = open_files.open_handle(next(_uniques), file, os.O_WRONLY, store_row=True)
    assert (file.lane, kernel.files) == (Lane.SERVED, {})
    open_files.close_handle(reader)
    open_files.close_handle(writer)
    assert file.handles == 0
    open_files.open_handle(next(_uniques), file, os.O_RDONLY, store_row=False)
    assert kernel.files


def test_a_kernel_without_passthrough_is_served(open_files: OpenFiles, segments: Segments, kernel: KernelTable) -> None:
    open_files.serve_only()
    file = _file(open_files, segments)
    handle = open_files.open_handle(next(_uniques), file, os.O_RDWR, store_row=True)
    assert (file.lane, file.backing_id, kernel.given) == (Lane.SERVED, None, 0)
    descriptor = open_files.writing_descriptor(file)
    assert open_files.writing_descriptor(file) == descriptor
    os.pwrite(descriptor, b"x", 0)
    open_files.close_handle(handle)
    assert file.write_descriptor is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)  # or no lease test would ever succeed


@pytest.mark.parametrize(
    ("flags", "writes"),
    [(os.O_RDONLY, False), (os.O_RDONLY | os.O_TRUNC, False), (os.O_WRONLY | os.O_APPEND, True), (os.O_RDWR, True)],
)
def test_who_writes(open_files: OpenFiles, segments: Segments, flags: int, writes: bool) -> None:
    file = _file(open_files, segments)
    assert open_files.open_handle(next(_uniques), file, flags, store_row=True).writable is writes
    assert file.writers == int(writes)


def test_a_protected_file_in_use_keeps_its_row_until_it_is_closed(
    open_files: OpenFiles, segments: Segments, database: MountDatabase
) -> None:
    file = _file(open_files, segments, state=FileState.LOCAL)
    handle = open_files.open_handle(next(_uniques), file, os.O_RDONLY, store_row=True)
    database.set_protected([file.vid], open_files.protected({file.vid}))
    assert file.state is FileState.PROTECTED
    row = database.file(file.ino)
    assert row is not None
    assert row.state is FileState.PROTECTED
    open_files.close_handle(handle)
    assert database.file(file.ino) is None


def test_a_file_that_is_written_again_is_not_protected_by_its_old_version(open_files: OpenFiles, segments: Segments) -> None:
    file = _file(open_files, segments)
    open_files.protected({file.vid})
    assert file.state is FileState.OPEN


def test_restored_handles_count(open_files: OpenFiles, segments: Segments) -> None:
    file = _file(open_files, segments)
    for fh, flags in ((70, os.O_RDONLY), (71, os.O_RDWR)):
        open_files.restore_handle(HandleRow(fh, file.ino, flags, Lane.PASSTHROUGH), file)
    assert (file.handles, file.writers, file.lane, len(open_files)) == (2, 1, Lane.PASSTHROUGH, 2)
    handle = open_files.handle(71)
    assert handle is not None
    assert handle.file is file
    assert open_files.handle(72) is None


def test_a_dropped_file_keeps_its_descriptor_while_a_thread_has_it(open_files: OpenFiles, segments: Segments) -> None:
    file = _file(open_files, segments)
    descriptor = file.descriptor
    assert descriptor is not None
    open_files.pin(file)
    open_files.pin(file)
    open_files.drop(file)
    assert open_files.get(file.ino) is None
    open_files.unpin(file)
    os.fstat(descriptor)
    open_files.unpin(file)
    assert file.descriptor is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_that_took_the_place_of_a_dropped_one_is_not_dropped_with_it(open_files: OpenFiles, segments: Segments) -> None:
    old = _file(open_files, segments)
    new = FileInUse(old.ino, FileState.OPEN, Vid(b"n" * 16), None, None, 0)
    open_files.add(new)
    open_files.drop(old)
    assert open_files.get(old.ino) is new
    assert old.descriptor is None


async def test_two_are_alone_one_after_the_other_and_others_do_not_wait(open_files: OpenFiles) -> None:
    order: list[str] = []

    async def visit(ino: int, name: str, until: trio.Event) -> None:
        async with open_files.alone(InodeNumber(ino)):
            order.append(f"{name} in")
            await until.wait()
            order.append(f"{name} out")

    end = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit, 5, "first", end)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(visit, 5, "second", end)
        await trio.testing.wait_all_tasks_blocked()
        with open_files.alone_where_free([InodeNumber(5), InodeNumber(6), InodeNumber(6)]) as free:
            assert free == {6}
            nursery.start_soon(visit, 6, "other", end)
            await trio.testing.wait_all_tasks_blocked()
        end.set()
    assert order.index("first out") < order.index("second in")
    assert "other out" in order
    with open_files.alone_where_free([InodeNumber(5), InodeNumber(6)]) as free:
        assert free == {5, 6}
