"""Operations on a regular file: making, opening, reading, changing, syncing, closing it, and what removal does to bytes."""

import contextlib
import ctypes
import errno
import logging
import os
from collections.abc import Iterable

import msgspec
import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Inode, Version, VersionState
from ckptfs.cache.errors import HeldElsewhere, InodeGone, NameExists, NameMoved, NoSuchName
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.inode_changes import has_privileges
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.removal import Removed
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.disk_reads import DiskReads
from ckptfs.fs.disk_writes import DiskWrites
from ckptfs.fs.file_content import MOVED_TRIES, FileContent
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.fuse_format import Opcode, OpenFlag, RequestHeader
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.growing import GrowingFiles
from ckptfs.fs.kernel_pages import KernelPages
from ckptfs.fs.noted_writes import NotedWrites
from ckptfs.fs.open_files import FileInUse, Handle, Lane, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import ContentGone
from ckptfs.fs.remote_files import RemoteFiles
from ckptfs.fs.remote_writing import RemoteWriting
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.settle import Settler

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


_PASSTHROUGH = int(OpenFlag.PASSTHROUGH | OpenFlag.NOFLUSH)
"""Put together once: joining flags takes a microsecond each time."""


class FileOperations:
    """CREATE, OPEN, READ, WRITE, FLUSH, RELEASE, FSYNC, FALLOCATE, LSEEK, and truncation for SETATTR."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        open_files: OpenFiles,
        segments: Segments,
        database: MountDatabase,
        view: AttributeView,
        records: FileRecords,
        content: FileContent,
        elsewhere: RemoteFiles,
        writing: RemoteWriting,
        noted: NotedWrites,
        removed: RemovedInodes,
        settler: Settler,
        growing: GrowingFiles,
        reclaimer: Reclaimer,
        store: StoreId,
    ) -> None:
        self._namespace = namespace
        self._versions = versions
        self._open_files = open_files
        self._segments = segments
        self._database = database
        self._view = view
        self._records = records
        self._content = content
        self._elsewhere = elsewhere
        self._writing = writing
        self._noted = noted
        self._removed = removed
        self._settler = settler
        self._growing = growing
        self._reclaimer = reclaimer
        self._store = store
        self._disk = DiskReads()
        self._disk_writes = DiskWrites()
        self._pages = KernelPages()

    def handlers(self) -> dict[int, Handler]:
        return {
            Opcode.CREATE: self.create,
            Opcode.OPEN: self.open,
            Opcode.READ: self.read,
            Opcode.WRITE: self.write,
            Opcode.FLUSH: self.flush,
            Opcode.RELEASE: self.release,
            Opcode.FSYNC: self.fsync,
            Opcode.FALLOCATE: self.fallocate,
            Opcode.LSEEK: self.lseek,
        }

    # Making

    async def create(self, header: RequestHeader, body: memoryview) -> bytes:
        flags, mode, umask, open_flags = fuse.CREATE_IN.unpack_from(body)
        name = bytes(body[fuse.CREATE_IN.size : -1])
        parent = InodeNumber(header.nodeid)
        if (repeated := self._open_files.opened_before(header.unique)) is not None:
            ino = repeated.file.ino
            return await self._view.entry(ino, await self._view.current(ino)) + await self.opened(repeated)
        while True:
            try:
                file, inode = await self._content.make(parent, name, mode, header.uid, header.gid, umask)
                break
            except NameExists:
                ino, inode = await self._namespace.lookup(parent, name)
                if inode.open is not None and await self._content.drop_unfinished(ino):
                    continue  # the name is gone with what was unfinished, or has what it had before
                if flags & os.O_EXCL:
                    raise
                # Another node made the name after this kernel had looked it up.
                handle = await self._open(header, ino, flags, open_flags)
                return await self._view.entry(ino, inode) + await self.opened(handle)
        try:
            handle = self._open_files.open_handle(header.unique, file, flags, store_row=True, serve=has_privileges(inode))
        except OSError:
            self.removed(await self._namespace.unlink(parent, name))
            raise
        if not handle.writable:  # no close of a writer will say that nobody writes to it
            self._settler.closed(file)
        return await self._view.entry(file.ino, inode) + await self.opened(handle)

    async def end_unheld(self, ino: InodeNumber) -> None:
        """End what the catalog says is written here, if no program has it: see `FileContent.taken_up`."""
        file = await self._content.taken_up(ino)
        if file is not None and not file.writers:
            self._settler.closed(file)

    def _open_handle_for_writing(self, unique: int, file: FileInUse, flags: int, *, serve: bool) -> Handle:
        try:
            return self._open_files.open_handle(unique, file, flags, store_row=True, serve=serve)
        except OSError:
            if not file.writers:  # nobody will close it
                self._settler.closed(file)
            raise

    async def make_empty(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int, umask: int) -> bytes:
        """A regular file by mknod(2): made, and closed at once. Returns its `fuse_entry_out`."""
        file, inode = await self._content.make(parent, name, mode, uid, gid, umask)
        self._database.put_file(self._open_files.row(file))
        self._settler.closed(file)
        return await self._view.entry(file.ino, inode)

    # Opening

    async def open(self, header: RequestHeader, body: memoryview) -> bytes:
        flags, open_flags = fuse.OPEN_IN.unpack_from(body)
        repeated = self._open_files.opened_before(header.unique)
        return await self.opened(repeated or await self._open(header, InodeNumber(header.nodeid), flags, open_flags))

    async def opened(self, handle: Handle) -> bytes:
        """The answer to an open. With O_SYNC or O_DSYNC the drive's file system syncs each write in the passthrough lane; that
        the name leads to these bytes after a power cut is seen to here, before the first one."""
        if handle.writable and handle.flags & os.O_DSYNC and handle.file.is_home:  # else its home has done it
            try:
                await self.sync_durably(handle.file)
            except OSError:
                await self.let_go(handle)
                raise
        return self._open_reply(handle)

    def _open_reply(self, handle: Handle) -> bytes:
        file = handle.file
        pages_stay = self._pages.may_stay(file)
        if file.lane is Lane.PASSTHROUGH:
            assert file.backing_id is not None
            return fuse.OPEN_OUT.pack(handle.fh, _PASSTHROUGH, file.backing_id)
        flags = OpenFlag(0) if handle.writable else OpenFlag.NOFLUSH
        if _is_direct(handle):
            flags |= OpenFlag.DIRECT_IO | OpenFlag.PARALLEL_DIRECT_WRITES
        if pages_stay:
            flags |= OpenFlag.KEEP_CACHE
        return fuse.OPEN_OUT.pack(handle.fh, flags, 0)

    async def _open(self, header: RequestHeader, ino: InodeNumber, flags: int, open_flags: int) -> Handle:
        writes = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        file = self._open_files.get(ino)
        keeps_set_id = not open_flags & fuse.OPEN_KILL_SUIDGID
        if file is not None and file.orphan is not None:
            if flags & os.O_TRUNC:
                await self._records.clear_privileges(ino, file.orphan, header, keeps_set_id=keeps_set_id)
                self._open_files.truncate(file, 0)
            serve = has_privileges(file.orphan)
            return self._open_files.open_handle(header.unique, file, flags, store_row=False, serve=serve)
        inode = await self._inode_to_open(ino)
        if not inode.is_regular:
            raise OSError(errno.EINVAL, "only regular files are opened here")
        if not writes:
            if inode.open is not None and file is None and await self._content.drop_unfinished(ino):
                inode = await self._inode_to_open(ino)
            file = await self._content.for_reading(ino, inode)
            file.record = inode
            return self._open_files.open_handle(header.unique, file, flags, store_row=False, serve=has_privileges(inode))
        if flags & os.O_TRUNC:
            inode = await self._records.clear_privileges(ino, inode, header, keeps_set_id=keeps_set_id)
            file = self._open_files.get(ino)
        elif file is not None and file.lane is Lane.PASSTHROUGH:  # it got them meanwhile, and nobody will see who writes
            inode = await self._records.clear_privileges(ino, inode, header, keeps_set_id=header.uid == 0)
        for tries_left in reversed(range(MOVED_TRIES)):
            try:
                if inode.writer is not None and self._view.written_elsewhere(inode):
                    return await self._open_through_home(header.unique, ino, inode.writer.store, flags)
                if (home := await self._joined(header.unique, ino, inode, flags)) is not None:
                    return await self._opened_at_home(header.unique, ino, home, flags)
                return await self._open_here(header.unique, ino, inode, flags)
            except HeldElsewhere:  # another node has begun to write it, or ended, since the record was read
                if not tries_left:
                    raise
            await self._namespace.kv.catch_up()
            inode = await self._inode_to_open(ino)
        raise AssertionError("the last try returns or raises")

    async def _open_here(self, unique: int, ino: InodeNumber, inode: Inode, flags: int) -> Handle:
        """Open for writing, with this node as the file's home. Raises `HeldElsewhere`."""
        file = await self._content.for_writing(ino, truncate=bool(flags & os.O_TRUNC))
        # Before anything waits: else it might be sealed.
        handle = self._open_handle_for_writing(unique, file, flags, serve=has_privileges(inode))
        if flags & os.O_TRUNC:
            try:
                await self._growing.voided(file)
            except BaseException:
                await self.let_go(handle)
                raise
        if not handle.writable:  # O_RDONLY | O_TRUNC
            self._settler.closed(file)
        return handle

    async def _joined(self, unique: int, ino: InodeNumber, inode: Inode, flags: int) -> StoreId | None:
        """Nobody writes the file, but programs on the node that has its bytes may have it open, and are to see what becomes of
        it: then that node stays its home, and has a handle of ours now."""
        version = None if inode.writer is not None or inode.cur is None else await self._versions.version(inode.cur)
        if version is None or version.home == self._store or version.segment == NO_SEGMENT:
            return None
        return version.home if await self._writing.join(version.home, ino, unique, flags) else None

    async def _open_through_home(self, unique: int, ino: InodeNumber, home: StoreId, flags: int) -> Handle:
        """Open for writing a file that is being written on another node. Raises `HeldElsewhere` if it isn't any more."""
        await self._writing.open(home, ino, unique, flags)
        return await self._opened_at_home(unique, ino, home, flags)

    async def _opened_at_home(self, unique: int, ino: InodeNumber, home: StoreId, flags: int) -> Handle:
        """The handle here for one that the home has under the same number."""
        try:
            await self._namespace.kv.catch_up()
            inode = await self._inode_to_open(ino)
            file = await self._content.for_reading(ino, inode)
            if inode.writer is None or inode.writer.store != home or file.is_home:
                raise HeldElsewhere(f"inode {ino} is not written on store {home.hex()} any more")
            file.record = inode
            handle = self._open_files.open_handle(unique, file, flags, store_row=False, serve=True)
        except BaseException:
            await self._writing.close(home, ino, unique, unique)
            raise
        if not handle.writable:  # O_RDONLY | O_TRUNC: what it was to write is done
            await self._writing.close(home, ino, unique, unique)
        return handle

    async def _inode_to_open(self, ino: InodeNumber) -> Inode:
        try:
            return await self._namespace.inode(ino)
        except NoSuchName:
            raise NameMoved(f"inode {ino} is gone: the name leads elsewhere now") from None

    # Changing

    async def set_size(self, unique: int, ino: InodeNumber, fh: int | None, size: int) -> None:
        """Set the size of a file, wherever its home is, through a handle or by name."""
        for tries_left in reversed(range(MOVED_TRIES)):
            handle = None if fh is None else self._open_files.handle(fh)
            inode = await self._view.current(ino)
            try:
                if handle is not None and not handle.file.is_home and handle.file.remote is not None:
                    return await self._writing.truncate(handle.file.remote.home, ino, unique, size)
                if inode.writer is not None and self._view.written_elsewhere(inode):
                    return await self._writing.truncate(inode.writer.store, ino, unique, size)
                if handle is None and (home := await self._joined(unique, ino, inode, os.O_WRONLY)) is not None:
                    try:
                        return await self._writing.truncate(home, ino, unique, size)
                    finally:
                        await self._writing.close(home, ino, unique, unique)
                return await self.truncate(ino, fh, size)
            except HeldElsewhere:  # as in `_open`
                if not tries_left:
                    raise
            await self._namespace.kv.catch_up()

    async def truncate(self, ino: InodeNumber, fh: int | None, size: int) -> None:
        """Set the size of a file whose home is this node, or is from now on. Raises `HeldElsewhere`."""
        handle = None if fh is None else self._open_files.handle(fh)
        file = self._open_files.get(ino) if handle is None else handle.file
        if file is None or file.orphan is None:
            file = await self._content.for_writing(ino, truncate=size == 0)  # which needs nothing of what was there
        file.writers += 1  # so that it isn't sealed while the thread has it
        try:
            await trio.to_thread.run_sync(self._open_files.truncate, file, size)
        finally:
            file.writers -= 1
        await self._growing.voided(file)
        if not file.writers:
            self._settler.closed(file)

    async def fallocate(self, header: RequestHeader, body: memoryview) -> bytes:
        fh, offset, length, mode, _ = fuse.FALLOCATE_IN.unpack_from(body)
        handle = self._handle(fh)
        file = handle.file
        if header.uid:  # the kernel doesn't say it of this request: whoever isn't root takes the file's privileges by it
            with contextlib.suppress(InodeGone):
                inode = await self._view.current(file.ino)
                await self._records.clear_privileges(file.ino, inode, header, keeps_set_id=False)
        if file.is_home:
            await self.allocate(file, mode, offset, length)
        else:
            await self._writing.allocate(handle, header.unique, mode, offset, length)
        return b""

    async def allocate(self, file: FileInUse, mode: int, offset: int, length: int) -> None:
        """fallocate(2) of a file whose home is here."""
        assert file.segment is not None
        path = self._segments.path_of(file.segment)

        def run() -> int:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                return 0 if _libc.fallocate(descriptor, mode, offset, length) == 0 else ctypes.get_errno()
            finally:
                os.close(descriptor)

        if number := await trio.to_thread.run_sync(run):
            raise OSError(number, os.strerror(number))
        file.generation += 1
        await self._growing.voided(file)

    async def write(self, header: RequestHeader, body: memoryview) -> bytes:
        fh, offset, size, flags, _, file_flags, _ = fuse.WRITE_IN.unpack_from(body)
        handle = self._handle(fh)
        file = handle.file
        keeps_set_id = not flags & fuse.WRITE_KILL_SUIDGID
        with contextlib.suppress(InodeGone):  # removed on another node: there is no record to change
            inode = await self._view.current(file.ino)
            await self._records.clear_privileges(file.ino, inode, header, keeps_set_id=keeps_set_id)
        data = body[fuse.WRITE_IN.size : fuse.WRITE_IN.size + size]
        if not file.is_home:
            return fuse.WRITE_OUT.pack(await self._writing.write(handle, header.unique, data, offset, file_flags), 0)
        descriptor = self._open_files.writing_descriptor(file)
        if file_flags & os.O_APPEND:  # this kernel doesn't know the end if programs on other nodes append too
            written = await self._noted.append(self._noted.own(header.unique), file.ino, descriptor, data)
        else:
            written = await self._disk_writes.write(descriptor, data, offset)
        if file_flags & os.O_DSYNC and _is_direct(handle):  # else the kernel sends FSYNC after it
            await self.sync_durably(file)
        return fuse.WRITE_OUT.pack(written, 0)

    # Reading

    async def read(self, header: RequestHeader, body: memoryview) -> bytes | bytearray:
        fh, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        file = self._handle(fh).file
        gone: ContentGone | None = None
        for _ in range(MOVED_TRIES):
            if file.is_home:
                assert file.descriptor is not None
                return await self._disk.read(file.descriptor, size, offset)
            try:
                return await self._elsewhere.read(file, offset, size)
            except ContentGone as error:
                gone = error
            # It was rewritten: programs that have it open see that, as on one node.
            try:
                await self._content.for_reading(file.ino, await self._namespace.inode(file.ino))
            except NoSuchName:
                break
        assert gone is not None
        raise gone

    async def lseek(self, header: RequestHeader, body: memoryview) -> bytes:
        fh, offset, whence, _ = fuse.LSEEK_IN.unpack_from(body)
        file = self._handle(fh).file
        if file.descriptor is not None:
            return fuse.LSEEK_OUT.pack(os.lseek(file.descriptor, offset, whence))
        size = await self._elsewhere.size(file)
        if offset >= size:
            raise OSError(errno.ENXIO, "beyond the end")
        return fuse.LSEEK_OUT.pack(offset if whence == os.SEEK_DATA else size)

    # Closing and syncing

    async def flush(self, header: RequestHeader, body: memoryview) -> bytes:
        return b""

    async def release(self, header: RequestHeader, body: memoryview) -> bytes:
        handle = self._open_files.handle(fuse.RELEASE_IN.unpack_from(body)[0])
        if handle is not None:  # else let go before, by an earlier process
            await self.let_go(handle, header.unique)
        return b""

    async def let_go(self, handle: Handle, unique: int = 0) -> None:
        """The kernel has no use for the handle any more; it says so with the request of that number."""
        file = handle.file
        self._open_files.close_handle(handle)
        home = None if file.remote is None or file.is_home else file.remote.home
        if not file.handles:
            self._elsewhere.let_go(file)
        await self.after_close(file, wrote=handle.writable)
        if handle.writable and home is not None:
            await self._writing.close(home, file.ino, handle.fh, unique)

    async def after_close(self, file: FileInUse, *, wrote: bool) -> None:
        """One handle less, here or on another node."""
        if wrote and file.state is FileState.OPEN:
            if not file.writers:
                self._settler.closed(file)
            await self._growing.voided(file)
        if not file.is_held:
            if file.orphan is not None:
                await self._destroy(file)
            elif file.state is not FileState.OPEN:
                self._open_files.let_go(file)

    async def fsync(self, header: RequestHeader, body: memoryview) -> bytes:
        handle = self._handle(fuse.FSYNC_IN.unpack_from(body)[0])
        if handle.writable and not handle.file.is_home:
            await self._writing.sync(handle, header.unique)
        else:
            await self.sync_durably(handle.file)
        return b""

    async def voided(self, file: FileInUse) -> None:
        """Older bytes may not be shown for the file any more: see `growing`."""
        await self._growing.voided(file)

    async def sync_durably(self, file: FileInUse) -> None:
        """What fsync promises."""
        if file.is_home and file.state in (FileState.OPEN, FileState.ORPHAN):
            await self._sync(file)
            self._growing.synced(file)
        if file.orphan is None:
            await self._namespace.kv.make_durable()

    async def _sync(self, file: FileInUse) -> None:
        """The write order of a sync: bytes, the segment's name, the durable mark; the caller makes the catalog durable."""
        vid = file.vid
        first = file.durable_vid != vid and file.orphan is None
        await self._open_files.sync(file, with_name=first)
        if first and file.orphan is None:
            await self._versions.mark_durable(vid)
            file.durable_vid = vid

    # Removing

    async def before_replacing(self, directory: InodeNumber, old: bytes, new_directory: InodeNumber, new: bytes) -> None:
        """A rename is to come. What was synced and isn't local yet can't be fallen back to: so the file that takes its place is
        synced first, as ext4 does it, else a power cut could leave neither of them (R1). Raises `OSError` if that fails."""
        try:
            _, replaced = await self._namespace.lookup(new_directory, new)
            version = None if replaced.open is None else await self._versions.version(replaced.open)
            if version is None or not version.durable or replaced.nlink > 1:
                return
            ino, _ = await self._namespace.lookup(directory, old)
        except NoSuchName:
            return
        file = self._open_files.get(ino)
        if file is not None and file.is_home and file.state is FileState.OPEN and file.durable_vid != file.vid:
            await self._sync(file)

    async def replaced(self, removed: Removed) -> None:
        """A file was renamed over: as `removed`, and the protected version that is kept needs no segment here any more."""
        self.removed(removed)
        kept = removed.inode_after.prot
        version = None if kept is None or not removed.last else await self._versions.version(kept)
        file = self._open_files.get(removed.ino)
        if version is not None and version.home == self._store and (file is None or file.segment != version.segment):
            self._reclaimer.segment(version.segment, at_once=False)

    def renamed(self, ino: InodeNumber, parent: InodeNumber, name: bytes) -> None:
        """Keep the hint of a file in use up to date, and where a directory is known to be."""
        self._open_files.paths.moved(ino, parent, name)
        file = self._open_files.get(ino)
        if file is not None:
            file.path_hint = self._open_files.paths.path(parent, name)
        self._growing.renamed(ino)

    def removed(self, removed: Removed) -> None:
        """A name is gone. With the last one a file in use becomes an orphan, another one's segments go."""
        if not removed.last:
            return
        record = removed.inode_after
        file = self._open_files.get(removed.ino)
        if file is not None:
            file.generation += 1
            if file.is_held:
                file.orphan, file.state = removed.inode_after, FileState.ORPHAN
                if file.is_home:
                    self._database.put_file(self._open_files.row(file))
                self.ended((vid, version) for vid, version in removed.dead if version.segment != file.segment)
                return
            record = _with_size(record, file)
            self._open_files.drop(file)
        self._removed.add(removed.ino, record)
        # Not before the catalog's fact: it is the row that tells of a version to be dropped after a power cut.
        self._reclaimer.when_durable(lambda: self._database.remove_files([removed.ino]))
        self.ended(removed.dead)

    def ended(self, dead: Iterable[tuple[Vid, Version]]) -> None:
        """Versions whose end the catalog has committed: their segments here go."""
        for _, version in dead:
            if version.home == self._store:
                self._reclaimer.segment(version.segment, at_once=version.state is VersionState.OPEN and not version.durable)

    async def _destroy(self, file: FileInUse) -> None:
        """The last handle of a nameless file is closed. Its segment goes, unless it is what the file that replaced it falls back
        to: then it goes when that one is local."""
        segment: SegmentId | None = file.segment
        assert file.orphan is not None
        self._removed.add(file.ino, _with_size(file.orphan, file))
        self._open_files.drop(file)
        self._reclaimer.when_durable(lambda: self._database.remove_files([file.ino]))
        if segment is not None and await self._versions.version(file.vid) is None:
            self._reclaimer.segment(segment, at_once=False)

    def _handle(self, fh: int) -> Handle:
        handle = self._open_files.handle(fh)
        if handle is None:
            raise OSError(errno.EBADF, "the handle is unknown")
        return handle


def _is_direct(handle: Handle) -> bool:
    """Whether the served lane's writes come past the page cache, which is how one that can't be mapped is written fastest; and,
    where the home is another node, the only way to see what others write to it now."""
    return handle.flags & os.O_ACCMODE == os.O_WRONLY or (handle.writable and not handle.file.is_home)


def _with_size(record: Inode, file: FileInUse) -> Inode:
    """The record with the size that the file's segment has."""
    if file.descriptor is None:
        return record
    return msgspec.structs.replace(record, size=os.fstat(file.descriptor).st_size)
