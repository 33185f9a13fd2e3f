"""What the catalog says of a version's segment: that it is damaged, and that another has taken its place. Pure.

Each is one transaction that compares the version's record. A segment is carried on by another version before its bytes may
change (`Versions.open_for_writing`), so whoever hashed it and then finds that the version still names it has judged this
version's bytes, not somebody's newer ones.
"""

import msgspec

from ckptfs.cache.catalog_format import NO_SEGMENT, VersionState, version_key
from ckptfs.cache.catalog_kv import KeyValue, Unchanged
from ckptfs.cache.catalog_records import commit, find_version, repeated
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.cache.version_states import version_step

_HASHED = (VersionState.LOCAL, VersionState.PROTECTED)


async def mark_damaged(kv: KeyValue, vid: Vid, segment: SegmentId, damaged: bool) -> bool:
    """Record what hashing the segment showed. False, and nothing is changed, if the version ended or has another segment."""

    async def attempt() -> bool:
        found = await find_version(kv, vid)
        if found is None or found[0].state not in _HASHED or found[0].segment != segment:
            return False
        version, revision = found
        if version.damaged != damaged:
            after = msgspec.structs.replace(version, damaged=damaged)
            await commit(kv, [Unchanged(version_key(vid), revision)], [version_step(vid, version, after)])
        return True

    return await repeated(attempt)


async def replace_segment(kv: KeyValue, home: StoreId, vid: Vid, before: SegmentId, after: SegmentId) -> bool:
    """Name the right segment that takes the damaged one's place. False, and nothing is changed, if the version ended, isn't
    protected, or has another segment or home.

    Precondition: `after` holds the version's content, checked against its root, and is synced with its name.
    """
    if NO_SEGMENT in (before, after):
        raise ValueError("no segment has this id")

    async def attempt() -> bool:
        found = await find_version(kv, vid)
        if found is None or found[0].state is not VersionState.PROTECTED:
            return False
        version, revision = found
        if version.segment != before or version.home != home:
            return False
        replaced = msgspec.structs.replace(version, segment=after, damaged=False)
        await commit(kv, [Unchanged(version_key(vid), revision)], [version_step(vid, version, replaced)])
        return True

    return await repeated(attempt)
