"""etcd's JSON gateway (`/v3/…`, etcd 3.4 and newer) over HTTP: requests in, checked answers out.

The gateway maps etcd's gRPC messages to JSON as proto3 does: bytes are base64, 64-bit integers are strings, and a field that has
its zero value is left out. An error is an object with a gRPC status `code` and a `message`; in the middle of a stream it comes as
`{"error": …}`. What is decoded here follows etcd's `api/etcdserverpb/rpc.proto`.

A member that can't be reached or answers that it has no leader is passed over for the next one. Every call ends after a time:
`CatalogUnavailable` says which members were tried and what the last one said.
"""

import itertools
import logging
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import trio

from ckptfs.cache.errors import CatalogFull, CatalogUnavailable, SessionEnded
from ckptfs.cache.http_connection import HttpConnection, HttpFailed

log = logging.getLogger(__name__)

WAIT_SECONDS_MAX = 30.0
ATTEMPT_SECONDS_MAX = 5.0
CONNECT_SECONDS_MAX = 2.0
RETRY_SECONDS_MIN = 0.02
RETRY_SECONDS_MAX = 1.0
ANSWER_BYTES_MAX = 64 << 20
CONNECTIONS_IDLE_MAX = 16
OK = 200

# gRPC status codes (grpc/doc/statuscodes.md)
INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 5, 8, 9, 16
_ANSWERS_FOR_GOOD = {INVALID_ARGUMENT, 6, 7, FAILED_PRECONDITION, 11, 12}  # the same request would get the same answer

_KEEPALIVE = [  # a watch hears nothing for hours: a dead member must be noticed all the same
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


class Header(msgspec.Struct):
    """Which cluster answered, and its newest revision then."""

    cluster_id: int = 0
    revision: int = 0


class KeyRecord(msgspec.Struct):
    """One key (etcd's `mvccpb.KeyValue`)."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0


class RangeAnswer(msgspec.Struct):
    """Keys in order; `count` is how many there are whatever the limit."""

    header: Header = msgspec.field(default_factory=Header)
    kvs: list[KeyRecord] = []
    more: bool = False
    count: int = 0


class OperationAnswer(msgspec.Struct):
    """Of one operation of a transaction: what a range found."""

    response_range: RangeAnswer = msgspec.field(default_factory=RangeAnswer)


class TransactionAnswer(msgspec.Struct):
    """Whether the compares held, and what each operation answered."""

    header: Header = msgspec.field(default_factory=Header)
    succeeded: bool = False
    responses: list[OperationAnswer] = []


class WatchedEvent(msgspec.Struct):
    """One change; `type` is absent for a put."""

    kv: KeyRecord
    type: str = "PUT"


class WatchAnswer(msgspec.Struct):
    """One message of a watch. The events of one revision are never split over two."""

    header: Header = msgspec.field(default_factory=Header)
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[WatchedEvent] = []


class GatewayError(msgspec.Struct):
    """What went wrong; `code` is a gRPC status, 0 where the gateway gave none."""

    code: int = 0
    message: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        return self.message or self.error


class WatchMessage(msgspec.Struct):
    """A line of a watch's stream."""

    result: WatchAnswer | None = None
    error: GatewayError | None = None


class LeaseAnswer(msgspec.Struct):
    """A lease; TTL in seconds, 0 or less where it is gone."""

    ID: int = 0
    TTL: int = 0
    keys: list[bytes] = []


class KeptAlive(msgspec.Struct):
    """The answer to one keep-alive."""

    result: LeaseAnswer | None = None


class Token(msgspec.Struct):
    """What authenticates later requests."""

    token: str


class Nothing(msgspec.Struct):
    """An answer of which nothing matters but that it came."""


Answer = TypeVar("Answer", bound=msgspec.Struct)


class OutcomeUnknown(Exception):
    """The request was sent and may be carried out, now or later. Never leaves this room."""


class EtcdRefused(CatalogUnavailable):
    """etcd answered that the request can't be carried out, now or ever; `code` is the gRPC status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class EtcdGateway:
    """One cluster of etcd, by its members' URLs. Used by one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        trust: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
        wait_seconds: float = WAIT_SECONDS_MAX,
    ) -> None:
        """`trust` holds the certificate authority, and the own certificate, for https; `wait_seconds` bounds every call."""
        self._urls = itertools.cycle(urls)
        self._url = next(self._urls)
        self._members = ", ".join(urls)
        self.wait_seconds = wait_seconds
        self._trust = trust
        self._user, self._password = user, password
        self._token = ""
        self._idle: list[tuple[str, HttpConnection]] = []
        self._closed = False

    async def aclose(self) -> None:
        """Close the connections; running calls end with an error."""
        self._closed = True
        with trio.CancelScope(shield=True):
            while self._idle:
                await self._idle.pop()[1].aclose()

    async def call(self, path: str, body: dict[str, Any], answer: type[Answer], *, once: bool = False) -> Answer:
        """Post the request; again, to the next member, while nothing but the way there failed.

        With `once` it is sent until it may have arrived: then `OutcomeUnknown` if no answer came. Raises `CatalogUnavailable`
        when no member answered in time; `CatalogFull`, `SessionEnded` (a lease is gone) and `EtcdRefused` for etcd's answers.
        """
        deadline = trio.current_time() + self.wait_seconds
        delay = RETRY_SECONDS_MIN
        while True:
            last, unsent = "no answer in time", False
            with trio.move_on_at(min(deadline, trio.current_time() + ATTEMPT_SECONDS_MAX)):
                try:
                    return await self._attempt(path, body, answer)
                except HttpFailed as failed:
                    last, unsent = str(failed), not failed.sent
                except _Retried as error:
                    last = str(error)
            if once and not unsent:
                raise OutcomeUnknown(last)
            self._url = next(self._urls)
            if trio.current_time() + delay >= deadline:
                raise CatalogUnavailable(
                    f"etcd ({self._members}) did not answer for {self.wait_seconds:g} s: {last};"
                    " open files are not touched, the operation can be repeated when it is back"
                )
            await trio.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)

    async def _attempt(self, path: str, body: dict[str, Any], answer: type[Answer]) -> Answer:
        await self._authenticate()
        status, content = await self._post(path, body)
        if status == OK:
            return _decoded(content, answer)
        self._raise_for(_refusal(status, content))
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        connection = await self._connected()
        url = self._url
        try:
            status = await connection.begin(path, msgspec.json.encode(body), self._headers())
            content = await connection.rest(ANSWER_BYTES_MAX)
        except BaseException:
            with trio.CancelScope(shield=True):
                await connection.aclose()
            raise
        if self._closed or len(self._idle) >= CONNECTIONS_IDLE_MAX:
            await connection.aclose()
        else:
            self._idle.append((url, connection))
        return status, content

    async def _connected(self) -> HttpConnection:
        """A connection to the present member, one that is idle if there is one."""
        while self._idle:
            url, connection = self._idle.pop()
            if url == self._url and connection.is_fresh():
                return connection
            await connection.aclose()
        return await HttpConnection.open(self._url, self._trust, _KEEPALIVE, CONNECT_SECONDS_MAX)

    def _raise_for(self, refused: GatewayError) -> None:
        if refused.code == UNAUTHENTICATED and self._token:
            self._token = ""  # it has expired: the next attempt asks for a new one
            raise _Retried(refused.text)
        if refused.code == RESOURCE_EXHAUSTED and "space" in refused.text:
            raise CatalogFull(f"etcd ({self._members}) takes no more: {refused.text}; names can be removed, then defragment etcd")
        if refused.code == NOT_FOUND and "lease" in refused.text:
            raise SessionEnded(f"etcd ({self._members}): {refused.text}")
        if refused.code in _ANSWERS_FOR_GOOD or refused.code == UNAUTHENTICATED:
            raise EtcdRefused(refused.code, f"etcd ({self._members}) refused: {refused.text}")
        raise _Retried(refused.text)

    async def _authenticate(self) -> None:
        if not self._user or self._token:
            return
        status, content = await self._post("/v3/auth/authenticate", {"name": self._user, "password": self._password})
        if status != OK:
            self._raise_for(_refusal(status, content))
        self._token = _decoded(content, Token).token

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    @asynccontextmanager
    async def watch(self, request: dict[str, Any]) -> AsyncIterator["WatchStream"]:
        """The answers to one watch request, from one member, until it breaks: then `CatalogUnavailable`."""
        try:
            await self._authenticate()
            connection = await HttpConnection.open(self._url, self._trust, _KEEPALIVE, CONNECT_SECONDS_MAX)
            try:
                with trio.fail_after(ATTEMPT_SECONDS_MAX):
                    body = msgspec.json.encode({"create_request": request})
                    status = await connection.begin("/v3/watch", body, self._headers())
                if status != OK:
                    self._raise_for(_refusal(status, await connection.rest(ANSWER_BYTES_MAX)))
                yield WatchStream(connection)
            finally:
                with trio.CancelScope(shield=True):
                    await connection.aclose()
        except (HttpFailed, trio.TooSlowError, _Retried) as error:
            self._url = next(self._urls)
            raise CatalogUnavailable(f"the watch of etcd ({self._members}) broke: {error or type(error).__name__}") from None


