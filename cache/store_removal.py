"""Taking a node's store out of the cluster for good: one that is down and, unless forced, has nothing alone. Pure."""

from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from ckptfs.cache.catalog_format import (
    VERSION_PREFIX,
    Session,
    ShardLayout,
    Store,
    StoreState,
    Version,
    VersionState,
    pack,
    session_key,
    store_key,
    unpack,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Operation, Present, Put, Unchanged
from ckptfs.cache.catalog_records import Conflict, commit, existing_inode
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import DamagedRecord, NoSuchName, StoreError
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId, Vid
from ckptfs.cache.lost_stores import HOME_ONLY
from ckptfs.cache.store_registry import UNREADABLE, stores, stores_with_session


class HoldsTheOnly(StoreError):
    """The store has the only content of these files."""

    def __init__(self, inos: list[InodeNumber]) -> None:
        super().__init__(f"only it has the content of {len(inos)} files")
        self.inos = inos


async def remove_node(kv: KeyValue, node: NodeId, *, force: bool) -> list[InodeNumber]:
    """Take the node's stores out: shards they hold are made again elsewhere, and they can't return. Returns the files that are
    rolled back or lost by that (with `force` only).

    A machine that was set up anew under its old id has another store beside the one that was lost: then only that one goes, and
    one that is up stays in any case. All of them are taken out, or none.

    Raises `NoSuchName` for a node that has no store in the cluster, `StoreError` for one that is up, `HoldsTheOnly`.
    """
    known = await stores(kv)
    mine = {store: found for store, found in known.items() if found[0].node == node and found[0].state is not StoreState.REMOVED}
    if not mine:
        raise NoSuchName(f"the cluster has no node {node}")
    session = await kv.get(session_key(node))
    up = set() if session is None else {unpack(Session, session.value).store}
    if any(revision == UNREADABLE for _, revision in mine.values()):
        up |= await stores_with_session(kv)  # whose it is stands in the record
    down = {store: found for store, found in mine.items() if store not in up}
    if not down:
        raise StoreError(f"{node} is up: stop it first (`ckptfs umount` there); nothing was changed")
    going = {store: found for store, found in down.items() if found[0].state is StoreState.LOST} or down
    staying = {store: record for store, (record, _) in known.items() if store not in going}
    damaged = set[bytes]() if force else None  # of what a damaged record says nobody knows who needs the store
    only_here = list(dict.fromkeys([ino for store in going for ino in await only_at(kv, store, staying, damaged)]))
    if only_here and not force:
        raise HoldsTheOnly(only_here)
    compares: list[Compare] = [Unchanged(session_key(node), session.mod_revision if session else 0)]
    operations: list[Operation] = []
    for store, (record, revision) in going.items():
        # A lost store's files were rolled back; those of one that was not are by the leader, which sees that it isn't settled.
        settled = record.state is StoreState.LOST and record.settled
        compares.append(Present(store_key(store)) if revision == UNREADABLE else Unchanged(store_key(store), revision))
        operations.append(Put(store_key(store), pack(msgspec.structs.replace(record, state=StoreState.REMOVED, settled=settled))))
    try:
        await commit(kv, compares, operations)
    except Conflict:
        raise StoreError(f"{node} has just changed: nothing was; look at it again (ckptfs nodes list)") from None
    return only_here


async def only_at(
    kv: KeyValue, store: StoreId, known: Mapping[StoreId, Store], damaged: set[bytes] | None = None
) -> list[InodeNumber]:
    """Files whose newest content nobody could read without the store, by a walk over all versions. A store that is in the cluster
    counts as having what it is named for; `damaged` as in `scan`."""
    found: dict[InodeNumber, None] = {}
    async with aclosing(scan(kv, VERSION_PREFIX, damaged=damaged)) as entries:
        async for entry in entries:
            version = unpack(Version, entry.value)
            if _needs(version, store, known) and await _is_newest(kv, vid_of_key(entry.key), version):
                found[version.ino] = None
    return list(found)


def _needs(version: Version, store: StoreId, known: Mapping[StoreId, Store]) -> bool:
    if version.state in HOME_ONLY:
        return version.home == store
    if version.state is not VersionState.PROTECTED or all(shard.store != store for shard in version.shards):
        return False
    needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
    return sum(shard.store != store and _is_in(known, shard.store) for shard in version.shards) < needed


def _is_in(known: Mapping[StoreId, Store], store: StoreId) -> bool:
    return store in known and not known[store].state.is_gone


async def _is_newest(kv: KeyValue, vid: Vid, version: Version) -> bool:
    try:
        inode, _ = await existing_inode(kv, version.ino)
    except NoSuchName:
        return False
    except DamagedRecord:
        return True  # for all anybody knows
    return vid in (inode.open, inode.cur, inode.rolled_back_from)
