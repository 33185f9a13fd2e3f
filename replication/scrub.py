"""Every shard this store should have is read and hashed again, slowly, in a pass that takes days and begins anew every week.

It walks over the catalog's versions, not over the store's files: so what is missing is found as well. What is wrong or missing is
made again out of the other shards, here. What is here and should not be is the sweep's business (`shard_sweep`). Where it
stands is noted in `agent.db`, so that a restart goes on there; the ids of versions are random, so the last one looked at also
says how much of the pass is done.
"""

import contextlib
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice

import msgspec
import trio

from ckptfs.cache.catalog_format import VERSION_PREFIX, ShardLayout, Version, VersionState, unpack, vid_of_key
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import ID_SIZE, Vid
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.errors import PeerRefused, ReplicationError, ShardDamaged, ShardNotFound
from ckptfs.replication.members import Members
from ckptfs.replication.pace import Pace
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.repair import Rebuilt, VersionReplaced
from ckptfs.replication.shard_reader import ShardReader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies

logger = logging.getLogger(__name__)

FACT = "scrub"
PAGE_COUNT = 200
READ_BYTES = 8 << 20
"""How much is read before the pace is asked."""

NOTED_SECONDS = 30.0
WAIT_SECONDS_MAX = 3600.0
BYTES_PER_SECOND_MIN = 1 << 20
SHARE_OF_PERIOD = 0.5
"""A pass is to take half the period at most, so that a store that is off for days still keeps it."""


class ScrubCounts(msgspec.Struct):
    """Shards that one pass looked at, and what became of those that were not right. `not_looked_at` could not be opened, for a
    reason that isn't theirs."""

    checked: int = 0
    wrong: int = 0
    missing: int = 0
    made_again: int = 0
    not_made_again: int = 0
    not_looked_at: int = 0


class ScrubState(msgspec.Struct):
    """What is noted. `after` is the last version looked at in the pass that began at `began_ns` (wall time), 0: none has.
    `counts` are of that pass, `last` of the one that was finished at `last_ended_ns`. `problem` and `not_looked_at` say why, for
    the newest shard that could not be made again, or looked at."""

    began_ns: int = 0
    after: bytes = b""
    counts: ScrubCounts = msgspec.field(default_factory=ScrubCounts)
    problem: str = ""
    not_looked_at: str = ""
    last_ended_ns: int = 0
    last: ScrubCounts = msgspec.field(default_factory=ScrubCounts)


@dataclass(frozen=True)
class ScrubStatistics:
    """The state; `progress` is how much of the pass under way is done, 0 to 1, None between two."""

    state: ScrubState
    progress: float | None


