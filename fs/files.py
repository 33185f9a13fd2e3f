"""Operations on a regular file's bytes: which bytes an open gets, in which lane, and what happens to them afterwards."""

import ctypes
import errno
import logging
import os
from collections.abc import Iterable

import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Inode, Version, VersionState
from ckptfs.cache.errors import ContentMoved, HeldElsewhere, NameExists, NameMoved, NoSuchName
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid, new_segment_id
from ckptfs.cache.mount_db import FileState, MountDatabase, RemoteRow
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.removal import Removed
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import OpenedForWriting, Versions
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.disk_reads import DiskReads
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.fuse_format import Opcode, OpenFlag, RequestHeader
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.growing import GrowingFiles
from ckptfs.fs.open_files import NAMELESS, FileInUse, Handle, Lane, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import ContentGone, WholeCopy
from ckptfs.fs.remote_files import RemoteFiles
from ckptfs.fs.settle import Settler

log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


MOVED_TRIES = 4
"""How often a file is copied again that was rewritten elsewhere meanwhile, before the program gets ESTALE."""


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
        elsewhere: RemoteFiles,
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
        self._elsewhere = elsewhere
        self._settler = settler
        self._growing = growing
        self._reclaimer = reclaimer
        self._store = store
        self._disk = DiskReads()

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
        flags, mode, _umask, _ = fuse.CREATE_IN.unpack_from(body)
        name = bytes(body[fuse.CREATE_IN.size : -1])
        parent = InodeNumber(header.nodeid)
        if (repeated := self._open_files.opened_before(header.unique)) is not None:
            ino = repeated.file.ino
            return await self._view.entry(ino, await self._view.current(ino)) + _open_reply(repeated)
        try:
            file, inode = await self._make(parent, name, mode, header.uid, header.gid)
        except NameExists:
            ino, inode = await self._namespace.lookup(parent, name)
            if inode.open is None or not await self.drop_unfinished(ino):
                if flags & os.O_EXCL:
                    raise
                # Another node made the name after this kernel had looked it up.
                handle = await self._open(header, ino, flags)
                return await self._view.entry(ino, inode) + _open_reply(handle)
            file, inode = await self._make(parent, name, mode, header.uid, header.gid)
        try:
            handle = self._open_files.open_handle(header.unique, file, flags, store_row=True)
        except OSError:
            self.removed(await self._namespace.unlink(parent, name))
            raise
        return await self._view.entry(file.ino, inode) + _open_reply(handle)

    def _open_handle_for_writing(self, unique: int, file: FileInUse, flags: int) -> Handle:
        try:
            return self._open_files.open_handle(unique, file, flags, store_row=True)
        except OSError:
            if not file.writers:  # nobody will close it
                self._settler.closed(file)
            raise

    async def drop_unfinished(self, ino: InodeNumber) -> bool:
        """Drop a version that an earlier daemon was killed in the making of; says whether there was one.

        Nobody was given a handle of it, because its row in `mount.db` is written before the answer, and its segment is empty. The
        name shows what it had before, or goes.
        """
        async with self._open_files.alone(ino):
            inode = await self._namespace.inode(ino)
            vid = inode.open
            if vid is None or self._view.written_elsewhere(inode) or self._open_files.get(ino) is not None:
                return False
            version, row = await self._versions.version(vid), self._database.file(ino)
            if version is None or version.durable or (row is not None and row.segment == version.segment):
                return False
            if self._segments.size(version.segment):
                return False
            await self._versions.drop_open(ino, vid)
            self._reclaimer.segment(version.segment, at_once=True)
            log.warning("unfinished_version_dropped inode=%d: this process was killed while it made the file", ino)
            return True

    async def make_empty(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> bytes:
        """A regular file by mknod(2): made, and closed at once. Returns its `fuse_entry_out`."""
        file, inode = await self._make(parent, name, mode, uid, gid)
        self._database.put_file(self._open_files.row(file))
        self._settler.closed(file)
        return await self._view.entry(file.ino, inode)

    async def _make(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int) -> tuple[FileInUse, Inode]:
        segment = new_segment_id()
        ino, inode, vid = await self._namespace.create_file(parent, name, mode, uid, gid, segment)
        try:
            descriptor = self._segments.create(segment, ino)
        except OSError:
            await self._namespace.unlink(parent, name)
            raise
        file = FileInUse(ino, FileState.OPEN, vid, segment, descriptor, self._namespace.now_ns(), path_hint=name)
        self._open_files.add(file)
        return file, inode

    # Opening

    async def open(self, header: RequestHeader, body: memoryview) -> bytes:
        flags, _ = fuse.OPEN_IN.unpack_from(body)
        repeated = self._open_files.opened_before(header.unique)
        return _open_reply(repeated or await self._open(header, InodeNumber(header.nodeid), flags))

    async def _open(self, header: RequestHeader, ino: InodeNumber, flags: int) -> Handle:
        writes = flags & os.O_ACCMODE != os.O_RDONLY or bool(flags & os.O_TRUNC)
        file = self._open_files.get(ino)
        if file is not None and file.orphan is not None:
            if flags & os.O_TRUNC:
                self._truncate(file, 0)
            return self._open_files.open_handle(header.unique, file, flags, store_row=False)
        try:
            inode = await self._namespace.inode(ino)
        except NoSuchName:
            raise NameMoved(f"inode {ino} is gone: the name leads elsewhere now") from None
        if not inode.is_regular:
            raise OSError(errno.EINVAL, "only regular files are opened here")
        if not writes:
            if inode.open is not None and file is None and await self.drop_unfinished(ino):
                raise NameMoved(f"inode {ino} was never finished: the name leads to what it had before, or nowhere")
            file = await self._for_reading(ino, inode)
            file.record = inode
            return self._open_files.open_handle(header.unique, file, flags, store_row=False)
        if inode.open is not None and file is None and await self.drop_unfinished(ino):
            raise NameMoved(f"inode {ino} was never finished: the name leads to what it had before, or nowhere")
        if header.uid != 0:
            await self._records.clear_privileges(ino, inode)
        file = await self.for_writing(ino, truncate=bool(flags & os.O_TRUNC))
        if flags & os.O_TRUNC:
            await self._growing.voided(file)
        handle = self._open_handle_for_writing(header.unique, file, flags)
        if not handle.writable:  # O_RDONLY | O_TRUNC
            self._settler.closed(file)
        return handle

    async def reopen(self, ino: InodeNumber, noted: RemoteRow | None) -> FileInUse:
        """The file behind a handle an earlier daemon gave out and only noted so. Where nothing is left of it, reads get EIO."""
        if noted is not None:
            return self._elsewhere.restore(noted)
        try:
            return await self._for_reading(ino, await self._namespace.inode(ino))
        except (NoSuchName, ContentUnreachable):
            log.warning("handle_without_content inode=%d: the file was removed, and what was open is not known any more", ino)
            file = FileInUse(ino, FileState.PROTECTED, Vid(b""), None, None, 0, record=NAMELESS)
            self._open_files.add(file)
            return file

    async def _for_reading(self, ino: InodeNumber, inode: Inode) -> FileInUse:
        file = self._open_files.get(ino)
        if file is not None and file.is_home:
            is_sound = await self._is_sound(file)
            if self._is_current(file, inode) and is_sound:
                return file
            if file.handles and not is_sound:
                raise _damaged_in_use(file)
            if file.handles:
                # Its lane is taken: the kernel lets no other bytes be opened beside it.
                raise ContentUnreachable(
                    f"inode {ino} was rewritten on another node while programs here have its old content open: close it there"
                )
            self._open_files.drop(file)
            file = None
        for _ in range(MOVED_TRIES):
            vid = inode.open if inode.writer is not None and inode.open is not None else inode.cur
            version = None if vid is None else await self._versions.version(vid)
            if vid is not None and version is not None:
                if version.damaged and version.state is VersionState.LOCAL:
                    raise _damaged_and_unprotected(ino, version)
                if version.home == self._store and not version.damaged:
                    home = self._home_file(ino, vid, version)
                    if home is not None:
                        return home
                if await self._elsewhere.hold(vid, version):
                    return self._elsewhere.use(ino, vid, version)
            inode = await self._namespace.inode(ino)  # it has moved meanwhile
        raise ContentUnreachable(f"inode {ino} has no content that survived; an older name of it may")

    def _is_current(self, file: FileInUse, inode: Inode) -> bool:
        """Whether the home's bytes in the table are what readers get now, and not what another node has replaced since."""
        if inode.writer is not None:
            return inode.writer.store == self._store
        return inode.cur == file.vid

    async def _is_sound(self, file: FileInUse) -> bool:
        """Whether nobody has found the file's segment damaged since it was sealed, and put another in its place perhaps."""
        if file.state not in (FileState.LOCAL, FileState.PROTECTED):
            return True
        version = await self._versions.version(file.vid)
        return version is None or (not version.damaged and version.segment in (file.segment, NO_SEGMENT))

    def _home_file(self, ino: InodeNumber, vid: Vid, version: Version) -> FileInUse | None:
        """The file with its segment open, or None if the segment was released. An existing entry becomes the home's."""
        file = self._open_files.get(ino)
        if file is not None and file.is_home:
            return file
        if version.segment in self._open_files.releasing:
            return None
        try:
            descriptor = self._segments.open_read(version.segment)
        except FileNotFoundError:
            return None
        state = FileState.OPEN if version.state is VersionState.OPEN else FileState.LOCAL
        if version.state is VersionState.PROTECTED:
            state = FileState.PROTECTED
        if file is None:
            row = self._database.file(ino)
            exposed_ns = self._namespace.now_ns() if row is None else row.exposed_ns
            file = FileInUse(ino, state, vid, version.segment, descriptor, exposed_ns)
            if row is not None:
                file.path_hint = row.path_hint  # not its backing id: on a full drive the row may still have one that was closed
            self._open_files.add(file)
        else:
            file.state, file.vid, file.segment, file.descriptor = state, vid, version.segment, descriptor
            file.remote = None
        return file

    async def for_writing(self, ino: InodeNumber, *, truncate: bool) -> FileInUse:
        """The file with this node as its home and its version open. Raises `HeldElsewhere`, `ContentUnreachable`, `OSError`."""
        async with self._open_files.alone(ino):
            inode = await self._namespace.inode(ino)
            if self._view.written_elsewhere(inode):
                raise HeldElsewhere(f"inode {ino} is being written on another node")
            if inode.writer is not None and inode.open is not None:
                file = await self._being_written(ino, inode.open)
                if truncate:
                    self._truncate(file, 0)
            else:
                file = await self._begin_writing(ino, inode, truncate)
            file.generation += 1
            return file

    async def _being_written(self, ino: InodeNumber, vid: Vid) -> FileInUse:
        file = self._open_files.get(ino)
        if file is not None and file.is_home:
            return file
        version = await self._versions.version(vid)
        file = None if version is None else self._home_file(ino, vid, version)
        if file is None:
            raise ContentUnreachable(f"inode {ino} was being written here, but its segment is gone")
        return file

    async def _begin_writing(self, ino: InodeNumber, inode: Inode, truncate: bool) -> FileInUse:
        file = self._open_files.get(ino)
        in_use = file is not None and file.handles > 0
        if file is not None and file.is_home and not await self._is_sound(file):
            # A new version in the same segment would be hashed as it is, and its damage look like content.
            if in_use:
                raise _damaged_in_use(file)
            self._open_files.drop(file)
            file = None
        if not (truncate and not in_use):
            version = None if inode.cur is None else await self._versions.version(inode.cur)
            if version is not None and version.damaged and version.state is VersionState.LOCAL:
                raise _damaged_and_unprotected(ino, version)
            if version is not None and inode.cur is not None and version.home == self._store and not version.damaged:
                file = self._home_file(ino, inode.cur, version)
        if file is not None and file.is_home and (in_use or not truncate):
            return await self._rewrite_in_place(file, inode, truncate)
        if truncate:
            try:
                return await self._begin_here(ino)
            except OSError as error:
                file = await self._current_home_file(ino) if error.errno == errno.ENOSPC else None
                if file is None:
                    raise
                # No room for a second segment: what is cut to nothing in place makes room.
                return await self._rewrite_in_place(file, inode, truncate)
        for _ in range(MOVED_TRIES):
            copy = None if inode.cur is None else await self._elsewhere.fetch_whole(ino)
            try:
                return await self._move_here(ino, copy)
            except (ContentMoved, FileNotFoundError):  # written and sealed on another node, or the copy was evicted, meanwhile
                inode = await self._namespace.inode(ino)
        raise ContentMoved(f"inode {ino} is rewritten on other nodes faster than it can be copied")

    async def _current_home_file(self, ino: InodeNumber) -> FileInUse | None:
        vid = (await self._namespace.inode(ino)).cur
        version = None if vid is None else await self._versions.version(vid)
        if vid is None or version is None or version.home != self._store or version.damaged:
            return None
        return self._home_file(ino, vid, version)

    async def _rewrite_in_place(self, file: FileInUse, inode: Inode, truncate: bool) -> FileInUse:
        """The segment carries on as a new version: what the old one held is what programs have open."""
        assert file.descriptor is not None
        version = await self._versions.version(file.vid)
        if version is not None and version.segment == NO_SEGMENT:
            raise HeldElsewhere(f"the segment of inode {file.ino} was released while programs have it open: close it there")
        opened = await self._versions.open_for_writing(file.ino, truncate_to_new_segment=None)
        if file.state is not FileState.LOCAL:
            file.exposed_ns = self._namespace.now_ns()
        file.vid, file.state = opened.vid, FileState.OPEN
        os.utime(file.descriptor, ns=(inode.atime_ns, inode.mtime_ns))
        self._database.put_file(self._open_files.row(file, os.fstat(file.descriptor).st_size))
        if truncate:
            self._truncate(file, 0)
        return file

    async def _begin_here(self, ino: InodeNumber) -> FileInUse:
        """A new, empty segment; the home is this node from now on."""
        segment = new_segment_id()
        opened = await self._versions.open_for_writing(ino, truncate_to_new_segment=segment)
        return await self._at_home_here(opened, await self._make_segment(opened, ino))

    async def _move_here(self, ino: InodeNumber, copy: WholeCopy | None) -> FileInUse:
        """A new segment with the bytes of a verified copy (None: the file has no content); the home is this node from now on.

        Raises `ContentMoved` if that isn't the file's content any more."""
        segment = new_segment_id()
        if copy is None:
            opened = await self._versions.move_home(ino, segment, None)
            return await self._at_home_here(opened, await self._make_segment(opened, ino))
        # Complete before anything leads to it: a kill in the middle leaves no file with half of its bytes.
        with self._open_files.making(segment):
            descriptor = await trio.to_thread.run_sync(
                self._segments.create_from, segment, ino, str(copy.place.path), copy.place.identity
            )
            try:
                opened = await self._versions.move_home(ino, segment, copy.vid)
            except BaseException:
                os.close(descriptor)
                self._segments.remove(segment)
                raise
        os.utime(descriptor, ns=(opened.inode.atime_ns, opened.inode.mtime_ns))
        return await self._at_home_here(opened, descriptor)

    async def _make_segment(self, opened: OpenedForWriting, ino: InodeNumber) -> int:
        try:
            return self._segments.create(opened.segment, ino)
        except OSError:
            await self._versions.drop_open(ino, opened.vid)
            raise

    async def _at_home_here(self, opened: OpenedForWriting, descriptor: int) -> FileInUse:
        """The file with its new segment."""
        ino, replaced = opened.version.ino, opened.inode.cur
        version = None if replaced is None else await self._versions.version(replaced)
        now = self._namespace.now_ns()
        file = self._open_files.get(ino)
        if file is None or file.handles == 0:
            if file is not None:
                self._open_files.drop(file)
            file = FileInUse(ino, FileState.OPEN, opened.vid, opened.segment, descriptor, now)
            self._open_files.add(file)
        else:
            file.state, file.vid, file.segment, file.descriptor = FileState.OPEN, opened.vid, opened.segment, descriptor
            file.exposed_ns, file.remote = now, None
        if version is not None and version.home == self._store and version.state is VersionState.PROTECTED:
            file.replaced_segment = version.segment
        self._database.put_file(self._open_files.row(file))
        return file

    # Changing

    def _truncate(self, file: FileInUse, size: int) -> None:
        assert file.segment is not None
        os.truncate(self._path_of(file), size)
        file.generation += 1

    def _path_of(self, file: FileInUse) -> str:
        assert file.segment is not None
        return self._segments.path_of(file.segment)

    async def truncate(self, ino: InodeNumber, fh: int | None, size: int) -> None:
        """Set the size of a file, through a handle or by name."""
        handle = None if fh is None else self._open_files.handle(fh)
        file = self._open_files.get(ino) if handle is None else handle.file
        if file is None or file.orphan is None:
            file = await self.for_writing(ino, truncate=size == 0)  # which needs nothing of what was there
        file.writers += 1  # so that it isn't sealed while the thread has it
        try:
            await trio.to_thread.run_sync(self._truncate, file, size)
        finally:
            file.writers -= 1
        await self._growing.voided(file)
        if not file.writers:
            self._settler.closed(file)

    async def fallocate(self, header: RequestHeader, body: memoryview) -> bytes:
        fh, offset, length, mode, _ = fuse.FALLOCATE_IN.unpack_from(body)
        file = self._handle(fh).file
        if not file.is_home:
            raise OSError(errno.EOPNOTSUPP, "not the file's home")

        def run() -> int:
            descriptor = os.open(self._path_of(file), os.O_RDWR | os.O_CLOEXEC)
            try:
                return 0 if _libc.fallocate(descriptor, mode, offset, length) == 0 else ctypes.get_errno()
            finally:
                os.close(descriptor)

        if number := await trio.to_thread.run_sync(run):
            raise OSError(number, os.strerror(number))
        file.generation += 1
        await self._growing.voided(file)
        return b""

    async def write(self, header: RequestHeader, body: memoryview) -> bytes:
        fh, offset, size, flags, *_ = fuse.WRITE_IN.unpack_from(body)
        file = self._handle(fh).file
        if not file.is_home:
            raise OSError(errno.EBADF, "not the file's home")
        if flags & fuse.WRITE_KILL_SUIDGID and file.orphan is None:
            await self._records.clear_privileges(file.ino, await self._namespace.inode(file.ino))
        data = body[fuse.WRITE_IN.size : fuse.WRITE_IN.size + size]
        written = await trio.to_thread.run_sync(os.pwrite, self._open_files.writing_descriptor(file), data, offset)
        return fuse.WRITE_OUT.pack(written, 0)

    # Reading

    async def read(self, header: RequestHeader, body: memoryview) -> bytes:
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
                await self._for_reading(file.ino, await self._namespace.inode(file.ino))
            except NoSuchName:
                break
        assert gone is not None
        self._elsewhere.complain(file, gone)
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
            await self.let_go(handle)
        return b""

    async def let_go(self, handle: Handle) -> None:
        """The kernel has no use for the handle any more."""
        file = handle.file
        self._open_files.close_handle(handle)
        if not file.handles:
            self._elsewhere.let_go(file)
        if handle.writable and file.state is FileState.OPEN:
            if not file.writers:
                self._settler.closed(file)
            await self._growing.voided(file)
        if not file.handles:
            if file.orphan is not None:
                await self._destroy(file)
            elif file.state is not FileState.OPEN:
                self._open_files.drop(file)

    async def fsync(self, header: RequestHeader, body: memoryview) -> bytes:
        file = self._handle(fuse.FSYNC_IN.unpack_from(body)[0]).file
        if file.is_home and file.state in (FileState.OPEN, FileState.ORPHAN):
            await self._sync(file)
            self._growing.synced(file)
        if file.orphan is None:
            await self._namespace.kv.make_durable()
        return b""

    async def _sync(self, file: FileInUse) -> None:
        """The write order of a sync: bytes, the segment's name, the durable mark; the caller makes the catalog durable."""
        descriptor, segment, vid = file.descriptor, file.segment, file.vid
        assert descriptor is not None
        assert segment is not None
        if file.sync_failed:
            raise OSError(errno.EIO, "an earlier sync of this file failed; its bytes were never safe")
        first = file.durable_vid != vid and file.orphan is None

        def run() -> None:
            os.fdatasync(descriptor)
            if first:
                self._segments.sync_directories([segment])

        try:
            await trio.to_thread.run_sync(run)
        except OSError as error:
            self._open_files.sync_failed(file)
            log.error("sync_failed inode=%d segment=%s error=%s", file.ino, segment.hex(), error.strerror)
            raise
        if first and file.orphan is None:
            await self._versions.mark_durable(vid)
            file.durable_vid = vid

    # Removing

    async def replaced(self, removed: Removed) -> None:
        """A file was renamed over: as `removed`, and the protected version that is kept needs no segment here any more."""
        self.removed(removed)
        kept = removed.inode_after.prot
        version = None if kept is None or not removed.last else await self._versions.version(kept)
        file = self._open_files.get(removed.ino)
        if version is not None and version.home == self._store and (file is None or file.segment != version.segment):
            self._reclaimer.segment(version.segment, at_once=False)

    def renamed(self, ino: InodeNumber, name: bytes) -> None:
        """Keep the hint of a file in use up to date."""
        file = self._open_files.get(ino)
        if file is not None:
            file.path_hint = name
        self._growing.renamed(ino)

    def removed(self, removed: Removed) -> None:
        """A name is gone. With the last one a file in use becomes an orphan, another one's segments go."""
        if not removed.last:
            return
        file = self._open_files.get(removed.ino)
        if file is not None:
            file.generation += 1
            if file.handles:
                file.orphan, file.state = removed.inode_after, FileState.ORPHAN
                if file.is_home:
                    self._database.put_file(self._open_files.row(file))
                self.ended((vid, version) for vid, version in removed.dead if version.segment != file.segment)
                return
            self._open_files.drop(file)
        self._database.remove_files([removed.ino])
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
        self._open_files.drop(file)
        self._database.remove_files([file.ino])
        if segment is not None and await self._versions.version(file.vid) is None:
            self._reclaimer.segment(segment, at_once=False)

    def _handle(self, fh: int) -> Handle:
        handle = self._open_files.handle(fh)
        if handle is None:
            raise OSError(errno.EBADF, "the handle is unknown")
        return handle


def _damaged_in_use(file: FileInUse) -> ContentUnreachable:
    log.warning("content_damaged inode=%d segment=%s: in use", file.ino, file.segment.hex() if file.segment else "-")
    return ContentUnreachable(
        f"the segment of inode {file.ino} is damaged, and programs here have it open: it can be opened again when they close it"
    )


def _damaged_and_unprotected(ino: InodeNumber, version: Version) -> ContentUnreachable:
    log.warning("content_damaged inode=%d segment=%s: never protected", ino, version.segment.hex())
    return ContentUnreachable(
        f"the segment {version.segment.hex()} of inode {ino} was damaged before it was protected: nothing can repair it"
    )


def _open_reply(handle: Handle) -> bytes:
    file = handle.file
    if file.lane is Lane.PASSTHROUGH:
        assert file.backing_id is not None
        return fuse.OPEN_OUT.pack(handle.fh, OpenFlag.PASSTHROUGH | OpenFlag.NOFLUSH, file.backing_id)
    flags = OpenFlag(0) if handle.writable else OpenFlag.NOFLUSH
    if handle.flags & os.O_ACCMODE == os.O_WRONLY:
        flags |= OpenFlag.DIRECT_IO | OpenFlag.PARALLEL_DIRECT_WRITES
    return fuse.OPEN_OUT.pack(handle.fh, flags, 0)
