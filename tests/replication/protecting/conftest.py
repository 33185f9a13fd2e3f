"""Six nodes in one process, with everything real but the mounts: SQLite catalog, stores on disk, servers on loopback.

What a mount would do is done by `Node.save`: the version is made, sealed and put into `mount.db` as the mount does it.
"""

import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings, Version, VersionState
from ckptfs.cache.catalog_kv import Compare, Operation, TransactionResult
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, Vid, new_segment_id, new_vid
from ckptfs.cache.mount_db import FileRow, FileState, MountDatabase, WaitingVersion
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.prefixes import Prefix, begin_prefix
from ckptfs.cache.seal import SealCandidate, Sealed, Sealer
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import begin_session, session_label
from ckptfs.cache.versions import LocalCommit, Versions
from ckptfs.fs.agent import Agent, AgentSettings
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_readers import RemoteReaders
from ckptfs.fs.segment_switch import SegmentSwitch
from ckptfs.replication import members
from ckptfs.replication.codec import Cell, WritableCell, choose_codec
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_client import Mended
from ckptfs.replication.transport import PlainTransport

CELL = 16 << 10
SMALL = 8 << 10
K, M, NODES = 4, 2, 6
WAIT_SECONDS = 60.0


class GatedCodec:
    """The real engine; while the gate is shut, encoding and decoding stop before the given stripe (counted from the shutting)."""

    def __init__(self) -> None:
        self._codec = choose_codec("auto")
        self._left = -1
        self._reached = threading.Event()
        self._open = threading.Event()
        self._open.set()

    @property
    def name(self) -> str:
        return self._codec.name

    def shut(self, before_stripe: int = 0) -> None:
        self._left = before_stripe
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._left = -1
        self._open.set()

    async def reached(self) -> None:
        """Wait until an encoding stands before the gate."""
        assert await trio.to_thread.run_sync(self._reached.wait, 30.0)

    def encode(self, data: Sequence[Cell], parity: Sequence[WritableCell]) -> None:
        self._pass_the_gate()
        self._codec.encode(data, parity)

    def reconstruct(self, cells: Mapping[int, Cell], wanted: Mapping[int, WritableCell], k: int, m: int) -> None:
        self._pass_the_gate()
        self._codec.reconstruct(cells, wanted, k, m)

    def _pass_the_gate(self) -> None:
        if not self._open.is_set():
            self._left -= 1
            if self._left < 0:
                self._reached.set()
                assert self._open.wait(60.0)


class FlakyCatalog(SqliteCatalog):
    """The real engine, whose next transactions can be made to fail before anything happened."""

    failures_left = 0

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        if self.failures_left:
            self.failures_left -= 1
            raise CatalogUnavailable("not now")
        return await super().transact(compares, operations)


class Saved:
    """A file that was closed and sealed."""

    def __init__(self, ino: InodeNumber, vid: Vid, segment: SegmentId, content: bytes) -> None:
        self.ino = ino
        self.vid = vid
        self.segment = segment
        self.content = content


