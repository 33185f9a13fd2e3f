"""Connections between machines: TCP with TLS 1.3, and a certificate on both sides.

Who connects checks that the certificate is the authority's, not revoked, in its time, and made out to the host it connected to;
who takes a connection in checks all but the host. Which node the certificate names is `peer_node`, which both compare with what
the peer says of itself (`peer_server`, `peer_connection`).

The files are looked at before each connection: a certificate that was renewed, or a list of revoked ones that was replaced, holds
from the next one on. Handshakes happen in the task of the connection, within the same deadline as everything else.
"""

import contextlib
import errno
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import trio

from ckptfs.cache.checksum import Buffer
from ckptfs.replication.errors import AddressRefused, CertificateTrouble, PeerNotTrusted, PeerUnreachable
from ckptfs.replication.transport import (
    BACKLOG,
    BREATH_SECONDS,
    CONNECT_SECONDS,
    STALL_SECONDS,
    THREAD_WAIT_SECONDS,
    file_part,
    parts_of,
    send_end,
)

NODE_URI = "ckptfs:node:"
FILE_PART_BYTES = 256 << 10
"""So much of a file is read, encrypted and sent before the next is read."""

Step = Callable[[], int]
"""Does what it can without waiting; returns what it waits for (a poll event), 0 when it is done."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: the authority's certificate, the node's own with its key, and what was revoked, if anything ever is."""

    authority: Path
    certificate: Path
    key: Path
    revoked: Path | None = None


