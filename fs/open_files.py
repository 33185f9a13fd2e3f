"""Files in use: which inodes have handles or bytes that aren't sealed yet, where their bytes are, and in which lane.

The lane of an inode is chosen at its first open and kept until its last handle closes, because the kernel answers an open in
the other lane with EIO. The table is the process's memory of `mount.db`; what must survive a kill is written there first.
"""

import contextlib
import enum
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import trio

from ckptfs.cache.catalog_format import FORMAT_VERSION, Inode, Version, pack
from ckptfs.cache.file_identity import FileIdentity
from ckptfs.cache.ids import InodeNumber, SegmentId, Vid, new_segment_id
from ckptfs.cache.mount_db import FileRow, FileState, HandleRow, MountDatabase, RemoteRow
from ckptfs.cache.segments import NO_DESCRIPTOR, Segments
from ckptfs.fs.backing import BackingFiles
from ckptfs.fs.directory_paths import DirectoryPaths

log = logging.getLogger(__name__)

NAMELESS = Inode(FORMAT_VERSION, 0o100600, 0, 0, 0, 0, 0, nlink=0)
"""A removed file whose record nobody wrote down before the process died."""

_NEVER_BACKED = (errno.ELOOP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM)
"""The kernel's answers to a backing file that another try won't change; ELOOP: the store lies on an overlay."""


UNKNOWN_IDS_MAX = 64
"""A kill leaves one at most, so this is for so many kills in a row at the start."""


class Lane(enum.IntEnum):
    """How reads and writes of an inode travel. NONE: no handle is open. 0 is never stored."""

    NONE = 0
    PASSTHROUGH = 1
    SERVED = 2


@dataclass(slots=True)
class FileInUse:
    """One inode in use.

    `segment` is None where this node is not its home; then `remote` is the version reads come from, as of the newest open
    (None: it isn't known any more), `held` the segment its home keeps for us, and `noted` whether `mount.db` knows.
    `descriptor` is read-only, kept from create to seal so that a sync sees every write-back error. `record` is the inode's as
    of the newest open. `guests` are handles for writing that programs on other nodes have (`writers_elsewhere`), which count as
    writers too; `guest_descriptor` is for what they write. `generation` grows with every open for writing and every change made
    through us: what a background step started from is void when it moved. `orphan` is the inode's last record once its last
    name is gone. `durable_vid` is the version last marked durable; `unsealable` after something could still write to it though
    it is closed; `unneeded` while only he who is alone with it has a use for it; `replaced_segment` that of the protected
    version this one replaces, free once this one is local. `sync_failed` is final: the kernel marks pages clean after a failed
    write, so a second sync would lie.
    """

    ino: InodeNumber
    state: FileState
    vid: Vid
    segment: SegmentId | None
    descriptor: int | None
    exposed_ns: int
    path_hint: bytes = b""
    lane: Lane = Lane.NONE
    backing_id: int | None = None
    handles: int = 0
    writers: int = 0
    guests: int = 0
    pins: int = 0
    generation: int = 0
    settle_at: float = 0.0
    durable_vid: Vid | None = None
    replaced_segment: SegmentId | None = None
    sync_failed: bool = False
    unsealable: bool = False
    unneeded: bool = False
    write_descriptor: int | None = None
    guest_descriptor: int | None = None
    copy_descriptor: int | None = None
    copy_identity: FileIdentity | None = None
    remote: Version | None = None
    held: SegmentId | None = None
    noted: bool = False
    record: Inode | None = None
    orphan: Inode | None = None

    @property
    def is_home(self) -> bool:
        return self.segment is not None

    @property
    def has_the_bytes(self) -> bool:
        """Whether its segment says more than the inode's record: it is being written here, or has no name."""
        return self.segment is not None and self.state in (FileState.OPEN, FileState.ORPHAN)

    @property
    def is_held(self) -> bool:
        """Whether a program has it open, here or, for writing, on another node."""
        return self.handles > 0 or self.guests > 0


@dataclass(slots=True)
class Handle:
    """What one `fh` stands for. `restored`: an earlier process opened it, and nothing shows yet that the kernel knows it."""

    fh: int
    file: FileInUse
    flags: int
    writable: bool
    restored: bool = False


