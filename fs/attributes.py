"""What stat shows: an inode's record, and for bytes that are being written the segment itself.

While this node is the writer, size, times and blocks are the segment's own; while another node is, its agent is asked and the
kernel may keep nothing; otherwise the record has them.
"""

import os

import msgspec

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.errors import InodeGone
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.mount_db import FileState
from ckptfs.cache.namespace import Namespace
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.remote_content import RemoteContent

BLOCK_SIZE_BYTES = 1 << 20
"""`st_blksize`: what buffered writers take as their buffer."""
_SECOND_NS = 1_000_000_000


class AttributeView:
    """Packs inodes for the kernel. `timeout_seconds` is how long it may keep what doesn't change on another node now."""

    def __init__(
        self, namespace: Namespace, open_files: OpenFiles, remote: RemoteContent, store: StoreId, timeout_seconds: float
    ) -> None:
        self._namespace = namespace
        self._open_files = open_files
        self._remote = remote
        self._store = store
        self._valid = divmod(int(timeout_seconds * _SECOND_NS), _SECOND_NS)

    def written_elsewhere(self, inode: Inode) -> bool:
        """Whether another node accepts writes of this inode now."""
        return inode.writer is not None and inode.writer.store != self._store

    async def attributes(self, ino: InodeNumber, inode: Inode) -> tuple[bytes, tuple[int, int]]:
        """The packed attributes, and how long they are valid (seconds, nanoseconds)."""
        size, mtime_ns, ctime_ns, atime_ns, blocks = inode.size, inode.mtime_ns, inode.ctime_ns, inode.atime_ns, inode.blocks
        valid = self._valid
        nlink = inode.nlink
        if inode.is_directory:
            nlink = await self._namespace.nlink(ino, inode)
            size = 4096
        elif inode.is_regular:
            file = self._open_files.get(ino)
            if file is not None and file.is_home and file.state in (FileState.OPEN, FileState.ORPHAN):
                assert file.descriptor is not None
                status = os.fstat(file.descriptor)
                size, mtime_ns, blocks = status.st_size, inode.mtime_with(status.st_mtime_ns), status.st_blocks
                ctime_ns, atime_ns = max(ctime_ns, status.st_ctime_ns), max(atime_ns, status.st_atime_ns)
            elif self.written_elsewhere(inode):
                opened = (Vid(b""), None) if file is None else (file.vid, file.remote)
                remote = await self._remote.attributes(ino, *opened)
                size, mtime_ns, blocks = remote.size, inode.mtime_with(remote.mtime_ns), remote.blocks
                ctime_ns = max(ctime_ns, remote.mtime_ns)
                valid = (0, 0)
        elif inode.target:
            size = len(inode.target)
        if blocks < 0:
            blocks = -(-size // 4096) * 8
        atime, atime_nsec = divmod(atime_ns, _SECOND_NS)
        mtime, mtime_nsec = divmod(mtime_ns, _SECOND_NS)
        ctime, ctime_nsec = divmod(ctime_ns, _SECOND_NS)
        packed = fuse.ATTRIBUTES.pack(
            ino,
            size,
            blocks,
            atime & _MASK,
            mtime & _MASK,
            ctime & _MASK,
            atime_nsec,
            mtime_nsec,
            ctime_nsec,
            inode.mode,
            nlink,
            inode.uid,
            inode.gid,
            inode.rdev,
            BLOCK_SIZE_BYTES,
            0,
        )
        return packed, valid

    async def entry(self, ino: InodeNumber, inode: Inode) -> bytes:
        """A `fuse_entry_out`: what LOOKUP and everything that makes a name answer."""
        packed, (seconds, nanoseconds) = await self.attributes(ino, inode)
        return fuse.ENTRY_OUT.pack(ino, 0, seconds, seconds, nanoseconds, nanoseconds) + packed

    async def attr(self, ino: InodeNumber, inode: Inode) -> bytes:
        """A `fuse_attr_out`: what GETATTR and SETATTR answer."""
        packed, (seconds, nanoseconds) = await self.attributes(ino, inode)
        return fuse.ATTR_OUT.pack(seconds, nanoseconds, 0) + packed

    async def current(self, ino: InodeNumber) -> Inode:
        """The inode's record, also of one whose last name is gone while it is in use. Raises `InodeGone`."""
        file: FileInUse | None = self._open_files.get(ino)
        if file is not None and file.orphan is not None:
            return file.orphan
        try:
            return await self._namespace.inode(ino)
        except InodeGone:
            if file is None or file.record is None or not file.handles:
                raise
            return msgspec.structs.replace(file.record, nlink=0)  # removed on another node


_MASK = (1 << 64) - 1
