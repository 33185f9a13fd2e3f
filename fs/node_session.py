"""The node's session in the catalog, as its supervisor keeps it: it says that the node is up, and who the node is.

With a catalog on SQLite it is as good as the lock on the store, and ends when somebody finds that nobody holds that any more
(`end_left_sessions`). On etcd it is a lease, renewed while the agent doesn't hang (R12, `agent_watch`): a node that serves nobody
its shards is not up, however busy its supervisor is. Of two nodes that claim one identity the second is refused.
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

if TYPE_CHECKING:
    from ckptfs.cache.catalog_etcd import EtcdCatalog

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
IDENTITY_WAIT_SECONDS = SESSION_SECONDS + 2.0
"""How long a session of another start of this node is given to end: nobody renews that of a node that is gone."""


class NodeSession:
    """The session of one start of the node. `agent_hangs` says that the node is not to be up for now."""

    def __init__(
        self,
        kv: "SqliteCatalog | EtcdCatalog",
        store: StoreDirectory,
        incarnation: int,
        agent_hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._kv = kv
        self._store = store
        self._incarnation = incarnation
        self._agent_hangs = agent_hangs
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
        """Renew it until cancelled, while the agent doesn't hang; begin it anew when it ended all the same."""
        if isinstance(self._kv, SqliteCatalog):
            while True:
                await trio.sleep(SESSION_SECONDS / 2)
                await self._begin_if_it_can_be()
        while True:
            try:
                await self._kv.keep_session(while_alive=lambda: not self._agent_hangs())
            except SessionEnded as ended:
                log.error("session_ended error=%s: it is begun anew", ended)
            while self._agent_hangs() or not await self._begin_if_it_can_be():
                await trio.sleep(LOOK_SECONDS)
            log.info("session_begun_anew")

    async def _begin_if_it_can_be(self) -> bool:
        try:
            await self.begin()
        except (CatalogUnavailable, StoreError, OSError) as error:
            log.warning("session_not_begun error=%s", error)
            return False
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
        directory = records[session.store][0].directory if session.store in records else ""
        if not directory:  # the record is not there, or damaged
            continue
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
