"""The mount process: its composition root, and what it answers on the node's socket.

It is given the descriptor of a mounted FUSE connection by the supervisor, and may be killed at any moment: what the next one
needs is in `mount.db`, in the catalog, or in the kernel. Started as `python -m
ckptfs.fs.mount_process CONFIG DEVICE PARENT INCARNATION [TURN]`; with TURN, the descriptor of a socket, it takes over from one
that still serves, when it is told to (`upgrade`).
"""

import contextlib
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import trio

from ckptfs import __version__
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CacheError, DamagedData
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.known_records import KnownRecords
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.seal import Sealer
from ckptfs.cache.segments import Segments
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.cache.store_registry import stores as list_stores
from ckptfs.cache.versions import Versions
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs import fusermount
from ckptfs.fs.agent_files import share_socket
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.backing import BackingFiles
from ckptfs.fs.barrier import behind_barrier
from ckptfs.fs.catalog import open_on_drive, open_replica
from ckptfs.fs.config import NodeConfig, load_handed_config
from ckptfs.fs.descriptor_room import DescriptorRoom
from ckptfs.fs.durability import Durability, Fact
from ckptfs.fs.file_clock import FileClock
from ckptfs.fs.file_content import FileContent
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_format import Notification
from ckptfs.fs.fuse_session import FuseSession, Handler, Lull, Negotiated, not_servable
from ckptfs.fs.ghost_handles import close_ghosts
from ckptfs.fs.growing import GrowingFiles
from ckptfs.fs.home_calls import answer_as_message, from_message
from ckptfs.fs.inode_operations import InodeOperations
from ckptfs.fs.kernel_cache import KernelCache
from ckptfs.fs.kernel_use import KernelUse
from ckptfs.fs.known_answers import KnownAnswers
from ckptfs.fs.last_use import last_use
from ckptfs.fs.local_socket import LocalClient, Message, NodeNotAnswering, bind, serve
from ckptfs.fs.mount_recovery import MountRecovery
from ckptfs.fs.mount_table import abort_connection, mounts_at
from ckptfs.fs.nameless_files import NamelessFiles
from ckptfs.fs.names import NameOperations
from ckptfs.fs.noted_writes import NotedWrites
from ckptfs.fs.open_files import Handle, OpenFiles
from ckptfs.fs.process_start import (
    END_MOUNT_SIGNAL,
    be_killed_by_signals,
    be_killed_for_memory,
    death_logged,
    die_with_parent,
    end_for_good,
    ignore_broken_leases,
    is_ready,
    raise_descriptor_limit,
    start_log,
    write_pid_file,
)
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import RemoteContent, place_of
from ckptfs.fs.remote_files import RemoteFiles
from ckptfs.fs.remote_readers import RemoteReaders
from ckptfs.fs.remote_writing import RemoteWriting
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.repeats import Repeats
from ckptfs.fs.returned_store import ReturnedStore
from ckptfs.fs.segment_holds import SegmentHolds
from ckptfs.fs.segment_release import SaveSize, SegmentRelease
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.fs.segment_switch import SegmentSwitch
from ckptfs.fs.settle import Settler
from ckptfs.fs.shared_commits import SharedCommits
from ckptfs.fs.space import Space, store_reserve
from ckptfs.fs.upgrade import wait_for_turn
from ckptfs.fs.what_if import WhatIf
from ckptfs.fs.writers_elsewhere import WritersElsewhere
from ckptfs.replication.quiet_threads import QuietThreads

if TYPE_CHECKING:
    from ckptfs.cache.catalog_replica import ReplicatedCatalog

log = logging.getLogger(__name__)

LIVE_STORES_SECONDS_MAX = 5.0
"""Half of what the command line waits for the mount's own answer."""

PROVE_SECONDS_MAX = 3600.0
"""How long the shards of the largest file may take to be read, and made anew where they are wrong; a dead agent breaks off at
once."""

CHECKPOINT_SECONDS = 5.0
NEGOTIATED_FACT = "negotiated"
INCARNATION_FACT = "incarnation"


