"""The supervisor: makes the FUSE connection, keeps its descriptor, and keeps the mount and the agent running on it.

It stays small so that it never has a reason to die: no catalog of names, no peers, no requests. Its session in the catalog
says that the node is up; it ends with the lock on the store. If it is killed all the same, its children go with it, and the next
one goes on with the same connection where a service manager kept that; else it cleans the dead mount away.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from functools import partial

import msgspec
import trio

from ckptfs import __version__
from ckptfs.cache.admission import require_admitted
from ckptfs.cache.catalog_examination import examine
from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.drive_refusal import refuses_writes
from ckptfs.cache.ids import ID_SIZE
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.fs import fuse_device, service_manager, upgrade
from ckptfs.fs.agent_watch import AgentWatch
from ckptfs.fs.catalog import check_not_older, join_token, open_catalog
from ckptfs.fs.child import Child
from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.config import NodeConfig, hand_config, load_handed_config
from ckptfs.fs.connection import clean_stale_mount, forget_connection, kept_connection, new_connection
from ckptfs.fs.fuse_device import MountError
from ckptfs.fs.local_socket import LocalClient, NodeNotAnswering
from ckptfs.fs.mount_table import abort_connection, mounts_at, mounts_inside
from ckptfs.fs.mount_users import described, users_of
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.node_session import NodeSession
from ckptfs.fs.process_start import (
    END_MOUNT_SIGNAL,
    FOR_GOOD_STATUS,
    be_spared_for_memory,
    is_ready,
    kills_for_memory,
    raise_descriptor_limit,
    remove_pid_file,
    start_log,
)
from ckptfs.fs.recovered_catalog import take_note_of_recovery
from ckptfs.fs.run_cover import cover_if_refused, uncover
from ckptfs.fs.space import make_room_to_start, store_reserve
from ckptfs.fs.start_checks import check_machine, check_store

log = logging.getLogger(__name__)

RESTART_SECONDS_MIN = 0.05
RESTART_SECONDS_MAX = 5.0
STABLE_SECONDS = 10.0
"""A process that lived this long died by accident: it is restarted at once."""
STOP_SECONDS = 20.0
KILLED_STATUSES = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)
DRAIN_ANSWER_SECONDS = 5.0
"""How much later than its deadline the agent may say what it protected."""
DRAIN_RETRY_SECONDS = 0.2
GIVE_UP_SECONDS = 10.0
"""For so long a mount process is tried on a drive that takes no writes: then programs are to have errors."""


class Supervisor:
    """One node's supervisor. `run` raises `ConfigurationError`, `CodecUnavailable`, `StoreError`, `DamagedData` and `MountError`
    before anything is mounted, `MountError` when one of its processes gave up for good, and `NotReached` at the end of a node
    that was asked to end (SIGTERM) and has files nobody else has."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._stopping = False
        self._ended_for_good = ""
        self._upgrading = False
        self._draining = False
        self._not_drained = ""
        self._python = sys.executable
        self._children: dict[str, Child] = {}
        self._replaced: set[Child] = set()

    async def run(self) -> None:
        config = self._config
        handed = upgrade.handed_over()
        if handed is None:
            check_machine(config)
            if not mounts_at(config.mountpoint):
                fuse_device.check_mountpoint(config.mountpoint)  # before a store is made for nothing
        store = StoreDirectory.create_or_open(config.store, config.node_id)
        with contextlib.ExitStack() as held:
            self._lock = store.acquire() if handed is None else handed.lock
            held.callback(os.close, self._lock)
            start_log(config.log_directory, "supervisor")
            self._run = store.run
            held.callback(uncover, store.run)
            if handed is None:
                uncover(store.run)
            self._reserve = store_reserve(store)
            make_room_to_start(self._reserve)
            held.callback(remove_pid_file, store.run, "supervisor")
            seen_revision = 0
            if handed is None:
                connection = kept_connection(config.mountpoint, store.path)
                if connection is None:
                    clean_stale_mount(config.mountpoint, store.path)
                    fuse_device.check_mountpoint(config.mountpoint)
                seen_revision = check_store(store)
                if config.etcd_place is None:
                    examine(config.catalog_path, seen_revision=None if store.cluster is None else seen_revision)
            else:  # store and catalog are in use, by the children
                connection = handed.connection
                self._children = {role: Child(pid) for role, pid in handed.children.items()}
            incarnation = time.time_ns() if connection is None else connection.incarnation
            kv = open_catalog(config, "supervisor", session=session_label(store.store_id, incarnation), create=True)
            agent = LocalClient(store.agent_socket)
            watch = AgentWatch(partial(_ping, agent), self._agent_that_serves)
            session = NodeSession(kv, store, incarnation, lambda: watch.hangs)
            if not isinstance(kv, SqliteCatalog):
                await check_not_older(kv, config.node.catalog, seen_revision)
                await kv.begin_session()
            await self._join(kv, store, incarnation)
            if handed is None:
                await take_note_of_recovery(kv, store)
            await session.begin()
            if connection is None:
                connection = new_connection(config, incarnation)
                log.info("mounted mountpoint=%s store=%s incarnation=%d", config.mountpoint, store.path, incarnation)
            else:
                log.warning(
                    "connection_taken_over mountpoint=%s incarnation=%d version=%s", config.mountpoint, incarnation, __version__
                )
            self._connection = connection
            held.callback(os.close, connection.device)
            held.callback(fuse_device.unmount, config.mountpoint, lazily=True)
            held.callback(forget_connection, connection)
            upgrade.remove_request(store.run)
            self._handed_config = hand_config(config)
            held.callback(os.close, self._handed_config)
            service_manager.notify("READY=1")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.keep)
                nursery.start_soon(watch.keep)
                await self._supervise(store)
                nursery.cancel_scope.cancel()
            await agent.aclose()
            await session.end()
            await kv.aclose()
            log.info("node_ended")
            if role := self._ended_for_good:
                reason = NodeProcesses(store.path).failures().get(role, f"the {role} process gave up; its log says why")
                raise MountError(f"{reason}; the node has ended, what was closed is safe in its store")
            if self._not_drained:
                raise NotReached(self._not_drained)

    async def _join(self, kv: KeyValue, store: StoreDirectory, incarnation: int) -> None:
        protection = self._config.protection
        namespace = Namespace(kv, store.store_id, incarnation, time.time_ns)
        wanted = Settings(
            FORMAT_VERSION,
            os.urandom(ID_SIZE),
            protection.data_shards,
            protection.parity_shards,
            protection.cell_size_bytes,
            protection.failure_domain,
        )
        settings = await namespace.format_if_empty(wanted, os.geteuid(), os.getegid())
        store.join(settings.cluster, self._config.node.catalog)
        await require_admitted(kv, store.store_id, store.node, join_token(self._config))
        if msgspec.structs.replace(wanted, cluster=settings.cluster) != settings:
            log.warning(
                "settings_differ cluster=%d+%d cell=%d: the cluster's hold, not this file's",
                settings.data_shards,
                settings.parity_shards,
                settings.cell_size,
            )

    def _agent_that_serves(self) -> Child | None:
        agent = self._children.get("agent")
        return None if self._stopping or agent in self._replaced else agent

    async def _supervise(self, store: StoreDirectory) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_running, "mount", nursery.cancel_scope)
            nursery.start_soon(self._keep_running, "agent", nursery.cancel_scope)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                async for number in signals:
                    if number == signal.SIGHUP:
                        nursery.start_soon(self._upgrade, store)
                        continue
                    if number == signal.SIGTERM and self._config.node.drain_seconds and not self._draining:
                        self._draining = True
                        nursery.start_soon(self._drain_and_stop, store, nursery.cancel_scope)
                        continue
                    await self._stop()
                    nursery.cancel_scope.cancel()

    async def _drain_and_stop(self, store: StoreDirectory, scope: trio.CancelScope) -> None:
        """Protect first what only this node has, as far as there is time; a second signal ends that."""
        seconds = self._config.node.drain_seconds
        service_manager.notify("STOPPING=1")
        agent, deadline = LocalClient(store.agent_socket), trio.current_time() + seconds
        while True:
            left = max(0.0, deadline - trio.current_time())
            try:
                request = {"do": "drain", "deadline": left, "leave": False}
                report = await agent.call(request, timeout_seconds=left + DRAIN_ANSWER_SECONDS)
                break
            except NodeNotAnswering as error:  # it may just be starting
                report = {"ok": False, "message": str(error)}
            if not left:
                break
            await trio.sleep(min(left, DRAIN_RETRY_SECONDS))
        if not report.get("ok"):
            self._not_drained = f"what only this node has could not be protected before it ended: {report.get('message')}"
        elif report["possible"] and report["unknown"]:
            self._not_drained = (
                f"the node ended, and whether all that only it has is protected is not known: {report['unknown']}; what was "
                "closed is safe on its drive, and lost with it"
            )
        elif report["possible"] and (report["left_files"] or report["open_files"]):
            self._not_drained = (
                f"the node ended with {report['left_files']} files ({report['left_bytes']} bytes) that are not protected, and "
                f"{report['open_files']} that were being written; they are safe on its drive, and lost with it"
            )
        log.log(logging.ERROR if self._not_drained else logging.INFO, "drained report=%s", report)
        await self._stop()
        scope.cancel()

    def _start(self, role: str, *more: str, descriptors: tuple[int, ...] = ()) -> Child:
        device, incarnation, _ = self._connection
        command = [self._python, "-P", "-m", f"ckptfs.fs.{role}_process", str(self._handed_config)]
        command += [str(device)] if role == "mount" else []
        shared = (self._handed_config, self._lock, *([device] if role == "mount" else []), *descriptors)
        return Child.start([*command, str(os.getpid()), str(incarnation), *more], shared)

    async def _keep_running(self, role: str, scope: trio.CancelScope) -> None:
        delay_seconds = RESTART_SECONDS_MIN
        unstable_since: float | None = None
        while True:
            started = trio.current_time()
            if role not in self._children:
                make_room_to_start(self._reserve)
                if cover_if_refused(self._run) and (other := self._children.get("agent" if role == "mount" else "mount")):
                    other.kill()  # its socket lies under the cover; the next one makes it anew
                self._children[role] = self._start(role)
            child = self._children[role]
            kills_before = kills_for_memory()
            status = await child.reaped()
            if self._stopping:
                return
            if self._children[role] is child:
                del self._children[role]
            if child in self._replaced:
                self._replaced.remove(child)
                continue
            if role == "mount" and status == 0:  # so it ends only when the kernel has told it that the connection has
                log.info("unmounted_from_outside: the node ends")
                await self._stop()
                scope.cancel()
                return
            if status == FOR_GOOD_STATUS:
                self._ended_for_good = role
                scope.cancel()
                return
            said = NodeProcesses(self._config.store).failures().get(role, "") if status == 1 else ""
            log.error("process_ended role=%s status=%d: restarted%s", role, status, f": {said}" if said else "")
            if status == -signal.SIGKILL and kills_for_memory() > kills_before:
                log.error(
                    "killed_for_memory role=%s: the kernel ended it: this machine, or the node's cgroup, is short of memory;"
                    " nothing is lost, programs waited: give it more, or take work away",
                    role,
                )
            # One that was killed from outside says nothing about the next, and programs wait for that.
            died_by_itself = trio.current_time() - started <= STABLE_SECONDS and status not in KILLED_STATUSES
            delay_seconds = min(2 * delay_seconds, RESTART_SECONDS_MAX) if died_by_itself else RESTART_SECONDS_MIN
            unstable_since = (unstable_since or started) if died_by_itself else None
            hopeless = unstable_since is not None and trio.current_time() - unstable_since > GIVE_UP_SECONDS
            if role == "mount" and hopeless and refuses_writes(self._config.store):
                log.critical("mount_can_not_start: the store's drive takes no writes; programs get errors, not an endless wait")
                for mounted in mounts_at(self._config.mountpoint):
                    abort_connection(mounted)
                self._ended_for_good = role
                scope.cancel()
                return
            await trio.sleep(delay_seconds)

    async def _stop(self) -> None:
        """End in order: the mount commits what is closed, the agent finishes its batch, then the file system goes."""
        self._stopping = True
        service_manager.notify("STOPPING=1")
        if not fuse_device.unmount(self._config.mountpoint):
            by = described(users_of(self._config.mountpoint), mounts_inside(self._config.mountpoint))
            log.warning("mount_in_use mountpoint=%s by %s: they get errors now", self._config.mountpoint, by)
        for role in ("mount", "agent"):
            child = self._children.get(role)
            if child is not None:
                await _end(role, child)

    # Going on with another release: the order of it stands in `upgrade`

    async def _upgrade(self, store: StoreDirectory) -> None:
        request = upgrade.read_request(store.run)
        if request is None or request.error or self._stopping or self._upgrading:
            return
        self._upgrading = True
        log.info("upgrade_begun from=%s to=%s python=%s", __version__, request.version, request.python)
        previous, self._python = self._python, request.python
        try:
            await self._replace_mount(store)
            await self._replace_agent()
            children = {role: child.pid for role, child in self._children.items()}
            handed = upgrade.HandedOver(self._connection, self._lock, children)
            upgrade.become(request.python, self._handed_config, handed)
        except (OSError, upgrade.CannotTakeOver) as error:
            self._python, self._upgrading = previous, False
            log.error("upgrade_failed to=%s error=%s", request.version, error)
            upgrade.write_request(store.run, msgspec.structs.replace(request, error=str(error)))

    async def _replace_mount(self, store: StoreDirectory) -> None:
        """Raises `CannotTakeOver` if the new mount process does not get ready; then the old one goes on."""
        old = self._children.get("mount")
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                new = self._start("mount", str(theirs.fileno()), descriptors=(theirs.fileno(),))
            refusal = await upgrade.refusal_of(ours)
            if not refusal and (old is None or self._children.get("mount") is not old or self._stopping):
                refusal = "the old mount process ended meanwhile and is started anew; try again"
            if refusal:
                new.kill()
                await new.reaped()
                reason = NodeProcesses(store.path).failures().get("mount", refusal)
                is_ready(store.run, "mount")  # the old one is
                raise upgrade.CannotTakeOver(reason)
            assert old is not None
            self._replaced.add(old)
            self._children["mount"] = new
            old.kill()
            await old.ended.wait()
            ours.send(upgrade.GO)

    async def _replace_agent(self) -> None:
        old = self._children.get("agent")
        if old is not None:
            self._replaced.add(old)
            await _end("agent", old)  # and by then `_keep_running` has started the new one


async def _ping(agent: LocalClient, timeout_seconds: float) -> None:
    await agent.call({"do": "ping"}, timeout_seconds=timeout_seconds)


async def _end(role: str, child: Child) -> None:
    child.terminate(END_MOUNT_SIGNAL if role == "mount" else signal.SIGTERM)
    with trio.move_on_after(STOP_SECONDS):
        await child.ended.wait()
    if not child.ended.is_set():
        log.error("process_did_not_end role=%s: killed", role)
        child.kill()
        await child.ended.wait()


def run(config: NodeConfig) -> None:
    """Run the node until SIGTERM or SIGINT, or until it is unmounted."""
    raise_descriptor_limit()
    be_spared_for_memory()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it means an upgrade
    os.chdir("/")
    trio.run(Supervisor(config).run)


def main() -> None:
    """Entry of a process that was another release's supervisor a moment ago."""
    try:
        run(load_handed_config(int(sys.argv[1])))
    except (MountError, NotReached) as error:
        sys.exit(f"ckptfs: {error}")


if __name__ == "__main__":
    main()
