"""The catalog engine for a cluster of machines: etcd, through its JSON gateway.

Keys lie under the catalog's name (`<name>/<key>`), so that one etcd can hold several catalogs; it should hold nothing else,
because whoever follows it hears of every change (R19). Revisions are etcd's; those of a catalog that was recovered into another
etcd begin where its last recovery says, so that they never go back: `_base` is added to whatever leaves this module.

**Exactly once.** A transaction whose answer is lost may have been carried out, may be carried out yet, or never. So each one
also puts a marker (`<name>.x/<client>/<slot>`) and compares the revision the marker had before: sent again, the same transaction
can't be carried out twice, and whether the first one was can be read. A client has one slot for each transaction under way.
Markers hang on the lease of the node's session, or on one of the handle's own, and go with it.

**Sessions.** A session is a lease whose id follows from its label, so that every process of the node can bind keys to it. Whoever
owns it calls `keep_session`.
"""

import hashlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import trio

from ckptfs.cache.catalog_format import RECOVERED_KEY, Recovered, unpack
from ckptfs.cache.catalog_kv import (
    OPERATIONS_MAX,
    Compare,
    Delete,
    EmptyRange,
    Entry,
    Event,
    Operation,
    Present,
    Put,
    TransactionResult,
    Unchanged,
    check_transaction,
    prefix_end,
)
from ckptfs.cache.errors import CatalogCompacted, CatalogReplaced, CatalogUnavailable, SessionEnded
from ckptfs.cache.etcd_gateway import (
    EtcdGateway,
    EtcdRefused,
    Header,
    KeptAlive,
    KeyRecord,
    LeaseAnswer,
    Nothing,
    OutcomeUnknown,
    RangeAnswer,
    TransactionAnswer,
    WatchAnswer,
)
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.store_registry import SESSION_SECONDS

log = logging.getLogger(__name__)

HANDLE_LEASE_SECONDS = 120
COMPACTED_KEY = b"c/compact"
"""The revision of etcd the history is about to be cut at, decimal, put before it is (R19)."""
RANGE_KEYS_AT_ONCE = 1_000
WATCH_RETRY_SECONDS = 0.2
UNKNOWN_RETRY_SECONDS = 0.05


