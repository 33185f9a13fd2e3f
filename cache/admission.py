"""Who may join: a new store needs a one-time token, which the catalog knows by its hash, once the cluster asks for tokens.

It does from the first admission on (`ckptfs nodes admit`); a cluster without any takes whoever reaches its catalog. A store that
is in the catalog has joined, and needs none; one that was removed never does again. Pure.
"""

import hashlib
import hmac
import secrets

from ckptfs.cache.catalog_format import JOINING_KEY, Store, StoreState, admission_key, store_key, unpack
from ckptfs.cache.catalog_kv import Delete, KeyValue, Put, Unchanged
from ckptfs.cache.catalog_records import Plan
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import NodeId, StoreId

TOKENS_ONLY = b"token"
HASH_SIZE = 32


class NotAdmitted(StoreError):
    """The store is new here, and its node has not shown the token it was given."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(
            f"the node {node} is not admitted to this cluster: its store is new there, and the token in tls.token is not the one"
            " that was admitted for it, or was used. `ckptfs nodes add` gives out another one, `ckptfs nodes admit` admits it;"
            " nothing was changed"
        )


class StoreRemoved(StoreError):
    """The store was taken out of the cluster for good: what its node saved would be protected nowhere, nor read by others."""

    def __init__(self, store: StoreId, node: NodeId) -> None:
        super().__init__(
            f"the store {store.hex()} of {node} was removed from the cluster (ckptfs nodes remove): nothing in it was"
            " changed; start this node with a new store directory"
        )


def new_token() -> str:
    """128 random bits, for one store to join with."""
    return secrets.token_hex(16)


def hash_of(token: str) -> bytes:
    """What the catalog knows of it."""
    return hashlib.sha256(token.encode()).digest()


async def admit(kv: KeyValue, node: NodeId, token_hash: bytes) -> None:
    """Let one new store of the node join, with the token of this hash; an older one is void. From now on none joins without.

    Raises `ValueError` for what can't be a hash.
    """
    if len(token_hash) != HASH_SIZE:
        raise ValueError(f"a token's hash has {HASH_SIZE} bytes, this one {len(token_hash)}")
    await kv.transact([], [Put(admission_key(node), token_hash), Put(JOINING_KEY, TOKENS_ONLY)])


async def joining(kv: KeyValue, node: NodeId, token: str) -> Plan:
    """The part of a transaction in which a new store of the node joins; the token is used up by it. Raises `NotAdmitted`."""
    asks = await kv.get(JOINING_KEY)
    if asks is None:
        return Plan([Unchanged(JOINING_KEY, 0)], [])
    admitted = await kv.get(admission_key(node))
    if admitted is None or not token or not hmac.compare_digest(admitted.value, hash_of(token)):
        raise NotAdmitted(node)
    return Plan([Unchanged(admission_key(node), admitted.mod_revision)], [Delete(admission_key(node))])


async def require_admitted(kv: KeyValue, store: StoreId, node: NodeId, token: str) -> None:
    """Raise `NotAdmitted` unless the store is in the catalog, or could join now, and `StoreRemoved` if it was removed."""
    if not await _has_joined(kv, store):
        await joining(kv, node, token)


async def require_not_removed(kv: KeyValue, store: StoreId) -> None:
    """Raise `StoreRemoved` if it was."""
    await _has_joined(kv, store)


async def _has_joined(kv: KeyValue, store: StoreId) -> bool:
    entry = await kv.get(store_key(store))
    if entry is None:
        return False
    record = unpack(Store, entry.value)
    if record.state is StoreState.REMOVED:
        raise StoreRemoved(store, record.node)
    return True
