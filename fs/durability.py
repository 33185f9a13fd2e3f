"""How safe a file is: its place on the durability ladder, and what it would survive."""

from collections.abc import Callable, Iterable
from typing import Any

from ckptfs.cache.catalog_format import NODE_DOMAIN, Inode, Store, StoreState, Version, VersionState
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.versions import Versions
from ckptfs.replication.home_segment import has_segment
from ckptfs.replication.placement import UNREADABLE, protected_m

STATE_NAMES = {VersionState.OPEN: "open", VersionState.LOCAL: "local", VersionState.PROTECTED: "protected"}

Fact = dict[str, Any]


class Durability:
    """Answers for inodes. `stores` are the catalog's, `live` those that answer now; both are given with each question."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        size_of: Callable[[InodeNumber], int | None],
        domain_label: str = NODE_DOMAIN,
    ) -> None:
        self._domain_label = domain_label
        self._namespace = namespace
        self._versions = versions
        self._size_of = size_of

    async def states(
        self, inos: Iterable[InodeNumber], stores: dict[StoreId, Store], live: set[StoreId], parity_shards: int
    ) -> dict[int, Fact]:
        """For each inode that is a regular file: `state`, `protected_m`, `bytes`, `home`, `prefix_bytes`, `away`.

        `state` is that of the ladder or, where something is amiss, "degraded" (protected, but holders are away, or with less
        parity than the stores there are now could have), "unreachable" (no node that has the bytes answers), "damaged" (not
        protected, and its segment is not what was hashed) or "lost".
        `protected_m` is 0 for what isn't protected. `prefix_bytes`: so much of a file that is being written is protected, and
        read while its node is away. `bytes` is None of a file that is being written on another node: that node's attributes
        have it; if it is away, as of the last close, and None if there was none. `away`: the nodes that have bytes or shards of
        it and do not answer; no node that was lost or removed. `rolled_back`: what was newer went with a store that was lost.
        """
        facts: dict[int, Fact] = {}
        for ino in inos:
            try:
                inode = await self._namespace.inode(ino)
            except NoSuchName:
                continue
            if inode.is_regular:
                facts[ino] = await self._fact(ino, inode, stores, live, parity_shards)
        return facts

    async def _fact(
        self, ino: InodeNumber, inode: Inode, stores: dict[StoreId, Store], live: set[StoreId], parity_shards: int
    ) -> Fact:
        inode, version = await self._shown(ino, inode)
        if version is None:
            return {
                "state": "lost",
                "protected_m": 0,
                "bytes": inode.size,
                "home": "",
                "prefix_bytes": 0,
                "away": [],
                "rolled_back": False,
            }
        home = stores.get(version.home)
        size = self._size_of(ino) if version.state is VersionState.OPEN else version.size
        fact = {
            "state": STATE_NAMES.get(version.state, "open"),
            "protected_m": 0,
            "prefix_bytes": await self._prefix_bytes(inode, stores, live, parity_shards),
            "bytes": self._last_size(inode, version, live) if size is None else size,
            "home": home.node if home is not None else version.home.hex(),
            "away": [],
        }
        if inode.rolled_back_from is not None and not inode.lost:
            fact["rolled_back"] = True
        if inode.lost:
            fact["state"] = "lost"
        elif version.state is VersionState.PROTECTED:
            survives = _survives(version, stores, live, parity_shards, self._domain_label)
            fact["protected_m"] = max(0, survives)
            if survives == UNREADABLE and not (has_segment(version) and not version.damaged and version.home in live):
                fact["state"] = "unreachable"
            elif any(shard.store not in live for shard in version.shards):
                fact["state"] = "degraded"
            elif version.shards and version.parity_shards < min(
                parity_shards, len(_domains(stores, live, self._domain_label)) - 1
            ):
                fact["state"] = "degraded"  # protected while fewer stores were there: it will be raised
        elif version.damaged:
            fact["state"] = "damaged"
        elif version.home not in live:
            fact["state"] = "unreachable"
        if fact["state"] == "unreachable" and not self._may_come_back(version, stores, parity_shards):
            fact["state"] = "lost"
        if fact["state"] in ("unreachable", "degraded"):
            wanted = {shard.store for shard in version.shards}
            if (
                fact["state"] == "unreachable"
                and (has_segment(version) or version.state is VersionState.OPEN)
                and not version.damaged
            ):
                wanted.add(version.home)
            fact["away"] = sorted(
                str(stores[store].node) for store in wanted - live if store in stores and _may_return(stores[store])
            )
        return fact

    def _may_come_back(self, version: Version, stores: dict[StoreId, Store], parity_shards: int) -> bool:
        """Whether the stores that are away, but neither lost nor removed, would have enough of it together with the others."""
        possible = {store_id for store_id, store in stores.items() if _may_return(store)}
        if version.state is VersionState.OPEN or (has_segment(version) and not version.damaged and version.home in possible):
            return True
        return bool(version.shards) and _survives(version, stores, possible, parity_shards, self._domain_label) != UNREADABLE

    @staticmethod
    def _last_size(inode: Inode, version: Version, live: set[StoreId]) -> int | None:
        return None if version.home in live or not inode.size else inode.size

    async def _shown(self, ino: InodeNumber, inode: Inode) -> tuple[Inode, Version | None]:
        """The version that is being written, else the current one; None if the inode names one that isn't there any more."""
        before: Vid | None = None
        while True:
            vid = inode.open if inode.writer is not None and inode.open is not None else inode.cur
            version = None if vid is None else await self._versions.version(vid)
            if version is not None or vid == before:
                return inode, version
            before = vid
            try:
                inode = await self._namespace.inode(ino)  # it may have ended between the two questions
            except NoSuchName:
                return inode, None

    async def _prefix_bytes(self, inode: Inode, stores: dict[StoreId, Store], live: set[StoreId], parity_shards: int) -> int:
        if inode.prefix is None or not inode.prefix_holds:
            return 0
        prefix = await self._versions.version(inode.prefix)
        if prefix is None or _survives(prefix, stores, live, parity_shards, self._domain_label) == UNREADABLE:
            return 0
        return prefix.size


def _domains(stores: dict[StoreId, Store], live: set[StoreId], label: str) -> set[str]:
    """Those that can hold shards now."""
    return {store.domain(label) for store_id, store in stores.items() if store_id in live and store.state is StoreState.IN}


def _may_return(store: Store) -> bool:
    return not store.state.is_gone


def _survives(version: Version, stores: dict[StoreId, Store], live: set[StoreId], parity_shards: int, label: str) -> int:
    if not version.shards:  # an empty file: the catalog is all there is of it
        return parity_shards
    domains: list[str | None] = []
    for shard in version.shards:
        store = stores.get(shard.store)
        gone = store is None or store.state.is_gone or shard.store not in live
        domains.append(None if store is None or gone else store.domain(label))
    return protected_m(domains, version.data_shards)
