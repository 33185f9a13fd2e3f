"""What a node does with its versions when it comes back: those whose bytes are gone go, and the rest is found. Pure."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    BLOCKS_UNKNOWN,
    ENTRY_PREFIX,
    VERSION_PREFIX,
    DirectoryEntry,
    Store,
    Version,
    VersionState,
    entry_of_key,
    inode_key,
    pack,
    store_key,
    unpack,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Operation, Put, Unchanged
from ckptfs.cache.catalog_records import commit, existing_inode, find_version, repeated
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.prefixes import without_prefix
from ckptfs.cache.removal import attempt_unlink
from ckptfs.cache.version_states import version_step


class Dropped(NamedTuple):
    """What dropping open versions left: inodes that show older content now, and inodes that are gone with their names."""

    shown: list[InodeNumber]
    gone: list[InodeNumber]


async def drop_open_versions(
    kv: KeyValue, store: StoreId, open_versions: Iterable[tuple[InodeNumber, Vid]], now_ns: int
) -> Dropped:
    """Open versions of the store whose bytes are gone (a power cut, no room for a segment) go.

    Each file shows what it had before: its own older content, or that of the file it replaced (R4), on whichever store: of one
    that is lost, the leader rolls the file back as it does others (R8). If there is none its names go too; finding them takes one
    walk over all names of the catalog, however many files it is for.
    """
    dropped = Dropped([], [])
    for ino, vid in open_versions:
        shown = await repeated(partial(_attempt_drop, kv, store, ino, vid))
        if shown is not None:
            (dropped.shown if shown else dropped.gone).append(ino)
    if dropped.gone:
        await _remove_names(kv, set(dropped.gone), now_ns)
    return dropped


async def _attempt_drop(kv: KeyValue, store: StoreId, ino: InodeNumber, vid: Vid) -> bool | None:
    """True if the file shows older content now, False if it has none, None if this version isn't what it has open."""
    try:
        inode, inode_revision = await existing_inode(kv, ino)
    except NoSuchName:
        return None
    found = await find_version(kv, vid)
    if found is None or inode.open != vid or found[0].home != store:
        return None
    version, revision = found
    best = await newest_left(kv, (inode.cur, inode.prev_local, inode.prot, inode.prev, inode.prefix), {})
    if best is None:
        return False
    left, left_version, left_revision = best
    compares: list[Compare] = [
        Unchanged(inode_key(ino), inode_revision),
        Unchanged(version_key(vid), revision),
        Unchanged(version_key(left), left_revision),
    ]
    protected = left_version.state is VersionState.PROTECTED
    inode, ending = await without_prefix(kv, inode)
    compares.extend(ending.plan.compares)
    changed = msgspec.structs.replace(
        inode,
        open=None,
        writer=None,
        cur=left,
        prot=left if protected else inode.prot,
        prev=None if left == inode.prev else inode.prev,
        prefix=None if left == inode.prefix else inode.prefix,
        prev_local=None,
        size=left_version.size,
        blocks=BLOCKS_UNKNOWN,
    )
    operations: list[Operation] = [
        version_step(vid, version, None),
        Put(inode_key(ino), pack(changed)),
        *ending.plan.operations,
    ]
    if left_version.state is VersionState.LOCAL:
        home = await kv.get(store_key(left_version.home))
        if home is not None:  # unchanged: else it may be declared lost, and be done with, just now
            compares.append(Unchanged(home.key, home.mod_revision))
            record = unpack(Store, home.value)
            if record.settled:  # done with while the file was being written here
                operations.append(Put(home.key, pack(msgspec.structs.replace(record, settled=False))))
    if left_version.ino != ino:  # the content of a file this one has replaced
        operations.append(version_step(left, left_version, msgspec.structs.replace(left_version, ino=ino)))
    await commit(kv, compares, operations)
    return True


async def _remove_names(kv: KeyValue, inodes: set[InodeNumber], now_ns: int) -> None:
    async with aclosing(scan(kv, ENTRY_PREFIX, damaged=set())) as entries:
        async for entry in entries:
            if unpack(DirectoryEntry, entry.value).ino not in inodes:
                continue
            directory, name = entry_of_key(entry.key)
            try:
                await repeated(partial(attempt_unlink, kv, directory, name, now_ns))
            except NoSuchName:
                continue


async def newest_left(
    kv: KeyValue, vids: Iterable[Vid | None], known: Mapping[StoreId, Store]
) -> tuple[Vid, Version, int] | None:
    """The first of these versions that readers may have, and that no store has alone which is gone according to `known`; whether
    its shards can be read is not asked."""
    for vid in vids:
        found = None if vid is None else await find_version(kv, vid)
        if vid is None or found is None:
            continue
        version = found[0]
        home = known.get(version.home)
        is_gone = home is not None and home.state.is_gone
        if version.state is VersionState.PROTECTED or (version.state is VersionState.LOCAL and not is_gone):
            return vid, *found
    return None


async def versions_at_home(
    kv: KeyValue, store: StoreId, states: Sequence[VersionState], *, damaged: set[bytes] | None = None
) -> AsyncGenerator[tuple[Vid, Version], None]:
    """Versions in these states whose home is the store, by a walk over all versions; `damaged` as in `scan`."""
    async with aclosing(scan(kv, VERSION_PREFIX, damaged=damaged)) as entries:
        async for entry in entries:
            version = unpack(Version, entry.value)
            if version.home == store and version.state in states:
                yield vid_of_key(entry.key), version
