"""What a reader found wrong is repaired: after the read, by the node that read, one version after the other."""

import logging
from collections.abc import Awaitable, Callable

import trio

from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import Vid
from ckptfs.replication.errors import ReplicationError

logger = logging.getLogger(__name__)

WAITING_MAX = 1000
AGAIN_SECONDS = 60.0
"""A version that could not be repaired is not tried again sooner, however often it is read."""


class ReadRepair:
    """`found` may be called by any reader; `run` in a nursery. `repair` verifies and repairs one version."""

    def __init__(self, repair: Callable[[Vid], Awaitable[None]]) -> None:
        self.tried = 0
        self._repair = repair
        self._waiting: dict[Vid, None] = {}
        self._not_before: dict[Vid, float] = {}
        self._wake = trio.Event()

    def found(self, vid: Vid) -> None:
        """A shard of this version was wrong, or not there."""
        if vid in self._waiting or len(self._waiting) >= WAITING_MAX or trio.current_time() < self._not_before.get(vid, 0.0):
            return
        self._waiting[vid] = None
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                vid = next(iter(self._waiting))
                self.tried += 1
                try:
                    await self._repair(vid)
                except (CacheError, ReplicationError, OSError) as error:
                    logger.info("read-repair-put-off vid=%s error=%s", vid.hex(), error)
                now = trio.current_time()
                self._not_before = {one: at for one, at in self._not_before.items() if at > now}
                if len(self._not_before) < WAITING_MAX:
                    self._not_before[vid] = now + AGAIN_SECONDS
                del self._waiting[vid]
