"""Requests between the processes of a node: answers, and what a broken or hostile other side leads to."""

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from ckptfs.fs.local_socket import LENGTH, MESSAGE_SIZE_MAX, LocalClient, Message, NodeNotAnswering, call, serve


async def _double(request: Message) -> Message:
    return {"ok": True, "twice": request["value"] * 2}


@contextlib.asynccontextmanager
async def _served(path: Path) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, path, _double)
        yield
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def _answering_with(path: Path, answer: bytes) -> Iterator[None]:
    """A server that reads something, sends these bytes and closes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        yield
        thread.join()


async def test_both_clients_get_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with _served(path):
        client = LocalClient(path)
        assert await client.call({"value": 4}) == {"ok": True, "twice": 8}
        assert await client.call({"value": 5}) == {"ok": True, "twice": 10}
        assert await trio.to_thread.run_sync(call, path, {"value": b"ab"}) == {"ok": True, "twice": b"abab"}
        await client.aclose()


async def test_many_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with _served(path):
        client = LocalClient(path)
        answers: dict[int, int] = {}

        async def ask(value: int) -> None:
            answers[value] = (await client.call({"value": value}))["twice"]

        async with trio.open_nursery() as nursery:
            for value in range(50):
                nursery.start_soon(ask, value)
        assert answers == {value: 2 * value for value in range(50)}
        await client.aclose()


async def test_a_path_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    directory = tmp_path.joinpath(*["d" * 60] * 5)
    directory.mkdir(parents=True)
    async with _served(directory / "s"):
        assert (await trio.to_thread.run_sync(call, directory / "s", {"value": 1}))["twice"] == 2


async def test_a_server_that_came_back_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    client = LocalClient(path)
    for _ in range(2):
        async with _served(path):
            assert (await client.call({"value": 1}))["twice"] == 2
    with pytest.raises(NodeNotAnswering):
        await client.call({"value": 1})


async def test_nonsense_ends_its_own_connection_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with _served(path):
        for nonsense in (b"\x05", LENGTH.pack(MESSAGE_SIZE_MAX + 1), LENGTH.pack(3) + b"\xc1\xc1\xc1", LENGTH.pack(1) + b"\x07"):
            stream = await trio.open_unix_socket(path)
            await stream.send_all(nonsense)
            await stream.send_eof()
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert (await trio.to_thread.run_sync(call, path, {"value": 3}))["twice"] == 6


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x01",
        LENGTH.pack(10) + b"short",
        LENGTH.pack(MESSAGE_SIZE_MAX + 1),
        LENGTH.pack(1) + b"\xc1",
        LENGTH.pack(1) + b"\x07",
    ],
    ids=["none", "half a length", "cut", "oversize", "no msgpack", "no map"],
)
def test_a_bad_answer_is_an_error(tmp_path: Path, answer: bytes) -> None:
    with _answering_with(tmp_path / "s", answer), pytest.raises(NodeNotAnswering):
        call(tmp_path / "s", {"value": 1}, timeout_seconds=5)


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NodeNotAnswering):
        call(tmp_path / "none", {})
    with pytest.raises(NodeNotAnswering):
        call(tmp_path / "no" / "directory", {})


def test_a_server_that_hangs_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(NodeNotAnswering):
            call(tmp_path / "s", {}, timeout_seconds=0.05)
