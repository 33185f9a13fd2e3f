"""Which segments programs on other nodes have open: a home keeps such a segment, whatever becomes of its file. Pure.

A key is put while the version that is read exists, in a transaction that compares that; the home looks for keys after the
transaction that ended the version. So one of the two sees the other.
"""

from collections.abc import Iterable

from ckptfs.cache.catalog_format import HOLD_PREFIX, hold_key, hold_of_key, hold_prefix, version_key
from ckptfs.cache.catalog_kv import OPERATIONS_MAX, Delete, KeyValue, Present, Put
from ckptfs.cache.ids import SegmentId, StoreId, Vid


async def hold(kv: KeyValue, segment: SegmentId, store: StoreId, vid: Vid) -> bool:
    """Programs on the store's node are about to read this version from its segment. False, and nothing is kept, if it is gone."""
    return (await kv.transact([Present(version_key(vid))], [Put(hold_key(segment, store), b"")])).succeeded


async def let_go(kv: KeyValue, segments: Iterable[SegmentId], store: StoreId) -> None:
    """No program on the store's node reads these any more."""
    keys = [hold_key(segment, store) for segment in segments]
    for start in range(0, len(keys), OPERATIONS_MAX):
        await kv.transact([], [Delete(key) for key in keys[start : start + OPERATIONS_MAX]])


async def holders_of(kv: KeyValue, segments: Iterable[SegmentId]) -> dict[SegmentId, list[StoreId]]:
    """Those of the segments that are held, and by which stores."""
    if not await kv.range(HOLD_PREFIX, limit=1):
        return {}
    holders = {segment: await kv.range(hold_prefix(segment)) for segment in segments}
    return {segment: [hold_of_key(entry.key)[1] for entry in entries] for segment, entries in holders.items() if entries}


async def held_by(kv: KeyValue, store: StoreId) -> list[SegmentId]:
    """The segments this store holds."""
    holds = [hold_of_key(entry.key) for entry in await kv.range(HOLD_PREFIX)]
    return [segment for segment, holder in holds if holder == store]
