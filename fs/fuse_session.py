"""The conversation with the kernel: requests are read from the device, handled, answered.

Why not libfuse or pyfuse3: a request that crosses a socket pair into pyfuse3 and back costs 330 µs here, one that is read
and answered in the trio thread 20 to 40 µs, and a create has three of them (docs/design/fuse-session.md).

**Who listens.** A pool of worker tasks passes one baton. Its holder waits for the device, then reads and handles request after
request without going back to trio's loop as long as the next one arrives within `SPIN_SECONDS` and `LINGER_SECONDS`: most
handlers never wait.
When a handler does wait (a thread, a peer), the baton goes to the next worker at that very moment, so that no request
waits for another. Everything between two waits is atomic, for handlers too.

**Repeats.** After a restart the kernel sends unanswered requests again, with bit 63 of `unique` set; handlers are given the
number without it. An answer to a request that is gone (its process was killed) gets ENOENT, which means nothing.
"""

import errno
import logging
import os
import select
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import trio

from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.error_log import ErrorLog
from ckptfs.fs.fuse_errors import errno_of
from ckptfs.fs.fuse_format import InitFlag, Notification, Opcode, RequestHeader

log = logging.getLogger(__name__)

WORKERS = 96
"""Requests that may wait at once; the kernel's background limit (64) and the foreground ones of that many threads."""
LINGER_SECONDS = 0.00015
SPIN_SECONDS = 0.00006
"""At first the listener asks again and again: waking a sleeping thread took a quarter of the time of a small file."""
INLINE_SECONDS_MAX = 0.002
"""How long the listener may keep the thread before other tasks get a turn."""
HELD_SPIN_SECONDS = 0.00005
"""So long the session waits where fewer wait for the lull than for the last one: their programs are about to ask."""
HELD_REQUESTS_MAX = 32
"""So many requests at most are handled before those that wait for a lull are gone on with without one: about a millisecond."""
BACKGROUND_MAX = 64
SMALL_REQUEST_SIZE = 4096
"""Has a buffer of its own: dozens of reads may wait for bytes from elsewhere, and each would hold a MiB."""
BUSY_SECONDS = 0.01
READ_AHEAD_MAX = 64 << 20
"""The kernel takes the smaller of this and what is set for the mount (`fuse_device.set_read_ahead`)."""

WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.DONT_MASK
    | InitFlag.AUTO_INVAL_DATA
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.ASYNC_DIO
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.POSIX_ACL
    | InitFlag.MAX_PAGES
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.SETXATTR_EXT
    | InitFlag.INIT_EXT
    | InitFlag.PASSTHROUGH
    | InitFlag.HAS_RESEND
)
"""What is asked of the kernel; it may have less."""
NEEDED = InitFlag.SETXATTR_EXT
"""What every kernel we run on has, and requests are read by."""

_unpack_header = fuse.IN_HEADER.unpack_from
_HEADER_SIZE = fuse.IN_HEADER.size
_pack_answer = fuse.OUT_HEADER.pack
_ANSWER_SIZE = fuse.OUT_HEADER.size

Body = memoryview
Answer = bytes | bytearray
Handler = Callable[[RequestHeader, memoryview], Awaitable[Answer | None]]
"""Takes a request and returns the body of the answer; None answers nothing. The view is the handler's until it returns."""

AtOnce = Callable[[RequestHeader, memoryview], Answer | int | None]
"""Answers a request at once where it can, with the body of the answer or an errno; None leaves it to its handler."""


class Negotiated(msgspec.Struct, frozen=True):
    """What INIT agreed on with the kernel; kept, because a connection has one INIT and several daemons."""

    minor: int
    flags: int
    passthrough: bool
    resend: bool


def not_servable(agreed: Negotiated) -> str:
    """Why this program can't go on with a connection that another one negotiated, or "". That it has less than is wanted now is
    no reason, as long as it has what is needed: an older kernel has less too."""
    if not agreed.resend:
        return "this kernel can't send requests again (Linux 6.9 is the first that can): stop the node and start the new release"
    if NEEDED not in InitFlag(agreed.flags):
        return "the mount was made by a release that agreed on less with the kernel: stop the node and start the new release"
    unknown = InitFlag(agreed.flags) & ~WANTED
    if unknown or agreed.minor > fuse.MINOR:
        return (
            f"the mount was made with FUSE 7.{agreed.minor} and flags {int(unknown):#x}, which this release does not know:"
            " stop the node and start the other release"
        )
    return ""


