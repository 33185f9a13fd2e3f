"""Files that open(2) with O_TMPFILE makes: nothing leads to them, and nothing of them is in the catalog, before linkat(2).

Until then they are what removed files are that programs have open: orphans, whose record is in `mount.db`.
"""

import os
from collections.abc import Awaitable, Callable

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.ids import InodeNumber, new_segment_id
from ckptfs.cache.inode_changes import has_privileges
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.namespace import Created, Namespace
from ckptfs.cache.segments import Segments
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.fuse_format import RequestHeader
from ckptfs.fs.open_files import FileInUse, Handle, OpenFiles
from ckptfs.fs.settle import Settler


class NamelessFiles:
    """TMPFILE, and LINK for what it made. Raises what `Namespace` raises, and `OSError`."""

    def __init__(
        self,
        namespace: Namespace,
        open_files: OpenFiles,
        segments: Segments,
        database: MountDatabase,
        view: AttributeView,
        settler: Settler,
        opened: Callable[[Handle], Awaitable[bytes]],
    ) -> None:
        """`opened` gives the kernel's answer for a handle."""
        self._namespace = namespace
        self._open_files = open_files
        self._segments = segments
        self._database = database
        self._view = view
        self._settler = settler
        self._opened = opened

    async def make(self, header: RequestHeader, body: memoryview) -> bytes:
        """Make a file in a directory without a name, and open it."""
        handle = self._open_files.opened_before(header.unique)
        if handle is None:
            flags, mode, umask, _ = fuse.CREATE_IN.unpack_from(body)
            made = await self._namespace.make_nameless(InodeNumber(header.nodeid), mode, header.uid, header.gid, umask)
            segment = new_segment_id()
            with self._open_files.making(segment):
                descriptor = self._segments.create(segment, made.ino)
                now = self._namespace.now_ns()
                file = FileInUse(made.ino, FileState.ORPHAN, made.vid, segment, descriptor, now, orphan=made.inode)
                try:
                    handle = self._open_files.open_handle(
                        header.unique, file, flags, store_row=True, serve=has_privileges(made.inode)
                    )
                except OSError:
                    os.close(descriptor)
                    self._segments.remove(segment)
                    raise
                self._open_files.add(file)
        ino = handle.file.ino
        return await self._view.entry(ino, await self._view.current(ino)) + await self._opened(handle)

    def is_one(self, ino: InodeNumber) -> bool:
        """Whether the inode is a file in use that no name leads to."""
        file = self._open_files.get(ino)
        return file is not None and file.orphan is not None

    async def link(self, ino: InodeNumber, parent: InodeNumber, name: bytes) -> Inode:
        """Give a nameless file its first name. Its bytes are synced before: a name never shows before what it leads to."""
        file = self._open_files.get(ino)
        assert file is not None
        assert file.segment is not None
        async with self._open_files.alone(ino):
            if file.orphan is None:  # another name was the first
                return await self._namespace.link(ino, parent, name)
            await self._open_files.sync(file, with_name=True)
            named = await self._namespace.name_file(Created(ino, file.orphan, file.vid), file.segment, parent, name)
            file.orphan, file.state, file.durable_vid = None, FileState.OPEN, file.vid
            file.path_hint = self._open_files.paths.path(parent, name)
            file.generation += 1
            self._database.put_file(self._open_files.row(file))
        if not file.writers:
            self._settler.closed(file)
        return named
