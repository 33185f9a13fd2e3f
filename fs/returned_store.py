"""A store that was declared lost comes back: its files show again what only it had, where nobody touched them (R8, R10, I14).

Run by the mount before it answers anything. What somebody has written meanwhile stays as it is; the content that this node has of
such a file goes to `/.ckptfs/conflicts/`, as a file of its own that is protected like any other. Repeated after a kill it goes on
with what is left.
"""

import logging
import os
import stat
from collections.abc import Callable
from contextlib import aclosing

from ckptfs.cache.admission import require_not_removed
from ckptfs.cache.catalog_format import Inode, Store, StoreState, Version, Writer, store_key, unpack
from ckptfs.cache.catalog_records import find_version
from ckptfs.cache.errors import DamagedData, NameExists, NoSuchName, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.inode_paths import paths_of
from ckptfs.cache.lost_stores import be_in_again, end_unnamed, give_back
from ckptfs.cache.mount_db import FileRow, FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.fs.last_use import LastUse

log = logging.getLogger(__name__)

CONFLICTS = (b".ckptfs", b"conflicts")
NO_UMASK = 0


class ReturnedStore:
    """The return of one store, in its mount process."""

    def __init__(
        self,
        namespace: Namespace,
        database: MountDatabase,
        segments: Segments,
        store: StoreId,
        incarnation: int,
        last_use: Callable[[], LastUse],
    ) -> None:
        """`last_use` says how the store was used before it returned."""
        self._namespace = namespace
        self._database = database
        self._segments = segments
        self._writer = Writer(store, incarnation)
        self._last_use = last_use

    async def bring_back(self) -> bool:
        """Whether the store was lost: then all it had alone has a name again, and it is `IN`. Raises `StoreRemoved`, and
        `OSError` too."""
        kv = self._namespace.kv
        if not await self._is_lost():
            return False
        given = conflicts = 0
        last = self._last_use()
        async with aclosing(give_back(kv, self._writer)) as returned:
            async for vid, version, reattached in returned:
                if reattached:
                    given += 1
                    log.warning("file_given_back inode=%d vid=%s", version.ino, vid.hex())
                elif not self._has(version, last):
                    log.warning(
                        "lost_content_not_kept inode=%d vid=%s: it was never synced, or is not there", version.ino, vid.hex()
                    )
                    await end_unnamed(kv, vid)
                else:
                    conflicts += 1
                    await self._set_aside(vid, version)
        await be_in_again(kv, self._writer.store)
        await kv.make_durable()
        log.warning("store_returned given_back=%d conflicts=%d: it was declared lost while it was away", given, conflicts)
        return True

    async def require_not_lost(self) -> None:
        """Raise `StoreError` if the store was declared lost while this process ran: the next one brings its files back. And
        `StoreRemoved` if it was removed."""
        if await self._is_lost():
            raise StoreError("this node's store was declared lost while the node was away: the mount process begins anew")

    async def _is_lost(self) -> bool:
        kv = self._namespace.kv
        await kv.catch_up()
        await require_not_removed(kv, self._writer.store)
        entry = await kv.get(store_key(self._writer.store))
        return entry is not None and unpack(Store, entry.value).state is StoreState.LOST

    def _has(self, version: Version, last: LastUse) -> bool:
        """Whether its bytes are here as they were written: not so where a power cut came before they were synced."""
        if not version.durable and last.may_have_lost(version.segment):
            return False
        return os.path.exists(self._segments.path_of(version.segment))

    async def _set_aside(self, vid: Vid, version: Version) -> None:
        """A file of its own for a version whose file has other content now. Its segment carries on."""
        try:
            inode = await self._namespace.inode(version.ino)
        except NoSuchName:
            return await end_unnamed(self._namespace.kv, vid)  # removed just now
        row = self._database.file(version.ino)
        of_version = row is not None and row.segment == version.segment
        hint = os.path.basename(row.path_hint) if row is not None and of_version else b""
        name = b"%x-%b%b" % (version.ino, vid.hex()[:8].encode(), b"-" + hint[:200] if hint else b"")
        ino, new_vid, path = await self._set_aside_before(version) or await self._named(name, inode, version)
        self._segments.relabel(version.segment, ino)
        size = self._segments.size(version.segment)
        if self._database.file(ino) is None:
            self._database.put_file(
                FileRow(ino, new_vid, version.segment, FileState.OPEN, size, self._namespace.now_ns(), None, name)
            )
        if of_version:
            for handle in self._database.handles():  # programs that write it go on, and what they write is in the new file
                if handle.ino == version.ino:
                    self._database.put_handle(handle._replace(ino=ino))
            self._database.remove_files([version.ino])
        await end_unnamed(self._namespace.kv, vid)
        log.error("conflict_set_aside inode=%d vid=%s as=%s: the file was written elsewhere meanwhile",
                  version.ino, vid.hex(), os.fsdecode(path))  # fmt: skip

    async def _set_aside_before(self, version: Version) -> tuple[InodeNumber, Vid, bytes] | None:
        """The file that an attempt which was killed has made of the segment, as its label says: two files of one segment would
        take it from each other. None if there is none, or somebody has removed it."""
        descriptor = self._segments.open_read(version.segment)
        try:
            ino = self._segments.inode_of(descriptor)
            inode = await self._namespace.inode(ino)
        except (DamagedData, NoSuchName):
            return None
        finally:
            os.close(descriptor)
        if inode.open is None or ino == version.ino or not await self._is_in(inode, version.segment):
            return None
        return ino, inode.open, b"/" + (await paths_of(self._namespace.kv, [ino])).get(ino, b"")

    async def _named(self, name: bytes, inode: Inode, version: Version) -> tuple[InodeNumber, Vid, bytes]:
        """The file in the directory of conflicts, being written here, in the version's segment; and its path."""
        directory, path = await self._directory()
        nameless = await self._namespace.make_nameless(directory, stat.S_IMODE(inode.mode), inode.uid, inode.gid, NO_UMASK)
        descriptor = self._segments.open_read(version.segment)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._segments.sync_name(version.segment)
        while True:
            try:
                named = await self._namespace.name_file(nameless, version.segment, directory, name)
                ino = nameless.ino
            except NameExists:
                ino, named = await self._namespace.lookup(directory, name)
                if not await self._is_in(named, version.segment):  # else made by an earlier attempt that was killed
                    name += b"~"
                    continue
            assert named.open is not None
            return ino, named.open, path + b"/" + name

    async def _is_in(self, inode: Inode, segment: SegmentId) -> bool:
        """Whether the file is being written in this segment."""
        found = None if inode.open is None else await find_version(self._namespace.kv, inode.open)
        return found is not None and found[0].segment == segment

    async def _directory(self) -> tuple[InodeNumber, bytes]:
        """The directory of conflicts and its path, made unless it exists; under other names, where something else has these."""
        parent, path = ROOT_INODE, b""
        for name in CONFLICTS:
            parent, made = await self._made(parent, name)
            path += b"/" + made
        return parent, path

    async def _made(self, parent: InodeNumber, name: bytes) -> tuple[InodeNumber, bytes]:
        while True:
            try:
                return (await self._namespace.make_directory(parent, name, 0o755, os.geteuid(), os.getegid()))[0], name
            except NameExists:
                ino, inode = await self._namespace.lookup(parent, name)
                if inode.is_directory:
                    return ino, name
                name += b"~"
