"""Operations on an inode's record: GETATTR, SETATTR, extended attributes, STATFS."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.inode_changes import AttributeChanges, XattrFlags
from ckptfs.cache.namespace import Namespace
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.file_records import FileRecords, without_privileges
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_format import Opcode, RequestHeader, SetattrField
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.repeats import Repeats, done

NAMESPACES = (b"user.", b"trusted.", b"security.")
VALUE_SIZE_MAX = 64 << 10
_SECOND_NS = 1_000_000_000
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
        }

    async def getattr(self, header: RequestHeader, body: memoryview) -> bytes:
        ino = InodeNumber(header.nodeid)
        return await self._view.attr(ino, await self._view.current(ino))

    async def setattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (valid, _, fh, size, _, atime, mtime, _, atimensec, mtimensec, _, mode, _, uid, gid, _) = fuse.SETATTR_IN.unpack_from(
            body
        )
        fields = SetattrField(valid)
        ino = InodeNumber(header.nodeid)
        inode = await self._view.current(ino)
        if SetattrField.SIZE in fields:
            await self._files.truncate(ino, fh if SetattrField.FH in fields else None, size)
        new_mode: int | None = None
        if SetattrField.MODE in fields:
            new_mode = inode.mode & ~0o7777 | mode & 0o7777
        elif fields & (SetattrField.UID | SetattrField.GID | SetattrField.KILL_SUIDGID):
            stripped = without_privileges(inode.mode)
            new_mode = stripped if stripped != inode.mode else None
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
        )
        # Last: with the record the request counts as carried out.
        return await self._view.attr(ino, await self._records.change(ino, changes, header.unique))

    async def getxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (size, _) = fuse.GETXATTR_IN.unpack_from(body)
        name = bytes(body[fuse.GETXATTR_IN.size : -1])
        value = (await self._view.current(InodeNumber(header.nodeid))).xattrs.get(name)
        if value is None:
            supported = name.startswith(NAMESPACES)
            raise OSError(errno.ENODATA if supported else errno.EOPNOTSUPP, "no such attribute")
        return _sized(value, size)

    async def listxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        (size, _) = fuse.GETXATTR_IN.unpack_from(body)
        names = (await self._view.current(InodeNumber(header.nodeid))).xattrs
        return _sized(b"".join(name + b"\0" for name in names), size)

    async def setxattr(self, header: RequestHeader, body: memoryview) -> bytes:
        size, flags = fuse.SETXATTR_IN.unpack_from(body)
        rest = body[fuse.SETXATTR_IN.size :]
        (name,) = fuse.split_names(rest, 1)
        value = bytes(rest[len(name) + 1 : len(name) + 1 + size])
        if not name.startswith(NAMESPACES):
            raise OSError(errno.EOPNOTSUPP, "this attribute namespace is not kept")
        if len(value) > VALUE_SIZE_MAX:
            raise OSError(errno.E2BIG, "the attribute's value is too large")
        await self._records.set_xattr(InodeNumber(header.nodeid), name, value, XattrFlags(flags), header.unique)
        return b""

    async def removexattr(self, header: RequestHeader, body: memoryview) -> bytes:
        await self._records.remove_xattr(InodeNumber(header.nodeid), bytes(body[:-1]), header.unique)
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


def _time(
    fields: SetattrField, given: SetattrField, now_given: SetattrField, seconds: int, nanoseconds: int, now_ns: int
) -> int | None:
    if now_given in fields:
        return now_ns
    if given not in fields:
        return None
    signed = seconds - (1 << 64) if seconds & _SIGN else seconds
    return signed * _SECOND_NS + nanoseconds


def _sized(value: bytes, size: int) -> bytes:
    """What getxattr(2) and listxattr(2) give: the length alone when asked with size 0."""
    if size == 0:
        return fuse.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, "the value does not fit")
    return value
