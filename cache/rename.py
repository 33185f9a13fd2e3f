"""Rename as Linux defines it: plain, NOREPLACE and EXCHANGE, files and directories, in one transaction. Pure.

The order of the checks is that of Linux `do_renameat2` and `vfs_rename`, because programs see it in the errno. A directory may
not move below itself; since two such moves at once could each look right, every move of a directory between directories
compares and rewrites `c/dirmove`, so that they happen one after another.
"""

import enum
import stat
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    BLOCKS_UNKNOWN,
    DIRECTORY_MOVE_KEY,
    FORMAT_VERSION,
    Inode,
    Version,
    VersionState,
    entry_key,
    inode_key,
    pack,
    pack_number,
    store_key,
    subdirectory_key,
    version_key,
)
from ckptfs.cache.catalog_kv import Delete, KeyValue, Operation, Present, Put, Unchanged
from ckptfs.cache.catalog_records import (
    Conflict,
    FoundName,
    Plan,
    check_name,
    commit,
    entry_put,
    existing_directory,
    existing_inode,
    existing_name,
    find_name,
    find_version,
    touched,
)
from ckptfs.cache.errors import DirectoryNotEmpty, InvalidMove, IsADirectory, NameExists, NoSuchName, NotADirectory
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, Vid
from ckptfs.cache.prefixes import without_prefix
from ckptfs.cache.removal import BeforeRemoval, Removed, end_versions, remove_directory, remove_link, untold
from ckptfs.cache.store_registry import stores
from ckptfs.cache.version_recovery import newest_left
from ckptfs.cache.version_states import version_step

DEPTH_MAX = 100_000
"""A walk to the root that is longer than this has met a loop."""


class RenameFlags(enum.IntFlag):
    """Those of renameat2(2)."""

    NOREPLACE = 1
    EXCHANGE = 2
    WHITEOUT = 4


class Whiteout(NamedTuple):
    """The inode that WHITEOUT leaves under the old name: a character device 0:0, as overlayfs wants it."""

    ino: InodeNumber
    uid: int
    gid: int


class Renamed(NamedTuple):
    """`ino` moved. `replaced` says what that took from what was under the new name, None if nothing was. `dead` are versions
    that the moved inode remembered from an earlier replacement and that gave way to the replaced file's, as they were before."""

    ino: InodeNumber
    replaced: Removed | None
    dead: list[tuple[Vid, Version]]


class Place(NamedTuple):
    """One side of a rename."""

    directory: InodeNumber
    name: bytes


async def attempt_rename(
    kv: KeyValue,
    old: Place,
    new: Place,
    flags: RenameFlags,
    now_ns: int,
    whiteout: Whiteout | None = None,
    before: BeforeRemoval = untold,
) -> Renamed:
    """One attempt; `whiteout` with WHITEOUT. Raises `Conflict` when something changed meanwhile, else what `Namespace.rename`
    does."""
    if int(flags) & ~7 or (flags & RenameFlags.EXCHANGE and flags != RenameFlags.EXCHANGE):
        raise InvalidMove(f"rename flags {int(flags):#x} are unknown or contradict each other")
    for place in (old, new):
        check_name(place.name)
        if place.name in (b".", b".."):
            raise InvalidMove("'.' and '..' can't be renamed")
    source = await existing_name(kv, old.directory, old.name)
    target = await find_name(kv, new.directory, new.name)
    if target is None:
        await existing_directory(kv, new.directory)
    if flags & RenameFlags.NOREPLACE and target is not None:
        raise NameExists(f"name {new.name!r} exists in directory {new.directory}")
    if flags & RenameFlags.EXCHANGE and target is None:
        raise NoSuchName(f"no name {new.name!r} in directory {new.directory}")
    if target is not None and target.entry.ino == source.entry.ino:
        return Renamed(source.entry.ino, None, [])
    guard = await _guard_against_loops(kv, old, source, new, target, exchange=bool(flags & RenameFlags.EXCHANGE))
    compares = [
        *guard.compares,
        Unchanged(entry_key(old.directory, old.name), source.revision),
        Unchanged(entry_key(new.directory, new.name), 0 if target is None else target.revision),
        *(Present(inode_key(directory)) for directory in {old.directory, new.directory}),
    ]
    operations = list(guard.operations)
    for directory in {old.directory, new.directory}:
        operations.append(touched(directory, now_ns))
    if flags & RenameFlags.EXCHANGE:
        assert target is not None
        plan = await _exchange(kv, old, source, new, target, now_ns)
        result = Renamed(source.entry.ino, None, [])
    else:
        result, plan = await _replace(kv, old, source, new, target, now_ns, whiteout)
        if result.replaced is not None:
            before(result.replaced)
    await commit(kv, [*compares, *plan.compares], [*operations, *plan.operations])
    return result