class Scrub:
    """Use: `run` in a nursery. `now_ns` is the wall clock; `period_seconds` 0: never; `limit` is shared with others who read.
    Making one reads the index."""

    def __init__(
        self,
        kv: KeyValue,
        members: Members,
        shards: ShardStore,
        copies: SmallCopies,
        index: AgentDatabase,
        rebuild: Callable[[Vid, Version, list[int]], Awaitable[Rebuilt]],
        threads: QuietThreads,
        now_ns: Callable[[], int],
        *,
        period_seconds: float,
        bytes_per_second_max: float,
        limit: Pace | None = None,
    ) -> None:
        self._limit = limit
        self._kv = kv
        self._members = members
        self._shards = shards
        self._copies = copies
        self._index = index
        self._rebuild = rebuild
        self._threads = threads
        self._now_ns = now_ns
        self._period_seconds = period_seconds
        self._bytes_per_second_max = bytes_per_second_max
        self._limiter = trio.CapacityLimiter(1)
        self._state = _noted_state(index)
        self._noted_at = 0.0
        self._one_at_a_time = trio.Lock()

    def statistics(self) -> ScrubStatistics:
        state = self._state
        progress = int.from_bytes(state.after[:8].ljust(8, b"\0"), "big") / 2**64 if state.began_ns else None
        return ScrubStatistics(msgspec.structs.replace(state, counts=msgspec.structs.replace(state.counts)), progress)

    async def run(self) -> None:
        while True:
            wait_seconds = self._wait_seconds()
            if wait_seconds > 0:
                await trio.sleep(min(wait_seconds, WAIT_SECONDS_MAX))
                continue
            try:
                await self.pass_over()
            except (CacheError, OSError, sqlite3.Error) as error:
                logger.info("scrub-put-off error=%s: %s", type(error).__name__, error)
                await trio.sleep(60.0)

    def _wait_seconds(self) -> float:
        """Until the next pass is due; one that is under way goes on."""
        state = self._state
        if not self._period_seconds:
            return WAIT_SECONDS_MAX
        if state.began_ns or not state.last_ended_ns:
            return 0.0
        return self._period_seconds - max(0.0, (self._now_ns() - state.last_ended_ns) / 1e9)

    async def pass_over(self) -> None:
        """Go on with the pass under way, or begin one, to its end. Raises `CacheError`, `sqlite3.Error`."""
        async with self._one_at_a_time:
            await self._pass_over()

    async def _pass_over(self) -> None:
        if not self._state.began_ns:
            self._state = msgspec.structs.replace(self._state, began_ns=self._now_ns(), counts=ScrubCounts())
        state, own = self._state, self._members.own_store
        pace = Pace(await self._rate(), within=self._limit)
        key = VERSION_PREFIX + state.after.hex().encode() if state.after else b""
        walk = scan(self._kv, VERSION_PREFIX, after=key, damaged=set(), page_count=PAGE_COUNT)
        async with aclosing(walk) as entries:
            async for entry in entries:
                version = unpack(Version, entry.value)
                if version.state is VersionState.PROTECTED and any(shard.store == own for shard in version.shards):
                    await self._look_at(vid_of_key(entry.key), pace)
                state.after = vid_of_key(entry.key)
                if trio.current_time() - self._noted_at >= NOTED_SECONDS:
                    await self._note()
        self._state = msgspec.structs.replace(
            state, began_ns=0, after=b"", counts=ScrubCounts(), last_ended_ns=self._now_ns(), last=state.counts
        )
        await self._note()
        counts = state.counts
        log = logger.warning if counts.wrong or counts.missing or counts.not_looked_at else logger.info
        log(
            "scrubbed checked=%d wrong=%d missing=%d made_again=%d not_made_again=%d not_looked_at=%d",
            counts.checked, counts.wrong, counts.missing, counts.made_again, counts.not_made_again, counts.not_looked_at,
        )  # fmt: skip

    async def _rate(self) -> float:
        """Bytes a second, so that a pass takes no longer than it may; no more than is allowed."""
        if not self._period_seconds:
            return self._bytes_per_second_max
        held = await trio.to_thread.run_sync(self._index.held, limiter=self._limiter)
        wanted = max(held.file_bytes / (SHARE_OF_PERIOD * self._period_seconds), BYTES_PER_SECOND_MIN)
        return min(wanted, self._bytes_per_second_max or wanted)

    # ---- one version

    async def _look_at(self, vid: Vid, pace: Pace) -> None:
        entry = await self._kv.get(VERSION_PREFIX + vid.hex().encode())  # as it is now: the page may be hours old
        if entry is None:
            return
        version = unpack(Version, entry.value)
        if version.state is not VersionState.PROTECTED:
            return
        for index, shard in enumerate(version.shards):
            if shard.store == self._members.own_store:
                self._state.counts.checked += 1
                try:
                    problem = await self._problem(vid, version, index, pace)
                except PeerRefused as refused:  # the next pass looks at it; others must not wait for that
                    self._state.counts.not_looked_at += 1
                    self._state.not_looked_at = refused.message
                    logger.warning("scrub-not-looked-at vid=%s index=%d: %s", vid.hex(), index, refused.message)
                    continue
                if problem is not None:
                    await self._make_again(vid, version, index, problem)

    async def _problem(self, vid: Vid, version: Version, index: int, pace: Pace) -> ReplicationError | None:
        """What is wrong with a shard or copy that should be here. Raises `PeerRefused` (busy) if it can't be opened now."""
        try:
            if version.layout is ShardLayout.COPIES:
                held, content = await self._threads.run(self._copies.get, vid)
                await pace.spend(len(content))
                right = held.root == version.root
            else:
                right = await self._is_right(vid, version, index, pace)
        except (ShardNotFound, ShardDamaged) as error:
            return error
        return None if right else ShardDamaged("it is not the shard that was acknowledged")

    async def _is_right(self, vid: Vid, version: Version, index: int, pace: Pace) -> bool:
        """Raises `ShardNotFound`, `ShardDamaged`, `PeerRefused` (busy)."""
        reader: ShardReader = await self._threads.run(self._shards.open, vid, index)
        with reader:
            cells = reader.check_cells()
            cell_size = max(1, reader.header.cell_size)
            count = max(1, READ_BYTES // cell_size)
            part: list[bool]
            while part := await self._threads.run(list, islice(cells, count)):
                if not all(part):
                    raise ShardDamaged("cells fail their hash")
                await pace.spend(len(part) * cell_size)
            return reader.footer.root == version.shards[index].root and reader.footer.content_root == version.root

    async def _make_again(self, vid: Vid, version: Version, index: int, problem: ReplicationError) -> None:
        state = self._state
        is_missing = isinstance(problem, ShardNotFound)
        state.counts.missing += is_missing
        state.counts.wrong += not is_missing
        logger.warning("scrub-found vid=%s index=%d ino=%d: %s", vid.hex(), index, version.ino, problem)
        try:
            await self._members.refresh()
            rebuilt = await self._rebuild(vid, version, [index])
            why = rebuilt.problems.get(index, "")
        except VersionReplaced:
            return
        except (ReplicationError, OSError) as error:
            why = str(error)
        if why:
            state.counts.not_made_again += 1
            state.problem = f"shard {index} of inode {version.ino}: {problem}; it could not be made again: {why}"
            logger.error("scrub-not-made-again vid=%s index=%d error=%s", vid.hex(), index, why)
        else:
            state.counts.made_again += 1

    # ---- what is remembered

    async def _note(self) -> None:
        self._noted_at = trio.current_time()
        with contextlib.suppress(sqlite3.OperationalError):  # full, or read-only: the pass goes on
            await trio.to_thread.run_sync(self._index.set_fact, FACT, msgspec.json.encode(self._state), limiter=self._limiter)


def _noted_state(index: AgentDatabase) -> ScrubState:
    """What an earlier process noted; a new one where there is nothing, or nothing that makes sense."""
    with contextlib.suppress(sqlite3.Error, msgspec.DecodeError):
        noted = index.fact(FACT)
        state = ScrubState() if noted is None else msgspec.json.decode(noted, type=ScrubState)
        if len(state.after) in (0, ID_SIZE):
            return state
    return ScrubState()


def scrub_problems(state: ScrubState) -> list[str]:
    """For an operator: what scrubbing found and could not make right."""
    problems = []
    if count := state.counts.not_made_again or state.last.not_made_again:
        problems.append(
            f"scrub found {count} shards here wrong or missing that could not be made again, the last one {state.problem}. "
            "`ckptfs verify --repair` tries it again and names the files; look at this node's drive"
        )
    if count := state.counts.not_looked_at or state.last.not_looked_at:
        problems.append(
            f"scrub could not look at {count} shards here: {state.not_looked_at}. They were left as they are, and the next pass "
            "looks at them; see to it that this node's user may read its store and has enough open files (LimitNOFILE)"
        )
    return problems
