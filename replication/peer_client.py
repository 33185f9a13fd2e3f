"""The asking side: puts shards and copies to a peer and reads them back.

A `PeerClient` is one connection, opened when it is first needed and again after it broke; one request at a time. A
`PeerPool` keeps some for each peer. Errors: `PeerUnreachable` (may be tried again, the connection is gone), `PeerRefused`
(the peer said no; the connection lives on), `ProtocolViolation` (the peer, or something in between, is wrong).
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, TypeVar

import trio

from ckptfs import __version__
from ckptfs.cache.checksum import HASH_SIZE, Buffer
from ckptfs.cache.ids import NodeId, SegmentId, StoreId, Vid
from ckptfs.replication import peer_messages, shard_format
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import PeerRefused, PeerUnreachable, ProtocolViolation, RefusalReason, ShardDamaged
from ckptfs.replication.frame_format import PAYLOAD_SIZE_MAX, ForeignVersion
from ckptfs.replication.frame_stream import FrameStream, Incoming
from ckptfs.replication.peer_messages import (
    FOOTER_PART_BYTES,
    Cell,
    CellsDone,
    CellsGet,
    CopiesDone,
    CopiesPut,
    Copy,
    CopyFields,
    CopyGet,
    FooterGet,
    FooterPart,
    Hello,
    KeptVerified,
    KeptVerify,
    Message,
    Ping,
    PutBegin,
    PutDone,
    PutReady,
    PutStop,
    Refused,
    SegmentAsk,
    SegmentData,
    SegmentGet,
    SegmentHash,
    SegmentHashed,
    SegmentIs,
    SegmentMend,
    SegmentMended,
    Status,
    Verified,
    Verify,
    Welcome,
    Working,
)
from ckptfs.replication.segment_files import SegmentHashes, SegmentStatus
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.small_copies import BATCH_COUNT_MAX, COPY_SIZE_MAX, SmallCopy
from ckptfs.replication.transport import Transport

logger = logging.getLogger(__name__)

COPIES_HEADER_BYTES_MAX = 48 << 10
WORKING_COUNT_MAX = 1000
Answer = TypeVar("Answer", bound=Message)


class Mended(NamedTuple):
    """What came of a request to make a damaged segment right: whether it is now, and what was done or why not."""

    right: bool
    message: str


class KeptCells(NamedTuple):
    """A node's local copy of a version: how many cells it has, and which of them are wrong."""

    cells: int
    wrong: tuple[int, ...]


class PeerStatus(NamedTuple):
    """What a peer says of itself. `free_bytes` is what shards may still take there."""

    node: NodeId
    store: StoreId
    free_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class PeerPoolStatistics:
    """`connections_current` counts those in use and idle; the rest are counters since the start."""

    connections_current: int
    connections_idle: int
    sent_bytes: int
    received_bytes: int


