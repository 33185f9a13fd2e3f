"""What stat shows: an inode's record, and for bytes that are being written the segment itself.

While this node is the writer, size, times and blocks are the segment's own; while another node is, its agent is asked. While
programs of another node write it the kernel may keep nothing. Otherwise the record has them.
"""

import os
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.errors import InodeGone
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.namespace import Namespace
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.remote_content import RemoteAttributes, RemoteContent
from ckptfs.fs.removed_inodes import RemovedInodes

BLOCK_SIZE_BYTES = 1 << 20
"""`st_blksize`: what buffered writers take as their buffer."""
_SECOND_NS = 1_000_000_000


class _Shown(NamedTuple):
    """Times as seconds and nanoseconds; `valid`: how long the kernel may keep them."""

    size: int
    blocks: int
    nlink: int
    mtime: tuple[int, int]
    ctime: tuple[int, int]
    valid: tuple[int, int]


class AttributeView:
    """Packs inodes for the kernel. `timeout_seconds` is how long it may keep what doesn't change on another node now,
    `keeps_names` whether that holds for names too: it does not where other nodes' changes are heard of at once, see
    `kernel_cache`."""

    def __init__(
        self,
        namespace: Namespace,
        open_files: OpenFiles,
        removed: RemovedInodes,
        remote: RemoteContent,
        store: StoreId,
        timeout_seconds: float,
        *,
        keeps_names: bool = True,
    ) -> None:
        self._keeps_names = keeps_names
        self._namespace = namespace
        self._open_files = open_files
        self._remote = remote
        self._store = store
        self._removed = removed
        self._valid = divmod(int(timeout_seconds * _SECOND_NS), _SECOND_NS)

    def written_elsewhere(self, inode: Inode) -> bool:
        """Whether another node accepts writes of this inode now."""
        return inode.writer is not None and inode.writer.store != self._store

    async def _shown(self, ino: InodeNumber, inode: Inode) -> _Shown:
        nlink, remote = inode.nlink, None
        if inode.is_directory:
            nlink = await self._namespace.nlink(ino, inode)
        elif self.written_elsewhere(inode) and inode.is_regular:
            file = self._open_files.get(ino)
            if file is None or not file.has_the_bytes:
                opened = (Vid(b""), None) if file is None else (file.vid, file.remote)
                remote = await self._remote.attributes(ino, *opened)
        return self._shown_with(ino, inode, nlink, remote)

    def _shown_with(self, ino: InodeNumber, inode: Inode, nlink: int, remote: RemoteAttributes | None) -> _Shown:
        """`remote`: what the node says that writes it, unless this one does."""
        size, mtime_ns, ctime_ns, blocks = inode.size, inode.mtime_ns, inode.ctime_ns, inode.blocks
        valid = self._valid
        if inode.is_directory:
            size = 4096
        elif remote is not None:
            size, blocks = remote.size, remote.blocks
            mtime_ns, ctime_ns = inode.mtime_with(remote.mtime_ns), inode.ctime_with(remote.mtime_ns)
            valid = (0, 0)
        elif inode.is_regular:
            file = self._open_files.get(ino)
            if file is not None and file.has_the_bytes:
                assert file.descriptor is not None
                status = os.fstat(file.descriptor)
                size, blocks = status.st_size, status.st_blocks
                mtime_ns, ctime_ns = inode.mtime_with(status.st_mtime_ns), inode.ctime_with(status.st_mtime_ns)
                if file.guests:  # who write it behind this kernel's back
                    valid = (0, 0)
        elif inode.target:
            size = len(inode.target)
        if blocks < 0:
            blocks = -(-size // 4096) * 8
        return _Shown(size, blocks, nlink, divmod(mtime_ns, _SECOND_NS), divmod(ctime_ns, _SECOND_NS), valid)

    async def attributes(self, ino: InodeNumber, inode: Inode) -> tuple[bytes, tuple[int, int]]:
        """The packed attributes, and how long they are valid (seconds, nanoseconds)."""
        return self._packed(ino, inode, await self._shown(ino, inode))

    def _packed(self, ino: InodeNumber, inode: Inode, shown: _Shown) -> tuple[bytes, tuple[int, int]]:
        size, blocks, nlink, (mtime, mtime_nsec), (ctime, ctime_nsec), valid = shown
        atime, atime_nsec = divmod(inode.atime_ns, _SECOND_NS)
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

    async def statx(self, ino: InodeNumber, inode: Inode) -> bytes:
        """A `fuse_statx_out`: what STATX answers."""
        size, blocks, nlink, mtime, ctime, (seconds, nanoseconds) = await self._shown(ino, inode)
        mask = fuse.STATX_BASIC | (fuse.STATX_BIRTH if inode.made_ns else 0)
        packed = fuse.STATX.pack(
            mask,
            BLOCK_SIZE_BYTES,
            0,
            nlink,
            inode.uid,
            inode.gid,
            inode.mode,
            0,
            ino,
            size,
            blocks,
            0,
            *divmod(inode.atime_ns, _SECOND_NS),
            0,
            *divmod(inode.made_ns, _SECOND_NS),
            0,
            *ctime,
            0,
            *mtime,
            0,
            os.major(inode.rdev),
            os.minor(inode.rdev),
            0,
            0,
        )
        return fuse.STATX_OUT.pack(seconds, nanoseconds, 0) + packed

    async def entry(self, ino: InodeNumber, inode: Inode) -> bytes:
        """A `fuse_entry_out`: what LOOKUP and everything that makes a name answer."""
        packed, (seconds, nanoseconds) = await self.attributes(ino, inode)
        kept = (seconds, nanoseconds) if self._keeps_names else (0, 0)
        return fuse.ENTRY_OUT.pack(ino, 0, kept[0], seconds, kept[1], nanoseconds) + packed

    async def attr(self, ino: InodeNumber, inode: Inode) -> bytes:
        """A `fuse_attr_out`: what GETATTR and SETATTR answer."""
        packed, (seconds, nanoseconds) = await self.attributes(ino, inode)
        return fuse.ATTR_OUT.pack(seconds, nanoseconds, 0) + packed

    def known_attr(self, ino: InodeNumber, inode: Inode, nlink: int) -> bytes | None:
        """As `attr`, given the count that a directory has; None where another node has to be asked."""
        if self.written_elsewhere(inode):
            return None
        packed, (seconds, nanoseconds) = self._packed(ino, inode, self._shown_with(ino, inode, nlink, None))
        return fuse.ATTR_OUT.pack(seconds, nanoseconds, 0) + packed

    def orphan(self, ino: InodeNumber) -> Inode | None:
        """The record of a file in use whose last name is gone."""
        file = self._open_files.get(ino)
        return None if file is None else file.orphan

    async def current(self, ino: InodeNumber) -> Inode:
        """The inode's record, also of one whose last name is gone while it is in use. Raises `InodeGone`."""
        file: FileInUse | None = self._open_files.get(ino)
        if file is not None and file.orphan is not None:
            return file.orphan
        try:
            return await self._namespace.inode(ino)
        except InodeGone:
            if (removed := self._removed.get(ino)) is not None:
                return removed
            if file is None or file.record is None or not file.handles:
                raise
            return msgspec.structs.replace(file.record, nlink=0)  # removed on another node


_MASK = (1 << 64) - 1
