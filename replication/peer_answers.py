"""What a node answers to the requests of its peers, one at a time on a connection: shards, copies, segments and checks of them.

Memory for payloads and threads for the disk are bounded over all connections; what gets no memory in time is refused.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio

from ckptfs import __version__
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.replication import peer_messages, shard_format
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.conversation import Conversation, PeerIdentity
from ckptfs.replication.errors import (
    PeerRefused,
    PeerUnreachable,
    ProtocolViolation,
    RefusalReason,
    ReplicationError,
    ShardConflict,
    ShardDamaged,
    ShardNotFound,
    StoreFailed,
    StoreFull,
    WriterRevoked,
)
from ckptfs.replication.frame_stream import FrameStream, Incoming
from ckptfs.replication.peer_client import KeptCells, Mended
from ckptfs.replication.peer_messages import (
    FOOTER_PART_BYTES,
    Cell,
    CellsDone,
    CellsGet,
    CopiesDone,
    CopiesPut,
    Copy,
    CopyGet,
    FooterGet,
    FooterPart,
    HomeAnswer,
    HomeCall,
    KeptVerified,
    KeptVerify,
    Ping,
    PutBegin,
    PutDone,
    PutReady,
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
    Working,
)
from ckptfs.replication.segment_files import SegmentFiles, SegmentPaths
from ckptfs.replication.shard_format import ShardHeader
from ckptfs.replication.shard_readers import ShardReaders
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_writer import ShardWriter
from ckptfs.replication.small_copies import SmallCopies, SmallCopy
from ckptfs.replication.transport import Connection

Result = TypeVar("Result")

_PASSED_ON = (PeerUnreachable, ProtocolViolation)
"""What ends the connection instead of being answered."""


@dataclass(frozen=True, slots=True)
class PeerServerLimits:
    """What peers may use. A connection that says nothing for `idle_seconds` is closed; so is the one silent longest, if
    another wants in when `connections_max` are there. A put under way has a thread of its own, a request that reads one while
    it lasts. `working_seconds` is how often a slow answer shows a sign of life."""

    connections_max: int = 128
    payload_bytes_max: int = 48 << 20
    puts_max: int = 32
    disk_threads: int = 16
    greeting_seconds: float = 10.0
    idle_seconds: float = 300.0
    buffer_wait_seconds: float = 15.0
    working_seconds: float = 5.0


class Kept(Protocol):
    """What this node keeps of versions besides shards: the segments of those whose home it is, and local copies. Neither raises
    for what is wrong with them."""

    async def mend_segment(self, vid: Vid) -> Mended: ...

    async def verify(self, vid: Vid, *, mend: bool) -> KeptCells: ...


AnswerCall = Callable[[StoreId, HomeCall, memoryview], Awaitable[HomeAnswer]]
"""Has this node's mount carry out a call of a store's program; the bytes are used until it returns. Raises `PeerUnreachable`
where the mount does not answer."""


class Refusal(Exception):
    """A request is answered with `Refused`; the connection lives on."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Talk:
    """One connection and how far its conversation is."""

    def __init__(self, connection: Connection) -> None:
        self.stream = FrameStream(connection)
        self.conversation = Conversation()
        self.store = StoreId(bytes(16))
        """Who asks, as it has said in its greeting."""


