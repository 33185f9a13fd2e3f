"""Files in use whose bytes are on other nodes: which version programs have open, and where it is read from.

A version that was hashed is read from a local copy, checked; one that is still written, through its home. While only its home
has the bytes, the home is asked to keep the segment until the last close here, whatever becomes of the file.
"""

import logging
import os

import trio

from ckptfs.cache.catalog_format import Inode, Version, VersionState, unpack
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.cache.mount_db import FileState, RemoteRow
from ckptfs.fs.disk_reads import DiskReads
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.remote_content import RemoteContent, WholeCopy
from ckptfs.fs.segment_holds import SegmentHolds, held_as
from ckptfs.replication.local_copies import CopyPlace

log = logging.getLogger(__name__)

DEATH_LOOK_SECONDS = 60.0
"""A tenth of the time for which shards of dead versions stay in any case."""


def _is_protected(file: FileInUse) -> bool:
    return file.remote is not None and file.remote.state is VersionState.PROTECTED


class RemoteFiles:
    """Raises `ContentUnreachable` where bytes can't be had."""

    def __init__(self, open_files: OpenFiles, content: RemoteContent, holds: SegmentHolds) -> None:
        self._open_files = open_files
        self._content = content
        self._holds = holds
        self._disk = DiskReads()

    async def hold(self, vid: Vid, version: Version) -> bool:
        """Have the version's bytes kept for programs here; `use` follows at once. False if it is gone: look again."""
        return await self._holds.take(vid, version)

    def use(self, ino: InodeNumber, vid: Vid, version: Version) -> FileInUse:
        """The file, with this version as what is read; whoever has it open reads that from now on. Its home's file stays that."""
        file = self._open_files.get(ino)
        if file is None:
            file = FileInUse(ino, FileState.PROTECTED, vid, None, None, 0)
            self._open_files.add(file)
        elif file.is_home:
            return file  # it has become so while this version was looked up
        if file.vid != vid and file.copy_descriptor is not None:
            os.close(file.copy_descriptor)
            file.copy_descriptor = None
        before, file.held = file.held, self._holds.needed(version)
        if before is not None and before != file.held:
            self._holds.let_go(before)
        file.vid, file.remote = vid, version
        return file

    def restore(self, row: RemoteRow) -> FileInUse:
        """A file in use, as an earlier process noted it."""
        file = self.use(row.ino, row.vid, unpack(Version, row.version))
        file.record, file.noted = unpack(Inode, row.record), True
        return file

    async def keep_what_died(self) -> None:
        """Look for deaths now and then, until cancelled."""
        while True:
            await trio.sleep(DEATH_LOOK_SECONDS)
            try:
                await self.look_for_deaths()
            except CacheError as error:
                log.info("deaths_not_looked_for error=%s", error)

    async def look_for_deaths(self) -> None:
        """A version that died while programs here read it from shards keeps those until they close it."""
        for file in [file for file in self._open_files if file.handles and file.held is None and _is_protected(file)]:
            held = await self._holds.take_dead(file.vid)
            if held is None:
                continue
            if file.handles and file.held is None and held == held_as(file.vid):
                file.held = held
            else:
                self._holds.let_go(held)

    def let_go(self, file: FileInUse) -> None:
        """The last handle is closed."""
        if file.held is not None:
            self._holds.let_go(file.held)
            file.held = None

    async def read(self, file: FileInUse, offset: int, size: int) -> bytes | bytearray:
        """Bytes of what programs have open. Raises `ContentGone` if the file has other content now, or its bytes are nowhere."""
        version = file.remote
        if version is None or version.state is VersionState.OPEN:
            return await self._content.read(file.ino, file.vid, version, offset, size)
        size = min(size, version.size - offset)
        if size <= 0:
            return b""
        while True:
            fetched = await self._content.fetch(file.ino, file.vid, version, offset, size)
            if isinstance(fetched, bytes):
                return fetched
            try:
                descriptor = self._open_copy(file, fetched)
            except FileNotFoundError:  # it has made room for something since
                continue
            return await self._disk.read(descriptor, size, offset)

    def _open_copy(self, file: FileInUse, place: CopyPlace) -> int:
        """A descriptor of exactly that local copy. Raises `FileNotFoundError`."""
        if file.copy_descriptor is not None:
            if file.copy_identity == place.identity:
                return file.copy_descriptor
            os.close(file.copy_descriptor)  # that copy was evicted, this is another one
            file.copy_descriptor = None
        file.copy_descriptor, file.copy_identity = place.open(), place.identity
        return file.copy_descriptor

    async def size(self, file: FileInUse) -> int:
        """The size of what programs have open, in bytes."""
        if file.remote is None or file.remote.state is VersionState.OPEN:
            return (await self._content.attributes(file.ino, file.vid, file.remote)).size
        return file.remote.size

    async def fetch_whole(self, ino: InodeNumber) -> WholeCopy:
        """A complete, verified copy of the file's current content. Raises `OSError` (ENOSPC) too."""
        return await self._content.fetch_whole(ino)