class OpenFiles:
    """The table. `passthrough` is whether new files may take that lane."""

    def __init__(
        self,
        database: MountDatabase,
        segments: Segments,
        backing: BackingFiles | None,
        on_refused: Callable[[OSError], None] = lambda error: None,
        on_use: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_refused` is called once, when the kernel takes no backing file of this store; then all is served. `on_use` is
        called for each handle for writing, when it is opened and when it is closed."""
        self._database = database
        self._segments = segments
        self._backing = backing
        self._on_refused = on_refused
        self._on_use = on_use
        self.paths = DirectoryPaths()
        """For the hints of files in use."""
        self._files: dict[InodeNumber, FileInUse] = {}
        self._handles: dict[int, Handle] = {}
        self._locks: dict[InodeNumber, trio.Lock] = {}
        self._making: set[SegmentId] = set()
        self.releasing: set[SegmentId] = set()
        """Segments that nobody may open any more: their bytes are read from shards."""

    def __len__(self) -> int:
        return len(self._handles)

    def file_count(self) -> int:
        """The files in use, whose descriptors are open."""
        return len(self._files)

    def __iter__(self) -> Iterator[FileInUse]:
        return iter(list(self._files.values()))

    def get(self, ino: InodeNumber) -> FileInUse | None:
        return self._files.get(ino)

    def handle(self, fh: int) -> Handle | None:
        return self._handles.get(fh)

    def add(self, file: FileInUse) -> None:
        self._files[file.ino] = file

    @asynccontextmanager
    async def alone(self, ino: InodeNumber) -> AsyncIterator[None]:
        """Inside, nobody else begins to write the inode, and no version of it becomes local."""
        lock = self._locks.setdefault(ino, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            self._forget_lock(ino, lock)

    @contextmanager
    def alone_where_free(self, inos: Iterable[InodeNumber]) -> Iterator[set[InodeNumber]]:
        """As `alone`, for those of the inodes that nobody else is alone with now; which they are."""
        held: dict[InodeNumber, trio.Lock] = {}
        try:
            for ino in inos:
                lock = self._locks.setdefault(ino, trio.Lock())
                if not lock.locked():
                    lock.acquire_nowait()
                    held[ino] = lock
            yield set(held)
        finally:
            for ino, lock in held.items():
                lock.release()
                self._forget_lock(ino, lock)

    @contextmanager
    def making(self, segment: SegmentId) -> Iterator[None]:
        """Inside, the segment is made though no version names it yet: it is not to be swept away."""
        self._making.add(segment)
        try:
            yield
        finally:
            self._making.discard(segment)

    def is_made(self, segment: SegmentId) -> bool:
        """Whether somebody is inside `making` with it."""
        return segment in self._making

    def is_needed(self, segment: SegmentId) -> bool:
        """Whether a file in use has the segment, or will have it, or falls back to it."""
        return segment in self._making or any(segment in (file.segment, file.replaced_segment) for file in self)

    def _forget_lock(self, ino: InodeNumber, lock: trio.Lock) -> None:
        if lock.locked() or lock.statistics().tasks_waiting:
            return
        self._locks.pop(ino, None)
        file = self._files.get(ino)
        if file is not None and file.unneeded:
            file.unneeded = False
            if not file.is_held and file.state is not FileState.OPEN:
                self.drop(file)

    def serve_only(self) -> None:
        """The kernel has no passthrough: every inode takes the served lane."""
        self._backing = None

    def try_passthrough(self) -> None:
        """Find out now, with a segment of its own, whether the kernel takes backing files of this store."""
        if self._backing is None:
            return
        segment = new_segment_id()
        with contextlib.suppress(OSError):  # no room: the first file that is opened will show it
            descriptor = self._segments.create(segment, InodeNumber(0))
            try:
                if (backing_id := self._register(descriptor)) is not None:
                    self._close_unknown(backing_id)
            finally:
                os.close(descriptor)
                self._segments.remove(segment)

    def _close_unknown(self, newest: int) -> None:
        """Give back this id, and those just before it that earlier processes registered and were killed before they wrote down:
        each would hold its segment's space for as long as the connection lives. The kernel counts ids up."""
        assert self._backing is not None
        known = {file.backing_id for file in self._files.values()}
        for backing_id in range(max(1, newest - UNKNOWN_IDS_MAX), newest + 1):
            if backing_id not in known:
                self._backing.close(backing_id)

    def give_back(self, backing_id: int) -> None:
        """Close an id that an earlier process had written down as given back, and was perhaps killed before it closed it."""
        if self._backing is not None:
            self._backing.close(backing_id)

    def _register(self, descriptor: int) -> int | None:
        """The kernel's id for a segment; None where it takes no backing files of this store's file system. Raises `OSError`."""
        if self._backing is None:
            return None
        try:
            return self._backing.register(descriptor)
        except OSError as error:
            if error.errno not in _NEVER_BACKED:
                raise
            self.serve_only()
            self._on_refused(error)
            return None

    def protected(self, vids: set[Vid]) -> set[Vid]:
        """Versions are protected now. Returns those in use: they stay in the table, with their row, until they are closed."""
        in_use = set()
        for file in self._files.values():
            if file.vid in vids and file.state is FileState.LOCAL:
                file.state = FileState.PROTECTED
                if file.handles:
                    in_use.add(file.vid)
        return in_use

    def row(self, file: FileInUse, size: int = 0) -> FileRow:
        """The file's row in `mount.db`. Only for files whose home is here."""
        assert file.segment is not None
        orphan = b"" if file.orphan is None else pack(file.orphan)
        return FileRow(
            file.ino, file.vid, file.segment, file.state, size, file.exposed_ns, file.backing_id, file.path_hint, orphan
        )

    def keep_row(self, file: FileInUse) -> None:
        """Have the next daemon find the segment that programs have open now, though the catalog names another."""
        if self._database.file(file.ino) is None:
            self._database.put_file(self.row(file))

    def open_handle(self, unique: int, file: FileInUse, flags: int, *, store_row: bool, serve: bool = False) -> Handle:
        """Give the file one more handle; the first one chooses the lane: with `serve` the served one, where the kernel says with
        each write who writes. With `store_row` the file's row is written too.

        The handle's number is that of the request it is opened for: so it is never used again on the connection, and a request
        that is repeated finds what its first carrying out has opened (`opened_before`).
        Raises `OSError` if the kernel refuses the backing file; then nothing changed.
        """
        if file.handles == 0:
            lane = Lane.SERVED
            passes = self._backing is not None and not serve and not _changes_its_mind(flags)
            if file.is_home and passes and file.write_descriptor is None:
                assert file.descriptor is not None
                if file.backing_id is None:
                    file.backing_id = self._register(file.descriptor)
                    store_row = True
                if file.backing_id is not None:
                    lane = Lane.PASSTHROUGH
            file.lane = lane
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        handle = Handle(unique, file, flags, writable)
        row = HandleRow(handle.fh, file.ino, flags, file.lane)
        if store_row and file.is_home:
            self._database.put_file(self.row(file), row)
        else:
            if file.remote is not None and file.record is not None:
                self._database.put_remote(RemoteRow(file.ino, file.vid, pack(file.remote), pack(file.record)))
                file.noted = True
            self._database.put_handle(row)
        self._handles[handle.fh] = handle
        file.handles += 1
        file.writers += writable
        if writable:
            self._on_use()
        return handle

    def add_guest(self, file: FileInUse) -> None:
        """A program on another node has a handle for writing."""
        file.guests += 1
        file.writers += 1
        self.pin(file)
        self._on_use()

    def remove_guest(self, file: FileInUse) -> None:
        file.guests -= 1
        file.writers -= 1
        self._on_use()
        if not file.guests and file.guest_descriptor is not None:
            os.close(file.guest_descriptor)
            file.guest_descriptor = None
        self.unpin(file)

    def guest_descriptor(self, file: FileInUse) -> int:
        """A descriptor for what guests write; kept until the last of them leaves. Raises `OSError`."""
        if file.guest_descriptor is None:
            assert file.segment is not None
            file.guest_descriptor = os.open(self._segments.path_of(file.segment), os.O_RDWR | os.O_CLOEXEC)
        return file.guest_descriptor

    def handles_elsewhere(self) -> list[Handle]:
        """Those for writing of files whose home is another node."""
        return [handle for handle in self._handles.values() if handle.writable and not handle.file.is_home]

    def opened_before(self, unique: int) -> Handle | None:
        """The handle that an earlier process opened for this request and was killed before the kernel had the answer, or None."""
        handle = self._handles.get(unique)
        if handle is not None:
            handle.restored = False
            log.info("opened_again inode=%d fh=%d", handle.file.ino, handle.fh)
        return handle

    def restore_handle(self, row: HandleRow, file: FileInUse) -> None:
        """Take up a handle that an earlier daemon gave out."""
        writable = row.flags & os.O_ACCMODE != os.O_RDONLY
        self._handles[row.fh] = Handle(row.fh, file, row.flags, writable, restored=True)
        file.lane = Lane(row.lane)
        file.handles += 1
        file.writers += writable

    def restored(self) -> list[Handle]:
        """The handles that an earlier process gave out and nobody has released since."""
        return [handle for handle in self._handles.values() if handle.restored]

    def close_handle(self, handle: Handle) -> None:
        """The kernel let the handle go. With the last one the lane ends and the backing id is given back."""
        file = handle.file
        del self._handles[handle.fh]
        file.handles -= 1
        file.writers -= handle.writable
        if handle.writable:
            self._on_use()
        if handle.writable and file.writers == file.guests and file.write_descriptor is not None:
            os.close(file.write_descriptor)
            file.write_descriptor = None
        if file.handles:
            self._database.remove_handle(handle.fh)
            return
        file.lane = Lane.NONE
        if file.noted:
            self._database.remove_remotes([file.ino])
            file.noted = False
        if file.backing_id is None or self._backing is None:
            self._database.remove_handle(handle.fh)
        else:
            # Written down first: after a kill in between no open may be answered with an id that was closed.
            self._database.remove_handle_and_backing(handle.fh)
            self._backing.close(file.backing_id)
            file.backing_id = None
        if file.state is FileState.PROTECTED and file.is_home:
            self._database.remove_files([file.ino])

    def writing_descriptor(self, file: FileInUse) -> int:
        """A descriptor for the served lane's writes; kept until the last writer closes. Raises `OSError`."""
        if file.write_descriptor is None:
            assert file.segment is not None
            file.write_descriptor = os.open(self._segments.path_of(file.segment), os.O_RDWR | os.O_CLOEXEC)
        return file.write_descriptor

    def truncate(self, file: FileInUse, size: int) -> None:
        """Set the size of the file's segment. May block. Raises `OSError`."""
        assert file.segment is not None
        os.truncate(self._segments.path_of(file.segment), size)
        file.generation += 1

    def close_evicted_copies(self) -> None:
        """Let go of local copies that have lost their names to make room; whoever reads on is given others."""
        for file in self._files.values():
            if file.copy_descriptor is not None and os.fstat(file.copy_descriptor).st_nlink == 0:
                os.close(file.copy_descriptor)
                file.copy_descriptor = None

    async def sync(self, file: FileInUse, *, with_name: bool) -> None:
        """Sync the segment's bytes, and the name that it has in the store. Raises `OSError`: then no later sync can succeed,
        unless it is one of `NO_DESCRIPTOR`."""
        descriptor, segment = file.descriptor, file.segment
        assert descriptor is not None
        assert segment is not None
        if file.sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this file failed; its bytes were never safe")

        def run() -> None:
            if with_name:
                os.fsync(descriptor)  # with its label
                self._segments.sync_name(segment)
            else:
                os.fdatasync(descriptor)

        try:
            await trio.to_thread.run_sync(run)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            if isinstance(error, FileNotFoundError) and file.segment != segment:
                return  # another took its place meanwhile, and the directory went with it
            self.sync_failed(file)
            log.error("sync_failed inode=%d segment=%s error=%s", file.ino, segment.hex(), error.strerror)
            raise

    def sync_failed(self, file: FileInUse) -> None:
        """The drive did not take the file's bytes: no later sync may claim success, also not after this process was killed."""
        file.sync_failed = True
        assert file.segment is not None
        try:
            self._segments.mark_sync_failed(file.segment)
        except OSError as error:
            log.error("sync_failure_not_noted segment=%s error=%s", file.segment.hex(), error.strerror)

    def let_go(self, file: FileInUse) -> None:
        """Drop a file without handles that isn't open, unless somebody is alone with it: he may be about to give it a handle, and
        drops it otherwise."""
        if file.ino in self._locks:
            file.unneeded = True
        else:
            self.drop(file)

    def drop(self, file: FileInUse) -> None:
        """Forget a file without handles; its descriptors are closed, as soon as nothing pins them."""
        assert not file.is_held
        if self._files.get(file.ino) is file:
            del self._files[file.ino]
        if not file.pins:
            _close_descriptors(file)

    def pin(self, file: FileInUse) -> None:
        """Keep the file's descriptors open for a thread, whatever happens to the file."""
        file.pins += 1

    @contextmanager
    def pinned(self, file: FileInUse) -> Iterator[None]:
        """Inside, its descriptors stay open."""
        self.pin(file)
        try:
            yield
        finally:
            self.unpin(file)

    def unpin(self, file: FileInUse) -> None:
        file.pins -= 1
        if not file.pins and self._files.get(file.ino) is not file:
            _close_descriptors(file)


def _changes_its_mind(flags: int) -> bool:
    """Whether a program may take back what it opened the file with, of which the kernel tells nobody: one that writes past the
    page cache clears O_DIRECT for a last part that fills no block (dd does), and the backing file would refuse it (EINVAL)."""
    return bool(flags & os.O_DIRECT) and flags & os.O_ACCMODE != os.O_RDONLY


def _close_descriptors(file: FileInUse) -> None:
    for descriptor in (file.descriptor, file.write_descriptor, file.guest_descriptor, file.copy_descriptor):
        if descriptor is not None:
            os.close(descriptor)
    file.descriptor = file.write_descriptor = file.guest_descriptor = file.copy_descriptor = None
