"""What would be left of a file if certain nodes died now, and where it would be read from. From the catalog, nothing is asked.

======================  ===========================================================================================
outcome                 without those nodes
======================  ===========================================================================================
survives                what a reader gets now is still there
older                   what is there is what was closed before, or protected while the file was open
unreachable             it comes back with nodes that are away already
lost                    nothing is left
======================  ===========================================================================================
"""

from collections.abc import Collection, Iterable
from typing import Any

from ckptfs.cache.catalog_format import Inode, ShardLayout, Store, Version, VersionState
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.versions import Versions
from ckptfs.replication.home_segment import has_segment

Fact = dict[str, Any]


class WhatIf:
    """Answers for inodes. `stores` are the catalog's, `live` those that answer now, `lost` those that would be gone."""

    def __init__(self, namespace: Namespace, versions: Versions) -> None:
        self._namespace = namespace
        self._versions = versions

    async def outcomes(
        self, inos: Iterable[InodeNumber], stores: dict[StoreId, Store], live: Collection[StoreId], lost: Collection[StoreId]
    ) -> dict[int, Fact]:
        """For each inode that is a regular file: `outcome`; `from`: "home", "shards" or "catalog" (it is empty), or nothing;
        `nodes`: who would be read from; `bytes` of what would be read; `open`: it is being written."""
        left = set(live) - set(lost)
        coming = {store for store, record in stores.items() if not record.state.is_gone} - set(lost)
        facts = {}
        for ino in inos:
            try:
                inode = await self._namespace.inode(ino)
            except NoSuchName:
                continue
            if inode.is_regular:
                fact = await self._fact(inode, left, coming)
                fact["open"] = inode.writer is not None and inode.open is not None
                fact["nodes"] = sorted(str(stores[store].node) for store in fact.pop("stores") if store in stores)
                facts[int(ino)] = fact
        return facts

    async def _fact(self, inode: Inode, left: set[StoreId], coming: set[StoreId]) -> Fact:
        """Nothing older is shown while what is newer may come back (R8)."""
        current = inode.open if inode.writer is not None and inode.open is not None else inode.cur
        prefix = inode.prefix if inode.prefix_holds else None
        older = (prefix, inode.cur, inode.prot, inode.prev)
        for outcome, vids, stores in (
            ("survives", (current,), left),
            ("unreachable", (current,), coming),
            ("older", older, left),
            ("unreachable", older, coming),
        ):
            for vid in vids:
                if (found := await self._source(vid, stores)) is not None:
                    place, holders, size = found
                    return {"outcome": outcome, "from": place, "stores": holders, "bytes": size}
        return {"outcome": "lost", "from": "", "stores": set(), "bytes": 0}

    async def _source(self, vid: Vid | None, stores: set[StoreId]) -> tuple[str, set[StoreId], int] | None:
        """Where the version would be read from."""
        version = None if vid is None else await self._versions.version(vid)
        if version is None or version.state is VersionState.DEAD:
            return None
        return source_of(version, stores)


def source_of(version: Version, stores: set[StoreId]) -> tuple[str, set[StoreId], int] | None:
    """From where and from whom these stores would give the version, and how many bytes; None if they can't."""
    if version.state is VersionState.PROTECTED and not version.shards:
        return "catalog", set(), 0
    with_bytes = version.state is VersionState.OPEN or has_segment(version)
    if with_bytes and not version.damaged and version.home in stores:
        return "home", {version.home}, version.size
    if version.state is not VersionState.PROTECTED:
        return None
    holders = {shard.store for shard in version.shards if shard.store in stores}
    needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
    count = sum(shard.store in stores for shard in version.shards)
    return ("shards", holders, version.size) if count >= needed else None
