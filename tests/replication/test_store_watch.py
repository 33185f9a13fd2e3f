"""When a store is declared lost, and when nobody is: by the leader's own clock, and not in a storm (R15)."""

import pytest
import trio
from trio.testing import MockClock

from ckptfs.cache.catalog_format import Settings, StoreState, store_key
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import ROOT_INODE, NodeId, StoreId, new_segment_id
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store_registry import begin_session, register_store, session_label, set_state, stores, stores_with_session
from ckptfs.replication.leadership import Leadership
from ckptfs.replication.members import Members, candidates
from ckptfs.replication.store_watch import StoreWatch, is_storm, store_problems

AFTER = 600.0


def store_id(number: int) -> StoreId:
    return StoreId(bytes([number + 1]) * 16)


class Cluster:
    """Six nodes of which the first one's agent runs. Their agents all answer: only the catalog says who is up."""

    def __init__(self, count: int, domains: dict[int, str]) -> None:
        self.count = count
        self.domains = domains
        self.kv = MemoryCatalog(session_label(store_id(0), 1))
        self.members = Members(
            store_id(0),
            lambda: stores(self.kv),
            self._ping,
            lambda: 1 << 30,
            domain_label="domain",
            list_sessions=lambda: stores_with_session(self.kv),
        )
        self.leadership = Leadership(self.kv, store_id(0), 1, self.members.seconds_away)
        self.watch = StoreWatch(self.kv, self.members, self.leadership, 2, repair_after_seconds=AFTER)
        self.catalog_is_away = False

    async def _ping(self, store: StoreId, address: str) -> int:
        return 1 << 30

    async def start(self) -> None:
        await Namespace(self.kv, store_id(0), 1, lambda: 1).format_if_empty(Settings(1, b"C" * 16, 4, 2, 4096))
        for number in range(self.count):
            labels = {"domain": self.domains[number]} if number in self.domains else {}
            await register_store(self.kv, store_id(number), NodeId(f"n{number}"), "127.0.0.1:1", "/s", labels)
            await self.up(number)

    async def up(self, number: int) -> None:
        kv = self.kv.another(session_label(store_id(number), 1))
        await begin_session(kv, NodeId(f"n{number}"), store_id(number), 1)

    async def down(self, *numbers: int) -> None:
        for number in numbers:
            await self.kv.end_session(session_label(store_id(number), 1))

    async def run(self, seconds: float) -> None:
        """What the agent does again and again, for so long."""
        for _ in range(round(seconds)):
            await trio.sleep(1)
            await self.members.refresh()
            await self.leadership.look()
            await self.watch.look()

    async def standings(self) -> list[str]:
        return [member.standing for member in await self.members.refresh()]


@pytest.fixture
async def cluster(request: pytest.FixtureRequest) -> Cluster:
    count, domains = getattr(request, "param", (6, {}))
    cluster = Cluster(count, domains)
    await cluster.start()
    await cluster.run(2)
    return cluster


async def test_up_suspect_lost(cluster: Cluster, autojump_clock: MockClock) -> None:
    assert await cluster.standings() == ["up"] * 6
    await cluster.down(5)
    await cluster.run(AFTER - 5)
    assert await cluster.standings() == ["up"] * 5 + ["suspect"]
    assert store_id(5) not in [one.store for one in candidates(cluster.members.known())]  # though its agent answers
    assert "n5: suspect" in store_problems(cluster.members.known(), 2, AFTER)[0]
    await cluster.run(10)
    assert await cluster.standings() == ["up"] * 5 + ["lost"]
    assert cluster.watch.statistics.declared_lost == 1
    assert "n5: declared lost" in store_problems(cluster.members.known(), 2, AFTER)[0]
    assert cluster.members.known()[5].settled


