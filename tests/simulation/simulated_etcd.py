"""etcd in memory, behind the real gateway's client (all but HTTP): revisions, transactions, leases, watches, compaction.

What can go wrong with a request: it is late; it is lost; it is carried out and its answer is lost; it is carried out only after
its client has given up. A member may be away, a machine cut off. A watch breaks, is late, and puts several revisions into one
message. Where a watch begins at the compaction revision it loses deletions, as etcd 3.4.23 does (etcd#18089).
"""

from bisect import bisect_left, insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import trio
from virtual_machine import Machine, Process, process

from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.etcd_gateway import (
    NOT_FOUND,
    EtcdGateway,
    GatewayError,
    Header,
    KeptAlive,
    KeyRecord,
    LeaseAnswer,
    Nothing,
    OperationAnswer,
    RangeAnswer,
    TransactionAnswer,
    WatchAnswer,
    WatchedEvent,
)
from ckptfs.cache.http_connection import HttpFailed

CLUSTER_ID = 0xC1
OUT_OF_RANGE, ALREADY_EXISTS = 11, 6


class Record(NamedTuple):
    """A key as it stands."""

    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


class Change(NamedTuple):
    """One event: without a record the key was deleted."""

    key: bytes
    record: Record | None


class Lease:
    """A lease with its keys."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends_at = trio.current_time() + seconds
        self.keys: set[bytes] = set()


class Refused(Exception):
    """etcd's answer is an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.error = GatewayError(code, message)