class TlsTransport:
    """A `Transport`. Raises `CertificateTrouble` for files that can't be used, at once and whenever they changed."""

    def __init__(
        self, files: TlsFiles, *, stall_seconds: float = STALL_SECONDS, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._files = files
        self._stall_seconds = stall_seconds
        self._connect_seconds = connect_seconds
        self._seen: tuple[tuple[int, int], ...] = ()
        self._contexts = self._current()

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """The contexts for connecting and for taking in."""
        files = self._files
        try:
            paths = [path for path in (files.authority, files.certificate, files.key, files.revoked) if path is not None]
            seen = tuple((status.st_mtime_ns, status.st_ino) for status in (path.stat() for path in paths))
            if seen != self._seen:
                self._contexts = _context(ssl.PROTOCOL_TLS_CLIENT, files), _context(ssl.PROTOCOL_TLS_SERVER, files)
                self._seen = seen
        except (OSError, ssl.SSLError) as error:
            named = getattr(error, "filename", None) or f"{files.authority}, {files.certificate}, {files.key}"
            raise CertificateTrouble(f"the certificates ({named}) can't be used: {error.strerror or error}") from None
        return self._contexts

    async def connect(self, address: str) -> "TlsConnection":
        host, port = _host_and_port(address)
        context, _ = self._current()
        try:
            with trio.fail_after(self._connect_seconds):
                stream = await trio.open_tcp_stream(host, port)
        except trio.TooSlowError:
            raise PeerUnreachable(f"{address} doesn't take connections within {self._connect_seconds:g} s") from None
        except OSError as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            raise PeerUnreachable(f"{address} can't be reached: {cause.strerror or cause}") from None
        raw = _taken(stream)
        try:
            connection = TlsConnection(_wrapped(context, raw, host), self._stall_seconds, address)
        except BaseException:
            raw.close()
            raise
        try:
            await connection.shake_hands()
        except BaseException:
            connection.close()
            raise
        return connection

    def listen(self, address: str) -> "TlsListener":
        host, port = _host_and_port(address)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        raw = socket.socket(family, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            raw.bind(target)
            raw.listen(BACKLOG)
        except BaseException:
            raw.close()
            raise
        return TlsListener(raw, host, lambda: self._current()[1], self._stall_seconds)


class TlsListener:
    """A listening socket. `address` has the host as it was given, which is the one that certificates name."""

    def __init__(self, raw: socket.socket, host: str, context: Callable[[], ssl.SSLContext], stall_seconds: float) -> None:
        self._raw = raw
        self._context = context
        self._stall_seconds = stall_seconds
        port = raw.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def accept(self) -> "TlsConnection":
        while True:
            await trio.lowlevel.wait_readable(self._raw)
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                raw, where = self._raw.accept()
                try:
                    return TlsConnection(_wrapped(self._context(), raw, None), self._stall_seconds, f"{where[0]}:{where[1]}")
                except CertificateTrouble as trouble:
                    raw.close()
                    raise OSError(errno.EACCES, str(trouble)) from None
                except BaseException:
                    raw.close()
                    raise

    def close(self) -> None:
        if self._raw.fileno() >= 0:
            trio.lowlevel.notify_closing(self._raw)
            self._raw.close()


class TlsConnection:
    """A `Connection`. One task or thread may send while another receives: OpenSSL's calls are made one at a time."""

    def __init__(self, raw: ssl.SSLSocket, stall_seconds: float, address: str) -> None:
        self._raw = raw
        self._stall_seconds = stall_seconds
        self._address = address
        self._turn = threading.Lock()
        self._shaken = False
        self._breath_seconds = -math.inf
        self.peer_node: str | None = None

    async def shake_hands(self) -> None:
        """Find out who is there. Raises `PeerNotTrusted`, `PeerUnreachable`."""
        await self._do(self._handshake, trio.current_time() + self._stall_seconds, "does not finish its handshake")

    def _handshake(self) -> int:
        if self._shaken:
            return 0
        want = self._attempt(self._raw.do_handshake)
        if not want:
            certificate: dict[str, Any] = self._raw.getpeercert() or {}
            uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
            nodes = [node for uri in uris if (node := node_of_uri(uri)) is not None]
            if len(nodes) != 1:
                raise PeerNotTrusted(f"{self._address} has a certificate that names no node; issue one with ckptfs nodes add")
            self.peer_node = nodes[0]
            self._shaken = True
        return want

    async def send(self, head: Buffer, payload: Buffer | None = None) -> None:
        await self._breathe()
        await self._do(self._sending(head, payload), trio.current_time() + self._stall_seconds, "takes in nothing more")

    async def receive(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        await self._breathe()
        limit = self._stall_seconds if seconds is None else seconds
        done = 0

        def first() -> int:
            nonlocal done
            want, done = self._receive_some(buffer, 0)
            return want

        def rest() -> int:
            nonlocal done
            while done < len(buffer):
                want, count = self._receive_some(buffer[done:], done)
                if want:
                    return want
                done += count
            return 0

        if not len(buffer):
            return True
        await self._do(first, trio.current_time() + limit, f"sent nothing whole for {limit:g} s")
        if not done:
            return False
        await self._do(rest, trio.current_time() + self._stall_seconds, f"sent nothing whole for {self._stall_seconds:g} s")
        return True

    def send_in_thread(self, head: Buffer, payload: Buffer | None = None) -> None:
        self._do_in_thread(self._sending(head, payload), "takes in nothing more")

    def send_file_in_thread(self, head: Buffer, descriptor: int, offset: int, length: int) -> None:
        self.send_in_thread(head)
        for at in range(offset, offset + length, FILE_PART_BYTES):
            self.send_in_thread(file_part(descriptor, at, min(FILE_PART_BYTES, offset + length - at)))

    def receive_in_thread(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        limit = self._stall_seconds if seconds is None else seconds
        done = 0

        def step() -> int:
            nonlocal done
            while done < len(buffer):
                want, count = self._receive_some(buffer[done:], done)
                if want or not count:
                    return want
                done += count
            return 0

        self._do_in_thread(step, f"sent nothing whole for {limit:g} s", limit)
        return done == len(buffer)

    def has_input(self) -> bool:
        if self._raw.pending():
            return True
        poll = select.poll()
        poll.register(self._raw, select.POLLIN)
        return bool(poll.poll(0))

    async def finish(self) -> None:
        await send_end(self._raw)
        self.close()

    def close(self) -> None:
        if self._raw.fileno() >= 0:
            trio.lowlevel.notify_closing(self._raw)
            with self._turn:
                self._raw.close()

    def _sending(self, head: Buffer, payload: Buffer | None) -> Step:
        parts = parts_of(head, payload)

        def step() -> int:
            while parts:
                sent = 0

                def send() -> None:
                    nonlocal sent
                    sent = self._raw.send(parts[0])

                if want := self._handshake() or self._attempt(send):
                    return want
                if sent < len(parts[0]):
                    parts[0] = parts[0][sent:]
                else:
                    del parts[0]
            return 0

        return step

    def _receive_some(self, buffer: memoryview, done: int) -> tuple[int, int]:
        """What it waits for, and how many bytes came; 0 of both at the end, which may not come when something has begun."""
        count = 0

        def receive() -> None:
            nonlocal count
            count = self._raw.recv_into(buffer)

        if want := self._handshake() or self._attempt(receive):
            return want, 0
        if not count and done:
            raise PeerUnreachable("the peer closed the connection in the middle")
        return 0, count

    def _attempt(self, call: Callable[[], None]) -> int:
        try:
            with self._turn:
                call()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLCertVerificationError as error:
            raise PeerNotTrusted(f"the certificate of {self._address} isn't accepted: {error.verify_message}") from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise PeerUnreachable("the peer closed the connection in the middle") from None
        except ssl.SSLError as error:
            raise PeerNotTrusted(f"no TLS with {self._address}: {_why(error)}") from None
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"the peer went away: {getattr(error, 'strerror', None) or error}") from None
        return 0

    async def _do(self, step: Step, deadline: float, what: str) -> None:
        while want := step():
            with trio.CancelScope(deadline=deadline) as scope:
                await (trio.lowlevel.wait_readable if want == select.POLLIN else trio.lowlevel.wait_writable)(self._raw)
            if scope.cancelled_caught:
                raise PeerUnreachable(f"the peer hangs: it {what}")

    def _do_in_thread(self, step: Step, what: str, seconds: float | None = None) -> None:
        deadline = time.monotonic() + (self._stall_seconds if seconds is None else seconds)
        while want := step():
            poll = select.poll()
            poll.register(self._raw, want)
            while not poll.poll(THREAD_WAIT_SECONDS * 1000):
                trio.from_thread.check_cancelled()
                if time.monotonic() > deadline:
                    raise PeerUnreachable(f"the peer hangs: it {what}")

    async def _breathe(self) -> None:
        now = trio.current_time()
        if now - self._breath_seconds > BREATH_SECONDS:
            await trio.lowlevel.checkpoint()
            self._breath_seconds = now


def node_uri(node: str) -> str:
    """What a certificate calls a node."""
    return NODE_URI + quote(node, safe="")


def node_of_uri(uri: str) -> str | None:
    """The node that a URI of a certificate names, if it names one."""
    return unquote(uri.removeprefix(NODE_URI)) if uri.startswith(NODE_URI) else None


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = protocol == ssl.PROTOCOL_TLS_CLIENT
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(files.authority)
    context.load_cert_chain(files.certificate, files.key)
    if files.revoked is not None:
        context.load_verify_locations(files.revoked)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nothing comes unasked: input on an idle connection means that it ended
    return context


def _wrapped(context: ssl.SSLContext, raw: socket.socket, host: str | None) -> ssl.SSLSocket:
    raw.setblocking(False)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(
        raw, server_side=host is None, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=True
    )


def _taken(stream: trio.SocketStream) -> socket.socket:
    """The plain socket of a stream, which is given up."""
    own = stream.socket
    return socket.socket(own.family, own.type, own.proto, fileno=own.detach())


def _why(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return f"it refuses this node's certificate ({reason})"
    return reason


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise AddressRefused(f"{address!r} is no address of the form host:port")
    return host, int(port)
