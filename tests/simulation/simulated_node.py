"""A node of the simulated cluster: the real mount without its kernel, the real agent, and a supervisor that keeps both alive.

Each process lives until it is killed; its tasks end there and its memory is gone. What it wrote, and what the machine's page
cache holds, is still there for the next one. The composition follows `mount_process` and `agent_process`.
"""

import errno
import logging
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import trio
from simulated_drive import Drive, drives
from simulated_etcd import SimulatedEtcd, SimulatedGateway
from simulated_network import LocalServer, LocalSocket, Network, SimulatedTransport
from virtual_machine import Machine, Process, process, run_in_turn, world

from ckptfs.cache import boot
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings
from ckptfs.cache.catalog_replica import ReplicatedCatalog
from ckptfs.cache.errors import CacheError, CatalogUnavailable, SessionEnded, StoreError
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.seal import Sealer
from ckptfs.cache.segments import Segments
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.cache.versions import Versions
from ckptfs.fs.agent import Agent, AgentSettings
from ckptfs.fs.agent_process import MountTeller
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.barrier import behind_barrier
from ckptfs.fs.file_content import FileContent
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_errors import errno_of
from ckptfs.fs.fuse_format import RequestHeader
from ckptfs.fs.ghost_handles import close_ghosts
from ckptfs.fs.growing import GrowingFiles
from ckptfs.fs.home_calls import answer_as_message, from_message
from ckptfs.fs.inode_operations import InodeOperations
from ckptfs.fs.kernel_use import Use
from ckptfs.fs.last_use import last_use
from ckptfs.fs.local_socket import LocalClient, NodeNotAnswering
from ckptfs.fs.mount_recovery import MountRecovery
from ckptfs.fs.nameless_files import NamelessFiles
from ckptfs.fs.names import NameOperations
from ckptfs.fs.node_session import NodeSession
from ckptfs.fs.noted_writes import NotedWrites
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import RemoteContent, place_of
from ckptfs.fs.remote_files import RemoteFiles
from ckptfs.fs.remote_readers import RemoteReaders
from ckptfs.fs.remote_writing import RemoteWriting
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.repeats import Repeats
from ckptfs.fs.returned_store import ReturnedStore
from ckptfs.fs.segment_holds import SegmentHolds
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.fs.segment_switch import SegmentSwitch
from ckptfs.fs.settle import Settler
from ckptfs.fs.writers_elsewhere import WritersElsewhere
from ckptfs.replication.codec import choose_codec

log = logging.getLogger(__name__)

CATALOG = "sim"
CELL, SMALL = 4096, 2048
SETTLE_SECONDS = 2.0
GRACE_SECONDS, COLLECT_SECONDS, SWEEP_SECONDS, UNNAMED_SECONDS = 6.0, 4.0, 6.0, 12.0
REBUILD_SECONDS = 6.0
RESTART_SECONDS = 0.5
LOST_AFTER_SECONDS = 3.0
"""After the end of a session."""


def session_for(label: str) -> str | None:
    """The session that the catalog of the mount belongs to; an agent leads with its own."""
    return label


class _BootId:
    """What stands in /proc/sys/kernel/random/boot_id of the machine that asks."""

    def read_bytes(self) -> bytes:
        now = process.get()
        assert now is not None
        return b"boot-%d-%d\n" % (now.machine.number, now.machine.boot)


boot.BOOT_ID = cast(Path, _BootId())


class Cluster:
    """All machines, with what they share. `problems` are what no run may have."""

    def __init__(self, directory: Path, nursery: trio.Nursery, data_shards: int, parity_shards: int) -> None:
        self.directory = directory
        self.nursery = nursery
        self.etcd = SimulatedEtcd(world.chance)
        self.network = Network(world.chance)
        self.settings = Settings(FORMAT_VERSION, b"c" * 16, data_shards, parity_shards, CELL)
        self.nodes: list[Node] = []
        self.problems: list[str] = []
        self.trace: list[str] = []
        self.codec = choose_codec("auto")

    def note(self, what: str) -> None:
        self.trace.append(f"{world.seconds():.6f} r{self.etcd.revision} {what}")

    def problem(self, what: str) -> None:
        self.note(f"PROBLEM {what}")
        self.problems.append(what)


