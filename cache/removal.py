"""What goes when a name goes: the parts of a transaction that end versions, files and directories. Pure.

R1: a version that was never protected ends with its file (its key is deleted, the caller frees its segment); a protected one
stays as a tombstone, `DEAD`, because its shards outlive it until whatever was saved before its death is protected too.
"""

import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    DirectoryTimes,
    Inode,
    Version,
    VersionState,
    entry_key,
    entry_prefix,
    inode_key,
    pack,
    subdirectory_key,
    times_key,
    unpack,
    version_key,
)
from ckptfs.cache.catalog_kv import Delete, EmptyRange, KeyValue, Operation, Put, Unchanged
from ckptfs.cache.catalog_records import Conflict, Plan, commit, existing_inode, existing_name, find_version, touched
from ckptfs.cache.errors import DirectoryNotEmpty, IsADirectory, NoSuchName
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.cache.version_states import version_step


class Removed(NamedTuple):
    """What taking a name away did. `inode_after` is as it stands now (`nlink` is 0 if this was the `last` name, as a directory's
    always is, and the inode is gone then); `dead` are the versions that ended with it, as they were before."""

    ino: InodeNumber
    inode_after: Inode
    last: bool
    dead: list[tuple[Vid, Version]]


BeforeRemoval = Callable[[Removed], None]
"""Told of what is about to be taken away, before the transaction that does so, and which may fail."""


def untold(removed: Removed) -> None:
    """A `BeforeRemoval` for nobody."""


class Ending(NamedTuple):
    """The part of a transaction that ends some versions, and those versions as they are before it."""

    plan: Plan
    dead: list[tuple[Vid, Version]]


async def end_versions(kv: KeyValue, vids: Sequence[Vid | None], now_ns: int) -> Ending:
    """End these versions; None and versions that are gone or dead already are passed over."""
    plan = Plan([], [])
    dead = []
    for vid in dict.fromkeys(vid for vid in vids if vid is not None):
        found = await find_version(kv, vid)
        if found is None or found[0].state is VersionState.DEAD:
            continue
        version, revision = found
        plan.compares.append(Unchanged(version_key(vid), revision))
        plan.operations.append(_ended(vid, version, now_ns))
        dead.append((vid, version))
    return Ending(plan, dead)


def _ended(vid: Vid, version: Version, now_ns: int) -> Operation:
    if version.state is not VersionState.PROTECTED:
        return version_step(vid, version, None)
    return version_step(vid, version, msgspec.structs.replace(version, state=VersionState.DEAD, dead_at_ns=now_ns))


async def remove_link(kv: KeyValue, ino: InodeNumber, now_ns: int, keep: Sequence[Vid] = ()) -> tuple[Removed, Plan]:
    """Take one name from a non-directory; the plan compares its inode. Versions in `keep` don't end even if the file does.

    Raises `Conflict` if the inode is gone: then the name is gone too, or about to be read again.
    """
    try:
        inode, revision = await existing_inode(kv, ino)
    except NoSuchName:
        raise Conflict from None
    after = msgspec.structs.replace(inode, nlink=inode.nlink - 1, ctime_ns=now_ns)
    compare = Unchanged(inode_key(ino), revision)
    if after.nlink > 0:
        return Removed(ino, after, False, []), Plan([compare], [Put(inode_key(ino), pack(after))])
    vids = [inode.open, inode.cur, inode.prot, inode.prev, inode.prev_local, inode.prefix, inode.prefix_next]
    vids.append(inode.rolled_back_from)
    ending = await end_versions(kv, [vid for vid in vids if vid not in keep], now_ns)
    plan = Plan([compare, *ending.plan.compares], [Delete(inode_key(ino)), *ending.plan.operations])
    return Removed(ino, after, True, ending.dead), plan


async def attempt_unlink(kv: KeyValue, parent: InodeNumber, name: bytes, now_ns: int, before: BeforeRemoval = untold) -> Removed:
    """One attempt to remove a name of anything but a directory. Raises `NoSuchName`, `IsADirectory`, `NotADirectory`."""
    found = await existing_name(kv, parent, name)
    if stat.S_ISDIR(found.entry.kind):
        raise IsADirectory(f"name {name!r} in directory {parent} is a directory")
    removed, plan = await remove_link(kv, found.entry.ino, now_ns)
    before(removed)
    await commit(
        kv,
        [Unchanged(entry_key(parent, name), found.revision), *plan.compares],
        [Delete(entry_key(parent, name)), *plan.operations, touched(parent, now_ns)],
    )
    return removed


async def remove_directory(kv: KeyValue, parent: InodeNumber, ino: InodeNumber, now_ns: int) -> tuple[Removed, Plan]:
    """Remove a directory that is empty when the transaction runs. Raises `DirectoryNotEmpty` if it isn't now; `Conflict` if it
    is gone."""
    prefix = entry_prefix(ino)
    if await kv.range(prefix, limit=1):
        raise DirectoryNotEmpty(f"directory {ino} has entries")
    try:
        inode, _ = await existing_inode(kv, ino)
    except NoSuchName:
        raise Conflict from None
    times = await kv.get(times_key(ino))
    mtime_ns = inode.mtime_ns if times is None else unpack(DirectoryTimes, times.value).mtime_ns
    after = msgspec.structs.replace(inode, nlink=0, mtime_ns=mtime_ns, ctime_ns=now_ns)
    plan = Plan([EmptyRange(prefix)], [Delete(inode_key(ino)), Delete(times_key(ino)), Delete(subdirectory_key(parent, ino))])
    return Removed(ino, after, True, []), plan
