"""Changes of an inode's record, also of a file whose last name is gone while it is in use: attributes, extended attributes.

While this node writes a file its segment's times are the file's, and become the record's when it is sealed. So both are changed,
and nothing may be sealed in between.
"""

import os
import stat

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.inode_changes import AttributeChanges, XattrFlags, applied, with_xattr, without_xattr
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.fs.open_files import FileInUse, OpenFiles


class FileRecords:
    """Raises what `Namespace` raises. `unique` is the number of the request a change is for: a file without a name notes it in
    its row, for the catalog has no note of it (`repeats`)."""

    def __init__(self, namespace: Namespace, open_files: OpenFiles, database: MountDatabase) -> None:
        self._namespace = namespace
        self._open_files = open_files
        self._database = database

    async def change(self, ino: InodeNumber, changes: AttributeChanges, unique: int = 0) -> Inode:
        """Change the attributes; the record afterwards. Its size is as the caller left the bytes."""
        if changes.atime_ns is None and changes.mtime_ns is None:
            return await self._change(ino, changes, unique)
        async with self._open_files.alone(ino):
            # The record last: with it a request counts as carried out, and is not repeated after a kill.
            self._set_times(ino, changes)
            return await self._change(ino, changes, unique)

    async def _change(self, ino: InodeNumber, changes: AttributeChanges, unique: int) -> Inode:
        file = self._open_files.get(ino)
        if file is not None and file.orphan is not None:
            return self._keep_orphan(file, applied(file.orphan, changes, self._namespace.now_ns()), unique)
        return await self._namespace.set_attributes(ino, changes)

    def _set_times(self, ino: InodeNumber, changes: AttributeChanges) -> None:
        file = self._open_files.get(ino)
        if file is not None and file.is_home and file.state in (FileState.OPEN, FileState.ORPHAN):
            assert file.descriptor is not None
            status = os.fstat(file.descriptor)
            times = (
                status.st_atime_ns if changes.atime_ns is None else changes.atime_ns,
                status.st_mtime_ns if changes.mtime_ns is None else changes.mtime_ns,
            )
            os.utime(file.descriptor, ns=times)
            file.generation += 1

    async def clear_privileges(self, ino: InodeNumber, inode: Inode) -> None:
        """What a write by an ordinary user does to set-user-id and set-group-id bits. Passthrough writes don't come here one by
        one, so it is done when the file is opened for writing."""
        mode = without_privileges(inode.mode)
        if mode != inode.mode:
            await self._namespace.set_attributes(ino, AttributeChanges(mode=mode))

    async def set_xattr(self, ino: InodeNumber, name: bytes, value: bytes, flags: XattrFlags, unique: int = 0) -> None:
        """As `Namespace.set_xattr`."""
        file = self._open_files.get(ino)
        if file is None or file.orphan is None:
            await self._namespace.set_xattr(ino, name, value, flags)
        else:
            self._keep_orphan(file, with_xattr(file.orphan, ino, name, value, flags, self._namespace.now_ns()), unique)

    async def remove_xattr(self, ino: InodeNumber, name: bytes, unique: int = 0) -> None:
        """As `Namespace.remove_xattr`."""
        file = self._open_files.get(ino)
        if file is None or file.orphan is None:
            await self._namespace.remove_xattr(ino, name)
        else:
            self._keep_orphan(file, without_xattr(file.orphan, ino, name, self._namespace.now_ns()), unique)

    def _keep_orphan(self, file: FileInUse, record: Inode, unique: int) -> Inode:
        file.orphan = record
        if file.is_home:
            self._database.put_file(self._open_files.row(file, unique))
        return record


def without_privileges(mode: int) -> int:
    """The mode after a write by somebody without CAP_FSETID."""
    if not stat.S_ISREG(mode):
        return mode
    mode &= ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode
