"""The answering side: takes in the connections of peers and has their requests answered (`peer_answers`).

Bounded: connections, memory for payloads over all of them, threads for the disk
(those that read, write and sync apart, so that a sync never keeps a reader waiting), and how long anything may take. A peer
that breaks the protocol loses its connection and is counted; it can't make this process use more memory, keep a thread,
or touch a file other than those that ids name. Nothing a peer sends deletes anything.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from ckptfs import __version__
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.replication import peer_messages
from ckptfs.replication.conversation import PeerIdentity as PeerIdentity
from ckptfs.replication.conversation import State
from ckptfs.replication.errors import PeerNotTrusted, PeerUnreachable, ProtocolViolation, RefusalReason
from ckptfs.replication.frame_format import ForeignVersion
from ckptfs.replication.peer_answers import AnswerCall, Kept, PeerAnswers, PeerServerLimits, Refusal, Talk
from ckptfs.replication.peer_messages import Hello, HomeAnswer, HomeCall, Refused, Welcome
from ckptfs.replication.segment_files import SegmentPaths
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies
from ckptfs.replication.transport import Connection, Transport

logger = logging.getLogger(__name__)

TURN_AWAY_SECONDS_MAX = 1.0
"""Who is turned away is told why, if it listens: it may be one of thousands that don't."""


@dataclass(frozen=True, slots=True)
class PeerServerStatistics:
    """Counters since the start, except `connections_current`. `violations` are connections dropped for breaking the
    protocol, `turned_away` those that came when all were busy, `refusals` requests by reason."""

    connections_current: int
    connections: int
    turned_away: int
    violations: int
    refusals: dict[str, int]
    shards_stored: int
    copies_stored: int
    received_bytes: int
    sent_bytes: int
    peak_payload_bytes: int


async def no_mount(store: StoreId, call: HomeCall, data: memoryview) -> HomeAnswer:
    """For a node that has shards only."""
    raise PeerUnreachable("this node has no mount")