class SimulatedEtcd:
    """The server. `is_away`: no member answers. Of the next requests `losses_left` go wrong, by chance."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.revision = 1
        self.compacted = 0
        self.is_away = False
        self.losses_left = 0
        self.breaks_left = 0
        self.watch_delay_seconds = 0.0
        self.cut_off: set[int] = set()
        self.log: list[tuple[int, list[Change]]] = []
        self.on_commit: Callable[[int, list[Change], dict[bytes, Record | None]], None] = lambda revision, changes, before: None
        self.records: dict[bytes, Record] = {}
        self._keys: list[bytes] = []
        self._leases: dict[int, Lease] = {}
        self._changed = trio.Event()
        self._next_lease = 1000
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Let leases end in their time."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            while True:
                await trio.sleep(1.0)
                for lease, held in list(self._leases.items()):
                    if held.ends_at <= trio.current_time() and not self.is_away:
                        self._revoke(lease)

    def is_reachable(self, machine: Machine) -> bool:
        return not self.is_away and machine.number not in self.cut_off and machine.thawed is None

    def later(self, seconds: float, path: str, body: dict[str, Any]) -> None:
        """Carry a request out after its client has stopped waiting."""
        assert self._nursery is not None

        async def carry_out() -> None:
            process.set(None)
            await trio.sleep(seconds)
            try:
                self.answer(path, body)
            except Refused:
                return

        self._nursery.start_soon(carry_out)

    # ---- requests

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """Carry the request out. Raises `Refused`."""
        match path:
            case "/v3/kv/range":
                return self._range(body)
            case "/v3/kv/txn":
                return self._transact(body)
            case "/v3/kv/compaction":
                return self._compact(int(body["revision"]))
            case "/v3/lease/grant":
                return self._grant(int(body.get("ID", 0)), float(body["TTL"]))
            case "/v3/lease/keepalive":
                return self._keep(int(body["ID"]))
            case "/v3/lease/timetolive":
                held = self._leases.get(body["ID"])
                return LeaseAnswer(body["ID"], -1) if held is None else LeaseAnswer(body["ID"], 1, sorted(held.keys))
            case "/v3/lease/revoke":
                if body["ID"] not in self._leases:
                    raise Refused(NOT_FOUND, "etcdserver: requested lease not found")
                self._revoke(body["ID"])
                return Nothing()
        raise AssertionError(path)

    def header(self) -> Header:
        return Header(CLUSTER_ID, self.revision)

    def _between(self, body: dict[str, Any]) -> list[bytes]:
        first, end = body["key"], body.get("range_end", b"")
        if not end:
            return [first] if first in self.records else []
        begin = bisect_left(self._keys, first)
        return self._keys[begin:] if end == b"\0" else self._keys[begin : bisect_left(self._keys, end)]

    def _range(self, body: dict[str, Any]) -> RangeAnswer:
        if body.get("revision", 0) not in (0, self.revision):
            raise AssertionError("the simulated etcd keeps no older state: its catalogs fit into one page")
        keys = self._between(body)
        limit = body.get("limit") or len(keys)
        found = [] if body.get("count_only") else [self._key_record(key) for key in keys[:limit]]
        return RangeAnswer(self.header(), found, len(keys) > limit, len(keys))

    def _key_record(self, key: bytes) -> KeyRecord:
        record = self.records[key]
        return KeyRecord(key, record.value, record.create_revision, record.mod_revision)

    def _transact(self, body: dict[str, Any]) -> TransactionAnswer:
        if not all(self._holds(compare) for compare in body["compare"]):
            return TransactionAnswer(self.header(), False)
        for operation in body["success"]:
            lease = operation.get("request_put", {}).get("lease", 0)
            if lease and lease not in self._leases:
                raise Refused(NOT_FOUND, "etcdserver: requested lease not found")
        answers, changes = [], []
        for operation in body["success"]:
            if "request_range" in operation:
                answers.append(OperationAnswer(self._range(operation["request_range"])))
                continue
            answers.append(OperationAnswer())
            if "request_put" in operation:
                put = operation["request_put"]
                changes.append((put["key"], put["value"], put.get("lease", 0)))
            elif operation["request_delete_range"]["key"] in self.records:
                changes.append((operation["request_delete_range"]["key"], None, 0))
        self._apply(changes)
        return TransactionAnswer(self.header(), True, answers)

    def _holds(self, compare: dict[str, Any]) -> bool:
        if compare.get("range_end"):
            assert compare["target"] == "VERSION"
            return not self._between(compare)
        record = self.records.get(compare["key"])
        if compare["target"] == "MOD":
            return (0 if record is None else record.mod_revision) == int(compare["mod_revision"])
        version = 0 if record is None else record.version
        wanted = int(compare["version"])
        return version > wanted if compare["result"] == "GREATER" else version == wanted

    def _apply(self, changes: list[tuple[bytes, bytes | None, int]]) -> None:
        if not changes:
            return
        self.revision += 1
        applied = []
        previous = {key: self.records.get(key) for key, _, _ in changes}
        for key, value, lease in changes:
            before = self.records.get(key)
            if before is not None and before.lease in self._leases:
                self._leases[before.lease].keys.discard(key)
            if value is None:
                self._remove(key)
                applied.append(Change(key, None))
                continue
            created, version = (self.revision, 1) if before is None else (before.create_revision, before.version + 1)
            if before is None:
                insort(self._keys, key)
            self.records[key] = Record(bytes(value), created, self.revision, version, lease)
            if lease:
                self._leases[lease].keys.add(key)
            applied.append(Change(key, self.records[key]))
        self.log.append((self.revision, applied))
        token = process.set(None)
        try:
            self.on_commit(self.revision, applied, previous)
        finally:
            process.reset(token)
        self.stir()

    def _remove(self, key: bytes) -> None:
        del self.records[key]
        del self._keys[bisect_left(self._keys, key)]

    def stir(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _compact(self, revision: int) -> Nothing:
        if not self.compacted < revision <= self.revision:
            raise Refused(OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
        self.compacted = revision
        return Nothing()

    def _grant(self, lease: int, seconds: float) -> LeaseAnswer:
        if lease in self._leases:
            raise Refused(ALREADY_EXISTS, "etcdserver: lease already exists")
        if not lease:
            self._next_lease += 1
            lease = self._next_lease
        self._leases[lease] = Lease(seconds)
        return LeaseAnswer(lease, int(seconds))

    def _keep(self, lease: int) -> KeptAlive:
        held = self._leases.get(lease)
        if held is None:
            return KeptAlive(LeaseAnswer(lease, 0))
        held.ends_at = trio.current_time() + held.seconds
        return KeptAlive(LeaseAnswer(lease, int(held.seconds)))

    def _revoke(self, lease: int) -> None:
        held = self._leases.pop(lease)
        self._apply([(key, None, 0) for key in sorted(held.keys)])

    def has_lease(self, lease: int) -> bool:
        return lease in self._leases

    def state_at(self, revision: int) -> dict[bytes, Record]:
        """Every key as it was then."""
        state: dict[bytes, Record] = {}
        for at, changes in self.log:
            if at > revision:
                break
            for change in changes:
                if change.record is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change.record
        return state

    # ---- watches

    def events_after(self, seen: int) -> list[tuple[int, list[Change]]]:
        first = bisect_left(self.log, seen + 1, key=lambda entry: entry[0])
        return self.log[first:]

    async def wait_for_change(self) -> None:
        await self._changed.wait()


class SimulatedGateway(EtcdGateway):
    """The gateway of one process, whose requests reach the simulated etcd."""

    def __init__(self, etcd: SimulatedEtcd, *, wait_seconds: float = 30.0) -> None:
        super().__init__(["simulated"], wait_seconds=wait_seconds)
        self._etcd = etcd

    async def _attempt(self, path: str, body: dict[str, Any], answer: Any) -> Any:
        owner = _this_process()
        etcd, chance = self._etcd, self._etcd.chance
        owner.check()
        if chance.random() < 0.1:
            await trio.sleep(chance.choice((0.001, 0.01, 0.2)))
        else:
            await trio.lowlevel.checkpoint()
        await owner.machine.turn()
        owner.check()
        if not etcd.is_reachable(owner.machine):
            if chance.random() < 0.5:
                raise HttpFailed("Connection refused", sent=False)
            await trio.sleep_forever()
        fate = "done"
        if etcd.losses_left and chance.random() < 0.2:
            etcd.losses_left -= 1
            fate = chance.choice(("lost", "answer lost", "answer lost", "late"))
        if fate == "lost":
            raise HttpFailed("the connection broke", sent=True)
        if fate == "late":
            etcd.later(chance.choice((0.02, 0.1, 3.0)), path, body)
            raise HttpFailed("the connection broke", sent=True)
        try:
            found = etcd.answer(path, body)
        except Refused as refused:
            self._raise_for(refused.error)
            raise AssertionError from None
        if fate == "answer lost":
            raise HttpFailed("the connection broke", sent=True)
        await trio.lowlevel.checkpoint()
        await owner.machine.turn()
        owner.check()
        return found

    @asynccontextmanager
    async def watch(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        owner = _this_process()
        await trio.sleep(0.001)
        if not self._etcd.is_reachable(owner.machine):
            raise CatalogUnavailable("the watch of etcd can't be begun")
        yield _Watch(self._etcd, owner, request["start_revision"])


class _Watch:
    """The answers to one watch request."""

    def __init__(self, etcd: SimulatedEtcd, owner: Process, start: int) -> None:
        self._etcd = etcd
        self._owner = owner
        self._seen = start - 1
        self._start = start
        self._created = False

    async def answer(self) -> WatchAnswer:
        etcd, chance = self._etcd, self._etcd.chance
        while True:
            await trio.lowlevel.checkpoint()
            await self._owner.machine.turn()
            self._owner.check()
            if not etcd.is_reachable(self._owner.machine) or (etcd.breaks_left and chance.random() < 0.1):
                etcd.breaks_left = max(0, etcd.breaks_left - 1)
                raise CatalogUnavailable("the watch of etcd broke")
            if not self._created:
                self._created = True
                return WatchAnswer(etcd.header(), created=True)
            if self._start < etcd.compacted and self._seen + 1 < etcd.compacted:
                return WatchAnswer(etcd.header(), canceled=True, compact_revision=etcd.compacted)
            if found := etcd.events_after(self._seen):
                return self._message(found if chance.random() < 0.7 else found[:1])
            with trio.move_on_after(30.0):
                await etcd.wait_for_change()
                if etcd.watch_delay_seconds or chance.random() < 0.1:
                    await trio.sleep(etcd.watch_delay_seconds or 0.05)

    def _message(self, found: list[tuple[int, list[Change]]]) -> WatchAnswer:
        events = []
        for revision, changes in found:
            self._seen = revision
            for change in changes:
                if change.record is not None:
                    record = change.record
                    kv = KeyRecord(change.key, record.value, record.create_revision, record.mod_revision)
                    events.append(WatchedEvent(kv))
                elif revision != self._etcd.compacted or revision != self._start:
                    events.append(WatchedEvent(KeyRecord(change.key, b"", 0, revision), "DELETE"))
        return WatchAnswer(self._etcd.header(), events=events)


def _this_process() -> Process:
    now = process.get()
    assert now is not None
    return now
