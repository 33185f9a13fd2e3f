"""The conversation with the kernel, with a SOCK_SEQPACKET pair in the device's place: like it, it keeps messages apart.

What only the real device does (requests withdrawn, the connection aborted) is left to the tests with real mounts.
"""

import errno
import logging
import os
import select
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
import trio
import trio.testing

from ckptfs.cache import errors as cache
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs import fuse_session
from ckptfs.fs.fuse_errors import ContentUnreachable, errno_of
from ckptfs.fs.fuse_format import InitFlag, Opcode, RequestHeader
from ckptfs.fs.fuse_session import HELD_REQUESTS_MAX, READ_AHEAD_MAX, WORKERS, AtOnce, FuseSession, Handler, Lull, Negotiated
from ckptfs.fs.local_socket import NodeNotAnswering

OFFERED = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.DONT_MASK
    | InitFlag.POSIX_ACL
    | InitFlag.MAX_PAGES
    | InitFlag.INIT_EXT
    | InitFlag.PASSTHROUGH
    | InitFlag.HAS_RESEND
)


class Kernel:
    """The other end: sends requests, takes answers."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.negotiated: list[Negotiated] = []
        self.answered: list[int] = []

    def send(self, opcode: int, unique: int, body: bytes = b"", nodeid: int = 1) -> None:
        self.end.send(fuse.IN_HEADER.pack(fuse.IN_HEADER.size + len(body), opcode, unique, nodeid, 0, 0, 1, 0, 0) + body)

    async def receive(self) -> tuple[int, int, bytes]:
        """(errno, unique, body) of the next message."""
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(self.end)
        message = self.end.recv(fuse.BUFFER_SIZE)
        length, error, unique = fuse.OUT_HEADER.unpack_from(message)
        assert length == len(message)
        return -error, unique, message[fuse.OUT_HEADER.size :]

    async def ask(self, opcode: int, unique: int, body: bytes = b"") -> tuple[int, int, bytes]:
        self.send(opcode, unique, body)
        return await self.receive()

    async def is_silent(self) -> bool:
        await trio.testing.wait_all_tasks_blocked(0.01)
        try:
            self.end.recv(fuse.BUFFER_SIZE, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with ours, theirs:
        yield ours, theirs


Serve = Callable[..., AbstractAsyncContextManager[tuple[Kernel, FuseSession]]]


@pytest.fixture
def serve(ends: tuple[socket.socket, socket.socket]) -> Serve:
    """`async with serve({opcode: handler}) as (kernel, session)`: a session that runs."""

    @asynccontextmanager
    async def run(
        handlers: dict[int, Handler],
        *,
        allow_passthrough: bool = True,
        negotiated: Negotiated | None = None,
        lull: Lull | None = None,
        at_once: dict[int, AtOnce] | None = None,
    ) -> AsyncIterator[tuple[Kernel, FuseSession]]:
        kernel = Kernel(ends[1])
        session = FuseSession(
            ends[0].fileno(),
            handlers,
            allow_passthrough=allow_passthrough,
            continues=negotiated is not None,
            negotiated=negotiated,
            on_negotiated=kernel.negotiated.append,
            on_answered=kernel.answered.append,
            lull=lull,
            at_once=at_once,
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run)
            yield kernel, session
            nursery.cancel_scope.cancel()

    return run


async def _echo(header: RequestHeader, body: memoryview) -> bytes:
    return bytes(body)


# Negotiation


def _init(minor: int = 45, offered: InitFlag = OFFERED, *, short: bool = False, readahead: int = 131072) -> bytes:
    if short:
        return fuse.INIT_IN_SHORT.pack(7, minor, readahead, offered & 0xFFFFFFFF)
    return fuse.INIT_IN.pack(7, minor, readahead, offered & 0xFFFFFFFF, offered >> 32) + bytes(44)


async def test_what_both_have_is_agreed_on(serve: Serve) -> None:
    async with serve({}) as (kernel, session):
        number, unique, body = await kernel.ask(Opcode.INIT, 2, _init())
        assert (number, unique, len(body)) == (0, 2, 64)
        major, minor, readahead, low, background, congested, write_size, _, pages, _, high, depth = fuse.INIT_OUT.unpack(body)
        flags = InitFlag(low | high << 32)
        assert (major, minor, readahead) == (7, fuse.MINOR, READ_AHEAD_MAX)
        assert flags == OFFERED
        assert (write_size, pages, depth) == (1 << 20, 256, 1)
        assert background >= 64
        assert congested < background
        assert kernel.negotiated == [session.negotiated] == [Negotiated(fuse.MINOR, int(flags), True, True)]


async def test_passthrough_is_left_out_where_it_is_not_wanted(serve: Serve) -> None:
    async with serve({}, allow_passthrough=False) as (kernel, _):
        _, _, body = await kernel.ask(Opcode.INIT, 2, _init())
        values = fuse.INIT_OUT.unpack(body)
        assert InitFlag.PASSTHROUGH not in InitFlag(values[3] | values[10] << 32)
        assert values[11] == 0
        assert not kernel.negotiated[0].passthrough
        assert kernel.negotiated[0].resend


@pytest.mark.parametrize("short", [True, False])
async def test_an_older_kernel_gets_what_it_has(serve: Serve, short: bool) -> None:
    async with serve({}) as (kernel, _):
        offered = OFFERED & ~InitFlag.INIT_EXT  # the upper word means nothing then
        number, _, body = await kernel.ask(Opcode.INIT, 2, _init(31, offered, short=short))
        assert number == 0
        assert fuse.INIT_OUT.unpack(body)[10:] == (0, 0)
        assert kernel.negotiated[0].minor == 31
        assert not kernel.negotiated[0].passthrough
        assert not kernel.negotiated[0].resend


async def test_a_kernel_that_is_too_old_is_refused(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve({}) as (kernel, _):
        assert await kernel.ask(Opcode.INIT, 2, _init(30)) == (errno.EPROTO, 2, b"")
        assert kernel.negotiated == []
    assert "kernel_too_old protocol=7.30 needed=7.31" in caplog.text


async def test_the_next_daemon_asks_for_what_was_not_answered_before_anything_else(serve: Serve) -> None:
    async with serve({Opcode.READ: _echo}, negotiated=Negotiated(41, 0, True, True)) as (kernel, _):
        kernel.send(Opcode.READ, 8)
        assert await kernel.receive() == (-fuse.Notification.RESEND, 0, b"")
        assert await kernel.receive() == (0, 8, b"")


async def test_it_has_caught_up_when_all_that_was_left_has_been_read(serve: Serve) -> None:
    seen: list[bool] = []

    async def look(header: RequestHeader, body: memoryview) -> bytes:
        seen.append(session.caught_up.is_set())
        return b""

    async with serve({Opcode.READ: look}, negotiated=Negotiated(41, 0, True, True)) as (kernel, session):
        for unique in range(2, 12, 2):
            kernel.send(Opcode.READ, fuse.UNIQUE_RESEND | unique)
        with trio.fail_after(5):
            await session.caught_up.wait()
    assert seen == [False] * 5


async def test_it_has_caught_up_at_once_when_nothing_was_left(serve: Serve) -> None:
    async with serve({}, negotiated=Negotiated(41, 0, True, True)) as (_, session):
        with trio.fail_after(5):
            await session.caught_up.wait()


# Answers


async def test_a_request_gets_its_answer(serve: Serve) -> None:
    async with serve({Opcode.READ: _echo}) as (kernel, session):
        for size in (0, 1, fuse.MAX_WRITE):
            assert await kernel.ask(Opcode.READ, size + 1, bytes(size)) == (0, size + 1, bytes(size))
        assert session.statistics() == (3, 0)
        assert kernel.answered == [1, 2, fuse.MAX_WRITE + 1]


@pytest.mark.parametrize("opcode", [Opcode.TMPFILE, Opcode.INTERRUPT, 39, 4096, 0])
async def test_what_nobody_handles_is_not_implemented(serve: Serve, opcode: int) -> None:
    async with serve({Opcode.READ: _echo}) as (kernel, session):
        assert await kernel.ask(opcode, 3) == (errno.ENOSYS, 3, b"")
        assert session.statistics().unexpected_errors == 0


async def test_what_is_known_at_once_needs_no_handler(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    def known(header: RequestHeader, body: memoryview) -> bytes | int | None:
        if header.nodeid == 4:
            raise cache.DamagedData("a record makes no sense")
        return {1: None, 2: b"known", 3: errno.ENOENT}[header.nodeid]

    async with serve({Opcode.LOOKUP: _echo}, at_once={Opcode.LOOKUP: known}) as (kernel, session):
        for nodeid, answer in (
            (1, (0, 1, b"asked")),
            (2, (0, 2, b"known")),
            (3, (errno.ENOENT, 3, b"")),
            (4, (errno.EIO, 4, b"")),
        ):
            kernel.send(Opcode.LOOKUP, nodeid, b"asked", nodeid)
            assert await kernel.receive() == answer
        assert kernel.answered == [1, 4]  # of a handler, and of an error
        assert session.statistics().unexpected_errors == 0
    assert "makes no sense" in caplog.text


async def test_what_needs_no_answer_gets_none(serve: Serve) -> None:
    async def forget(header: RequestHeader, body: memoryview) -> None:
        return None

    async with serve({Opcode.FORGET: forget, Opcode.READ: _echo}) as (kernel, _):
        kernel.send(Opcode.FORGET, 3)
        assert await kernel.ask(Opcode.READ, 4) == (0, 4, b"")


async def test_a_repeated_request_is_handled_under_its_number_and_answered_under_the_new_one(serve: Serve) -> None:
    async def number(header: RequestHeader, body: memoryview) -> bytes:
        return b"%d" % header.unique

    async with serve({Opcode.READ: number}) as (kernel, _):
        assert await kernel.ask(Opcode.READ, fuse.UNIQUE_RESEND | 6) == (0, fuse.UNIQUE_RESEND | 6, b"6")
        assert kernel.answered == [6]


# Errors

FORESEEN: list[tuple[Exception, int]] = [
    (cache.NoSuchName(), errno.ENOENT),
    (cache.NameExists(), errno.EEXIST),
    (cache.NotADirectory(), errno.ENOTDIR),
    (cache.IsADirectory(), errno.EISDIR),
    (cache.DirectoryNotEmpty(), errno.ENOTEMPTY),
    (cache.InvalidMove(), errno.EINVAL),
    (cache.NameTooLong(), errno.ENAMETOOLONG),
    (cache.TooManyLinks(), errno.EMLINK),
    (cache.NoSuchAttribute(), errno.ENODATA),
    (cache.AttributesTooLarge(), errno.ENOSPC),
    (cache.NotPermitted(), errno.EPERM),
    (cache.HeldElsewhere(), errno.EBUSY),
    (cache.NameMoved(), errno.ESTALE),
    (cache.CatalogUnavailable(), errno.EIO),
    (ContentUnreachable(), errno.EIO),
    (NodeNotAnswering(), errno.EIO),
    (trio.TooSlowError(), errno.EIO),
    (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
    (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
    (OSError(errno.EFBIG, "too big"), errno.EFBIG),
    (FileNotFoundError(errno.ENOENT, "none"), errno.ENOENT),
]
UNFORESEEN: list[Exception] = [
    ValueError("bug"),
    AssertionError(),
    OSError("without a number"),
    ExceptionGroup("several", [ValueError()]),
]


def _raising(error: Exception, *, after_waiting: bool) -> Handler:
    async def handler(header: RequestHeader, body: memoryview) -> bytes:
        if after_waiting:
            await trio.sleep(0)
        raise error

    return handler


def test_every_answer_of_the_namespace_has_a_number() -> None:
    kinds = {kind for kind in vars(cache).values() if isinstance(kind, type) and issubclass(kind, cache.NamespaceError)}
    assert {kind for kind in kinds - {cache.NamespaceError} if errno_of(kind()) is None} == set()


@pytest.mark.parametrize("after_waiting", [False, True])
@pytest.mark.parametrize(("error", "number"), FORESEEN, ids=lambda value: type(value).__name__)
async def test_foreseen_errors_have_their_number_and_only_io_errors_are_logged(
    serve: Serve, error: Exception, number: int, after_waiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve({Opcode.READ: _raising(error, after_waiting=after_waiting)}) as (kernel, session):
        assert await kernel.ask(Opcode.READ, 5) == (number, 5, b"")
        assert session.statistics().unexpected_errors == 0
        assert kernel.answered == [5]
    assert bool(caplog.records) == (number == errno.EIO)


@pytest.mark.parametrize("after_waiting", [False, True])
@pytest.mark.parametrize("error", UNFORESEEN, ids=lambda value: type(value).__name__)
async def test_an_error_nobody_foresaw_is_an_io_error_with_its_traceback_in_the_log_and_the_session_lives(
    serve: Serve, error: Exception, after_waiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = {Opcode.READ: _raising(error, after_waiting=after_waiting), Opcode.WRITE: _echo}
    async with serve(handlers) as (kernel, session):
        assert await kernel.ask(Opcode.READ, 5) == (errno.EIO, 5, b"")
        assert session.statistics().unexpected_errors == 1
        assert await kernel.ask(Opcode.WRITE, 6, b"x") == (0, 6, b"x")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == f"request_failed opcode={Opcode.READ} inode=1"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize(
    "error",
    [
        cache.DamagedData("the record is damaged"),
        cache.StoreError("the sync failed"),
        cache.CatalogUnavailable("the catalog is busy"),
        NodeNotAnswering("the agent is away"),
        trio.TooSlowError(),
        OSError(errno.EIO, "the drive failed"),
        ContentUnreachable("start node-3"),
    ],
)
async def test_every_io_error_is_one_line_in_the_log(serve: Serve, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with serve({Opcode.READ: _raising(error, after_waiting=False)}) as (kernel, session):
        for unique in (5, 7):
            assert await kernel.ask(Opcode.READ, unique) == (errno.EIO, unique, b"")
        assert session.statistics().unexpected_errors == 0
    (record,) = caplog.records
    if isinstance(error, ContentUnreachable):
        assert record.getMessage() == f"content_unreachable opcode={Opcode.READ} inode=1 message=start node-3"
    else:
        assert record.levelno == logging.ERROR
        assert record.getMessage() == f"request_refused opcode={Opcode.READ} inode=1 reason={str(error) or repr(error)}"
    assert record.exc_info is None


async def test_a_request_cut_short_is_an_io_error(serve: Serve) -> None:
    async def handler(header: RequestHeader, body: memoryview) -> bytes:
        return b"%d" % fuse.READ_IN.unpack_from(body)[0]

    async with serve({Opcode.READ: handler}) as (kernel, session):
        for length in range(fuse.READ_IN.size):
            assert (await kernel.ask(Opcode.READ, 5, bytes(length)))[0] == errno.EIO
        assert (await kernel.ask(Opcode.READ, 5, bytes(fuse.READ_IN.size)))[0] == 0
        assert session.statistics().unexpected_errors == fuse.READ_IN.size


async def test_an_answer_the_device_refuses_ends_nothing(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async def too_much(header: RequestHeader, body: memoryview) -> bytes:
        return bytes(64 << 20)

    async with serve({Opcode.READ: too_much, Opcode.WRITE: _echo}) as (kernel, session):
        kernel.send(Opcode.READ, 5)
        assert await kernel.ask(Opcode.WRITE, 6) == (0, 6, b"")
        assert session.statistics().unexpected_errors == 1
    assert "answer_refused" in caplog.text


# Waiting


class Gate:
    """A handler that waits until it is opened, then answers what it was asked."""

    def __init__(self) -> None:
        self.opened = trio.Event()
        self.waiting = 0

    async def __call__(self, header: RequestHeader, body: memoryview) -> bytes:
        self.waiting += 1
        await self.opened.wait()
        return bytes(body)


async def test_one_that_waits_holds_up_nobody_and_keeps_its_request(serve: Serve) -> None:
    gate = Gate()
    async with serve({Opcode.READ: gate, Opcode.WRITE: _echo}) as (kernel, _):
        kernel.send(Opcode.READ, 1, b"first" * 1000)
        for unique in range(2, 50):
            assert await kernel.ask(Opcode.WRITE, unique, b"%d" % unique * 2000) == (0, unique, b"%d" % unique * 2000)
        assert gate.waiting == 1
        gate.opened.set()
        assert await kernel.receive() == (0, 1, b"first" * 1000)


async def test_as_many_may_wait_as_there_are_workers_and_the_rest_comes_after(serve: Serve) -> None:
    gate = Gate()
    async with serve({Opcode.READ: gate, Opcode.WRITE: _echo}) as (kernel, _):
        for unique in range(WORKERS):
            kernel.send(Opcode.READ, unique, b"%d" % unique)
            if unique == WORKERS - 2:
                assert await kernel.ask(Opcode.WRITE, 1000, b"w") == (0, 1000, b"w")
        await trio.testing.wait_all_tasks_blocked()
        assert gate.waiting == WORKERS
        kernel.send(Opcode.WRITE, 1001, b"w")
        assert await kernel.is_silent()
        gate.opened.set()
        answers = {(await kernel.receive())[1:] for _ in range(WORKERS + 1)}
        assert answers == {(unique, b"%d" % unique) for unique in range(WORKERS)} | {(1001, b"w")}


async def test_requests_without_end_leave_other_tasks_their_turn(serve: Serve) -> None:
    """Each request is followed by the next before it is answered, so that the listener never finds the device empty."""
    turns = requests = 0

    async def followed(header: RequestHeader, body: memoryview) -> bytes:
        nonlocal requests
        requests += 1
        if turns < 20 and requests < 100_000:
            kernel.send(Opcode.READ, header.unique + 1)
        return b""

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1
            while True:
                try:
                    kernel.end.recv(fuse.BUFFER_SIZE)
                except BlockingIOError:
                    break

    async with serve({Opcode.READ: followed}) as (kernel, _), trio.open_nursery() as nursery:
        kernel.send(Opcode.READ, 1)
        nursery.start_soon(take_turns)
        with trio.fail_after(20):
            while turns < 20:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    assert requests < 100_000


async def test_a_session_that_ends_cancels_what_waits(serve: Serve) -> None:
    gate = Gate()
    async with serve({Opcode.READ: gate}) as (kernel, _):
        kernel.send(Opcode.READ, 1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert gate.waiting == 1
    assert kernel.answered == []


class Held:
    """A handler that waits for the lull, then does what is wished for."""

    def __init__(self, then: Handler = _echo) -> None:
        self.lull = Lull()
        self.then = then
        self.begun: list[int] = []

    async def __call__(self, header: RequestHeader, body: memoryview) -> bytes | bytearray | None:
        self.begun.append(header.unique)
        assert self.lull.is_ahead
        await self.lull
        return await self.then(header, body)


async def test_those_that_wait_for_a_lull_are_gone_on_with_when_all_is_read(serve: Serve) -> None:
    begun_before = []

    async def note(header: RequestHeader, body: memoryview) -> bytes:
        begun_before.append(len(held.begun))
        return b"%d" % header.unique

    held = Held(note)
    async with serve({Opcode.CREATE: held, Opcode.WRITE: _echo}, lull=held.lull) as (kernel, _):
        for unique in range(6):
            kernel.send(Opcode.WRITE if unique == 3 else Opcode.CREATE, unique, b"%d" % unique)
        assert [(await kernel.receive()) for _ in range(6)] == [(0, unique, b"%d" % unique) for unique in (3, 0, 1, 2, 4, 5)]
    assert begun_before == [5] * 5


async def test_a_lull_is_put_off_a_little_where_more_waited_for_the_last(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_session, "HELD_SPIN_SECONDS", 60)

    class Late:
        """Something to read while it is asked whether there is."""

        def poll(self, timeout: int) -> list[tuple[int, int]]:
            kernel.send(Opcode.CREATE, 4)
            session._poller = poller
            return poller.poll(timeout)

    async def count(header: RequestHeader, body: memoryview) -> bytes:
        return b"%d" % len(held.begun)

    held = Held(count)
    async with serve({Opcode.CREATE: held}, lull=held.lull) as (kernel, session):
        kernel.send(Opcode.CREATE, 1)
        kernel.send(Opcode.CREATE, 2)
        assert [await kernel.receive() for _ in range(2)] == [(0, 1, b"2"), (0, 2, b"2")]
        await trio.testing.wait_all_tasks_blocked()
        poller = session._poller
        session._poller = cast(Any, Late())
        kernel.send(Opcode.CREATE, 3)
        assert [await kernel.receive() for _ in range(2)] == [(0, 3, b"4"), (0, 4, b"4")]
        monkeypatch.setattr(fuse_session, "HELD_SPIN_SECONDS", 0)
        for unique in (5, 6):
            assert await kernel.ask(Opcode.CREATE, unique) == (0, unique, b"%d" % unique)
        monkeypatch.setattr(fuse_session, "HELD_SPIN_SECONDS", 60)
        assert await kernel.ask(Opcode.CREATE, 7) == (0, 7, b"7")  # one program is left, and need not wait


async def test_one_that_goes_on_to_wait_for_something_else_holds_up_none_of_the_others(serve: Serve) -> None:
    gate = Gate()

    async def wait_or_fail(header: RequestHeader, body: memoryview) -> bytes:
        assert held.lull.is_ahead
        if header.unique == 2:
            raise cache.NameExists("there")
        if header.unique == 0:
            await gate(header, body)
            assert not held.lull.is_ahead
        return b""

    held = Held(wait_or_fail)
    async with serve({Opcode.CREATE: held, Opcode.WRITE: _echo}, lull=held.lull) as (kernel, _):
        for unique in range(4):
            kernel.send(Opcode.CREATE, unique)
        answers = [(await kernel.receive())[:2] for _ in range(3)]
        assert answers == [(0, 1), (errno.EEXIST, 2), (0, 3)]
        assert await kernel.ask(Opcode.WRITE, 4, b"w") == (0, 4, b"w")
        assert gate.waiting == 1
        gate.opened.set()
        assert await kernel.receive() == (0, 0, b"")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("waited_before", [1, 2])
async def test_requests_without_end_are_no_reason_to_wait_for_a_lull_for_ever(
    serve: Serve, waited_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def followed(header: RequestHeader, body: memoryview) -> None:
        nonlocal asked
        asked += 1
        if 1 not in kernel.answered:
            kernel.send(Opcode.FORGET, 0)

    async def count(header: RequestHeader, body: memoryview) -> bytes:
        return b"%d" % asked

    held = Held(count)
    async with serve({Opcode.CREATE: held, Opcode.FORGET: followed}, lull=held.lull) as (kernel, _):
        for unique in range(2, 2 + waited_before):
            kernel.send(Opcode.CREATE, unique)
        for unique in range(2, 2 + waited_before):
            assert await kernel.receive() == (0, unique, b"0")
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(fuse_session, "HELD_SPIN_SECONDS", 60)
        kernel.send(Opcode.CREATE, 1)
        kernel.send(Opcode.FORGET, 0)
        assert await kernel.receive() == (0, 1, b"%d" % HELD_REQUESTS_MAX)


@pytest.mark.timeout(20)
async def test_a_connection_that_is_gone_is_no_reason_to_wait_for_a_lull(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def poll(self, timeout: int) -> list[tuple[int, int]]:
            return [(0, select.POLLERR)]

    def refuse(*_: object) -> int:
        raise OSError(errno.ENODEV, "unmounted")

    async def unmount(header: RequestHeader, body: memoryview) -> None:
        session._poller = cast(Any, Gone())
        monkeypatch.setattr(os, "readv", refuse)

    held = Held()
    async with serve({Opcode.CREATE: held, Opcode.FORGET: unmount}, lull=held.lull) as (kernel, session):
        for unique in (1, 2):
            kernel.send(Opcode.CREATE, unique)
        assert [(await kernel.receive())[1] for _ in range(2)] == [1, 2]
        await trio.testing.wait_all_tasks_blocked()
        monkeypatch.setattr(fuse_session, "HELD_SPIN_SECONDS", 60)
        kernel.send(Opcode.CREATE, 3)
        kernel.send(Opcode.FORGET, 0)
        assert await kernel.receive() == (0, 3, b"")


async def test_a_session_that_ends_lets_go_of_what_waits_for_a_lull(serve: Serve) -> None:
    ended = False

    class Ends(BaseException):
        pass

    async def end(header: RequestHeader, body: memoryview) -> bytes:
        raise Ends

    async def wait(header: RequestHeader, body: memoryview) -> bytes:
        nonlocal ended
        try:
            await lull
        finally:
            ended = True
        raise AssertionError("the session has ended")

    lull, kernels = Lull(), []

    async def ask() -> None:
        async with serve({Opcode.CREATE: wait, Opcode.READ: end}, lull=lull) as (kernel, _):
            kernels.append(kernel)
            kernel.send(Opcode.CREATE, 1)
            kernel.send(Opcode.READ, 2)
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as caught:
        await ask()
    assert caught.group_contains(Ends)
    assert ended
    assert kernels[0].answered == []


def test_a_descriptor_that_select_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="select"):
        FuseSession(1024, {}, allow_passthrough=False, negotiated=None, on_negotiated=lambda agreed: None)


async def test_requests_that_wait_hold_no_more_than_they_are_long(serve: Serve) -> None:
    """Dozens of reads wait for bytes from elsewhere at once: each held the MiB it was received into."""
    sizes: dict[int, int] = {}
    go_on = trio.Event()

    async def wait(header: RequestHeader, body: memoryview) -> bytes:
        sizes[header.unique] = memoryview(body.obj).nbytes
        await go_on.wait()
        return bytes(body)

    async with serve({Opcode.READ: wait, Opcode.WRITE: wait}) as (kernel, _):
        for unique in range(2, 22, 2):
            kernel.send(Opcode.READ, unique, b"%d" % unique)
        kernel.send(Opcode.WRITE, 100, bytes(100_000))
        await trio.testing.wait_all_tasks_blocked(0.01)
        go_on.set()
        answers = dict([(await kernel.receive())[1:] for _ in range(11)])
    assert answers == {unique: b"%d" % unique for unique in range(2, 22, 2)} | {100: bytes(100_000)}
    assert sizes.pop(100) == fuse.BUFFER_SIZE
    assert max(sizes.values()) < 100
