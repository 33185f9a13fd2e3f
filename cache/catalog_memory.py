"""A catalog engine in memory: what the key-value interface says and nothing more.

It is the reference the contract tests hold the others to, and what makes a whole tree fast enough to be tried a million ways.
No method gives way to other tasks but `watch`, so a coroutine over it can be driven without an event loop. Nothing survives the
process: `make_durable` only counts.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import trio

from ckptfs.cache.catalog_kv import (
    Compare,
    EmptyRange,
    Entry,
    Event,
    Operation,
    Present,
    Put,
    TransactionResult,
    check_transaction,
)
from ckptfs.cache.errors import CatalogCompacted

if TYPE_CHECKING:
    from ckptfs.cache.session_fence import SessionFence


class MemoryCatalog:
    """A `KeyValue`. Several handles on one content, each with a session of its own, come from `another`."""

    def __init__(self, session: str | None = None, shared: "MemoryCatalog | None" = None) -> None:
        self.session = session
        self._entries: dict[bytes, Entry] = {} if shared is None else shared._entries
        self._keys: list[bytes] = [] if shared is None else shared._keys
        self._log: list[list[Event]] = [] if shared is None else shared._log
        self._sessions: dict[bytes, str] = {} if shared is None else shared._sessions
        self._first_kept: list[int] = [1] if shared is None else shared._first_kept
        self._watchers: set[trio.Event] = set() if shared is None else shared._watchers
        self._closed = False
        self._fence: SessionFence | None = None
        self.barriers = 0

    def another(self, session: str | None = None) -> "MemoryCatalog":
        """One more handle on the same content."""
        return MemoryCatalog(session, self)

    async def catch_up(self) -> None:
        """Nothing to do."""

    async def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    async def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        return [self._entries.get(key) for key in keys]

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        found = self._keys_with(prefix)
        if after >= prefix:
            found = found[bisect_right(found, after) :]
        return [self._entries[key] for key in found[:limit]]

    async def count(self, prefix: bytes) -> int:
        return len(self._keys_with(prefix))

    def is_short_of_room(self) -> bool:
        return False

    async def revision(self) -> int:
        return len(self._log)

    def _keys_with(self, prefix: bytes) -> list[bytes]:
        first = bisect_left(self._keys, prefix)
        end = bisect_left(self._keys, prefix + b"\xff" * 300)
        return self._keys[first:end]

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        check_transaction(compares, operations, self.session)
        if self._fence is not None and operations and not self._holds(self._fence.compare):
            raise self._fence.ended()
        if not all(self._holds(compare) for compare in compares):
            return TransactionResult(False, len(self._log))
        revision = len(self._log) + 1
        events = [event for operation in operations if (event := self._apply(operation, revision)) is not None]
        return self._logged(events)

    def _holds(self, compare: Compare) -> bool:
        if isinstance(compare, EmptyRange):
            return not self._keys_with(compare.prefix)
        entry = self._entries.get(compare.key)
        if isinstance(compare, Present):
            return entry is not None
        return (0 if entry is None else entry.mod_revision) == compare.mod_revision

    def _apply(self, operation: Operation, revision: int) -> Event | None:
        key = operation.key
        before = self._entries.get(key)
        if isinstance(operation, Put):
            created = revision if before is None else before.create_revision
            self._entries[key] = Entry(key, bytes(operation.value), created, revision)
            if before is None:
                insort(self._keys, key)
            self._sessions.pop(key, None)
            if operation.bound_to_session and self.session is not None:
                self._sessions[key] = self.session
            return Event(revision, key, bytes(operation.value))
        if before is None:
            return None
        del self._entries[key]
        del self._keys[bisect_left(self._keys, key)]
        self._sessions.pop(key, None)
        return Event(revision, key, None)

    def _logged(self, events: list[Event]) -> TransactionResult:
        if events:
            self._log.append(events)
            for watcher in self._watchers:
                watcher.set()
        return TransactionResult(True, len(self._log))

    async def end_session(self, session: str) -> int:
        """Delete every key bound to the session, at one revision; returns how many there were."""
        keys = [key for key, owner in self._sessions.items() if owner == session]
        revision = len(self._log) + 1
        for key in keys:
            del self._entries[key]
            del self._keys[bisect_left(self._keys, key)]
            del self._sessions[key]
        self._logged([Event(revision, key, None) for key in sorted(keys)])
        return len(keys)

    def compact(self, revision: int) -> None:
        """Forget the history up to and including the revision."""
        self._first_kept[0] = revision + 1

    def fence_with(self, fence: "SessionFence") -> None:
        self._fence = fence

    async def make_durable(self) -> None:
        self.barriers += 1

    async def watch(self, after_revision: int) -> AsyncGenerator[list[Event], None]:
        await trio.lowlevel.checkpoint()
        if after_revision > len(self._log):
            raise CatalogCompacted(f"the catalog is at revision {len(self._log)}, before {after_revision}")
        seen = after_revision
        while not self._closed:
            changed = trio.Event()
            self._watchers.add(changed)
            try:
                while seen < len(self._log) and not self._closed:
                    if seen + 1 < self._first_kept[0]:
                        raise CatalogCompacted(f"the catalog's log begins after revision {seen}")
                    seen += 1
                    yield self._log[seen - 1]
                if not self._closed:
                    await changed.wait()
            finally:
                self._watchers.discard(changed)

    async def aclose(self) -> None:
        self._closed = True
        for watcher in self._watchers:
            watcher.set()
