"""A node's mount without a kernel: the handlers on a real catalog and a real store, asked directly.

The kernel's side is left out (no passthrough, no permission checks, no cache). Without `start_agent` the agent does not answer,
so that bytes of another node are unreachable. `kill` leaves what a killed process leaves: files, and nothing in memory.
"""

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from ckptfs.cache import refusal_mark
from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings, VersionState
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.known_records import KnownRecords
from ckptfs.cache.mount_db import MountDatabase
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.seal import Sealer
from ckptfs.cache.segments import Segments
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import begin_session, session_label
from ckptfs.cache.versions import Versions
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.agent import Agent, AgentSettings
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.fs.attributes import AttributeView
from ckptfs.fs.file_content import FileContent
from ckptfs.fs.file_records import FileRecords
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_errors import errno_of
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, AtOnce, FuseSession, Handler, Lull
from ckptfs.fs.growing import GrowingFiles
from ckptfs.fs.inode_operations import InodeOperations
from ckptfs.fs.known_answers import KnownAnswers
from ckptfs.fs.local_socket import LocalClient, serve
from ckptfs.fs.mount_recovery import MountRecovery
from ckptfs.fs.nameless_files import NamelessFiles
from ckptfs.fs.names import NameOperations
from ckptfs.fs.noted_writes import NotedWrites
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.fs.remote_content import RemoteContent
from ckptfs.fs.remote_files import RemoteFiles
from ckptfs.fs.remote_readers import RemoteReaders
from ckptfs.fs.remote_writing import RemoteWriting
from ckptfs.fs.removed_inodes import RemovedInodes
from ckptfs.fs.repeats import Repeats
from ckptfs.fs.segment_holds import SegmentHolds
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.fs.segment_switch import SegmentSwitch
from ckptfs.fs.settle import Settler
from ckptfs.fs.shared_commits import SharedCommits
from ckptfs.fs.writers_elsewhere import WritersElsewhere
from ckptfs.replication.codec import choose_codec
from ckptfs.replication.errors import PeerUnreachable
from ckptfs.replication.local_copies import CopyPlace
from ckptfs.replication.peer_client import Mended
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall
from ckptfs.replication.transport import PlainTransport

CELL = 64 << 10
SETTLE_SECONDS = 2.0


class Attributes(NamedTuple):
    """What stat shows of it."""

    ino: int
    size: int
    mode: int
    nlink: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    blocks: int
    rdev: int


class Listed(NamedTuple):
    """One entry of a directory that was read."""

    ino: int
    cookie: int
    name: bytes


def unpack_attributes(packed: bytes) -> Attributes:
    ino, size, blocks, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, _, _ = (
        fuse.ATTRIBUTES.unpack(packed)
    )
    atime_ns, mtime_ns, ctime_ns = (
        (seconds - (1 << 64) if seconds >> 63 else seconds) * 10**9 + nanoseconds
        for seconds, nanoseconds in ((atime, atimensec), (mtime, mtimensec), (ctime, ctimensec))
    )
    return Attributes(ino, size, mode, nlink, uid, gid, atime_ns, mtime_ns, ctime_ns, blocks, rdev)


def _receive(end: socket.socket, answers: dict[int, tuple[int, bytes]]) -> None:
    """All that is there."""
    with contextlib.suppress(BlockingIOError):
        while message := end.recv(fuse.BUFFER_SIZE):
            _, error, unique = fuse.OUT_HEADER.unpack_from(message)
            answers[unique] = -error, message[fuse.OUT_HEADER.size :]


class Clock:
    """Wall time, as segments have it, that never stands still."""

    def __init__(self) -> None:
        self._newest = 0

    def __call__(self) -> int:
        self._newest = max(self._newest + 1, time.time_ns())
        return self._newest


