"""One connection to a peer, as the asking side has it: greeted, one request at a time, and its answers told from refusals."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import trio

from ckptfs import __version__
from ckptfs.cache.checksum import Buffer
from ckptfs.cache.ids import StoreId
from ckptfs.replication import peer_messages
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import PeerRefused, PeerUnreachable, ProtocolViolation, RefusalReason
from ckptfs.replication.frame_format import ForeignVersion
from ckptfs.replication.frame_stream import FrameStream, Incoming
from ckptfs.replication.peer_messages import Hello, Message, Refused, Welcome, Working
from ckptfs.replication.transport import Transport

WORKING_COUNT_MAX = 1000
Answer = TypeVar("Answer", bound=Message)


class PeerConnection:
    """Opened when it is first needed, and again after it broke. Not for several tasks at once.

    A request that was cancelled or failed (other than by `PeerRefused`) closes it; the next one opens another.
    """

    def __init__(
        self, transport: Transport, address: str, identity: PeerIdentity, *, expected_store: StoreId | None = None
    ) -> None:
        """`expected_store` is who must answer at the address; None takes any store of the cluster."""
        self.address = address
        self.peer: Welcome | None = None
        self.sent_bytes = self.received_bytes = 0
        self._transport = transport
        self._identity = identity
        self._expected_store = expected_store
        self.stream: FrameStream | None = None
        self._request = 0
        self.under_way: object | None = None
        """The put or cell stream that owns the connection now."""

    @property
    def connected(self) -> bool:
        return self.stream is not None

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        stream, self.stream, self.under_way = self.stream, None, None
        if stream is not None:
            self.sent_bytes += stream.sent_bytes
            self.received_bytes += stream.received_bytes
            stream.connection.close()

    async def aclose(self) -> None:
        """`close`, for those who close things asynchronously."""
        self.close()
        await trio.lowlevel.checkpoint()

    @contextlib.asynccontextmanager
    async def asking(self, message: Message, payload: Buffer | None = None) -> AsyncIterator[int]:
        """Send the request; its answer is received in the block. What goes wrong closes the connection."""
        with self.closing_on_error():
            stream = await self._ready()
            self._request = self._request % 0xFFFFFFFF + 1
            try:
                await stream.send(self._request, message, payload)
            except PeerUnreachable as error:
                raise self.why(error) from None
            yield self._request

    @contextlib.contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """What goes wrong in the block closes the connection, unless it is a refusal of a request."""
        try:
            yield
        except PeerRefused as refused:
            if refused.reason in (RefusalReason.VERSION, RefusalReason.WRONG_PEER):
                self.close()
            raise
        except BaseException:
            self.close()
            raise

    async def _ready(self) -> FrameStream:
        """The open connection, or a new one if there is none, if the peer closed it, or if something was left unfinished."""
        if self.stream is not None and (self.under_way is not None or self.stream.connection.has_input()):
            self.close()
        if self.stream is None:
            connection = await self._transport.connect(self.address)
            self.stream = FrameStream(connection)
            await self._greet(self.stream)
        return self.stream

    async def _greet(self, stream: FrameStream) -> None:
        mine = self._identity
        versions = peer_messages.PROTOCOL_VERSION_MIN, peer_messages.PROTOCOL_VERSION_MAX
        await stream.send(1, Hello(*versions, f"ckptfs {__version__}", mine.cluster, mine.store, mine.node))
        self._request = 1
        try:
            welcome = await self.receive(1, Welcome)
        except ForeignVersion as error:
            raise PeerRefused(RefusalReason.VERSION, f"{self.address} sends {error}: upgrade the older one") from None
        if not versions[0] <= welcome.version <= versions[1]:
            raise PeerRefused(
                RefusalReason.VERSION,
                f"{welcome.node} ({welcome.program}) chose protocol {welcome.version}, ckptfs {__version__} speaks "
                f"{versions[0]} to {versions[1]}: upgrade the older one",
            )
        if stream.connection.peer_node not in (None, welcome.node):
            raise PeerRefused(
                RefusalReason.WRONG_PEER,
                f"{welcome.node} at {self.address} has the certificate of {stream.connection.peer_node}: each node needs its own",
            )
        if welcome.cluster != mine.cluster:
            raise PeerRefused(RefusalReason.WRONG_PEER, f"{self.address} belongs to another cluster")
        if self._expected_store is not None and welcome.store != self._expected_store:
            raise PeerRefused(
                RefusalReason.WRONG_PEER, f"at {self.address} is store {welcome.store.hex()}, not {self._expected_store.hex()}"
            )
        self.peer = welcome

    async def receive(self, request: int, kind: type[Answer]) -> Answer:
        """The answer of that kind, which has no payload."""
        return (await self.receive_any(request, kind))[1]

    async def receive_any(self, request: int, *kinds: type[Answer]) -> tuple[Incoming, Answer]:
        """The next answer of one of these kinds. Raises `PeerRefused` for a refusal, `ProtocolViolation` for another."""
        stream = self.stream
        if stream is None:
            raise PeerUnreachable("the connection was closed")
        for _ in range(WORKING_COUNT_MAX):
            incoming = await stream.receive()
            if incoming is not None and isinstance(incoming.message, Refused) and incoming.request != request:
                self.close()  # said of the whole connection
            incoming = self._checked(incoming, request)
            message = incoming.message
            if isinstance(message, kinds):
                return incoming, message
            if not isinstance(message, Working):
                raise ProtocolViolation(f"a {type(message).__name__} as an answer")
        raise PeerUnreachable(f"{self.address} is at work for too long")

    def receive_in_thread(self, request: int, seconds: float) -> Incoming:
        """As `receive_any`, of any kind, from a thread of `trio.to_thread`; it may take that long."""
        stream = self.stream
        if stream is None:
            raise PeerUnreachable("the connection was closed")
        return self._checked(stream.receive_in_thread(seconds=seconds), request)

    def _checked(self, incoming: Incoming | None, request: int) -> Incoming:
        """What came, unless it is no answer to that request, or a refusal."""
        if incoming is None:
            raise PeerUnreachable(f"{self.address} closed the connection instead of answering")
        if isinstance(incoming.message, Refused):
            raise self._refusal(incoming.message)
        if incoming.request != request:
            raise ProtocolViolation(f"an answer to request {incoming.request}, not {request}")
        return incoming

    def _refusal(self, message: Refused) -> PeerRefused:
        try:
            reason = RefusalReason(message.reason)
        except ValueError:
            reason = RefusalReason.INVALID
        return PeerRefused(reason, f"{self.address}: {message.message}")

    async def payload(self, incoming: Incoming, buffer: memoryview, *, check: bool = True) -> memoryview:
        """The payload that comes with it, in the buffer."""
        assert self.stream is not None
        return await self.stream.receive_payload(incoming, buffer, check=check)

    def why(self, error: PeerUnreachable) -> PeerUnreachable:
        """The error, with the peer it is about."""
        return PeerUnreachable(f"{self.address}: {error}")
