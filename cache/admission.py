"""Who may join: a new store needs a one-time token, which the catalog knows by its hash, once the cluster asks for tokens.

It does from the first admission on (`ckptfs nodes admit`); a cluster without any takes whoever reaches its catalog. A store that
is in the catalog has joined, and needs none. Pure.
"""

import hashlib
import hmac
import secrets

from ckptfs.cache.catalog_format import JOINING_KEY, admission_key, store_key
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
    """Raise `NotAdmitted` unless the store is in the catalog, or could join now."""
    if await kv.get(store_key(store)) is None:
        await joining(kv, node, token)
