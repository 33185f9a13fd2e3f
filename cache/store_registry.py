"""The cluster's stores and the nodes' sessions. Pure.

A store's record is permanent: commits compare it (R10), so its revision changes only when something about the store does.
"""

from collections.abc import Mapping
from functools import partial

import msgspec

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
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import NodeId, StoreId


def session_label(store: StoreId, incarnation: int) -> str:
    """What an engine calls the session of one start of one store's node."""
    return f"{store.hex()}/{incarnation}"


async def register_store(
    kv: KeyValue, store: StoreId, node: NodeId, address: str, directory: str, labels: Mapping[str, str]
) -> int:
    """Say where the store is now; a new one joins as `IN`, a known one keeps its state. Returns its record's revision.

    Raises `StoreError` for a store that was declared lost or removed: its place was given to others.
    """
    return await repeated(partial(_attempt_register, kv, store, node, address, directory, dict(labels)))


async def _attempt_register(
    kv: KeyValue, store: StoreId, node: NodeId, address: str, directory: str, labels: dict[str, str]
) -> int:
    entry = await kv.get(store_key(store))
    if entry is None:
        record = Store(FORMAT_VERSION, node, StoreState.IN, address, directory, labels)
        return await commit(kv, [Unchanged(store_key(store), 0)], [Put(store_key(store), pack(record))])
    known = unpack(Store, entry.value)
    if known.state in (StoreState.LOST, StoreState.REMOVED):
        raise StoreError(
            f"store {store.hex()} was declared {known.state.name.lower()}; its files are safe elsewhere:"
            " start this node with a new store directory"
        )
    record = msgspec.structs.replace(known, node=node, address=address, directory=directory, labels=labels)
    if record == known:
        return entry.mod_revision
    return await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(record))])


async def set_state(kv: KeyValue, store: StoreId, state: StoreState) -> None:
    """Change a store's state. Raises `StoreError` if the store isn't known."""
    await repeated(partial(_attempt_state, kv, store, state))


async def _attempt_state(kv: KeyValue, store: StoreId, state: StoreState) -> None:
    entry = await kv.get(store_key(store))
    if entry is None:
        raise StoreError(f"store {store.hex()} is not in this cluster")
    known = unpack(Store, entry.value)
    if known.state is state:
        return
    record = msgspec.structs.replace(known, state=state)
    await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(record))])


async def stores(kv: KeyValue) -> dict[StoreId, tuple[Store, int]]:
    """Every store that ever joined, with its record's revision."""
    return {store_of_key(entry.key): (unpack(Store, entry.value), entry.mod_revision) for entry in await kv.range(STORE_PREFIX)}


async def begin_session(kv: KeyValue, node: NodeId, store: StoreId, incarnation: int) -> int:
    """Say that the node is up; the key goes when the engine's session ends. Returns its revision.

    An older session of the node is replaced: its store is locked by its process, so that process is gone.
    """
    session = Session(FORMAT_VERSION, store, incarnation)
    return await commit(kv, [], [Put(session_key(node), pack(session), bound_to_session=True)])


async def sessions(kv: KeyValue) -> dict[NodeId, Session]:
    """The nodes that are up."""
    return {
        NodeId(entry.key[len(SESSION_PREFIX) :].decode(errors="replace")): unpack(Session, entry.value)
        for entry in await kv.range(SESSION_PREFIX)
    }
