"""Changes of one inode's attributes: modes, owners, times, sizes and extended attributes. Pure."""

import enum
import stat
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
from ckptfs.cache.catalog_records import commit, existing_inode
from ckptfs.cache.errors import AttributesTooLarge, InvalidMove, NameExists, NameTooLong, NoSuchAttribute, NotPermitted
from ckptfs.cache.ids import InodeNumber, StoreId

XATTRS_SIZE_BYTES_MAX = 16 * 1024
"""All names and values of one inode together: they stand in its record, which every change rewrites. ext4 has 4 KiB."""


CLOCK_TICK_NS = 10_000_000
"""By how much the clock that files are stamped with may lag behind (CLOCK_REALTIME_COARSE, 100 Hz)."""


class XattrFlags(enum.IntFlag):
    """Those of setxattr(2)."""

    CREATE = 1
    REPLACE = 2


class AttributeChanges(NamedTuple):
    """What setattr changes; None leaves it. `mode` is the permission bits. `size` is given only by a caller that has changed the
    bytes already. `ctime_ns` defaults to now."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    size: int | None = None
    ctime_ns: int | None = None


def applied(inode: Inode, changes: AttributeChanges, now_ns: int, store: StoreId | None = None) -> Inode:
    """The record with the changes made; by this store's node, which is the file's writer if None."""
    times_set_ns = inode.times_set_ns
    if changes.atime_ns is not None or changes.mtime_ns is not None:
        elsewhere = inode.writer is not None and store is not None and inode.writer.store != store
        times_set_ns = now_ns + CLOCK_TICK_NS if elsewhere else 0
    return msgspec.structs.replace(
        inode,
        times_set_ns=times_set_ns,
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


async def attempt_set_xattr(kv: KeyValue, ino: InodeNumber, name: bytes, value: bytes, flags: XattrFlags, now_ns: int) -> Inode:
    """One attempt. Raises as `with_xattr`, and `NoSuchName`."""
    inode, revision = await existing_inode(kv, ino)
    return await _commit_record(kv, ino, revision, with_xattr(inode, ino, name, value, flags, now_ns))


def with_xattr(inode: Inode, ino: InodeNumber, name: bytes, value: bytes, flags: XattrFlags, now_ns: int) -> Inode:
    """The record with the attribute. Raises `NameExists` (CREATE), `NoSuchAttribute` (REPLACE), `AttributesTooLarge`,
    `NameTooLong`, `InvalidMove` for flags that contradict each other."""
    if flags not in (XattrFlags(0), XattrFlags.CREATE, XattrFlags.REPLACE):
        raise InvalidMove(f"xattr flags {int(flags):#x} are unknown or contradict each other")
    if len(name) > NAME_SIZE_MAX:
        raise NameTooLong(f"an attribute's name has {len(name)} bytes, at most {NAME_SIZE_MAX} are possible")
    if flags & XattrFlags.CREATE and name in inode.xattrs:
        raise NameExists(f"inode {ino} has an attribute {name!r}")
    if flags & XattrFlags.REPLACE and name not in inode.xattrs:
        raise NoSuchAttribute(f"inode {ino} has no attribute {name!r}")
    xattrs = {**inode.xattrs, name: bytes(value)}
    size_bytes = sum(len(key) + len(content) for key, content in xattrs.items())
    if size_bytes > XATTRS_SIZE_BYTES_MAX:
        raise AttributesTooLarge(f"the attributes of inode {ino} would take {size_bytes} bytes of {XATTRS_SIZE_BYTES_MAX}")
    return msgspec.structs.replace(inode, xattrs=xattrs, ctime_ns=now_ns)


async def attempt_remove_xattr(kv: KeyValue, ino: InodeNumber, name: bytes, now_ns: int) -> Inode:
    """One attempt. Raises `NoSuchAttribute`, `NoSuchName`."""
    inode, revision = await existing_inode(kv, ino)
    return await _commit_record(kv, ino, revision, without_xattr(inode, ino, name, now_ns))


def without_xattr(inode: Inode, ino: InodeNumber, name: bytes, now_ns: int) -> Inode:
    """The record without the attribute. Raises `NoSuchAttribute`."""
    if name not in inode.xattrs:
        raise NoSuchAttribute(f"inode {ino} has no attribute {name!r}")
    xattrs = {key: value for key, value in inode.xattrs.items() if key != name}
    return msgspec.structs.replace(inode, xattrs=xattrs, ctime_ns=now_ns)


async def _commit_record(kv: KeyValue, ino: InodeNumber, revision: int, changed: Inode) -> Inode:
    await commit(kv, [Unchanged(inode_key(ino), revision)], [Put(inode_key(ino), pack(changed))])
    return changed
