"""Catalog records as of the newest commit of any process, kept in memory, and the proof that they still are that.

SQLite keeps the index of its write-ahead log in the `-shm` file, which all processes map. Its header (two copies of 48 bytes,
https://sqlite.org/walformat.html, "The WAL-Index Header") changes with every commit and every checkpoint; SQLite itself
compares it to learn whether its own pages are stale. So comparing 96 bytes of shared memory, 0.3 µs, replaces locking and
reading the database, 13 µs a record. Field `iChange`, at offset 8, grows by one with each transaction: an own commit after which
it has grown by exactly one leaves everything else that is kept valid. Field `nPage`, at offset 20, is how many pages the database
will have when all of the log is copied into it.
"""

import collections
import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckptfs.cache.catalog_kv import Entry
from ckptfs.cache.kept_descriptors import kept_descriptor, let_go_if_removed

HEADER_SIZE = 96
ENTRIES_MAX = 20_000
NEIGHBOURS_SUFFIX_SIZE = 2
"""Keys that differ in so many last bytes at most are neighbours: a hundred names that end in numbers, 256 inodes."""
_CHANGE = struct.Struct("=8xI")
_PAGES = struct.Struct("=20xI")

MISSING = object()
"""What `get` returns for a key of which nothing is known; None is a key that is known to be absent."""


_mapped: dict[int, mmap.mmap] = {}
"""The headers this process has mapped, by kept descriptor, and as long: a map holds a descriptor of its own."""
_users: collections.Counter[int] = collections.Counter()
"""How many caches look at each of them."""


def _map_header(descriptor: int) -> mmap.mmap:
    if descriptor not in _mapped:
        _mapped[descriptor] = mmap.mmap(descriptor, HEADER_SIZE, prot=mmap.PROT_READ)
    _users[descriptor] += 1
    return _mapped[descriptor]


def _unmap_header(descriptor: int) -> None:
    _users[descriptor] -= 1
    if not _users[descriptor] and let_go_if_removed(descriptor):
        _mapped.pop(descriptor).close()


class Written(NamedTuple):
    """A key as an own transaction wrote it; `created` if it wasn't there before."""

    value: bytes
    revision: int
    created: bool


class RecordCache:
    """Records of one database, which has a connection open. Used by one thread; `path` is the database's."""

    def __init__(self, path: str) -> None:
        self._descriptor = kept_descriptor(path + "-shm")
        self._map: mmap.mmap | bytes = _map_header(self._descriptor)
        self.header = b""
        self.newest: int | None = None
        """The newest revision, if it is known."""
        self._entries: dict[bytes, Entry | None] = {}
        self._counts: dict[bytes, int] = {}
        self._counted_lengths: set[int] = set()
        self._misses: dict[bytes, int] = {}
        self._whole: set[bytes] = set()

    def refresh(self) -> None:
        """Forget everything if anybody committed since. Called before looking, and before reading what will be kept."""
        header = self._map[:HEADER_SIZE]
        if header != self.header or len(self._entries) > ENTRIES_MAX:
            self._entries.clear()
            self._counts.clear()
            self._counted_lengths.clear()
            self._misses.clear()
            self._whole.clear()
            self.newest = None
            self.header = header

    def close(self) -> None:
        """Let go of the header, when this cache's connections are closed; once. What looks afterwards finds nothing kept."""
        self._map = bytes(HEADER_SIZE)
        self.refresh()
        _unmap_header(self._descriptor)

    @property
    def database_pages(self) -> int:
        """How many pages the database will have when the log as it is now is copied into it."""
        return int(_PAGES.unpack_from(self._map)[0])

    def current(self, key: bytes) -> Any:
        """`refresh`, then as `get`."""
        if self._map[:HEADER_SIZE] != self.header:
            self.refresh()
        entry = self._entries.get(key, MISSING)
        return None if entry is MISSING and key[:-NEIGHBOURS_SUFFIX_SIZE] in self._whole else entry

    def get(self, key: bytes) -> Any:
        """The entry, None for a key that is absent, `MISSING` if nothing is known."""
        entry = self._entries.get(key, MISSING)
        return None if entry is MISSING and key[:-NEIGHBOURS_SUFFIX_SIZE] in self._whole else entry

    def keep(self, key: bytes, entry: Entry | None) -> None:
        """Remember what was read after the last `refresh`."""
        self._entries[key] = entry

    def missed(self, key: bytes) -> int:
        """Nothing is known of the key; how many of its neighbours that was so of, with it, since anybody else committed."""
        neighbours = key[:-NEIGHBOURS_SUFFIX_SIZE]
        count = self._misses[neighbours] = self._misses.get(neighbours, 0) + 1
        return count

    def keep_neighbours(self, key: bytes, entries: Sequence[Entry], *, all_of_them: bool) -> None:
        """Remember those that were read after the last `refresh`; with `all_of_them` the others are absent."""
        self._entries.update((entry.key, entry) for entry in entries)
        if all_of_them:
            self._whole.add(key[:-NEIGHBOURS_SUFFIX_SIZE])

    def count(self, prefix: bytes) -> int | None:
        """How many keys begin with the prefix, None if nothing is known."""
        return self._counts.get(prefix)

    def keep_count(self, prefix: bytes, count: int) -> None:
        """Remember what was counted after the last `refresh`."""
        self._counts[prefix] = count
        self._counted_lengths.add(len(prefix))

    def committed(self, revision: int, changed: Mapping[bytes, Written | None]) -> None:
        """An own transaction was committed at this revision and left these keys so. Precondition: `refresh` was called under its
        write lock."""
        if self.follow_commit():
            self.written(revision, changed)

    def follow_commit(self) -> bool:
        """An own commit is over, and `refresh` was called under its write lock: whether what is kept holds all the same, because
        nobody else committed since. Else it is forgotten."""
        header = self._map[:HEADER_SIZE]
        grown = (_CHANGE.unpack_from(header)[0] - _CHANGE.unpack_from(self.header)[0]) & 0xFFFFFFFF
        if grown != 1:
            self.refresh()
            return False
        self.header = header
        return True

    def forget(self) -> None:
        """Nothing that is kept holds."""
        self.header = b""
        self.refresh()

    def written(self, revision: int, changed: Mapping[bytes, Written | None]) -> None:
        """The newest revision is this one, and left these keys so."""
        self.newest = revision
        entries = self._entries
        for key, written in changed.items():
            known = entries.get(key)
            if written is None:
                entries[key] = None
            elif written.created:
                entries[key] = Entry(key, written.value, written.revision, written.revision)
            elif known is not None:
                entries[key] = Entry(key, written.value, known.create_revision, written.revision)
        for length in self._counted_lengths:  # one or two, however many prefixes were counted
            for key in changed:
                self._counts.pop(key[:length], None)
