"""Who decides for the whole cluster: one agent holds `c/leader`, which is bound to its node's session.

The catalog is the only judge: the key is taken by compare-and-set, and every transaction of a leader compares it (`compare`):
one that was a leader a moment ago changes nothing, whatever it still believes. A leader whose session ends loses it with that;
one whose agent hangs while its session lives (SQLite) loses it to the next that looks.
"""

import logging
from collections.abc import Callable

from ckptfs.cache.catalog_format import FORMAT_VERSION, LEADER_KEY, Session, pack, unpack
from ckptfs.cache.catalog_kv import Delete, KeyValue, Put, Unchanged
from ckptfs.cache.ids import StoreId

log = logging.getLogger(__name__)

AWAY_SECONDS = 10.0
"""How long a leader's agent must not have answered before another one takes over: as long as a session takes to end."""


class Leadership:
    """One agent's part in it. `look` again and again; the other methods say what the last look found.

    `seconds_away(store)` is for how long a store has not answered this agent.
    """

    def __init__(self, kv: KeyValue, store: StoreId, incarnation: int, seconds_away: Callable[[StoreId], float]) -> None:
        self._kv = kv
        self._own = Session(FORMAT_VERSION, store, incarnation)
        self._seconds_away = seconds_away
        self._revision = 0
        self.leader: StoreId | None = None
        """The store whose agent leads, None if none did."""

    @property
    def is_held(self) -> bool:
        """Whether this agent leads. A transaction that hangs on it has `compare` too."""
        return self._revision != 0

    def compare(self) -> Unchanged:
        """What every transaction of the leader compares. Raises `ValueError` if this agent doesn't lead."""
        if not self._revision:
            raise ValueError("this agent does not lead: it has nothing to decide")
        return Unchanged(LEADER_KEY, self._revision)

    async def look(self) -> bool:
        """Lead if nobody does; whether this agent does now. Raises `CatalogUnavailable`."""
        entry = await self._kv.get(LEADER_KEY)
        holder = None if entry is None else unpack(Session, entry.value)
        if entry is not None and holder == self._own and entry.mod_revision == self._revision:
            return True
        self._revision, self.leader = 0, None if holder is None else holder.store
        # An earlier process of this node's agent may have held it: taken anew, what that one still has under way is void.
        if holder is None or holder == self._own or self._seconds_away(holder.store) >= AWAY_SECONDS:
            before = 0 if entry is None else entry.mod_revision
            taken = await self._kv.transact(
                [Unchanged(LEADER_KEY, before)], [Put(LEADER_KEY, pack(self._own), bound_to_session=True)]
            )
            if taken.succeeded:
                self._revision, self.leader = taken.revision, self._own.store
                log.info("leader revision=%d before=%s", taken.revision, holder and holder.store.hex())
        return self.is_held

    def lose(self) -> None:
        """What was known is in doubt: the catalog could not be reached. The next look finds out, and begins to count anew."""
        self._revision = 0

    async def give_up(self) -> None:
        """Let another one lead, if this agent does. Raises `CatalogUnavailable`."""
        if self._revision:
            revision, self._revision = self._revision, 0
            await self._kv.transact([Unchanged(LEADER_KEY, revision)], [Delete(LEADER_KEY)])