async def _guard_against_loops(
    kv: KeyValue, old: Place, source: FoundName, new: Place, target: FoundName | None, *, exchange: bool
) -> Plan:
    """Check that no directory ends below itself; the plan keeps that true until the transaction."""
    if old.directory == new.directory:
        return Plan([], [])
    source_moves = stat.S_ISDIR(source.entry.kind)
    target_moves = target is not None and stat.S_ISDIR(target.entry.kind)
    if not source_moves and not target_moves:
        return Plan([], [])
    moved = await kv.get(DIRECTORY_MOVE_KEY)
    if source_moves and source.entry.ino in await _ancestors(kv, new.directory):
        raise InvalidMove(f"directory {source.entry.ino} can't move below itself")
    if target is not None and target_moves and target.entry.ino in await _ancestors(kv, old.directory):
        if exchange:
            raise InvalidMove(f"directory {target.entry.ino} can't move below itself")
        raise DirectoryNotEmpty(f"directory {target.entry.ino} holds what is to replace it")
    revision = 0 if moved is None else moved.mod_revision
    return Plan([Unchanged(DIRECTORY_MOVE_KEY, revision)], [Put(DIRECTORY_MOVE_KEY, pack_number(revision))])


async def _ancestors(kv: KeyValue, directory: InodeNumber) -> set[InodeNumber]:
    """The directory and all above it. Raises `Conflict` if one of them is being removed or moved meanwhile."""
    seen = {directory}
    while directory != ROOT_INODE:
        inode = await existing_directory(kv, directory)
        if inode.parent is None or inode.parent in seen or len(seen) > DEPTH_MAX:
            raise Conflict
        directory = inode.parent
        seen.add(directory)
    return seen


async def _replace(
    kv: KeyValue,
    old: Place,
    source: FoundName,
    new: Place,
    target: FoundName | None,
    now_ns: int,
    whiteout: Whiteout | None,
) -> tuple[Renamed, Plan]:
    ino = source.entry.ino
    inode, revision = await _inode_of(kv, source)
    inode, prefix = await without_prefix(kv, inode)
    plan = Plan([Unchanged(inode_key(ino), revision), *prefix.plan.compares], [*_left(old, new, whiteout, now_ns)])
    plan.operations.extend(prefix.plan.operations)
    plan.operations.append(entry_put(new.directory, new.name, ino, inode.mode))
    removed = None
    dead: list[tuple[Vid, Version]] = []
    if target is not None:
        target_is_directory = stat.S_ISDIR(target.entry.kind)
        if inode.is_directory and not target_is_directory:
            raise NotADirectory(f"a directory can't replace {new.name!r}, which is none")
        if target_is_directory and not inode.is_directory:
            raise IsADirectory(f"only a directory can replace {new.name!r}, which is one")
        if target_is_directory:
            removed, removal = await remove_directory(kv, new.directory, target.entry.ino, now_ns)
        else:
            inode, keep, dropped = await _remember_replaced(kv, inode, target)
            inode, shown = await _shown_where_lost(kv, ino, inode)
            plan.compares.extend(shown.compares)
            plan.operations.extend(shown.operations)
            removed, removal = await remove_link(kv, target.entry.ino, now_ns, keep)
            ending = await end_versions(kv, dropped, now_ns)
            plan.compares.extend(ending.plan.compares)
            plan.operations.extend(ending.plan.operations)
            dead = ending.dead
        plan.compares.extend(removal.compares)
        plan.operations.extend(removal.operations)
    inode = _moved(plan, ino, inode, old.directory, new.directory)
    plan.operations.append(Put(inode_key(ino), pack(msgspec.structs.replace(inode, ctime_ns=now_ns))))
    return Renamed(ino, removed, dead), plan


def _left(old: Place, new: Place, whiteout: Whiteout | None, now_ns: int) -> list[Operation]:
    """What becomes of the old name."""
    if whiteout is None:
        return [Delete(entry_key(old.directory, old.name))]
    ino, uid, gid = whiteout
    inode = Inode(FORMAT_VERSION, stat.S_IFCHR, uid, gid, now_ns, now_ns, now_ns, made_ns=now_ns)
    tie = 1 if old.directory == new.directory else 0
    return [entry_put(old.directory, old.name, ino, inode.mode, tie), Put(inode_key(ino), pack(inode))]


