"""Machines whose time is virtual and whose chance a seed decides: what a process of the simulation has instead of the system.

`take_over` changes the interpreter it is called in, for good: the clocks of `time`, `os.urandom`, `random`, trio's scheduler, and
`trio.to_thread`, whose functions run in the loop's own turn. So the simulation is a process of its own, which calls it once
before anything else is imported. Which machine and process code runs for is a context variable that its tasks inherit: each
machine has a wall clock, a boot and a drive of its own.
"""

import contextvars
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import outcome
import trio
import trio.testing

EPOCH_SECONDS = 1_600_000_000.0
"""Long ago: what the kernel stamps with its own clock (`st_ctime`) is younger than anything here."""

SLOW_THREAD_SHARE = 0.05
WAIT_FOR_THE_NETWORK = {"_store_cells", "load_run", "send_run"}
"""Functions in threads of `peer_answers`, `restore_parts` and `repair_pass`: from sockets to files or other sockets."""


class Gone(BaseException):
    """The process was killed: what its code does while it unwinds doesn't happen. Never caught by the product."""


@dataclass(eq=False)
class Machine:
    """One machine. `skew_seconds` is how far its wall clock is off; `full`: its drive."""

    number: int
    directory: Path
    boot: int = 0
    booted_at: float = 0.0
    skew_seconds: float = 0.0
    full: bool = False
    thawed: trio.Event | None = None
    frozen_at: float = -1.0

    @property
    def name(self) -> str:
        return f"n{self.number}"

    async def turn(self) -> None:
        """Wait while the machine is frozen."""
        while self.thawed is not None:
            await self.thawed.wait()

    def freeze(self) -> None:
        """Nothing runs on the machine until `thaw`: its tasks stop where they next ask for anything."""
        self.thawed = self.thawed or trio.Event()
        self.frozen_at = world.seconds()

    def thaw(self) -> None:
        thawed, self.thawed = self.thawed, None
        if thawed is not None:
            self.frozen_at = world.seconds()
            thawed.set()

    def was_frozen_since(self, seconds: float) -> bool:
        return self.thawed is not None or self.frozen_at >= seconds


@dataclass(eq=False)
class Process:
    """One life of a process on a machine."""

    machine: Machine
    role: str
    alive: bool = True
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)

    def check(self) -> None:
        if not self.alive:
            raise Gone

    async def kill(self) -> None:
        """End it where it stands, and wait until nothing of it runs."""
        self.alive = False
        self.scope.cancel()
        await self.ended.wait()


process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class World:
    """What is one for the whole process: the clock and the chance."""

    def __init__(self) -> None:
        self.clock: trio.testing.MockClock | None = None
        self.chance = Random(0)
        self.ids = Random(0)

    def begin(self, seed: int) -> trio.testing.MockClock:
        """A clock for one run with this seed."""
        import trio._core._run as scheduler

        self.clock = trio.testing.MockClock(autojump_threshold=0)
        self.chance = Random(seed)
        self.ids = Random(f"ids {seed}")
        random.seed(seed)
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
        scheduler._r.seed(seed)
        return self.clock

    def seconds(self) -> float:
        """Since the run began."""
        return 0.0 if self.clock is None else self.clock.current_time()

    def wall_seconds(self) -> float:
        now = process.get()
        return EPOCH_SECONDS + self.seconds() + (0.0 if now is None else now.machine.skew_seconds)


world = World()
_in_thread = threading.local()


def take_over() -> None:
    """See the module."""
    time.time = world.wall_seconds
    time.time_ns = lambda: int(world.wall_seconds() * 1e9)
    time.monotonic = world.seconds
    time.clock_gettime = _clock_gettime
    os.urandom = lambda count: world.ids.randbytes(count)
    trio.to_thread.run_sync = run_in_turn  # type: ignore[assignment]
    trio.from_thread.check_cancelled = lambda: None


def _clock_gettime(clock: int) -> float:
    now = process.get()
    return world.seconds() - (0.0 if now is None else now.machine.booted_at)


async def run_in_turn(
    function: Callable[..., Any],
    *arguments: Any,
    limiter: trio.CapacityLimiter | None = None,
    thread_name: str | None = None,
    abandon_on_cancel: bool = False,
) -> Any:
    """`trio.to_thread.run_sync`: the function runs at once, or a little later. One that waits for the network in its thread has a
    thread, and the event loop stands still in its turns."""
    if limiter is not None:
        async with limiter:
            return await _run(function, arguments)
    return await _run(function, arguments)


async def _run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    now = process.get()
    if world.chance.random() < SLOW_THREAD_SHARE:
        await trio.sleep(world.chance.choice((0.001, 0.02, 0.3)))
    else:
        await trio.lowlevel.checkpoint()
    if now is not None:
        await now.machine.turn()
        now.check()
    if getattr(function, "__name__", "") in WAIT_FOR_THE_NETWORK:
        return await _Alternating(function, arguments).run()
    return function(*arguments)


class _Alternating:
    """A function in a thread that runs only while the event loop stands still, and the other way round."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._loop_turn = threading.Semaphore(0)
        self._thread_turn = threading.Semaphore(0)
        self._wanted: Callable[[], Awaitable[Any]] | None = None
        self._answer: Any = None
        self._result: Any = None

    async def run(self) -> Any:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._body,))
        thread.start()
        while True:
            self._loop_turn.acquire()
            if self._wanted is None:
                thread.join()
                return self._result.unwrap()
            self._answer = await outcome.acapture(self._wanted)
            self._thread_turn.release()

    def _body(self) -> None:
        _in_thread.of = self
        self._result = outcome.capture(self._function, *self._arguments)
        self._wanted = None
        self._loop_turn.release()

    def wait(self, wanted: Callable[[], Awaitable[Any]]) -> Any:
        self._wanted = wanted
        self._loop_turn.release()
        self._thread_turn.acquire()
        return self._answer.unwrap()


def in_turn(call: Callable[[], None]) -> None:
    """Do it in the event loop's turn, for a function that has it already or runs in a thread."""

    async def wanted() -> None:
        call()

    if hasattr(_in_thread, "of"):
        wait_in_thread(wanted)
    else:
        call()


def wait_in_thread(wanted: Callable[[], Awaitable[Any]]) -> Any:
    """Have the event loop await this for the thread that calls it."""
    return _in_thread.of.wait(wanted)