async def test_who_comes_back_in_time_begins_anew(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.down(5)
    await cluster.run(AFTER - 5)
    await cluster.up(5)
    await cluster.run(2)
    assert await cluster.standings() == ["up"] * 6
    await cluster.down(5)
    await cluster.run(AFTER - 5)
    assert (await cluster.standings())[5] == "suspect"


async def test_in_a_storm_nobody_is_lost_and_afterwards_the_time_begins_anew(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.down(4, 5)
    await cluster.run(3 * AFTER)
    assert (await cluster.standings())[4:] == ["suspect", "suspect"]
    (alarm,) = store_problems(cluster.members.known(), 2, AFTER)
    assert "ALARM: 2 of 6 nodes are away at once (n4, n5)" in alarm
    await cluster.up(4)
    await cluster.run(AFTER - 5)
    assert (await cluster.standings())[5] == "suspect"
    await cluster.run(10)
    assert (await cluster.standings())[4:] == ["up", "lost"]


@pytest.mark.parametrize("cluster", [(16, {})], indirect=True)
async def test_a_quarter_may_be_away_if_the_code_survives_it(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.down(14, 15)
    await cluster.run(AFTER + 5)
    assert (await cluster.standings())[13:] == ["up", "lost", "lost"]
    await cluster.down(11, 12, 13)  # three domains at once, and two parity shards
    await cluster.run(AFTER + 5)
    assert (await cluster.standings())[11:] == ["suspect"] * 3 + ["lost"] * 2


@pytest.mark.parametrize("cluster", [(16, {11: "rack", 12: "rack", 13: "rack"})], indirect=True)
async def test_a_rack_is_one_domain(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.down(11, 12, 13)
    await cluster.run(AFTER + 5)
    assert (await cluster.standings())[11:14] == ["lost"] * 3


async def test_a_draining_store_may_be_lost_a_removed_one_not(cluster: Cluster, autojump_clock: MockClock) -> None:
    await set_state(cluster.kv, store_id(4), StoreState.REMOVED)
    await set_state(cluster.kv, store_id(5), StoreState.DRAINING)
    assert (await cluster.standings())[4:] == ["removed", "draining"]
    await cluster.down(4, 5)
    assert not is_storm(await cluster.members.refresh(), 2)
    await cluster.run(AFTER + 5)
    assert (await cluster.standings())[4:] == ["removed", "lost"]


async def test_a_machine_that_was_wiped_twice_is_one_node(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in (20, 21):  # stores made anew
        await cluster.down(5, 20)
        await register_store(cluster.kv, store_id(number), NodeId("n5"), "127.0.0.1:1", "/s", {})
        await begin_session(cluster.kv.another(session_label(store_id(number), 1)), NodeId("n5"), store_id(number), 1)
        await cluster.run(2)
    assert await cluster.standings() == ["up"] * 5 + ["suspect", "suspect", "up"]
    await cluster.run(AFTER + 5)
    assert await cluster.standings() == ["up"] * 5 + ["lost", "lost", "up"]


async def test_a_new_leader_counts_by_its_own_clock(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.down(5)
    await cluster.run(AFTER - 5)
    await cluster.leadership.give_up()
    other = Leadership(cluster.kv.another("other"), store_id(1), 1, cluster.members.seconds_away)
    await other.look()
    await cluster.run(20)
    assert (await cluster.standings())[5] == "suspect"  # by one that doesn't lead
    await other.give_up()
    await cluster.run(AFTER - 5)
    assert (await cluster.standings())[5] == "suspect"
    await cluster.run(10)
    assert (await cluster.standings())[5] == "lost"


async def test_a_catalog_that_is_just_back_has_nobody_declared_lost(
    cluster: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    await cluster.down(5)
    await cluster.run(AFTER - 5)
    look = cluster.watch.look

    async def away() -> None:
        raise CatalogUnavailable("etcd is away")

    monkeypatch.setattr(cluster.watch, "look", away)
    nursery.start_soon(cluster.watch.run)
    await trio.sleep(2)
    monkeypatch.setattr(cluster.watch, "look", look)
    await cluster.run(AFTER - 10)
    assert (await cluster.standings())[5] == "suspect"
    nursery.cancel_scope.cancel()


async def test_what_only_a_lost_store_had_is_rolled_back_and_counted(cluster: Cluster, autojump_clock: MockClock) -> None:
    tree = Namespace(cluster.kv, store_id(5), 1, lambda: 1)
    made = await tree.create_file(ROOT_INODE, b"f", 0o644, 0, 0, new_segment_id())
    await cluster.down(5)
    await cluster.run(AFTER + 5)
    assert (await tree.inode(made.ino)).lost
    assert cluster.watch.statistics.files_lost == 1


@pytest.mark.parametrize("cluster", [(9, {})], indirect=True)
async def test_a_damaged_record_keeps_no_other_store_from_being_declared_lost(
    autojump_clock: MockClock, cluster: Cluster
) -> None:
    await cluster.kv.transact([], [Put(store_key(store_id(3)), b"nonsense")])
    await cluster.down(3, 5)
    await cluster.run(AFTER + 5)
    standings = await cluster.standings()
    assert (standings[3], standings[5]) == ("suspect", "lost")
    (problem,) = [line for line in store_problems(cluster.members.known(), 2, AFTER) if "is damaged" in line]
    assert problem.startswith("n3 (04040404")
