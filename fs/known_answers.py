"""Answers from memory: what is asked for each file that is made, and told without anything that could wait.

The handlers say the same, and everything else. On a catalog whose reads need no replica and no barrier only.
"""

import errno

from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.known_records import KnownRecords
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, AtOnce
from ckptfs.fs.inode_operations import is_kept, sized
from ckptfs.fs.kernel_use import NAME_BEGINS

_ASKED_BY_OURSELVES = NAME_BEGINS.encode()


class KnownAnswers:
    """LOOKUP of what isn't there, GETATTR and GETXATTR, each as far as all of it is in memory."""

    def __init__(self, known: KnownRecords, view: AttributeView) -> None:
        self._known = known
        self._view = view

    def at_once(self) -> dict[int, AtOnce]:
        return {Opcode.LOOKUP: self.lookup, Opcode.GETATTR: self.getattr, Opcode.GETXATTR: self.getxattr}

    def lookup(self, header: RequestHeader, body: memoryview) -> int | None:
        name = bytes(body[:-1])
        if name.startswith(_ASKED_BY_OURSELVES) or not self._known.is_absent(InodeNumber(header.nodeid), name):
            return None
        return errno.ENOENT

    def getattr(self, header: RequestHeader, body: memoryview) -> Answer | None:
        ino = InodeNumber(header.nodeid)
        inode = self._view.orphan(ino) or self._known.inode(ino)
        nlink = None if inode is None else self._known.nlink(ino, inode)
        return None if inode is None or nlink is None else self._view.known_attr(ino, inode, nlink)

    def getxattr(self, header: RequestHeader, body: memoryview) -> Answer | int | None:
        ino = InodeNumber(header.nodeid)
        inode = self._view.orphan(ino) or self._known.inode(ino)
        name = bytes(body[fuse.GETXATTR_IN.size : -1])
        if inode is None or not is_kept(name):
            return None
        value = inode.xattrs.get(name)
        return errno.ENODATA if value is None else sized(value, fuse.GETXATTR_IN.unpack_from(body)[0])
