"""The supervisor: opens the FUSE connection, keeps its descriptor, and keeps the mount and the agent running on it.

It stays small so that it never has a reason to die: no catalog of names, no peers, no requests. Its session in the catalog
says that the node is up; it ends with the lock on the store.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import trio

from ckptfs.cache.catalog_examination import examine
from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ID_SIZE
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.reserve import Reserve
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import begin_session, session_label
from ckptfs.fs import fuse_device
from ckptfs.fs.config import NodeConfig
from ckptfs.fs.fuse_device import MountError
from ckptfs.fs.mount_table import abort_connection, mounts_at, mounts_inside
from ckptfs.fs.mount_users import described, users_of
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.process_start import FOR_GOOD_STATUS, raise_descriptor_limit, remove_pid_file, start_log
from ckptfs.fs.space import catalog_reserve_bytes, make_room_to_start, store_reserve
from ckptfs.fs.start_checks import check_machine, check_store

log = logging.getLogger(__name__)

RESTART_SECONDS_MIN = 0.05
RESTART_SECONDS_MAX = 5.0
STABLE_SECONDS = 10.0
"""A process that lived this long died by accident: it is restarted at once."""
STOP_SECONDS = 20.0
READ_AHEAD_BYTES = 8 << 20
"""Two stripes of 4+2 cells of 1 MiB: while one is read, the next is fetched."""


class Supervisor:
    """One node's supervisor. `run` raises `ConfigurationError`, `CodecUnavailable`, `StoreError`, `DamagedData` and `MountError`
    before anything is mounted."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._incarnation = time.time_ns()
        self._stopping = False
        self._ended_for_good = ""
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    async def run(self) -> None:
        config = self._config
        check_machine(config)
        if not mounts_at(config.mountpoint):
            fuse_device.check_mountpoint(config.mountpoint)  # before a store is made for nothing
        store = StoreDirectory.create_or_open(config.store, config.node_id)
        with contextlib.ExitStack() as held:
            lock = store.acquire()
            held.callback(os.close, lock)
            os.set_inheritable(lock, True)
            start_log(config.log_directory, "supervisor")
            for left in store.run.glob("config-*.json"):  # of supervisors that were killed
                left.unlink(missing_ok=True)
            reserve = store_reserve(store)
            make_room_to_start(reserve)
            self._clean_stale_mount(store)
            fuse_device.check_mountpoint(config.mountpoint)
            held.callback(remove_pid_file, store.run, "supervisor")
            seen_revision = check_store(store)
            examine(config.catalog_path, seen_revision=None if store.cluster is None else seen_revision)
            label = session_label(store.store_id, self._incarnation)
            kv = SqliteCatalog.open(
                config.catalog_path,
                writer_label=f"{config.node_id}/supervisor",
                session=label,
                reserve_bytes=catalog_reserve_bytes(config.catalog_path),
            )
            await self._join(kv, store)
            device = fuse_device.open_device()
            held.callback(os.close, device)
            fuse_device.mount(device, config.mountpoint, config.store, allow_other=config.mount.allow_other)
            fuse_device.set_read_ahead(config.mountpoint, READ_AHEAD_BYTES)
            held.callback(fuse_device.unmount, config.mountpoint, lazily=True)
            log.info("mounted mountpoint=%s store=%s incarnation=%d", config.mountpoint, store.path, self._incarnation)
            with tempfile.NamedTemporaryFile("wb", suffix=".json", dir=store.run, prefix="config-") as file:
                file.write(msgspec.json.encode(config))
                file.flush()
                await self._supervise(Path(file.name), device, lock, reserve)
            await kv.end_session(label)
            await kv.aclose()
            log.info("node_ended")
            if role := self._ended_for_good:
                reason = NodeProcesses(store.path).failures().get(role, f"the {role} process gave up; its log says why")
                raise MountError(f"{reason}; the node has ended, what was closed is safe in its store")

    async def _join(self, kv: SqliteCatalog, store: StoreDirectory) -> None:
        protection = self._config.protection
        namespace = Namespace(kv, store.store_id, self._incarnation, time.time_ns)
        wanted = Settings(
            FORMAT_VERSION, os.urandom(ID_SIZE), protection.data_shards, protection.parity_shards, protection.cell_size_bytes
        )
        settings = await namespace.format_if_empty(wanted)
        store.join(settings.cluster, self._config.catalog_path)
        if msgspec.structs.replace(wanted, cluster=settings.cluster) != settings:
            log.warning(
                "settings_differ cluster=%d+%d cell=%d: the cluster's hold, not this file's",
                settings.data_shards,
                settings.parity_shards,
                settings.cell_size,
            )
        await begin_session(kv, self._config.node_id, store.store_id, self._incarnation)

    def _clean_stale_mount(self, store: StoreDirectory) -> None:
        """A mount that an earlier supervisor left when it was killed: its connection is dead, programs get ENOTCONN from it."""
        for mounted in reversed(mounts_at(self._config.mountpoint)):
            if mounted.store == store.path:
                log.warning("stale_mount_removed mountpoint=%s", mounted.mountpoint)
                abort_connection(mounted)
                fuse_device.unmount(mounted.mountpoint, lazily=True)

    async def _supervise(self, config_path: Path, device: int, lock: int, reserve: Reserve) -> None:
        parent = str(os.getpid())
        mount = ["ckptfs.fs.mount_process", str(config_path), str(device), parent, str(self._incarnation)]
        agent = ["ckptfs.fs.agent_process", str(config_path), parent, str(self._incarnation)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_running, "mount", mount, (device, lock), reserve, nursery.cancel_scope)
            nursery.start_soon(self._keep_running, "agent", agent, (lock,), reserve, nursery.cancel_scope)
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    await self._stop()
                    nursery.cancel_scope.cancel()

    async def _keep_running(
        self, role: str, arguments: list[str], descriptors: tuple[int, ...], reserve: Reserve, scope: trio.CancelScope
    ) -> None:
        delay_seconds = RESTART_SECONDS_MIN
        while True:
            started = trio.current_time()
            make_room_to_start(reserve)
            # From this thread, not through trio's: a child is told of its parent's death when the thread that made it ends.
            process = subprocess.Popen([sys.executable, "-P", "-m", *arguments], pass_fds=descriptors, stdin=subprocess.DEVNULL)
            self._children[role] = process
            try:
                status = await _wait_ended(process)
            finally:
                if process.poll() is None:
                    process.kill()
            if self._stopping:
                return
            if role == "mount" and status == 0:
                log.info("unmounted_from_outside: the node ends")
                await self._stop()
                scope.cancel()
                return
            if status == FOR_GOOD_STATUS:
                self._ended_for_good = role
                scope.cancel()
                return
            log.error("process_ended role=%s status=%d: restarted", role, status)
            stable = trio.current_time() - started > STABLE_SECONDS
            delay_seconds = RESTART_SECONDS_MIN if stable else min(2 * delay_seconds, RESTART_SECONDS_MAX)
            await trio.sleep(delay_seconds)

    async def _stop(self) -> None:
        """End in order: the mount commits what is closed, the agent finishes its batch, then the file system goes."""
        self._stopping = True
        if not fuse_device.unmount(self._config.mountpoint):
            by = described(users_of(self._config.mountpoint), mounts_inside(self._config.mountpoint))
            log.warning("mount_in_use mountpoint=%s by %s: they get errors now", self._config.mountpoint, by)
        for role in ("mount", "agent"):
            process = self._children.get(role)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            with trio.move_on_after(STOP_SECONDS):
                await _wait_ended(process)
            if process.poll() is None:
                log.error("process_did_not_end role=%s: killed", role)
                process.kill()


async def _wait_ended(process: "subprocess.Popen[bytes]") -> int:
    """The process's exit status, once it has one."""
    descriptor = os.pidfd_open(process.pid)
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    return process.wait()


def run(config: NodeConfig) -> None:
    """Run the node until SIGTERM or until it is unmounted."""
    raise_descriptor_limit()
    os.chdir("/")
    trio.run(Supervisor(config).run)
