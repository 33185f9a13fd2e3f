"""Changes of one inode's attributes: modes, owners, times, sizes and extended attributes. Pure."""

import enum
import stat
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    FORMAT_VERSION,
    NAME_SIZE_MAX,
    DirectoryTimes,
    Inode,
    inode_key,
    pack,
    times_key,
)
from ckptfs.cache.catalog_kv import KeyValue, Put, Unchanged
from ckptfs.cache.catalog_records import CLOCK_TICK_NS, commit, existing_inode
from ckptfs.cache.errors import AttributesTooLarge, InvalidMove, NameExists, NameTooLong, NoSuchAttribute, NotPermitted
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.cache.posix_acl import ACCESS, Acl, after_chmod, is_mode_alone, mode_of, pack_acl

XATTRS_SIZE_BYTES_MAX = 16 * 1024
"""All names and values of one inode together: they stand in its record, which every change rewrites. ext4 has 4 KiB."""


CAPABILITY = b"security.capability"

SECONDS_MIN, SECONDS_MAX = -(2**31), 2**34 - 2**31 - 1
"""The first and the last second an inode can show, in 1901 and 2446, as on ext4, where the segments are."""


class XattrFlags(enum.IntFlag):
    """Those of setxattr(2)."""

    CREATE = 1
    REPLACE = 2