class PeerAnswers:
    """Answers requests from this node's store. `shards_stored` and `copies_stored` count those since the start."""

    def __init__(
        self,
        shard_store: ShardStore,
        small_copies: SmallCopies,
        segments: SegmentPaths,
        kept: Kept,
        identity: PeerIdentity,
        limits: PeerServerLimits,
        on_hurry: Callable[[], None],
        answer_call: AnswerCall,
    ) -> None:
        self.shards_stored = self.copies_stored = 0
        self._on_hurry = on_hurry
        self._answer_call = answer_call
        self._shards = shard_store
        self._readers = ShardReaders(shard_store)
        self._copies = small_copies
        self._segments = SegmentFiles(segments)
        self._kept = kept
        self._identity = identity
        self._limits = limits
        self._budget = BufferBudget(limits.payload_bytes_max)
        self._read_limiter = trio.CapacityLimiter(limits.disk_threads)
        self._put_limiter = trio.CapacityLimiter(limits.puts_max)
        self._sync_limiter = trio.CapacityLimiter(limits.disk_threads)

    @property
    def peak_payload_bytes(self) -> int:
        return self._budget.peak_bytes

    def close(self) -> None:
        """Close the shards that are open for reading."""
        self._readers.close()

    async def answer(self, talk: Talk, incoming: Incoming) -> None:
        """Answer one request. Raises `Refusal` where the answer is no, and what ends the connection."""
        stream, request, message = talk.stream, incoming.request, incoming.message
        match message:
            case PutBegin():
                await self._put(talk, request, message)
            case FooterGet():
                await self._send_footer(talk, request, message)
            case CellsGet():
                await self._send_cells(talk, request, message)
            case CopiesPut():
                await self._put_copies(talk, incoming, message)
            case CopyGet():
                held, content = await self._read(self._copies.get, Vid(message.vid))
                await stream.send(request, Copy(held.root), content)
            case SegmentGet():
                await self._send_segment(talk, request, message)
            case SegmentAsk():
                found = await self._read(self._segments.status, SegmentId(message.segment))
                await stream.send(request, SegmentIs(found.size, found.mtime_ns, found.blocks))
            case SegmentHash():
                await self._send_hashes(talk, request, message)
            case SegmentMend():
                mended = await self._slowly(talk, request, partial(self._kept.mend_segment, Vid(message.vid)))
                await stream.send(request, SegmentMended(mended.right, peer_messages.shorten(mended.message)))
            case KeptVerify():
                verify_kept = partial(self._kept.verify, Vid(message.vid), mend=message.mend)
                kept = await self._slowly(talk, request, verify_kept)
                await stream.send(request, KeptVerified(kept.cells, list(kept.wrong[:1000])))
            case Verify():
                verify = partial(self._read, self._shards.verify, Vid(message.vid), message.index)
                result = await self._slowly(talk, request, verify)
                await stream.send(request, Verified(result.ok, list(result.bad_stripes), peer_messages.shorten(result.message)))
            case HomeCall():
                await self._call(talk, incoming, message)
            case Ping():
                if message.hurry:
                    self._on_hurry()
                free = await self._read(self._shards.free_bytes)
                status = Status(self._identity.node, self._identity.store, free, f"ckptfs {__version__}")
                await stream.send(request, status)
            case _:
                raise AssertionError(f"no answer for {type(message).__name__}")

    async def _put(self, talk: Talk, request: int, message: PutBegin) -> None:
        try:
            header = ShardHeader(
                Vid(message.vid), message.index, message.data_shards, message.parity_shards, message.cell_size, message.size
            )
        except ValueError as error:
            raise Refusal(RefusalReason.INVALID, str(error)) from None
        # The longest cell of this shard, not of any: most shards of small files are far shorter than a cell may be.
        size = max(1, header.cell_length(0))
        async with _Taken(self._budget, size, self._limits.buffer_wait_seconds) as buffer:
            begin = partial(self._write, self._shards.begin, header, message.hole_bytes, limiter=self._sync_limiter)
            writer = await self._slowly(talk, request, begin)
            try:
                await talk.stream.send(request, PutReady(writer.resume_stripe))
                await self._receive_cells(talk, writer, buffer)
            finally:
                if not writer.ended:
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(writer.suspend, limiter=self._sync_limiter)

    async def _receive_cells(self, talk: Talk, writer: ShardWriter, buffer: memoryview) -> None:
        """Take in cells and footer of the put under way, up to its end."""
        stream, conversation = talk.stream, talk.conversation
        end = bytearray()
        incoming = await self._write(self._store_cells, talk, writer, buffer, limiter=self._put_limiter)
        while isinstance(incoming.message, FooterPart):
            if await self._take_footer_part(stream, incoming, incoming.message, writer.header, end):
                break
            following = await stream.receive()
            if following is None:
                raise _cut_off()
            incoming = following
            conversation.receive(incoming.message, incoming.request)
        else:
            return  # PutStop
        try:
            footer = shard_format.unpack_footer(writer.header, end)
        except ShardDamaged as error:
            raise Refusal(RefusalReason.INVALID, str(error)) from None
        finish = partial(self._write, writer.finish, footer, limiter=self._sync_limiter)
        root = await self._slowly(talk, incoming.request, finish)
        self.shards_stored += 1
        conversation.answered(refused=False)
        await stream.send(incoming.request, PutDone(root))

    def _store_cells(self, talk: Talk, writer: ShardWriter, buffer: memoryview) -> Incoming:
        """Take in cells, from the socket to the file, until something else comes, which is returned. In a thread."""
        stream, conversation = talk.stream, talk.conversation
        while True:
            incoming = stream.receive_in_thread()
            if incoming is None:
                raise _cut_off()
            conversation.receive(incoming.message, incoming.request)
            if not isinstance(incoming.message, Cell):
                return incoming
            if incoming.message.zeros and not incoming.payload_length:
                writer.write_zeros(incoming.message.stripe, incoming.message.zeros)
            else:
                cell = stream.receive_payload_in_thread(incoming, buffer)
                writer.write_cell(incoming.message.stripe, cell, incoming.prelude.payload_hash)
            trio.from_thread.check_cancelled()

    async def _take_footer_part(
        self, stream: FrameStream, incoming: Incoming, part: FooterPart, header: ShardHeader, end: bytearray
    ) -> bool:
        """Append the part; whether it was the last one."""
        longest = header.footer_length(shard_format.PATH_HINT_SIZE_MAX) + shard_format.TRAILER_SIZE
        length = incoming.payload_length
        if part.total > longest or part.offset != len(end) or not length or part.offset + length > part.total:
            raise ProtocolViolation(f"a footer part of {length} bytes at {part.offset} of {part.total}")
        view = memoryview(bytearray(length))
        end += await stream.receive_payload(incoming, view)
        return len(end) == part.total

    async def _send_footer(self, talk: Talk, request: int, message: FooterGet) -> None:
        header, footer = await self._read(self._read_footer, Vid(message.vid), message.index)
        for at in range(0, len(footer), FOOTER_PART_BYTES):
            part = FooterPart(at, len(footer), b"" if at else header)
            await talk.stream.send(request, part, memoryview(footer)[at : at + FOOTER_PART_BYTES])

    def _read_footer(self, vid: Vid, index: int) -> tuple[bytes, bytes]:
        with self._readers.borrow(vid, index) as reader:
            return shard_format.pack_header(reader.header), reader.footer_bytes

    async def _send_cells(self, talk: Talk, request: int, message: CellsGet) -> None:
        """Cells go out as they are, with the hash they should have: who asked compares."""
        await self._read(self._send_cells_in_thread, talk, request, message)

    def _send_cells_in_thread(self, talk: Talk, request: int, message: CellsGet) -> None:
        with self._readers.borrow(Vid(message.vid), message.index) as reader:
            header = reader.header
            for stripe in range(message.first_stripe, min(message.first_stripe + message.count, header.cell_count)):
                place = reader.descriptor, header.cell_offset(stripe), header.cell_length(stripe)
                talk.stream.send_file_in_thread(request, Cell(stripe), *place, reader.footer.cell_hash(stripe))
                trio.from_thread.check_cancelled()
        talk.stream.send_in_thread(request, CellsDone(), b"", b"")

    async def _put_copies(self, talk: Talk, incoming: Incoming, message: CopiesPut) -> None:
        total = sum(copy.size for copy in message.copies)
        if total != incoming.payload_length:
            raise ProtocolViolation(f"copies of {total} bytes in a payload of {incoming.payload_length}")
        copies: list[SmallCopy] = []
        async with _Taken(self._budget, total, self._limits.buffer_wait_seconds) as buffer:
            content = await talk.stream.receive_payload(incoming, buffer)
            for copy in message.copies:
                vid, own, content = Vid(copy.vid), content[: copy.size], content[copy.size :]
                copies.append(SmallCopy(vid, InodeNumber(copy.ino), copy.size, copy.path_hint, copy.revision, own))
            put = partial(self._write, self._copies.put, copies, limiter=self._sync_limiter)
            roots = await self._slowly(talk, incoming.request, put)
        self.copies_stored += len(copies)
        await talk.stream.send(incoming.request, CopiesDone(roots))

    async def _send_segment(self, talk: Talk, request: int, message: SegmentGet) -> None:
        async with _Taken(self._budget, message.length, self._limits.buffer_wait_seconds) as buffer:
            count = await self._read(self._segments.read, SegmentId(message.segment), message.offset, buffer)
            await talk.stream.send(request, SegmentData(), buffer[:count])

    async def _call(self, talk: Talk, incoming: Incoming, message: HomeCall) -> None:
        async with _Taken(self._budget, max(1, incoming.payload_length), self._limits.buffer_wait_seconds) as buffer:
            data = await talk.stream.receive_payload(incoming, buffer)
            try:
                answer = await self._slowly(talk, incoming.request, partial(self._answer_call, talk.store, message, data))
            except PeerUnreachable as error:  # the mount, not the peer
                raise Refusal(RefusalReason.BUSY, str(error)) from None
        await talk.stream.send(incoming.request, answer)

    async def _send_hashes(self, talk: Talk, request: int, message: SegmentHash) -> None:
        asked = SegmentId(message.segment), message.cell_size, message.first_cell, message.count
        hashing = partial(self._read, self._segments.hashes, *asked, trio.from_thread.check_cancelled)
        found = await self._slowly(talk, request, hashing)
        await talk.stream.send(request, SegmentHashed(found.size), found.hashes)

    # ---- threads

    async def _read(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a reading function in a thread. What the store says no to becomes a `Refusal`."""
        try:
            return await trio.to_thread.run_sync(function, *arguments, limiter=self._read_limiter)
        except _PASSED_ON:
            raise
        except ReplicationError as error:
            raise _refusal_for(error, putting=False) from None

    async def _write(self, function: Callable[..., Result], *arguments: object, limiter: trio.CapacityLimiter) -> Result:
        """Call a writing function in a thread. What the store says no to becomes a `Refusal`."""
        try:
            return await trio.to_thread.run_sync(function, *arguments, limiter=limiter)
        except _PASSED_ON:
            raise
        except ReplicationError as error:
            raise _refusal_for(error, putting=True) from None
        except ValueError as error:
            raise Refusal(RefusalReason.INVALID, str(error)) from None

    async def _slowly(self, talk: Talk, request: int, call: Callable[[], Awaitable[Result]]) -> Result:
        """Await the call, with signs of life for the peer while it lasts."""
        failure: Exception | None = None
        results: list[Result] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_life, talk.stream, request)
            try:
                results.append(await call())
            except Exception as error:
                failure = error  # raised below, where the nursery can't wrap it
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return results[0]

    async def _show_life(self, stream: FrameStream, request: int) -> None:
        while True:
            await trio.sleep(self._limits.working_seconds)
            try:
                with trio.CancelScope(shield=True):  # half a frame would spoil the connection
                    await stream.send(request, Working())
            except PeerUnreachable:
                return  # the answer will find out


class _Taken:
    """A buffer of the budget, or a refusal if there is none in time."""

    def __init__(self, budget: BufferBudget, size: int, seconds: float) -> None:
        self._entered = budget.take(size)
        self._fits = size <= budget.total_bytes
        self._seconds = seconds

    async def __aenter__(self) -> memoryview:
        if self._fits:
            with trio.move_on_after(self._seconds):
                return await self._entered.__aenter__()
        raise Refusal(RefusalReason.BUSY, "the memory for payloads is in use")

    async def __aexit__(self, *_: object) -> None:
        await self._entered.__aexit__(None, None, None)


def _cut_off() -> PeerUnreachable:
    return PeerUnreachable("the peer closed the connection in the middle of a shard")


def _refusal_for(error: ReplicationError, *, putting: bool) -> Refusal:
    if isinstance(error, PeerRefused):
        return Refusal(error.reason, error.message)
    reasons: dict[type[ReplicationError], RefusalReason] = {
        StoreFull: RefusalReason.FULL,
        StoreFailed: RefusalReason.FAILED,
        ShardNotFound: RefusalReason.NOT_FOUND,
        ShardConflict: RefusalReason.CONFLICT,
        WriterRevoked: RefusalReason.BUSY,
        ShardDamaged: RefusalReason.MISMATCH if putting else RefusalReason.DAMAGED,
    }
    return Refusal(reasons.get(type(error), RefusalReason.INVALID), str(error))
