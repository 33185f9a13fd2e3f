"""Placement: what always holds, what holds on average, and protected_m against trying every loss."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.replication.errors import NotEnoughDomains
from ckptfs.replication.placement import UNREADABLE, Candidate, code_for, place, protected_m, usable_domains

reproducible = settings(derandomize=True, deadline=None, max_examples=60)


def candidate(number: int, domain: str | None = None, free_bytes: int = 1000, live: bool = True) -> Candidate:
    node = NodeId(f"node-{number}")
    return Candidate(StoreId(number.to_bytes(16, "big")), node, domain or node, free_bytes, live)


@st.composite
def clusters(draw: st.DrawFn) -> list[Candidate]:
    count = draw(st.integers(0, 12))
    return [
        candidate(number, draw(st.sampled_from("abcdefg")), draw(st.integers(0, 50)), draw(st.booleans()))
        for number in range(count)
    ]


@reproducible
@given(clusters(), st.integers(0, 6), st.binary(max_size=40), st.integers(0, 30), st.randoms(use_true_random=False))
def test_placement_holds_what_it_promises(
    cluster: list[Candidate], count: int, seed: bytes, bytes_each: int, shuffler: random.Random
) -> None:
    domains = usable_domains(cluster, bytes_each)
    if len(domains) < count:
        with pytest.raises(NotEnoughDomains, match=f"{count} failure domains.*{len(domains)} of"):
            place(cluster, count, seed, bytes_each)
        return
    stores = place(cluster, count, seed, bytes_each)
    by_store = {candidate.store: candidate for candidate in cluster}
    chosen = [by_store[store] for store in stores]
    assert len(chosen) == count
    assert len({one.domain for one in chosen}) == count
    assert all(one.live and one.free_bytes >= bytes_each for one in chosen)
    shuffled = list(cluster)
    shuffler.shuffle(shuffled)
    assert place(shuffled, count, seed, bytes_each) == stores


def test_full_domains_are_named() -> None:
    cluster = [candidate(0), candidate(1, free_bytes=5), candidate(2, live=False)]
    with pytest.raises(NotEnoughDomains, match=r"2 failure domains with 10 bytes free are needed, 1 of 2 live.*full: node-1"):
        place(cluster, 2, b"seed", 10)


def shares(cluster: list[Candidate], count: int, rounds: int = 1500) -> dict[StoreId, float]:
    """How many shards each store gets, as a part of all."""
    holders = Counter(store for seed in range(rounds) for store in place(cluster, count, seed.to_bytes(4, "big"), 1))
    return {one.store: holders[one.store] / (rounds * count) for one in cluster}


def test_equal_stores_get_equal_shares_of_every_index() -> None:
    cluster = [candidate(number) for number in range(9)]
    assert all(abs(share - 1 / 9) < 0.02 for share in shares(cluster, 6, 500).values())
    first = Counter(place(cluster, 6, seed.to_bytes(4, "big"), 1)[0] for seed in range(900))
    assert all(60 < first[one.store] < 150 for one in cluster)


def test_shares_follow_free_space() -> None:
    cluster = [candidate(number, free_bytes=free_bytes) for number, free_bytes in enumerate((100, 100, 200, 400))]
    assert list(shares(cluster, 1).values()) == pytest.approx([1 / 8, 1 / 8, 1 / 4, 1 / 2], abs=0.04)


def test_the_stores_of_a_domain_share_by_free_space() -> None:
    cluster = [candidate(0, "a", 300), candidate(1, "a", 100), candidate(2, "b", 400)]
    assert list(shares(cluster, 2, 800).values()) == pytest.approx([3 / 8, 1 / 8, 1 / 2], abs=0.03)


def test_a_candidate_that_goes_away_moves_only_its_own_shard() -> None:
    cluster = [candidate(number) for number in range(10)]
    for seed in range(200):
        before = place(cluster, 6, bytes([seed]), 1)
        gone = before[seed % 6]
        after = place([one for one in cluster if one.store != gone], 6, bytes([seed]), 1)
        assert len(set(before) & set(after)) == 5


def test_big_stores_do_not_get_the_data_shards_more_often() -> None:
    cluster = [candidate(0, free_bytes=10**6), *(candidate(number) for number in range(1, 6))]
    positions = Counter(place(cluster, 6, seed.to_bytes(4, "big"), 1).index(cluster[0].store) for seed in range(900))
    assert all(100 < positions[index] < 200 for index in range(6))


@pytest.mark.parametrize(
    ("domain_count", "code"),
    [(0, (1, 0)), (1, (1, 0)), (2, (1, 1)), (3, (1, 2)), (4, (2, 2)), (5, (3, 2)), (6, (4, 2)), (7, (4, 2)), (100, (4, 2))],
)
def test_small_clusters_keep_m_first(domain_count: int, code: tuple[int, int]) -> None:
    assert code_for(4, 2, domain_count) == code


@reproducible
@given(st.integers(1, 12), st.integers(0, 6), st.integers(0, 20))
def test_a_code_always_fits_its_domains(k: int, m: int, domain_count: int) -> None:
    lowered_k, lowered_m = code_for(k, m, domain_count)
    assert 1 <= lowered_k <= k
    assert 0 <= lowered_m <= m
    assert lowered_k + lowered_m <= max(1, domain_count)
    assert protected_m([str(index) for index in range(lowered_k + lowered_m)], lowered_k) == lowered_m


@reproducible
@given(st.lists(st.sampled_from(["a", "b", "c", "d", "e", None]), max_size=9), st.integers(1, 5))
def test_protected_m_by_trying_every_loss(shard_domains: list[str | None], k: int) -> None:
    live = [domain for domain in shard_domains if domain is not None]
    domains = sorted(set(live))

    def survives_any(count: int) -> bool:
        return all(
            sum(domain not in lost for domain in live) >= k for lost in itertools.combinations(domains, min(count, len(domains)))
        )

    expected = max((count for count in range(len(domains) + 1) if survives_any(count)), default=UNREADABLE)
    assert protected_m(shard_domains, k) == expected


@pytest.mark.parametrize(
    ("shard_domains", "k", "expected"),
    [
        (["a", "b", "c", "d", "e", "f"], 4, 2),
        (["a", "a", "b", "c", "d", "e"], 4, 1),
        (["a", "a", "a", "b", "c", "d"], 4, 0),
        (["a", "b", "c", "d", "e", None], 4, 1),
        (["a", "b", "c", "d", None, None], 4, 0),
        (["a", "b", "c", None, None, None], 4, UNREADABLE),
        (["a", "b", "c"], 1, 2),
        ([], 1, UNREADABLE),
    ],
)
def test_protected_m_in_examples(shard_domains: list[str | None], k: int, expected: int) -> None:
    assert protected_m(shard_domains, k) == expected


def test_protected_m_of_a_content_without_shards_is_no_question() -> None:
    with pytest.raises(ValueError, match="from 0 shards"):
        protected_m([], 0)