class MountProcess:
    """The parts of a running mount, and the node socket's answers about them."""

    def __init__(self, config: NodeConfig, device: int, incarnation: int) -> None:
        self._config = config
        self._store = StoreDirectory.create_or_open(config.store, config.node_id)
        self._device = device
        self._set_back_mark = SetBackMark(self._store.store_id, self._store.uses)
        try:
            self._database = MountDatabase(self._store.mount_db, was_set_back=self._set_back_mark.was_set_back())
        except DamagedData as damage:  # with the handles that programs hold: this connection can't be served any more
            end_for_good(self._store.run, "mount", str(damage))
        self._replica: ReplicatedCatalog | None = None
        self._catalog_file: SqliteCatalog | None = None
        self._kv: KeyValue
        if config.etcd_place:
            self._kv = self._replica = open_replica(config, self._store, session_label(self._store.store_id, incarnation))
        else:
            self._kv = self._catalog_file = open_on_drive(config, "mount")
        self._agent = LocalClient(self._store.agent_socket)
        self._refusal_mark = RefusalMark(self._store.store_id, self._store.path)
        self._space = Space(
            config.store, store_reserve(self._store), self._catalog_file, self._agent_has_started, self._refusal_mark
        )
        self._incarnation = incarnation
        self._new_connection = self._begin_connection()
        self._agreed = trio.Event()
        self._now_ns = FileClock()

    def _begin_connection(self) -> bool:
        """Whether this is the connection's first process; what an older connection left in the database is void then."""
        known = b"%d" % self._incarnation
        if self._database.fact(INCARNATION_FACT) == known:
            return False
        self._database.forget_handles()
        self._database.set_fact(NEGOTIATED_FACT, b"")
        self._database.set_fact(INCARNATION_FACT, known)
        return True

    def cannot_take_over(self) -> str:
        """Why this release can't go on with the connection, or ""."""
        stored = self._database.fact(NEGOTIATED_FACT)
        if not stored:
            return "the mount is not in use yet; try again"
        return not_servable(msgspec.json.decode(stored, type=Negotiated))

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._replica is None:
                await self._run(stack)
                return
            async with trio.open_nursery() as nursery:
                from ckptfs.cache.catalog_history import note_progress

                replica = self._replica
                await nursery.start(replica.run)
                nursery.start_soon(note_progress, replica, self._store.store_id, lambda: replica.position)
                await self._run(stack)
                nursery.cancel_scope.cancel()

    async def _run(self, stack: contextlib.ExitStack) -> None:
        store, config = self._store, self._config
        fence = await SessionFence.begin(self._kv, config.node_id, store.store_id, self._incarnation)
        lull = Lull()
        shared = None if self._catalog_file is None else SharedCommits(self._catalog_file, lull)
        repeats = Repeats(self._kv, config.node_id, self._incarnation, None if shared is None else shared.transact)
        await repeats.load(self._database.files_in_use())
        namespace = Namespace(self._kv, store.store_id, self._incarnation, self._now_ns, changes=repeats.changes)
        versions = Versions(self._kv, store.store_id, self._incarnation, self._now_ns)
        last = partial(
            last_use, self._database, store.boot, self._refusal_mark, self._set_back_mark, new_connection=self._new_connection
        )
        returned = ReturnedStore(namespace, self._database, Segments(store.segments), store.store_id, self._incarnation, last)
        self._database.take_over()
        await returned.bring_back()
        fence.on_renewed = returned.require_not_lost
        settings = await namespace.settings()
        store.join(settings.cluster, config.node.catalog)
        segments = Segments(store.segments)
        may_pass, self._lane_reason = _may_pass_through(config)
        backing = BackingFiles(self._device) if may_pass else None
        remote = RemoteContent(self._agent)
        open_files = OpenFiles(self._database, segments, backing, self._backing_refused, self._set_back_mark.count)
        reclaimer = Reclaimer(self._kv, segments, RemoteReaders(self._kv, self._live_stores))
        holds = SegmentHolds(self._kv, store.store_id)
        elsewhere = RemoteFiles(open_files, remote, holds)
        writing = RemoteWriting(open_files, remote, self._incarnation)
        noted = NotedWrites(self._database, store.store_id, self._incarnation)
        sealer = Sealer(segments, settings.data_shards, settings.cell_size, config.protection.small_file_size_bytes)
        save_size = SaveSize()
        settler = Settler(
            open_files,
            self._database,
            versions,
            sealer,
            reclaimer,
            config.mount.settle_seconds,
            self._wake_agent,
            is_busy=lambda: self._session.is_busy(),
            on_saved=save_size.add,
        )
        threads = stack.enter_context(QuietThreads(1))
        growing = GrowingFiles(
            self._kv,
            store.store_id,
            versions,
            open_files,
            self._database,
            Sealer(segments, settings.data_shards, settings.cell_size, config.protection.small_file_size_bytes),
            config.mount.settle_seconds,
            self._now_ns,
            lambda: self._wake_agent(False),
            threads.run,
        )
        removed = RemovedInodes(self._database, self._incarnation)
        namespace.before_removal = removed.expect
        repeats.noted_elsewhere(removed.requests)
        view = AttributeView(
            namespace,
            open_files,
            removed,
            remote,
            store.store_id,
            config.mount.attribute_timeout_seconds,
            keeps_names=self._replica is None,
        )
        records = FileRecords(namespace, open_files, removed, self._database)
        content = FileContent(
            namespace, versions, open_files, segments, self._database, view, elsewhere, reclaimer, store.store_id
        )
        files = FileOperations(
            namespace,
            versions,
            open_files,
            segments,
            self._database,
            view,
            records,
            content,
            elsewhere,
            writing,
            noted,
            removed,
            settler,
            growing,
            reclaimer,
            store.store_id,
        )

        def was_carried_out(unique: int) -> bool:
            return repeats.was_carried_out(unique) or open_files.handle(unique) is not None

        def answered(unique: int) -> None:
            repeats.answered(unique)
            writing.answered(unique)
            noted.own_answered(unique)

        def forget_attributes(ino: InodeNumber) -> None:
            self._session.notify(Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(ino, -1, 0))

        self._writers_elsewhere = WritersElsewhere(open_files, self._database, content, files, noted, forget_attributes)
        nameless = NamelessFiles(namespace, open_files, segments, self._database, view, settler, files.opened)
        names = NameOperations(namespace, view, content, files, nameless, removed, repeats, open_files.paths)
        inodes = InodeOperations(namespace, view, records, files, repeats, store.path, self._space.withheld_bytes)

        async def entry(ino: InodeNumber) -> bytes:
            return await view.entry(ino, await view.current(ino))

        self._kernel_use = KernelUse(config.mountpoint, entry)
        handlers = self._kernel_use.answering(names.handlers() | files.handlers() | inodes.handlers())
        self._descriptors = DescriptorRoom(open_files.file_count, lambda: settler.waiting_count, settler.hurry)
        stored = self._database.fact(NEGOTIATED_FACT)
        session = FuseSession(
            self._device,
            self._descriptors.guarded(self._space.guarded(self._fresh(handlers), was_carried_out), was_carried_out),
            allow_passthrough=may_pass,
            continues=not self._new_connection,
            negotiated=msgspec.json.decode(stored, type=Negotiated) if stored else None,
            on_negotiated=lambda agreed: self._negotiated(agreed, open_files),
            on_answered=answered,
            on_pause=self._database.settle_debts,
            lull=lull,
            at_once={} if self._catalog_file is None else KnownAnswers(KnownRecords(self._catalog_file), view).at_once(),
        )
        if session.negotiated is not None:
            if not session.negotiated.resend:
                self._give_up(
                    "the mount process was killed, and this kernel can't send again what it had not answered (Linux 6.9 is the"
                    " first that can): programs get errors, not an endless wait"
                )
            if reason := not_servable(session.negotiated):
                self._give_up(f"the mount process was killed, and another release lies in its place: {reason}")
            self._negotiated(session.negotiated, open_files)
        self._open_files, self._settler, self._session, self._reclaimer = open_files, settler, session, reclaimer
        self._segment_switch = SegmentSwitch(versions, segments, open_files, reclaimer, store.store_id)
        self._growing = growing
        self._durability = Durability(namespace, versions, self._size_of, settings.failure_domain)
        self._losses = WhatIf(namespace, versions)
        self._settings = settings
        mounted = mounts_at(config.mountpoint)
        self._for_its_user_only = config.mount.allow_other and bool(mounted) and not mounted[-1].allow_other
        recovery = MountRecovery(
            self._database,
            store.store_id,
            namespace,
            versions,
            segments,
            open_files,
            settler,
            reclaimer,
            holds,
            content.reopen,
            store.boot,
            self._refusal_mark,
            self._set_back_mark,
            new_connection=self._new_connection,
            restore_guests=self._writers_elsewhere.restore,
        )
        await recovery.run()
        await growing.begin()
        self._sweep = SegmentSweep(
            namespace,
            versions,
            segments,
            open_files,
            reclaimer,
            self._database,
            store.store_id,
            session.is_busy,
            files.end_unheld,
        )
        self._release = SegmentRelease(
            versions,
            segments,
            open_files,
            reclaimer,
            store.store_id,
            store.path,
            config.space.reserve_fraction,
            save_size,
            self._states,
            self._keep_free,
            self._prove,
        )
        if self._new_connection:
            await self._space.keep()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fence.run)
            nursery.start_soon(settler.run)
            nursery.start_soon(reclaimer.run)
            nursery.start_soon(holds.run)
            nursery.start_soon(elsewhere.keep_what_died)
            nursery.start_soon(writing.run)
            nursery.start_soon(self._writers_elsewhere.run)
            nursery.start_soon(growing.run)
            nursery.start_soon(self._space.run)
            nursery.start_soon(self._checkpoint_now_and_then)
            nursery.start_soon(self._end_on_signal)
            nursery.start_soon(self._wake_agent, False)
            nursery.start_soon(self._sweep.run)
            nursery.start_soon(self._release.run)
            nursery.start_soon(self._let_go_of_earlier, repeats, files.let_go)
            nursery.start_soon(self._try_passthrough, open_files)
            if self._replica is not None:
                nursery.start_soon(self._tell_kernel, self._replica, session)
            listener = bind(store.mount_socket)
            share_socket(store)
            await nursery.start(serve, listener, self.answer)
            is_ready(store.run, "mount")
            log.info("mount_ready store=%s mountpoint=%s first=%s", store.path, config.mountpoint, self._new_connection)
            await session.run()
            log.info("mount_ended requests=%d", session.statistics().requests)
            await self._end()
            nursery.cancel_scope.cancel()

    def _fresh(self, handlers: dict[int, Handler]) -> dict[int, Handler]:
        """The handlers, which ask the catalog itself where its replica is not enough."""
        return handlers if self._replica is None else behind_barrier(handlers, self._replica)

    async def _tell_kernel(self, replica: "ReplicatedCatalog", session: FuseSession) -> None:
        """What other nodes change is not kept by this machine's kernel."""
        cache = KernelCache(session.notify)
        replica.on_commit, replica.on_events = cache.committed, cache.changed
        await cache.run()

    def _give_up(self, reason: str) -> NoReturn:
        """Nobody can answer what the earlier process had in hand, and what comes: programs get errors."""
        for mounted in mounts_at(self._config.mountpoint):
            abort_connection(mounted)
        end_for_good(self._store.run, "mount", reason)

    def _negotiated(self, agreed: Negotiated, open_files: OpenFiles) -> None:
        self._database.set_fact(NEGOTIATED_FACT, msgspec.json.encode(agreed))
        self._agreed.set()
        if agreed.passthrough:
            log.info("lane=passthrough")
            return
        open_files.serve_only()
        self._served_because(self._lane_reason or "the kernel has no FUSE passthrough (Linux 6.9 is the first that has)")

    async def _try_passthrough(self, open_files: OpenFiles) -> None:
        """As soon as the kernel has our answer to INIT, so that status is right before the first file is opened."""
        await self._agreed.wait()
        open_files.try_passthrough()

    def _backing_refused(self, error: OSError) -> None:
        self._served_because(f"the kernel passes nothing through to the store's file system ({error.strerror}): ext4 and xfs can")

    def _served_because(self, reason: str) -> None:
        self._lane_reason = reason
        if self._config.mount.passthrough == "on":
            end_for_good(self._store.run, "mount", f'mount.passthrough is "on", but {reason}; "auto" would serve')
        log.warning("lane=served reason=%s", reason)

    async def _let_go_of_earlier(self, repeats: Repeats, let_go: Callable[[Handle], Awaitable[None]]) -> None:
        """What an earlier process left for requests that come again, once all of them have come."""
        await self._session.caught_up.wait()
        repeats.all_repeated()
        await close_ghosts(self._open_files, let_go, self._kernel_use.of)

    async def _end_on_signal(self) -> None:
        with trio.open_signal_receiver(END_MOUNT_SIGNAL) as signals:
            async for _ in signals:
                await self._end()
                # Not with 0, which says that the mount is gone: programs have it, and wait for the next process if there is one.
                os.kill(os.getpid(), signal.SIGKILL)

    async def _end(self) -> None:
        """Leave as little as possible in flight."""
        self._growing.stop()
        await self._settler.settle_due(everything=True)
        await self._reclaimer.drain()
        self._database.settle_debts()
        await self._kv.make_durable()

    async def _checkpoint_now_and_then(self) -> None:
        noted_revision = requests = 0
        while True:
            if requests != (requests := self._session.statistics().requests) or self._open_files.file_count():
                self._set_back_mark.count()  # of a file that stays open, and of what was sealed
            self._database.settle_debts()
            noted_revision = await self._note_revision(noted_revision)
            await trio.to_thread.run_sync(self._keep_database)
            await trio.sleep(CHECKPOINT_SECONDS)

    def _keep_database(self) -> None:
        try:
            self._database.checkpoint()
            self._database.hold_room()
        except (OSError, sqlite3.OperationalError) as error:  # no descriptor, say: the next time
            log.warning("mount_db_not_kept path=%s error=%s", self._store.mount_db, error)

    async def _note_revision(self, noted: int) -> int:
        """Remember how far the catalog is for sure, so that the next start sees if it is not that far any more."""
        try:
            revision = await self._kv.revision()
            if revision > noted:
                await self._kv.make_durable()
                self._database.set_fact(CATALOG_FACT, b"%d" % revision)
                return revision
        except (CacheError, sqlite3.OperationalError) as error:  # full or away: next time
            log.info("revision_not_noted error=%s", error)
        return noted

    async def _wake_agent(self, urgent: bool) -> None:
        """Tell the agent that a version waits. If it is down it looks by itself when it starts."""
        try:
            await self._agent.call({"do": "wake", "urgent": urgent})
        except NodeNotAnswering as error:
            log.info("agent_not_woken error=%s", error)

    async def _agent_has_started(self) -> bool:
        try:
            return bool((await self._agent.call({"do": "ping"})).get("ok"))
        except NodeNotAnswering:
            return False

    async def answer(self, request: Message) -> Message:
        """One request on the node's mount socket. One that fails ends nothing else."""
        try:
            return await self._answer(request)
        except (CacheError, OSError) as error:
            return {"ok": False, "error": "failed", "message": str(error)}
        except Exception as error:
            log.exception("request_failed request=%r", request.get("do"))
            return {"ok": False, "error": "internal", "message": f"the mount failed: {error!r}; its log has the details"}

    async def _answer(self, request: Message) -> Message:
        match request.get("do"):
            case "status":
                return self._status()
            case "state":
                return {"ok": True, "states": await self._states([InodeNumber(ino) for ino in request["inos"]], lenient=True)}
            case "what_if":
                inos = [InodeNumber(ino) for ino in request["inos"]]
                return {"ok": True, **await self._what_if(inos, [str(node) for node in request["lose"]])}
            case "protected":
                await self._protected([Vid(vid) for vid in request["vids"]])
                return {"ok": True}
            case "switch_segment":
                ino, vid, before = InodeNumber(request["ino"]), Vid(request["vid"]), SegmentId(request["before"])
                right, message = await self._segment_switch.switch(ino, vid, before, place_of(request))
                return {"ok": right, "message": message} if right else {"ok": False, "error": "failed", "message": message}
            case "call":
                call, data = from_message(request)
                return answer_as_message(await self._writers_elsewhere.call(StoreId(bytes(request["store"])), call, data))
            case "settle":
                self._settler.hurry()
                return {"ok": True}
            case other:
                return {"ok": False, "error": "unknown", "message": f"the mount does not know the request {other!r}"}

    async def _states(self, inos: list[InodeNumber], *, lenient: bool = False) -> dict[int, Fact]:
        """As `Durability.states`. While the agent doesn't answer no store counts as live; `lenient`: every one does."""
        live = await self._live_stores()
        stores = {store: record for store, (record, _) in (await list_stores(self._kv)).items()}
        if live is None:
            live = set(stores) if lenient else set()
        return await self._durability.states(inos, stores, live, self._settings.parity_shards)

    async def _what_if(self, inos: list[InodeNumber], nodes: list[str]) -> Message:
        """`files`: as `WhatIf.outcomes` without these nodes; `nodes`: all there are; `unknown`: those that aren't among them;
        `assumed`: the agent doesn't answer, so that all nodes count as up."""
        stores = {store: record for store, (record, _) in (await list_stores(self._kv)).items()}
        joined = {store: str(record.node) for store, record in stores.items() if not record.state.is_gone}
        lost = {store for store, record in stores.items() if record.node in nodes}
        live = await self._live_stores()
        files = await self._losses.outcomes(inos, stores, set(joined) if live is None else live, lost)
        names = set(joined.values())
        return {"files": files, "nodes": sorted(names), "unknown": sorted(set(nodes) - names), "assumed": live is None}

    def _size_of(self, ino: InodeNumber) -> int | None:
        """The size of a file that is being written here."""
        file = self._open_files.get(ino)
        return os.fstat(file.descriptor).st_size if file is not None and file.descriptor is not None else None

    async def _keep_free(self, size_bytes: int) -> None:
        """Have the agent release local copies until so much is free."""
        try:
            await self._agent.call({"do": "keep_free", "bytes": size_bytes})
        except NodeNotAnswering as error:
            log.info("copies_not_released error=%s", error)

    async def _prove(self, vid: Vid) -> str:
        """Why the shards of a protected version can't be relied on, or "": every holder has hashed its own again. Raises
        `NodeNotAnswering`."""
        answer = await self._agent.call({"do": "prove", "vid": vid}, timeout_seconds=PROVE_SECONDS_MAX)
        return "" if answer.get("ok") and answer["right"] else str(answer.get("message") or "no reason was given")

    async def _live_stores(self) -> set[StoreId] | None:
        """The stores that answer the agent now; None while the agent doesn't answer."""
        try:
            answer = await self._agent.call({"do": "status", "fresh": True}, timeout_seconds=LIVE_STORES_SECONDS_MAX)
        except NodeNotAnswering:
            return None
        if not answer.get("ok"):
            log.warning("agent_has_no_status reason=%s", answer.get("message"))
            return None
        return {StoreId(bytes.fromhex(store["store"])) for store in answer["stores"] if store["live"]}

    async def _protected(self, vids: list[Vid]) -> None:
        """Their rows go: not before the catalog's fact, which the agent has committed, is durable."""
        await self._kv.make_durable()
        self._database.set_protected(vids, in_use=self._open_files.protected(set(vids)))
        self._growing.protected(vids)

    def _status(self) -> Message:
        closed, opened = self._database.exposure(), self._growing.exposure()
        statistics = self._session.statistics()
        agreed = self._session.negotiated
        passthrough = agreed is not None and agreed.passthrough and not self._lane_reason
        since_ns = min((one.oldest_ns for one in (closed, opened) if one.oldest_ns is not None), default=None)
        oldest = None if since_ns is None else max(0.0, (self._now_ns() - since_ns) / 1e9)
        return {
            "ok": True,
            "lane": "passthrough" if passthrough else "served",
            "lane_reason": self._lane_reason,
            "unprotected_bytes": closed.bytes + opened.bytes,
            "unprotected_files": closed.files + opened.files,
            "oldest_unprotected_seconds": oldest,
            "open_files": len(self._open_files),
            "writers_elsewhere": self._writers_elsewhere.guest_count(),
            "settling_files": self._settler.waiting_count,
            "written_files": opened.files,
            "requests": statistics.requests,
            "unexpected_errors": statistics.unexpected_errors,
            "problems": self._problems(),
            "incarnation": self._incarnation,
            "space": self._space.status()
            | {"segments_released_bytes": self._release.released_bytes, "warning": self._release.warning},
            "version": __version__,
        }

    def _problems(self) -> list[str]:
        """What an operator has to act on, a line each."""
        problems = []
        if self._space.refusal or self._database.in_memory:
            problems.append(
                f"READ-ONLY, programs get EROFS or EIO when they save: the drive of the store ({self._store.path}) takes no"
                f" writes any more ({self._space.refusal or 'it failed'}; the kernel's log says why). What is protected is safe"
                " on other nodes, and files can be read here; what is not, only this drive has: copy it away, stop the node,"
                " repair or replace the drive, and start again"
            )
        if self._space.shortage:
            problems.append(f"FULL, programs get ENOSPC: {self._space.shortage}")
        elif self._release.warning:
            problems.append(f"nearly full: {self._release.warning}")
        if self._for_its_user_only:
            problems.append(
                f"only the user {os.geteuid()}, who runs the node, can use its mount: for others {fusermount.CONFIGURATION} needs"
                " the line user_allow_other, and the node a new start (mount.allow_other = false: it is meant so)"
            )
        if problem := self._descriptors.problem():
            problems.append(problem)
        asked, agreed = self._config.protection, self._settings
        if (asked.data_shards, asked.parity_shards, asked.cell_size_bytes, asked.failure_domain) != (
            agreed.data_shards,
            agreed.parity_shards,
            agreed.cell_size,
            agreed.failure_domain,
        ):
            problems.append(
                f"the cluster was made with {agreed.data_shards}+{agreed.parity_shards} over each {agreed.failure_domain} and"
                f" cells of {agreed.cell_size} bytes, which holds for all nodes; this node's configuration says otherwise"
            )
        if self._replica is not None and self._replica.trouble:
            problems.append(f"names wait, and are EIO after a while; open files go on: {self._replica.trouble}")
        if self._catalog_file is not None and (damage := self._catalog_file.statistics().damage):
            problems.append(f"programs get EIO: {damage}")
        if kept := self._sweep.kept_count:
            problems.append(
                f"{kept} segments in {self._store.segments} belong to no file the catalog knows: they are older than mount.db"
                " and are kept; delete them if the catalog is the right one"
            )
        return problems


def _may_pass_through(config: NodeConfig) -> tuple[bool, str]:
    """Whether passthrough is to be tried, and why not."""
    if config.mount.passthrough == "off":
        return False, "mount.passthrough is off in the configuration"
    if os.geteuid() != 0:
        return False, "passthrough needs root (CAP_SYS_ADMIN)"
    return True, ""


def main() -> None:
    """Entry of the process."""
    handed_config, device, parent, incarnation, *turn = sys.argv[1:]
    die_with_parent(int(parent))
    be_killed_by_signals()
    config = load_handed_config(int(handed_config))
    start_log(config.log_directory, "mount")
    raise_descriptor_limit()
    ignore_broken_leases()
    be_killed_for_memory(10)
    run_directory = config.store / "run"
    with death_logged(run_directory, "mount"):
        process = MountProcess(config, int(device), int(incarnation))
        if turn:
            wait_for_turn(int(turn[0]), process.cannot_take_over())
        write_pid_file(run_directory, "mount")
        trio.run(process.run)


if __name__ == "__main__":
    main()