class SessionStatistics(NamedTuple):
    """Counts since the process started."""

    requests: int
    unexpected_errors: int


class Lull:
    """The moment when a session has read all that it was asked. Handlers may wait for it inside the session, which takes far less
    than a turn of trio; those that do are then gone on with one after the other. What they have in common the first can do.

    `is_ahead`: whether the code that runs now may wait for it, as a handler that has not waited for anything else."""

    def __init__(self) -> None:
        self.is_ahead = False

    def __await__(self) -> Generator[Any, Any, None]:
        yield self


class _Request(NamedTuple):
    """One that waits for something. `unique` is the kernel's number for it, with its bit 63."""

    header: RequestHeader
    unique: int
    buffer: bytearray
    body: memoryview
    handler: Coroutine[Any, Any, Answer | None]


class _Waiting:
    """Awaits the rest of a coroutine that was begun by hand and waits: `trap` is what it waits for."""

    def __init__(self, coroutine: Coroutine[Any, Any, Answer | None], trap: Any) -> None:
        self._coroutine = coroutine
        self._trap = trap

    def __await__(self) -> Generator[Any, Any, Answer | None]:
        coroutine, trap = self._coroutine, self._trap
        while True:
            try:
                sent = yield trap
            except BaseException as error:
                step = partial(coroutine.throw, error)
            else:
                step = partial(coroutine.send, sent)
            try:
                trap = step()
            except StopIteration as stop:
                return cast(Answer | None, stop.value)


