"""HTTP/1.1 to one server, over h11: what the catalog on etcd needs of it, and no more.

Not over an HTTP library of more comfort: what those make of an answer are generators inside generators, which trio can't end in
order when a request is cancelled, and they take many times as long for a small request.
"""

import select
import ssl
from typing import Any
from urllib.parse import urlsplit

import h11
import trio

KeepAlive = list[tuple[int, int, int]]


class HttpFailed(Exception):
    """The connection broke, or what came is no HTTP. `sent`: whether the server may have got the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class HttpConnection:
    """One request at a time. After a failure, or a cancelled request, good for nothing but `aclose`."""

    @classmethod
    async def open(cls, url: str, trust: ssl.SSLContext | None, options: KeepAlive, seconds_max: float) -> "HttpConnection":
        """A connection to the server of that URL. Raises `HttpFailed` (never `sent`)."""
        parts = urlsplit(url)
        try:
            with trio.fail_after(seconds_max):
                stream = await trio.open_tcp_stream(str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
                for level, option, value in options:
                    stream.setsockopt(level, option, value)
                if parts.scheme != "https":
                    return cls(stream, stream, parts.netloc)
                secure = trio.SSLStream(
                    stream, trust or ssl.create_default_context(), server_hostname=parts.hostname, https_compatible=True
                )
                await secure.do_handshake()
                return cls(secure, stream, parts.netloc)
        except trio.TooSlowError:
            raise HttpFailed(f"takes no connections within {seconds_max:g} s", sent=False) from None
        except (OSError, trio.BrokenResourceError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OSError | ssl.SSLError) else error
            raise HttpFailed(str(getattr(cause, "strerror", None) or cause or type(error).__name__), sent=False) from None

    def __init__(self, stream: trio.abc.Stream, socket: trio.SocketStream, host: str) -> None:
        self._stream = stream
        self._socket = socket
        self._host = host
        self._http = h11.Connection(h11.CLIENT)

    def is_fresh(self) -> bool:
        """Whether another request can be made: nothing came unasked, not even the end."""
        if self._http.our_state is not h11.IDLE:
            return False
        poll = select.poll()
        poll.register(self._socket.socket.fileno(), select.POLLIN)
        return not poll.poll(0)

    async def begin(self, path: str, body: bytes, headers: dict[str, str]) -> int:
        """Post the request; returns the status of the answer, whose body follows. Raises `HttpFailed`."""
        fields = [("Host", self._host), ("Content-Length", str(len(body))), *headers.items()]
        request = [h11.Request(method="POST", target=path, headers=fields), h11.Data(body), h11.EndOfMessage()]
        try:
            await self._stream.send_all(b"".join(self._http.send(event) or b"" for event in request))
            answer = await self._event()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
            raise HttpFailed(str(error) or type(error).__name__, sent=True) from None
        if not isinstance(answer, h11.Response):
            raise HttpFailed("the connection was closed instead of an answer", sent=True)
        return answer.status_code

    async def piece(self) -> bytes | None:
        """The next bytes of the answer's body, None at its end. Raises `HttpFailed`."""
        try:
            event = await self._event()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError) as error:
            raise HttpFailed(str(error) or type(error).__name__, sent=True) from None
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def rest(self, size_max: int) -> bytes:
        """The whole body. Raises `HttpFailed`, also for a longer one."""
        found = bytearray()
        while (piece := await self.piece()) is not None:
            found += piece
            if len(found) > size_max:
                raise HttpFailed(f"an answer of more than {size_max} bytes", sent=True)
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return bytes(found)

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(bytes(await self._stream.receive_some()))
        return await self._event() if isinstance(event, h11.InformationalResponse) else event

    async def aclose(self) -> None:
        """Close at once."""
        await trio.aclose_forcefully(self._stream)