class PeerClient:
    """One connection to one peer. Not for several tasks at once.

    A request that was cancelled or failed (other than by `PeerRefused`) closes the connection; the next one opens another.
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
        self._stream: FrameStream | None = None
        self._request = 0
        self._under_way: object | None = None
        """The put or cell stream that owns the connection now."""

    @property
    def connected(self) -> bool:
        return self._stream is not None

    async def ping(self, *, hurry: bool = False) -> PeerStatus:
        async with self._asking(Ping(hurry)) as request:
            status = await self._receive(request, Status)
        return PeerStatus(NodeId(status.node), StoreId(status.store), status.free_bytes, status.program)

    async def put_shard(self, header: ShardHeader) -> "PutStream":
        """Begin (or go on with) a shard. The stream returned owns this client until `finish` or `aclose`."""
        begin = PutBegin(
            header.vid, header.index, header.data_shards, header.parity_shards, header.cell_size, header.size
        )  # fmt: skip
        async with self._asking(begin) as request:
            ready = await self._receive(request, PutReady)
            if ready.resume_stripe > header.cell_count:
                raise ProtocolViolation(f"the peer wants to go on at stripe {ready.resume_stripe} of {header.cell_count}")
        self._under_way = stream = PutStream(self, request, header, ready.resume_stripe)
        return stream

    async def shard_footer(self, vid: Vid, index: int) -> ShardFooter:
        """Footer and, in it, header of a shard. Raises `ShardDamaged` if what the peer sends isn't one."""
        packed_header, end, total = b"", bytearray(), None
        async with self._asking(FooterGet(vid, index)) as request:
            while total is None or len(end) < total:
                incoming, part = await self._receive_any(request, FooterPart)
                packed_header = packed_header or part.header
                total = part.total if total is None else total
                length = incoming.payload_length
                if part.total != total or part.offset != len(end) or not length or len(end) + length > total:
                    raise ProtocolViolation(f"a footer part of {length} bytes at {part.offset} of {part.total}")
                end += await self._payload(incoming, memoryview(bytearray(length)))
        header = shard_format.unpack_header(packed_header)
        if (header.vid, header.index) != (vid, index):
            raise ShardDamaged("the peer sent the footer of another shard")
        return shard_format.unpack_footer(header, end)

    def read_cells(
        self, vid: Vid, index: int, first_stripe: int, count: int, *, into: Callable[[int], memoryview] | None = None
    ) -> "CellStream":
        """The shard's cells of those stripes as they are at the peer: who reads compares them with their hashes.

        Iterate over the result (`async for`), in an `async with` if the iteration may end early. Each cell is a view that
        is valid until the next; with `into`, the buffer for a stripe's cell is that function's answer.
        """
        return CellStream(self, CellsGet(vid, index, first_stripe, count), into)

    async def read_cell(self, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        """Read one cell, unchecked, into the buffer; returns its length, 0 where the shard has none."""
        length = 0
        async with self.read_cells(vid, index, stripe, 1, into=lambda _: buffer) as cells:
            async for cell in cells:
                length = len(cell)
        return length

    async def put_copies(self, copies: Sequence[SmallCopy]) -> list[bytes]:
        """Store small files; returns their content roots as the peer computed them. Synced batch by batch, so that after an
        error some may be stored."""
        roots: list[bytes] = []
        for batch in _batches(copies):
            fields = [CopyFields(copy.vid, copy.ino, copy.size, copy.path_hint, copy.revision) for copy in batch]
            async with self._asking(CopiesPut(fields), b"".join(copy.content for copy in batch)) as request:
                answer = await self._receive(request, CopiesDone)
            if len(answer.roots) != len(batch):
                raise ProtocolViolation(f"{len(answer.roots)} roots for {len(batch)} copies")
            roots += answer.roots
        return roots

    async def read_copy(self, vid: Vid) -> bytes:
        """A small file's content; who reads compares it with its root."""
        async with self._asking(CopyGet(vid)) as request:
            incoming, _ = await self._receive_any(request, Copy)
            if not 1 <= incoming.payload_length <= COPY_SIZE_MAX:
                raise ProtocolViolation(f"a copy of {incoming.payload_length} bytes")
            return bytes(await self._payload(incoming, memoryview(bytearray(incoming.payload_length))))

    async def read_segment(self, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes:
        """Bytes of a segment at its home as they are now, short at its end."""
        data = bytearray()
        while len(data) < length:
            wanted = min(length - len(data), PAYLOAD_SIZE_MAX)
            async with self._asking(SegmentGet(vid, segment, offset + len(data), wanted)) as request:
                incoming, _ = await self._receive_any(request, SegmentData)
                if incoming.payload_length > wanted:
                    raise ProtocolViolation(f"{incoming.payload_length} bytes of a segment instead of {wanted}")
                data += await self._payload(incoming, memoryview(bytearray(incoming.payload_length)))
            if incoming.payload_length < wanted:
                break
        return bytes(data)

    async def segment_status(self, segment: SegmentId) -> SegmentStatus:
        async with self._asking(SegmentAsk(segment)) as request:
            answer = await self._receive(request, SegmentIs)
        return SegmentStatus(answer.size, answer.mtime_ns, answer.blocks)

    async def segment_hashes(self, segment: SegmentId, cell_size: int, first_cell: int, count: int) -> SegmentHashes:
        """Have the home hash cells of a segment, at most `HASHES_MAX`."""
        async with self._asking(SegmentHash(segment, cell_size, first_cell, count)) as request:
            incoming, answer = await self._receive_any(request, SegmentHashed)
            if incoming.payload_length > count * HASH_SIZE or incoming.payload_length % HASH_SIZE:
                raise ProtocolViolation(f"{incoming.payload_length} bytes of hashes of {count} cells")
            hashes = await self._payload(incoming, memoryview(bytearray(incoming.payload_length)))
        return SegmentHashes(answer.size, bytes(hashes))

    async def mend_segment(self, vid: Vid) -> Mended:
        """Have the home of a protected version make its segment right."""
        async with self._asking(SegmentMend(vid)) as request:
            answer = await self._receive(request, SegmentMended)
        return Mended(answer.right, answer.message)

    async def verify_kept(self, vid: Vid, *, mend: bool) -> KeptCells:
        """Have the peer hash its local copy of a version."""
        async with self._asking(KeptVerify(vid, mend)) as request:
            answer = await self._receive(request, KeptVerified)
        return KeptCells(answer.cells, tuple(answer.wrong))

    async def verify_shard(self, vid: Vid, index: int) -> VerifyResult:
        """Have the peer re-read a shard from its drive."""
        async with self._asking(Verify(vid, index)) as request:
            answer = await self._receive(request, Verified)
        return VerifyResult(answer.ok, tuple(answer.bad_stripes), answer.message)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        stream, self._stream, self._under_way = self._stream, None, None
        if stream is not None:
            self.sent_bytes += stream.sent_bytes
            self.received_bytes += stream.received_bytes
            stream.connection.close()

    async def aclose(self) -> None:
        """`close`, for those who close things asynchronously."""
        self.close()
        await trio.lowlevel.checkpoint()

    # ---- one request

    @contextlib.asynccontextmanager
    async def _asking(self, message: Message, payload: Buffer | None = None) -> AsyncIterator[int]:
        """Send the request; its answer is received in the block. What goes wrong closes the connection."""
        with self._closing_on_error():
            stream = await self._ready()
            self._request = self._request % 0xFFFFFFFF + 1
            try:
                await stream.send(self._request, message, payload)
            except PeerUnreachable as error:
                raise self._why(error) from None
            yield self._request

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
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
        if self._stream is not None and (self._under_way is not None or self._stream.connection.has_input()):
            self.close()
        if self._stream is None:
            connection = await self._transport.connect(self.address)
            self._stream = FrameStream(connection)
            await self._greet(self._stream)
        return self._stream

    async def _greet(self, stream: FrameStream) -> None:
        mine = self._identity
        versions = peer_messages.PROTOCOL_VERSION_MIN, peer_messages.PROTOCOL_VERSION_MAX
        await stream.send(1, Hello(*versions, f"ckptfs {__version__}", mine.cluster, mine.store, mine.node))
        self._request = 1
        try:
            welcome = await self._receive(1, Welcome)
        except ForeignVersion as error:
            raise PeerRefused(RefusalReason.VERSION, f"{self.address} sends {error}: upgrade the older one") from None
        if not versions[0] <= welcome.version <= versions[1]:
            raise PeerRefused(
                RefusalReason.VERSION,
                f"{welcome.node} ({welcome.program}) chose protocol {welcome.version}, ckptfs {__version__} speaks "
                f"{versions[0]} to {versions[1]}: upgrade the older one",
            )
        if welcome.cluster != mine.cluster:
            raise PeerRefused(RefusalReason.WRONG_PEER, f"{self.address} belongs to another cluster")
        if self._expected_store is not None and welcome.store != self._expected_store:
            raise PeerRefused(
                RefusalReason.WRONG_PEER, f"at {self.address} is store {welcome.store.hex()}, not {self._expected_store.hex()}"
            )
        self.peer = welcome

    async def _receive(self, request: int, kind: type[Answer]) -> Answer:
        """The answer of that kind, which has no payload."""
        return (await self._receive_any(request, kind))[1]

    async def _receive_any(self, request: int, *kinds: type[Answer]) -> tuple[Incoming, Answer]:
        """The next answer of one of these kinds. Raises `PeerRefused` for a refusal, `ProtocolViolation` for another."""
        stream = self._stream
        if stream is None:
            raise PeerUnreachable("the connection was closed")
        for _ in range(WORKING_COUNT_MAX):
            incoming = await stream.receive()
            if incoming is None:
                raise PeerUnreachable(f"{self.address} closed the connection instead of answering")
            message = incoming.message
            if isinstance(message, Refused):
                self._refused(message, incoming.request == request)
            if incoming.request != request:
                raise ProtocolViolation(f"an answer to request {incoming.request}, not {request}")
            if isinstance(message, Working):
                continue
            if isinstance(message, kinds):
                return incoming, message
            raise ProtocolViolation(f"a {type(message).__name__} as an answer")
        raise PeerUnreachable(f"{self.address} is at work for too long")

    def _refused(self, message: Refused, of_this_request: bool) -> None:
        if not of_this_request:
            self.close()  # said of the whole connection
        try:
            reason = RefusalReason(message.reason)
        except ValueError:
            reason = RefusalReason.INVALID
        raise PeerRefused(reason, f"{self.address}: {message.message}")

    async def _payload(self, incoming: Incoming, buffer: memoryview, *, check: bool = True) -> memoryview:
        assert self._stream is not None
        return await self._stream.receive_payload(incoming, buffer, check=check)

    def _why(self, error: PeerUnreachable) -> PeerUnreachable:
        return PeerUnreachable(f"{self.address}: {error}")


class PutStream:
    """One shard on its way. Cells of stripes before `resume_stripe` are at the peer already. Usable as `async with`."""

    def __init__(self, client: PeerClient, request: int, header: ShardHeader, resume_stripe: int) -> None:
        self.header = header
        self.resume_stripe = resume_stripe
        self._client = client
        self._request = request
        self._next_stripe = resume_stripe

    async def send_cell(self, stripe: int, cell: Buffer, digest: bytes) -> None:
        """Send the next cell. The buffer isn't used after the return. Cells of length 0 are left out.

        Raises `PeerRefused` as soon as the peer says no, which ends the put; `PeerUnreachable`; `ValueError`.
        """
        length = self.header.cell_length(stripe)
        if stripe != self._next_stripe or len(cell) != length:
            raise ValueError(f"cell {stripe} of {len(cell)} bytes, expected {self._next_stripe} of {length}")
        self._next_stripe += 1
        if length:
            await self._send(Cell(stripe), cell, digest)

    async def finish(self, footer: ShardFooter) -> bytes:
        """Complete the shard; returns the root of what the peer stored durably. The client is free again."""
        if footer.header != self.header or self._next_stripe < self.header.cell_count:
            raise ValueError(f"a footer after {self._next_stripe} of {self.header.cell_count} cells")
        end = shard_format.pack_footer(footer)
        for at in range(0, len(end), FOOTER_PART_BYTES):
            await self._send(FooterPart(at, len(end)), memoryview(end)[at : at + FOOTER_PART_BYTES])
        client = self._client
        with client._closing_on_error():
            try:
                root = (await client._receive(self._request, PutDone)).root
            finally:
                self._end()
        return root

    async def aclose(self) -> None:
        """Give up if not finished; what the peer has may be resumed. Harmless when repeated."""
        client = self._client
        if client._under_way is self and client._stream is not None:
            with contextlib.suppress(PeerUnreachable), client._closing_on_error():
                await client._stream.send(self._request, PutStop())
            self._end()

    async def _send(self, message: Message, payload: Buffer, digest: bytes | None = None) -> None:
        client = self._client
        stream = client._stream
        if client._under_way is not self or stream is None:
            raise PeerUnreachable("the put has ended")
        with client._closing_on_error():
            failure: PeerUnreachable | None = None
            try:
                if not stream.connection.has_input():
                    await stream.send(self._request, message, payload, digest)
                    return
            except PeerUnreachable as error:
                failure = client._why(error)
            self._end()
            if failure is None:
                await client._receive(self._request, PutDone)
                raise ProtocolViolation("the peer calls a shard done before its end")
            try:
                if stream.connection.has_input():  # the peer may have said why before it left
                    await client._receive(self._request, PutDone)
            except PeerUnreachable:
                pass
            finally:
                client.close()
            raise failure

    def _end(self) -> None:
        if self._client._under_way is self:
            self._client._under_way = None

    async def __aenter__(self) -> "PutStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class CellStream:
    """Cells on their way here. `stripe` is that of the last cell."""

    def __init__(self, client: PeerClient, message: CellsGet, into: Callable[[int], memoryview] | None) -> None:
        self.stripe = -1
        self._client = client
        self._message = message
        self._into = into
        self._buffer = memoryview(b"")
        self._request = 0
        self._state = "new"

    def __aiter__(self) -> "CellStream":
        return self

    async def __anext__(self) -> memoryview:
        """The next cell. Raises `PeerRefused`, `PeerUnreachable`, `ProtocolViolation`, which end the iteration."""
        client = self._client
        if self._state == "new":
            async with client._asking(self._message) as self._request:
                pass
            client._under_way, self._state = self, "open"
            self.stripe = self._message.first_stripe - 1
        if self._state == "ended":
            raise StopAsyncIteration
        if client._under_way is not self:
            raise PeerUnreachable("the reading was given up for another request")
        with client._closing_on_error():
            try:
                cell = await self._next()
            except BaseException:
                self._end()
                raise
        if cell is None:
            self._end()
            raise StopAsyncIteration
        return cell

    async def aclose(self) -> None:
        """Give up what wasn't read: that closes the connection, for the rest is under way. Harmless when repeated."""
        if self._state == "open" and self._client._under_way is self:
            self._client.close()
        self._state = "ended"

    async def _next(self) -> memoryview | None:
        client, message = self._client, self._message
        incoming, answer = await client._receive_any(self._request, Cell, CellsDone)
        if not isinstance(answer, Cell):
            return None
        if answer.stripe != self.stripe + 1 or answer.stripe >= message.first_stripe + message.count:
            raise ProtocolViolation(f"cell {answer.stripe} after {self.stripe}")
        self.stripe = answer.stripe
        if self._into is not None:
            buffer = self._into(answer.stripe)
        else:
            if len(self._buffer) < incoming.payload_length:
                self._buffer = memoryview(bytearray(incoming.payload_length))
            buffer = self._buffer
        return await client._payload(incoming, buffer, check=False)

    def _end(self) -> None:
        self._state = "ended"
        if self._client._under_way is self:
            self._client._under_way = None

    async def __aenter__(self) -> "CellStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class PeerPool:
    """Clients for every peer, kept open between uses. At most `connections_per_peer_max` to one peer at once: more wait, so
    who holds one must not wait for another of the same peer."""

    def __init__(
        self,
        transport: Transport,
        identity: PeerIdentity,
        *,
        connections_per_peer_max: int = 8,
        idle_per_peer_max: int = 4,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._idle_per_peer_max = idle_per_peer_max
        self._limiters: dict[tuple[StoreId, str], trio.Semaphore] = defaultdict(
            lambda: trio.Semaphore(connections_per_peer_max, max_value=connections_per_peer_max)
        )
        self._idle: dict[tuple[StoreId, str], list[PeerClient]] = defaultdict(list)
        self._in_use = 0
        self._sent_bytes = self._received_bytes = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def client(self, store: StoreId, address: str) -> AsyncIterator[PeerClient]:
        """A client of that store, for one task, in the `async with` block. It connects with the first request."""
        key = (store, address)
        async with self._limiters[key]:
            idle = self._idle[key]
            client = idle.pop() if idle else PeerClient(self._transport, address, self._identity, expected_store=store)
            self._in_use += 1
            try:
                yield client
            finally:
                self._in_use -= 1
                self._give_back(key, client)

    def forget(self, store: StoreId) -> None:
        """Close the idle connections to a store that is away."""
        for key in [key for key in self._idle if key[0] == store]:
            for client in self._idle.pop(key):
                client.close()

    def statistics(self) -> PeerPoolStatistics:
        idle = [client for clients in self._idle.values() for client in clients]
        return PeerPoolStatistics(self._in_use + len(idle), len(idle), self._sent_bytes, self._received_bytes)

    async def aclose(self) -> None:
        """Close what is idle, and what is given back from now on."""
        self._closed = True
        for clients in self._idle.values():
            for client in clients:
                client.close()
        self._idle.clear()
        await trio.lowlevel.checkpoint()

    def _give_back(self, key: tuple[StoreId, str], client: PeerClient) -> None:
        if client._under_way is not None:
            client.close()
        stream = client._stream
        if stream is not None:
            client.sent_bytes += stream.sent_bytes
            client.received_bytes += stream.received_bytes
            stream.sent_bytes = stream.received_bytes = 0
        self._sent_bytes += client.sent_bytes
        self._received_bytes += client.received_bytes
        client.sent_bytes = client.received_bytes = 0
        idle = self._idle[key]
        if client.connected and not self._closed and len(idle) < self._idle_per_peer_max:
            idle.append(client)
        else:
            client.close()


def _batches(copies: Sequence[SmallCopy]) -> list[list[SmallCopy]]:
    """The copies in batches that fit into a frame."""
    batches: list[list[SmallCopy]] = []
    payload = header = 0
    for copy in copies:
        own_header = len(copy.path_hint) + 64
        full = not batches or len(batches[-1]) == BATCH_COUNT_MAX
        if full or payload + copy.size > PAYLOAD_SIZE_MAX or header + own_header > COPIES_HEADER_BYTES_MAX:
            batches.append([])
            payload = header = 0
        batches[-1].append(copy)
        payload += copy.size
        header += own_header
    return batches
