"""Protected versions whose code is smaller than it could be, and the step that gives one another code. Pure.

Bytes, vid and content root stay; only where the shards are, and how many, changes, in one transaction that compares that nobody
else has changed it. Until then readers use the old shards; afterwards those are unnamed, and swept (R9).
"""

from collections.abc import Callable
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    VERSION_PREFIX,
    Shard,
    ShardLayout,
    Version,
    VersionState,
    store_key,
    unpack,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Unchanged
from ckptfs.cache.catalog_records import commit, find_version, repeated, require_room
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.cache.version_states import version_step


class Code(NamedTuple):
    """k and m. The larger one survives more losses or, surviving as many, takes less space."""

    data_shards: int
    parity_shards: int

    def is_larger_than(self, other: "Code") -> bool:
        return (self.parity_shards, self.data_shards) > (other.parity_shards, other.data_shards)


def code_of(version: Version) -> Code:
    return Code(version.data_shards, version.parity_shards)


class Smaller(NamedTuple):
    """A protected version with a smaller code than it could have, in order of `protected_revision`."""

    protected_revision: int
    vid: Vid
    version: Version


async def with_smaller_code(
    kv: KeyValue, code: Code, limit: int, *, after_revision: int = 0, is_wanted: Callable[[Version], bool] = lambda _: True
) -> list[Smaller]:
    """Protected versions whose code is smaller than this one, those protected longest ago first, at most `limit`. Walks over all
    versions.

    Whole copies count by their number only: with m others besides one.
    """
    found: list[Smaller] = []
    async with aclosing(scan(kv, VERSION_PREFIX, damaged=set())) as entries:
        async for entry in entries:
            version = unpack(Version, entry.value)
            if version.state is VersionState.PROTECTED and version.shards and entry.mod_revision > after_revision:
                wanted = Code(1, code.parity_shards) if version.layout is ShardLayout.COPIES else code
                if wanted.is_larger_than(code_of(version)) and is_wanted(version):
                    found.append(Smaller(entry.mod_revision, vid_of_key(entry.key), version))
                    if len(found) > 2 * limit:
                        found = sorted(found, key=_order)[:limit]
    return sorted(found, key=_order)[:limit]


def _order(one: Smaller) -> tuple[int, Vid]:
    return one[:2]


class ReshapedCommit(NamedTuple):
    """Another code for a protected version: shard i is at `shards[i]`. `before` are its shards as they were when this began,
    `store_revisions` the records of the holders that had none, as they were when they were chosen."""

    vid: Vid
    before: list[Shard]
    code: Code
    shards: list[Shard]
    store_revisions: dict[StoreId, int]


async def commit_reshaped(kv: KeyValue, reshaped: ReshapedCommit) -> bool:
    """Record the new code and holders. False, and nothing is changed, if the version was replaced or its shards got other
    holders meanwhile, if a holder's record has changed, or if the code isn't larger: what was stored is garbage then.

    Precondition: every holder has durably stored exactly the root named here. A commit that contradicts itself is a `ValueError`.
    """
    if len(reshaped.shards) != sum(reshaped.code) or len({shard.store for shard in reshaped.shards}) != len(reshaped.shards):
        raise ValueError(f"{len(reshaped.shards)} shards are not those of {reshaped.code} on as many stores")
    if any(shard not in reshaped.before and shard.store not in reshaped.store_revisions for shard in reshaped.shards):
        raise ValueError("a holder's revision is missing")

    require_room(kv)

    async def attempt() -> bool:
        found = await find_version(kv, reshaped.vid)
        if found is None or found[0].state is not VersionState.PROTECTED or found[0].shards != reshaped.before:
            return False
        version, version_revision = found
        if not reshaped.code.is_larger_than(code_of(version)):
            return False
        for store, revision in reshaped.store_revisions.items():
            entry = await kv.get(store_key(store))
            if entry is None or entry.mod_revision != revision:
                return False
        compares: list[Compare] = [Unchanged(version_key(reshaped.vid), version_revision)]
        compares += [Unchanged(store_key(store), revision) for store, revision in reshaped.store_revisions.items()]
        after = msgspec.structs.replace(
            version,
            data_shards=reshaped.code.data_shards,
            parity_shards=reshaped.code.parity_shards,
            shards=list(reshaped.shards),
        )
        await commit(kv, compares, [version_step(reshaped.vid, version, after)])
        return True

    return await repeated(attempt)
