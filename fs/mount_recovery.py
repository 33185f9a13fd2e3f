"""What a new mount process does before it answers anything: find again what the one before it left.

In the same boot the page cache is still there, so every segment is whole; handles and backing ids are the kernel's, and still
good if the connection is the same one. After a power cut (another boot id) an open version without its durable mark is dropped:
its name shows what it had before, or goes (R4). The work is bounded by what was in flight: files in use, and those whose record
in the catalog changed after `mount.db` was last known to agree with it. Only with a new database every version is looked at.
Whether the power was cut says `last_use`.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from ckptfs.cache.boot import boot_id
from ckptfs.cache.catalog_format import Inode, Version, VersionState, unpack
from ckptfs.cache.changed_inodes import changed_inodes
from ckptfs.cache.errors import DamagedData, NoSuchName
from ckptfs.cache.ids import SEGMENT_WINDOW_SECONDS, InodeNumber, SegmentId, StoreId, segment_made_at
from ckptfs.cache.mount_db import AGREED_FACT, BOOT_FACT, MADE_FACT, FileRow, FileState, MountDatabase, RemoteRow
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.segments import Segments
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.versions import Versions
from ckptfs.fs.last_use import boot_of_file, last_use
from ckptfs.fs.open_files import NAMELESS, FileInUse, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.segment_holds import SegmentHolds, held_as
from ckptfs.fs.settle import Settler

log = logging.getLogger(__name__)


class MountRecovery:
    """One recovery: `run` once, before the first request is read."""

    def __init__(
        self,
        database: MountDatabase,
        store: StoreId,
        namespace: Namespace,
        versions: Versions,
        segments: Segments,
        open_files: OpenFiles,
        settler: Settler,
        reclaimer: Reclaimer,
        holds: SegmentHolds,
        reopen: Callable[[InodeNumber, RemoteRow | None], Awaitable[FileInUse]],
        boot: Path,
        refusal: RefusalMark,
        set_back: SetBackMark,
        *,
        new_connection: bool,
        restore_guests: Callable[[], None] = lambda: None,
    ) -> None:
        """`boot` is the store's file of that name. On a new connection no request comes again."""
        self._database = database
        self._store = store
        self._namespace = namespace
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._settler = settler
        self._reclaimer = reclaimer
        self._holds = holds
        self._reopen = reopen
        self._boot = boot
        self._refusal = refusal
        self._set_back = set_back
        self._new_connection = new_connection
        self._restore_guests = restore_guests
        self._corrections: list[Callable[[], None]] = []
        """Of rows: to be made when the catalog is durable."""

    async def run(self) -> None:
        self._database.take_over()
        this_boot = boot_id()
        last = last_use(self._database, self._boot, self._refusal, self._set_back, new_connection=self._new_connection)
        power_was_cut = last.power_was_cut
        if not last.is_noted:
            self._be_younger_than_all_segments()
        if power_was_cut:
            self._database.forget_guests()
        handles = self._database.handles()
        in_use = {handle.ino for handle in handles} | {guest.ino for guest in self._database.guests()}
        restored = dropped = 0
        revision = await self._namespace.kv.revision()
        changed = None if not last.is_noted else await self._changed_inodes(revision)
        unknown: set[InodeNumber] = set()
        if power_was_cut or not last.is_noted or self._new_connection:
            unknown = await self._add_unknown(changed)
        for row in self._rows_in_doubt(changed):
            if row.backing_id is not None and row.backing_id < 0:
                self._open_files.give_back(-row.backing_id)
                row = row._replace(backing_id=None)
            # Where nothing says which boot it was, the segment's name says when it was made. What a database of this boot has no
            # row of was given to no program, or was set back: if it was never synced, nobody relies on it.
            of_nobody = last.is_noted and row.ino in unknown
            older = of_nobody or last.may_have_lost(row.segment)
            if await self._restore(row, in_use=row.ino in in_use, power_was_cut=older):
                restored += 1
            else:
                dropped += 1
        noted = {row.ino: row for row in self._database.remotes()}
        for handle in handles:
            file = self._open_files.get(handle.ino) or await self._reopen(handle.ino, noted.get(handle.ino))
            self._open_files.restore_handle(handle, file)
        self._restore_guests()
        self._database.remove_remotes(ino for ino in noted if not self._is_noted(ino))
        await self._holds.begin(
            held for file in self._open_files if file.handles for held in (file.held, held_as(file.vid)) if held
        )
        for file in self._open_files:
            if file.state is FileState.OPEN and not file.writers:
                self._settler.closed(file)
        if self._corrections:
            await self._versions.kv.make_durable()  # the catalog first: the rows tell of what is to be corrected in it
            for correct in self._corrections:
                correct()
        self._database.set_fact(BOOT_FACT, this_boot)
        if power_was_cut:  # a row may have got further than the catalog did: the sweep begins with all of them
            self._database.forget_fact(AGREED_FACT)
        else:
            self._database.set_fact(AGREED_FACT, b"%d" % revision)
        self._note_boot(this_boot)
        self._set_back.begin()
        if self._refusal.was_unmounted():
            self._refusal.clear()
        if restored or dropped or handles:
            log.info("recovered files=%d dropped=%d handles=%d power_cut=%s", restored, dropped, len(handles), power_was_cut)

    def _note_boot(self, boot_id: bytes) -> None:
        """In the file too. One that a power cut took says nothing; one of an older boot says that the power was cut."""
        if boot_of_file(self._boot) == boot_id:
            return
        temporary = self._boot.with_name("boot.new")
        try:
            temporary.write_bytes(boot_id + b"\n")
            temporary.rename(self._boot)
        except OSError as error:
            log.warning("boot_not_noted path=%s error=%s", self._boot, error)

    def _be_younger_than_all_segments(self) -> None:
        """A database made after the clock was set back must not be older than what was there before it (`segment_sweep`)."""
        newest = max((segment_made_at(segment) for segment in self._segments.all()), default=0)
        if newest * 10**9 > int(self._database.fact(MADE_FACT) or 0):
            self._database.set_fact(MADE_FACT, b"%d" % ((newest + SEGMENT_WINDOW_SECONDS) * 10**9))

    def _is_noted(self, ino: InodeNumber) -> bool:
        file = self._open_files.get(ino)
        return file is not None and file.noted

    async def _restore(self, row: FileRow, *, in_use: bool, power_was_cut: bool) -> bool:
        """Take the row up; False if there is nothing to it any more, and then the row and its segment are gone."""
        is_named = await self._has_name(row.ino)
        if is_named and row.state is FileState.ORPHAN:  # its first name is not noted here, or its last one's removal was lost
            row = row._replace(state=FileState.OPEN, orphan=b"")
            self._database.put_file(row)
        try:
            version = await self._versions.version(row.vid)
        except DamagedData:
            return self._restore_as_noted(row, in_use=in_use)
        if not row.orphan and (version is None or version.segment != row.segment):
            row, version = await self._carried_on(row, version)
        nameless = version is None or not is_named
        if version is not None and version.state is VersionState.OPEN and power_was_cut and not version.durable:
            await self._versions.drop_open(row.ino, row.vid)
            log.warning(
                "unsynced_file_dropped inode=%d name=%r: it was written but never synced before the power cut",
                row.ino,
                row.path_hint,
            )
            return await self._gone(row, row.segment)
        if version is None and not in_use:
            return await self._gone(row, row.segment)
        if nameless and not in_use:
            return await self._gone(row, None)  # the file that replaced it may fall back to these bytes
        if version is not None and version.state in (VersionState.LOCAL, VersionState.PROTECTED) and not in_use:
            self._sealed(row, version)
            return True
        try:
            descriptor = self._segments.open_read(row.segment)
        except FileNotFoundError:
            if version is not None and version.state is VersionState.OPEN:
                await self._versions.drop_open(row.ino, row.vid)
                log.error("segment_missing inode=%d segment=%s: the open version is dropped", row.ino, row.segment.hex())
            return await self._gone(row, None)
        state = FileState.ORPHAN if version is None or nameless else _STATES.get(version.state, FileState.PROTECTED)
        file = FileInUse(
            row.ino, state, row.vid, row.segment, descriptor, row.exposed_ns, row.path_hint, backing_id=row.backing_id
        )
        file.sync_failed = self._segments.has_sync_failed(descriptor)
        if nameless:
            file.orphan = unpack(Inode, row.orphan) if row.orphan else NAMELESS
        elif version is not None and version.durable:
            file.durable_vid = row.vid
        self._open_files.add(file)
        if nameless and row.state is not FileState.ORPHAN:
            self._database.put_file(self._open_files.row(file))
        return True

    def _restore_as_noted(self, row: FileRow, *, in_use: bool) -> bool:
        """Of a file whose version's record is damaged the row is all there is to go by: it stays, and so does its segment.
        Programs that have it open go on; it can't be sealed, and who opens it gets an error."""
        log.error("record_damaged inode=%d vid=%s name=%r: it is kept as it lies here", row.ino, row.vid.hex(), row.path_hint)
        if in_use:
            with contextlib.suppress(FileNotFoundError):
                descriptor = self._segments.open_read(row.segment)
                file = FileInUse(
                    row.ino, row.state, row.vid, row.segment, descriptor, row.exposed_ns, row.path_hint, backing_id=row.backing_id
                )
                file.sync_failed = self._segments.has_sync_failed(descriptor)
                if row.orphan:
                    file.orphan = unpack(Inode, row.orphan)
                self._open_files.add(file)
        return True

    async def _has_name(self, ino: InodeNumber) -> bool:
        """False for a file whose last name went just before the kill, also where its version outlives it."""
        try:
            await self._namespace.inode(ino)
        except NoSuchName:
            return False
        except DamagedData:  # an error of this file, not of the mount
            return True
        return True

    async def _changed_inodes(self, revision: int) -> set[InodeNumber] | None:
        """Those whose rows may not say what the catalog says; None: any may."""
        agreed = self._database.fact(AGREED_FACT)
        if agreed is None or int(agreed) > revision:
            return None
        return await changed_inodes(self._namespace.kv, int(agreed), revision)

    def _rows_in_doubt(self, changed: set[InodeNumber] | None) -> list[FileRow]:
        """Rows of files in use, and those that may not say what the catalog says, because of a kill or a power cut."""
        if changed is None:
            return self._database.files()
        rows = self._database.files_in_use()
        looked_up = (self._database.file(ino) for ino in changed - {row.ino for row in rows})
        return rows + [row for row in looked_up if row is not None]

    async def _add_unknown(self, changed: set[InodeNumber] | None) -> set[InodeNumber]:
        """Rows for files of this store that the database does not have: it is new, a power cut took its newest rows, or a process
        was killed before it wrote them. Returns the inodes.

        An inode has one row: that of what is being written, which a power cut may take, and not of what it falls back to.
        """
        unknown: set[InodeNumber] = set()
        if changed is None:
            changed = {version.ino for _, version in await self._versions.local_versions(self._store)}
        for ino in changed:
            with contextlib.suppress(NoSuchName, DamagedData):
                inode = await self._namespace.inode(ino)
                for vid in (inode.open, inode.cur):
                    version = None if vid is None else await self._versions.version(vid)
                    if vid is None or version is None or version.home != self._store or version.state not in _STATES:
                        continue
                    known = self._database.file(ino)
                    is_carried_on = vid == inode.open and known is not None and known.segment == version.segment
                    if known is None or (known.vid != vid and not is_carried_on):
                        state, now = _STATES[version.state], self._namespace.now_ns()
                        self._database.put_file(FileRow(ino, vid, version.segment, state, version.size, now, None, b""))
                        unknown.add(ino)
                    break
        return unknown

    async def _carried_on(self, row: FileRow, known: Version | None) -> tuple[FileRow, Version | None]:
        """A file that was opened again, in the same segment, by a process that was killed before it could write that down; else
        what is known of the row."""
        try:
            inode = await self._namespace.inode(row.ino)
            vid = inode.open
            version = None if vid is None else await self._versions.version(vid)
        except (NoSuchName, DamagedData):
            return row, known
        if vid is None or version is None or version.segment != row.segment:
            return row, known
        # Nobody was given a handle to write with: these still are its times. Where it is gone, or the drive takes no writes,
        # it has what it has.
        with contextlib.suppress(OSError):
            os.utime(self._segments.path_of(row.segment), ns=(inode.atime_ns, inode.mtime_ns))
        row = row._replace(vid=vid, state=FileState.OPEN)
        self._database.put_file(row)
        return row, version

    def _sealed(self, row: FileRow, version: Version) -> None:
        """A version that became local or protected before the database was told."""
        if version.state is VersionState.PROTECTED:
            self._corrections.append(lambda: self._database.remove_files([row.ino]))
        else:
            local = row._replace(state=FileState.LOCAL, size=version.size, backing_id=None)
            self._corrections.append(lambda: self._database.put_file(local))

    async def _gone(self, row: FileRow, segment: SegmentId | None) -> bool:
        """What the row stood for is no more. What the file shows instead may be on this node only, and wait for protection."""
        left: FileRow | None = None
        version: Version | None = None
        with contextlib.suppress(NoSuchName, DamagedData):
            vid = (await self._namespace.inode(row.ino)).cur
            version = None if vid is None else await self._versions.version(vid)
            if vid is not None and version is not None and version.state is VersionState.LOCAL and version.home == self._store:
                left = row._replace(vid=vid, segment=version.segment, state=FileState.LOCAL, size=version.size)
        if left is None:
            self._corrections.append(lambda: self._database.remove_files([row.ino]))
        else:
            waiting = left._replace(backing_id=None, orphan=b"")
            self._corrections.append(lambda: self._database.put_file(waiting))
        if segment is not None and (version is None or version.segment != segment):
            self._reclaimer.segment(segment, at_once=False)
        return False


_STATES = {VersionState.OPEN: FileState.OPEN, VersionState.LOCAL: FileState.LOCAL}