class Node:
    """One machine and its node. `start` and `kill` are the supervisor's beginning and end."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.machine = Machine(number, cluster.directory / f"n{number}")
        self.drive = drives[self.machine] = Drive(self.machine)
        self.replaced: dict[StoreId, tuple[StoreDirectory, Drive]] = {}
        """The stores it had, on the drives that were taken out of it, as they were then."""
        self.mount: MountLife | None = None
        self.agent: AgentLife | None = None
        self.connection = 0
        self.is_new_connection = False
        self.kills_before_answer = 0
        self.changed = trio.Event()
        self.lives: dict[str, Process] = {}
        self.is_up = False
        self._scope: trio.CancelScope | None = None
        self._unique = 0
        self.pending: dict[int, None] = {}

    async def start(self) -> None:
        """As the supervisor does it; returns when both processes are there."""
        self.is_up = True
        supervisor = Process(self.machine, "supervisor")
        self.lives["supervisor"] = supervisor
        await self.cluster.nursery.start(self._supervise, supervisor)

    async def kill(self) -> None:
        """All processes at once, the supervisor first; the connection to the kernel ends with them."""
        self.is_up = False
        self.connection = 0
        for role in ("supervisor", "mount", "agent"):
            if (life := self.lives.pop(role, None)) is not None:
                await life.kill()
        self._tell()

    async def kill_process(self, role: str) -> None:
        """One of the two; the supervisor starts it again."""
        if (life := self.lives.get(role)) is not None:
            await life.kill()

    async def cut_power(self) -> None:
        await self.kill()
        self.drive.cut_power(world.chance)
        SetBackMark(self.store.store_id, self.store.uses).clear()
        self.machine.boot += 1
        self.machine.booted_at = world.seconds()

    def replace_drive(self) -> None:
        """By an empty one; nothing runs on the machine."""
        old = self.drive
        self.replaced[self.store.store_id] = self.store, old
        self.machine.directory = self.cluster.directory / f"{self.machine.name}-{len(self.replaced)}"
        self.machine.directory.mkdir()
        self.drive = drives[self.machine] = Drive(self.machine)
        self.drive.on_unlink, self.drive.keeps_segments = old.on_unlink, old.keeps_segments

    def had(self, store: bytes) -> tuple[StoreDirectory, Drive]:
        """That store of it, and the drive it is on: the one it has, or one that was taken out."""
        return self.replaced.get(StoreId(store)) or (self.store, self.drive)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def _supervise(self, life: Process, *, task_status: trio.TaskStatus[None]) -> None:
        process.set(life)
        try:
            with life.scope:
                await self._begin(life, task_status)
        except BaseException as error:
            if all(isinstance(leaf, trio.Cancelled) for leaf in _leaves(error)):
                raise  # the run ends while this node starts; a kill doesn't come so far
            self._ended_by(life, error)
        finally:
            life.alive = False
            life.ended.set()

    async def _begin(self, life: Process, task_status: trio.TaskStatus[None]) -> None:
        cluster, machine = self.cluster, self.machine
        incarnation = time.time_ns()
        store = StoreDirectory.create_or_open(machine.directory, NodeId(machine.name))
        label = session_label(store.store_id, incarnation)
        kv = EtcdCatalog(SimulatedGateway(cluster.etcd), CATALOG, session=label)
        await self._until_it_works(kv.begin_session)
        namespace = Namespace(kv, store.store_id, incarnation, time.time_ns)
        settings = await self._until_it_works(lambda: namespace.format_if_empty(cluster.settings))
        store.join(settings.cluster, CATALOG)
        await self._until_it_works(NodeSession(kv, store, incarnation).begin)
        marks = SetBackMark(store.store_id, store.uses)
        database = MountDatabase(store.mount_db, was_set_back=marks.was_set_back())
        database.forget_handles()
        database.close()
        self.store, self.connection, self.is_new_connection = store, incarnation, True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_session, kv, store, incarnation)
            await nursery.start(self._keep_running, "mount", MountLife, incarnation)
            await nursery.start(self._keep_running, "agent", AgentLife, incarnation)
            task_status.started()

    async def _until_it_works(self, call: Callable[[], Awaitable[Any]]) -> Any:
        while True:
            try:
                return await call()
            except (CatalogUnavailable, StoreError):
                await trio.sleep(RESTART_SECONDS)

    async def _keep_session(self, kv: EtcdCatalog, store: StoreDirectory, incarnation: int) -> None:
        while True:
            try:
                await kv.keep_session()
            except SessionEnded:
                self.cluster.note(f"{self.machine.name} its session ended")
            await self._until_it_works(NodeSession(kv, store, incarnation).begin)

    async def _keep_running(
        self,
        role: str,
        kind: "type[MountLife] | type[AgentLife]",
        incarnation: int,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        begun = False
        while self.is_up:
            life = Process(self.machine, role)
            self.lives[role] = life
            one = kind(self, life, incarnation)
            ready = trio.Event()
            self.cluster.nursery.start_soon(self._live, life, one, ready)
            if not begun:
                begun = True
                async with trio.open_nursery() as nursery:
                    for event in (ready, life.ended):
                        nursery.start_soon(_cancel_after, event, nursery.cancel_scope)
                task_status.started()
            await life.ended.wait()
            await trio.sleep(RESTART_SECONDS)

    async def _live(self, life: Process, one: "MountLife | AgentLife", ready: trio.Event) -> None:
        process.set(life)
        try:
            with life.scope:
                await one.run(ready)
        except BaseException as error:
            self._ended_by(life, error)
        finally:
            life.alive = False
            if life.role == "mount" and self.mount is one:
                self.mount = None
            if life.role == "agent" and self.agent is one:
                self.agent = None
            self.cluster.network.kill(life)
            one.close()
            life.ended.set()
            self._tell()

    def _ended_by(self, life: Process, error: BaseException) -> None:
        """A process that ends by itself, but for what it may meet at its start."""
        if not life.alive or isinstance(error, trio.Cancelled):
            return
        leaves = list(_leaves(error))
        if all(isinstance(leaf, CacheError | trio.Cancelled) for leaf in leaves):
            self.cluster.note(f"{self.machine.name} {life.role} ended: {leaves[0]}")
            return
        trouble = "".join(traceback.format_exception(error))
        self.cluster.problem(f"{self.machine.name}: the {life.role} process died: {trouble}")

    def state(self) -> str:
        """What its processes say of themselves, for the trace."""
        agent = self.agent
        if agent is None or self.mount is None:
            return f"is not whole: {self.mount} {agent}"
        parts = agent.agent
        return (
            f"{parts.collector.statistics} {parts.sweep.statistics} {parts.replicator.statistics()}"
            f" members={[(one.node, one.live) for one in parts.members.known()]} damaged={parts.sweep.statistics.refused}"
        )

    # ---- the kernel's side

    async def ask(self, opcode: int, ino: int, body: bytes) -> bytes:
        """A request of the kernel's: sent again to the next mount process if one is killed before the kernel has the answer.

        Raises `OSError`.
        """
        connection = self.connection
        self._unique += 2
        unique = self._unique
        self.pending[unique] = None
        try:
            while True:
                if not connection or self.connection != connection:
                    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
                mount = self.mount
                if mount is None or not mount.life.alive or mount.is_ending:
                    await self.changed.wait()
                    continue
                await self.machine.turn()
                found = await mount.carry_out(RequestHeader(len(body), opcode, unique, ino, 0, 0, 1, 0, 0), body)
                if found is not None and self.kills_before_answer and self.mount is mount and world.chance.random() < 0.3:
                    self.kills_before_answer -= 1
                    await self.kill_process("mount")
                    continue
                if found is not None:
                    mount.answered(unique)
                    return found
        finally:
            del self.pending[unique]


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _leaves(error: BaseException) -> Any:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


class MountLife:
    """One mount process."""

    def __init__(self, node: Node, life: Process, incarnation: int) -> None:
        self.node = node
        self.life = life
        self.incarnation = incarnation
        self._to_repeat: set[int] = set()
        self.server: LocalServer | None = None
        self._opened = ExitStack()
        self._all_repeated = trio.Event()
        self.replica: ReplicatedCatalog | None = None

    async def run(self, ready: trio.Event) -> None:
        node, cluster, incarnation = self.node, self.node.cluster, self.incarnation
        store = node.store
        self._marks = marks = SetBackMark(store.store_id, store.uses)
        self._opened.callback(marks.close)
        self.database = database = MountDatabase(store.mount_db, was_set_back=marks.was_set_back())
        self._opened.callback(database.close)
        label = session_label(store.store_id, incarnation)
        origin = EtcdCatalog(SimulatedGateway(cluster.etcd), CATALOG, session=session_for(label))
        kv = self.replica = ReplicatedCatalog(origin, store.replica_db)
        self._opened.callback(lambda: kv._connection.close())
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            await nursery.start(kv.run)
            await self._run(nursery, ready, kv)

    async def _run(self, nursery: trio.Nursery, ready: trio.Event, kv: ReplicatedCatalog) -> None:
        node, store, database = self.node, self.node.store, self.database
        fence = await SessionFence.begin(kv, store.node, store.store_id, self.incarnation)
        self.repeats = repeats = Repeats(kv, store.node, self.incarnation)
        await repeats.load(database.files_in_use())
        namespace = Namespace(kv, store.store_id, self.incarnation, time.time_ns, changes=repeats.changes)
        self.versions = versions = Versions(kv, store.store_id, self.incarnation, time.time_ns)
        segments = Segments(store.segments)
        mark = RefusalMark(store.store_id, store.path)
        last = partial(last_use, database, store.boot, mark, self._marks, new_connection=node.is_new_connection)
        returned = ReturnedStore(namespace, database, segments, store.store_id, self.incarnation, last)
        database.take_over()
        await returned.bring_back()
        fence.on_renewed = returned.require_not_lost
        settings = await namespace.settings()
        agent = cast(LocalClient, LocalSocket(lambda: node.agent.server if node.agent is not None else None))
        self._agent = agent
        remote = RemoteContent(agent)
        self.open_files = open_files = OpenFiles(database, segments, None, on_use=self._marks.count)
        self._opened.callback(self._close_descriptors)
        reclaimer = Reclaimer(kv, segments, RemoteReaders(kv, self._live_stores))
        holds = SegmentHolds(kv, store.store_id)
        elsewhere = RemoteFiles(open_files, remote, holds)

        def sealer() -> Sealer:
            return Sealer(segments, settings.data_shards, settings.cell_size, SMALL)

        self.settler = settler = Settler(open_files, database, versions, sealer(), reclaimer, SETTLE_SECONDS, self._wake_agent)
        self.growing = growing = GrowingFiles(
            kv,
            store.store_id,
            versions,
            open_files,
            database,
            sealer(),
            SETTLE_SECONDS,
            time.time_ns,
            lambda: self._wake_agent(False),
            run_in_turn,
        )
        removed = RemovedInodes(database, self.incarnation)
        namespace.before_removal = removed.expect
        repeats.noted_elsewhere(removed.requests)
        view = AttributeView(namespace, open_files, removed, remote, store.store_id, 1.0, keeps_names=False)
        records = FileRecords(namespace, open_files, removed, database)
        content = FileContent(namespace, versions, open_files, segments, database, view, elsewhere, reclaimer, store.store_id)
        self.writing = RemoteWriting(open_files, remote, self.incarnation)
        self.noted = NotedWrites(database, store.store_id, self.incarnation)
        files = FileOperations(
            namespace, versions, open_files, segments, database, view, records, content, elsewhere, self.writing,
            self.noted, removed, settler, growing,
            reclaimer, store.store_id,
        )  # fmt: skip
        self.writers = writers = WritersElsewhere(open_files, database, content, files, self.noted)
        nameless = NamelessFiles(namespace, open_files, segments, database, view, settler, files.opened)
        names = NameOperations(namespace, view, content, files, nameless, removed, repeats, open_files.paths)
        inodes = InodeOperations(namespace, view, records, files, repeats, store.path)
        self._handlers = behind_barrier(names.handlers() | files.handlers() | inodes.handlers(), kv)
        self._segment_switch = SegmentSwitch(versions, segments, open_files, reclaimer, store.store_id)
        recovery = MountRecovery(
            database, store.store_id, namespace, versions, segments, open_files, settler, reclaimer, holds, content.reopen,
            store.boot, mark, self._marks, new_connection=node.is_new_connection, restore_guests=writers.restore,
        )  # fmt: skip
        node.is_new_connection = False
        await recovery.run()
        await growing.begin()
        sweep = SegmentSweep(
            namespace, versions, segments, open_files, reclaimer, database, store.store_id, end_unheld=files.end_unheld
        )
        for task in (
            fence.run,
            settler.run,
            reclaimer.run,
            holds.run,
            elsewhere.keep_what_died,
            growing.run,
            sweep.run,
            self.writing.run,
            writers.run,
        ):
            nursery.start_soon(task)
        nursery.start_soon(self._checkpoint_now_and_then, kv)
        nursery.start_soon(self._wake_agent, False)
        nursery.start_soon(self._let_go_of_earlier, files)
        self.server = LocalServer(self.life, nursery, self.answer)
        self._to_repeat = set(node.pending)
        self._look_whether_all_came()
        node.mount = self
        node._tell()
        ready.set()
        await trio.sleep_forever()

    def close(self) -> None:
        """What the end of the process closes."""
        self._opened.close()

    def _close_descriptors(self) -> None:
        for file in self.open_files:
            for descriptor in (file.descriptor, file.write_descriptor, file.guest_descriptor, file.copy_descriptor):
                if descriptor is not None:
                    with suppress(OSError):
                        os.close(descriptor)

    # ---- requests

    async def carry_out(self, header: RequestHeader, body: bytes) -> bytes | None:
        """The answer, or None if the process was killed before. Raises `OSError`."""
        results: list[bytes | OSError] = []
        done = trio.Event()

        async def work() -> None:
            process.set(self.life)
            try:
                with memoryview(body) as view:
                    results.append(bytes(await self._handlers[header.opcode](header, view) or b""))
            except Exception as error:
                number = errno_of(error)
                if number is None:
                    trouble = "".join(traceback.format_exception(error))
                    self.node.cluster.problem(f"{self.node.machine.name}: request {header.opcode} failed: {trouble}")
                results.append(OSError(number or errno.EIO, str(error)))
            finally:
                done.set()

        self.nursery.start_soon(work)
        await done.wait()
        if not results or not self.life.alive:
            return None
        if isinstance(results[0], OSError):
            self.answered(header.unique)
            raise results[0]
        return results[0]

    @property
    def is_ending(self) -> bool:
        """Whether a part of it has failed, so that it ends by itself."""
        return bool(self.nursery.cancel_scope.cancel_called)

    def answered(self, unique: int) -> None:
        """The kernel has taken the answer."""
        self.repeats.answered(unique)
        self.writing.answered(unique)
        self.noted.answered(self.noted.own(unique))
        self._to_repeat.discard(unique)
        self._look_whether_all_came()

    def _look_whether_all_came(self) -> None:
        if not self._to_repeat and not self._all_repeated.is_set():
            self.repeats.all_repeated()
            self._all_repeated.set()

    async def _let_go_of_earlier(self, files: FileOperations) -> None:
        await self._all_repeated.wait()
        await close_ghosts(self.open_files, files.let_go, nothing_told)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `MountProcess.answer`."""
        match request["do"]:
            case "protected":
                await self.versions.kv.make_durable()
                vids = [Vid(vid) for vid in request["vids"]]
                self.database.set_protected(vids, in_use=self.open_files.protected(set(vids)))
                self.growing.protected(vids)
                return {"ok": True}
            case "call":
                call, data = from_message(request)
                return answer_as_message(await self.writers.call(StoreId(bytes(request["store"])), call, data))
            case "settle":
                self.settler.hurry()
                return {"ok": True}
            case "switch_segment":
                ino, vid, before = InodeNumber(request["ino"]), Vid(request["vid"]), SegmentId(request["before"])
                right, message = await self._segment_switch.switch(ino, vid, before, place_of(request))
                return {"ok": right, "message": message}
        raise AssertionError(request)

    async def _wake_agent(self, urgent: bool) -> None:
        with suppress(NodeNotAnswering):
            await self._agent.call({"do": "wake", "urgent": urgent})

    async def _live_stores(self) -> set[Any] | None:
        try:
            answer = await self._agent.call({"do": "status", "fresh": True}, timeout_seconds=5.0)
        except NodeNotAnswering:
            return None
        return {bytes.fromhex(one["store"]) for one in answer["stores"] if one["live"]} if answer.get("ok") else None

    async def _checkpoint_now_and_then(self, kv: ReplicatedCatalog) -> None:
        noted = 0
        while True:
            self.database.settle_debts()
            with suppress(CacheError):
                if (revision := await kv.revision()) > noted:
                    noted = revision
                    self.database.set_fact(CATALOG_FACT, b"%d" % revision)
            self.database.checkpoint()
            await trio.sleep(8.0)