class WatchStream:
    """One answer of endless length, read message by message, a line each."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self._pending = b""
        self._messages: deque[bytes] = deque()

    async def answer(self) -> WatchAnswer:
        """The next one. Raises what says that there will be none."""
        while True:
            while self._messages:
                message = _decoded(self._messages.popleft(), WatchMessage)
                if message.error is not None:
                    raise _Retried(message.error.text)
                if message.result is not None:
                    return message.result
            piece = await self._connection.piece()
            if piece is None:
                raise _Retried("the stream ended")
            *lines, self._pending = (self._pending + piece).split(b"\n")
            if len(self._pending) > ANSWER_BYTES_MAX:
                raise CatalogUnavailable(f"etcd sent a message of more than {ANSWER_BYTES_MAX} bytes")
            self._messages.extend(line for line in lines if line.strip())


class _Retried(Exception):
    """The member can't answer now; another one, or the same one later, may."""


def _decoded(content: bytes, answer: type[Answer]) -> Answer:
    if len(content) > ANSWER_BYTES_MAX:
        raise CatalogUnavailable(f"etcd sent an answer of {len(content)} bytes; at most {ANSWER_BYTES_MAX} are possible")
    try:
        return msgspec.json.decode(content, type=answer, strict=False)
    except msgspec.DecodeError as error:
        raise CatalogUnavailable(f"etcd's answer makes no sense ({error}): is this an etcd gateway?") from None


def _refusal(status: int, content: bytes) -> GatewayError:
    try:
        return msgspec.json.decode(content, type=GatewayError, strict=False)
    except msgspec.DecodeError:
        return GatewayError(0, f"HTTP {status}")
