"""The states a version's record goes through, and the one function that writes a step. Pure.

===========  ============  =====================================================================================
from         to            by
===========  ============  =====================================================================================
(no key)     OPEN          create, and opening for writing
OPEN         LOCAL         `Versions.commit_local`: the bytes are synced and hashed on their home; readers get them (R4)
LOCAL        PROTECTED     `Versions.commit_protected`: every shard acknowledged, every holder still in the cluster (R10)
PROTECTED    PROTECTED     `Versions.commit_repaired`: a shard has another holder, in the cluster, with the same root;
                           `Versions.release_segment`: its home keeps no segment of it;
                           `version_reshape.commit_reshaped`: a larger code, every shard of it acknowledged;
                           `Versions.replace_segment`: a right segment takes the place of a damaged one
LOCAL, PROT. (the same)    `Versions.mark_damaged`: what hashing the segment again showed
PROTECTED    DEAD          replaced, rewritten or removed: a tombstone, because the shards outlive it (R1)
OPEN, LOCAL  (no key)      the same for what was never protected; and an open version whose bytes a power cut took
(no key)     LOCAL         `prefixes.begin_prefix`: what an open version has so far, hashed
PROTECTED    (no key)      a prefix, when a longer one or the whole file is protected
DEAD         (no key)      reclaim
===========  ============  =====================================================================================
"""

from ckptfs.cache.catalog_format import Version, VersionState, pack, version_key
from ckptfs.cache.catalog_kv import Delete, Operation, Put
from ckptfs.cache.ids import Vid

TRANSITIONS: frozenset[tuple[VersionState | None, VersionState | None]] = frozenset(
    {
        (None, VersionState.OPEN),
        (None, VersionState.LOCAL),
        (VersionState.OPEN, VersionState.LOCAL),
        (VersionState.LOCAL, VersionState.PROTECTED),
        (VersionState.PROTECTED, VersionState.DEAD),
        (VersionState.OPEN, None),
        (VersionState.LOCAL, None),
        (VersionState.PROTECTED, None),
        (VersionState.DEAD, None),
    }
)
"""The table above; None stands for no key."""


def version_step(vid: Vid, before: Version | None, after: Version | None) -> Operation:
    """The operation that turns one record into the other; None stands for no key.

    Raises `AssertionError` for a step that is not in the table: a bug here, never input.
    """
    states = (None if before is None else before.state, None if after is None else after.state)
    if states[0] is not states[1] and states not in TRANSITIONS:
        raise AssertionError(f"version {vid.hex()} can't go from {states[0]!r} to {states[1]!r}")
    return Delete(version_key(vid)) if after is None else Put(version_key(vid), pack(after))
