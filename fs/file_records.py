"""Changes of an inode's record, also of a file whose last name is gone while it is in use: attributes, extended attributes.

While this node writes a file its segment's times are the file's, and become the record's when it is sealed. So both are changed,
and nothing may be sealed in between.
"""

import os
from collections.abc import Callable
from functools import partial

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.errors import InodeGone
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.inode_changes import AttributeChanges, applied, without_privileges
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.fs.callers import is_member
from ckptfs.fs.fuse_format import RequestHeader
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.removed_inodes import RemovedInodes


class FileRecords:
    """Raises what `Namespace` raises. `unique` is the number of the request a change is for: a file without a name notes it in
    its row, for the catalog has no note of it (`repeats`)."""

    def __init__(self, namespace: Namespace, open_files: OpenFiles, removed: RemovedInodes, database: MountDatabase) -> None:
        self._namespace = namespace
        self._open_files = open_files
        self._removed = removed
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
        try:
            return await self._namespace.set_attributes(ino, changes)
        except InodeGone:
            if (removed := self._removed.get(ino)) is None:
                raise
            return self._removed.change(ino, applied(removed, changes, self._namespace.now_ns()), unique)

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

    async def clear_privileges(self, ino: InodeNumber, inode: Inode, writer: RequestHeader, *, keeps_set_id: bool) -> Inode:
        """What writing does beyond the bytes: see `without_privileges`. The record afterwards."""
        if without_privileges(inode, keeps_set_id=keeps_set_id, is_member=False) is inode:
            return inode
        change = partial(
            without_privileges,
            keeps_set_id=keeps_set_id,
            is_member=is_member(writer, inode.gid),
            now_ns=self._namespace.now_ns(),
        )
        return inode if change(inode) is inode else await self.update(ino, change)

    async def update(self, ino: InodeNumber, change: Callable[[Inode], Inode], unique: int = 0) -> Inode:
        """Make a change of the record that has nothing to do with bytes or their times; the record afterwards. Raises what
        `change` raises."""
        file = self._open_files.get(ino)
        if file is not None and file.orphan is not None:
            return self._keep_orphan(file, change(file.orphan), unique)
        try:
            return await self._namespace.change(ino, change)
        except InodeGone:
            if (removed := self._removed.get(ino)) is None:
                raise
            return self._removed.change(ino, change(removed), unique)

    def _keep_orphan(self, file: FileInUse, record: Inode, unique: int) -> Inode:
        file.orphan = record
        if file.is_home:
            self._database.put_file(self._open_files.row(file, unique))
        return record
