"""Whether the node's agent answers, as its supervisor sees it; one that hangs is ended, so that another is started (R12).

A node is up while its agent serves others. One that was stopped or waits for itself is ended before the session in the catalog
would have to end with it: neither programs nor other nodes notice more than a pause, as after any kill. That helps once: an
agent that hangs again soon is on a machine that is too slow for it, or hangs by what it finds, and is left alone. Then the
session ends, and other nodes do without this one.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from ckptfs.cache.store_registry import SESSION_SECONDS
from ckptfs.fs.local_socket import NodeNotAnswering

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
PING_SECONDS = SESSION_SECONDS / 3
PINGS_MISSED = 2
"""So many in a row, and the agent hangs. One may be late on a busy machine, or was sent before the whole node stood still, the
supervisor too."""
ENDED_AGAIN_SECONDS = 600.0
"""An agent that hangs within this time of the last one that was ended for it is not ended. Making its store's index and its
connections anew costs a slow machine more than waiting."""


class Agent(Protocol):
    """The agent process as it is now. `child.Child` is one."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...


class AgentWatch:
    """`ping(timeout_seconds)` asks the agent, and raises `NodeNotAnswering`; `agent` says which process it is now, or that there
    is none, or none that has to answer."""

    def __init__(self, ping: Callable[[float], Awaitable[object]], agent: Callable[[], Agent | None]) -> None:
        self._ping = ping
        self._agent = agent
        self._answered_pid: int | None = None
        self._missed = 0
        self._ended_at = float("-inf")
        self.hangs = False
        """It does not answer, and can't be helped: the node is not up."""

    async def keep(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await trio.sleep(SESSION_SECONDS / 3 if await self._asked() else LOOK_SECONDS)

    async def _asked(self) -> bool:
        """Whether it answered. One that did once, and does not any more, hangs; one that was just started may take its time."""
        agent = self._agent()
        pid = None if agent is None else agent.pid
        asked_at = trio.current_time()
        try:
            await self._ping(PING_SECONDS)
        except NodeNotAnswering as error:
            await trio.sleep_until(asked_at + PING_SECONDS)  # one that hangs may take no connections any more
            self._missed += 1
            if agent is None or pid != self._answered_pid:
                self.hangs = False
            elif self._missed >= PINGS_MISSED and not self.hangs:
                self._end(agent, error)
            return False
        if self.hangs:
            log.warning("agent_answers_again pid=%s", pid)
        self._answered_pid, self.hangs, self._missed = pid, False, 0
        return True

    def _end(self, agent: Agent, error: NodeNotAnswering) -> None:
        since_seconds = trio.current_time() - self._ended_at
        if since_seconds < ENDED_AGAIN_SECONDS:
            self.hangs = True
            log.error(
                "agent_hangs pid=%d error=%s: one was ended for that %.0f s ago; this one is left alone, and the node's session"
                " is not renewed until it answers",
                agent.pid, error, since_seconds,
            )  # fmt: skip
            return
        log.error("agent_hangs pid=%d error=%s: it is ended, and started again", agent.pid, error)
        self._ended_at = trio.current_time()
        self._missed = 0
        agent.kill()
