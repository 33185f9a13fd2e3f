"""Reading the tree's records with their revisions, and the loop every compare-and-set runs in. Pure."""

import stat
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from ckptfs.cache.catalog_format import (
    FORMAT_VERSION,
    NAME_SIZE_MAX,
    DirectoryEntry,
    DirectoryTimes,
    Inode,
    Version,
    entry_key,
    inode_key,
    pack,
    times_key,
    unpack,
    version_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Operation, Put
from ckptfs.cache.errors import (
    CatalogFull,
    CatalogUnavailable,
    InodeGone,
    InvalidMove,
    NameExists,
    NameTooLong,
    NoSuchName,
    NotADirectory,
    SessionEnded,
)
from ckptfs.cache.ids import InodeNumber, Vid

ATTEMPTS_MAX = 100
"""How often an operation begins again after losing to others. With eight processes changing one key as fast as they can, the
worst seen is below 20."""

CLOCK_TICK_NS = 10_000_000
"""By how much the clock that files are stamped with may lag behind (CLOCK_REALTIME_COARSE, 100 Hz)."""

Result = TypeVar("Result")


class Conflict(Exception):
    """Something that was read has changed since: the operation begins again. Never leaves this room."""


class Plan(NamedTuple):
    """A part of a transaction."""

    compares: list[Compare]
    operations: list[Operation]


class FoundName(NamedTuple):
    """A name's entry, and the revision at which it came to lead where it leads."""

    entry: DirectoryEntry
    revision: int


async def repeated(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Run the attempt, again as long as it raises `Conflict`, or after the node's session has begun anew (R11). Raises
    `CatalogUnavailable` when it never succeeds."""
    for _ in range(ATTEMPTS_MAX):
        try:
            return await attempt()
        except Conflict:
            continue
        except SessionEnded as ended:
            if ended.wait_renewed is None or not await ended.wait_renewed():
                raise
    raise CatalogUnavailable(f"an operation lost to others {ATTEMPTS_MAX} times; it can be repeated")


async def commit(kv: KeyValue, compares: Sequence[Compare], operations: Sequence[Operation]) -> int:
    """Run the transaction and return its revision. Raises `Conflict` if a compare fails, `SessionEnded`."""
    result = await kv.transact(compares, operations)
    if not result.succeeded:
        raise Conflict
    return result.revision


async def find_name(kv: KeyValue, parent: InodeNumber, name: bytes) -> FoundName | None:
    """The entry of a name, or None; says nothing about whether the directory exists."""
    if len(name) > NAME_SIZE_MAX:
        raise NameTooLong(f"a name has {len(name)} bytes, at most {NAME_SIZE_MAX} are possible")
    entry = await kv.get(entry_key(parent, name))
    return None if entry is None else FoundName(unpack(DirectoryEntry, entry.value), entry.mod_revision)


async def existing_name(kv: KeyValue, parent: InodeNumber, name: bytes) -> FoundName:
    """The entry of a name. Raises `NoSuchName`, or `NotADirectory` if that is why there is none."""
    found = await find_name(kv, parent, name)
    if found is None:
        await existing_directory(kv, parent)
        raise NoSuchName(f"no name {name!r} in directory {parent}")
    return found


_INODES_REMEMBERED_MAX = 256
_inodes: dict[bytes, Inode] = {}
"""What records of inodes say that were read or written lately, by their bytes: these are the same object while nobody changes the
record, and who made a file is asked about it next."""


def _remember(value: bytes, inode: Inode) -> Inode:
    if len(_inodes) >= _INODES_REMEMBERED_MAX:
        _inodes.clear()
    _inodes[value] = inode
    return inode


def inode_put(ino: InodeNumber, inode: Inode) -> Put:
    """The inode's record is this one now."""
    value = pack(inode)
    _remember(value, inode)
    return Put(inode_key(ino), value)


def remembered_inode(value: bytes) -> Inode:
    """What an inode's record says. Raises `DamagedData`."""
    return _inodes.get(value) or _remember(value, unpack(Inode, value))


async def existing_inode(kv: KeyValue, ino: InodeNumber) -> tuple[Inode, int]:
    """The inode's record and its revision. Raises `NoSuchName` when it is gone."""
    entry = await kv.get(inode_key(ino))
    if entry is None:
        raise InodeGone(f"inode {ino} does not exist")
    return remembered_inode(entry.value), entry.mod_revision


def with_times(inode: Inode, times: DirectoryTimes) -> Inode:
    """A directory's record with the times of its own, which changes below it set."""
    return msgspec.structs.replace(inode, mtime_ns=times.mtime_ns, ctime_ns=max(inode.ctime_ns, times.ctime_ns))


async def existing_directory(kv: KeyValue, ino: InodeNumber) -> Inode:
    """The record of a directory. Raises `NoSuchName` when it is gone, `NotADirectory`."""
    inode, _ = await existing_inode(kv, ino)
    if not inode.is_directory:
        raise NotADirectory(f"inode {ino} is not a directory")
    return inode


async def find_version(kv: KeyValue, vid: Vid) -> tuple[Version, int] | None:
    """The version's record and its revision, or None when it is gone."""
    entry = await kv.get(version_key(vid))
    return None if entry is None else (unpack(Version, entry.value), entry.mod_revision)


def require_room(kv: KeyValue) -> None:
    """Raise `CatalogFull` if what adds to the catalog, and can wait, is to wait."""
    if kv.is_short_of_room():
        raise CatalogFull("the catalog's drive is full: what is kept back on it is for removing names; this is tried again")


def touched(directory: InodeNumber, now_ns: int) -> Put:
    """The directory's content changed now. Put each time, also within one tick of a coarse clock: who looks at the directory
    between two changes sees that it changed, as on ext4 since Linux 6.13."""
    return Put(times_key(directory), pack(DirectoryTimes(FORMAT_VERSION, now_ns, now_ns)))


def entry_put(directory: InodeNumber, name: bytes, ino: InodeNumber, mode: int, tie: int = 0) -> Put:
    """The name leads to this inode now."""
    return Put(entry_key(directory, name), pack(DirectoryEntry(FORMAT_VERSION, ino, stat.S_IFMT(mode), tie)))


def check_name(name: bytes) -> None:
    """Raise for what can't be a name at all: empty, too long, or with a slash or NUL in it."""
    if not name:
        raise NoSuchName("a name can't be empty")
    if len(name) > NAME_SIZE_MAX:
        raise NameTooLong(f"a name has {len(name)} bytes, at most {NAME_SIZE_MAX} are possible")
    if b"/" in name or b"\0" in name:
        raise InvalidMove(f"{name!r} can't be a name")


def check_new_name(name: bytes) -> None:
    """As `check_name`; `.` and `..` exist in every directory."""
    check_name(name)
    if name in (b".", b".."):
        raise NameExists(f"name {name!r} exists in every directory")
