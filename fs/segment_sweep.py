"""Segments that nothing refers to: what was to be unlinked when the process that knew of it was killed.

Runs once in the background after a start, over the segments that were there before the first request. A segment goes only if no
version whose home is this store names it in a walk over the catalog, no file in use has it, and, asked again by the inode it is
labelled with, the catalog still doesn't: a walk may miss a version that a rewrite renames beside it.
"""

import logging
import os
from collections.abc import Iterable

import trio

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.errors import CacheError, DamagedData, NoSuchName
from ckptfs.cache.ids import SegmentId, StoreId
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer

log = logging.getLogger(__name__)


class SegmentSweep:
    """One sweep: make it before requests are answered (it lists the segments then), `run` it whenever there is time."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        segments: Segments,
        open_files: OpenFiles,
        reclaimer: Reclaimer,
        store: StoreId,
    ) -> None:
        self._namespace = namespace
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._reclaimer = reclaimer
        self._store = store
        self._there = segments.all()

    async def run(self) -> int:
        """Returns how many segments go. An error of the catalog puts it off to the next start."""
        try:
            named = {version.segment for _, version in await self._versions.local_versions(self._store, tuple(VersionState))}
            unnamed = [segment for segment in self._there if segment not in named]
            gone = [segment for segment in unnamed if not await self._is_wanted(segment)]
        except CacheError as error:
            log.warning("segment_sweep_put_off error=%s", error)
            return 0
        self._remove(gone)
        return len(gone)

    def _remove(self, gone: Iterable[SegmentId]) -> None:
        for segment in gone:
            log.info("segment_unreferenced segment=%s", segment.hex())
            self._reclaimer.segment(segment, at_once=False)

    async def _is_wanted(self, segment: SegmentId) -> bool:
        await trio.lowlevel.checkpoint()
        if any(file.segment == segment or file.replaced_segment == segment for file in self._open_files):
            return True
        try:
            descriptor = self._segments.open_read(segment)
        except FileNotFoundError:
            return True  # gone already
        try:
            ino = self._segments.inode_of(descriptor)
        except DamagedData:
            return True  # not ours to judge
        finally:
            os.close(descriptor)
        try:
            inode = await self._namespace.inode(ino)
        except NoSuchName:
            return False
        for vid in (inode.open, inode.cur, inode.prot, inode.prev, inode.prev_local):
            version = None if vid is None else await self._versions.version(vid)
            if version is not None and version.segment == segment:
                return True
        return False
