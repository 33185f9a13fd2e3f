"""Writes that must not be carried out twice, though their requests may come again: appends, and what other nodes' programs write.

Each is named by the FUSE connection of its program's node and the number of the request there. Its outcome is kept, also through
a kill of this process (`mount.db`), until that node's kernel has the answer. That it has is kept for a while too: a copy of the
request may still be under way, through an agent that was frozen, and must find that it is over. An append is noted before it is
made, with the size the segment had: one that comes again after a kill looks behind that size for its own bytes, and appends them
only if they aren't there.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.cache.mount_db import CallRow, MountDatabase

SEARCHED_BYTES_MAX = 64 << 20
"""So far behind the noted size an append is looked for after a kill: what others appended in the second that took."""
_OVER = -1
"""In place of what a request gave, in a row that has no size either: nobody waits for it any more."""


class WriteName(NamedTuple):
    """The FUSE connection, by its node's store and incarnation, and the request's number on it."""

    store: StoreId
    incarnation: int
    number: int


class NotedWrites:
    """What is known of them. `restore` before the first one."""

    def __init__(self, database: MountDatabase, store: StoreId, incarnation: int) -> None:
        """`store` and `incarnation` are this mount's own."""
        self._database = database
        self._own = store, incarnation
        self._outcomes: dict[WriteName, int] = {}
        self._sizes_before: dict[WriteName, int] = {}
        self._appending: dict[InodeNumber, trio.Lock] = {}

    def restore(self) -> dict[tuple[StoreId, int], list[int]]:
        """Take up what an earlier process noted; the connections of other nodes of which there is something, each with the
        requests that are over."""
        found: dict[tuple[StoreId, int], list[int]] = {}
        for row in self._database.calls():
            name = WriteName(row.store, row.incarnation, row.number)
            if name[:2] != self._own and row.store == self._own[0]:
                self._database.remove_calls(row.store, row.incarnation)  # of a mount that is no more
                continue
            over = found.setdefault(name[:2], [])
            if row.value == _OVER:
                over.append(row.number)
            elif row.size_before >= 0:
                self._sizes_before[name] = row.size_before
            else:
                self._outcomes[name] = row.value
        found.pop(self._own, None)
        return found

    def own(self, number: int) -> WriteName:
        """The name of a request of this mount's own kernel."""
        return WriteName(*self._own, number)

    def outcome(self, name: WriteName) -> int | None:
        """What came of it, if it was carried out: bytes written."""
        return self._outcomes.get(name)

    def done(self, name: WriteName, value: int) -> None:
        """It is carried out."""
        self._outcomes[name] = value
        self._sizes_before.pop(name, None)
        self._database.put_call(CallRow(*name, value, -1))

    def own_answered(self, number: int) -> None:
        """This mount's own kernel has the answer to a request, which is mostly no write that is noted."""
        if self._outcomes or self._sizes_before:
            self.answered(self.own(number))

    def answered(self, name: WriteName) -> None:
        """Its kernel has the answer."""
        known = self._outcomes.pop(name, None), self._sizes_before.pop(name, None)
        if known != (None, None):
            self._database.remove_call(*name)

    def over(self, name: WriteName) -> None:
        """Nobody waits for it any more, whatever came of it."""
        self._outcomes.pop(name, None)
        self._sizes_before.pop(name, None)
        self._database.put_call(CallRow(*name, _OVER, -1))

    def forget_over(self, name: WriteName) -> None:
        """No copy of it can be under way any more."""
        self._database.remove_call(*name)

    def forget(self, store: StoreId, incarnation: int) -> None:
        """That connection has ended."""
        for known in (self._outcomes, self._sizes_before):
            for name in [name for name in known if name[:2] == (store, incarnation)]:
                del known[name]
        self._database.remove_calls(store, incarnation)

    async def append(self, name: WriteName, ino: InodeNumber, descriptor: int, data: bytes | memoryview) -> int:
        """Write at the end of the segment, unless that was done; bytes written. Raises `OSError`."""
        async with self._alone_appending(ino):
            if (written := self._outcomes.get(name)) is not None:
                return written
            size_before = self._sizes_before.get(name)
            written = 0
            if size_before is not None:
                written = await trio.to_thread.run_sync(_bytes_there, descriptor, data, size_before)
            if not written:
                self._sizes_before[name] = size_before = os.fstat(descriptor).st_size
                self._database.put_call(CallRow(*name, 0, size_before))
            if written < len(data):
                # The kernel finds the end: programs append in the passthrough lane too, and nobody else keeps them off.
                rest = memoryview(data)[written:]
                written += await trio.to_thread.run_sync(os.pwritev, descriptor, [rest], -1, os.RWF_APPEND)
            self.done(name, written)
            return written

    @asynccontextmanager
    async def _alone_appending(self, ino: InodeNumber) -> AsyncIterator[None]:
        lock = self._appending.setdefault(ino, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not lock.statistics().tasks_waiting:
                self._appending.pop(ino, None)


def _bytes_there(descriptor: int, data: bytes | memoryview, size_before: int) -> int:
    """How many of the bytes lie behind that size: all of them somewhere, or, at the end, as many as a write had made when it was
    cut off by a kill or a full drive. That happens between pages only, so that no other program's line is taken for it.

    In a thread.
    """
    end = min(os.fstat(descriptor).st_size, size_before + SEARCHED_BYTES_MAX)
    behind = bytearray()
    while size_before + len(behind) < end:
        part = os.pread(descriptor, min(1 << 20, end - size_before - len(behind)), size_before + len(behind))
        if not part:
            break
        behind += part
    whole = bytes(data)
    if whole in behind:
        return len(whole)
    is_cut = 0 < len(behind) < len(whole) and end % os.sysconf("SC_PAGE_SIZE") == 0 and whole.startswith(behind)
    return len(behind) if is_cut else 0
