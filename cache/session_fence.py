"""The fence (R11): every transaction of a process compares the session of its own node, so that a node whose session ended
commits nothing, whatever it still believes.

A session ends when its lease runs out (etcd), or when nobody holds the store's lock any more (SQLite). The supervisor begins it
anew; until a process has seen that, `SessionFence.wait_renewed` holds its operations, which then read everything again.
"""

import logging
from collections.abc import Awaitable, Callable

import trio

from ckptfs.cache.catalog_format import FORMAT_VERSION, Session, session_key, unpack
from ckptfs.cache.catalog_kv import KeyValue, Unchanged
from ckptfs.cache.errors import CatalogUnavailable, SessionEnded, StoreError
from ckptfs.cache.ids import NodeId, StoreId

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
WAIT_SECONDS = 30.0
"""How long an operation waits for the session to begin anew: as long as for an etcd that is away."""


class SessionFence:
    """The session of one node, as a process of that node knows it. Made by `begin`; `run` follows it."""

    @classmethod
    async def begin(cls, kv: KeyValue, node: NodeId, store: StoreId, incarnation: int) -> "SessionFence":
        """Have every further transaction of this handle compare the node's session, which its supervisor has begun.

        Raises `SessionEnded` if there is none, `StoreError` if it is another's.
        """
        fence = cls(kv, node, store, incarnation)
        await kv.catch_up()
        fence._adopt(await fence._found())
        kv.fence_with(fence)
        return fence

    def __init__(self, kv: KeyValue, node: NodeId, store: StoreId, incarnation: int) -> None:
        self.compare = Unchanged(session_key(node), 0)
        self._kv = kv
        self._node = node
        self._session = Session(FORMAT_VERSION, store, incarnation)
        self._renewed = trio.Event()
        self.on_renewed: Callable[[], Awaitable[None]] | None = None
        """Called before anything is changed in a session that began anew."""

    def ended(self) -> SessionEnded:
        """The error for a transaction that was refused because of the fence. From any thread."""
        if self._renewed.is_set():
            self._renewed = trio.Event()
            log.error("session_ended node=%s: nothing is changed in the catalog until it begins anew", self._node)
        error = SessionEnded(
            f"the session of {self._node} in the catalog has ended: nothing is changed by it; what is open stays usable, and"
            " names can be changed again when the node has begun a new one"
        )
        error.wait_renewed = self.wait_renewed
        return error

    async def wait_renewed(self) -> bool:
        """Wait until there is a session again; False if there is none for `WAIT_SECONDS`."""
        with trio.move_on_after(WAIT_SECONDS):
            await self._renewed.wait()
            return True
        return False

    async def run(self) -> None:
        """Follow the session until cancelled. Raises `StoreError` when another process has taken this node's identity."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            try:
                revision = await self._found()
                if revision == self.compare.mod_revision:
                    self._renewed.set()
                    continue
                if self.on_renewed is not None:
                    await self.on_renewed()
                self._adopt(revision)
                log.warning("session_renewed node=%s revision=%d", self._node, revision)
            except SessionEnded:
                continue
            except CatalogUnavailable as error:
                log.info("session_not_looked_for error=%s", error)

    def _adopt(self, revision: int) -> None:
        self.compare = Unchanged(self.compare.key, revision)
        self._renewed.set()

    async def _found(self) -> int:
        """The revision of the node's session. Raises `SessionEnded`, `StoreError`."""
        entry = await self._kv.get(self.compare.key)
        if entry is None:
            raise self.ended()
        if unpack(Session, entry.value) != self._session:
            raise StoreError(
                f"another process runs as node {self._node} in this cluster: this one changes nothing any more; stop one of the"
                " two, and give each node an id of its own"
            )
        return entry.mod_revision
