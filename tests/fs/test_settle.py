"""From close to local: when, in which batches, and what comes in between."""

import errno
import mmap
import os
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ckptfs.cache.catalog_format import Settings, VersionState
from ckptfs.cache.catalog_kv import Compare, Operation, TransactionResult
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, new_segment_id
from ckptfs.cache.inode_changes import AttributeChanges
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.seal import SealCandidate, Sealed, Sealer, SealFailed
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_readers import RemoteReaders
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.settle import RETRY_SECONDS_MAX, Settler

SETTLE_SECONDS = 2.0
TICK_SECONDS = SETTLE_SECONDS / 4
CELL = 64 << 10
STORE = StoreId(bytes(16))


class SlowCatalog(MemoryCatalog):
    """A catalog whose transactions can be made to wait, or to fail. `before_next` happens right before the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.before_next: Callable[[], Awaitable[object]] | None = None
        self.free = trio.Event()
        self.free.set()
        self.asked = trio.Event()
        self.unavailable = False

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        before, self.before_next = self.before_next, None
        if before is not None:
            await before()
        if self.unavailable:
            raise CatalogUnavailable("as the test wants it")
        if not self.free.is_set():
            self.asked.set()
        await self.free.wait()
        return await super().transact(compares, operations)


class FailingSealer(Sealer):
    """Finds the disk broken under the candidates it is told."""

    broken: tuple[int, ...] = ()

    def seal(self, candidates: Sequence[SealCandidate]) -> list[Sealed | SealFailed]:
        good = super().seal([candidate for candidate in candidates if candidate.ino not in self.broken])
        error = OSError(errno.EIO, "Input/output error")
        return good + [SealFailed(candidate, error) for candidate in candidates if candidate.ino in self.broken]


class Bench:
    """A settler with everything around it, and files to give to it."""

    def __init__(self, directory: Path) -> None:
        self.kv = SlowCatalog()
        self.now = 0
        self.namespace = Namespace(self.kv, STORE, 1, self.now_ns)
        self.versions = Versions(self.kv, STORE, 1, self.now_ns)
        (directory / "segments").mkdir()
        self.segments = Segments(directory / "segments")
        self.database = MountDatabase(directory / "mount.db")
        self.open_files = OpenFiles(self.database, self.segments, None)
        self.reclaimer = Reclaimer(self.kv, self.segments, RemoteReaders(self.kv))
        self.sealer = FailingSealer(self.segments, 4, CELL, CELL)
        self.told = 0
        self.urgent: list[bool] = []
        self._local = trio.Semaphore(0)
        self.settler = Settler(
            self.open_files, self.database, self.versions, self.sealer, self.reclaimer, SETTLE_SECONDS, self.on_local
        )

    def now_ns(self) -> int:
        self.now += 1
        return self.now

    async def on_local(self, urgent: bool) -> None:
        self.told += 1
        self.urgent.append(urgent)
        self._local.release()

    async def next_local(self) -> None:
        """Wait until a further batch became local."""
        await self._local.acquire()

    async def begin(self) -> None:
        await self.namespace.format_if_empty(Settings(1, bytes(16), 4, 2, CELL))

    async def file(self, name: bytes, content: bytes = b"content", segment: SegmentId | None = None) -> FileInUse:
        """A file that was written and not yet closed."""
        segment = segment or new_segment_id()
        ino, _, vid = await self.namespace.create_file(InodeNumber(ROOT_INODE), name, 0o644, 0, 0, segment)
        descriptor = self.segments.create(segment, ino)
        file = FileInUse(ino, FileState.OPEN, vid, segment, descriptor, 5)
        self.open_files.add(file)
        self.database.put_file(self.open_files.row(file))
        Path(self.segments.path_of(segment)).write_bytes(content)
        return file

    async def state(self, file: FileInUse) -> VersionState | None:
        version = await self.versions.version(file.vid)
        return None if version is None else version.state

    def close(self) -> None:
        for file in self.open_files:
            if file.descriptor is not None:
                os.close(file.descriptor)
        self.database.close()


@pytest.fixture
async def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    await made.begin()
    yield made
    made.close()


async def test_a_closed_file_becomes_local_with_the_root_of_its_bytes(bench: Bench) -> None:
    file = await bench.file(b"file", b"x" * 200_000)
    bench.settler.closed(file)
    assert bench.settler.waiting_count == 1
    await bench.settler.settle_due(everything=True)
    version = await bench.versions.version(file.vid)
    assert version is not None
    assert (version.state, version.size, version.durable) == (VersionState.LOCAL, 200_000, True)
    assert version.root == content_root(file.vid, 200_000, version.cell_size, cell_table(b"x" * 200_000, version.cell_size))
    row = bench.database.file(file.ino)
    assert row is not None
    assert (row.state, row.size, row.exposed_ns) == (FileState.LOCAL, 200_000, 5)
    assert list(bench.open_files) == []
    assert file.descriptor is None
    assert (await bench.namespace.inode(file.ino)).writer is None
    assert bench.told == 1


async def test_it_waits_for_its_time_which_begins_anew_with_each_close(bench: Bench, mock_clock: trio.testing.MockClock) -> None:
    first, second = await bench.file(b"first"), await bench.file(b"second")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.settler.run)
        bench.settler.closed(first)
        bench.settler.closed(second)
        mock_clock.jump(SETTLE_SECONDS * 0.9)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert await bench.state(first) is VersionState.OPEN
        bench.settler.closed(second)
        mock_clock.jump(SETTLE_SECONDS * 0.1 + TICK_SECONDS)
        await bench.next_local()
        assert await bench.state(first) is VersionState.LOCAL
        assert await bench.state(second) is VersionState.OPEN
        mock_clock.jump(SETTLE_SECONDS)
        await bench.next_local()
        assert await bench.state(second) is VersionState.LOCAL
        nursery.cancel_scope.cancel()


async def test_a_hurry_settles_at_once_what_is_closed_by_then(bench: Bench, mock_clock: trio.testing.MockClock) -> None:
    file = await bench.file(b"file")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.settler.run)
        bench.settler.hurry()  # nothing is closed: this one means nothing later
        await trio.testing.wait_all_tasks_blocked(0.01)
        bench.settler.closed(file)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert bench.settler.waiting_count == 1
        bench.settler.hurry()
        await bench.next_local()
        assert await bench.state(file) is VersionState.LOCAL
        later = await bench.file(b"later")
        bench.settler.closed(later)
        mock_clock.jump(SETTLE_SECONDS + TICK_SECONDS)
        await bench.next_local()
        assert bench.urgent == [True, False]  # who protects it hears whether somebody waits
        nursery.cancel_scope.cancel()


async def test_a_hurry_that_comes_while_others_are_sealed_counts(bench: Bench, mock_clock: trio.testing.MockClock) -> None:
    first, second = await bench.file(b"first"), await bench.file(b"second")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.settler.run)
        bench.kv.free = trio.Event()
        bench.settler.closed(first)
        bench.settler.hurry()
        await bench.kv.asked.wait()
        bench.settler.closed(second)
        bench.settler.hurry()
        bench.kv.free.set()
        await bench.next_local()
        await bench.next_local()
        assert [await bench.state(file) for file in (first, second)] == [VersionState.LOCAL] * 2
        nursery.cancel_scope.cancel()


async def test_what_is_open_again_removed_or_nameless_is_left_alone(bench: Bench) -> None:
    files = [await bench.file(b"%d" % number) for number in range(3)]
    for file in files:
        bench.settler.closed(file)
    handle = bench.open_files.open_handle(2, files[0], os.O_WRONLY, store_row=True)
    bench.open_files.drop(files[1])
    files[2].orphan = await bench.namespace.inode(files[2].ino)
    await bench.settler.settle_due(everything=True)
    assert {await bench.state(file) for file in files} == {VersionState.OPEN}
    assert bench.settler.waiting_count == 0
    bench.open_files.close_handle(handle)


async def test_an_open_during_the_commit_waits_for_it(bench: Bench) -> None:
    """Otherwise its writer would write below a root that is just being committed."""
    file = await bench.file(b"file")
    bench.kv.free = trio.Event()
    bench.settler.closed(file)
    opened: list[VersionState | None] = []

    async def open_for_writing() -> None:
        async with bench.open_files.alone(file.ino):
            opened.append(await bench.state(file))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.settler.settle_due(everything=True))
        await bench.kv.asked.wait()
        nursery.start_soon(open_for_writing)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert opened == []
        bench.kv.free.set()
    assert opened == [VersionState.LOCAL]


async def test_what_somebody_is_just_opening_is_not_committed(bench: Bench) -> None:
    busy, free = await bench.file(b"busy"), await bench.file(b"free")
    for file in (busy, free):
        bench.settler.closed(file)
    async with bench.open_files.alone(busy.ino):
        await bench.settler.settle_due(everything=True)
    assert await bench.state(busy) is VersionState.OPEN
    assert await bench.state(free) is VersionState.LOCAL
    assert bench.settler.waiting_count == 1
    await bench.settler.settle_due(everything=True)
    assert await bench.state(busy) is VersionState.LOCAL


async def test_a_mapping_is_asked_for_again_ever_less_often(bench: Bench) -> None:
    file = await bench.file(b"file", bytes(4096))
    assert file.segment is not None
    with open(bench.segments.path_of(file.segment), "r+b") as writer:
        mapping = mmap.mmap(writer.fileno(), 4096)
    bench.settler.closed(file)
    waits = []
    for _ in range(12):
        await bench.settler.settle_due(everything=True)
        assert bench.settler.waiting_count == 1
        waits.append(file.settle_at - trio.current_time())
    assert waits[0] < 1
    assert all(later > earlier - 0.1 for earlier, later in pairwise(waits))
    assert RETRY_SECONDS_MAX - 0.1 <= waits[-1] <= RETRY_SECONDS_MAX * 1.26
    mapping[:3] = b"end"
    mapping.close()
    await bench.settler.settle_due(everything=True)
    version = await bench.versions.version(file.vid)
    assert version is not None
    assert version.root == content_root(file.vid, 4096, 4096, cell_table(b"end" + bytes(4093), 4096))
    again = await bench.file(b"again")
    bench.settler.closed(again)
    await bench.settler.settle_due(everything=True)
    assert bench.settler.waiting_count == 0


async def test_a_catalog_that_cannot_be_reached_only_delays(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    file = await bench.file(b"file")
    bench.settler.closed(file)
    bench.kv.unavailable = True
    await bench.settler.settle_due(everything=True)
    assert "local_not_committed files=1" in caplog.text
    assert bench.settler.waiting_count == 1
    bench.kv.unavailable = False
    await bench.settler.settle_due(everything=True)
    assert await bench.state(file) is VersionState.LOCAL


async def test_a_seal_the_disk_refuses_is_loud_final_and_nobody_else_s(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    broken, good = await bench.file(b"broken"), await bench.file(b"good")
    bench.sealer.broken = (broken.ino,)
    for file in (broken, good):
        bench.settler.closed(file)
    await bench.settler.settle_due(everything=True)
    assert await bench.state(good) is VersionState.LOCAL
    assert await bench.state(broken) is VersionState.OPEN
    assert broken.sync_failed
    assert broken.descriptor is not None
    assert bench.segments.has_sync_failed(broken.descriptor)
    assert f"seal_failed inode={broken.ino}" in caplog.text
    bench.sealer.broken = ()
    bench.settler.closed(broken)
    await bench.settler.settle_due(everything=True)  # the kernel would say now that all is well
    assert await bench.state(broken) is VersionState.OPEN


async def test_a_file_that_is_removed_while_others_are_sealed_takes_none_of_them_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory of its segment goes with it, and none but its own was in there."""
    removed, good = await bench.file(b"removed", segment=SegmentId(bytes([0xEE] * 16))), await bench.file(b"good")
    for file in (removed, good):
        bench.settler.closed(file)
    sync_names = bench.segments.sync_names

    def remove_first(segments: list[SegmentId]) -> set[SegmentId]:
        assert removed.segment in segments
        bench.open_files.drop(removed)
        bench.segments.remove(removed.segment)
        return sync_names(segments)

    monkeypatch.setattr(bench.segments, "sync_names", remove_first)
    await bench.settler.settle_due(everything=True)
    assert await bench.state(good) is VersionState.LOCAL
    assert not good.sync_failed
    assert not removed.sync_failed
    assert "seal_failed" not in caplog.text