class FuseSession:
    """One process's turn at a FUSE connection. The descriptor is the caller's. `continues`: an earlier process had its turn;
    what it and the kernel agreed on is `negotiated`, None if it was killed before that. `on_pause` is called when nothing was
    asked for a moment. `lull` is what handlers wait for that wait for this session's. `on_answered` is told of what handlers
    answered, not of what was answered `at_once`."""

    def __init__(
        self,
        device: int,
        handlers: dict[int, Handler],
        *,
        allow_passthrough: bool,
        continues: bool = False,
        negotiated: Negotiated | None,
        on_negotiated: Callable[[Negotiated], None],
        on_answered: Callable[[int], None] = lambda unique: None,
        on_pause: Callable[[], object] = lambda: None,
        lull: Lull | None = None,
        at_once: Mapping[int, AtOnce] | None = None,
    ) -> None:
        if device >= 1024:
            raise ValueError("the device's descriptor must be one that select(2) can take")
        self._device = device
        self._handlers = handlers
        self._at_once = at_once or {}
        self._allow_passthrough = allow_passthrough
        self._continues = continues
        self.negotiated = negotiated
        self._on_negotiated = on_negotiated
        self._on_answered = on_answered
        self._on_pause = on_pause
        self._lull = lull or Lull()
        self._held: deque[_Request] = deque()
        """Those whose handlers wait for the lull, and when it has come, those that are still to be gone on with."""
        self._is_lull = False
        self._held_until = 0
        self._held_before = 1
        """So many waited for one of the last lulls."""
        self._buffers: list[bytearray] = []
        self._poller = select.poll()
        self._poller.register(device, select.POLLIN)
        self._baton = trio.Semaphore(1)
        self._requests = 0
        self._last_request = 0.0
        self._unexpected_errors = 0
        self._errors = ErrorLog()
        self._ended = trio.Event()
        self.caught_up = trio.Event()
        """Set once there was nothing to read: every request that an earlier daemon left unanswered has come again by then."""

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(self._requests, self._unexpected_errors)

    def is_busy(self) -> bool:
        """Whether programs are asking without a pause: the last request came less than a moment ago."""
        return time.monotonic() - self._last_request < BUSY_SECONDS

    async def run(self) -> None:
        """Serve until the file system is unmounted or the connection aborted. A later process first asks for what was left."""
        if self._continues:
            try:
                self.notify(Notification.RESEND)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.error("requests_lost: this kernel can't send again what was not answered (Linux 6.9 is the first that can)")
        if not self._poller.poll(0):
            self.caught_up.set()
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(self._work)
                await self._ended.wait()
                nursery.cancel_scope.cancel()
        finally:
            while self._held:
                self._held.popleft().handler.close()

    def notify(self, code: Notification, body: bytes = b"") -> None:
        """Send a message of our own. ENOENT (the kernel doesn't know the inode or name) is no error.

        May wait for the kernel's locks: never call it for an entry or inode whose request is being handled; use a thread.
        """
        try:
            os.write(self._device, fuse.notification(code, body))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ECONNABORTED):
                raise

    async def _work(self) -> None:
        while True:
            await self._baton.acquire()
            holds = True

            def give_up_baton() -> None:
                nonlocal holds
                holds = False
                self._baton.release()

            try:
                if self._held:
                    await trio.lowlevel.checkpoint_if_cancelled()
                else:
                    await trio.lowlevel.wait_readable(self._device)
                turn_ends = time.monotonic() + INLINE_SECONDS_MAX
                while holds:
                    waits = None
                    if self._is_lull:
                        waits = self._go_on(self._held.popleft())
                        self._is_lull = bool(self._held)
                    elif (not self._held or self._requests < self._held_until) and (received := self._read()) is not None:
                        waits = self._begin(*received)
                    elif self._held:
                        if not self._more_are_about_to_wait():
                            self._held_before = max(len(self._held), self._held_before - 1)
                            self._is_lull = True
                    elif self._ended.is_set():
                        break
                    elif not self._more_soon():
                        self.caught_up.set()
                        self._on_pause()
                        break
                    if waits is not None:
                        give_up_baton()
                        await self._wait_for(*waits)
                    elif self._last_request > turn_ends:
                        await trio.lowlevel.checkpoint()
                        turn_ends = time.monotonic() + INLINE_SECONDS_MAX
            finally:
                if holds:
                    self._baton.release()

    def _more_soon(self) -> bool:
        """Whether another request arrives within `SPIN_SECONDS` and then `LINGER_SECONDS`."""
        return self._more_within(SPIN_SECONDS) or bool(select.select([self._device], [], [], LINGER_SECONDS)[0])

    def _more_are_about_to_wait(self) -> bool:
        """Whether the lull is to be put off. Never once no more is read: what can be read would put it off for ever."""
        if len(self._held) >= self._held_before or self._requests >= self._held_until or self._ended.is_set():
            return False
        return self._more_within(HELD_SPIN_SECONDS)

    def _more_within(self, seconds: float) -> bool:
        """Ask again and again. True also for a device that can't be read any more."""
        poll = self._poller.poll
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            if poll(0):
                return True
        return False

    def _read(self) -> tuple[bytearray, int] | None:
        """One request and the buffer it is in, or None when there is none now."""
        buffer = self._buffers.pop() if self._buffers else bytearray(fuse.BUFFER_SIZE)
        try:
            length = os.readv(self._device, [buffer])
            if length <= SMALL_REQUEST_SIZE:
                self._buffers.append(buffer)
                return buffer[:length], length
            return buffer, length
        except OSError as error:
            self._buffers.append(buffer)
            if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                return None  # ENOENT: the request was withdrawn while we read it
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                self._ended.set()
                return None
            raise

    def _begin(self, buffer: bytearray, length: int) -> tuple[_Request, Any] | None:
        """Handle a request until its handler waits in trio; for what, if it does."""
        header: RequestHeader = tuple.__new__(RequestHeader, _unpack_header(buffer))  # what `_make` does, in half the time
        unique = header.unique
        self._requests += 1
        self._last_request = time.monotonic()
        body = memoryview(buffer)[_HEADER_SIZE:length]
        if unique & fuse.UNIQUE_RESEND:
            header = header._replace(unique=unique & ~fuse.UNIQUE_RESEND)
        try:
            answer_at_once = self._at_once.get(header.opcode)
            answer = None if answer_at_once is None else answer_at_once(header, body)
            if answer is not None:
                self._let_go(buffer, body)
                if isinstance(answer, int):
                    self._answer((fuse.error_reply(unique, answer), b""))
                else:
                    self._answer((_pack_answer(_ANSWER_SIZE + len(answer), 0, unique), answer))
                return None
            handler = self._handlers.get(header.opcode)
            if handler is None:
                if header.opcode != Opcode.INIT:
                    raise OSError(errno.ENOSYS, "not implemented")
                self._end(header, unique, buffer, body, self._negotiate(body))
                return None
            coroutine: Any = handler(header, body)
        except Exception as error:
            self._fail(header, unique, buffer, body, error)
            return None
        return self._go_on(_Request(header, unique, buffer, body, coroutine))

    def _go_on(self, request: _Request) -> tuple[_Request, Any] | None:
        """Run the handler until it has an answer, waits for the lull, or waits in trio; in that case for what."""
        header, unique, buffer, body, handler = request
        answer: Answer | None = None
        failure: Exception | None = None
        trap: Any = None
        self._lull.is_ahead = True
        try:
            trap = handler.send(None)
        except StopIteration as stop:
            answer = stop.value
        except Exception as error:
            failure = error
        finally:
            self._lull.is_ahead = False
        if trap is self._lull:
            if not self._held:
                self._held_until = self._requests + HELD_REQUESTS_MAX
            self._held.append(request)
        elif trap is not None:
            return request, trap
        elif failure is not None:
            self._fail(header, unique, buffer, body, failure)
        else:
            self._end(header, unique, buffer, body, answer)
        return None

    async def _wait_for(self, request: _Request, trap: Any) -> None:
        header, unique, buffer, body, handler = request
        try:
            answer = await _Waiting(handler, trap)
        except Exception as error:
            self._fail(header, unique, buffer, body, error)
        else:
            self._end(header, unique, buffer, body, answer)

    def _end(self, header: RequestHeader, unique: int, buffer: bytearray, body: memoryview, answer: Answer | None) -> None:
        self._let_go(buffer, body)
        if answer is not None:
            self._answer((_pack_answer(_ANSWER_SIZE + len(answer), 0, unique), answer))
            self._on_answered(header.unique)

    def _fail(self, header: RequestHeader, unique: int, buffer: bytearray, body: memoryview, error: Exception) -> None:
        self._let_go(buffer, body)
        number = errno_of(error)
        if number is None:
            self._unexpected_errors += 1
            log.error("request_failed opcode=%d inode=%d", header.opcode, header.nodeid, exc_info=error)
            number = errno.EIO
        elif number == errno.EIO:
            self._errors.note(header, error)
        self._answer((fuse.error_reply(unique, number), b""))
        self._on_answered(header.unique)

    def _let_go(self, buffer: bytearray, body: memoryview) -> None:
        body.release()
        if len(buffer) == fuse.BUFFER_SIZE and len(self._buffers) < 4:
            self._buffers.append(buffer)

    def _answer(self, message: tuple[bytes, Answer]) -> None:
        try:
            os.writev(self._device, message)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                self._ended.set()
            elif error.errno != errno.ENOENT:
                # The kernel has ended the request with EIO; a malformed answer is a bug, and no reason to end the mount.
                self._unexpected_errors += 1
                log.exception("answer_refused length=%d", len(message[0]) + len(message[1]))

    def _negotiate(self, body: memoryview) -> bytes:
        major, minor, max_readahead, low = fuse.INIT_IN_SHORT.unpack_from(body)
        if major != fuse.MAJOR or minor < fuse.MINOR_MIN:
            log.error("kernel_too_old protocol=%d.%d needed=%d.%d", major, minor, fuse.MAJOR, fuse.MINOR_MIN)
            raise OSError(errno.EPROTO, "the kernel's FUSE protocol is too old")
        offered = InitFlag(low)
        if InitFlag.INIT_EXT in offered and len(body) >= fuse.INIT_IN.size:
            offered = InitFlag(low | fuse.INIT_IN.unpack_from(body)[4] << 32)
        agreed = offered & (WANTED if self._allow_passthrough else WANTED & ~InitFlag.PASSTHROUGH)
        passthrough = InitFlag.PASSTHROUGH in agreed
        self.negotiated = Negotiated(min(minor, fuse.MINOR), int(agreed), passthrough, InitFlag.HAS_RESEND in agreed)
        self._on_negotiated(self.negotiated)
        return fuse.INIT_OUT.pack(
            fuse.MAJOR,
            fuse.MINOR,
            max(max_readahead, READ_AHEAD_MAX),
            agreed & 0xFFFFFFFF,
            BACKGROUND_MAX,
            BACKGROUND_MAX * 3 // 4,
            fuse.MAX_WRITE,
            1,
            fuse.MAX_WRITE // 4096,
            0,
            agreed >> 32,
            1 if passthrough else 0,
        )