class AgentLife:
    """One agent process."""

    def __init__(self, node: Node, life: Process, incarnation: int) -> None:
        self.node = node
        self.life = life
        self.incarnation = incarnation
        self.server: LocalServer | None = None
        self._opened = ExitStack()

    async def run(self, ready: trio.Event) -> None:
        node, cluster, store = self.node, self.node.cluster, self.node.store
        label = session_label(store.store_id, self.incarnation)
        kv = EtcdCatalog(SimulatedGateway(cluster.etcd), CATALOG, session=label)
        fence = await SessionFence.begin(kv, store.node, store.store_id, self.incarnation)
        settings = await Namespace(kv, store.store_id, self.incarnation, time.time_ns).settings()
        teller = MountTeller(cast(LocalClient, LocalSocket(lambda: node.mount.server if node.mount is not None else None)))
        waiting = MountDatabaseReader(store.mount_db)
        self._opened.callback(waiting.close)
        agent = self.agent = Agent(
            store,
            kv,
            settings,
            self.incarnation,
            cluster.codec,
            SimulatedTransport(cluster.network),
            waiting,
            teller.protected,
            teller.switch_segment,
            time.time_ns,
            AgentSettings(
                listen=f"10.0.0.{node.machine.number}:7000",
                small_file_size=SMALL,
                buffer_bytes_max=1 << 20,
                restore_buffer_bytes_max=1 << 20,
                reserve_fraction=0.0,
                shortfall_seconds=2.0,
                raise_look_seconds=5.0,
                raise_unchanged_seconds=10.0,
                sweep_seconds=SWEEP_SECONDS,
                collect_seconds=COLLECT_SECONDS,
                grace_seconds=GRACE_SECONDS,
                repair_after_seconds=LOST_AFTER_SECONDS,
                rebuild_look_seconds=REBUILD_SECONDS,
            ),
            settle=teller.settle,
            answer_call=teller.call,
        )
        agent.sweep._unnamed_seconds = UNNAMED_SECONDS
        self._opened.callback(agent._opened.close)
        async with trio.open_nursery() as nursery, AsyncExitStack():
            nursery.start_soon(fence.run)
            await nursery.start(agent.run)
            self.server = LocalServer(self.life, nursery, AgentRequests(agent).answer)
            node.agent = self
            node._tell()
            ready.set()
            await trio.sleep_forever()

    def close(self) -> None:
        """What the end of the process closes."""
        self._opened.close()


async def nothing_told(inos: Sequence[InodeNumber]) -> dict[InodeNumber, Use]:
    """The simulated kernel passes everything through, and is not asked."""
    return {}
