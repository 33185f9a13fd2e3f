"""Removing what this store holds and nobody needs (R9): shards, partial shards and copies whose version the catalog doesn't
have, or for which it names other holders.

A version's key exists before its first shard is sent, and its id is never used again. So what has no key when it is looked up
has no use, then and later. A shard that the catalog doesn't name may be one that is about to be named: a repair puts it first
and commits then. It goes only when it was found unnamed again and again for `UNNAMED_SECONDS`, far longer than a repair may
take from the one to the other; counted anew where it was put again, as by a repair that comes back to a store which had it.

A shard whose footer can't be read is no use to anybody, and doesn't say of which time it is. Where its version has no key, or
other holders, it goes after `UNNAMED_SECONDS` too, and stays where the catalog was recovered.

All of this stands on the catalog having every version it ever had. One that was replaced, or restored to an earlier state,
hasn't: then nothing is removed, ever, before an operator has looked. One that was recovered says which time it doesn't know: what
is of that time stays.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio

from ckptfs.cache.catalog_format import (
    RECOVERED_KEY,
    Recovered,
    ShardLayout,
    Version,
    VersionState,
    unpack,
)
from ckptfs.cache.errors import DamagedRecord, StoreError
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.errors import PeerRefused, ShardDamaged, ShardNotFound
from ckptfs.replication.protect import DurableCatalog
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Some = TypeVar("Some")
Key = tuple[Vid, int, int]
"""A shard by its index, or a copy (-1), as it was put at that time (wall, in nanoseconds)."""

UNNAMED_SECONDS = 24 * 3600.0
PAGE_COUNT = 500
FACT = "catalog"
WENT_BACK = "went back"
"""Kept, for its revisions will pass those of the catalog that was before it. Empty: that was settled by a recovery."""
RECOVERED = "recovered"
"""The id of the catalog's newest recovery that is known here."""


class FoundVersions(Protocol):
    """What is needed of `cache.versions.Versions`."""

    async def version(self, vid: Vid) -> Version | None: ...


@dataclass
class SweepStatistics:
    """What was removed since the start; `refused` says why nothing is removed, or is empty. `kept_of_unknown_time`: shards and
    copies, as of the last sweep, that may be of files a recovered catalog doesn't know; `kept_damaged`: shards nobody needs whose
    footer can't be read."""

    shards_removed: int = 0
    partials_removed: int = 0
    copies_removed: int = 0
    kept_of_unknown_time: int = 0
    kept_damaged: int = 0
    refused: str = ""