class _Slot:
    """One marker key: `revision` is its own newest one, 0 while it is absent, `count` its newest value."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.revision = 0
        self.count = 0


class EtcdCatalog:
    """A `KeyValue` on etcd. Used by one event loop; `session` is the label of a session that some process keeps."""

    def __init__(self, gateway: EtcdGateway, name: str, *, session: str | None = None) -> None:
        """`name` is that of the catalog in this etcd: letters, digits, "-" and "_"."""
        self._gateway = gateway
        self.name = name
        self._prefix = name.encode() + b"/"
        self._markers = name.encode() + b".x/" + os.urandom(8).hex().encode() + b"/"
        self.session = session
        self._lease = 0 if session is None else lease_of(session)
        self._lease_until = float("inf") if session is not None else 0.0
        self._slots: list[_Slot] = []
        self._slots_made = 0
        self._cluster_id = 0
        self._newest = 0
        self._base: int | None = None
        self._watches: set[trio.CancelScope] = set()
        self._fence: SessionFence | None = None

    async def _based(self) -> int:
        """What is added to etcd's revisions. It doesn't change while the catalog is in use."""
        if self._base is None:
            found = (await self._range({"key": self._prefix + RECOVERED_KEY})).kvs
            self._base = unpack(Recovered, found[0].value).recoveries[-1].begins_at if found else 0
        return self._base

    # Reading

    async def get(self, key: bytes) -> Entry | None:
        await self._based()
        answer = await self._range({"key": self._prefix + key})
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def get_many(self, keys: Sequence[bytes]) -> list[Entry | None]:
        await self._based()
        entries: list[Entry | None] = []
        for start in range(0, len(keys), OPERATIONS_MAX):
            some = keys[start : start + OPERATIONS_MAX]
            answer = await self._transact([], [{"request_range": {"key": self._prefix + key}} for key in some])
            found = [part.response_range.kvs for part in answer.responses]
            entries += [self._entry(kvs[0]) if kvs else None for kvs in found]
        return entries

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        first = prefix if after < prefix else after + b"\0"
        return (await self.range_at(prefix, first=first, limit=limit))[0]

    async def range_at(
        self, prefix: bytes, *, first: bytes, limit: int | None = None, revision: int | None = None
    ) -> tuple[list[Entry], int]:
        """As `range`, from the key `first` on, with the revision all of it is of: the newest, or the one asked for.

        Raises `CatalogCompacted` if etcd no longer has that.
        """
        base = await self._based()
        entries: list[Entry] = []
        revision = 0 if revision is None else revision - base
        while limit is None or len(entries) < limit:
            at_once = RANGE_KEYS_AT_ONCE if limit is None else min(limit - len(entries), RANGE_KEYS_AT_ONCE)
            answer = await self._range(
                {
                    "key": self._prefix + first,
                    "range_end": prefix_end(self._prefix + prefix),
                    "limit": at_once,
                    "revision": revision,
                }
            )
            revision = revision or answer.header.revision
            entries += map(self._entry, answer.kvs)
            if not answer.more or not answer.kvs:
                break
            first = entries[-1].key + b"\0"
        return entries, revision + base

    async def count(self, prefix: bytes) -> int:
        whole = self._prefix + prefix
        return (await self._range({"key": whole, "range_end": prefix_end(whole), "count_only": True})).count

    def is_short_of_room(self) -> bool:
        return False  # etcd has a quota of its own, and says so when it is used up

    async def revision(self) -> int:
        return await self._based() + await self._own_revision()

    async def _own_revision(self) -> int:
        return (await self._range({"key": self._prefix, "count_only": True})).header.revision

    async def catch_up(self) -> None:
        """Nothing to do: every read is linearizable."""

    async def _range(self, request: dict[str, Any]) -> RangeAnswer:
        before = self._newest
        try:
            answer = await self._gateway.call("/v3/kv/range", request, RangeAnswer)
        except EtcdRefused as refused:
            if "compacted" in str(refused):
                raise CatalogCompacted(str(refused)) from None
            raise
        self._check(answer.header, before)
        return answer

    def _entry(self, record: KeyRecord) -> Entry:
        base = self._base or 0
        return Entry(record.key[len(self._prefix) :], record.value, record.create_revision + base, record.mod_revision + base)

    def _check(self, header: Header, at_least: int) -> None:
        """An answer to what was asked when the catalog was at revision `at_least`: is it of the same catalog, and not older?"""
        if header.cluster_id != self._cluster_id and self._cluster_id:
            raise CatalogReplaced(
                f"etcd's cluster is {header.cluster_id:x}, it was {self._cluster_id:x}: another etcd answers here."
                " Nothing is changed by it; point the node at its own etcd, or recover the catalog"
            )
        if header.revision < at_least:
            raise CatalogReplaced(
                f"etcd is at revision {header.revision}, it was at {at_least}: it was set back to an older state."
                " Nothing is changed by it; bring the newer state back, or recover the catalog"
            )
        self._cluster_id = header.cluster_id
        self._newest = max(self._newest, header.revision)

    # Writing

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        check_transaction(compares, operations, self.session)
        base = await self._based()
        compared = [self._compare(compare) for compare in compares]
        if not operations:
            answer = await self._transact(compared, [])
            return TransactionResult(answer.succeeded, answer.header.revision + base)
        await self._have_lease()
        fence = self._fence
        if fence is not None:
            compared.append(self._compare(fence.compare))
        slot = self._slots.pop() if self._slots else self._new_slot()
        kept = False
        try:
            result = await self._transact_once(slot, compared, [self._operation(operation) for operation in operations])
            kept = True
        except SessionEnded:
            raise self._session_ended() from None
        finally:
            if kept:  # else nobody knows where its marker is: it is never used again
                self._slots.append(slot)
        if not result.succeeded and fence is not None:
            session = await self.get(fence.compare.key)
            if session is None or session.mod_revision != fence.compare.mod_revision:
                raise fence.ended()
        return TransactionResult(result.succeeded, result.revision + base)

    def _session_ended(self) -> SessionEnded:
        if self._fence is not None:
            return self._fence.ended()
        return SessionEnded(f"the session {self.session} has ended: it was not renewed in time")

    def fence_with(self, fence: SessionFence) -> None:
        self._fence = fence

    async def _transact_once(
        self, slot: _Slot, compares: list[dict[str, Any]], operations: list[dict[str, Any]]
    ) -> TransactionResult:
        slot.count += 1
        marked = [*operations, {"request_put": {"key": slot.key, "value": b"%d" % slot.count, "lease": self._lease}}]
        count, deadline, unknown = slot.count, trio.current_time() + self._gateway.wait_seconds, False
        while True:
            try:
                answer = await self._transact([*compares, _compare_revision(slot.key, slot.revision)], marked, once=True)
            except OutcomeUnknown as error:
                if trio.current_time() >= deadline:
                    raise CatalogUnavailable(
                        f"etcd did not answer a transaction ({error}): it may be carried out yet, or never;"
                        " open files are not touched, the operation can be repeated"
                    ) from None
                log.warning("transaction_outcome_unknown error=%r: sent again", str(error))
                unknown = True
                await trio.sleep(UNKNOWN_RETRY_SECONDS)
                continue
            if answer.succeeded:
                slot.revision = answer.header.revision
                return TransactionResult(True, slot.revision)
            return await self._why_refused(slot, count, answer, unknown)

    async def _why_refused(self, slot: _Slot, count: int, answer: TransactionAnswer, unknown: bool) -> TransactionResult:
        """A compare failed: the caller's, or the marker's, because what was sent before was carried out."""
        if not slot.revision and not unknown:
            return TransactionResult(False, answer.header.revision)  # the first one of its slot
        found = (await self._range({"key": slot.key})).kvs
        revision, value = (found[0].mod_revision, found[0].value) if found else (0, b"")
        if revision != slot.revision:
            if not found:
                self._slots.clear()  # their markers went with it
                raise self._session_ended()
            slot.revision = revision
            return TransactionResult(value == b"%d" % count, revision)
        if unknown:  # what was sent before may still be under way: the marker moves on, so that it can't be carried out any more
            moved = await self._transact_once(slot, [], [])
            if not moved.succeeded:
                return TransactionResult(True, slot.revision)
        return TransactionResult(False, answer.header.revision)

    async def _transact(
        self, compares: list[dict[str, Any]], operations: list[dict[str, Any]], *, once: bool = False
    ) -> TransactionAnswer:
        before = self._newest
        body = {"compare": compares, "success": operations}
        answer = await self._gateway.call("/v3/kv/txn", body, TransactionAnswer, once=once)
        self._check(answer.header, before)
        return answer

    def _new_slot(self) -> _Slot:
        self._slots_made += 1
        return _Slot(self._markers + b"%d" % self._slots_made)

    def _compare(self, compare: Compare) -> dict[str, Any]:
        match compare:
            case Unchanged(key, revision):
                return _compare_revision(self._prefix + key, revision and revision - (self._base or 0))
            case Present(key):
                return {"key": self._prefix + key, "target": "VERSION", "result": "GREATER", "version": 0}
            case EmptyRange(prefix):
                whole = self._prefix + prefix
                return {"key": whole, "range_end": prefix_end(whole), "target": "VERSION", "result": "EQUAL", "version": 0}

    def _operation(self, operation: Operation) -> dict[str, Any]:
        key = self._prefix + operation.key
        if isinstance(operation, Delete):
            return {"request_delete_range": {"key": key}}
        lease = self._lease if operation.bound_to_session else 0
        return {"request_put": {"key": key, "value": operation.value, "lease": lease}}

    async def make_durable(self) -> None:
        """Nothing to do: a member answers a transaction after a majority has synced it."""
        await trio.lowlevel.checkpoint()

    # Sessions

    async def _have_lease(self) -> None:
        """A handle without a session has a lease of its own for its markers; a new one when the old one may be ending."""
        if time.monotonic() < self._lease_until:
            return
        asked = time.monotonic()
        answer = await self._gateway.call("/v3/lease/grant", {"TTL": HANDLE_LEASE_SECONDS}, LeaseAnswer)
        self._lease, self._lease_until = answer.ID, asked + HANDLE_LEASE_SECONDS / 2
        self._slots.clear()  # their markers hang on the old lease

    async def begin_session(self, seconds: int = SESSION_SECONDS) -> None:
        """Begin the handle's session, unless it runs; it ends `seconds` after it was last renewed."""
        if self.session is None:
            raise ValueError("this handle was opened without a session")
        try:
            await self._gateway.call("/v3/lease/grant", {"ID": self._lease, "TTL": seconds}, LeaseAnswer)
        except EtcdRefused as refused:
            if "already exists" not in str(refused):
                raise
            await self.renew_session()

    async def renew_session(self) -> None:
        """Renew it once. Raises `SessionEnded` if it was not renewed in time: its keys are gone."""
        kept = await self._gateway.call("/v3/lease/keepalive", {"ID": self._lease}, KeptAlive)
        if kept.result is None or kept.result.TTL <= 0:
            raise SessionEnded(f"the session {self.session} has ended: it was not renewed in time")

    async def keep_session(self, seconds: float = SESSION_SECONDS, while_alive: Callable[[], bool] = lambda: True) -> None:
        """Renew it three times in its time, as long as `while_alive` says so. Returns never; raises `SessionEnded`."""
        while True:
            await trio.sleep(seconds / 3)
            if while_alive():
                try:
                    await self.renew_session()
                except SessionEnded:
                    raise
                except CatalogUnavailable as error:
                    log.warning("session_not_renewed error=%r", str(error))

    async def end_session(self, session: str) -> int:
        """Delete every key bound to the session, at one revision; returns how many there were."""
        lease = lease_of(session)
        known = await self._gateway.call("/v3/lease/timetolive", {"ID": lease, "keys": True}, LeaseAnswer)
        if known.TTL <= 0:
            return 0
        try:
            await self._gateway.call("/v3/lease/revoke", {"ID": lease}, Nothing)
        except SessionEnded:
            return 0
        return sum(key.startswith(self._prefix) for key in known.keys)

    # Following

    async def watch(self, after_revision: int) -> AsyncGenerator[list[Event], None]:
        async with aclosing(self.follow(after_revision)) as transactions:
            async for _, events in transactions:
                if events:
                    yield events

    async def follow(self, after_revision: int) -> AsyncGenerator[tuple[int, list[Event]]]:
        """Every revision of this etcd after the given one, with the catalog's changes at it, or none where others were.

        Goes on over broken connections. Raises as `watch`.
        """
        base = await self._based()
        if after_revision < base:
            raise CatalogCompacted(f"the catalog's history begins after revision {base}, it is asked for from {after_revision}")
        seen = after_revision - base
        first = True
        with trio.CancelScope() as scope:
            self._watches.add(scope)
            try:
                while True:
                    if not first:
                        await trio.sleep(WATCH_RETRY_SECONDS)
                    first = False
                    try:
                        # All keys, not only the catalog's: so every revision is heard of, and it is known what has been seen.
                        request = {"key": b"\0", "range_end": b"\0", "start_revision": seen + 1}
                        async with self._gateway.watch(request) as stream:
                            while True:
                                answer = await stream.answer()
                                if answer.created:
                                    await self._check_history(seen)
                                _refuse_canceled(answer, seen)
                                for revision, events in self._transactions(answer):
                                    if revision > seen:
                                        seen = revision
                                        yield revision + base, events
                    except CatalogUnavailable as error:
                        if isinstance(error, CatalogReplaced):
                            raise
                        log.warning("watch_broken error=%r: taken up again after revision %d", str(error), seen)
            finally:
                self._watches.discard(scope)

    async def _check_history(self, seen: int) -> None:
        """etcd 3.4.23 loses a deletion when a watch begins exactly where its history was cut (etcd#18089), so where that was is
        asked for: after the watch began, and whoever cuts says so first."""
        now = await self._own_revision()
        if seen > now:
            raise CatalogCompacted(f"the catalog is at revision {now}, before {seen}")
        cut = await self.get(COMPACTED_KEY)
        if cut is not None and seen < int(cut.value):
            raise CatalogCompacted(f"the catalog's history begins after revision {int(cut.value)}, it is asked for from {seen}")

    def _transactions(self, answer: WatchAnswer) -> list[tuple[int, list[Event]]]:
        found: list[tuple[int, list[Event]]] = []
        for event in answer.events:
            record = event.kv
            if not found or found[-1][0] != record.mod_revision:
                found.append((record.mod_revision, []))
            if record.key.startswith(self._prefix):
                value = None if event.type == "DELETE" else record.value
                revision = record.mod_revision + (self._base or 0)
                found[-1][1].append(Event(revision, record.key[len(self._prefix) :], value))
        return found

    async def compacted(self) -> int:
        """The revision after which the history begins; 0 if it was never cut."""
        cut = await self.get(COMPACTED_KEY)
        return 0 if cut is None else int(cut.value) + await self._based()

    async def compact(self, revision: int, compares: Sequence[Compare] = ()) -> bool:
        """Cut the history at the revision: watches that have seen less must begin anew. Says so in the catalog first (R19), and
        does nothing if a compare fails there, which is False."""
        revision -= await self._based()
        if not (await self.transact(compares, [Put(COMPACTED_KEY, b"%d" % revision)])).succeeded:
            return False
        try:
            await self._gateway.call("/v3/kv/compaction", {"revision": revision}, Nothing)
        except EtcdRefused as refused:
            if "compacted" not in str(refused):
                raise
        return True

    async def aclose(self) -> None:
        """Release what the handle holds; ends running watches."""
        for scope in list(self._watches):
            scope.cancel()
        try:
            if self.session is None and self._lease:
                with trio.move_on_after(1):
                    await self._gateway.call("/v3/lease/revoke", {"ID": self._lease}, Nothing)
        except CatalogUnavailable as error:
            log.info("lease_left error=%r: it ends by itself", str(error))
        finally:
            await self._gateway.aclose()


def lease_of(session: str) -> int:
    """The id of a session's lease: 63 bits of its label's SHA-256, never 0."""
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:8]) >> 1 | 1


def _compare_revision(key: bytes, revision: int) -> dict[str, Any]:
    return {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}


def _refuse_canceled(answer: WatchAnswer, seen: int) -> None:
    if answer.canceled or answer.compact_revision:
        if answer.compact_revision:
            raise CatalogCompacted(
                f"the catalog's history begins after revision {answer.compact_revision}, it is asked for from {seen}"
            )
        raise CatalogUnavailable(f"etcd ended the watch: {answer.cancel_reason}")
