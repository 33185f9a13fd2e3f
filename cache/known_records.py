"""What the tree's records say, where all that is needed is in memory: an answer without a coroutine on the way. Whoever gets none
asks `Namespace`."""

from typing import Any, Protocol

from ckptfs.cache.catalog_format import (
    NAME_SIZE_MAX,
    DirectoryTimes,
    Inode,
    entry_key,
    inode_key,
    subdirectory_prefix,
    times_key,
    unpack,
)
from ckptfs.cache.catalog_kv import Entry
from ckptfs.cache.catalog_records import remembered_inode, with_times
from ckptfs.cache.ids import InodeNumber


class Memory(Protocol):
    """What an engine has in memory, and knows to be so now."""

    def known(self, key: bytes) -> Any:
        """The key's entry, None where it is known to be absent, something else where nothing is known of it."""
        ...

    def known_count(self, prefix: bytes) -> int | None:
        """How many keys begin with the prefix, None where that is not known."""
        ...


class KnownRecords:
    """The tree of one catalog. Raises `DamagedData` for a record that makes no sense."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def inode(self, ino: InodeNumber) -> Inode | None:
        """As `Namespace.inode`; None where that has to be asked, also for what is gone."""
        entry = self._memory.known(inode_key(ino))
        if not isinstance(entry, Entry):
            return None
        inode = remembered_inode(entry.value)
        if not inode.is_directory:
            return inode
        times = self._memory.known(times_key(ino))
        if isinstance(times, Entry):
            return with_times(inode, unpack(DirectoryTimes, times.value))
        return inode if times is None else None

    def is_absent(self, parent: InodeNumber, name: bytes) -> bool:
        """Whether `Namespace.lookup` would find a directory that has no such name."""
        if len(name) > NAME_SIZE_MAX or name in (b".", b"..") or self._memory.known(entry_key(parent, name)) is not None:
            return False
        directory = self._memory.known(inode_key(parent))
        return isinstance(directory, Entry) and remembered_inode(directory.value).is_directory

    def nlink(self, ino: InodeNumber, inode: Inode) -> int | None:
        """As `Namespace.nlink`; None where that has to be asked."""
        if not inode.is_directory or not inode.nlink:
            return inode.nlink
        count = self._memory.known_count(subdirectory_prefix(ino))
        return None if count is None else 2 + count
