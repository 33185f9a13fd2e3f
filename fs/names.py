"""Operations on names: what leads to an inode, and what makes, moves and removes that."""

import contextlib
import errno
import stat
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import attrgetter

from ckptfs.cache.errors import NameMoved, NoSuchName
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.namespace import DirectoryItem, Namespace
from ckptfs.cache.rename import RenameFlags
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.directory_paths import DirectoryPaths
from ckptfs.fs.file_content import FileContent
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.nameless_files import NamelessFiles
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.repeats import Repeats, done

_cookie = attrgetter("cookie")
_NO_ENTRY = bytes(fuse.ENTRY_OUT.size + fuse.ATTRIBUTES.size)


class NameOperations:
    """LOOKUP, MKNOD, MKDIR, SYMLINK, LINK, READLINK, UNLINK, RMDIR, RENAME, and directories read."""

    def __init__(
        self,
        namespace: Namespace,
        view: AttributeView,
        content: FileContent,
        files: FileOperations,
        nameless: NamelessFiles,
        removed: RemovedInodes,
        repeats: Repeats,
        paths: DirectoryPaths,
    ) -> None:
        self._namespace = namespace
        self._view = view
        self._content = content
        self._files = files
        self._nameless = nameless
        self._removed = removed
        self._paths = paths
        self._once = repeats.once
        self._listings: dict[int, list[DirectoryItem]] = {}
        self._next_listing = namespace.now_ns()  # no number of an earlier daemon, whose listings the kernel may still read from

    def handlers(self) -> dict[int, Handler]:
        return {
            Opcode.LOOKUP: self.lookup,
            Opcode.TMPFILE: self._nameless.make,
            Opcode.FORGET: self.forget,
            Opcode.BATCH_FORGET: self.forget,
            Opcode.MKNOD: self._once(self.mknod, self.mknod_again),
            Opcode.MKDIR: self._once(self.mkdir, partial(self.made, fuse.MKDIR_IN.size)),
            Opcode.SYMLINK: self._once(self.symlink, partial(self.made, 0)),
            Opcode.READLINK: self.readlink,
            Opcode.LINK: self._once(self.link, partial(self.made, fuse.LINK_IN.size)),
            Opcode.UNLINK: self._once(self.unlink, done),
            Opcode.RMDIR: self._once(self.rmdir, done),
            Opcode.RENAME: self._once(self.rename, done),
            Opcode.RENAME2: self._once(self.rename2, done),
            Opcode.OPENDIR: self.opendir,
            Opcode.READDIR: self.readdir,
            Opcode.READDIRPLUS: self.readdirplus,
            Opcode.RELEASEDIR: self.releasedir,
            Opcode.FSYNCDIR: self.fsyncdir,
        }

    async def lookup(self, header: RequestHeader, body: memoryview) -> bytes:
        parent, name = InodeNumber(header.nodeid), bytes(body[:-1])
        ino, inode = await self._namespace.lookup(parent, name)
        if inode.is_directory and name not in (b".", b".."):
            self._paths.note(ino, parent, name)
        return await self._view.entry(ino, inode)

    async def forget(self, header: RequestHeader, body: memoryview) -> None:
        """Only removed inodes need it: another's number is the catalog's, so no count of lookups is kept."""
        if header.opcode == Opcode.FORGET:
            self._removed.forget(InodeNumber(header.nodeid))
            return
        count, _ = fuse.BATCH_FORGET_IN.unpack_from(body)
        ends = fuse.BATCH_FORGET_IN.size + count * fuse.FORGET_ONE.size
        for ino, _ in fuse.FORGET_ONE.iter_unpack(body[fuse.BATCH_FORGET_IN.size : ends]):
            self._removed.forget(InodeNumber(ino))

    async def mknod(self, header: RequestHeader, body: memoryview) -> bytes:
        mode, rdev, umask, _ = fuse.MKNOD_IN.unpack_from(body)
        name = bytes(body[fuse.MKNOD_IN.size : -1])
        parent = InodeNumber(header.nodeid)
        if stat.S_ISREG(mode):
            return await self._files.make_empty(parent, name, mode, header.uid, header.gid, umask)
        ino, inode = await self._namespace.make_node(parent, name, mode, rdev, header.uid, header.gid, umask)
        return await self._view.entry(ino, inode)

    async def mknod_again(self, header: RequestHeader, body: memoryview) -> bytes:
        """A regular file may have been given its name and nothing else."""
        if stat.S_ISREG(fuse.MKNOD_IN.unpack_from(body)[0]):
            with contextlib.suppress(NoSuchName):
                ino, _ = await self._namespace.lookup(InodeNumber(header.nodeid), bytes(body[fuse.MKNOD_IN.size : -1]))
                if await self._content.drop_unfinished(ino):
                    return await self.mknod(header, body)
        return await self.made(fuse.MKNOD_IN.size, header, body)

    async def made(self, name_begins: int, header: RequestHeader, body: memoryview) -> bytes:
        """The answer of a request that made this name, when it was carried out before."""
        name = bytes(body[name_begins:]).partition(b"\0")[0]
        try:
            ino, inode = await self._namespace.lookup(InodeNumber(header.nodeid), name)
        except NoSuchName:
            raise NameMoved(
                f"name {name!r} was made, and taken away by another node since: the program's call begins again"
            ) from None
        return await self._view.entry(ino, inode)

    async def mkdir(self, header: RequestHeader, body: memoryview) -> bytes:
        mode, umask = fuse.MKDIR_IN.unpack_from(body)
        name = bytes(body[fuse.MKDIR_IN.size : -1])
        parent = InodeNumber(header.nodeid)
        ino, inode = await self._namespace.make_directory(parent, name, mode, header.uid, header.gid, umask)
        self._paths.note(ino, parent, name)
        return await self._view.entry(ino, inode)

    async def symlink(self, header: RequestHeader, body: memoryview) -> bytes:
        name, target = fuse.split_names(body, 2)
        ino, inode = await self._namespace.make_symlink(InodeNumber(header.nodeid), name, target, header.uid, header.gid)
        return await self._view.entry(ino, inode)

    async def readlink(self, header: RequestHeader, body: memoryview) -> bytes:
        inode = await self._view.current(InodeNumber(header.nodeid))
        if not stat.S_ISLNK(inode.mode):
            raise OSError(errno.EINVAL, "not a symbolic link")
        return inode.target

    async def link(self, header: RequestHeader, body: memoryview) -> bytes:
        (ino,) = fuse.LINK_IN.unpack_from(body)
        name = bytes(body[fuse.LINK_IN.size : -1])
        parent = InodeNumber(header.nodeid)
        if self._nameless.is_one(InodeNumber(ino)):
            inode = await self._nameless.link(InodeNumber(ino), parent, name)
        else:
            inode = await self._namespace.link(InodeNumber(ino), parent, name)
        return await self._view.entry(InodeNumber(ino), inode)

    async def unlink(self, header: RequestHeader, body: memoryview) -> bytes:
        removed = await self._namespace.unlink(InodeNumber(header.nodeid), bytes(body[:-1]))
        self._files.removed(removed)
        return b""

    async def rmdir(self, header: RequestHeader, body: memoryview) -> bytes:
        await self._namespace.rmdir(InodeNumber(header.nodeid), bytes(body[:-1]))
        return b""

    async def rename(self, header: RequestHeader, body: memoryview) -> bytes:
        (directory,) = fuse.RENAME_IN.unpack_from(body)
        return await self._rename(header, directory, body[fuse.RENAME_IN.size :], 0)

    async def rename2(self, header: RequestHeader, body: memoryview) -> bytes:
        directory, flags, _ = fuse.RENAME2_IN.unpack_from(body)
        return await self._rename(header, directory, body[fuse.RENAME2_IN.size :], flags)

    async def _rename(self, header: RequestHeader, directory: int, names: memoryview, flags: int) -> bytes:
        old, new = fuse.split_names(names, 2)
        if not flags & RenameFlags.EXCHANGE:
            await self._files.before_replacing(InodeNumber(header.nodeid), old, InodeNumber(directory), new)
        owner = header.uid, header.gid
        renamed = await self._namespace.rename(
            InodeNumber(header.nodeid), old, InodeNumber(directory), new, RenameFlags(flags), owner
        )
        if renamed.replaced is not None:
            await self._files.replaced(renamed.replaced)
        self._files.ended(renamed.dead)
        self._files.renamed(renamed.ino, InodeNumber(directory), new)
        return b""

    async def opendir(self, header: RequestHeader, body: memoryview) -> bytes:
        listing = self._next_listing
        self._next_listing += 1
        return fuse.OPEN_OUT.pack(listing, 0, 0)

    async def releasedir(self, header: RequestHeader, body: memoryview) -> bytes:
        self._listings.pop(fuse.RELEASE_IN.unpack_from(body)[0], None)
        return b""

    async def fsyncdir(self, header: RequestHeader, body: memoryview) -> bytes:
        await self._namespace.kv.make_durable()
        return b""

    async def _items(self, directory: InodeNumber, listing: int, offset: int) -> Iterator[DirectoryItem]:
        """What follows the offset. The names are read when a listing begins (again), or when an earlier daemon began it."""
        items = self._listings.get(listing)
        if items is None or offset == 0:
            inode = await self._namespace.inode(directory)
            parent = inode.parent if inode.parent is not None else directory
            items = [
                DirectoryItem(b".", directory, stat.S_IFDIR, 1),
                DirectoryItem(b"..", parent, stat.S_IFDIR, 2),
                *await self._namespace.readdir(directory),
            ]
            self._listings[listing] = items
        return islice(items, bisect_right(items, offset, key=_cookie), None)

    async def readdir(self, header: RequestHeader, body: memoryview) -> bytes:
        listing, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        records: list[bytes] = []
        used = 0
        for item in await self._items(InodeNumber(header.nodeid), listing, offset):
            record = fuse.directory_record(item.ino, item.cookie, item.kind, item.name)
            used += len(record)
            if used > size:
                break
            records.append(record)
        return b"".join(records)

    async def readdirplus(self, header: RequestHeader, body: memoryview) -> bytes:
        listing, offset, size, *_ = fuse.READ_IN.unpack_from(body)
        items: list[tuple[DirectoryItem, bytes]] = []
        used = 0
        for item in await self._items(InodeNumber(header.nodeid), listing, offset):
            record = fuse.directory_record(item.ino, item.cookie, item.kind, item.name)
            used += len(_NO_ENTRY) + len(record)
            if used > size:
                break
            items.append((item, record))
        inodes = await self._namespace.inodes([item.ino for item, _ in items if item.name not in (b".", b"..")])
        parts: list[bytes] = []
        for item, record in items:
            inode = inodes.get(item.ino)
            # Without attributes the kernel looks the name up: they are gone, damaged, or another node would have to be asked.
            if inode is None or item.name in (b".", b"..") or self._view.written_elsewhere(inode):
                parts.append(_NO_ENTRY)
            else:
                parts.append(await self._view.entry(item.ino, inode))
                if inode.is_directory:
                    self._paths.note(item.ino, InodeNumber(header.nodeid), item.name)
            parts.append(record)
        return b"".join(parts)
