"""The loop that protects what is local: oldest first, small files in batches, several versions at a time.

What waits stands in `mount.db`, so nothing has to be remembered here: a restarted replicator finds all of it again, and
the shards that holders have so far are gone on with. A version is tried again until it is protected or gone, at growing
intervals; a change among the live stores ends the waiting. A node that is alone tries nothing: it looks for others.

States of a waiting version, as this loop sees it: due -> in progress -> protected (told to the mount), gone (replaced or
deleted; the mount knows), or failed (due again later).
"""

import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.errors import CacheError, DamagedRecord
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.cache.mount_db import WaitingVersion
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.replication.errors import NotEnoughDomains, ReplicationError
from ckptfs.replication.members import Members
from ckptfs.replication.protect import Protector, VersionRecords
from ckptfs.replication.small_copies import BATCH_COUNT_MAX
from ckptfs.replication.striped_attempt import AttemptVoid, ContentChanged, SegmentDamaged

logger = logging.getLogger(__name__)

LISTED_MAX = 1024
STRIPED_IN_PROGRESS_MAX = 4
"""More than one, so that the syncs of middling files overlap; the memory is bounded by the protector's buffers."""

PREFIXES_IN_PROGRESS_MAX = 1
"""Prefixes of what is being written come last: no more than so many are under way when one is begun."""

BATCHES_IN_PROGRESS_MAX = 2
BATCH_SIZE_MAX = 2 << 20
POLL_SECONDS = 5.0
ALONE_SECONDS = 1.0
"""How often a node that is alone looks for others. New files don't make it look: they cost its agent nothing."""

RETRY_SECONDS_MIN = 0.25
RETRY_SECONDS_MAX = 10.0
DAMAGED_RETRY_SECONDS = 60.0
"""A damaged segment is read again so seldom: only somebody who puts its bytes back, or a drive that recovers, can make it
right."""

AGAIN_SECONDS_MIN = 2.0
AGAIN_FACTOR = 10
"""A file written over and over is protected at most every max(2 s, 10 x the time its protection took last) (R16)."""

LOUD_ATTEMPTS = 3
REMEMBERED_MAX = 10_000


class LocalVersions(Protocol):
    """Where waiting versions are listed, oldest first. Blocking."""

    def waiting(self, limit: int) -> list[WaitingVersion]: ...


@dataclass(frozen=True)
class ReplicatorStatistics:
    """Counts are since the start; `segments_damaged` counts attempts that met one. `waiting_*` is what a loss of this node
    would lose now of what is local (as far as listed); `short_of` says why the full code can't be had, or is empty;
    `last_error` that of the newest failed attempt; `stuck_count` how many (with right segments) failed `stuck_attempts` times or
    more, `stuck_error` why one of them did last."""

    versions_protected: int
    bytes_protected: int
    attempts_failed: int
    attempts_void: int
    segments_damaged: int
    unexpected_errors: int
    in_progress: int
    waiting_count: int
    waiting_bytes: int
    oldest_waiting_ns: int | None
    failures_by_store: dict[str, int]
    short_of: str
    last_error: str
    stuck_count: int = 0
    stuck_attempts: int = 0
    stuck_error: str = ""


@dataclass
class _Trouble:
    attempts: int = 0
    error: str = ""
    not_before_seconds: float = 0.0

    @property
    def is_stuck(self) -> bool:
        return bool(self.error) and self.attempts >= LOUD_ATTEMPTS


