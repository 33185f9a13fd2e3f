"""Who can hold shards at this moment: the catalog's stores, joined with what their agents answer.

A store counts as live while its agent answers a ping. It is *suspect* (R15) while its node has no session in the catalog, or its
agent has not answered for as long as a session takes to end: it gets no new shards, and readers ask others first. An answer is
believed for `ping_age_seconds_max`, a failure for `failure_age_seconds_max`, so that a dead store costs one refused connection
now and then, not one for each cell.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_format import NO_STORE, NODE_DOMAIN, Store, StoreState
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.store_registry import UNREADABLE
from ckptfs.replication.errors import PeerRefused, PeerUnreachable, RefusalReason, ReplicationError
from ckptfs.replication.placement import Candidate

logger = logging.getLogger(__name__)

PING_SECONDS_MAX = 2.0
SUSPECT_SECONDS = 10.0
"""Without an answer for so long a store is suspect, also while its node has a session: as long as that takes to end."""

FOR_AN_OPERATOR = (RefusalReason.VERSION, RefusalReason.WRONG_PEER)
"""Refusals that no waiting ends."""


class Member(NamedTuple):
    """One store as it stands. `revision` is that of its catalog record: a commit compares it. `has_session`: its node is up, the
    catalog says. `settled`: what only this lost store had was rolled back. `free_bytes` as of the last answer, 0 if it never
    answered. `refusal`: what it said if it is up and doesn't talk to this node, for an operator to mend. `unreadable`: its record
    in the catalog is damaged; what is said of it here is what stood there before, or nothing (`UNREADABLE`)."""

    store: StoreId
    node: NodeId
    domain: str
    address: str
    state: StoreState
    revision: int
    live: bool
    free_bytes: int
    has_session: bool = True
    is_suspect: bool = False
    settled: bool = False
    refusal: str = ""
    unreadable: bool = False

    @property
    def standing(self) -> str:
        """ "up", "suspect", "draining", "lost" or "removed"."""
        if self.state.is_gone:
            return self.state.name.lower()
        if self.is_suspect:
            return "suspect"
        return "draining" if self.state is StoreState.DRAINING else "up"

    @property
    def takes_shards(self) -> bool:
        return self.live and self.state is StoreState.IN and not self.is_suspect and self.revision != UNREADABLE


class _Answer(NamedTuple):
    at_seconds: float
    live: bool
    free_bytes: int
    error: str
    away_since_seconds: float | None = None
    refusal: str = ""


class Members:
    """The cluster's stores with their liveness. `list_stores` reads the catalog; `ping(address)` asks an agent for its
    store id and free bytes and raises `ReplicationError`. The own store is asked through `own_free_bytes` and always live.
    `list_sessions` gives the stores whose nodes have a session.
    """

    def __init__(
        self,
        own_store: StoreId,
        list_stores: Callable[[], Awaitable[dict[StoreId, tuple[Store, int]]]],
        ping: Callable[[StoreId, str], Awaitable[int]],
        own_free_bytes: Callable[[], int],
        *,
        domain_label: str = NODE_DOMAIN,
        list_sessions: Callable[[], Awaitable[frozenset[StoreId]]] | None = None,
        ping_age_seconds_max: float = 5.0,
        failure_age_seconds_max: float = 2.0,
    ) -> None:
        self.own_store = own_store
        self._domain_label = domain_label
        self._list_stores = list_stores
        self._ping = ping
        self._own_free_bytes = own_free_bytes
        self._list_sessions = list_sessions
        self._with_session: frozenset[StoreId] | None = None
        self._ping_age_seconds_max = ping_age_seconds_max
        self._failure_age_seconds_max = failure_age_seconds_max
        self._stores: dict[StoreId, tuple[Store, int]] = {}
        self._answers: dict[StoreId, _Answer] = {}
        self._live_before: frozenset[StoreId] = frozenset()
        self._changed_at_seconds = trio.current_time()
        self._unreadable: frozenset[StoreId] = frozenset()
        self._refreshing = trio.Lock()

    async def refresh(self, *, everyone: bool = False) -> list[Member]:
        """All stores of the catalog, asked again where the last answer is too old, or `everyone`. Raises `CatalogUnavailable`."""
        async with self._refreshing:
            self._stores = self._without_damage(await self._list_stores())
            if self._list_sessions is not None:
                self._with_session = await self._list_sessions()
            now = trio.current_time()
            async with trio.open_nursery() as nursery:
                for store, (record, _) in self._stores.items():
                    if (
                        store != self.own_store
                        and record.address
                        and not record.state.is_gone
                        and (everyone or self._is_old(store, now))
                    ):
                        nursery.start_soon(self._ask, store, record.address)
            members = self.known()
            live = frozenset(member.store for member in members if member.live)
            if live != self._live_before:
                self._live_before = live
                self._changed_at_seconds = trio.current_time()
            return members

    def known(self) -> list[Member]:
        """The stores as of the last `refresh`, without asking anybody."""
        return [self._member(store) for store in sorted(self._stores)]

    def member(self, store: StoreId) -> Member | None:
        """One store as of the last `refresh`, None if the catalog had no such store then."""
        return self._member(store) if store in self._stores else None

    def name_of(self, store: StoreId) -> str:
        """What people call the store: its node, or its id where the catalog has no such store."""
        if store == NO_STORE:
            return "no node"
        member = self.member(store)
        return str(member.node) if member is not None else store.hex()

    def address_of(self, store: StoreId) -> str | None:
        """Where the store's agent listens, as of the last `refresh`."""
        record = self._stores.get(store)
        return record[0].address if record else None

    def seconds_unchanged(self) -> float:
        """For how long the set of live stores has been the same."""
        return trio.current_time() - self._changed_at_seconds

    def is_known_dead(self, store: StoreId) -> bool:
        """Whether the store failed so recently that asking it again is a waste of a reader's time, or is gone for good."""
        member = self.member(store)
        if member is not None and member.state.is_gone:
            return True
        answer = self._answers.get(store)
        return answer is not None and not answer.live and trio.current_time() - answer.at_seconds < self._failure_age_seconds_max

    def note_failure(self, store: StoreId, error: Exception) -> None:
        """A request to the store failed for a reason that the next one would meet as well."""
        if store == self.own_store:
            return
        before = self._answers.get(store)
        refusal = error.message if isinstance(error, PeerRefused) and error.reason in FOR_AN_OPERATOR else ""
        if before is None or before.live or (refusal and refusal != before.refusal):
            logger.warning("peer-unreachable store=%s error=%s", store.hex(), error)
        now = trio.current_time()
        since = now if before is None or before.away_since_seconds is None else before.away_since_seconds
        self._answers[store] = _Answer(now, False, before.free_bytes if before else 0, str(error), since, refusal)

    def seconds_away(self, store: StoreId) -> float:
        """For how long the store has not answered anything; 0 if it did the last time it was asked."""
        answer = self._answers.get(store)
        if answer is None or answer.away_since_seconds is None:
            return 0.0
        return trio.current_time() - answer.away_since_seconds

    def last_error(self, store: StoreId) -> str:
        """Why the store isn't live; empty if it is."""
        answer = self._answers.get(store)
        return answer.error if answer else ""

    def _without_damage(self, found: dict[StoreId, tuple[Store, int]]) -> dict[StoreId, tuple[Store, int]]:
        """What a damaged record said while it could be read holds on."""
        unreadable = frozenset(store for store, (_, revision) in found.items() if revision == UNREADABLE)
        for store in unreadable - self._unreadable:
            logger.critical(
                "store-record-damaged store=%s: what is known of it stays, its node can't be started again", store.hex()
            )
        self._unreadable = unreadable
        return {store: self._stores.get(store, one) if store in unreadable else one for store, one in found.items()}

    def _is_old(self, store: StoreId, now: float) -> bool:
        answer = self._answers.get(store)
        if answer is None:
            return True
        age = now - answer.at_seconds
        return age >= (self._ping_age_seconds_max if answer.live else self._failure_age_seconds_max)

    async def _ask(self, store: StoreId, address: str) -> None:
        try:
            with trio.fail_after(PING_SECONDS_MAX):
                free_bytes = await self._ping(store, address)
        except trio.TooSlowError:
            self.note_failure(store, PeerUnreachable(f"{address} doesn't answer a ping within {PING_SECONDS_MAX:g} s"))
            return
        except ReplicationError as error:
            self.note_failure(store, error)
            return
        before = self._answers.get(store)
        if before is not None and not before.live:
            logger.info("peer-answers-again store=%s", store.hex())
        self._answers[store] = _Answer(trio.current_time(), True, free_bytes, "")

    def _member(self, store: StoreId) -> Member:
        record, revision = self._stores[store]
        if store == self.own_store:
            live, free_bytes = True, self._own_free_bytes()
        else:
            answer = self._answers.get(store)
            live, free_bytes = (answer.live, answer.free_bytes) if answer else (False, 0)
        live = live and not record.state.is_gone  # the others are not asked any more
        domain = record.domain(self._domain_label)
        has_session = self._with_session is None or store in self._with_session
        is_suspect = store != self.own_store and (not has_session or self.seconds_away(store) >= SUSPECT_SECONDS)
        address, state = record.address, record.state
        refusal = "" if live or store not in self._answers else self._answers[store].refusal
        return Member(
            store,
            record.node,
            domain,
            address,
            state,
            revision,
            live,
            free_bytes,
            has_session,
            is_suspect,
            record.settled,
            refusal,
            store in self._unreadable,
        )


def candidates(members: Sequence[Member], *, without: frozenset[StoreId] = frozenset()) -> list[Candidate]:
    """The stores that may take new shards: `in`, live and not suspect; those in `without` are left out."""
    return [
        Candidate(member.store, member.node, member.domain, member.free_bytes, member.live)
        for member in members
        if member.takes_shards and member.store not in without
    ]
