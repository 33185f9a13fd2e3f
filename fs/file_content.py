"""Which bytes an open gets: those of a segment here, of a copy of it, or of another node; and where a new version's go."""

import contextlib
import errno
import logging
import os

import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Inode, Version, VersionState
from ckptfs.cache.errors import ContentMoved, DamagedData, HeldElsewhere, NameMoved, NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid, new_segment_id
from ckptfs.cache.mount_db import FileState, MountDatabase, RemoteRow
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import OpenedForWriting, Versions
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.open_files import NAMELESS, FileInUse, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import READ_WAIT_SECONDS, WholeCopy
from ckptfs.fs.remote_files import RemoteFiles

log = logging.getLogger(__name__)

MOVED_TRIES = 4
"""How often a file is copied again that was rewritten elsewhere meanwhile, before the program gets ESTALE."""


class FileContent:
    """Makes files, and finds or makes the bytes that an open is for."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        open_files: OpenFiles,
        segments: Segments,
        database: MountDatabase,
        view: AttributeView,
        elsewhere: RemoteFiles,
        reclaimer: Reclaimer,
        store: StoreId,
    ) -> None:
        self._namespace = namespace
        self._versions = versions
        self._open_files = open_files
        self._segments = segments
        self._database = database
        self._view = view
        self._elsewhere = elsewhere
        self._reclaimer = reclaimer
        self._store = store

    # Making

    async def make(self, parent: InodeNumber, name: bytes, mode: int, uid: int, gid: int, umask: int) -> tuple[FileInUse, Inode]:
        segment = new_segment_id()
        with self._open_files.making(segment):
            ino, inode, vid = await self._namespace.create_file(parent, name, mode, uid, gid, segment, umask)
            try:
                descriptor = self._segments.create(segment, ino)
            except OSError:
                await self._namespace.unlink(parent, name)
                raise
            path = self._open_files.paths.path(parent, name)
            file = FileInUse(ino, FileState.OPEN, vid, segment, descriptor, inode.made_ns, path_hint=path)
            self._open_files.add(file)
        return file, inode

    async def drop_unfinished(self, ino: InodeNumber) -> bool:
        """Drop a version whose making was not completed: an earlier daemon was killed amid it, or the catalog's answer was lost
        and the program told an error. Says whether there was one.

        Nobody was given a handle of it, because its row in `mount.db` is written before the answer, and its segment is empty. The
        name shows what it had before, or goes.
        """
        async with self._open_files.alone(ino):
            return await self._drop_unfinished(ino, await self._namespace.inode(ino))

    async def _drop_unfinished(self, ino: InodeNumber, inode: Inode) -> bool:
        """As `drop_unfinished`, for one who is alone with it."""
        vid = inode.open
        if vid is None or self._view.written_elsewhere(inode) or _has(self._open_files.get(ino), vid):
            return False
        version = await self._versions.version(vid)
        if version is None or version.durable or version.home != self._store or self._segments.size(version.segment):
            return False
        # Nothing waits from here to the drop: who makes the file has it in the table before its segment is no more in the making.
        row, file = self._database.file(ino), self._open_files.get(ino)
        if self._open_files.is_needed(version.segment) or _has(file, vid) or (row is not None and row.segment == version.segment):
            return False
        await self._versions.drop_open(ino, vid)
        self._reclaimer.segment(version.segment, at_once=True)
        log.warning("unfinished_version_dropped inode=%d: nobody was given a handle of it", ino)
        return True

    async def taken_up(self, ino: InodeNumber) -> FileInUse | None:
        """The file, if the catalog says that it is being written here and the table doesn't: the transaction that began it was
        carried out after its program had been told an error. It is in the table then as if it were just closed; or dropped, and
        None, if no bytes are there. Raises `NoSuchName`, `ContentUnreachable`.
        """
        async with self._open_files.alone(ino):
            inode = await self._namespace.inode(ino)
            vid = inode.open
            if vid is None or self._view.written_elsewhere(inode) or _has(self._open_files.get(ino), vid):
                return None
            if await self._drop_unfinished(ino, inode):
                return None
            version = await self._versions.version(vid)
            if version is None or version.home != self._store or self._open_files.is_made(version.segment):
                return None
            file = self._open_files.get(ino)
            if file is not None and file.segment != version.segment:
                return None
            return await self._being_written(ino, vid, inode)

    # For reading

    async def reopen(self, ino: InodeNumber, noted: RemoteRow | None) -> FileInUse:
        """The file behind a handle an earlier daemon gave out and only noted so. Where nothing is left of it, reads get EIO."""
        if noted is not None:
            return self._elsewhere.restore(noted)
        try:
            return await self.for_reading(ino, await self._namespace.inode(ino))
        except (NoSuchName, ContentUnreachable, DamagedData) as error:
            log.warning("handle_without_content inode=%d: what was open is not known any more: %s", ino, error)
            file = FileInUse(ino, FileState.PROTECTED, Vid(b""), None, None, 0, record=NAMELESS)
            self._open_files.add(file)
            return file

    async def for_reading(self, ino: InodeNumber, inode: Inode) -> FileInUse:
        """The file as readers get it now. It is to be given a handle before anything waits. Raises `ContentUnreachable`."""
        while (file := self._open_files.get(ino)) is not None and file.is_home:
            is_sound = await self._is_sound(file)
            if is_sound and self._is_current(file, inode) and self._open_files.get(ino) is file:
                return file
            before, inode = inode, await self._namespace.inode(ino)
            if inode != before or self._open_files.get(ino) is not file:
                continue  # it has moved meanwhile
            if file.handles and not is_sound:
                raise _damaged_in_use(file)
            if file.handles:
                # Its lane is taken: the kernel lets no other bytes be opened beside it.
                raise ContentUnreachable(
                    f"inode {ino} was rewritten on another node while programs here have its old content open: close it there"
                )
            self._open_files.drop(file)
        deadline = trio.current_time() + READ_WAIT_SECONDS
        while True:
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
            before, inode = inode, await self._namespace.inode(ino)
            if inode == before or trio.current_time() > deadline:  # else it has moved meanwhile
                raise _lost(ino)

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

    # For writing

    async def for_writing(self, ino: InodeNumber, *, truncate: bool) -> FileInUse:
        """The file with this node as its home and its version open. Raises `HeldElsewhere`, `ContentUnreachable`, `OSError`."""
        async with self._open_files.alone(ino):
            inode = await self._namespace.inode(ino)
            if self._view.written_elsewhere(inode):
                raise HeldElsewhere(f"inode {ino} is being written on another node")
            if await self._drop_unfinished(ino, inode):
                inode = await self._namespace.inode(ino)
            if inode.writer is not None and inode.open is not None:
                file = await self._being_written(ino, inode.open, inode)
                if truncate:
                    self._open_files.truncate(file, 0)
            else:
                file = await self._begin_writing(ino, inode, truncate)
            file.generation += 1
            return file

    async def _being_written(self, ino: InodeNumber, vid: Vid, inode: Inode) -> FileInUse:
        """The file whose version `vid` is open here, for one who is alone with it."""
        if _has(file := self._open_files.get(ino), vid):
            assert file is not None
            return file
        version = await self._versions.version(vid)
        file = None if version is None else self._home_file(ino, vid, version)
        if file is None or version is None or file.descriptor is None:
            raise ContentUnreachable(f"inode {ino} was being written here, but its segment is gone")
        if file.orphan is None and file.segment == version.segment:
            # Begun by a transaction whose answer was lost: nothing was written since, so these still are its times.
            if inode.epoch and not file.writers:  # else it is a nameless file's first name, whose bytes have newer times
                with contextlib.suppress(OSError):
                    os.utime(file.descriptor, ns=(inode.atime_ns, inode.mtime_ns))
            if file.state is FileState.PROTECTED:
                file.exposed_ns = self._namespace.now_ns()
            file.vid, file.state = vid, FileState.OPEN
            file.generation += 1
            self._database.put_file(self._open_files.row(file, os.fstat(file.descriptor).st_size))
            log.warning("open_version_taken_up inode=%d: its program was told an error, and it was begun all the same", ino)
        return file

    async def _begin_writing(self, ino: InodeNumber, inode: Inode, truncate: bool) -> FileInUse:
        found = self._open_files.get(ino)
        is_sound = found is None or not found.is_home or await self._is_sound(found)
        version = None if inode.cur is None else await self._versions.version(inode.cur)
        file = self._open_files.get(ino)  # programs may have opened or closed it while this waited
        in_use = file is not None and file.handles > 0
        if file is not None and file is found and not is_sound:
            # A new version in the same segment would be hashed as it is, and its damage look like content.
            if in_use:
                raise _damaged_in_use(file)
            self._open_files.drop(file)
            file = None
        if not (truncate and not in_use):
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
        if inode.lost:  # what is appended to nothing would look like the whole file
            raise _lost(ino)
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
        if self._open_files.get(file.ino) is not file:
            raise NameMoved(f"inode {file.ino} was removed while it was opened")
        if file.state is not FileState.LOCAL:
            file.exposed_ns = self._namespace.now_ns()
        file.vid, file.state = opened.vid, FileState.OPEN
        os.utime(file.descriptor, ns=(inode.atime_ns, inode.mtime_ns))
        self._database.put_file(self._open_files.row(file, os.fstat(file.descriptor).st_size))
        if truncate:
            self._open_files.truncate(file, 0)
        return file

    async def _begin_here(self, ino: InodeNumber) -> FileInUse:
        """A new, empty segment; the home is this node from now on."""
        segment = new_segment_id()
        opened = await self._versions.open_for_writing(ino, truncate_to_new_segment=segment)
        descriptor = await self._make_segment(opened, ino)
        file = await self._at_home_here(opened, descriptor)
        if file is not None:
            return file
        # The kernel lets an inode have one backing file at a time: the one that readers opened meanwhile carries on.
        os.close(descriptor)
        await self._versions.drop_open(ino, opened.vid)
        self._reclaimer.segment(segment, at_once=True)
        return await self._begin_writing(ino, await self._namespace.inode(ino), truncate=True)

    async def _move_here(self, ino: InodeNumber, copy: WholeCopy | None) -> FileInUse:
        """A new segment with the bytes of a verified copy (None: the file has no content); the home is this node from now on.

        Raises `ContentMoved` if that isn't the file's content any more."""
        segment = new_segment_id()
        if copy is None:
            opened = await self._versions.move_home(ino, segment, None)
            return await self._moved_here(opened, await self._make_segment(opened, ino))
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
        return await self._moved_here(opened, descriptor)

    async def _moved_here(self, opened: OpenedForWriting, descriptor: int) -> FileInUse:
        file = await self._at_home_here(opened, descriptor)
        assert file is not None, "programs had it open at a home that was not here"
        return file

    async def _make_segment(self, opened: OpenedForWriting, ino: InodeNumber) -> int:
        try:
            return self._segments.create(opened.segment, ino)
        except OSError:
            await self._versions.drop_open(ino, opened.vid)
            raise

    async def _at_home_here(self, opened: OpenedForWriting, descriptor: int) -> FileInUse | None:
        """The file with its new segment; None if programs have another one open here."""
        ino, replaced = opened.version.ino, opened.inode.cur
        version = None if replaced is None else await self._versions.version(replaced)
        now = self._namespace.now_ns()
        file = self._open_files.get(ino)
        if file is not None and file.handles and file.is_home:
            return None
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


def _has(file: FileInUse | None, vid: Vid) -> bool:
    """Whether it is in use as the home of this version."""
    return file is not None and file.is_home and file.vid == vid


def _lost(ino: InodeNumber) -> ContentUnreachable:
    return ContentUnreachable(
        f"inode {ino} is lost: the node that had its content was declared lost before it was protected; start that node, if its"
        " drive is whole, or save the file again"
    )


def _damaged_in_use(file: FileInUse) -> ContentUnreachable:
    segment = file.segment.hex() if file.segment else "-"
    return ContentUnreachable(
        f"the segment {segment} of inode {file.ino} is damaged, and programs here have it open: it can be opened again when they"
        " close it"
    )


def _damaged_and_unprotected(ino: InodeNumber, version: Version) -> ContentUnreachable:
    return ContentUnreachable(
        f"the segment {version.segment.hex()} of inode {ino} was damaged before it was protected: nothing can repair it"
    )
