"""Who may join: tokens that are used once, and that the catalog knows by their hash only; on every engine."""

import pytest

from ckptfs.cache.admission import NotAdmitted, StoreRemoved, admit, hash_of, new_token, require_admitted, require_not_removed
from ckptfs.cache.catalog_format import admission_key, store_key
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.store_registry import register_store, stores
from ckptfs.cache.store_removal import remove_node

FIRST, SECOND, THIRD = StoreId(b"1" * 16), StoreId(b"2" * 16), StoreId(b"3" * 16)
ONE, TWO = NodeId("one"), NodeId("two")


async def join(kv: KeyValue, store: StoreId, node: NodeId, token: str = "") -> None:
    await require_admitted(kv, store, node, token)
    await register_store(kv, store, node, "127.0.0.1:1", "/store", {}, token)


async def test_without_any_admission_whoever_reaches_the_catalog_joins(kv: KeyValue) -> None:
    await join(kv, FIRST, ONE)
    await join(kv, SECOND, TWO)


async def test_from_the_first_admission_on_a_token_is_needed_once(kv: KeyValue) -> None:
    await join(kv, FIRST, ONE)
    token = new_token()
    await admit(kv, TWO, hash_of(token))
    assert token.encode() not in b"".join(entry.value for entry in await kv.range(b""))
    for wrong in ("", new_token(), hash_of(token).hex()):
        with pytest.raises(NotAdmitted, match="`ckptfs nodes admit` admits it"):
            await join(kv, SECOND, TWO, wrong)
    with pytest.raises(NotAdmitted):
        await register_store(kv, THIRD, NodeId("three"), "127.0.0.1:1", "/store", {}, token)  # another node's
    assert list(await stores(kv)) == [FIRST]
    await join(kv, SECOND, TWO, token)
    assert await kv.get(admission_key(TWO)) is None
    with pytest.raises(NotAdmitted):
        await join(kv, THIRD, TWO, token)  # a wiped machine is a new store
    assert await kv.get(store_key(THIRD)) is None


async def test_who_has_joined_needs_none(kv: KeyValue) -> None:
    await join(kv, FIRST, ONE)
    await admit(kv, TWO, hash_of(new_token()))
    await join(kv, FIRST, ONE)


async def test_a_later_token_voids_the_one_before(kv: KeyValue) -> None:
    before, after = new_token(), new_token()
    await admit(kv, TWO, hash_of(before))
    await admit(kv, TWO, hash_of(after))
    with pytest.raises(NotAdmitted):
        await join(kv, SECOND, TWO, before)
    await join(kv, SECOND, TWO, after)


async def test_a_store_that_was_removed_does_not_join_again(kv: KeyValue) -> None:
    """Before its node has a mount: what is saved there would never be protected."""
    await join(kv, FIRST, ONE)
    await require_not_removed(kv, FIRST)
    await remove_node(kv, ONE, force=False)
    with pytest.raises(StoreRemoved, match="start this node with a new store directory"):
        await require_admitted(kv, FIRST, ONE, "")
    with pytest.raises(StoreRemoved):
        await require_not_removed(kv, FIRST)
    await require_not_removed(kv, SECOND)


async def test_what_is_no_hash_is_refused(kv: KeyValue) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        await admit(kv, TWO, b"token")