class ShardSweep:
    """Sweeps one store. `sweep` is called now and then, one call at a time; `cluster` is the id in the catalog's settings."""

    def __init__(
        self,
        kv: DurableCatalog,
        versions: FoundVersions,
        shards: ShardStore,
        copies: SmallCopies,
        index: AgentDatabase,
        own_store: StoreId,
        cluster: bytes,
        *,
        unnamed_seconds: float = UNNAMED_SECONDS,
    ) -> None:
        self.statistics = SweepStatistics()
        self._kv = kv
        self._versions = versions
        self._shards = shards
        self._copies = copies
        self._index = index
        self._own_store = own_store
        self._cluster = cluster
        self._unnamed_seconds = unnamed_seconds
        self._recovered: Recovered | None = None
        self._kept = 0
        self._unnamed_since: dict[Key, float] = {}
        self._damaged_since: dict[tuple[Vid, int], float] = {}
        self._limiter = trio.CapacityLimiter(1)
        self._knowing = trio.Lock()

    async def sweep(self) -> None:
        """Look at everything once. Raises `CacheError`, also where the store's databases can't be read."""
        try:
            await self._sweep()
        except sqlite3.Error as error:
            raise StoreError(f"the store's databases can't be used: {error}") from None

    async def _sweep(self) -> None:
        revision = await self._known_catalog()
        if revision is None:
            return
        self._kept = 0
        damaged: set[tuple[Vid, int]] = set()
        still_unnamed: set[Key] = set()
        after: tuple[bytes, int] = (b"", -1)
        while rows := await self._in_thread(self._shards.list, after, PAGE_COUNT):
            after = (rows[-1].vid, rows[-1].index)
            keys = [(row.vid, row.index, row.stored_at_ns) for row in rows]
            gone = [key for key in keys if not await self._is_wanted(key, still_unnamed)]
            if self._recovered is not None:
                revisions = {key: await self._in_thread(self._revision_of, *key[:2]) for key in gone}
                gone = [key for key in gone if not await self._is_unknown(key[0], revisions[key])]
            now = trio.current_time()
            self.statistics.shards_removed += await self._remove(gone, partial(self._remove_shards, revision, now, damaged))
        self._damaged_since = {key: since for key, since in self._damaged_since.items() if key in damaged}
        self.statistics.kept_damaged = len(damaged)
        for vid, index in await self._in_thread(self._shards.partials):
            if not await self._is_known(vid):
                self.statistics.partials_removed += await self._remove([(vid, index)], self._remove_partials)
        last = b""
        while copies := await self._in_thread(self._copies.list, last, PAGE_COUNT):
            last = copies[-1].vid
            old = [copy for copy in copies if copy.revision <= revision]
            unwanted = [
                key
                for copy in old
                if not await self._is_wanted(key := (copy.vid, -1, copy.stored_at_ns), still_unnamed)
                and not await self._is_unknown(copy.vid, copy.revision)
            ]
            self.statistics.copies_removed += await self._remove(unwanted, self._remove_copies)
        self.statistics.kept_of_unknown_time = self._kept
        self._unnamed_since = {key: since for key, since in self._unnamed_since.items() if key in still_unnamed}

    async def knows_catalog(self) -> bool:
        """Whether the catalog is the one this store has always known. If not, nothing is removed, and nothing moved (R9). Raises
        `CacheError`."""
        try:
            return await self._known_catalog() is not None
        except sqlite3.Error as error:
            raise StoreError(f"the store's databases can't be used: {error}") from None

    async def named_count(self) -> int:
        """How many of the shards and copies held here the catalog names. Raises `CacheError`."""
        count = 0
        after: tuple[bytes, int] = (b"", -1)
        while rows := await self._in_thread(self._shards.list, after, PAGE_COUNT):
            after = (rows[-1].vid, rows[-1].index)
            for row in rows:
                count += await self._is_in_use(row.vid, row.index)
        last = b""
        while copies := await self._in_thread(self._copies.list, last, PAGE_COUNT):
            last = copies[-1].vid
            for copy in copies:
                count += await self._is_in_use(copy.vid, -1)
        return count

    async def _is_known(self, vid: Vid) -> bool:
        """Whether the catalog has a record of the version, be it a damaged one."""
        try:
            return await self._versions.version(vid) is not None
        except DamagedRecord:
            return True

    async def _is_in_use(self, vid: Vid, index: int) -> bool:
        """Whether the catalog names it here; one whose record is damaged counts."""
        await trio.lowlevel.checkpoint()
        try:
            version = await self._versions.version(vid)
        except DamagedRecord:
            return True
        return version is not None and version.state is VersionState.PROTECTED and self._is_named(version, index)

    async def _known_catalog(self) -> int | None:
        """The catalog's revision, if it is the one this store has always known, and has not gone back."""
        async with self._knowing:  # else one that was read earlier may be compared with what was read and noted later
            return await self._compare_catalog()

    async def _compare_catalog(self) -> int | None:
        revision = await self._kv.revision()
        await self._kv.make_durable()  # so that no power cut can make it less
        await self._note_recovery()
        known = await self._in_thread(self._index.fact, FACT)
        went_back = await self._in_thread(self._index.fact, WENT_BACK)
        if went_back:
            self.statistics.refused = went_back.decode()
        elif known is not None:
            cluster, _, newest = known.partition(b" ")
            if cluster != self._cluster.hex().encode():
                self.statistics.refused = "the catalog is another cluster's than the one this store's shards belong to"
            elif revision < int(newest):
                self.statistics.refused = f"the catalog went back from revision {int(newest)} to {revision}: it was restored"
                with contextlib.suppress(sqlite3.OperationalError):
                    await self._in_thread(self._index.set_fact, WENT_BACK, self.statistics.refused.encode())
        if self.statistics.refused:
            logger.error(
                "nothing-removed %s; shards may be all that is left of files it doesn't know. Once that is settled, stop the "
                "node and delete its agent.db, and unneeded shards are removed again",
                self.statistics.refused,
            )
            return None
        with contextlib.suppress(sqlite3.OperationalError):  # a full drive has room for it again when what nobody needs is gone
            await self._in_thread(self._index.set_fact, FACT, b"%b %d" % (self._cluster.hex().encode(), revision))
        return revision

    async def _note_recovery(self) -> None:
        """A recovery is what an operator does about a catalog that went back."""
        entry = await self._kv.get(RECOVERED_KEY)
        if entry is None:
            return
        self._recovered = unpack(Recovered, entry.value)
        newest = self._recovered.recoveries[-1]
        if await self._in_thread(self._index.fact, RECOVERED) != newest.id:
            logger.warning("catalog-recovered id=%s known_to=%d", newest.id.hex(), newest.known_to)
            with contextlib.suppress(sqlite3.OperationalError):  # full: the next time
                await self._in_thread(self._index.set_fact, WENT_BACK, b"")
                await self._in_thread(self._index.set_fact, RECOVERED, newest.id)
            self.statistics.refused = ""

    async def _is_unknown(self, vid: Vid, revision: int) -> bool:
        """Whether it is of a time the catalog doesn't know, and of no version it knows."""
        if self._recovered is None or not self._recovered.is_unknown_time(revision):
            return False
        if await self._is_known(vid):
            return False
        self._kept += 1
        return True

    def _revision_of(self, vid: Vid, index: int) -> int:
        """As its footer says; 0 if it can't be read, which `_remove_shards` looks at too."""
        try:
            with self._shards.open(vid, index) as reader:
                return reader.footer.revision
        except (ShardNotFound, ShardDamaged, PeerRefused):
            return 0

    async def _is_wanted(self, key: Key, still_unnamed: set[Key]) -> bool:
        """Whether it must stay."""
        vid, index, _ = key
        await trio.lowlevel.checkpoint()
        try:
            version = await self._versions.version(vid)
        except DamagedRecord:
            return True
        if version is None:
            return False
        if version.state is not VersionState.PROTECTED or self._is_named(version, index):
            return True
        still_unnamed.add(key)
        now = trio.current_time()
        return now - self._unnamed_since.setdefault(key, now) < self._unnamed_seconds

    def _is_named(self, version: Version, index: int) -> bool:
        if version.layout is ShardLayout.COPIES:
            return index < 0 and any(shard.store == self._own_store for shard in version.shards)
        return 0 <= index < len(version.shards) and version.shards[index].store == self._own_store

    async def _remove(self, keys: list[Some], remove: Callable[[list[Some]], int]) -> int:
        if not keys:
            return 0
        await self._kv.make_durable()  # the catalog's fact first (R22)
        return await self._in_thread(remove, keys)

    def _remove_shards(self, revision: int, now: float, damaged: set[tuple[Vid, int]], keys: Iterable[Key]) -> int:
        """Those damaged ones that stay are added to `damaged`."""
        removed = 0
        for vid, index, stored_at_ns in keys:
            try:
                with self._shards.open(vid, index) as reader:
                    if reader.footer.revision > revision:
                        continue  # the catalog has lost what it knew when this was sent
            except ShardNotFound:
                pass
            except PeerRefused as error:  # it can't be looked at now
                logger.warning("unneeded-shard-kept vid=%s index=%d error=%s", vid.hex(), index, error)
                continue
            except ShardDamaged as error:
                if not self._is_long_damaged(vid, index, now, error):
                    damaged.add((vid, index))
                    continue
            try:
                removed += self._shards.delete(vid, index, stored_at_ns)
            except OSError as error:
                damaged.add((vid, index))
                logger.warning("unneeded-shard-kept vid=%s index=%d error=%s", vid.hex(), index, error)
        return removed

    def _is_long_damaged(self, vid: Vid, index: int, now: float, error: ShardDamaged) -> bool:
        """Whether an unneeded shard that can't be read may go."""
        is_new = (vid, index) not in self._damaged_since
        overdue = self._recovered is None and now - self._damaged_since.setdefault((vid, index), now) >= self._unnamed_seconds
        if is_new or overdue:
            logger.warning(
                "unneeded-shard-%s vid=%s index=%d error=%s: look at this drive", "removed" if overdue else "kept",
                vid.hex(), index, error,
            )  # fmt: skip
        return overdue

    def _remove_partials(self, keys: Iterable[tuple[Vid, int]]) -> int:
        return sum(self._shards.delete_partial(vid, index) for vid, index in keys)

    def _remove_copies(self, keys: list[Key]) -> int:
        try:
            return self._copies.delete([(vid, stored_at_ns) for vid, _, stored_at_ns in keys])
        except sqlite3.OperationalError as error:
            logger.info("copies-not-removed count=%d error=%s", len(keys), error)
            return 0

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._limiter)