class Node:
    """One node. `down` and `up` end and start its agent, as often as wanted."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.incarnation = time.time_ns()
        self.store = StoreDirectory.create_or_open(cluster.directory / f"node-{number}", NodeId(f"node-{number}"))
        self.lock = self.store.acquire()
        self.segments = Segments(self.store.segments)
        self.mount_db = MountDatabase(self.store.mount_db)
        self.kv = SqliteCatalog.open(cluster.directory / "catalog.db", writer_label=f"node-{number}")
        self.namespace = Namespace(self.kv, self.store.store_id, self.incarnation, time.time_ns)
        self.versions = Versions(self.kv, self.store.store_id, self.incarnation, time.time_ns)
        self.sealer = Sealer(self.segments, K, CELL, SMALL)
        self.codec = GatedCodec()
        self.told: list[Vid] = []
        self.hears = True
        self.settled_count = 0
        self.collect_seconds, self.grace_seconds = 1e9, 600.0
        self.agent: Agent | None = None
        self._scope: trio.CancelScope | None = None
        self._ended = trio.Event()

    async def up(self) -> None:
        label = session_label(self.store.store_id, self.incarnation)
        self.agent_kv = FlakyCatalog(os.fspath(self.cluster.directory / "catalog.db"), f"agent-{self.number}", label)
        await begin_session(self.agent_kv, self.store.node, self.store.store_id, self.incarnation)
        self.waiting = MountDatabaseReader(self.store.mount_db)
        agent = self.agent = Agent(
            self.store,
            self.agent_kv,
            self.cluster.settings,
            self.incarnation,
            self.codec,
            PlainTransport(stall_seconds=5.0),
            self.waiting,
            self._protected,
            self._switch_segment,
            time.time_ns,
            AgentSettings(
                labels=self.cluster.labels.get(self.number),
                small_file_size=SMALL,
                buffer_bytes_max=self.cluster.buffer_bytes_max,
                restore_buffer_bytes_max=self.cluster.buffer_bytes_max,
                reserve_fraction=0.0,
                shortfall_seconds=self.cluster.shortfall_seconds,
                raise_look_seconds=0.05,
                sweep_seconds=self.cluster.sweep_seconds,
                collect_seconds=self.collect_seconds,
                grace_seconds=self.grace_seconds,
                raise_unchanged_seconds=self.cluster.raise_unchanged_seconds,
                rebuild_look_seconds=1e9,
                scrub_seconds=0.0,
                repairs_reads=self.cluster.repairs_reads,
            ),
            settle=self._settle,
        )
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        await self.cluster.nursery.start(self._run, agent)

    async def _run(self, agent: Agent, *, task_status: trio.TaskStatus[str]) -> None:
        assert self._scope is not None
        try:
            with self._scope:
                await agent.run(task_status=task_status)
        finally:
            with trio.CancelScope(shield=True):
                await agent.aclose()
                await self.agent_kv.aclose()
            self.waiting.close()
            self.agent = None
            self._ended.set()

    async def down(self) -> None:
        if self._scope is not None and self.agent is not None:
            self._scope.cancel()
            await self._ended.wait()

    async def close(self) -> None:
        self.codec.open()
        await self.down()
        self.mount_db.close()
        await self.kv.aclose()
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1

    @property
    def running(self) -> Agent:
        assert self.agent is not None
        return self.agent

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        return await AgentRequests(self.running).answer({"do": do, **fields})

    async def _settle(self) -> None:
        self.settled_count += 1

    async def _protected(self, vids: Sequence[Vid]) -> bool:
        if not self.hears:
            return False
        self.told += vids
        self.mount_db.set_protected(vids)
        self.mount_db.remove_prefixes([row.ino for row in self.mount_db.prefixes() if row.vid in vids])
        return True

    async def _switch_segment(self, ino: InodeNumber, vid: Vid, before: SegmentId, copy: CopyPlace) -> Mended:
        open_files = OpenFiles(self.mount_db, self.segments, None)
        reclaimer = Reclaimer(self.kv, self.segments, RemoteReaders(self.kv))
        switch = SegmentSwitch(self.versions, self.segments, open_files, reclaimer, self.store.store_id)
        mended = await switch.switch(ino, vid, before, copy)
        await reclaimer.drain()
        return mended

    # ---- what a mount does

    async def save(self, name: str, content: bytes, *, wake: bool = True) -> Saved:
        segment = new_segment_id()
        created = await self.namespace.create_file(ROOT_INODE, name.encode(), stat.S_IFREG | 0o644, 0, 0, segment)
        os.close(self.segments.create(segment, created.ino))
        return await self._write(created.ino, created.vid, segment, content, name, wake)

    async def open(self, name: str, content: bytes) -> Saved:
        """A file that is being written: its open version."""
        segment = new_segment_id()
        created = await self.namespace.create_file(ROOT_INODE, name.encode(), stat.S_IFREG | 0o644, 0, 0, segment)
        os.close(self.segments.create(segment, created.ino))
        with open(self.segments.path_of(segment), "wb") as file:
            file.write(content)
        return Saved(created.ino, created.vid, segment, content)

    async def prefix(self, opened: Saved, *, wake: bool = True) -> Saved:
        """What it has so far, on its way to be protected."""
        inode, vid = await self.namespace.inode(opened.ino), new_vid()
        descriptor = self.segments.open_read(opened.segment)
        hashed = self.sealer.hash_prefix(SealCandidate(opened.ino, vid, opened.segment, descriptor, lambda: True))
        os.close(descriptor)
        assert isinstance(hashed, Sealed)
        made = Prefix(vid, hashed.size, hashed.root, hashed.cell_size, hashed.mtime_ns, inode)
        assert await begin_prefix(self.kv, self.store.store_id, opened.ino, opened.vid, made)
        row = WaitingVersion(opened.ino, vid, opened.segment, hashed.size, time.time_ns(), b"log", is_prefix=True)
        self.mount_db.put_prefix(row)
        if wake and self.agent is not None:
            self.agent.replicator.wake()
        with open(self.segments.path_of(opened.segment), "rb") as file:
            return Saved(opened.ino, vid, opened.segment, file.read(hashed.size))

    async def rewrite(self, saved: Saved, content: bytes, *, wake: bool = True) -> Saved:
        opened = await self.versions.open_for_writing(saved.ino, truncate_to_new_segment=None)
        self.mount_db.remove_files([saved.ino])
        return await self._write(saved.ino, opened.vid, opened.segment, content, "rewritten", wake)

    async def _write(self, ino: InodeNumber, vid: Vid, segment: SegmentId, content: bytes, name: str, wake: bool) -> Saved:
        with open(self.segments.path_of(segment), "r+b") as file:
            file.truncate()
            file.write(content)
        descriptor = self.segments.open_read(segment)
        (sealed,) = self.sealer.seal([SealCandidate(ino, vid, segment, descriptor, lambda: True)])
        os.close(descriptor)
        assert isinstance(sealed, Sealed)
        commit = LocalCommit(ino, vid, sealed.size, sealed.root, sealed.cell_size, sealed.mtime_ns, release_writer=True)
        assert (await self.versions.commit_local([commit])).vids == {vid}
        row = FileRow(ino, vid, segment, FileState.LOCAL, sealed.size, time.time_ns(), None, name.encode())
        self.mount_db.put_file(row)
        if wake and self.agent is not None:
            self.agent.replicator.wake()
        return Saved(ino, vid, segment, content)

    async def version(self, saved: Saved) -> Version:
        version = await self.versions.version(saved.vid)
        assert version is not None
        return version

    async def protected(self, *saved: Saved) -> list[Version]:
        """Wait until they are, and return their records."""
        with trio.fail_after(WAIT_SECONDS):
            while True:
                versions = [await self.version(one) for one in saved]
                if all(version.state is VersionState.PROTECTED for version in versions):
                    return versions
                await trio.sleep(0.01)

    async def content(self, saved: Saved) -> bytes:
        """As the mount of this node would read it: by `fetch`, part by part."""
        data = bytearray()
        while len(data) < len(saved.content):
            length = min(100_000, len(saved.content) - len(data))
            answer = await self.ask("fetch", ino=saved.ino, vid=saved.vid, offset=len(data), length=length)
            assert answer["ok"], answer
            if "data" in answer:
                data += answer["data"]
                continue
            with open(answer["copy"], "rb") as file:
                file.seek(len(data))
                data += file.read(length)
        return bytes(data)

    async def settled(self) -> None:
        """Wait until nothing waits or is in progress."""
        with trio.fail_after(WAIT_SECONDS):
            while True:
                statistics = self.running.replicator.statistics()
                if not statistics.in_progress and not statistics.waiting_count and not self.mount_db.exposure().files:
                    return
                await trio.sleep(0.01)

    async def delete(self, saved: Saved, name: str) -> None:
        await self.namespace.unlink(ROOT_INODE, name.encode())
        self.segments.remove(saved.segment)
        self.mount_db.remove_files([saved.ino])
        self.running.replicator.wake()

    def shard_path(self, saved: Saved, index: int) -> Path:
        return Path(self.running.shard_store.path_of(saved.vid, index))

    def drop_copies(self) -> None:
        """Forget what was fetched."""
        for vid in self.running.copies.vids():
            self.running.copies.remove(vid)


class Cluster:
    """The nodes, by number."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.directory = directory
        self.nursery = nursery
        self.shortfall_seconds = 0.3
        self.raise_unchanged_seconds = 1e9
        self.sweep_seconds = 1e9
        self.repairs_reads = False
        self.buffer_bytes_max = 2 << 20
        self.labels: dict[int, dict[str, str]] = {}
        self.settings = Settings(FORMAT_VERSION, b"c" * 16, K, M, CELL)
        self.nodes: list[Node] = []

    async def up(self, count: int = NODES) -> None:
        """So many more nodes."""
        new = [Node(self, len(self.nodes) + number) for number in range(count)]
        self.nodes += new
        for node in new:
            await node.namespace.format_if_empty(self.settings)
        for node in new:
            await node.up()

    async def down(self, *numbers: int) -> None:
        for number in numbers:
            await self.nodes[number].down()

    async def elect(self) -> Node:
        """The node that leads, after every one that runs has looked."""
        running = [node for node in self.nodes if node.agent is not None]
        for _ in range(2):
            for node in running:
                await node.running.leadership.look()
        return next(node for node in running if node.running.leadership.is_held)

    def number_of(self, store: bytes) -> int:
        return [node.store.store_id for node in self.nodes].index(store)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]


@pytest.fixture
async def cluster(
    tmp_path: Path, nursery: trio.Nursery, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """Six nodes that are up; with `@pytest.mark.parametrize("cluster", [3], indirect=True)` that many.

    All of them share one event loop. On a busy machine a ping can take longer than the two seconds after which its node counts
    as away, and what is protected just then gets a smaller code; nodes that are down refuse at once.
    """
    monkeypatch.setattr(members, "PING_SECONDS_MAX", 30.0)
    cluster = Cluster(tmp_path, nursery)
    await cluster.up(getattr(request, "param", NODES))
    yield cluster
    for node in cluster.nodes:
        await node.close()
