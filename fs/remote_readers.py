"""Programs on other nodes that have a segment of this store open whose file is gone: it stays until they close it.

A node that is away does not hold up space for ever: when it has not answered for `AWAY_SECONDS_MAX`, its programs count as dead.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable

import trio

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.ids import SegmentId, StoreId
from ckptfs.cache.segment_holds import holders_of, let_go

log = logging.getLogger(__name__)

AWAY_SECONDS_MAX = 600.0


async def nobody_knows() -> set[StoreId] | None:
    """For a node without an agent: every store counts as live."""
    return None


class RemoteReaders:
    """`live_stores` says which stores answer now, None if that can't be known."""

    def __init__(self, kv: KeyValue, live_stores: Callable[[], Awaitable[set[StoreId] | None]] = nobody_knows) -> None:
        self._kv = kv
        self._live_stores = live_stores
        self._away_since: dict[StoreId, float] = {}

    async def of(self, segments: Iterable[SegmentId]) -> set[SegmentId]:
        """Those of the segments that are still read. Raises `CatalogUnavailable`."""
        return set(await holders_of(self._kv, segments))

    async def forget_the_dead(self, segments: Iterable[SegmentId]) -> None:
        """Take out the holds of stores that have been away too long; to be called repeatedly. Raises `CatalogUnavailable`."""
        holders = await holders_of(self._kv, segments)
        live = await self._live_stores() if holders else None
        if live is None:
            self._away_since.clear()
            return
        now = trio.current_time()
        for store in {store for stores in holders.values() for store in stores}:
            if store in live:
                self._away_since.pop(store, None)
            elif now - self._away_since.setdefault(store, now) >= AWAY_SECONDS_MAX:
                left = [segment for segment, stores in holders.items() if store in stores]
                log.warning("reader_away store=%s segments=%d: what it had open is not kept any longer", store.hex(), len(left))
                await let_go(self._kv, left, store)
