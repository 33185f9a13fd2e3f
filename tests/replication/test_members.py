"""Who is live, as answers and failures come."""

from collections.abc import Callable

import msgspec
import trio
from trio.testing import MockClock

from ckptfs.cache.catalog_format import FORMAT_VERSION, Store, StoreState
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.store_registry import UNREADABLE
from ckptfs.replication.errors import PeerUnreachable
from ckptfs.replication.members import Members, candidates

OWN, PEER, OTHER = StoreId(b"o" * 16), StoreId(b"p" * 16), StoreId(b"q" * 16)


class Peers:
    """Answers pings with 1000 bytes free, but for those in `away`; `hanging` never answers."""

    def __init__(self) -> None:
        self.away: set[StoreId] = set()
        self.hanging: set[StoreId] = set()
        self.asked: list[StoreId] = []
        self.records = {
            OWN: (Store(FORMAT_VERSION, NodeId("own"), StoreState.IN, "127.0.0.1:1", "/a"), 1),
            PEER: (Store(FORMAT_VERSION, NodeId("peer"), StoreState.IN, "127.0.0.1:2", "/b", {"rack": "r1", "zone": "z1"}), 2),
            OTHER: (Store(FORMAT_VERSION, NodeId("other"), StoreState.DRAINING, "127.0.0.1:3", "/c"), 3),
        }

    async def stores(self) -> dict[StoreId, tuple[Store, int]]:
        return dict(self.records)

    async def ping(self, store: StoreId, address: str) -> int:
        self.asked.append(store)
        if store in self.hanging:
            await trio.sleep_forever()
        if store in self.away:
            raise PeerUnreachable("refused")
        return 1000


def members(peers: Peers, own_free_bytes: Callable[[], int] = lambda: 77) -> Members:
    return Members(OWN, peers.stores, peers.ping, own_free_bytes, domain_label="rack")


async def test_the_own_store_is_live_without_being_asked(autojump_clock: MockClock) -> None:
    peers = Peers()
    known = {member.store: member for member in await members(peers).refresh()}
    assert OWN not in peers.asked
    assert (known[OWN].live, known[OWN].free_bytes, known[OWN].domain) == (True, 77, "own")
    assert (known[PEER].live, known[PEER].free_bytes, known[PEER].domain, known[PEER].revision) == (True, 1000, "r1", 2)


async def test_only_live_stores_that_are_in_take_shards(autojump_clock: MockClock) -> None:
    peers = Peers()
    all_members = await members(peers).refresh()
    assert [candidate.store for candidate in candidates(all_members)] == [OWN, PEER]
    assert [candidate.store for candidate in candidates(all_members, without=frozenset([OWN]))] == [PEER]


async def test_answers_and_failures_are_believed_for_a_while(autojump_clock: MockClock) -> None:
    peers = Peers()
    them = members(peers)
    await them.refresh()
    await them.refresh()
    assert peers.asked.count(PEER) == 1
    them.note_failure(PEER, PeerUnreachable("reset"))
    assert them.is_known_dead(PEER)
    assert them.last_error(PEER) == "reset"
    assert not {member.store: member for member in await them.refresh()}[PEER].live
    assert peers.asked.count(PEER) == 1
    await trio.sleep(2.1)
    assert not them.is_known_dead(PEER)
    assert {member.store: member for member in await them.refresh()}[PEER].live
    assert them.last_error(PEER) == ""


async def test_a_peer_that_hangs_is_away(autojump_clock: MockClock) -> None:
    peers = Peers()
    peers.hanging = {PEER}
    them = members(peers)
    before = trio.current_time()
    known = {member.store: member for member in await them.refresh()}
    assert not known[PEER].live
    assert known[OTHER].live
    assert trio.current_time() - before < 3


async def test_how_long_the_live_set_has_been_the_same(autojump_clock: MockClock) -> None:
    peers = Peers()
    them = members(peers)
    await them.refresh()
    await trio.sleep(10)
    await them.refresh()
    assert them.seconds_unchanged() >= 10
    peers.away = {PEER}
    await trio.sleep(10)
    await them.refresh()
    assert them.seconds_unchanged() < 1


async def test_a_store_that_was_lost_does_not_count_as_live_though_it_answered_once(autojump_clock: MockClock) -> None:
    peers = Peers()
    known = members(peers)
    await known.refresh()
    record, revision = peers.records[PEER]
    peers.records[PEER] = (msgspec.structs.replace(record, state=StoreState.LOST), revision + 1)
    await known.refresh(everyone=True)
    lost = known.member(PEER)
    assert lost is not None
    assert (lost.live, lost.state.is_gone, known.is_known_dead(PEER)) == (False, True, True)


async def test_a_record_that_was_damaged_says_what_it_said_before(autojump_clock: MockClock) -> None:
    peers = Peers()
    known, new = members(peers), members(peers)
    before = await known.refresh()
    for store in (OWN, PEER):
        peers.records[store] = Store(FORMAT_VERSION, NodeId("damaged"), StoreState.IN, "", ""), UNREADABLE
    assert [member._replace(unreadable=False) for member in await known.refresh()] == before
    assert [member.store for member in known.known() if member.unreadable] == [OWN, PEER]
    peers.asked.clear()
    found = await new.refresh(everyone=True)
    assert peers.asked == [OTHER], "nobody knows where it is"
    assert [member.takes_shards for member in found] == [False, False, False]
    assert [member.state.is_gone for member in found] == [False, False, False]
