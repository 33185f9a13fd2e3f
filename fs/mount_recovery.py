"""What a new mount process does before it answers anything: find again what the one before it left.

In the same boot the page cache is still there, so every segment is whole; handles and backing ids are the kernel's, and still
good if the connection is the same one. After a power cut (another boot id) an open version without its durable mark is dropped:
its name shows what it had before, or goes (R4). The work is bounded by what was in flight: rows of `mount.db`.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from ckptfs.cache.catalog_format import FORMAT_VERSION, Inode, Version, VersionState, unpack
from ckptfs.cache.ids import InodeNumber, SegmentId
from ckptfs.cache.mount_db import FileRow, FileState, MountDatabase
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.settle import Settler

log = logging.getLogger(__name__)

BOOT_FACT = "boot_id"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MountRecovery:
    """One recovery: `run` once, before the first request is read."""

    def __init__(
        self,
        database: MountDatabase,
        versions: Versions,
        segments: Segments,
        open_files: OpenFiles,
        settler: Settler,
        reclaimer: Reclaimer,
        reopen: Callable[[InodeNumber], Awaitable[FileInUse | None]],
    ) -> None:
        self._database = database
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._settler = settler
        self._reclaimer = reclaimer
        self._reopen = reopen

    async def run(self) -> None:
        boot_id = BOOT_ID.read_bytes().strip()
        power_was_cut = self._database.fact(BOOT_FACT) not in (None, boot_id)
        handles = self._database.handles()
        in_use = {handle.ino for handle in handles}
        restored = dropped = 0
        for row in self._database.files():
            if await self._restore(row, in_use=row.ino in in_use, power_was_cut=power_was_cut):
                restored += 1
            else:
                dropped += 1
        for handle in handles:
            file = self._open_files.get(handle.ino) or await self._reopen(handle.ino)
            if file is None:
                self._database.remove_handle(handle.fh)
            else:
                self._open_files.restore_handle(handle, file)
        for file in self._open_files:
            if file.state is FileState.OPEN and not file.writers:
                self._settler.closed(file)
        self._database.set_fact(BOOT_FACT, boot_id)
        if restored or dropped or handles:
            log.info("recovered files=%d dropped=%d handles=%d power_cut=%s", restored, dropped, len(handles), power_was_cut)

    async def _restore(self, row: FileRow, *, in_use: bool, power_was_cut: bool) -> bool:
        """Take the row up; False if there is nothing to it any more, and then the row and its segment are gone."""
        version = await self._versions.version(row.vid)
        if version is not None and version.state is VersionState.OPEN and power_was_cut and not version.durable:
            await self._versions.drop_open(row.ino, row.vid)
            log.warning(
                "unsynced_file_dropped inode=%d name=%r: it was written but never synced before the power cut",
                row.ino,
                row.path_hint,
            )
            return self._gone(row, row.segment)
        if version is None and not in_use:
            return self._gone(row, row.segment)
        if version is not None and version.state in (VersionState.LOCAL, VersionState.PROTECTED) and not in_use:
            self._sealed(row, version)
            return True
        try:
            descriptor = self._segments.open_read(row.segment)
        except FileNotFoundError:
            if version is not None and version.state is VersionState.OPEN:
                await self._versions.drop_open(row.ino, row.vid)
                log.error("segment_missing inode=%d segment=%s: the open version is dropped", row.ino, row.segment.hex())
            return self._gone(row, None)
        state = FileState.ORPHAN if version is None else _STATES.get(version.state, FileState.PROTECTED)
        file = FileInUse(
            row.ino, state, row.vid, row.segment, descriptor, row.exposed_ns, row.path_hint, backing_id=row.backing_id
        )
        if version is None:
            file.orphan = unpack(Inode, row.orphan) if row.orphan else _NAMELESS
        elif version.durable:
            file.durable_vid = row.vid
        self._open_files.add(file)
        return True

    def _sealed(self, row: FileRow, version: Version) -> None:
        """A version that became local or protected before the database was told."""
        if version.state is VersionState.PROTECTED:
            self._database.remove_files([row.ino])
        else:
            self._database.put_file(row._replace(state=FileState.LOCAL, size=version.size, backing_id=None))

    def _gone(self, row: FileRow, segment: SegmentId | None) -> bool:
        self._database.remove_files([row.ino])
        if segment is not None:
            self._reclaimer.segment(segment, at_once=False)
        return False


_STATES = {VersionState.OPEN: FileState.OPEN, VersionState.LOCAL: FileState.LOCAL}
_NAMELESS = Inode(FORMAT_VERSION, 0o100600, 0, 0, 0, 0, 0, nlink=0)
"""A removed file whose record was not written before the process died: its bytes live on until the last close."""
