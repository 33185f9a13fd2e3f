"""The copy of a SQLite catalog that each agent keeps in its own store: what is left of names when the catalog is gone (R20).

An archive (`cache.catalog_archive`), written anew every ten minutes if the catalog has changed, and at a clean stop. Where the
catalog is on etcd, the node's replica is that.
"""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import trio

from ckptfs.cache.catalog_archive import write_archive
from ckptfs.cache.catalog_snapshot import of_catalog_file
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CacheError
from ckptfs.replication.quiet_threads import QuietThreads

log = logging.getLogger(__name__)

COPY_SECONDS = 600.0
PAUSE_FACTOR = 100
"""Copying takes at most a hundredth of the time."""

AT_END_SECONDS_MAX = 5.0
"""A catalog whose last copy took longer isn't copied while the node's end is waited for."""


@dataclass
class CatalogCopyStatistics:
    """`revision` is the copy's, 0 before the first one of this process; `error` why the newest attempt failed, or empty."""

    revision: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class CatalogCopy:
    """Keeps one store's copy. `run` in the agent."""

    def __init__(self, kv: SqliteCatalog, path: Path, threads: QuietThreads, *, every_seconds: float = COPY_SECONDS) -> None:
        self.statistics = CatalogCopyStatistics()
        self._kv = kv
        self._path = path
        self._threads = threads
        self._every_seconds = every_seconds

    async def run(self) -> None:
        """Copy again and again. The first time at once, unless another process has lately."""
        await trio.sleep(self._every_seconds - min(self._age_seconds(), self._every_seconds))
        while True:
            await self.copy()
            await trio.sleep(max(self._every_seconds, PAUSE_FACTOR * self.statistics.seconds))

    async def copy_at_end(self) -> None:
        """Once more, now that nothing changes any more, if that is soon done."""
        if self.statistics.seconds <= AT_END_SECONDS_MAX:
            await self.copy()

    async def copy(self) -> bool:
        """Whether a newer copy lies there now. Never raises for what is wrong with catalog or store: the older copy stays."""
        statistics = self.statistics
        began = time.monotonic()
        try:
            if statistics.revision and await self._kv.revision() == statistics.revision:
                return False
            statistics.revision, statistics.size_bytes = await self._threads.run(self._write)
        except (CacheError, OSError, ValueError) as error:
            statistics.error = str(error)
            log.warning("catalog_not_copied path=%s error=%s", self._path, error)
            return False
        finally:
            statistics.seconds = time.monotonic() - began
        statistics.error = ""
        log.info("catalog_copied revision=%d bytes=%d", statistics.revision, statistics.size_bytes)
        return True

    def _write(self) -> tuple[int, int]:
        with of_catalog_file(Path(self._kv.path)) as snapshot:
            return snapshot.header.revision, write_archive(self._path, *snapshot)

    def _age_seconds(self) -> float:
        try:
            return max(0.0, time.time() - os.stat(self._path).st_mtime)
        except OSError:
            return float("inf")
