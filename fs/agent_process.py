"""The agent process: its composition root. It serves peers, protects what is local here, and fetches what isn't.

It may be killed at any moment: what waits is in `mount.db`, what it holds is in files that describe themselves. Started as
`python -m ckptfs.fs.agent_process CONFIG PARENT INCARNATION`.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import Vid
from ckptfs.cache.mount_db import MountDatabaseReader
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import register_store, stores
from ckptfs.cache.versions import Versions
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.fs.config import NodeConfig, load_handed_config
from ckptfs.fs.local_socket import LocalClient, NodeNotAnswering, serve
from ckptfs.fs.mount_process import now_ns
from ckptfs.fs.process_start import death_logged, die_with_parent, raise_descriptor_limit, start_log, write_pid_file
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.codec import choose_codec
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.holders import Holders, Peers
from ckptfs.replication.local_copies import LocalCopies
from ckptfs.replication.members import Members
from ckptfs.replication.own_store import OwnStore
from ckptfs.replication.peer_server import PeerServer
from ckptfs.replication.protect import ProtectionLimits, Protector
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.replicator import Replicator
from ckptfs.replication.restore import Restorer
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies
from ckptfs.replication.stripe_reader import StripeReader
from ckptfs.replication.transport import PlainTransport
from ckptfs.replication.verify import Verifier

log = logging.getLogger(__name__)

ADDRESS_FILE = "agent.address"
"""In the store's `run/`: where the agent listened last, so that its peers find it there again after a restart."""
VERIFY_BUFFER_BYTES = 24 << 20


class AgentProcess:
    """The parts of a running agent."""

    def __init__(self, config: NodeConfig, incarnation: int) -> None:
        self._config = config
        self._incarnation = incarnation
        self._store = StoreDirectory.create_or_open(config.store, config.node_id)
        self._kv = SqliteCatalog.open(config.catalog_path, writer_label=f"{config.node_id}/agent")
        self._mount = LocalClient(self._store.mount_socket)

    async def run(self) -> None:
        store, config, kv = self._store, self._config, self._kv
        namespace = Namespace(kv, store.store_id, self._incarnation, now_ns)
        versions = Versions(kv, store.store_id, self._incarnation, now_ns)
        settings = await namespace.settings()
        reserve_bytes = self._reserve_bytes()
        shards = ShardStore(store.shards, AgentDatabase(store.agent_db), reserve_bytes=reserve_bytes)
        await trio.to_thread.run_sync(shards.recover)
        copies = SmallCopies(store.small_copies_db, reserve_bytes=reserve_bytes, free_bytes=shards.free_bytes)
        segments = Segments(store.segments)
        own = OwnStore(shards, copies, segments)
        identity = PeerIdentity(settings.cluster, store.store_id, config.node_id)
        transport = PlainTransport()
        peers = Peers(transport, identity)
        members = Members(store.store_id, lambda: stores(kv), peers.ping, own.free_bytes)
        holders = Holders(members, own, peers)
        codec = choose_codec(config.protection.codec)
        if codec.name == "numpy" and config.protection.codec == "auto":
            log.warning("codec=numpy: ISA-L is not installed (Debian package libisal2); protecting takes more of the processor")
        log.info("codec=%s", codec.name)
        reader = StripeReader(members, holders, codec)
        restorer = Restorer(reader, holders, LocalCopies(store.copies, reserve_bytes=reserve_bytes))
        verifier = Verifier(reader, members, holders, codec, BufferBudget(VERIFY_BUFFER_BYTES).take)
        limits = ProtectionLimits(
            settings.data_shards,
            settings.parity_shards,
            config.protection.small_file_size_bytes,
            config.protection.buffer_bytes_max,
        )
        with QuietThreads() as threads:
            protector = Protector(limits, kv, versions, members, holders, segments, codec, threads)
            waiting = MountDatabaseReader(store.mount_db)
            replicator = Replicator(protector, versions, members, waiting, self._tell_mount)
            requests = AgentRequests(namespace, versions, members, holders, replicator, restorer, verifier, codec.name)
            server = PeerServer(shards, copies, segments, identity, transport)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_on_signal, nursery.cancel_scope)
                address = await self._listen(server, nursery)
                directory, labels = os.fspath(store.path), config.node.labels
                await register_store(kv, store.store_id, config.node_id, address, directory, labels)
                await members.refresh()
                await nursery.start(restorer.run)
                await nursery.start(replicator.run)
                await nursery.start(serve, store.agent_socket, requests.answer)
                log.info("agent_ready address=%s store=%s", address, store.store_id.hex())
            await peers.aclose()
        await kv.aclose()
        log.info("agent_ended")

    async def _listen(self, server: PeerServer, nursery: trio.Nursery) -> str:
        """Serve peers at the configured address; with port 0, at the port of last time if it is still free."""
        remembered = self._store.run / ADDRESS_FILE
        address = self._config.node.listen
        if address.endswith(":0") and remembered.exists():
            try:
                return str(await nursery.start(server.serve, remembered.read_text().strip()))
            except OSError as error:
                log.warning(
                    "port_taken address=%s error=%s: another one is chosen", remembered.read_text().strip(), error.strerror
                )
        address = str(await nursery.start(server.serve, address))
        remembered.write_text(address)
        return address

    def _reserve_bytes(self) -> int:
        """What shards for others leave free for local saves."""
        status = os.statvfs(self._store.path)
        return int(status.f_blocks * status.f_frsize * self._config.space.reserve_fraction)

    async def _tell_mount(self, vids: Sequence[Vid]) -> bool:
        """Tell the mount which versions are protected; False if it doesn't answer."""
        try:
            return bool((await self._mount.call({"do": "protected", "vids": list(vids)}))["ok"])
        except NodeNotAnswering:
            return False


async def _end_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


def main() -> None:
    """Entry of the process."""
    config_path, parent, incarnation = sys.argv[1:]
    die_with_parent(int(parent))
    config = load_handed_config(Path(config_path))
    start_log(config.log_directory, "agent")
    raise_descriptor_limit()
    with death_logged("agent"):
        process = AgentProcess(config, int(incarnation))
        write_pid_file(config.store / "run", "agent")
        trio.run(process.run)


if __name__ == "__main__":
    main()