async def test_a_file_with_readers_stays_in_the_table(bench: Bench) -> None:
    file = await bench.file(b"file")
    handle = bench.open_files.open_handle(2, file, os.O_RDONLY, store_row=False)
    bench.settler.closed(file)
    await bench.settler.settle_due(everything=True)
    assert file.state is FileState.LOCAL
    assert list(bench.open_files) == [file]
    bench.open_files.close_handle(handle)


async def test_many_are_sealed_in_batches(bench: Bench) -> None:
    files = [await bench.file(b"%d" % number, b"%d" % number) for number in range(300)]
    for file in files:
        bench.settler.closed(file)
    await bench.settler.settle_due(everything=True)
    assert {await bench.state(file) for file in files} == {VersionState.LOCAL}
    assert bench.told == 2


async def test_times_set_while_it_becomes_local_are_kept(bench: Bench) -> None:
    """They are set between the seal and its transaction, which would bring back what the seal has seen."""
    file = await bench.file(b"file")
    records = FileRecords(bench.namespace, bench.open_files, RemovedInodes(bench.database, 1), bench.database)
    changes = AttributeChanges(mtime_ns=5 * 10**9)
    async with trio.open_nursery() as nursery:

        async def set_times() -> None:
            nursery.start_soon(records.change, file.ino, changes)
            await trio.testing.wait_all_tasks_blocked()

        bench.kv.before_next = set_times
        bench.settler.closed(file)
        await bench.settler.settle_due(everything=True)
    await bench.settler.settle_due(everything=True)
    assert await bench.state(file) is VersionState.LOCAL
    assert (await bench.namespace.inode(file.ino)).mtime_ns == 5 * 10**9
