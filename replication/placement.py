"""Which stores hold the shards of a version, and how many failure domains it may lose. Pure, and deterministic.

A failure domain fails as a whole (a node, a rack), so no two shards of a version go to one domain.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.replication.errors import NotEnoughDomains

UNREADABLE = -1
"""What `protected_m` is when fewer than k shards are left: not even the loss of nothing is survived."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A store as placement sees it. `free_bytes` is what it may give to shards, its reserve already taken off."""

    store: StoreId
    node: NodeId
    domain: str
    free_bytes: int
    live: bool


def code_for(data_shards: int, parity_shards: int, domain_count: int) -> tuple[int, int]:
    """The code k+m a cluster of so many domains with space can carry, m first: losses survived matter more than space saved.

    With one domain or none m is 0: such a version can't be protected and stays local.
    """
    m = max(0, min(parity_shards, domain_count - 1))
    return max(1, min(data_shards, domain_count - m)), m


def usable_domains(candidates: Iterable[Candidate], bytes_each: int) -> set[str]:
    """The domains in which at least one live store has this much space."""
    return {candidate.domain for candidate in candidates if candidate.live and candidate.free_bytes >= bytes_each}


def place(candidates: Iterable[Candidate], count: int, seed: bytes, bytes_each: int) -> list[StoreId]:
    """The stores for shards 0 to count - 1: each live, with `bytes_each` free, and in a failure domain of its own.

    Over many seeds a domain is chosen in proportion to its free space (as far as one shard a version allows), and so is a
    store within its domain; every domain chosen is as likely to get data as parity. The same seed and candidates, in any
    order, give the same result, and a candidate that goes away moves few of the others. Raises `NotEnoughDomains`.
    """
    stores_by_domain: defaultdict[str, list[Candidate]] = defaultdict(list)
    live_domains = set()
    for candidate in candidates:
        if candidate.live:
            live_domains.add(candidate.domain)
            if candidate.free_bytes >= bytes_each:
                stores_by_domain[candidate.domain].append(candidate)
    if len(stores_by_domain) < count:
        full = ", ".join(sorted(live_domains - stores_by_domain.keys()))
        raise NotEnoughDomains(
            f"{count} failure domains with {bytes_each} bytes free are needed, {len(stores_by_domain)} of "
            f"{len(live_domains)} live ones have them" + (f"; full: {full}" if full else "")
        )

    def domain_delay(domain: str) -> tuple[float, str]:
        free_bytes = sum(candidate.free_bytes for candidate in stores_by_domain[domain])
        return _delay(seed, b"domain", domain.encode(), free_bytes), domain

    def store_delay(candidate: Candidate) -> tuple[float, StoreId]:
        return _delay(seed, b"store", candidate.store, candidate.free_bytes), candidate.store

    chosen = sorted(stores_by_domain, key=domain_delay)[:count]
    chosen.sort(key=lambda domain: (_uniform(seed, b"index", domain.encode()), domain))
    return [min(stores_by_domain[domain], key=store_delay).store for domain in chosen]


def protected_m(shard_domains: Sequence[str | None], data_shards: int) -> int:
    """How many failure domains, whichever they are, may be lost with any `data_shards` shards left to read from.

    Entry i is the domain of shard i's holder, None if the holder is gone. It is the largest f such that the f fullest
    domains together hold at most live - k shards, or `UNREADABLE` when fewer than k are live. For whole copies, which any one
    of gives everything, `data_shards` is 1. Raises ValueError for data_shards < 1: an empty content has no shards to count.
    """
    if data_shards < 1:
        raise ValueError(f"a content can't be read from {data_shards} shards")
    shards_per_domain = Counter(domain for domain in shard_domains if domain is not None)
    surplus = shards_per_domain.total() - data_shards
    if surplus < 0:
        return UNREADABLE
    lost_domains = 0
    for _, shard_count in shards_per_domain.most_common():
        surplus -= shard_count
        if surplus < 0:
            break
        lost_domains += 1
    return lost_domains


def _uniform(seed: bytes, purpose: bytes, name: bytes) -> float:
    """A number in (0, 1), the same for the same arguments on every machine."""
    digest = hashlib.blake2b(name, key=hashlib.blake2b(seed, digest_size=32).digest(), person=purpose, digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)


def _delay(seed: bytes, purpose: bytes, name: bytes, weight: int) -> float:
    """An exponential waiting time with rate `weight`. Taking those with the shortest is a random choice in proportion to the
    weights, in which each name's delay depends on nothing but itself (weighted rendezvous hashing)."""
    return -math.log(_uniform(seed, purpose, name)) / max(1, weight)