class _Served(Talk):
    """One connection, as the server sees it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.peer = "an unnamed peer"
        self.cancel_scope = trio.CancelScope()
        self.idle_since_seconds: float | None = None


class PeerServer:
    """Serves until it is cancelled; one `serve` at a time."""

    def __init__(
        self,
        shard_store: ShardStore,
        small_copies: SmallCopies,
        segments: SegmentPaths,
        kept: Kept,
        identity: PeerIdentity,
        transport: Transport,
        limits: PeerServerLimits | None = None,
        on_hurry: Callable[[], None] = lambda: None,
        is_member: Callable[[StoreId, NodeId], Awaitable[bool]] | None = None,
        answer_call: AnswerCall = no_mount,
    ) -> None:
        """`on_hurry` hears that somebody on another node waits for files of this one, `answer_call` what programs there write.
        `is_member` says whether a peer's store is in the catalog; without it all are."""
        self._limits = limits or PeerServerLimits()
        self._answers = PeerAnswers(shard_store, small_copies, segments, kept, identity, self._limits, on_hurry, answer_call)
        self._identity = identity
        self._is_member = is_member
        self._transport = transport
        self._served: set[_Served] = set()
        self._connections = self._turned_away = self._violations = 0
        self._received_bytes = self._sent_bytes = 0
        self._refusals: Counter[str] = Counter()

    async def serve(self, address: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen there and serve; reports the address really used, as host:port, when connections are taken."""
        listener = self._transport.listen(address)
        try:
            async with trio.open_nursery() as nursery:
                task_status.started(listener.address)
                while True:
                    try:
                        connection = await listener.accept()
                    except OSError as error:  # out of descriptors or memory: those who wait are taken in later
                        logger.error("peer-accept-failed error=%s", error.strerror)
                        await trio.sleep(0.1)
                        continue
                    self._connections += 1
                    served = _Served(connection)
                    if self._make_room():
                        self._served.add(served)  # now, not when its task gets a turn: others may come before that
                        nursery.start_soon(self._serve, served)
                    else:
                        nursery.start_soon(self._turn_away, served)
        finally:
            listener.close()
            self._answers.close()

    def statistics(self) -> PeerServerStatistics:
        live = [served.stream for served in self._served]
        return PeerServerStatistics(
            connections_current=len(self._served),
            connections=self._connections,
            turned_away=self._turned_away,
            violations=self._violations,
            refusals=dict(self._refusals),
            shards_stored=self._answers.shards_stored,
            copies_stored=self._answers.copies_stored,
            received_bytes=self._received_bytes + sum(stream.received_bytes for stream in live),
            sent_bytes=self._sent_bytes + sum(stream.sent_bytes for stream in live),
            peak_payload_bytes=self._answers.peak_payload_bytes,
        )

    # ---- connections

    def _make_room(self) -> bool:
        if len(self._served) < self._limits.connections_max:
            return True
        idle = [served for served in self._served if served.idle_since_seconds is not None]
        if not idle:
            return False
        longest = min(idle, key=lambda served: served.idle_since_seconds or 0.0)
        longest.cancel_scope.cancel()
        self._served.discard(longest)
        return True

    async def _turn_away(self, served: _Served) -> None:
        self._turned_away += 1
        logger.warning("peer-turned-away connections=%d", len(self._served))
        with trio.move_on_after(TURN_AWAY_SECONDS_MAX):
            await self._part(served, RefusalReason.BUSY, "all connections are in use")

    async def _serve(self, served: _Served) -> None:
        try:
            with served.cancel_scope:
                try:
                    await self._converse(served)
                except ProtocolViolation as error:
                    self._violations += 1
                    logger.warning("peer-violation peer=%r error=%s", served.peer, error)
                    foreign = isinstance(error, ForeignVersion)
                    await self._part(served, RefusalReason.VERSION if foreign else RefusalReason.INVALID, str(error))
                except PeerNotTrusted as error:
                    self._refusals["not_trusted"] += 1
                    logger.warning("peer-not-trusted error=%s", error)
                except PeerUnreachable as error:
                    logger.info("peer-gone peer=%r error=%s", served.peer, error)
                except OSError as error:
                    logger.error("peer-request-failed peer=%r error=%s", served.peer, error)
        finally:
            self._served.discard(served)
            self._received_bytes += served.stream.received_bytes
            self._sent_bytes += served.stream.sent_bytes
            served.stream.connection.close()

    async def _part(self, served: _Served, reason: RefusalReason, message: str) -> None:
        """Say why the connection ends, so that the other side can say it too, and end it."""
        try:
            await served.stream.send(1, Refused(reason, peer_messages.shorten(message)))
            await served.stream.connection.finish()
        except PeerUnreachable:
            pass
        finally:
            served.stream.connection.close()

    async def _converse(self, served: _Served) -> None:
        stream = served.stream
        if not await self._greet(served):
            return
        while True:
            served.idle_since_seconds = trio.current_time()
            try:
                incoming = await stream.receive(idle_seconds=self._limits.idle_seconds)
            finally:
                served.idle_since_seconds = None
            if incoming is None:
                return
            if not served.conversation.receive(incoming.message, incoming.request):
                continue
            try:
                await self._answers.answer(served, incoming)
            except Refusal as refusal:
                self._refusals[refusal.reason.name.lower()] += 1
                if served.conversation.state in (State.PUTTING, State.ENDING):
                    served.conversation.answered(refused=True)
                await stream.send(incoming.request, Refused(refusal.reason, peer_messages.shorten(refusal.message)))

    async def _greet(self, served: _Served) -> bool:
        incoming = await served.stream.receive(idle_seconds=self._limits.greeting_seconds)
        if incoming is None:
            return False
        served.conversation.receive(incoming.message, incoming.request)
        hello = incoming.message
        assert isinstance(hello, Hello)
        served.peer, served.store = hello.node, StoreId(hello.store)
        mine = self._identity
        version = min(hello.version_max, peer_messages.PROTOCOL_VERSION_MAX)
        if version < max(hello.version_min, peer_messages.PROTOCOL_VERSION_MIN):
            reason, message = RefusalReason.VERSION, (
                f"{hello.node} ({hello.program}) speaks protocol {hello.version_min} to {hello.version_max}, "
                f"{mine.node} (ckptfs {__version__}) {peer_messages.PROTOCOL_VERSION_MIN} to "
                f"{peer_messages.PROTOCOL_VERSION_MAX}: upgrade the older one"
            )  # fmt: skip
        elif served.stream.connection.peer_node not in (None, hello.node):
            reason, message = (
                RefusalReason.WRONG_PEER,
                (f"{hello.node} has the certificate of {served.stream.connection.peer_node}: each node needs its own"),
            )
        elif hello.cluster != mine.cluster:
            reason, message = RefusalReason.WRONG_PEER, f"{mine.node} belongs to another cluster than {hello.node}"
        elif self._is_member is not None and not await self._is_member(StoreId(hello.store), NodeId(hello.node)):
            reason, message = (
                RefusalReason.WRONG_PEER,
                f"{hello.node} has not joined the cluster with the store {hello.store.hex()}, or was removed from it",
            )
        else:
            welcome = Welcome(version, f"ckptfs {__version__}", mine.cluster, mine.store, mine.node)
            await served.stream.send(incoming.request, welcome)
            return True
        self._refusals[reason.name.lower()] += 1
        logger.warning("peer-refused peer=%r reason=%s message=%s", hello.node, reason.name.lower(), message)
        await self._part(served, reason, message)
        return False
