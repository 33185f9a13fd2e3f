"""Inodes without a name that programs still see: a directory they are in, a pipe or a link they have a descriptor of.

Regular files that are open have more to keep: see `OpenFiles`; an O_PATH descriptor of one that is not shows its attributes, from
memory only: after a kill of this process they are gone (ESTALE). The others are noted in `mount.db` until the kernel says that it
has no use for them any more. That is done before the catalog takes the last name away, and so perhaps of one that keeps it: the
catalog is asked first.
"""

import stat

from ckptfs.cache.catalog_format import Inode, pack, unpack
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.mount_db import MountDatabase, RemovedRow
from ckptfs.cache.removal import Removed

REMEMBERED_MAX = 10_000
"""The kernel says so of each soon after its removal, but for the few that are in use."""


class RemovedInodes:
    """Their records, as they were when the last name went, and as they were changed since. `requests`: those that made the last
    change of one for an earlier process."""

    def __init__(self, database: MountDatabase, incarnation: int) -> None:
        """Take up what an earlier process of this FUSE connection noted."""
        self._database = database
        self._incarnation = incarnation
        rows = database.removed_inodes(incarnation)
        self._records = {row.ino: unpack(Inode, row.record) for row in rows}
        self.requests = [row.request for row in rows if row.request]

    def get(self, ino: InodeNumber) -> Inode | None:
        """The record, if the catalog has none."""
        return self._records.get(ino)

    def expect(self, removed: Removed) -> None:
        """The last name of the inode is about to go."""
        if removed.last and not stat.S_ISREG(removed.inode_after.mode):
            self.add(removed.ino, removed.inode_after)

    def add(self, ino: InodeNumber, record: Inode) -> None:
        """The last name of the inode is gone."""
        if self._records.get(ino) == record:  # as expected
            return
        self.change(ino, record)
        if len(self._records) > REMEMBERED_MAX:
            self.forget(next(iter(self._records)))

    def change(self, ino: InodeNumber, record: Inode, unique: int = 0) -> Inode:
        """Precondition: it is one. `unique` is the number of the request that changes it."""
        self._records[ino] = record
        if not stat.S_ISREG(record.mode):
            self._database.put_removed_inode(RemovedRow(ino, self._incarnation, unique, pack(record)))
        return record

    def forget(self, ino: InodeNumber) -> None:
        """The kernel has no use for the inode any more."""
        record = self._records.pop(ino, None)
        if record is not None and not stat.S_ISREG(record.mode):
            self._database.forget_removed_inode(ino)