class AttributeChanges(NamedTuple):
    """What setattr changes; None leaves it. `mode` is the permission bits. `size` is given only by a caller that has changed the
    bytes already. `ctime_ns` defaults to now. `drops_capability`: the file's capabilities go."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    size: int | None = None
    ctime_ns: int | None = None
    drops_capability: bool = False


def applied(inode: Inode, changes: AttributeChanges, now_ns: int, store: StoreId | None = None) -> Inode:
    """The record with the changes made; by this store's node, which is the file's writer if None."""
    times_set_ns = inode.times_set_ns
    if changes.atime_ns is not None or changes.mtime_ns is not None:
        elsewhere = inode.writer is not None and store is not None and inode.writer.store != store
        times_set_ns = now_ns + CLOCK_TICK_NS if elsewhere else 0
    xattrs = _without_capability(inode.xattrs) if changes.drops_capability else inode.xattrs
    return msgspec.structs.replace(
        inode,
        times_set_ns=times_set_ns,
        xattrs=xattrs if changes.mode is None else after_chmod(xattrs, changes.mode),
        mode=inode.mode if changes.mode is None else stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode),
        uid=inode.uid if changes.uid is None else changes.uid,
        gid=inode.gid if changes.gid is None else changes.gid,
        atime_ns=inode.atime_ns if changes.atime_ns is None else changes.atime_ns,
        mtime_ns=inode.mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
        size=inode.size if changes.size is None else changes.size,
        ctime_ns=now_ns if changes.ctime_ns is None else changes.ctime_ns,
    )


async def attempt_attributes(kv: KeyValue, ino: InodeNumber, changes: AttributeChanges, now_ns: int, store: StoreId) -> Inode:
    """One attempt, for this store's node. Returns the inode's record afterwards. Raises `NoSuchName`; `NotPermitted` for a size
    of what has none."""
    inode, revision = await existing_inode(kv, ino)
    if changes.size is not None and not inode.is_regular:
        raise NotPermitted(f"inode {ino} is not a regular file: its size can't be set")
    changed = applied(inode, changes, now_ns, store)
    operations = [Put(inode_key(ino), pack(changed))]
    if inode.is_directory and changes.mtime_ns is not None:
        operations.append(Put(times_key(ino), pack(DirectoryTimes(FORMAT_VERSION, changes.mtime_ns, changed.ctime_ns))))
    await commit(kv, [Unchanged(inode_key(ino), revision)], operations)
    return changed


def moment_ns(seconds: int, nanoseconds: int) -> int:
    """A time that was asked for, or the nearest an inode can show."""
    if SECONDS_MIN < seconds < SECONDS_MAX:
        return seconds * 10**9 + nanoseconds
    return min(max(seconds, SECONDS_MIN), SECONDS_MAX) * 10**9


def without_set_id(mode: int, *, is_member: bool = True) -> int:
    """The mode after a change of owner, and of a regular file after a write by somebody without CAP_FSETID. Set-group-id without
    execution for the group is no privilege: it stays if that was a member of the group."""
    if stat.S_ISDIR(mode):
        return mode
    mode &= ~stat.S_ISUID
    return mode if is_member and not mode & stat.S_IXGRP else mode & ~stat.S_ISGID


def _without_capability(xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in xattrs.items() if name != CAPABILITY} if CAPABILITY in xattrs else xattrs


def without_privileges(inode: Inode, *, keeps_set_id: bool, is_member: bool = True, now_ns: int = 0) -> Inode:
    """The record after a write: capabilities go, and the set-id bits unless the writer has CAP_FSETID (`is_member`: see
    `without_set_id`). The same object if there is nothing of that."""
    mode = inode.mode if keeps_set_id else without_set_id(inode.mode, is_member=is_member)
    xattrs = _without_capability(inode.xattrs)
    if mode == inode.mode and xattrs is inode.xattrs:
        return inode
    return msgspec.structs.replace(inode, mode=mode, xattrs=xattrs, ctime_ns=now_ns)


def has_privileges(inode: Inode) -> bool:
    """Whether a write may change more than bytes and times."""
    return without_privileges(inode, keeps_set_id=False, is_member=False) is not inode


def with_acl(inode: Inode, acl: Acl, now_ns: int, *, loses_setgid: bool) -> Inode:
    """The record with this access control list: its mode is what that says, and the list is kept if it says more."""
    xattrs = {name: value for name, value in inode.xattrs.items() if name != ACCESS}
    if not is_mode_alone(acl):
        xattrs[ACCESS] = pack_acl(acl)
    mode = inode.mode & ~0o777 | mode_of(acl)
    if loses_setgid:
        mode &= ~stat.S_ISGID
    if (mode, xattrs) == (inode.mode, inode.xattrs):
        return inode
    return msgspec.structs.replace(inode, mode=mode, xattrs=xattrs, ctime_ns=now_ns)


def with_xattr(inode: Inode, ino: InodeNumber, name: bytes, value: bytes, flags: XattrFlags, now_ns: int) -> Inode:
    """The record with the attribute. Raises `NameExists` (CREATE), `NoSuchAttribute` (REPLACE), `AttributesTooLarge`,
    `NameTooLong`, `InvalidMove` for unknown flags."""
    if int(flags) & ~3:
        raise InvalidMove(f"xattr flags {int(flags):#x} are unknown")
    if len(name) > NAME_SIZE_MAX:
        raise NameTooLong(f"an attribute's name has {len(name)} bytes, at most {NAME_SIZE_MAX} are possible")
    if flags & XattrFlags.CREATE and name in inode.xattrs:
        raise NameExists(f"inode {ino} has an attribute {name!r}")
    if flags & XattrFlags.REPLACE and name not in inode.xattrs:
        raise NoSuchAttribute(f"inode {ino} has no attribute {name!r}")
    if inode.xattrs.get(name) == value:
        return inode
    xattrs = {**inode.xattrs, name: bytes(value)}
    size_bytes = sum(len(key) + len(content) for key, content in xattrs.items())
    if size_bytes > XATTRS_SIZE_BYTES_MAX:
        raise AttributesTooLarge(f"the attributes of inode {ino} would take {size_bytes} bytes of {XATTRS_SIZE_BYTES_MAX}")
    return msgspec.structs.replace(inode, xattrs=xattrs, ctime_ns=now_ns)


async def attempt_change(kv: KeyValue, ino: InodeNumber, change: Callable[[Inode], Inode]) -> Inode:
    """One attempt to make a change of the record. Raises `NoSuchName`, and what `change` raises."""
    inode, revision = await existing_inode(kv, ino)
    changed = change(inode)
    await commit(kv, [Unchanged(inode_key(ino), revision)], [Put(inode_key(ino), pack(changed))])
    return changed


def without_xattr(inode: Inode, ino: InodeNumber, name: bytes, now_ns: int) -> Inode:
    """The record without the attribute. Raises `NoSuchAttribute`."""
    if name not in inode.xattrs:
        raise NoSuchAttribute(f"inode {ino} has no attribute {name!r}")
    xattrs = {key: value for key, value in inode.xattrs.items() if key != name}
    return msgspec.structs.replace(inode, xattrs=xattrs, ctime_ns=now_ns)
