"""A damaged segment gives way to a right one: made, checked and synced first, then named by one catalog transaction.

Programs that have the old segment open keep it until they close, because in the passthrough lane the kernel reads it without
asking; until then nobody else on this node can open the file, so that no program reads two contents of it (`FileContent`).
The old segment goes when nobody has it open: at once, or with a sweep (`segment_sweep`).

A kill in between leaves either the old segment named, and the new one to the sweep, or the other way round.
"""

import os

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.checksum import content_root
from ckptfs.cache.errors import CacheError, DamagedData
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid, new_segment_id
from ckptfs.cache.segments import Segments, hash_cells
from ckptfs.cache.versions import Versions
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_client import Mended


class SegmentSwitch:
    """Switches versions whose home is this store to new segments."""

    def __init__(
        self, versions: Versions, segments: Segments, open_files: OpenFiles, reclaimer: Reclaimer, store: StoreId
    ) -> None:
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._reclaimer = reclaimer
        self._store = store

    async def switch(self, ino: InodeNumber, vid: Vid, before: SegmentId, copy: CopyPlace) -> Mended:
        """Put a segment with the bytes of the copy in the place of `before`. Raises nothing for what stands in the way."""
        version = await self._versions.version(vid)
        if version is None or (version.home, version.segment) != (self._store, before):
            return Mended(True, "the version has another segment now, or none")
        segment = new_segment_id()
        with self._open_files.making(segment):
            try:
                await trio.to_thread.run_sync(self._make, segment, ino, vid, version, copy)
                return await self._name(ino, vid, before, segment)
            except (CacheError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                return Mended(False, f"no right segment could be put in its place: {reason}")

    def _make(self, segment: SegmentId, ino: InodeNumber, vid: Vid, version: Version, copy: CopyPlace) -> None:
        """The new segment, complete, on the drive and hashed again; nothing is left if it fails. In a thread."""
        descriptor = self._segments.create_from(segment, ino, os.fspath(copy.path), copy.identity)
        try:
            os.fsync(descriptor)
            self._segments.sync_name(segment)
            size, cell_size = os.fstat(descriptor).st_size, max(version.cell_size, 1)
            table = hash_cells(descriptor, cell_size, 0, -(-size // cell_size))
            if size != version.size or content_root(vid, size, cell_size, table) != version.root:
                raise DamagedData("what was restored doesn't come back from the drive as it was written: check the drive")
        except BaseException:
            self._segments.remove(segment)
            raise
        finally:
            os.close(descriptor)

    async def _name(self, ino: InodeNumber, vid: Vid, before: SegmentId, segment: SegmentId) -> Mended:
        """Name it, and let the old one go. Where the catalog fails, the sweep finds out which of the two it names."""
        async with self._open_files.alone(ino):  # nobody begins to write it meanwhile
            if not await self._versions.replace_segment(vid, before, segment):
                self._segments.remove(segment)
                return Mended(True, "the version has another segment now, or none")
            file = self._open_files.get(ino)
            if file is not None and file.segment == before:
                if file.handles:
                    self._open_files.keep_row(file)
                    return Mended(
                        True,
                        "it was made anew from the shards; programs that have the file open there still read the damaged one, "
                        "and it can't be opened there anew (EIO) until they close it",
                    )
                self._open_files.drop(file)
        self._reclaimer.segment(before, at_once=False)
        return Mended(True, "it was made anew from the shards")
