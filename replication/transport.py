"""How bytes get from one agent to another: the seam at which certificates come in.

A `Transport` makes `Connection`s. `PlainTransport` is TCP without any proof of who is at the other end, so it refuses
everything but loopback addresses.

Every wait has a deadline here, at the edge: what is sent or received in one call (a frame at most) must be through within
`stall_seconds`, however slowly the other side drips. A connection whose send or receive raised or was cancelled is in an
unknown state and good for nothing but `close`.

Bulk work may stay in one thread from the socket to the file and back. (m) Handing each cell of 1 MiB from the event loop
to a thread halves the throughput on two cores: the bytes are in the wrong core's cache then.
"""

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ckptfs.cache.checksum import Buffer
from ckptfs.replication.errors import AddressRefused, PeerUnreachable

STALL_SECONDS = 30.0
CONNECT_SECONDS = 5.0
BREATH_SECONDS = 0.001
THREAD_WAIT_SECONDS = 0.1
BACKLOG = 128

_OF_THE_FILE = (errno.EIO, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What sendfile says of the file, and of no socket: the drive can't give it, or the file system can't do it this way."""


class Connection(Protocol):
    """A stream of bytes to and from one peer, one task sending and one receiving at a time."""

    @property
    def peer_node(self) -> str | None:
        """The node that the peer's certificate names, as soon as a byte has passed; None where there are no certificates."""
        ...

    async def send(self, head: Buffer, payload: Buffer | None = None) -> None:
        """Send all of head and payload. Keeps neither. Raises `PeerUnreachable`."""
        ...

    async def receive(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        """Fill the whole buffer; False if the peer closed before its first byte. `seconds` is how long the first byte may
        take, where that is not the stall limit.

        Raises `PeerUnreachable`, also if the peer closes in the middle.
        """
        ...

    def send_in_thread(self, head: Buffer, payload: Buffer | None = None) -> None:
        """As `send`, from a thread of `trio.to_thread`, whose cancellation it notices within `THREAD_WAIT_SECONDS`."""
        ...

    def send_file_in_thread(self, head: Buffer, descriptor: int, offset: int, length: int) -> None:
        """As `send_in_thread`, with so many bytes of a file as payload. Zeros go out in place of those the drive doesn't give: so
        what was announced is complete, and whoever knows its hash finds it wrong."""
        ...

    def receive_in_thread(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        """As `receive`, from a thread of `trio.to_thread`, whose cancellation it notices within `THREAD_WAIT_SECONDS`. `seconds`
        is how long all of it may take, where that is not the stall limit."""
        ...

    def has_input(self) -> bool:
        """Whether something can be received now, be it the end."""
        ...

    async def finish(self) -> None:
        """Send the end, then take in and drop what the peer still sends, for a short time: so it gets to read what was
        sent last, which a plain close could destroy. Then close."""
        ...

    def close(self) -> None:
        """Close at once. Harmless when repeated."""
        ...


class Listener(Protocol):
    """Takes connections in. `address` is where it really listens, as host:port."""

    @property
    def address(self) -> str: ...

    async def accept(self) -> Connection:
        """The next connection. Raises `trio.ClosedResourceError` after `close`."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """Makes connections."""

    async def connect(self, address: str) -> Connection:
        """A connection to that address, host:port. Raises `PeerUnreachable`, `AddressRefused`."""
        ...

    def listen(self, address: str) -> Listener:
        """Listen there; port 0 chooses one. Raises `AddressRefused`, `OSError`."""
        ...


class PlainTransport:
    """TCP on loopback."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._connect_seconds = connect_seconds

    async def connect(self, address: str) -> "SocketConnection":
        family, target = _loopback(address)
        raw = socket.socket(family, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            with trio.move_on_after(self._connect_seconds) as scope:
                error = raw.connect_ex(target)
                if error not in (0, errno.EINPROGRESS):
                    raise OSError(error, os.strerror(error))
                await trio.lowlevel.wait_writable(raw)
            if scope.cancelled_caught:
                raise PeerUnreachable(f"{address} doesn't take connections within {self._connect_seconds:g} s")
            error = raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            return SocketConnection(raw, self._stall_seconds)
        except OSError as error:
            raw.close()
            raise PeerUnreachable(f"{address} can't be reached: {error.strerror}") from None
        except BaseException:
            raw.close()
            raise

    def listen(self, address: str) -> "SocketListener":
        family, target = _loopback(address)
        raw = socket.socket(family, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            raw.bind(target)
            raw.listen(BACKLOG)
        except BaseException:
            raw.close()
            raise
        return SocketListener(raw, self._stall_seconds)


class SocketListener:
    """A listening socket."""

    def __init__(self, raw: socket.socket, stall_seconds: float) -> None:
        self._raw = raw
        self._stall_seconds = stall_seconds
        host, port = raw.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def accept(self) -> "SocketConnection":
        while True:
            await trio.lowlevel.wait_readable(self._raw)
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                raw, _ = self._raw.accept()
                return SocketConnection(raw, self._stall_seconds)

    def close(self) -> None:
        if self._raw.fileno() >= 0:
            trio.lowlevel.notify_closing(self._raw)
            self._raw.close()


class SocketConnection:
    """A connected socket. Works on the plain socket, and waits only where it must: (m) trio's own socket calls cost a
    third of the throughput at 1 MiB a frame, for one scheduling round each."""

    def __init__(self, raw: socket.socket, stall_seconds: float) -> None:
        self._raw = raw
        self._stall_seconds = stall_seconds
        self._breath_seconds = -math.inf
        self.peer_node: str | None = None
        raw.setblocking(False)
        if raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, head: Buffer, payload: Buffer | None = None) -> None:
        await self._breathe()
        deadline = trio.current_time() + self._stall_seconds
        parts = parts_of(head, payload)
        while self._send_some(parts):
            await self._wait(trio.lowlevel.wait_writable, deadline, "takes in nothing more")

    async def receive(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        await self._breathe()
        limit = self._stall_seconds if seconds is None else seconds
        deadline = trio.current_time() + limit
        done = 0
        while done < len(buffer):
            count = self._receive_some(buffer[done:], begun=done > 0)
            if count is None:
                await self._wait(trio.lowlevel.wait_readable, deadline, f"sent nothing whole for {limit:g} s")
            elif not count:
                return False
            else:
                if not done and seconds is not None:
                    limit = self._stall_seconds
                    deadline = trio.current_time() + limit
                done += count
        return True

    def send_in_thread(self, head: Buffer, payload: Buffer | None = None) -> None:
        deadline = time.monotonic() + self._stall_seconds
        parts = parts_of(head, payload)
        while self._send_some(parts):
            self._wait_in_thread(select.POLLOUT, deadline, "takes in nothing more")

    def send_file_in_thread(self, head: Buffer, descriptor: int, offset: int, length: int) -> None:
        """The payload isn't copied into this process: (m) that halves what a cell costs to send."""
        deadline = time.monotonic() + self._stall_seconds
        parts = parts_of(head, None)
        while self._send_some(parts, socket.MSG_MORE):
            self._wait_in_thread(select.POLLOUT, deadline, "takes in nothing more")
        end = offset + length
        while offset < end:
            try:
                sent = os.sendfile(self._raw.fileno(), descriptor, offset, end - offset)
            except BlockingIOError:
                self._wait_in_thread(select.POLLOUT, deadline, "takes in nothing more")
                continue
            except OSError as error:
                if error.errno not in _OF_THE_FILE:
                    raise PeerUnreachable(f"the peer went away: {error.strerror}") from None
                sent = 0
            if not sent:
                self.send_in_thread(file_part(descriptor, offset, end - offset))
                return
            offset += sent

    def receive_in_thread(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        limit = self._stall_seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        done = 0
        while done < len(buffer):
            count = self._receive_some(buffer[done:], begun=done > 0)
            if count is None:
                self._wait_in_thread(select.POLLIN, deadline, f"sent nothing whole for {limit:g} s")
            elif not count:
                return False
            else:
                done += count
        return True

    def has_input(self) -> bool:
        try:
            self._raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def finish(self) -> None:
        await send_end(self._raw)
        self.close()

    def close(self) -> None:
        if self._raw.fileno() >= 0:
            trio.lowlevel.notify_closing(self._raw)
            self._raw.close()

    def _send_some(self, parts: list[memoryview], flags: int = 0) -> bool:
        """Send what the socket takes now, and drop it from `parts`; whether something is left."""
        while parts:
            try:
                sent = self._raw.sendmsg(parts, (), flags)
            except BlockingIOError:
                return True
            except OSError as error:
                raise PeerUnreachable(f"the peer went away: {error.strerror}") from None
            while parts and sent >= len(parts[0]):
                sent -= len(parts[0])
                del parts[0]
            if sent:
                parts[0] = parts[0][sent:]
        return False

    def _receive_some(self, buffer: memoryview, *, begun: bool) -> int | None:
        """Receive what is there; None if that is nothing yet, 0 at the end, which may not come when something has begun."""
        try:
            count = self._raw.recv_into(buffer)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerUnreachable(f"the peer went away: {error.strerror}") from None
        if not count and begun:
            raise PeerUnreachable("the peer closed the connection in the middle")
        return count

    def _wait_in_thread(self, events: int, deadline: float, what: str) -> None:
        poll = select.poll()
        poll.register(self._raw, events)
        while not poll.poll(THREAD_WAIT_SECONDS * 1000):
            trio.from_thread.check_cancelled()
            if time.monotonic() > deadline:
                raise PeerUnreachable(f"the peer hangs: it {what}")

    async def _breathe(self) -> None:
        """A checkpoint, but not for every part of a frame: other tasks wait `BREATH_SECONDS` at most."""
        now = trio.current_time()
        if now - self._breath_seconds > BREATH_SECONDS:
            await trio.lowlevel.checkpoint()
            self._breath_seconds = now

    async def _wait(self, wait: Callable[[socket.socket], Awaitable[None]], deadline: float, what: str) -> None:
        with trio.CancelScope(deadline=deadline) as scope:
            await wait(self._raw)
        if scope.cancelled_caught:
            raise PeerUnreachable(f"the peer hangs: it {what}")


async def send_end(raw: socket.socket) -> None:
    """Send the end, and drop what the peer still sends, for a short time: see `Connection.finish`. TLS ends with it."""
    with trio.move_on_after(1.0), contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_WR)
        scratch = bytearray(1 << 16)
        for _ in range(1000):
            try:
                if not raw.recv_into(scratch):
                    break
            except BlockingIOError:
                await trio.lowlevel.wait_readable(raw)


def file_part(descriptor: int, offset: int, length: int) -> bytes:
    """So many bytes of a file, with zeros in place of those the drive doesn't give."""
    data = b""
    with contextlib.suppress(OSError):
        data = os.pread(descriptor, length, offset)
    return data.ljust(length, b"\0")


def parts_of(head: Buffer, payload: Buffer | None) -> list[memoryview]:
    """What is to be sent, in bytes."""
    return [memoryview(head)] if payload is None else [memoryview(head), memoryview(payload).cast("B")]


def _loopback(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError:
        raise AddressRefused(f"{address!r} is no address of the form 127.0.0.1:7000") from None
    if not ip.is_loopback:
        raise AddressRefused(f"{address} isn't a loopback address; without certificates no other is used")
    if not 0 <= number <= 65535:
        raise AddressRefused(f"{address} names no port between 0 and 65535")
    return (socket.AF_INET6 if ip.version == 6 else socket.AF_INET), (str(ip), number)