@dataclass
class BareNode:
    """One life of a mount process. Names are asked for by parent and name, as the kernel does."""

    store: StoreDirectory
    kv: SqliteCatalog
    namespace: Namespace
    versions: Versions
    segments: Segments
    database: MountDatabase
    open_files: OpenFiles
    settler: Settler
    growing: GrowingFiles
    reclaimer: Reclaimer
    holds: SegmentHolds
    files: FileOperations
    names: NameOperations
    inodes: InodeOperations
    repeats: Repeats
    writing: RemoteWriting
    writers: WritersElsewhere
    noted: NotedWrites
    uniques: Iterator[int]
    told: list[str]
    catalog: Path
    set_back: SetBackMark
    lives: list["BareNode"]
    lull: Lull
    at_once: dict[int, AtOnce]
    alive: bool = True

    def handlers(self) -> dict[int, Handler]:
        return self.names.handlers() | self.files.handlers() | self.inodes.handlers()

    async def ask(
        self, opcode: int, ino: int, body: bytes = b"", *, unique: int | None = None, uid: int = 0, gid: int = 0
    ) -> bytes:
        """The answer to a request. The kernel is told it, unless the request has a number of its own: see `tell`."""
        handlers = self.handlers()
        number = next(self.uniques) if unique is None else unique
        header = RequestHeader(fuse.IN_HEADER.size + len(body), opcode, number, ino, uid, gid, 1, 0, 0)
        try:
            with memoryview(body) as view:
                known = self.at_once[opcode](header, view) if opcode in self.at_once else None
                answer: Answer | int | None = None
                try:
                    answer = await handlers[opcode](header, view)
                except Exception as error:
                    answer = errno_of(error)
                    raise
                finally:
                    assert known is None or known == answer, "what is answered at once is not what the handler answers"
        finally:
            if unique is None:
                self.tell(number)
        return b"" if answer is None or isinstance(answer, int) else bytes(answer)

    async def ask_at_once(self, requests: dict[int, tuple[int, int, bytes]], answers: dict[int, tuple[int, bytes]]) -> None:
        """Have a session read these requests, by number (opcode, inode, body), all of which are there when it begins. `answers`
        is given what it answered, errno and body, also where this raises."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            for unique, (opcode, ino, body) in requests.items():
                theirs.send(fuse.IN_HEADER.pack(fuse.IN_HEADER.size + len(body), opcode, unique, ino, 0, 0, 1, 0, 0) + body)
            session = FuseSession(
                ours.fileno(),
                self.handlers(),
                allow_passthrough=False,
                negotiated=None,
                on_negotiated=lambda agreed: None,
                on_answered=self.tell,
                lull=self.lull,
                at_once=self.at_once,
            )
            try:
                with trio.fail_after(60):
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(session.run)
                        while requests.keys() - answers.keys():
                            await trio.lowlevel.wait_readable(theirs)
                            _receive(theirs, answers)
                        nursery.cancel_scope.cancel()
            finally:
                _receive(theirs, answers)

    def tell(self, unique: int) -> None:
        """The kernel takes the answer to the request of this number."""
        self.repeats.answered(unique)
        self.writing.answered(unique)
        self.noted.answered(self.noted.own(unique))

    async def errno(self, awaitable: Awaitable[object]) -> str:
        """The name of the error a request got; "" if it got none."""
        try:
            await awaitable
        except Exception as error:
            number = errno_of(error)
            if number is None:
                raise
            return errno.errorcode[number]
        return ""

    # Names

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        return unpack_attributes((await self.ask(Opcode.LOOKUP, parent, name + b"\0"))[fuse.ENTRY_OUT.size :])

    async def create(
        self, name: bytes, parent: int = 1, flags: int = os.O_RDWR, mode: int = 0o100644, **header: int
    ) -> tuple[int, int]:
        """(ino, fh) of a file that is created, or opened if it is there."""
        body = fuse.CREATE_IN.pack(flags | os.O_CREAT, mode, 0, 0) + name + b"\0"
        answer = await self.ask(Opcode.CREATE, parent, body, **header)
        fh, _, _ = fuse.OPEN_OUT.unpack(answer[-fuse.OPEN_OUT.size :])
        return fuse.ENTRY_OUT.unpack_from(answer)[0], fh

    async def mkdir(self, name: bytes, parent: int = 1, mode: int = 0o755, **header: int) -> int:
        answer = await self.ask(Opcode.MKDIR, parent, fuse.MKDIR_IN.pack(mode, 0) + name + b"\0", **header)
        return int(fuse.ENTRY_OUT.unpack_from(answer)[0])

    async def unlink(self, name: bytes, parent: int = 1) -> None:
        await self.ask(Opcode.UNLINK, parent, name + b"\0")

    async def rename(self, old: bytes, new: bytes, flags: int = 0, parents: tuple[int, int] = (1, 1)) -> None:
        body = fuse.RENAME2_IN.pack(parents[1], flags, 0) + old + b"\0" + new + b"\0"
        await self.ask(Opcode.RENAME2, parents[0], body)

    async def opendir(self, ino: int) -> int:
        return int(fuse.OPEN_OUT.unpack(await self.ask(Opcode.OPENDIR, ino))[0])

    async def readdir(self, ino: int, fh: int, offset: int, size: int = 4096) -> list[Listed]:
        """The entries of one answer."""
        answer = await self.ask(Opcode.READDIR, ino, fuse.READ_IN.pack(fh, offset, size, 0, 0, 0, 0))
        assert len(answer) <= size
        found = []
        at = 0
        while at < len(answer):
            number, cookie, length, _ = fuse.DIRENT.unpack_from(answer, at)
            at += fuse.DIRENT.size
            found.append(Listed(number, cookie, answer[at : at + length]))
            at += -(-length // 8) * 8
        return found

    # Files

    async def open(self, ino: int, flags: int = os.O_RDONLY, **header: int) -> int:
        answer = await self.ask(Opcode.OPEN, ino, fuse.OPEN_IN.pack(flags, 0), **header)
        return int(fuse.OPEN_OUT.unpack(answer)[0])

    async def write(self, fh: int, data: bytes, offset: int = 0) -> int:
        body = fuse.WRITE_IN.pack(fh, offset, len(data), 0, 0, 0, 0) + data
        return int(fuse.WRITE_OUT.unpack(await self.ask(Opcode.WRITE, 0, body))[0])

    async def read(self, fh: int, size: int = 1 << 20, offset: int = 0) -> bytes:
        return await self.ask(Opcode.READ, 0, fuse.READ_IN.pack(fh, offset, size, 0, 0, 0, 0))

    async def release(self, *handles: int) -> None:
        for fh in handles:
            await self.ask(Opcode.RELEASE, 0, fuse.RELEASE_IN.pack(fh, 0, 0, 0))

    async def fsync(self, fh: int) -> None:
        await self.ask(Opcode.FSYNC, 0, fuse.FSYNC_IN.pack(fh, 0, 0))

    async def save(self, name: bytes, content: bytes, parent: int = 1) -> int:
        """A file written, closed and sealed; its inode number."""
        ino, fh = await self.create(name, parent)
        await self.write(fh, content)
        await self.release(fh)
        await self.settle()
        return ino

    async def content(self, ino: int) -> bytes:
        fh = await self.open(ino)
        try:
            return await self.read(fh)
        finally:
            await self.release(fh)

    async def getattr(self, ino: int) -> Attributes:
        answer = await self.ask(Opcode.GETATTR, ino, fuse.GETATTR_IN.pack(0, 0, 0))
        return unpack_attributes(answer[fuse.ATTR_OUT.size :])

    # What happens in the background

    async def settle(self) -> None:
        """Seal what is closed, remove what is to be removed."""
        await self.settler.settle_due(everything=True)
        await self.holds.drain()
        await self.reclaimer.drain()

    def sweep(self) -> SegmentSweep:
        """A sweep that has looked at nothing yet."""
        return SegmentSweep(
            self.namespace,
            self.versions,
            self.segments,
            self.open_files,
            self.reclaimer,
            self.database,
            self.store.store_id,
            end_unheld=self.files.end_unheld,
        )

    async def state(self, ino: int) -> VersionState | None:
        """The state of the version the inode shows, or of the one that is being written."""
        inode = await self.namespace.inode(InodeNumber(ino))
        vid = inode.open or inode.cur
        version = None if vid is None else await self.versions.version(vid)
        return None if version is None else version.state

    def segment_count(self) -> int:
        return sum(1 for path in self.store.segments.rglob("*") if path.is_file())

    def kill(self) -> None:
        """What the end of the process closes; in memory nothing is left."""
        if self.alive:
            self.alive = False
            for file in self.open_files:
                for descriptor in (file.descriptor, file.write_descriptor, file.guest_descriptor, file.copy_descriptor):
                    if descriptor is not None:
                        os.close(descriptor)
            self.database.close()
            self.set_back.close()


StartNode = Callable[..., Awaitable[BareNode]]


@asynccontextmanager
async def bare_nodes(tmp_path: Path) -> AsyncIterator[StartNode]:
    """See `start_node`. Their stores and catalog lie in the directory."""
    nodes: list[BareNode] = []
    clients: list[LocalClient] = []
    now_ns = Clock()
    uniques = itertools.count(2, 2)

    async def start(name: str = "a", *, incarnation: int = 1, new_connection: bool = False) -> BareNode:
        store = StoreDirectory.create_or_open(tmp_path / name, NodeId(name))
        set_back = SetBackMark(store.store_id, store.uses)
        kv = SqliteCatalog.open(tmp_path / "catalog.db", writer_label=name)
        lull = Lull()
        repeats = Repeats(kv, NodeId(name), incarnation, SharedCommits(kv, lull).transact)
        namespace = Namespace(kv, store.store_id, incarnation, now_ns, changes=repeats.changes)
        settings = await namespace.format_if_empty(Settings(FORMAT_VERSION, bytes(16), 4, 2, CELL))
        versions = Versions(kv, store.store_id, incarnation, now_ns)
        segments = Segments(store.segments)
        database = MountDatabase(store.mount_db, was_set_back=set_back.was_set_back())
        if new_connection:
            database.forget_handles()
        await repeats.load(database.files())
        open_files = OpenFiles(database, segments, None, on_use=set_back.count)
        client = LocalClient(store.agent_socket)
        clients.append(client)
        remote = RemoteContent(client, wait_seconds=0)
        reclaimer = Reclaimer(kv, segments, RemoteReaders(kv))
        holds = SegmentHolds(kv, store.store_id)
        elsewhere = RemoteFiles(open_files, remote, holds)
        writing = RemoteWriting(open_files, remote, incarnation)
        noted = NotedWrites(database, store.store_id, incarnation)
        told: list[str] = []

        async def on_local(urgent: bool) -> None:
            for _ in range(20):  # the agent is another process
                await trio.lowlevel.checkpoint()
            told.append("local")

        sealer = Sealer(segments, settings.data_shards, settings.cell_size, CELL)
        settler = Settler(open_files, database, versions, sealer, reclaimer, SETTLE_SECONDS, on_local)
        growing = GrowingFiles(
            kv,
            store.store_id,
            versions,
            open_files,
            database,
            Sealer(segments, settings.data_shards, settings.cell_size, CELL),
            SETTLE_SECONDS,
            now_ns,
            lambda: on_local(False),
            trio.to_thread.run_sync,
        )
        database.take_over()
        removed = RemovedInodes(database, incarnation)
        namespace.before_removal = removed.expect
        repeats.noted_elsewhere(removed.requests)
        view = AttributeView(namespace, open_files, removed, remote, store.store_id, 1.0)
        records = FileRecords(namespace, open_files, removed, database)
        content = FileContent(namespace, versions, open_files, segments, database, view, elsewhere, reclaimer, store.store_id)
        files = FileOperations(
            namespace,
            versions,
            open_files,
            segments,
            database,
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
        writers = WritersElsewhere(open_files, database, content, files, noted)
        recovery = MountRecovery(
            database,
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
            RefusalMark(store.store_id, store.path),
            set_back,
            new_connection=new_connection,
            restore_guests=writers.restore,
        )
        await recovery.run()
        await growing.begin()
        nameless = NamelessFiles(namespace, open_files, segments, database, view, settler, files.opened)
        nodes.append(
            BareNode(
                store,
                kv,
                namespace,
                versions,
                segments,
                database,
                open_files,
                settler,
                growing,
                reclaimer,
                holds,
                files,
                NameOperations(namespace, view, content, files, nameless, removed, repeats, open_files.paths),
                InodeOperations(namespace, view, records, files, repeats, store.path),
                repeats,
                writing,
                writers,
                noted,
                uniques,
                told,
                tmp_path / "catalog.db",
                set_back,
                nodes,
                lull,
                KnownAnswers(KnownRecords(kv), view).at_once(),
            )
        )
        return nodes[-1]

    try:
        yield start
    finally:
        for client in clients:
            await client.aclose()
        for node in nodes:
            node.kill()
            await node.kv.aclose()


@pytest.fixture
async def start_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartNode]:
    """`await start_node("a")`: a node of that name; again with the name of a killed one, the next life of it."""
    monkeypatch.setattr(refusal_mark, "RUN", tmp_path / "run")
    async with bare_nodes(tmp_path) as start:
        yield start


StartAgent = Callable[[BareNode], Awaitable[Agent]]


@pytest.fixture
async def start_agent(nursery: trio.Nursery) -> AsyncIterator[StartAgent]:
    """`await start_agent(node)`: the node's agent, answering on its socket, until the end of the test."""
    async with AsyncExitStack() as stack:

        async def start(node: BareNode) -> Agent:
            session = session_label(node.store.store_id, 1)
            kv = SqliteCatalog.open(node.catalog, writer_label=f"{node.store.node}/agent", session=session)
            stack.push_async_callback(kv.aclose)
            stack.callback(os.close, node.store.acquire())  # the session lasts as long as the lock is held
            await begin_session(kv, node.store.node, node.store.store_id, 1)
            waiting = MountDatabaseReader(node.store.mount_db)
            stack.callback(waiting.close)

            async def protected(vids: Sequence[Vid]) -> bool:
                node.database.set_protected(vids, in_use=node.open_files.protected(set(vids)))
                node.growing.protected(vids)
                return True

            switch = SegmentSwitch(node.versions, node.segments, node.open_files, node.reclaimer, node.store.store_id)

            async def switch_segment(ino: InodeNumber, vid: Vid, before: SegmentId, copy: CopyPlace) -> Mended:
                return await switch.switch(ino, vid, before, copy)

            async def call(store: StoreId, asked: HomeCall, data: memoryview) -> HomeAnswer:
                life = next(life for life in reversed(node.lives) if life.store.store_id == node.store.store_id)
                if not life.alive:
                    raise PeerUnreachable("its mount process does not answer")
                return await life.writers.call(store, asked, bytes(data))

            settings = AgentSettings(reserve_fraction=0.0, shortfall_seconds=0.0)
            codec, transport = choose_codec("numpy"), PlainTransport()
            cluster = await node.namespace.settings()
            agent = Agent(
                node.store,
                kv,
                cluster,
                1,
                codec,
                transport,
                waiting,
                protected,
                switch_segment,
                time.time_ns,
                settings,
                answer_call=call,
            )
            stack.push_async_callback(agent.aclose)
            await nursery.start(agent.run)
            await nursery.start(serve, node.store.agent_socket, AgentRequests(agent).answer)
            return agent

        yield start
        nursery.cancel_scope.cancel()


@pytest.fixture
async def node(start_node: StartNode) -> BareNode:
    """One node alone."""
    return await start_node()
