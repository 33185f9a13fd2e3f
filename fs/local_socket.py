"""Requests between the processes of one node, and from the command line, over a unix stream socket.

A message is a 4-byte little-endian length followed by that many bytes of msgpack, one map. One request at a time on a
connection; the answer is a map with `ok`, and with `error` (a word for programs) and `message` (for people) where it is
false. Whoever may open the socket (mode 0600; root, and at the mount's the agent's user) may ask everything.
"""

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import trio

LENGTH = struct.Struct("<I")
MESSAGE_SIZE_MAX = 64 << 20

Message = dict[str, Any]
Handler = Callable[[Message], Awaitable[Message]]


class NodeNotAnswering(Exception):
    """Nobody serves the socket, or it broke off in the middle of an answer."""


class NobodyThere(NodeNotAnswering):
    """The process is not there, or went before it answered: one that is started in its place may be asked the same."""


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """A path to the same socket that fits into the 108 bytes of `sockaddr_un`, whatever the length of its directory."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _decode(body: bytes | bytearray) -> Message:
    try:
        message = msgspec.msgpack.decode(body)
    except msgspec.DecodeError as error:
        raise NodeNotAnswering(f"an answer on the node's socket can't be read: {error}") from None
    if not isinstance(message, dict):
        raise NodeNotAnswering("an answer on the node's socket isn't a map")
    return cast(Message, message)


def _checked_length(head: bytes | bytearray) -> int:
    (length,) = LENGTH.unpack(head)
    if length > MESSAGE_SIZE_MAX:
        raise NodeNotAnswering(f"a message of {length} bytes on the node's socket is beyond the limit of {MESSAGE_SIZE_MAX}")
    return int(length)


def call(path: Path, request: Message, *, timeout_seconds: float = 60.0) -> Message:
    """Ask once and return the answer, blocking. Raises `NodeNotAnswering`."""
    try:
        with _short_path(path) as short, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(short)
            body = msgspec.msgpack.encode(request)
            connection.sendall(LENGTH.pack(len(body)) + body)
            with connection.makefile("rb") as stream:
                head = stream.read(LENGTH.size)
                if len(head) < LENGTH.size:
                    raise NobodyThere(f"{path} closed the connection without an answer")
                length = _checked_length(head)
                answer = stream.read(length)
                if len(answer) < length:
                    raise NobodyThere(f"{path} broke off in the middle of an answer")
                return _decode(answer)
    except (ConnectionError, FileNotFoundError) as error:
        raise NobodyThere(f"{path}: {error.strerror or error}") from None
    except OSError as error:
        raise NodeNotAnswering(f"{path}: {error.strerror or error}") from None


class LocalClient:
    """Asks one socket from trio, over as many connections as there are requests under way, each kept for the next request."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[trio.SocketStream] = []

    async def call(self, request: Message, *, timeout_seconds: float = 10.0) -> Message:
        """Ask and return the answer. Raises `NodeNotAnswering`; a kept connection that broke meanwhile is replaced once."""
        with trio.move_on_after(timeout_seconds):
            return await self._call(request)
        raise NodeNotAnswering(f"{self._path} has not answered for {timeout_seconds:g} s")

    async def _call(self, request: Message) -> Message:
        body = msgspec.msgpack.encode(request)
        while True:
            kept = bool(self._idle)
            try:
                stream = self._idle.pop() if kept else await self._connect()
                try:
                    await stream.send_all(LENGTH.pack(len(body)) + body)
                    answer = await _receive(stream)
                    if answer is None:
                        raise NodeNotAnswering(f"{self._path} closed the connection without an answer")
                except BaseException:
                    await trio.aclose_forcefully(stream)
                    raise
            except (OSError, trio.BrokenResourceError, NodeNotAnswering) as error:
                if kept:
                    continue
                raise NodeNotAnswering(f"{self._path}: {error}") from None
            self._idle.append(stream)
            return answer

    async def _connect(self) -> trio.SocketStream:
        connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(self._path) as short:
                await connection.connect(short)
        except BaseException:
            connection.close()
            raise
        return trio.SocketStream(connection)

    async def aclose(self) -> None:
        """Close the kept connections."""
        while self._idle:
            await self._idle.pop().aclose()


async def _receive(stream: trio.abc.ReceiveStream) -> Message | None:
    head = await _receive_exactly(stream, LENGTH.size)
    if head is None:
        return None
    body = await _receive_exactly(stream, _checked_length(head))
    if body is None:
        raise NodeNotAnswering("the connection broke off in the middle of a message")
    return _decode(body)


async def _receive_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytearray | None:
    """`count` bytes, or None if the stream ended before the first of them."""
    received = bytearray()
    while len(received) < count:
        part = await stream.receive_some(min(count - len(received), 1 << 20))
        if not part:
            if received:
                raise NodeNotAnswering("the connection broke off in the middle of a message")
            return None
        received += part
    return received


def bind(path: Path) -> socket.socket:
    """A socket of that name for `serve`; until then nobody can connect to it.

    A stale socket file of an earlier process is replaced; the caller owns the node's lock, so that nobody serves it.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            path.unlink()
    previous = os.umask(0o177)
    try:
        with _short_path(path) as short:
            bound.bind(short)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(previous)
    return bound


async def serve(
    place: Path | socket.socket, handler: Handler, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer requests at that path, or on what `bind` gave, until cancelled, each connection in a task of its own.

    An exception of the handler is the caller's bug: it ends the process and is seen.
    """
    listener = trio.socket.from_stdlib_socket(bind(place) if isinstance(place, Path) else place)
    listener.listen(64)

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                while (request := await _receive(stream)) is not None:
                    body = msgspec.msgpack.encode(await handler(request))
                    await stream.send_all(LENGTH.pack(len(body)) + body)
            except (NodeNotAnswering, trio.BrokenResourceError, trio.ClosedResourceError):
                return  # the asker went away or spoke nonsense: its connection ends, nobody else's

    await trio.serve_listeners(answer, [trio.SocketListener(listener)], task_status=task_status)  # type: ignore[arg-type]
