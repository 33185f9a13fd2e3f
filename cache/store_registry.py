"""The cluster's stores and the nodes' sessions. Pure.

A store's record is permanent: commits compare it (R10), so its revision changes only when something about the store does.
"""

from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

import msgspec

from ckptfs.cache.admission import StoreRemoved, joining
from ckptfs.cache.catalog_format import (
    FORMAT_VERSION,
    SESSION_PREFIX,
    STORE_PREFIX,
    Session,
    Store,
    StoreState,
    pack,
    session_key,
    store_key,
    store_of_key,
    unpack,
)
from ckptfs.cache.catalog_kv import KeyValue, Put, Unchanged
from ckptfs.cache.catalog_records import commit, repeated
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import DamagedData, DamagedRecord, StoreError
from ckptfs.cache.ids import NodeId, StoreId

UNREADABLE = 0
"""In the place of the revision of a store's record that is damaged: no transaction names one that has it."""

SESSION_SECONDS = 10
"""For how long a session on etcd goes on that is not renewed; one that ended makes its store *suspect* (R15)."""


class IdentityTaken(StoreError):
    """There is a session of this node already, from another start, or of another store."""

    def __init__(self, node: NodeId, session: Session) -> None:
        super().__init__(
            f"a node {node} is up already in this cluster, with the store {session.store.hex()}: this one was not started, and"
            " nothing was changed; give it an id of its own (node.id), or stop the other one first"
        )
        self.session = session


def session_label(store: StoreId, incarnation: int) -> str:
    """What an engine calls the session of one start of one store's node."""
    return f"{store.hex()}/{incarnation}"


async def register_store(
    kv: KeyValue, store: StoreId, node: NodeId, address: str, directory: str, labels: Mapping[str, str], token: str = ""
) -> int:
    """Say where the store is now; a new one joins as `IN`, a known one keeps its state: one that was lost is `IN` when its mount
    has brought its files back (`fs/returned_store.py`). Returns its record's revision.

    Raises `StoreRemoved`, and `NotAdmitted` for a new one whose `token` isn't good.
    """
    return await repeated(partial(_attempt_register, kv, store, node, address, directory, dict(labels), token))


async def _attempt_register(
    kv: KeyValue, store: StoreId, node: NodeId, address: str, directory: str, labels: dict[str, str], token: str
) -> int:
    entry = await kv.get(store_key(store))
    if entry is None:
        record = Store(FORMAT_VERSION, node, StoreState.IN, address, directory, labels)
        compares, operations = await joining(kv, node, token)
        return await commit(kv, [Unchanged(store_key(store), 0), *compares], [Put(store_key(store), pack(record)), *operations])
    known = unpack(Store, entry.value)
    if known.state is StoreState.REMOVED:
        raise StoreRemoved(store, known.node)
    record = msgspec.structs.replace(known, node=node, address=address, directory=directory, labels=labels)
    if record == known:
        return entry.mod_revision
    return await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(record))])


async def set_draining(kv: KeyValue, store: StoreId, draining: bool) -> StoreState:
    """Say that a store is to be emptied, or is to stay after all. Returns its state then: one that was declared lost or was
    removed is what it was, for its files have to come back first, or never do.

    Raises `StoreError` if the store isn't known.
    """
    state = StoreState.DRAINING if draining else StoreState.IN
    return await repeated(partial(_attempt_state, kv, store, state, (StoreState.IN, StoreState.DRAINING)))


async def set_state(kv: KeyValue, store: StoreId, state: StoreState) -> None:
    """Change a store's state, whatever it was. Raises `StoreError` if the store isn't known."""
    await repeated(partial(_attempt_state, kv, store, state, tuple(StoreState)))


async def _attempt_state(kv: KeyValue, store: StoreId, state: StoreState, changed_of: tuple[StoreState, ...]) -> StoreState:
    entry = await kv.get(store_key(store))
    if entry is None:
        raise StoreError(f"store {store.hex()} is not in this cluster")
    known = unpack(Store, entry.value)
    if known.state is state or known.state not in changed_of:
        return known.state
    record = msgspec.structs.replace(known, state=state)
    await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(record))])
    return state


async def stores(kv: KeyValue) -> dict[StoreId, tuple[Store, int]]:
    """Every store that ever joined, with its record's revision.

    One whose record is damaged is there as well, `UNREADABLE`: a member without an address, for what it holds is not gone.
    """
    damaged: set[bytes] = set()
    try:
        entries = await kv.range(STORE_PREFIX)
    except DamagedRecord:
        async with aclosing(scan(kv, STORE_PREFIX, damaged=damaged)) as others:
            entries = [entry async for entry in others]
    found = {}
    for entry in entries:
        try:
            found[store_of_key(entry.key)] = unpack(Store, entry.value), entry.mod_revision
        except DamagedData:
            damaged.add(entry.key)
    for key in damaged:
        store = store_of_key(key)
        found[store] = Store(FORMAT_VERSION, NodeId(f"damaged-{store.hex()[:8]}"), StoreState.IN, "", ""), UNREADABLE
    return found


async def begin_session(kv: KeyValue, node: NodeId, store: StoreId, incarnation: int) -> int:
    """Say that the node is up; the key goes when the engine's session ends. Returns its revision, which processes of this
    incarnation compare (R11): it stays as it is where it says so already.

    Raises `IdentityTaken` while there is a session of another start of this node, or of another store's.
    """
    return await repeated(partial(_attempt_session, kv, node, Session(FORMAT_VERSION, store, incarnation)))


async def _attempt_session(kv: KeyValue, node: NodeId, session: Session) -> int:
    entry = await kv.get(session_key(node))
    if entry is not None and unpack(Session, entry.value) == session:
        return entry.mod_revision
    if entry is not None:
        raise IdentityTaken(node, unpack(Session, entry.value))
    return await commit(kv, [Unchanged(session_key(node), 0)], [Put(session_key(node), pack(session), bound_to_session=True)])


async def stores_with_session(kv: KeyValue) -> frozenset[StoreId]:
    """The stores whose nodes are up."""
    return frozenset(session.store for session in (await sessions(kv)).values())


async def sessions(kv: KeyValue) -> dict[NodeId, Session]:
    """The nodes that are up."""
    return {
        NodeId(entry.key[len(SESSION_PREFIX) :].decode(errors="replace")): unpack(Session, entry.value)
        for entry in await kv.range(SESSION_PREFIX)
    }
