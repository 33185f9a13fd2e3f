"""Protecting again, with the code asked for, what had to do with a smaller one while few nodes were there (R17).

The one protected longest ago first, one at a time, at idle priority, and only while nothing waits that isn't protected at all.
Each version is raised by one node: its home, or while that is away one of its holders. The new shards are put beside the old
ones, which stay named, and read, until the transaction that names the new ones; so there is never less than before.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Shard, ShardLayout, StoreState, Version
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import StoreId, Vid
from ckptfs.cache.segments import has_no_writer
from ckptfs.cache.version_reshape import Code, ReshapedCommit, code_of, commit_reshaped, with_smaller_code
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.members import Members
from ckptfs.replication.placement import code_for
from ckptfs.replication.protect import Protector, SegmentFiles, StripedSource, VersionRecords
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.shard_sweep import UNNAMED_SECONDS
from ckptfs.replication.striped_attempt import AttemptVoid, ContentChanged
from ckptfs.replication.stripes import Geometry

logger = logging.getLogger(__name__)

ATTEMPT_SECONDS_MAX = UNNAMED_SECONDS / 2
"""From the first byte sent to the commit, or there is none: holders sweep what is complete and unnamed for twice that time."""


LISTED_MAX = 1000

PAUSE_SECONDS_MAX = 600.0
"""How long it waits at most, after something could not be raised (for want of space, say), before all versions are walked
again."""


class Contents(Protocol):
    """What is needed of `restore.Restorer`."""

    async def fetch_whole(self, vid: Vid, version: Version) -> CopyPlace: ...


class Footers(Protocol):
    """What is needed of `holders.Holders`."""

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter: ...


@dataclass
class RaiserStatistics:
    """`raised` since the start; `left` are those this node still has to raise, as far as
    listed by the last walk; `last_error` why not."""

    raised: int = 0
    left: int = 0
    last_error: str = ""


class CodeRaiser:
    """Use: `run` in a nursery. `is_idle` says whether nothing waits for protection. It looks every `look_seconds`, and begins
    when the live stores have been the same for `unchanged_seconds`, so that nodes that come back one by one are waited for."""

    def __init__(
        self,
        kv: KeyValue,
        protector: Protector,
        versions: VersionRecords,
        members: Members,
        footers: Footers,
        segments: SegmentFiles,
        contents: Contents,
        is_idle: Callable[[], bool],
        *,
        look_seconds: float,
        unchanged_seconds: float,
    ) -> None:
        self.statistics = RaiserStatistics()
        self._kv = kv
        self._protector = protector
        self._versions = versions
        self._members = members
        self._footers = footers
        self._segments = segments
        self._contents = contents
        self._is_idle = is_idle
        self._look_seconds = look_seconds
        self._unchanged_seconds = unchanged_seconds
        self._done_with: tuple[Code, frozenset[StoreId]] | None = None
        self._not_before = 0.0
        self._pause_seconds = look_seconds

    def look_again(self) -> None:
        """A version was protected with a smaller code than asked for, or somebody waits."""
        self._done_with, self._not_before, self._pause_seconds = None, 0.0, self._look_seconds

    async def run(self) -> None:
        while True:
            await trio.sleep(self._look_seconds)
            try:
                await self._look()
            except (CacheError, ReplicationError, OSError) as error:
                self.statistics.last_error = f"{type(error).__name__}: {error}"
                logger.info("raising-put-off error=%s", self.statistics.last_error)

    async def _look(self) -> None:
        members = await self._members.refresh()
        live = frozenset(member.store for member in members if member.live and member.state is StoreState.IN)
        domains = {member.domain for member in members if member.store in live}
        limits = self._protector.limits
        code = Code(*code_for(limits.data_shards, limits.parity_shards, len(domains)))
        if self._members.seconds_unchanged() < self._unchanged_seconds:
            self._not_before, self._pause_seconds = 0.0, self._look_seconds
            return
        if self._done_with == (code, live) or trio.current_time() < self._not_before:
            return
        after_revision = left = 0
        while smaller := await with_smaller_code(
            self._kv, code, LISTED_MAX, after_revision=after_revision, is_wanted=self._is_ours
        ):
            self.statistics.left = left + len(smaller)
            for one in smaller:
                if not self._is_idle():
                    return
                await self._raise(one.vid, one.version)
            after_revision = smaller[-1].protected_revision
            left = self.statistics.left
        self.statistics.left = left
        if left:
            self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
            self._not_before = trio.current_time() + self._pause_seconds
        else:
            self._done_with = code, live

    def _is_ours(self, version: Version) -> bool:
        """Whether this node is to raise it: the home, or the first holder that answers while the home doesn't."""
        candidates = [version.home, *(shard.store for shard in version.shards)]
        for store in candidates:
            member = self._members.member(store)
            if member is not None and member.live:
                return store == self._members.own_store
        return False

    async def _raise(self, vid: Vid, version: Version) -> None:
        try:
            if version.layout is ShardLayout.COPIES:
                done = await self._raise_copies(vid, version)
            else:
                done = await self._raise_striped(vid, version)
        except (AttemptVoid, ReplicationError, OSError) as error:  # it is tried again, after the others
            logger.info("not-raised vid=%s error=%s: %s", vid.hex(), type(error).__name__, error)
            self.statistics.last_error = str(error)
            return
        if done:
            self.statistics.raised += 1
            self.statistics.left -= 1

    # ---- striped

    async def _raise_striped(self, vid: Vid, version: Version) -> bool:
        started = trio.current_time()
        hint = await self._path_hint(vid, version)

        async def still_wanted() -> None:
            now = await self._versions.version(vid)
            if now is None or now.shards != version.shards:
                raise AttemptVoid("the version was replaced, or repaired, meanwhile")

        async def put(descriptor: int) -> tuple[Geometry, list[Shard]]:
            try:
                source = StripedSource(vid, version.ino, hint, version, descriptor)
                return await self._protector.put_striped(source, still_wanted, code_of(version))
            finally:
                os.close(descriptor)

        placed = None
        segment = self._open_segment(version)
        if segment is not None:
            try:
                placed = await put(segment)
            except ContentChanged:
                logger.warning("segment-damaged vid=%s: it does not hold the content, which is read from shards", vid.hex())
                await self._versions.mark_damaged(vid, version.segment, True)
        if placed is None:
            placed = await put((await self._contents.fetch_whole(vid, version)).open())
        geometry, shards = placed
        return await self._commit(vid, version, Code(geometry.data_shards, geometry.parity_shards), shards, started)

    def _open_segment(self, version: Version) -> int | None:
        """The own segment, if this is the home and nothing can write to it; else the content is read from its shards."""
        if version.home != self._members.own_store or version.segment == NO_SEGMENT or version.damaged:
            return None
        try:
            descriptor = self._segments.open_read(version.segment)
        except FileNotFoundError:
            return None
        if has_no_writer(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    async def _path_hint(self, vid: Vid, version: Version) -> bytes:
        for index, shard in enumerate(version.shards):
            try:
                return (await self._footers.footer(shard.store, vid, index)).path_hint
            except ReplicationError:
                continue
        return b""

    # ---- whole copies

    async def _raise_copies(self, vid: Vid, version: Version) -> bool:
        started = trio.current_time()
        place = await self._contents.fetch_whole(vid, version)

        def read() -> bytes:
            with os.fdopen(place.open(), "rb") as copy:
                return copy.read()

        content = await trio.to_thread.run_sync(read)
        shards = await self._protector.put_more_copies(vid, version, content)
        return await self._commit(vid, version, Code(1, len(shards) - 1), shards, started)

    # ---- common

    async def _commit(self, vid: Vid, version: Version, code: Code, shards: Sequence[Shard], started: float) -> bool:
        if trio.current_time() - started > ATTEMPT_SECONDS_MAX:
            raise AttemptVoid("it took so long that the first of the new shards may be swept")
        revisions = {}
        for shard in shards:
            member = self._members.member(shard.store)
            if member is None or member.state is not StoreState.IN:
                raise AttemptVoid(f"the holder {shard.store.hex()} left the cluster meanwhile")
            revisions[shard.store] = member.revision
        if not await commit_reshaped(self._kv, ReshapedCommit(vid, version.shards, code, list(shards), revisions)):
            raise AttemptVoid("the version was replaced, or a holder left, before the commit")
        await self._kv.make_durable()
        logger.info("raised vid=%s from=%d+%d to=%d+%d", vid.hex(), *code_of(version), *code)
        return True
