"""The agent process: its composition root. Started as `python -m ckptfs.fs.agent_process CONFIG PARENT INCARNATION`.

It may be killed at any moment: what waits stands in `mount.db`, what is held in the shard files, the rest in the catalog.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial

import trio

from ckptfs.cache.admission import require_not_removed
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.fs.agent import Agent, AgentSettings
from ckptfs.fs.agent_files import OwnersKept, take_over
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.fs.agent_user import AgentUser, agent_user, stays_root
from ckptfs.fs.catalog import join_token, open_catalog
from ckptfs.fs.config import ConfigurationError, NodeConfig, load_handed_config
from ckptfs.fs.drain import NotClosed
from ckptfs.fs.home_calls import answer_from_message, as_message, seconds_max
from ckptfs.fs.local_socket import LocalClient, NodeNotAnswering, bind, serve
from ckptfs.fs.peer_transport import transport_of
from ckptfs.fs.privileges import RightsKept, give_up_root
from ckptfs.fs.process_start import (
    be_killed_for_memory,
    death_logged,
    die_with_parent,
    ignore_broken_leases,
    is_ready,
    raise_descriptor_limit,
    start_log,
    write_pid_file,
)
from ckptfs.replication.codec import choose_codec
from ckptfs.replication.errors import PeerUnreachable
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_client import Mended
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall

log = logging.getLogger(__name__)

VIDS_PER_MESSAGE = 1000

SWITCH_SECONDS_MAX = 3600.0
"""How long the mount may take to copy, sync and hash the largest file; a dead one breaks off at once."""


class MountTeller:
    """What the agent tells the node's mount, and has it do."""

    def __init__(self, mount: LocalClient) -> None:
        self._mount = mount

    async def protected(self, vids: Sequence[Vid]) -> bool:
        """Whether the mount heard it."""
        for start in range(0, len(vids), VIDS_PER_MESSAGE):
            try:
                answer = await self._mount.call({"do": "protected", "vids": list(vids[start : start + VIDS_PER_MESSAGE])})
            except NodeNotAnswering as error:
                log.info("mount_not_told error=%s", error)
                return False
            if not answer.get("ok"):
                return False
        return True

    async def not_closed(self) -> NotClosed | None:
        """What the mount has not sealed yet; None if it isn't heard."""
        try:
            answer = await self._mount.call({"do": "status"})
        except NodeNotAnswering:
            return None
        if not answer.get("ok"):
            return None
        settling = int(answer["settling_files"])
        return NotClosed(settling, max(0, int(answer["written_files"]) - settling))

    async def settle(self) -> None:
        """Have it seal what is closed; whoever waits for that asks again if it isn't heard."""
        try:
            await self._mount.call({"do": "settle"})
        except NodeNotAnswering as error:
            log.info("mount_not_told error=%s", error)

    async def call(self, store: StoreId, call: HomeCall, data: memoryview) -> HomeAnswer:
        """Have it carry out what a program on the store's node does to a file whose home is here. Raises `PeerUnreachable`."""
        request = {"do": "call", "store": store, **as_message(call, data)}
        try:
            answer = await self._mount.call(request, timeout_seconds=seconds_max(call.call))
            if answer.get("ok"):
                return answer_from_message(answer)
        except NodeNotAnswering as error:
            raise PeerUnreachable(f"its mount process does not answer ({error})") from None
        raise PeerUnreachable(f"its mount process does not do it: {answer.get('message')}")

    async def switch_segment(self, ino: InodeNumber, vid: Vid, before: SegmentId, copy: CopyPlace) -> Mended:
        """Have the mount put a segment made of the copy in the place of a damaged one."""
        place = {"copy": os.fspath(copy.path), "identity": copy.identity}
        request = {"do": "switch_segment", "ino": ino, "vid": vid, "before": before, **place}
        try:
            answer = await self._mount.call(request, timeout_seconds=SWITCH_SECONDS_MAX)
        except NodeNotAnswering as error:
            return Mended(False, f"the mount process does not answer ({error}): try again")
        return Mended(bool(answer.get("ok")), str(answer.get("message", "")))