async def _remember_replaced(kv: KeyValue, inode: Inode, target: FoundName) -> tuple[Inode, list[Vid], list[Vid]]:
    """R1: what the replaced file had stays with the new one until that has as much: its protected version as `prev`, its local
    one as `prev_local`. Returns the inode with them, the replaced file's versions to keep, and own ones that give way to them."""
    victim, _ = await _inode_of(kv, target)
    if not inode.is_regular or not victim.is_regular or victim.nlink > 1:
        return inode, [], []
    keep: list[Vid] = []
    dropped: list[Vid] = []
    protected = victim.prot or victim.prev or victim.prefix
    if protected is not None and inode.prot is None:
        if inode.prev is not None:
            dropped.append(inode.prev)
        keep.append(protected)
        inode = msgspec.structs.replace(inode, prev=protected)
    local = victim.cur if victim.cur is not None else victim.prev_local
    if local is not None and local != protected and inode.cur is None:
        found = await find_version(kv, local)
        if found is not None and found[0].state is VersionState.LOCAL:
            if inode.prev_local is not None:
                dropped.append(inode.prev_local)
            keep.append(local)
            inode = msgspec.structs.replace(inode, prev_local=local)
    return inode, keep, dropped


async def _shown_where_lost(kv: KeyValue, ino: InodeNumber, inode: Inode) -> tuple[Inode, Plan]:
    """A lost file shows what it has replaced, as if it had done so before the loss (R8): nothing else would ever show that again,
    nor protect what of it is only local."""
    plan = Plan([], [])
    if not inode.lost:
        return inode, plan
    known = await stores(kv)
    left = await newest_left(kv, (inode.prev_local, inode.prev), {store: record for store, (record, _) in known.items()})
    if left is None:
        return inode, plan
    vid, version, revision = left
    plan.compares.append(Unchanged(version_key(vid), revision))
    plan.operations.append(version_step(vid, version, msgspec.structs.replace(version, ino=ino)))
    protected = version.state is VersionState.PROTECTED
    if not protected and version.home in known:  # else it may be declared lost, and be done with, just now
        plan.compares.append(Unchanged(store_key(version.home), known[version.home][1]))
    shown = msgspec.structs.replace(
        inode,
        lost=False,
        cur=vid,
        prot=vid if protected else inode.prot,
        prev=None if protected else inode.prev,
        prev_local=inode.prev_local if protected else None,
        epoch=inode.epoch + 1,
        size=version.size,
        blocks=BLOCKS_UNKNOWN,
    )
    return shown, plan


async def _exchange(kv: KeyValue, old: Place, source: FoundName, new: Place, target: FoundName, now_ns: int) -> Plan:
    plan = Plan([], [])
    tie = 1 if old.directory == new.directory else 0
    for found, origin, destination, tie_here in ((source, old, new, 0), (target, new, old, tie)):
        inode, revision = await _inode_of(kv, found)
        inode, prefix = await without_prefix(kv, inode)
        ino = found.entry.ino
        plan.compares.extend([Unchanged(inode_key(ino), revision), *prefix.plan.compares])
        plan.operations.extend(prefix.plan.operations)
        plan.operations.append(entry_put(destination.directory, destination.name, ino, inode.mode, tie_here))
        inode = _moved(plan, ino, inode, origin.directory, destination.directory)
        plan.operations.append(Put(inode_key(ino), pack(msgspec.structs.replace(inode, ctime_ns=now_ns))))
    return plan


def _moved(plan: Plan, ino: InodeNumber, inode: Inode, origin: InodeNumber, destination: InodeNumber) -> Inode:
    """The inode under its new parent; adds what a directory's move means for the two parents' link counts."""
    if not inode.is_directory or origin == destination:
        return inode
    plan.operations.append(Delete(subdirectory_key(origin, ino)))
    plan.operations.append(Put(subdirectory_key(destination, ino), b""))
    return msgspec.structs.replace(inode, parent=destination)


async def _inode_of(kv: KeyValue, found: FoundName) -> tuple[Inode, int]:
    try:
        return await existing_inode(kv, found.entry.ino)
    except NoSuchName:
        raise Conflict from None
