"""Operations on an inode's record: GETATTR, SETATTR, extended attributes, STATFS."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.inode_changes import (
    AttributeChanges,
    XattrFlags,
    has_privileges,
    moment_ns,
    with_acl,
    with_xattr,
    without_set_id,
    without_xattr,
)
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.posix_acl import ACCESS, unpack_acl
from ckptfs.cache.posix_acl import NAMES as ACL_NAMES
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.callers import is_member
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_format import Opcode, RequestHeader, SetattrField
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.repeats import Repeats, done

TRUSTED = b"trusted."
NAMESPACES = (b"user.", TRUSTED, b"security.")
VALUE_SIZE_MAX = 64 << 10
_SIGN = 1 << 63


class InodeOperations:
    """Everything about an inode that is neither its names nor its bytes."""

    def __init__(
        self,
        namespace: Namespace,
        view: AttributeView,
        records: FileRecords,
        files: FileOperations,
        repeats: Repeats,
        store: Path,
        withheld_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`withheld_bytes`: what of the store's free space is not for new data."""
        self._namespace = namespace
        self._view = view
        self._records = records
        self._files = files
        self._once = repeats.once
        self._store = store
        self._withheld_bytes = withheld_bytes

    def handlers(self) -> dict[int, Handler]:
        return {
            Opcode.GETATTR: self.getattr,
            Opcode.SETATTR: self._once(self.setattr, self.getattr),
            Opcode.GETXATTR: self.getxattr,
            Opcode.SETXATTR: self._once(self.setxattr, done),
            Opcode.LISTXATTR: self.listxattr,
            Opcode.REMOVEXATTR: self._once(self.removexattr, done),
            Opcode.STATFS: self.statfs,
            Opcode.STATX: self.statx,
        }

    async def getattr(self, header: RequestHeader, body: memoryview) -> bytes:
        ino = InodeNumber(header.nodeid)
        return await self._view.attr(ino, await self._view.current(ino))

    async def statx(self, header: RequestHeader, body: memoryview) -> bytes:
        """What GETATTR answers, and when the inode was made."""
        ino = InodeNumber(header.nodeid)
        return await self._view.statx(ino, await self._view.current(ino))

    async def setattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (valid, _, fh, size, _, atime, mtime, _, atimensec, mtimensec, _, mode, _, uid, gid, _) = fuse.SETATTR_IN.unpack_from(
            body
        )
        fields = SetattrField(valid)
        ino = InodeNumber(header.nodeid)
        inode = await self._view.current(ino)
        if SetattrField.SIZE in fields:
            await self._files.set_size(header.unique, ino, fh if SetattrField.FH in fields else None, size)
        # No field at all: chown(2) that changes neither owner nor group, or a write after which capabilities have gone.
        is_chown = bool(fields & (SetattrField.UID | SetattrField.GID))
        if not fields & ~SetattrField.ABOUT_CALLER:
            if header.uid not in (0, inode.uid) and has_privileges(inode):
                return await self._view.attr(ino, inode)  # which of the two it is can't be told: the write itself will clear them
            is_chown = True
        new_mode: int | None = None
        if SetattrField.MODE in fields:
            new_mode = inode.mode & ~0o7777 | mode & 0o7777
        elif is_chown or SetattrField.KILL_SUIDGID in fields:
            new_mode = self._without_set_id(inode, header)
        now = self._namespace.now_ns()
        atime_ns = _time(fields, SetattrField.ATIME, SetattrField.ATIME_NOW, atime, atimensec, now)
        mtime_ns = _time(fields, SetattrField.MTIME, SetattrField.MTIME_NOW, mtime, mtimensec, now)
        changes = AttributeChanges(
            mode=new_mode,
            uid=uid if SetattrField.UID in fields else None,
            gid=gid if SetattrField.GID in fields else None,
            atime_ns=atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=now,
            drops_capability=is_chown or SetattrField.SIZE in fields,
        )
        # Last: with the record the request counts as carried out.
        return await self._view.attr(ino, await self._records.change(ino, changes, header.unique))

    @staticmethod
    def _without_set_id(inode: Inode, caller: RequestHeader) -> int | None:
        """The mode that the caller's change leaves; None if it is the same."""
        if without_set_id(inode.mode, is_member=False) == inode.mode:
            return None
        mode = without_set_id(inode.mode, is_member=caller.uid == 0 or is_member(caller, inode.gid))
        return None if mode == inode.mode else mode

    async def getxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (size, _) = fuse.GETXATTR_IN.unpack_from(body)
        name = bytes(body[fuse.GETXATTR_IN.size : -1])
        _check_kept(name)
        value = (await self._view.current(InodeNumber(header.nodeid))).xattrs.get(name)
        if value is None:
            raise OSError(errno.ENODATA, "no such attribute")
        return sized(value, size)

    async def listxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (size, _) = fuse.GETXATTR_IN.unpack_from(body)
        names = (await self._view.current(InodeNumber(header.nodeid))).xattrs
        shown = (name for name in names if header.uid == 0 or not name.startswith(TRUSTED))
        return sized(b"".join(name + b"\0" for name in shown), size)

    async def setxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        size, flags, more_flags, _ = fuse.SETXATTR_IN.unpack_from(body)
        rest = body[fuse.SETXATTR_IN.size :]
        (name,) = fuse.split_names(rest, 1)
        value = bytes(rest[len(name) + 1 : len(name) + 1 + size])
        _check_kept(name)
        if len(value) > VALUE_SIZE_MAX:
            raise OSError(errno.E2BIG, "the attribute's value is too large")
        ino, now = InodeNumber(header.nodeid), self._namespace.now_ns()
        if name == ACCESS:
            acl = unpack_acl(value)
            loses_setgid = bool(more_flags & fuse.SETXATTR_KILL_SGID)
            await self._records.update(ino, partial(with_acl, acl=acl, now_ns=now, loses_setgid=loses_setgid), header.unique)
        else:
            change = partial(with_xattr, ino=ino, name=name, value=value, flags=XattrFlags(flags), now_ns=now)
            await self._records.update(ino, change, header.unique)
        return b""

    async def removexattr(self, header: RequestHeader, body: memoryview) -> bytes:
        ino, name = InodeNumber(header.nodeid), bytes(body[:-1])
        _check_kept(name)
        if name in ACL_NAMES and name not in (await self._view.current(ino)).xattrs:
            return b""
        await self._records.update(
            ino, partial(without_xattr, ino=ino, name=name, now_ns=self._namespace.now_ns()), header.unique
        )
        return b""

    async def statfs(self, header: RequestHeader, body: memoryview) -> bytes:
        status = os.statvfs(self._store)
        withheld_blocks = -(-self._withheld_bytes() // status.f_frsize)
        return fuse.STATFS_OUT.pack(
            status.f_blocks,
            status.f_bfree,
            max(0, status.f_bavail - withheld_blocks),
            status.f_files,
            status.f_ffree,
            status.f_bsize,
            fuse.NAME_SIZE_MAX,
            status.f_frsize,
            0,
        )


def is_kept(name: bytes) -> bool:
    """Whether an attribute of that name can be set."""
    return (name.startswith(NAMESPACES) and name not in NAMESPACES) or name in ACL_NAMES


def _check_kept(name: bytes) -> None:
    """Raise for an attribute's name that ext4 has no place for either."""
    if name in NAMESPACES:
        raise OSError(errno.EINVAL, "an attribute's name ends with its namespace")
    if not is_kept(name):
        raise OSError(errno.EOPNOTSUPP, "this attribute namespace is not kept")


def _time(
    fields: SetattrField, given: SetattrField, now_given: SetattrField, seconds: int, nanoseconds: int, now_ns: int
) -> int | None:
    if now_given in fields:
        return now_ns
    if given not in fields:
        return None
    signed = seconds - (1 << 64) if seconds & _SIGN else seconds
    return moment_ns(signed, nanoseconds)


def sized(value: bytes, size: int) -> bytes:
    """What getxattr(2) and listxattr(2) give: the length alone when asked with size 0."""
    if size == 0:
        return fuse.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, "the value does not fit")
    return value
