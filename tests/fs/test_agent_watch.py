"""R12: an agent that hangs is ended once; one that hangs again soon, and can't be ended, costs its node the session."""

import pytest
import trio
from trio.testing import MockClock

from ckptfs.cache.store_registry import SESSION_SECONDS
from ckptfs.fs.agent_watch import ENDED_AGAIN_SECONDS, AgentWatch
from ckptfs.fs.local_socket import NodeNotAnswering


class Process:
    """An agent process: the next one begins as it is killed, as the supervisor has it, unless its drive holds it."""

    def __init__(self) -> None:
        self.pid = 1
        self.kills: list[float] = []
        self.can_be_killed = True
        self.hangs = False
        self.refuses = False

    def kill(self) -> None:
        self.kills.append(trio.current_time())
        if self.can_be_killed:
            self.pid += 1
            self.hangs = False

    async def ping(self, timeout_seconds: float) -> None:
        if self.refuses:
            raise NodeNotAnswering("connection refused")
        if self.hangs:
            await trio.sleep(timeout_seconds)
            raise NodeNotAnswering("it has not answered")


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
async def watch(process: Process, nursery: trio.Nursery) -> AgentWatch:
    watch = AgentWatch(process.ping, lambda: process)
    nursery.start_soon(watch.keep)
    await trio.sleep(1)
    return watch


async def test_an_agent_that_hangs_is_ended_before_the_session_is(
    autojump_clock: MockClock, process: Process, watch: AgentWatch
) -> None:
    """The session is renewed all the time: `hangs` never says that it must not be."""
    process.hangs, hung_at = True, trio.current_time()
    for _ in range(600):
        await trio.sleep(0.1)
        assert not watch.hangs
    (killed_at,) = process.kills
    assert killed_at - hung_at < 1.1 * SESSION_SECONDS


async def test_an_agent_that_hangs_again_soon_costs_the_session_and_no_other_end(
    autojump_clock: MockClock, process: Process, watch: AgentWatch
) -> None:
    process.hangs = True
    await trio.sleep(30)
    for _ in range(3):
        process.hangs = True
        await trio.sleep(30)
        assert watch.hangs
        process.hangs = False
        await trio.sleep(10)
        assert not watch.hangs
    assert len(process.kills) == 1
    await trio.sleep(ENDED_AGAIN_SECONDS)
    process.hangs = True
    await trio.sleep(30)
    assert not watch.hangs
    assert len(process.kills) == 2


async def test_an_agent_that_can_not_be_ended_costs_the_session(
    autojump_clock: MockClock, process: Process, watch: AgentWatch
) -> None:
    """Its drive does not answer: no signal ends a process that waits for that."""
    process.hangs, process.can_be_killed = True, False
    await trio.sleep(30)
    assert watch.hangs
    assert len(process.kills) == 1


async def test_one_late_answer_is_none(autojump_clock: MockClock, process: Process, watch: AgentWatch) -> None:
    """As after the whole node stood still."""
    for _ in range(10):
        process.hangs = True
        await trio.sleep(3.5)
        process.hangs = False
        await trio.sleep(6.5)
    assert process.kills == []


async def test_an_agent_that_takes_no_connections_any_more_hangs(
    autojump_clock: MockClock, process: Process, watch: AgentWatch
) -> None:
    process.refuses = True
    await trio.sleep(3)
    assert process.kills == []
    await trio.sleep(20)
    assert len(process.kills) == 1


async def test_an_agent_that_was_just_started_is_given_its_time(
    autojump_clock: MockClock, process: Process, nursery: trio.Nursery
) -> None:
    process.refuses = True
    watch = AgentWatch(process.ping, lambda: process)
    nursery.start_soon(watch.keep)
    await trio.sleep(300)
    assert not watch.hangs
    assert process.kills == []


async def test_an_agent_that_is_being_ended_need_not_answer(
    autojump_clock: MockClock, process: Process, nursery: trio.Nursery
) -> None:
    serves = True
    watch = AgentWatch(process.ping, lambda: process if serves else None)
    nursery.start_soon(watch.keep)
    await trio.sleep(1)
    process.hangs, serves = True, False
    await trio.sleep(60)
    assert not watch.hangs
    assert process.kills == []
