"""Inodes without a name that programs still see: a directory they are in, a pipe or a link they have a descriptor of.

Regular files that are open have more to keep: see `OpenFiles`; an O_PATH descriptor of one that is not shows its attributes.
The kernel says when it has no use for one any more. In memory only: after a restart of the process it is gone (ESTALE).
"""

from ckptfs.cache.catalog_format import Inode
from ckptfs.cache.ids import InodeNumber

REMEMBERED_MAX = 10_000
"""The kernel says so of each soon after its removal, but for the few that are in use."""


class RemovedInodes:
    """Their records, as they were when the last name went, and as they were changed since."""

    def __init__(self) -> None:
        self._records: dict[InodeNumber, Inode] = {}

    def get(self, ino: InodeNumber) -> Inode | None:
        return self._records.get(ino)

    def add(self, ino: InodeNumber, record: Inode) -> None:
        """The last name of the inode is gone."""
        self._records[ino] = record
        if len(self._records) > REMEMBERED_MAX:
            del self._records[next(iter(self._records))]

    def change(self, ino: InodeNumber, record: Inode) -> Inode:
        """Precondition: it is one."""
        self._records[ino] = record
        return record

    def forget(self, ino: InodeNumber) -> None:
        """The kernel has no use for the inode any more."""
        self._records.pop(ino, None)
