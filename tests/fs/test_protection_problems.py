"""What keeps files from being safe is said, with what is safe and what to do, and nothing is said where nothing does."""

from typing import Any

import pytest

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId
from ckptfs.fs.cli_flush import _what_to_do
from ckptfs.fs.protection_problems import label_problems, protection_problems, rebuild_problems
from ckptfs.fs.status import FileStanding
from ckptfs.replication.members import Member
from ckptfs.replication.rebuild import RebuildStatistics
from ckptfs.replication.replicator import ReplicatorStatistics


def problems(live: int, count: int, *, asked: bool = True, **waiting: Any) -> list[str]:
    facts: dict[str, Any] = dict.fromkeys(ReplicatorStatistics.__dataclass_fields__, 0) | waiting
    members = [
        Member(StoreId(bytes([n]) * 16), NodeId(f"node-{n}"), f"node-{n}", "", StoreState.IN, 1, n < live, 1)
        for n in range(count)
    ]
    return protection_problems(members, lambda _: "refused" if asked else "", 4, 2, ReplicatorStatistics(**facts))


def test_a_whole_cluster_has_no_problem() -> None:
    assert problems(6, 6) == []
    assert problems(3, 3) == [], "1+2 survives what was asked for"
    assert problems(3, 6, asked=False) == [], "those not asked yet are not said to be away"


@pytest.mark.parametrize(("waiting", "words"), [(0, "no file can be protected"), (1, "1 file waits"), (2, "2 files wait")])
def test_one_node_says_that_it_protects_nothing(waiting: int, words: str) -> None:
    (problem,) = problems(1, 1, waiting_count=waiting)
    assert problem.startswith(words)
    assert "4+2 needs 6 failure domains, 1 is live" in problem
    assert "safe on this node's drive" in problem


def test_nodes_that_are_away_are_named() -> None:
    (problem,) = problems(4, 7)
    assert problem.startswith("node-4, node-5, node-6 do not answer")
    away, smaller = problems(2, 7)
    assert "node-2" in away
    assert "protected with 1+1 meanwhile, are degraded" in smaller


def test_a_node_that_is_up_and_refused_is_not_to_be_started() -> None:
    members = [
        Member(StoreId(bytes([n]) * 16), NodeId(f"node-{n}"), f"node-{n}", "", StoreState.IN, 1, n < 6, 1) for n in range(7)
    ]
    members[6] = members[6]._replace(refusal="node-6 speaks protocol 3 to 3, node-0 1 to 2: upgrade the older one")
    facts: dict[str, Any] = dict.fromkeys(ReplicatorStatistics.__dataclass_fields__, 0)
    (problem,) = protection_problems(members, lambda _: "refused", 4, 2, ReplicatorStatistics(**facts))
    assert "node-6 can't be talked to: node-6 speaks protocol 3 to 3" in problem
    assert "upgrade the older one" in problem


def test_a_node_without_the_label_of_the_failure_domain_is_named() -> None:
    member = Member(StoreId(b"a" * 16), NodeId("node-1"), "r1", "", StoreState.IN, 1, True, 1)
    bare = member._replace(node=NodeId("node-2"), domain="node-2")
    assert label_problems([member, bare], "node") == []
    assert label_problems([member], "rack") == []
    (problem,) = label_problems([member, bare], "rack")
    assert problem.startswith("node-2: no label rack")


def test_what_is_lost_is_named_and_what_has_no_place_says_what_to_do() -> None:
    assert rebuild_problems(RebuildStatistics(), {}) == []
    found = RebuildStatistics(left=9, homeless=3, stuck=1, lost_count=7, lost=[InodeNumber(5)], last_error="it is full")
    lost, homeless, stuck = rebuild_problems(found, {InodeNumber(5): b"run/model.pt"})
    assert lost.startswith("7 files are lost")
    assert "run/model.pt and 6 more" in lost
    assert homeless.startswith("3 files have shards on nodes that are lost or draining")
    assert "Start more nodes" in homeless
    assert "it is full" in stuck


def test_what_fails_again_and_again_says_why() -> None:
    (problem,) = problems(6, 6, waiting_count=3, stuck_count=2, stuck_attempts=3, stuck_error="6 domains with space are needed")
    assert problem.startswith("2 files wait for protection, tried 3 times or more")
    assert "6 domains with space are needed" in problem


def test_flush_says_what_to_do_about_each_state() -> None:
    is_open = FileStanding("a", "open", 0, 1, "node-1")
    local = FileStanding("b", "local", 0, 1, "node-1")
    assert "on node-1" in _what_to_do([is_open])
    assert "close it" in _what_to_do([is_open])
    assert "status" not in _what_to_do([is_open])
    assert "status" in _what_to_do([is_open, local])
    assert "saved again" in _what_to_do([FileStanding("c", "lost", 0, 1)])