async def run(config: NodeConfig, incarnation: int, store: StoreDirectory, user: AgentUser, listener: socket.socket) -> None:
    """Run the node's agent until SIGTERM, as that user already; `listener` is to serve the node's other processes."""
    codec = choose_codec(config.protection.codec)
    if config.protection.codec == "auto" and codec.name != "isa-l":
        log.warning("codec=%s: ISA-L (Debian package libisal2) is not there, encoding takes ten times as long", codec.name)
    transport = transport_of(config)
    kv = open_catalog(config, "agent", session=session_label(store.store_id, incarnation))
    fence = await SessionFence.begin(kv, config.node_id, store.store_id, incarnation)
    fence.on_renewed = partial(require_not_removed, kv, store.store_id)
    cluster = await Namespace(kv, store.store_id, incarnation, time.time_ns).settings()
    store.join(cluster.cluster, config.node.catalog)
    mount = LocalClient(store.mount_socket)
    teller = MountTeller(mount)
    waiting = MountDatabaseReader(store.mount_db)
    settings = AgentSettings(
        listen=config.node.listen,
        labels=config.node.labels,
        small_file_size=config.protection.small_file_size_bytes,
        buffer_bytes_max=config.protection.buffer_bytes_max,
        reserve_fraction=config.space.reserve_fraction,
        repair_bytes_per_second_max=config.repair.bytes_per_second_max,
        scrub_seconds=config.repair.scrub_days * 86400.0,
        join_token=join_token(config),
        repair_after_seconds=config.protection.repair_after_seconds,
    )
    agent = Agent(
        store,
        kv,
        cluster,
        incarnation,
        codec,
        transport,
        waiting,
        teller.protected,
        teller.switch_segment,
        time.time_ns,
        settings,
        settle=teller.settle,
        not_closed=teller.not_closed,
        answer_call=teller.call,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_signal, nursery.cancel_scope)
            nursery.start_soon(fence.run)
            address = await nursery.start(agent.run)
            await nursery.start(serve, listener, AgentRequests(agent, user).answer)
            is_ready(store.run, "agent")
            log.info("agent_ready store=%s address=%s codec=%s", store.path, address, codec.name)
        with trio.CancelScope(shield=True):
            await agent.leave()
    finally:
        with trio.CancelScope(shield=True):
            await agent.aclose()
            await mount.aclose()
            await kv.aclose()
        waiting.close()
        log.info("agent_ended")


async def _end_on_signal(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()


def become_agent_user(config: NodeConfig, store: StoreDirectory) -> tuple[AgentUser, socket.socket]:
    """All that is root's to do, and then no root any more, if it was root that started this process: before it has read a byte
    that comes from another node. Returns the user, and a socket to serve the node's other processes.

    Raises `ConfigurationError`, and `StoreError` where the agent's files can't be made ready.
    """
    wanted = config.node.agent_user
    user = agent_user(wanted, store.cluster or b"", config.node.listen)
    catalog = config.catalog_path if config.etcd_place is None else None
    try:
        try:
            take_over(store, config.log_directory, catalog, user)
        except OwnersKept as refusal:
            if wanted:
                raise ConfigurationError(f"node.agent_user: {refusal}; {_WAITS}") from None
            user = stays_root(str(refusal))
            take_over(store, config.log_directory, catalog, user)
        write_pid_file(store.run, "agent", user.uid)
        listener = bind(store.agent_socket)
        if user.keeps is not None:
            give_up_root(user.uid, user.gid, user.keeps)
    except OSError as error:
        raise StoreError(f"the agent's files in {store.path} can't be made ready for {user.name}: {error}; {_WAITS}") from None
    except RightsKept as error:
        raise ConfigurationError(f"the agent can't become {user.name}: {error}; {_WAITS}") from None
    os.umask(0o077)
    return user, listener


_WAITS = (
    "it is tried again, and until then files are saved and stay local;"
    ' with node.agent_user = "root" the agent runs as root, as in earlier releases'
)


def main() -> None:
    """Entry of the process."""
    handed_config, parent, incarnation = sys.argv[1:]
    die_with_parent(int(parent))
    config = load_handed_config(int(handed_config))
    raise_descriptor_limit()
    ignore_broken_leases()
    be_killed_for_memory(20)
    with death_logged(config.store / "run", "agent"):
        store = StoreDirectory.create_or_open(config.store, config.node_id)
        user, listener = become_agent_user(config, store)
        die_with_parent(int(parent))  # which another user's process has forgotten
        start_log(config.log_directory / "agent", "agent")
        log.log(logging.WARNING if user.why else logging.INFO, "agent_user name=%s uid=%d: %s", user.name, user.uid, user.why)
        with contextlib.suppress(KeyboardInterrupt):
            trio.run(run, config, int(incarnation), store, user, listener)


if __name__ == "__main__":
    main()
