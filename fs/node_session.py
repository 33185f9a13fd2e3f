"""The node's session in the catalog, as its supervisor keeps it: it says that the node is up, and who the node is.

With a catalog on SQLite it is as good as the lock on the store, and ends when somebody finds that nobody holds that any more
(`end_left_sessions`). On etcd it is a lease, renewed while the agent answers (R12): a node that serves nobody its shards is not
up, however busy its supervisor is. Of two nodes that claim one identity the second is refused.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from ckptfs.cache.catalog_format import Session
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CatalogUnavailable, SessionEnded, StoreError
from ckptfs.cache.store import StoreDirectory, write_durably
from ckptfs.cache.store_registry import SESSION_SECONDS, IdentityTaken, begin_session, session_label, sessions, stores
from ckptfs.fs.local_socket import LocalClient, NodeNotAnswering

if TYPE_CHECKING:
    from ckptfs.cache.catalog_etcd import EtcdCatalog

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
PING_SECONDS = SESSION_SECONDS / 3
PINGS_MISSED = 2
"""So many in a row, and the agent hangs. One may be late on a busy machine, and costs no session."""
IDENTITY_WAIT_SECONDS = SESSION_SECONDS + 2.0
"""How long a session of another start of this node is given to end: nobody renews that of a node that is gone."""


class NodeSession:
    """The session of one start of the node. `agent_pid` says which process its agent is now."""

    def __init__(
        self,
        kv: "SqliteCatalog | EtcdCatalog",
        store: StoreDirectory,
        incarnation: int,
        agent_pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._kv = kv
        self._store = store
        self._incarnation = incarnation
        self._agent_pid = agent_pid
        self._answered_pid: int | None = None
        self._agent_hangs = False
        self._missed = 0
        self._before = _noted(store.path / "incarnation")
        self._is_noted = self._before == incarnation

    async def begin(self) -> None:
        """Say that the node is up. Raises `StoreError` if another process is this node already, `CatalogUnavailable`."""
        if not self._is_noted:
            with contextlib.suppress(OSError):  # else a restart right after a kill waits for the session to end by itself
                await trio.to_thread.run_sync(
                    write_durably, self._store.path / "incarnation", f"{self._incarnation}\n", 0o600, abandon_on_cancel=True
                )
                self._is_noted = True
        deadline = trio.current_time() + IDENTITY_WAIT_SECONDS
        while True:
            if not isinstance(self._kv, SqliteCatalog):
                await self._kv.begin_session()
            try:
                await begin_session(self._kv, self._store.node, self._store.store_id, self._incarnation)
                return
            except IdentityTaken as taken:
                if self._is_ours(taken.session):
                    await self._kv.end_session(session_label(taken.session.store, taken.session.incarnation))
                    continue
                if isinstance(self._kv, SqliteCatalog) and await end_left_sessions(self._kv):
                    continue
                if isinstance(self._kv, SqliteCatalog) or trio.current_time() > deadline:
                    raise
                log.warning("session_awaited node=%s: an earlier start's may end yet", self._store.node)
            await trio.sleep(LOOK_SECONDS)

    def _is_ours(self, session: Session) -> bool:
        """Whether it is of an earlier start on this very store, whose lock is ours now. A copy of the store on another machine
        has a lock of its own: what it was started as is not what is noted here."""
        return session.store == self._store.store_id and (
            isinstance(self._kv, SqliteCatalog) or session.incarnation == self._before
        )

    async def keep(self) -> None:
        """Renew it until cancelled, while the agent answers; begin it anew when it ended all the same."""
        if isinstance(self._kv, SqliteCatalog):
            while True:
                await trio.sleep(SESSION_SECONDS / 2)
                await self._begin_if_it_can_be()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_agent)
            while True:
                try:
                    await self._kv.keep_session(while_alive=lambda: not self._agent_hangs)
                except SessionEnded as ended:
                    log.error("session_ended error=%s: it is begun anew", ended)
                while self._agent_hangs or not await self._begin_if_it_can_be():
                    await trio.sleep(LOOK_SECONDS)
                log.info("session_begun_anew")

    async def _begin_if_it_can_be(self) -> bool:
        try:
            await self.begin()
        except (CatalogUnavailable, StoreError, OSError) as error:
            log.warning("session_not_begun error=%s", error)
            return False
        return True

    async def _watch_agent(self) -> None:
        """An agent that answered once and does not any more hangs; one that has just been started may take its time."""
        agent = LocalClient(self._store.agent_socket)
        try:
            while True:
                if await self._ping(agent):
                    await trio.sleep(SESSION_SECONDS / 3)
                else:
                    await trio.sleep(LOOK_SECONDS)
        finally:
            with trio.CancelScope(shield=True):
                await agent.aclose()

    async def _ping(self, agent: LocalClient) -> bool:
        pid = self._agent_pid()
        try:
            await agent.call({"do": "ping"}, timeout_seconds=PING_SECONDS)
        except NodeNotAnswering as error:
            self._missed += 1
            hangs = pid is not None and pid == self._answered_pid and self._missed >= PINGS_MISSED
            if hangs and not self._agent_hangs:
                log.error("agent_hangs pid=%d error=%s: the node's session is not renewed", pid, error)
            self._agent_hangs = hangs
            return False
        if self._agent_hangs:
            log.warning("agent_answers_again pid=%s", pid)
        self._answered_pid, self._agent_hangs, self._missed = pid, False, 0
        return True

    async def end(self) -> None:
        """Say that the node goes."""
        await self._kv.end_session(session_label(self._store.store_id, self._incarnation))


def _noted(note: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(note.read_text())
    return None


async def end_left_sessions(kv: SqliteCatalog) -> int:
    """End the sessions of nodes of this machine that are gone: nobody holds the lock of their store. Returns how many.

    Raises `CatalogUnavailable`.
    """
    found = await sessions(kv)
    records = await stores(kv) if found else {}
    ended = 0
    for node, session in found.items():
        if session.store not in records:
            continue
        directory = records[session.store][0].directory
        try:
            if StoreDirectory(Path(directory), session.store, node).is_in_use():
                continue
        except OSError as error:  # nobody can say: a drive that fails, a directory that became something else
            log.warning("session_not_looked_at node=%s directory=%s error=%s", node, directory, error.strerror)
            continue
        if await kv.end_session(session_label(session.store, session.incarnation)):
            log.warning("session_left node=%s store=%s: its processes are gone", node, session.store.hex())
            ended += 1
    return ended
