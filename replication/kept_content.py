"""What this node keeps of versions besides shards: segments of files whose home it is, and local copies. Hashed, and made right.

A damaged segment of a protected version is made anew: the content is read from shards into a local copy, every cell checked,
and the mount makes a segment of it, checks that against the content root, and switches the version to it in one catalog
transaction. Nothing is believed of whoever asked for it: a segment that this node itself finds right stays. A segment that was
never protected is all there was of its content, and stays too, as it is.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.home_segment import SegmentHashers, SegmentStanding, check_segment, has_segment
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_client import KeptCells, Mended
from ckptfs.replication.restore import Restorer

logger = logging.getLogger(__name__)

SwitchSegment = Callable[[InodeNumber, Vid, SegmentId, CopyPlace], Awaitable[Mended]]
"""Has the mount make a segment of a complete local copy and switch the version from the segment named to it."""


class SegmentVersions(Protocol):
    """What is needed of `cache.versions.Versions`."""

    async def version(self, vid: Vid) -> Version | None: ...

    async def mark_damaged(self, vid: Vid, segment: SegmentId, damaged: bool) -> bool: ...


class KeptContent:
    """Works for one store (a `peer_server.Kept`). One segment at a time is made anew."""

    def __init__(
        self,
        own_store: StoreId,
        versions: SegmentVersions,
        segments: SegmentHashers,
        restorer: Restorer,
        switch_segment: SwitchSegment,
    ) -> None:
        self._own_store = own_store
        self._versions = versions
        self._segments = segments
        self._restorer = restorer
        self._switch_segment = switch_segment
        self._one_at_a_time = trio.Lock()

    async def mend_segment(self, vid: Vid) -> Mended:
        """Make the segment of a protected version right, if it is damaged. Raises nothing for what stands in the way."""
        async with self._one_at_a_time:
            try:
                return await self._mend_segment(vid)
            except (ReplicationError, CacheError, OSError) as error:
                return Mended(False, f"it could not be made anew: {error}")

    async def _mend_segment(self, vid: Vid) -> Mended:
        version = await self._versions.version(vid)
        if version is None or version.home != self._own_store or not has_segment(version):
            return Mended(True, "the version has no segment here any more")
        check = await check_segment(self._segments, vid, version)
        if check.standing is SegmentStanding.RIGHT:
            await self._versions.mark_damaged(vid, version.segment, False)
            return Mended(True, "it was hashed again, and is right")
        if check.standing is SegmentStanding.UNREACHABLE:
            return Mended(False, check.message)
        if version.state is not VersionState.PROTECTED:
            return Mended(False, "there are no shards to make it from")
        if check.standing is SegmentStanding.DAMAGED and not await self._versions.mark_damaged(vid, version.segment, True):
            return Mended(True, "the version has another segment now, or none")
        copy = await self._restorer.fetch_whole(vid, version)
        mended = await self._switch_segment(version.ino, vid, version.segment, copy)
        await self._restorer.remove_copy(vid)
        logger.warning(
            "segment-mended vid=%s ino=%d before=%s right=%s message=%s",
            vid.hex(), version.ino, version.segment.hex(), mended.right, mended.message,
        )  # fmt: skip
        return mended

    async def verify(self, vid: Vid, *, mend: bool) -> KeptCells:
        """Hash the local copy of a version, and with `mend` fetch anew what is wrong; returns what is wrong at the end."""
        held, wrong = 0, list[int]()
        try:
            version = await self._versions.version(vid)
            if version is None or version.state not in (VersionState.LOCAL, VersionState.PROTECTED):
                return KeptCells(0, ())
            held, wrong = await self._restorer.wrong_cells(vid, version)
            if wrong and mend:
                logger.warning("copy-damaged vid=%s cells=%d: fetched anew", vid.hex(), len(wrong))
                await self._restorer.mend(vid, version, wrong)
                held, wrong = await self._restorer.wrong_cells(vid, version)
        except (ReplicationError, CacheError) as error:
            logger.warning("copy-not-verified vid=%s error=%s", vid.hex(), error)
        return KeptCells(held, tuple(wrong))
