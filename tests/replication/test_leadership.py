"""Who decides for the cluster: one at a time, and nobody who only believes to."""

import pytest

from ckptfs.cache.catalog_format import LEADER_KEY
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import StoreId
from ckptfs.replication.leadership import AWAY_SECONDS, Leadership

ONE, TWO = StoreId(b"1" * 16), StoreId(b"2" * 16)


class Two:
    """Two agents that may lead."""

    def __init__(self) -> None:
        self.away = 0.0
        self.first = MemoryCatalog("one")
        self.second = self.first.another("two")
        self.one = Leadership(self.first, ONE, 1, lambda store: 0.0)
        self.two = Leadership(self.second, TWO, 2, lambda store: self.away)


async def test_the_first_that_looks_leads_until_its_session_ends() -> None:
    both = Two()
    assert await both.one.look()
    assert not await both.two.look()
    assert both.two.leader == ONE
    assert await both.one.look()
    await both.second.end_session("one")
    assert await both.two.look()
    assert not await both.one.look()
    assert both.one.leader == TWO


async def test_who_led_a_moment_ago_commits_nothing() -> None:
    both = Two()
    await both.one.look()
    compare = both.one.compare()
    await both.second.end_session("one")
    assert not (await both.first.transact([compare], [Put(b"k", b"")])).succeeded
    await both.two.look()
    assert not (await both.first.transact([compare], [Put(b"k", b"")])).succeeded
    assert (await both.second.transact([both.two.compare()], [Put(b"k", b"")])).succeeded
    await both.one.look()
    with pytest.raises(ValueError, match="does not lead"):
        both.one.compare()


async def test_a_leader_that_hangs_is_replaced_and_what_it_had_under_way_is_void() -> None:
    both = Two()
    await both.one.look()
    both.away = AWAY_SECONDS - 1
    assert not await both.two.look()
    both.away = AWAY_SECONDS
    assert await both.two.look()
    assert not (await both.first.transact([both.one.compare()], [Put(b"k", b"")])).succeeded
    assert not await both.one.look()


async def test_the_next_process_of_a_leaders_agent_leads_at_once() -> None:
    both = Two()
    await both.one.look()
    again = Leadership(both.first, ONE, 1, lambda store: 0.0)
    assert await again.look()
    assert not (await both.first.transact([both.one.compare()], [Put(b"k", b"")])).succeeded


async def test_it_can_be_given_up() -> None:
    both = Two()
    await both.one.look()
    await both.one.give_up()
    assert not both.one.is_held
    assert await both.first.get(LEADER_KEY) is None
    assert await both.two.look()
