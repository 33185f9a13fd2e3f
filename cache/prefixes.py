"""Versions that are the beginning of what is being written: a file that stays open is protected as such prefixes (R16). Pure.

The file's open version goes on; a prefix has a vid and a content root of its own, of the bytes as they were at one moment, and no
segment: its bytes count as shards only. `prefix_next` is on its way, `prefix` protected. Readers may have `prefix` while the
writer is away as long as `prefix_holds`: since its bytes were read nobody closed a handle for writing, truncated or renamed the
file, after which older bytes than those may not be shown. It is kept all the same, as what there is, until the whole file is
protected.
"""

from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    BLOCKS_UNKNOWN,
    FORMAT_VERSION,
    NO_SEGMENT,
    Inode,
    Version,
    VersionState,
    inode_key,
    pack,
    version_key,
)
from ckptfs.cache.catalog_kv import KeyValue, Operation, Put, Unchanged
from ckptfs.cache.catalog_records import Plan, commit, existing_inode, find_version, repeated
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.removal import Ending, end_versions
from ckptfs.cache.version_states import version_step


class Prefix(NamedTuple):
    """What an open version had when it was read: `root` over cells of `cell_size` bytes. `inode` is the record as it was before
    that."""

    vid: Vid
    size: int
    root: bytes
    cell_size: int
    mtime_ns: int
    inode: Inode


async def begin_prefix(kv: KeyValue, store: StoreId, ino: InodeNumber, open_vid: Vid, prefix: Prefix) -> bool:
    """The prefix is about to be protected; one on its way before ends. False if the store isn't writing `open_vid` any more, or
    if the inode's ctime moved: the file may have been renamed since the prefix was read."""

    async def attempt() -> bool:
        try:
            inode, revision = await existing_inode(kv, ino)
        except NoSuchName:
            return False
        if inode.open != open_vid or inode.writer is None or inode.writer.store != store:
            return False
        if inode.ctime_ns != prefix.inode.ctime_ns:
            return False
        version = Version(
            FORMAT_VERSION,
            ino,
            VersionState.LOCAL,
            store,
            NO_SEGMENT,
            size=prefix.size,
            root=prefix.root,
            cell_size=prefix.cell_size,
        )
        ending = await end_versions(kv, [inode.prefix_next], 0)
        begun = msgspec.structs.replace(
            inode,
            prefix_next=prefix.vid,
            size=prefix.size,
            blocks=BLOCKS_UNKNOWN,
            mtime_ns=inode.mtime_with(prefix.mtime_ns),
            ctime_ns=inode.ctime_with(prefix.mtime_ns),
        )
        operations = [*ending.plan.operations, version_step(prefix.vid, None, version), Put(inode_key(ino), pack(begun))]
        await commit(kv, [Unchanged(inode_key(ino), revision), *ending.plan.compares], operations)
        return True

    return await repeated(attempt)


async def superseded(kv: KeyValue, prefix: Vid | None) -> Plan:
    """The part of a transaction in which a protected prefix goes because more than it is protected now. It leaves no tombstone:
    nothing that was saved before or after depends on it."""
    found = None if prefix is None else await find_version(kv, prefix)
    if prefix is None or found is None:
        return Plan([], [])
    version, revision = found
    return Plan([Unchanged(version_key(prefix), revision)], [version_step(prefix, version, None)])


async def without_prefix(kv: KeyValue, inode: Inode) -> tuple[Inode, Ending]:
    """The inode when its protected prefix may not be shown any more, and the end of one on its way."""
    if inode.prefix_next is None and not inode.prefix_holds:
        return inode, Ending(Plan([], []), [])
    ending = await end_versions(kv, [inode.prefix_next], 0)
    return msgspec.structs.replace(inode, prefix_next=None, prefix_holds=False), ending


async def void_prefix(kv: KeyValue, ino: InodeNumber) -> None:
    """What programs just did may not be hidden by older bytes. Nothing happens if the file is gone or has no prefix."""

    async def attempt() -> None:
        try:
            inode, revision = await existing_inode(kv, ino)
        except NoSuchName:
            return
        changed, ending = await without_prefix(kv, inode)
        if changed is not inode:
            operations: list[Operation] = [*ending.plan.operations, Put(inode_key(ino), pack(changed))]
            await commit(kv, [Unchanged(inode_key(ino), revision), *ending.plan.compares], operations)

    await repeated(attempt)


async def give_up_prefix(kv: KeyValue, ino: InodeNumber, prefix: Vid) -> None:
    """The prefix on its way can't be protected: its bytes have changed. The one before stays as it is."""

    async def attempt() -> None:
        try:
            inode, revision = await existing_inode(kv, ino)
        except NoSuchName:
            return
        if inode.prefix_next != prefix:
            return
        ending = await end_versions(kv, [prefix], 0)
        changed = msgspec.structs.replace(inode, prefix_next=None)
        operations: list[Operation] = [*ending.plan.operations, Put(inode_key(ino), pack(changed))]
        await commit(kv, [Unchanged(inode_key(ino), revision), *ending.plan.compares], operations)

    await repeated(attempt)
