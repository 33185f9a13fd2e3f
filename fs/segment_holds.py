"""The segments of other nodes that programs here have open, which their homes are to keep until they close them; and the
protected versions that died while programs here have them open, whose shards are to stay so long.

Put into the catalog before the open is answered, taken out some time after the last close. What a killed process has left is
known from `mount.db`, or taken out when the next one begins.
"""

import logging
from collections.abc import Iterable

import trio

from ckptfs.cache import segment_holds
from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_records import find_version
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import SegmentId, StoreId, Vid

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


def held_as(vid: Vid) -> SegmentId:
    """What stands for a version's shards among the holds, where its segment counts for nothing."""
    return SegmentId(vid)


class SegmentHolds:
    """This node's holds. `run` takes out those that were let go."""

    def __init__(self, kv: KeyValue, store: StoreId) -> None:
        self._kv = kv
        self._store = store
        self._held: set[SegmentId] = set()
        self._leaving: set[SegmentId] = set()
        self._changing = trio.Lock()
        self._work = trio.Event()

    def needed(self, version: Version) -> SegmentId | None:
        """The segment that must be kept for readers of this version; None where shards or an own segment have its bytes."""
        only_there = version.state in (VersionState.OPEN, VersionState.LOCAL) and version.home != self._store
        return version.segment if only_there else None

    async def take(self, vid: Vid, version: Version) -> bool:
        """Have the version's segment kept, if need be. False if the version is gone meanwhile. Raises `CatalogUnavailable`."""
        segment = self.needed(version)
        if segment is None or segment in self._held:
            return True
        async with self._changing:
            if not await segment_holds.hold(self._kv, segment, self._store, vid):
                return False
            self._held.add(segment)
            return True

    async def take_dead(self, vid: Vid) -> SegmentId | None:
        """Have the shards of a protected version kept, if it has died; None if it hasn't. Raises `CatalogUnavailable`."""
        found = await find_version(self._kv, vid)
        if found is None or found[0].state is not VersionState.DEAD:
            return None
        held = held_as(vid)
        async with self._changing:
            if not await segment_holds.hold(self._kv, held, self._store, vid):
                return None
            self._held.add(held)
        return held

    def let_go(self, segment: SegmentId) -> None:
        """No program here has it open any more."""
        self._held.discard(segment)
        self._leaving.add(segment)
        self._work.set()

    async def begin(self, held: Iterable[SegmentId]) -> None:
        """Go on with those that programs still have open, and take out what else an earlier process held."""
        self._held.update(held)
        for segment in await segment_holds.held_by(self._kv, self._store):
            if segment not in self._held:
                self.let_go(segment)

    async def run(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            await self.drain()

    async def drain(self) -> None:
        """Take out what was let go so far."""
        while self._leaving:
            async with self._changing:
                leaving, self._leaving = self._leaving - self._held, set()
                try:
                    await segment_holds.let_go(self._kv, leaving, self._store)
                    continue
                except CatalogUnavailable as error:
                    log.info("holds_not_taken_out error=%s", error)
                    self._leaving |= leaving
            await trio.sleep(RETRY_SECONDS)
