"""The agent's parts put together: the shard server, the replicator, restore, verify and repair of one node.

Everything that differs between a process of its own and several agents in one test process is an argument, so this is
what both run.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from ckptfs.cache.catalog_format import Settings, StoreState, VersionState, store_key, unpack
from ckptfs.cache.catalog_format import Store as StoreRecord
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CacheError, CatalogUnavailable
from ckptfs.cache.ids import NodeId, StoreId, Vid
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import register_store, stores, stores_with_session
from ckptfs.cache.versions import Versions
from ckptfs.fs.catalog_copy import COPY_SECONDS, CatalogCopy
from ckptfs.fs.drain import Drain, NotClosed
from ckptfs.fs.node_session import end_left_sessions
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.code_raiser import CodeRaiser
from ckptfs.replication.codec import Codec
from ckptfs.replication.collector import Collector
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.holders import Holders, Keepers, Peers
from ckptfs.replication.kept_content import KeptContent, SwitchSegment
from ckptfs.replication.leadership import Leadership
from ckptfs.replication.local_copies import LocalCopies
from ckptfs.replication.members import Member, Members
from ckptfs.replication.mend import Mender
from ckptfs.replication.own_store import OwnStore
from ckptfs.replication.pace import Pace
from ckptfs.replication.peer_answers import AnswerCall
from ckptfs.replication.peer_server import PeerServer, no_mount
from ckptfs.replication.protect import ProtectionLimits, Protector
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.read_repair import ReadRepair
from ckptfs.replication.rebalance import Rebalancer
from ckptfs.replication.rebuild import Rebuilder
from ckptfs.replication.repair import Repairer
from ckptfs.replication.repair_pass import RUN_BYTES_MAX
from ckptfs.replication.replicator import LocalVersions, Replicator
from ckptfs.replication.restore import Restorer
from ckptfs.replication.scrub import Scrub
from ckptfs.replication.segment_scrub import SegmentScrub
from ckptfs.replication.shard_moves import ShardMover
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_sweep import ShardSweep
from ckptfs.replication.small_copies import SmallCopies
from ckptfs.replication.store_watch import REPAIR_AFTER_SECONDS, StoreWatch, store_problems
from ckptfs.replication.stripe_reader import StripeReader
from ckptfs.replication.transport import Transport
from ckptfs.replication.verify import Verifier

log = logging.getLogger(__name__)

MEMBERS_SECONDS = 2.0
HOUSEKEEPING_SECONDS = 600.0
SWEEP_PAUSE_FACTOR = 50
"""A sweep of the shards takes at most so small a part of the time, however much is held."""
RESERVE_SECONDS = 2.0
HURRY_SECONDS_MAX = 2.0
"""How long a node is tried that is to hurry; who waits for it asks again."""
CATALOG_RETRY_SECONDS = 0.5
VERIFY_BUFFER_BYTES = 16 << 20
SEGMENT_SCRUBS = 7
"""In the time in which each shard is read again once: of what is not protected there is no second copy."""
REBUILT_AT_ONCE = 4
"""Versions whose shards are moved at the same time: one is read while another is synced by its holders."""


@dataclass(frozen=True)
class AgentSettings:
    """What the operator chose for this node; sizes in bytes. `listen` is host:port, port 0 for the one used last, or any. Buffers
    are never too small for the stripes of the cluster."""

    listen: str = "127.0.0.1:0"
    labels: Mapping[str, str] | None = None
    small_file_size: int = 64 << 10
    buffer_bytes_max: int = 32 << 20
    restore_buffer_bytes_max: int = 24 << 20
    reserve_fraction: float = 0.05
    shortfall_seconds: float = 5.0
    raise_look_seconds: float = 5.0
    raise_unchanged_seconds: float = 30.0
    sweep_seconds: float = 120.0
    collect_seconds: float = 60.0
    grace_seconds: float = 600.0
    rebuild_look_seconds: float = 2.0
    repair_bytes_per_second_max: float = 256 << 20
    scrub_seconds: float = 7 * 86400.0
    repairs_reads: bool = True
    repair_after_seconds: float = REPAIR_AFTER_SECONDS
    join_token: str = ""
    catalog_copy_seconds: float = COPY_SECONDS


class NoMount:
    """In the place of what a mount does, for agents without one."""

    @staticmethod
    async def settle() -> None:
        return

    @staticmethod
    async def not_closed() -> NotClosed | None:
        return NotClosed(0, 0)


class Agent:
    """One node's agent. Make it in a trio task, `run` it, `close` it. Raises `StoreError` for databases that can't be used."""

    def __init__(
        self,
        store: StoreDirectory,
        kv: KeyValue,
        cluster: Settings,
        incarnation: int,
        codec: Codec,
        transport: Transport,
        local_versions: LocalVersions,
        on_protected: Callable[[Sequence[Vid]], Awaitable[bool]],
        switch_segment: SwitchSegment,
        now_ns: Callable[[], int],
        settings: AgentSettings | None = None,
        *,
        settle: Callable[[], Awaitable[None]] = NoMount.settle,
        not_closed: Callable[[], Awaitable[NotClosed | None]] = NoMount.not_closed,
        answer_call: AnswerCall = no_mount,
    ) -> None:
        """`settle` has the mount seal what is closed, without waiting whether it is opened again; `not_closed` asks it what isn't
        sealed yet; `answer_call` has it carry out what programs on other nodes do to files whose home is here."""
        settings = settings or AgentSettings()
        stripe_bytes = (cluster.data_shards + cluster.parity_shards) * cluster.cell_size
        self.store = store
        self.codec = codec
        self.cluster = cluster
        self.namespace = Namespace(kv, store.store_id, incarnation, now_ns)
        self.versions = Versions(kv, store.store_id, incarnation, now_ns)
        self.kv = kv
        self._settings = settings
        identity = PeerIdentity(cluster.cluster, store.store_id, store.node)
        segments = Segments(store.segments)
        with contextlib.ExitStack() as opened:
            index = self.index = AgentDatabase(store.agent_db)
            opened.callback(index.close)
            reserve_bytes = int(settings.reserve_fraction * _total_bytes(store))
            self.shard_store = ShardStore(store.shards, index, reserve_bytes=reserve_bytes)
            self.small_copies = SmallCopies(
                store.small_copies_db, expected=not index.made_anew, free_bytes=self.shard_store.free_bytes
            )
            opened.callback(self.small_copies.close)
            self._own = OwnStore(self.shard_store, self.small_copies, segments)
            opened.callback(self._own.close)
            self._threads = opened.enter_context(QuietThreads())
            scrub_threads = opened.enter_context(QuietThreads(1))  # of its own: idle input may wait for long
            self._opened = opened.pop_all()
        self._settle = settle
        self._hurried = trio.Event()
        self.peers = Peers(transport, identity)
        self.members = Members(
            store.store_id,
            partial(stores, kv),
            self.peers.ping,
            self.shard_store.free_bytes,
            domain_label=cluster.failure_domain,
            list_sessions=partial(stores_with_session, kv),
        )
        self.leadership = Leadership(kv, store.store_id, incarnation, self.members.seconds_away)
        self.holders = Holders(self.members, self._own, self.peers)
        limits = ProtectionLimits(
            cluster.data_shards,
            cluster.parity_shards,
            settings.small_file_size,
            max(settings.buffer_bytes_max, 2 * stripe_bytes),  # the file may have been written for another cluster
            settings.shortfall_seconds,
        )
        protector = Protector(limits, kv, self.versions, self.members, self.holders, segments, codec, self._threads)
        self.replicator = Replicator(
            protector,
            self.versions,
            self.members,
            local_versions,
            on_protected,
            on_smaller=lambda: self.raiser.look_again(),
        )
        self.drain = Drain(kv, self.replicator, local_versions, settle, not_closed, self._has_peers)
        self.read_repair = ReadRepair(self._repair_read)
        # Who reads for a program has what is wrong repaired; who verifies says what is wrong, and leaves it.
        self.reader = StripeReader(
            self.members, self.holders, codec, on_wrong=self.read_repair.found if settings.repairs_reads else lambda vid: None
        )
        reader = StripeReader(self.members, self.holders, codec)
        reader.counters = self.reader.counters
        self.copies = LocalCopies(store.copies, reserve_bytes=reserve_bytes)
        restore_bytes_max = max(settings.restore_buffer_bytes_max, 2 * stripe_bytes)
        self.restorer = Restorer(self.reader, self.holders, self.copies, buffer_bytes_max=restore_bytes_max)
        kept = KeptContent(store.store_id, self.versions, self.holders, self.restorer, switch_segment)
        self.server = PeerServer(
            self.shard_store,
            self.small_copies,
            segments,
            kept,
            identity,
            transport,
            on_hurry=self._hurry_for_a_peer,
            is_member=self._is_member,
            answer_call=answer_call,
        )
        keepers = Keepers(self.members, kept, self.holders)
        self.raiser = CodeRaiser(
            kv,
            protector,
            self.versions,
            self.members,
            self.holders,
            segments,
            self.restorer,
            self.replicator.is_idle,
            look_seconds=settings.raise_look_seconds,
            unchanged_seconds=settings.raise_unchanged_seconds,
        )
        self.sweep = ShardSweep(kv, self.versions, self.shard_store, self.small_copies, index, store.store_id, cluster.cluster)
        self.collector = Collector(
            kv,
            self.members,
            self.leadership,
            grace_seconds=settings.grace_seconds,
            pause_seconds=settings.collect_seconds,
        )
        self.store_watch = StoreWatch(
            kv,
            self.members,
            self.leadership,
            cluster.parity_shards,
            repair_after_seconds=settings.repair_after_seconds,
        )
        take_buffer = BufferBudget(max(VERIFY_BUFFER_BYTES, stripe_bytes)).take
        self.verifier = Verifier(reader, self.members, self.holders, keepers, self.versions, codec, take_buffer)
        self.mender = Mender(self.members, keepers)
        self.repairer = Repairer(kv, self.versions, self.members, self.holders, codec, self._threads, take_buffer)
        pace = Pace(settings.repair_bytes_per_second_max)
        take_stripe = BufferBudget(REBUILT_AT_ONCE * max(stripe_bytes, VERIFY_BUFFER_BYTES // 2)).take
        movers = [
            Repairer(
                kv,
                self.versions,
                self.members,
                self.holders,
                codec,
                self._threads,
                take_stripe,
                pace=pace.spend,
                run_bytes_max=min(RUN_BYTES_MAX, pace.bytes_at_once),
            )
            for _ in range(REBUILT_AT_ONCE)
        ]
        mover = ShardMover(kv, self.versions, self.members, reader, self.holders, movers, pace.spend)
        self.rebalancer = Rebalancer(kv, self.members, mover, self.sweep.knows_catalog)
        self._rebalance = trio.Event()
        self.rebuilder = Rebuilder(
            kv,
            self.members,
            mover,
            lambda: self.leadership.is_held,
            look_seconds=settings.rebuild_look_seconds,
            may_repair=self.sweep.knows_catalog,
        )
        scrubber = Repairer(kv, self.versions, self.members, self.holders, codec, self._threads, take_buffer)
        scrub_limit = Pace(settings.repair_bytes_per_second_max)
        self.scrub = Scrub(
            kv,
            self.members,
            self.shard_store,
            self.small_copies,
            index,
            scrubber.rebuild,
            scrub_threads,
            now_ns,
            period_seconds=settings.scrub_seconds,
            bytes_per_second_max=settings.repair_bytes_per_second_max,
            limit=scrub_limit,
        )
        self.segment_scrub = SegmentScrub(
            kv,
            self.versions,
            segments,
            store.store_id,
            scrub_threads,
            now_ns,
            scrub_limit,
            period_seconds=settings.scrub_seconds / SEGMENT_SCRUBS,
        )
        self.catalog_copy: CatalogCopy | None = None
        if isinstance(kv, SqliteCatalog):
            self.catalog_copy = CatalogCopy(kv, store.catalog_copy, self._threads, every_seconds=settings.catalog_copy_seconds)
        self.address = ""

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve and protect until cancelled; reports its address when both have begun."""
        found = await trio.to_thread.run_sync(self.shard_store.recover)
        if any(found[:3]):
            log.info("shards_recovered added=%d removed=%d damaged=%d", found.added, found.removed, len(found.damaged))
        async with trio.open_nursery() as nursery:
            self.address = await self._serve(nursery)
            await self._join()
            await nursery.start(self.restorer.run)
            await nursery.start(self.replicator.run)
            nursery.start_soon(self._watch_members)
            nursery.start_soon(self.store_watch.run)
            nursery.start_soon(self._keep_house)
            nursery.start_soon(self._cut_history)
            nursery.start_soon(self._keep_reserve_free)
            nursery.start_soon(self._settle_when_hurried)
            nursery.start_soon(self.raiser.run)
            nursery.start_soon(self.rebuilder.run)
            nursery.start_soon(self.scrub.run)
            nursery.start_soon(self.segment_scrub.run)
            nursery.start_soon(self._rebalance_when_asked)
            nursery.start_soon(self.read_repair.run)
            nursery.start_soon(self._sweep_again_and_again)
            nursery.start_soon(self._collect_again_and_again)
            if self.catalog_copy is not None:
                nursery.start_soon(self.catalog_copy.run)
            task_status.started(self.address)

    def store_problems(self) -> list[str]:
        """What an operator is to hear about stores that are away or gone, a line each."""
        return store_problems(self.members.known(), self.cluster.parity_shards, self._settings.repair_after_seconds)

    async def leave(self) -> None:
        """What is good to have done when the node ends in order; after `run` has ended, before `aclose`."""
        if self.catalog_copy is not None:
            await self.catalog_copy.copy_at_end()

    async def aclose(self) -> None:
        """Close what is open; after `run` has ended."""
        with trio.CancelScope(shield=True):
            with contextlib.suppress(CacheError), trio.move_on_after(1):
                await self.leadership.give_up()
            await self.peers.aclose()
        self._opened.close()

    async def hurry(self, nodes: Sequence[str]) -> None:
        """Somebody waits for protection: nothing is put off on this node, nor on those named, if they answer."""
        self.replicator.wake(urgent=True)
        self.raiser.look_again()

        async def ask(member: Member) -> None:
            with trio.move_on_after(HURRY_SECONDS_MAX):
                try:
                    await self.peers.hurry(member.store, member.address)
                except ReplicationError as error:
                    log.info("peer_not_hurried node=%s error=%s", member.node, error)

        async with trio.open_nursery() as nursery:
            for member in self.members.known():
                if member.node in nodes and member.live and member.store != self.store.store_id:
                    nursery.start_soon(ask, member)

    def _has_peers(self) -> bool:
        return len({member.domain for member in self.members.known() if member.takes_shards}) > 1

    def _hurry_for_a_peer(self) -> None:
        self.replicator.wake(urgent=True)
        self._hurried.set()

    async def _settle_when_hurried(self) -> None:
        while True:
            await self._hurried.wait()
            self._hurried = trio.Event()
            await self._settle()

    async def _repair_read(self, vid: Vid) -> None:
        """Repair a version of which a reader found a shard wrong; what is away is left to others."""
        version = await self.versions.version(vid)
        if version is None or version.state is not VersionState.PROTECTED:
            return
        report = await self.verifier.verify(version.ino, vid, version)
        report.unreachable.clear()
        if report.damaged or report.missing:
            report = await self.repairer.repair(version.ino, vid, version, report)
            log.warning("read_repair inode=%d repaired=%s: %s", version.ino, report.repaired, report.message)

    def rebalance(self) -> None:
        """Begin to, unless it is under way."""
        self._rebalance.set()

    @property
    def is_rebalancing(self) -> bool:
        return self._rebalance.is_set()

    async def _rebalance_when_asked(self) -> None:
        while True:
            await self._rebalance.wait()
            try:
                await self.rebalancer.rebalance()
            except (CacheError, OSError) as error:
                log.warning("rebalance_cut_off error=%s", error)
            self._rebalance = trio.Event()

    async def _serve(self, nursery: trio.Nursery) -> str:
        """Listen where this store listened last, if that is free: its record in the catalog then needs no change, which
        would make commits that name it start anew."""
        host, _, port = self._settings.listen.rpartition(":")
        if port == "0":
            last = await self._last_address()
            if last.rpartition(":")[0] == host:
                with contextlib.suppress(OSError):
                    return str(await _started(nursery, self.server.serve, last))
        return str(await nursery.start(self.server.serve, self._settings.listen))

    async def _last_address(self) -> str:
        while True:
            try:
                entry = await self.kv.get(store_key(self.store.store_id))
                return "" if entry is None else unpack(StoreRecord, entry.value).address
            except CatalogUnavailable as error:
                log.warning("catalog_away error=%s", error)
                await trio.sleep(CATALOG_RETRY_SECONDS)

    async def _is_member(self, store: StoreId, node: NodeId) -> bool:
        """Whether a peer's store has joined under this name, and was not removed. Where nobody can say, it tries again."""
        member = self.members.member(store)
        if member is not None and member.node == node:
            return member.state is not StoreState.REMOVED
        try:
            entry = await self.kv.get(store_key(store))  # it may just have joined
        except CacheError as error:
            log.warning("peer_not_looked_up node=%s error=%s", node, error)
            return False
        record = None if entry is None else unpack(StoreRecord, entry.value)
        return record is not None and record.node == node and record.state is not StoreState.REMOVED

    async def _join(self) -> None:
        """Say in the catalog where this store is, and learn of the others."""
        labels = self._settings.labels or {}
        while True:
            try:
                store, directory, token = self.store, str(self.store.path), self._settings.join_token
                await register_store(self.kv, store.store_id, store.node, self.address, directory, labels, token)
                await self.members.refresh()
                return
            except CatalogUnavailable as error:
                log.warning("catalog_away error=%s", error)
                await trio.sleep(CATALOG_RETRY_SECONDS)

    async def _watch_members(self) -> None:
        while True:
            try:
                if isinstance(self.kv, SqliteCatalog):
                    await end_left_sessions(self.kv)
                await self.members.refresh()
                await self.leadership.look()
            except (CacheError, OSError) as error:
                self.leadership.lose()
                log.warning("members_not_refreshed error=%s", error)
            await trio.sleep(MEMBERS_SECONDS)

    async def _cut_history(self) -> None:
        """Where the catalog is on etcd, and while this agent leads."""
        if isinstance(self.kv, SqliteCatalog):
            return
        from ckptfs.cache.catalog_etcd import EtcdCatalog
        from ckptfs.cache.catalog_history import NOTE_SECONDS, cut_history

        while isinstance(self.kv, EtcdCatalog):
            await trio.sleep(NOTE_SECONDS)
            try:
                if self.leadership.is_held:
                    await cut_history(self.kv, [self.leadership.compare()])
            except CacheError as error:
                log.warning("history_not_cut error=%s", error)

    async def _keep_house(self) -> None:
        """Remove local copies of versions that are gone, and partial shards nobody goes on with."""
        while True:
            await trio.sleep(HOUSEKEEPING_SECONDS)
            try:
                copies = await self.remove_unwanted_copies()
                partials = await trio.to_thread.run_sync(self.shard_store.remove_stale_partials)
            except (CacheError, OSError) as error:
                log.warning("housekeeping_failed error=%s", error)
                continue
            if copies or partials:
                log.info("housekeeping copies_removed=%d partials_removed=%d", copies, partials)

    async def _keep_reserve_free(self) -> None:
        """Release local copies, those used longest ago first, when local saves leave less than the reserve."""
        while True:
            await trio.sleep(RESERVE_SECONDS)
            try:
                await self.restorer.make_room()
            except OSError as error:
                log.warning("copies_not_released error=%s", error)

    async def _sweep_again_and_again(self) -> None:
        pause_seconds = self._settings.sweep_seconds
        while True:
            await trio.sleep(pause_seconds)
            started = trio.current_time()
            try:
                await self.sweep.sweep()
            except (CacheError, OSError) as error:
                log.warning("sweep_put_off error=%s", error)
            pause_seconds = max(self._settings.sweep_seconds, SWEEP_PAUSE_FACTOR * (trio.current_time() - started))

    async def _collect_again_and_again(self) -> None:
        while True:
            await self.collector.pause()
            try:
                await self.collector.collect()
            except CacheError as error:
                log.warning("dead_versions_not_looked_at error=%s", error)

    async def remove_unwanted_copies(self) -> int:
        """Remove local copies of versions that are gone; returns how many."""
        return await self.restorer.remove_unwanted(self._is_wanted)

    async def _is_wanted(self, vid: Vid) -> bool:
        version = await self.versions.version(vid)
        return version is not None and version.state is not VersionState.DEAD


async def _started(nursery: trio.Nursery, serve: Callable[..., Awaitable[None]], address: str) -> object:
    """`nursery.start`, for a function whose failure to start is not the end of the nursery."""
    try:
        return await nursery.start(serve, address)
    except BaseExceptionGroup as group:
        matched, rest = group.split(OSError)
        if rest is None and matched is not None:
            raise OSError(f"{address} can't be used") from None
        raise


def _total_bytes(store: StoreDirectory) -> int:
    status = os.statvfs(store.path)
    return status.f_blocks * status.f_frsize
