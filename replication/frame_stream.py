"""Messages over a connection: packs and sends, receives and checks. Used by both sides of a conversation."""

from typing import NamedTuple

from ckptfs.cache.checksum import Buffer
from ckptfs.replication import frame_format, peer_messages
from ckptfs.replication.errors import PeerUnreachable, ProtocolViolation
from ckptfs.replication.frame_format import PRELUDE_SIZE, Prelude
from ckptfs.replication.peer_messages import Message
from ckptfs.replication.transport import Connection


class Incoming(NamedTuple):
    """One message. Its payload is still under way: taken in with `receive_payload`, or dropped with the next `receive`."""

    message: Message
    prelude: Prelude

    @property
    def request(self) -> int:
        return self.prelude.request

    @property
    def payload_length(self) -> int:
        return self.prelude.payload_length


class FrameStream:
    """Frames over one connection, one task at a time in each direction. Raises `PeerUnreachable` as the connection does,
    `ProtocolViolation` for bytes that are no message."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.sent_bytes = 0
        self.received_bytes = 0
        self._prelude = memoryview(bytearray(PRELUDE_SIZE))
        self._untaken_bytes = 0

    async def send(
        self, request: int, message: Message, payload: Buffer | None = None, payload_hash: bytes | None = None
    ) -> None:
        """Send one frame. `payload_hash` is computed unless it is known. Keeps no buffer."""
        head, payload = self._pack(request, message, payload, payload_hash)
        await self.connection.send(head, payload)

    async def receive(self, *, idle_seconds: float | None = None) -> Incoming | None:
        """The next message, or None if the peer closed between two frames. `idle_seconds` is how long it may
        take to begin, where that is not the stall limit."""
        await self._drop_untaken()
        if not await self.connection.receive(self._prelude, seconds=idle_seconds):
            return None
        prelude = frame_format.unpack_prelude(self._prelude)
        header = memoryview(bytearray(prelude.header_length))
        await self._fill(header)
        return self._unpack(prelude, header)

    async def receive_payload(self, incoming: Incoming, buffer: memoryview, *, check: bool = True) -> memoryview:
        """The payload, in the front of `buffer`. Raises `ProtocolViolation` if it doesn't fit or, unless `check` is off,
        fails its hash."""
        view = self._place(incoming, buffer)
        await self._fill(view)
        if check:
            frame_format.check_payload(incoming.prelude, view)
        return view

    # ---- the same from a thread of trio.to_thread, while no task uses this stream

    def send_in_thread(self, request: int, message: Message, payload: Buffer, payload_hash: bytes) -> None:
        head, _ = self._pack(request, message, payload, payload_hash)
        self.connection.send_in_thread(head, payload)

    def send_file_in_thread(
        self, request: int, message: Message, descriptor: int, offset: int, length: int, payload_hash: bytes
    ) -> None:
        """A frame whose payload is a part of a file, as the drive gives it."""
        type_, header = peer_messages.encode(message)
        head = frame_format.pack_head_of_file(type_, request, header, length, payload_hash)
        self.sent_bytes += len(head) + length
        self.connection.send_file_in_thread(head, descriptor, offset, length)

    def receive_in_thread(self, *, seconds: float | None = None) -> Incoming | None:
        """`seconds`: how long it may take, where that is not the stall limit."""
        if self._untaken_bytes:
            raise AssertionError("a payload was left untaken")
        if not self.connection.receive_in_thread(self._prelude, seconds=seconds):
            return None
        prelude = frame_format.unpack_prelude(self._prelude)
        header = memoryview(bytearray(prelude.header_length))
        self._fill_in_thread(header)
        return self._unpack(prelude, header)

    def receive_payload_in_thread(self, incoming: Incoming, buffer: memoryview, *, seconds: float | None = None) -> memoryview:
        """The payload, in the front of `buffer`, its hash not checked."""
        view = self._place(incoming, buffer)
        self._fill_in_thread(view, seconds)
        return view

    def _fill_in_thread(self, view: memoryview, seconds: float | None = None) -> None:
        if len(view) and not self.connection.receive_in_thread(view, seconds=seconds):
            raise PeerUnreachable("the peer closed the connection in the middle")

    # ---- what both have in common

    def _pack(
        self, request: int, message: Message, payload: Buffer | None, payload_hash: bytes | None
    ) -> tuple[bytes, Buffer | None]:
        type_, header = peer_messages.encode(message)
        head = frame_format.pack_head(type_, request, header, payload, payload_hash)
        self.sent_bytes += len(head) + (0 if payload is None else len(payload))
        return head, payload if payload is not None and len(payload) else None

    def _unpack(self, prelude: Prelude, header: memoryview) -> Incoming:
        checked = frame_format.check_header(prelude, header)
        self.received_bytes += PRELUDE_SIZE + len(checked) + prelude.payload_length
        self._untaken_bytes = prelude.payload_length
        return Incoming(peer_messages.decode(prelude.type, checked, prelude.payload_length), prelude)

    def _place(self, incoming: Incoming, buffer: memoryview) -> memoryview:
        length = incoming.payload_length
        if length > len(buffer):
            raise ProtocolViolation(f"a payload of {length} bytes where at most {len(buffer)} make sense")
        self._untaken_bytes = 0
        return buffer[:length]

    async def _drop_untaken(self) -> None:
        left, self._untaken_bytes = self._untaken_bytes, 0
        scratch = memoryview(bytearray(min(left, 1 << 18)))
        while left:
            part = scratch[: min(left, len(scratch))]
            await self._fill(part)
            left -= len(part)

    async def _fill(self, view: memoryview) -> None:
        if len(view) and not await self.connection.receive(view):
            raise PeerUnreachable("the peer closed the connection in the middle")