class Replicator:
    """Use: `run` in a nursery. `on_protected` tells the mount and returns whether it was heard; it is called again if not."""

    def __init__(
        self,
        protector: Protector,
        versions: VersionRecords,
        members: Members,
        local_versions: LocalVersions,
        on_protected: Callable[[Sequence[Vid]], Awaitable[bool]],
        *,
        on_smaller: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_smaller` hears when something was protected with a smaller code than asked for."""
        self._on_smaller = on_smaller
        self._protector = protector
        self._versions = versions
        self._members = members
        self._local_versions = local_versions
        self._on_protected = on_protected
        self._limiter = trio.CapacityLimiter(1)
        self._wake = trio.Event()
        self._tell = trio.Event()
        self._to_tell: dict[Vid, None] = {}
        self._striped: set[Vid] = set()
        self._batched: set[Vid] = set()
        self._batches = 0
        self._trouble: dict[Vid, _Trouble] = {}
        self._damaged: set[Vid] = set()
        self._not_again_before: dict[InodeNumber, float] = {}
        self._waiting: list[WaitingVersion] = []
        self._preferred: dict[InodeNumber, int] = {}
        self._live = frozenset[bytes]()
        self._alone = False
        self._short_of = ""
        self._last_error = ""
        self._versions_protected = self._bytes_protected = 0
        self._attempts_failed = self._attempts_void = self._segments_damaged = self._unexpected_errors = 0

    def wake(self, *, urgent: bool = False) -> None:
        """Something may be waiting. `urgent`: somebody waits for it, so nothing is put off that isn't in trouble."""
        if urgent:
            self._not_again_before.clear()
        if urgent or not self._alone:
            self._wake.set()

    def prefer(self, inos: Sequence[InodeNumber]) -> None:
        """These files are protected first, in this order, until it is called again."""
        self._preferred = {ino: place for place, ino in enumerate(inos)}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. What is in progress then is left to the next start."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_mount)
            task_status.started()
            while True:
                self._wake = trio.Event()
                pause_seconds = POLL_SECONDS
                try:
                    pause_seconds = await self._start_what_is_due(nursery)
                except (CacheError, ReplicationError) as error:
                    self._note_error(error)
                    pause_seconds = 1.0
                with trio.move_on_after(pause_seconds):
                    await self._wake.wait()

    def is_idle(self) -> bool:
        """Whether nothing waits for protection, as far as known, but what can't get it."""
        return not (self._striped or self._batched or any(one.vid not in self._damaged for one in self._waiting))

    def waiting_vids(self) -> list[Vid]:
        """The versions that wait, as far as listed, oldest first."""
        return [one.vid for one in self._waiting]

    def statistics(self) -> ReplicatorStatistics:
        waiting = self._waiting
        stuck = [
            trouble
            for one in waiting
            if one.vid not in self._damaged and (trouble := self._trouble.get(one.vid)) and trouble.is_stuck
        ]
        return ReplicatorStatistics(
            self._versions_protected,
            self._bytes_protected,
            self._attempts_failed,
            self._attempts_void,
            self._segments_damaged,
            self._unexpected_errors,
            len(self._striped) + len(self._batched),
            len(waiting),
            sum(one.size for one in waiting),
            min((one.exposed_ns for one in waiting), default=None),
            {store.hex(): count for store, count in self._protector.failures_by_store.items()},
            self._short_of,
            self._last_error,
            len(stuck),
            LOUD_ATTEMPTS,
            stuck[0].error if stuck else "",
        )

    # ---- what to do next

    async def _start_what_is_due(self, nursery: trio.Nursery) -> float:
        """Start all that may start now; returns after how many seconds to look again, unless woken before."""
        waiting = await self._list()
        self._waiting = [one for one in waiting if not one.is_prefix]
        self._forget_others(waiting)
        if not waiting:
            self._alone = False  # the next file looks again
            return POLL_SECONDS
        if not await self._has_holders():
            return 1.0
        now = trio.current_time()
        pause_seconds = POLL_SECONDS
        if self._alone:
            waiting = [one for one in waiting if not one.size]  # what is empty is protected by the catalog
            pause_seconds = ALONE_SECONDS
        batch: list[tuple[WaitingVersion, Version]] = []
        for one in waiting:
            if one.vid in self._striped or one.vid in self._batched or one.vid in self._to_tell:
                continue
            # How often a prefix is protected is the mount's choice, and what is closed doesn't wait for it.
            not_before = 0.0 if one.is_prefix else self._not_again_before.get(one.ino, 0.0)
            due_at = max(self._due_at(one.vid), not_before)
            if due_at > now:
                pause_seconds = min(pause_seconds, due_at - now)
                continue
            version = await self._local(one)
            if version is None:
                continue
            # Another than the row's where the file that replaced that one was lost, and shows this again.
            one = one._replace(ino=version.ino)
            if self._protector.is_small(version):
                if self._batches < BATCHES_IN_PROGRESS_MAX:
                    if len(batch) >= BATCH_COUNT_MAX or sum(each.size for each, _ in batch) + one.size > BATCH_SIZE_MAX:
                        self._start_batch(nursery, batch)
                        batch = []
                    if self._batches < BATCHES_IN_PROGRESS_MAX:
                        batch.append((one, version))
            elif len(self._striped) < (PREFIXES_IN_PROGRESS_MAX if one.is_prefix else STRIPED_IN_PROGRESS_MAX):
                self._striped.add(one.vid)
                nursery.start_soon(self._protect_striped, one, version)
        if batch:
            self._start_batch(nursery, batch)
        return max(0.01, pause_seconds)

    async def _list(self) -> list[WaitingVersion]:
        """What waits, in the order in which it is begun, as far as it is looked at."""
        preferred = self._preferred
        limit = LISTED_MAX + len(preferred)
        waiting = await trio.to_thread.run_sync(self._local_versions.waiting, limit, limiter=self._limiter)
        if preferred:
            waiting.sort(key=lambda one: preferred.get(one.ino, len(preferred)))
        return waiting[:LISTED_MAX]

    async def _has_holders(self) -> bool:
        """Refresh who is live; False while it is worth waiting for stores that are just starting or restarting."""
        members = await self._members.refresh()
        live = frozenset(member.store for member in members if member.live)
        if live != self._live:
            self._live = live
            for trouble in self._trouble.values():
                trouble.not_before_seconds = 0.0
        self._alone = not self._protector.has_company(members)
        short = self._protector.shortfall(members)
        limits = self._protector.limits
        short_of = "" if short is None else f"{limits.data_shards}+{limits.parity_shards}: {short[0]}+{short[1]} at most now"
        if short_of != self._short_of:
            self._short_of = short_of
            logger.warning("code-shortfall live=%d %s", len(live), short_of or "none: the full code can be had again")
        return self._protector.settling_seconds(members) <= 0.0

    async def _local(self, one: WaitingVersion) -> Version | None:
        """The version's record if it is to be protected; tells the mount of one that is already."""
        try:
            version = await self._versions.version(one.vid)
        except DamagedRecord as damage:  # the others need not wait for it
            await self._failed([one], damage)
            return None
        if version is not None and version.state is VersionState.PROTECTED:
            self._protected([one.vid])
            return None
        if version is None or version.state is not VersionState.LOCAL:
            self._put_off(one.vid)  # gone, or the mount is just about to say so
            return None
        return version

    def _due_at(self, vid: Vid) -> float:
        trouble = self._trouble.get(vid)
        return trouble.not_before_seconds if trouble else 0.0

    def _forget_others(self, waiting: Sequence[WaitingVersion]) -> None:
        """Keep notes only about what still waits, and about files protected a short time ago."""
        if self._damaged:
            self._damaged &= {one.vid for one in waiting}
        if len(self._trouble) > 2 * len(waiting):
            listed = {one.vid for one in waiting}
            self._trouble = {vid: trouble for vid, trouble in self._trouble.items() if vid in listed}
        if len(self._not_again_before) > REMEMBERED_MAX:
            now = trio.current_time()
            self._not_again_before = {ino: time for ino, time in self._not_again_before.items() if time > now}

    def _start_batch(self, nursery: trio.Nursery, batch: list[tuple[WaitingVersion, Version]]) -> None:
        self._batches += 1
        self._batched.update(one.vid for one, _ in batch)
        nursery.start_soon(self._protect_batch, batch)

    # ---- attempts

    async def _protect_striped(self, one: WaitingVersion, version: Version) -> None:
        try:
            await self._attempt([one], lambda: self._striped_commits(one, version))
        finally:
            self._striped.discard(one.vid)
            self._wake.set()

    async def _striped_commits(self, one: WaitingVersion, version: Version) -> list[ProtectedCommit]:
        return [await self._protector.protect_striped(one, version)]

    async def _protect_batch(self, batch: list[tuple[WaitingVersion, Version]]) -> None:
        try:
            await self._attempt([one for one, _ in batch], lambda: self._batch_commits(batch))
        finally:
            self._batches -= 1
            self._batched.difference_update(one.vid for one, _ in batch)
            self._wake.set()

    async def _batch_commits(self, batch: list[tuple[WaitingVersion, Version]]) -> list[ProtectedCommit]:
        commits = [self._protector.protect_empty(one) for one, version in batch if version.size == 0]
        filled = [(one, version) for one, version in batch if version.size]
        if filled:
            try:
                copied, wrong = await self._protector.protect_copies(filled)
            except (ReplicationError, CacheError, OSError) as error:
                if not commits:
                    raise
                copied, wrong = [], {one.vid: error for one, _ in filled}
            commits += copied
            waiting = {one.vid: one for one, _ in filled}
            for vid, problem in wrong.items():
                await self._failed([waiting[vid]], problem)
        return commits

    async def _attempt(self, works: Sequence[WaitingVersion], run: Callable[[], Awaitable[list[ProtectedCommit]]]) -> None:
        """Run an attempt and commit what came of it. Nothing that goes wrong with one version may end the loop, which
        shares its process with the node's shard server: what nobody expected is logged whole and tried again later."""
        started = trio.current_time()
        try:
            commits = await run()
            committed = await self._protector.commit(commits)
        except (AttemptVoid, SegmentDamaged, ReplicationError, CacheError, OSError) as error:
            await self._failed(works, error)
            return
        except Exception as error:
            self._unexpected_errors += 1
            logger.exception("unexpected-error vids=%s", [one.vid.hex() for one in works[:4]])
            await self._failed(works, error)
            return
        by_vid = {one.vid: one for one in works}
        void = [by_vid[commit.vid] for commit in commits if commit.vid not in committed]
        if void:
            await self._failed(void, AttemptVoid("the version was replaced, or a holder left, before the commit"))
        now = trio.current_time()
        for vid in committed:
            self._bytes_protected += by_vid[vid].size
            if not by_vid[vid].is_prefix:
                self._not_again_before[by_vid[vid].ino] = now + max(AGAIN_SECONDS_MIN, AGAIN_FACTOR * (now - started))
            self._trouble.pop(vid, None)
            self._damaged.discard(vid)
        self._versions_protected += len(committed)
        if any(self._protector.is_smaller(commit) for commit in commits if commit.vid in committed):
            self._on_smaller()
        if committed:
            logger.info("protected versions=%d seconds=%.3f", len(committed), now - started)
            self._protected(list(committed))

    async def _give_up_changed(self, works: Sequence[WaitingVersion], error: Exception) -> None:
        """A prefix whose bytes have changed is none: the mount makes another one, later."""
        if isinstance(error, ContentChanged):
            for one in works:
                if one.is_prefix:
                    with contextlib.suppress(CacheError):  # it is tried again, and found changed again
                        await self._versions.give_up_prefix(one.ino, one.vid)

    async def _failed(self, works: Sequence[WaitingVersion], error: Exception) -> None:
        await self._give_up_changed(works, error)
        if isinstance(error, AttemptVoid):
            self._attempts_void += 1
        else:
            self._attempts_failed += 1
        delay_seconds_min = 0.0
        if isinstance(error, SegmentDamaged):
            self._segments_damaged += 1
            delay_seconds_min = DAMAGED_RETRY_SECONDS
            try:
                await self._protector.mark_damaged(works[0])
                self._damaged.add(works[0].vid)
            except CacheError as trouble:
                self._note_error(trouble)  # at the next attempt, then
                delay_seconds_min = 0.0
        attempts = max([self._put_off(one.vid, delay_seconds_min) for one in works], default=0)
        if not isinstance(error, AttemptVoid):
            for one in works:
                self._trouble[one.vid].error = str(error)
        self._note_error(error)
        loud = isinstance(error, SegmentDamaged) or (attempts >= LOUD_ATTEMPTS and not isinstance(error, AttemptVoid))
        logger.log(
            logging.WARNING if loud else logging.INFO,
            "not-protected vid=%s and=%d attempt=%d error=%s: %s",
            works[0].vid.hex() if works else "-",
            max(0, len(works) - 1),
            attempts,
            type(error).__name__,
            error,
        )

    def _put_off(self, vid: Vid, delay_seconds_min: float = 0.0) -> int:
        trouble = self._trouble.setdefault(vid, _Trouble())
        delay = delay_seconds_min or min(RETRY_SECONDS_MAX, RETRY_SECONDS_MIN * 2.0 ** min(trouble.attempts, 10))
        trouble.not_before_seconds = trio.current_time() + delay * (0.75 + random.random() / 2)
        trouble.attempts += 1
        return trouble.attempts

    def _note_error(self, error: Exception) -> None:
        if not isinstance(error, AttemptVoid):
            self._last_error = f"{type(error).__name__}: {error}"
        if isinstance(error, CacheError | NotEnoughDomains):
            logger.info("protection-waits error=%s", error)

    # ---- telling the mount

    def _protected(self, vids: Sequence[Vid]) -> None:
        self._to_tell.update(dict.fromkeys(vids))
        self._tell.set()

    async def _tell_mount(self) -> None:
        """Tell until heard. A version stays in `mount.db` until then, and is not tried again while it is to be told."""
        while True:
            await self._tell.wait()
            self._tell = trio.Event()
            vids = list(self._to_tell)
            if vids and await self._on_protected(vids):
                for vid in vids:
                    self._to_tell.pop(vid, None)
                self._wake.set()
            elif vids:
                await trio.sleep(1.0)
                self._tell.set()
