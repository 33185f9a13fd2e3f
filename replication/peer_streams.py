"""Requests of many frames, which own their connection meanwhile: a shard on its way to a peer, and cells on their way here."""

import contextlib
from collections.abc import Callable
from types import TracebackType

from ckptfs.cache.checksum import Buffer
from ckptfs.cache.holes import zero_hash
from ckptfs.replication import shard_format
from ckptfs.replication.errors import PeerUnreachable, ProtocolViolation
from ckptfs.replication.peer_connection import PeerConnection
from ckptfs.replication.peer_messages import FOOTER_PART_BYTES, Cell, CellsDone, CellsGet, FooterPart, Message, PutDone, PutStop
from ckptfs.replication.shard_format import ShardFooter, ShardHeader


class PutStream:
    """One shard on its way. Cells of stripes before `resume_stripe` are at the peer already. Usable as `async with`."""

    def __init__(self, client: PeerConnection, request: int, header: ShardHeader, resume_stripe: int) -> None:
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
        if length and digest == zero_hash(length):
            await self._send(Cell(stripe, 1), b"")
        elif length:
            await self._send(Cell(stripe), cell, digest)

    def send_cell_in_thread(self, stripe: int, cell: Buffer, digest: bytes) -> bool:
        """As `send_cell`, from a thread of `trio.to_thread`; False, with nothing sent, if the peer has said something, which
        `send_cell` finds out. Raises `PeerUnreachable`, `ValueError`; `aclose` follows."""
        length = self.header.cell_length(stripe)
        if stripe != self._next_stripe or len(cell) != length or not length:
            raise ValueError(f"cell {stripe} of {len(cell)} bytes, expected {self._next_stripe} of {length}")
        client = self._client
        if client.under_way is not self or client.stream is None:
            raise PeerUnreachable("the put has ended")
        if client.stream.connection.has_input():
            return False
        zeros = digest == zero_hash(length)
        client.stream.send_in_thread(self._request, Cell(stripe, int(zeros)), b"" if zeros else cell, digest)
        self._next_stripe += 1
        return True

    async def send_zeros(self, stripe: int, count: int) -> None:
        """As `send_cell`, for so many cells of zeros from that stripe on."""
        if stripe != self._next_stripe or count < 1:
            raise ValueError(f"{count} cells of zeros from {stripe} on, expected {self._next_stripe}")
        self._next_stripe += count
        await self._send(Cell(stripe, count), b"")

    async def finish(self, footer: ShardFooter) -> bytes:
        """Complete the shard; returns the root of what the peer stored durably. The client is free again."""
        if footer.header != self.header or self._next_stripe < self.header.cell_count:
            raise ValueError(f"a footer after {self._next_stripe} of {self.header.cell_count} cells")
        end = shard_format.pack_footer(footer)
        for at in range(0, len(end), FOOTER_PART_BYTES):
            await self._send(FooterPart(at, len(end)), memoryview(end)[at : at + FOOTER_PART_BYTES])
        client = self._client
        with client.closing_on_error():
            try:
                root = (await client.receive(self._request, PutDone)).root
            finally:
                self._end()
        return root

    async def aclose(self) -> None:
        """Give up if not finished; what the peer has may be resumed. Harmless when repeated."""
        client = self._client
        if client.under_way is self and client.stream is not None:
            with contextlib.suppress(PeerUnreachable), client.closing_on_error():
                await client.stream.send(self._request, PutStop())
            self._end()

    async def _send(self, message: Message, payload: Buffer, digest: bytes | None = None) -> None:
        client = self._client
        stream = client.stream
        if client.under_way is not self or stream is None:
            raise PeerUnreachable("the put has ended")
        with client.closing_on_error():
            failure: PeerUnreachable | None = None
            try:
                if not stream.connection.has_input():
                    await stream.send(self._request, message, payload, digest)
                    return
            except PeerUnreachable as error:
                failure = client.why(error)
            self._end()
            if failure is None:
                await client.receive(self._request, PutDone)
                raise ProtocolViolation("the peer calls a shard done before its end")
            try:
                if stream.connection.has_input():  # the peer may have said why before it left
                    await client.receive(self._request, PutDone)
            except PeerUnreachable:
                pass
            finally:
                client.close()
            raise failure

    def _end(self) -> None:
        if self._client.under_way is self:
            self._client.under_way = None

    async def __aenter__(self) -> "PutStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class CellStream:
    """Cells on their way here. `stripe` is that of the last cell."""

    def __init__(self, client: PeerConnection, message: CellsGet, into: Callable[[int], memoryview] | None) -> None:
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
            await self.begin()
        if self._state == "ended":
            raise StopAsyncIteration
        if client.under_way is not self:
            raise PeerUnreachable("the reading was given up for another request")
        with client.closing_on_error():
            try:
                cell = await self._next()
            except BaseException:
                self._end()
                raise
        if cell is None:
            self._end()
            raise StopAsyncIteration
        return cell

    async def begin(self) -> None:
        """Ask for the cells. Raises `PeerUnreachable`, `PeerRefused`."""
        async with self._client.asking(self._message) as self._request:
            pass
        self._client.under_way, self._state = self, "open"
        self.stripe = self._message.first_stripe - 1

    def next_in_thread(self, buffer: memoryview, seconds: float) -> int:
        """The next cell, in the front of `buffer`, from a thread of `trio.to_thread` after `begin`; its length, 0 after the last
        one. It may take that long. Raises as `__anext__`; what failed is closed by `aclose`."""
        if self._state != "open" or self._client.under_way is not self or self._client.stream is None:
            raise PeerUnreachable("the reading has ended")
        incoming = self._client.receive_in_thread(self._request, seconds)
        message = incoming.message
        if isinstance(message, CellsDone):
            self._end()
            return 0
        self._require_next(message)
        length = len(self._client.stream.receive_payload_in_thread(incoming, buffer, seconds=seconds))
        if self.stripe + 1 == self._message.first_stripe + self._message.count:
            if not isinstance(self._client.receive_in_thread(self._request, seconds).message, CellsDone):
                raise ProtocolViolation("more cells than were asked for")
            self._end()
        return length

    async def aclose(self) -> None:
        """Give up what wasn't read: that closes the connection, for the rest is under way. Harmless when repeated."""
        if self._state == "open" and self._client.under_way is self:
            self._client.close()
        self._state = "ended"

    async def _next(self) -> memoryview | None:
        client = self._client
        incoming, answer = await client.receive_any(self._request, Cell, CellsDone)
        if not isinstance(answer, Cell):
            return None
        self._require_next(answer)
        if self._into is not None:
            buffer = self._into(answer.stripe)
        else:
            if len(self._buffer) < incoming.payload_length:
                self._buffer = memoryview(bytearray(incoming.payload_length))
            buffer = self._buffer
        return await client.payload(incoming, buffer, check=False)

    def _require_next(self, answer: Message) -> None:
        asked = self._message
        if not isinstance(answer, Cell) or answer.stripe != self.stripe + 1 or answer.stripe >= asked.first_stripe + asked.count:
            raise ProtocolViolation(f"{answer!r:.100} after cell {self.stripe}")
        self.stripe = answer.stripe

    def _end(self) -> None:
        self._state = "ended"
        if self._client.under_way is self:
            self._client.under_way = None

    async def __aenter__(self) -> "CellStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
