"""What is always true of a whole catalog (I13 of docs/protocol.md, and what `versions` keeps), checked by one walk. Pure.

The tree: one root, no loop, no dangling entry, link counts right. Versions: an inode names only versions that exist, in states
that fit how it names them; an open version belongs to the inode being written; a version nobody names is a tombstone, or only a
store has it that is lost, whose return may make a file of its own of it.
"""

import stat
from collections import Counter, defaultdict

from ckptfs.cache.catalog_format import (
    DirectoryEntry,
    Inode,
    StoreState,
    Version,
    VersionState,
    entry_of_key,
    subdirectory_key,
    unpack,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId, Vid
from ckptfs.cache.store_registry import stores

_STATES_FOR = {
    "open": {VersionState.OPEN},
    "cur": {VersionState.LOCAL, VersionState.PROTECTED},
    "prot": {VersionState.PROTECTED},
    "prev": {VersionState.PROTECTED},
    "prev_local": {VersionState.LOCAL},
    "prefix": {VersionState.PROTECTED},
    "prefix_next": {VersionState.LOCAL},
    "rolled_back_from": {VersionState.OPEN, VersionState.LOCAL},
}


async def catalog_problems(kv: KeyValue) -> list[str]:
    """Every violation found, as a line each; empty for a consistent catalog.

    Reads everything at several revisions: call it while nobody changes the catalog. Raises `DamagedData` for unreadable records.
    """
    inodes = {InodeNumber(int(entry.key[2:], 16)): unpack(Inode, entry.value) for entry in await kv.range(b"i/")}
    names = [(*entry_of_key(entry.key), unpack(DirectoryEntry, entry.value)) for entry in await kv.range(b"d/")]
    versions = {vid_of_key(entry.key): unpack(Version, entry.value) for entry in await kv.range(b"v/")}
    subdirectories = {entry.key for entry in await kv.range(b"n/")}
    timed = {InodeNumber(int(entry.key[2:], 16)) for entry in await kv.range(b"t/")}
    problems = _tree_problems(inodes, names, subdirectories)
    problems += [f"times of {ino}, which is no directory" for ino in timed if ino not in inodes or not inodes[ino].is_directory]
    known = {store: record for store, (record, _) in (await stores(kv)).items()}
    gone = {store for store, record in known.items() if record.state in (StoreState.LOST, StoreState.REMOVED)}
    return problems + _version_problems(inodes, versions, gone)


def _tree_problems(
    inodes: dict[InodeNumber, Inode], names: list[tuple[InodeNumber, bytes, DirectoryEntry]], subdirectories: set[bytes]
) -> list[str]:
    problems = []
    links: Counter[InodeNumber] = Counter()
    parents: dict[InodeNumber, InodeNumber] = {ROOT_INODE: ROOT_INODE}
    expected: set[bytes] = set()
    for directory, name, entry in names:
        inode = inodes.get(entry.ino)
        if directory not in inodes or not inodes[directory].is_directory:
            problems.append(f"name {name!r} in {directory}, which is no directory")
        if inode is None:
            problems.append(f"name {name!r} in {directory} leads to inode {entry.ino}, which does not exist")
            continue
        if stat.S_IFMT(inode.mode) != entry.kind:
            problems.append(f"name {name!r} in {directory} has kind {entry.kind:#o}, its inode {inode.mode:#o}")
        links[entry.ino] += 1
        if inode.is_directory:
            expected.add(subdirectory_key(directory, entry.ino))
            if inode.parent != directory:
                problems.append(f"directory {entry.ino} is in {directory}, but says its parent is {inode.parent}")
            parents[entry.ino] = directory
    problems += [f"subdirectory key {key!r} is missing or wrong" for key in sorted(expected ^ subdirectories)]
    for ino, inode in inodes.items():
        wanted = 1 if inode.is_directory else inode.nlink
        if ino != ROOT_INODE and links[ino] != wanted:
            problems.append(f"inode {ino} has {links[ino]} names, should have {wanted}")
    if ROOT_INODE not in inodes or links[ROOT_INODE]:
        problems.append("the root does not exist, or has a name")
    return problems + [f"directory {ino} does not hang on the root" for ino in parents if not _reaches_root(ino, parents)]


def _reaches_root(ino: InodeNumber, parents: dict[InodeNumber, InodeNumber]) -> bool:
    seen = set()
    while ino != ROOT_INODE:
        if ino in seen or ino not in parents:
            return False
        seen.add(ino)
        ino = parents[ino]
    return True


def _version_problems(inodes: dict[InodeNumber, Inode], versions: dict[Vid, Version], gone: set[StoreId]) -> list[str]:
    problems = []
    holders: dict[Vid, set[InodeNumber]] = defaultdict(set)
    segments: Counter[bytes] = Counter()
    for ino, inode in inodes.items():
        for role, states in _STATES_FOR.items():
            vid = getattr(inode, role)
            if vid is None:
                continue
            holders[vid].add(ino)
            version = versions.get(vid)
            if version is None or version.state not in states:
                found = "missing" if version is None else version.state.name
                problems.append(f"inode {ino} has {role} = {vid.hex()}, which is {found}")
        if inode.open is not None and inode.writer is None:
            problems.append(f"inode {ino} has an open version and no writer")
        if inode.is_regular and not inode.lost and inode.open is None and inode.cur is None:
            problems.append(f"inode {ino} has no content")
        if inode.open is None and (inode.prefix_next is not None or inode.prefix_holds):
            problems.append(f"inode {ino} has a prefix of what nobody writes")
        if inode.prefix_holds and inode.prefix is None:
            problems.append(f"inode {ino} has no prefix that could hold")
        if inode.prot is not None and inode.prev is not None:
            problems.append(f"inode {ino} remembers a replaced version though it has a protected one")
    for vid, version in versions.items():
        if version.state is VersionState.DEAD and holders[vid]:
            problems.append(f"dead version {vid.hex()} is named by an inode")
        if version.state is not VersionState.DEAD:
            segments[version.segment] += 1 if any(version.segment) else 0
            has_gone = not holders[vid] and version.home in gone and version.state in (VersionState.OPEN, VersionState.LOCAL)
            if len(holders[vid]) != 1 and not has_gone:
                problems.append(f"version {vid.hex()} ({version.state.name}) is named by {len(holders[vid])} inodes")
    return problems + [f"segment {segment.hex()} belongs to {count} versions" for segment, count in segments.items() if count > 1]
