"""Where one shard of a protected version goes that can't stay where it is. Pure."""

from collections.abc import Mapping, Sequence

from ckptfs.cache.ids import StoreId, Vid
from ckptfs.replication.errors import NotEnoughDomains
from ckptfs.replication.members import Member, candidates
from ckptfs.replication.placement import place


def new_holder(
    members: Sequence[Member],
    vid: Vid,
    index: int,
    others: Mapping[int, StoreId],
    without: frozenset[StoreId],
    bytes_each: int,
) -> StoreId:
    """A live store for shard `index`, not in `without` and in a failure domain that has none of the version's `others`.

    A domain whose store was lost is free again: what was there does not come back. Raises `NotEnoughDomains`.
    """
    taken = {member.domain for member in members if member.store in others.values() and not member.state.is_gone}
    possible = candidates(members, without=without | frozenset(others.values()))
    free = [candidate for candidate in possible if candidate.domain not in taken]
    if not free:
        raise NotEnoughDomains(
            "every other node that answers holds another shard of the file already; start the node that is away, or one more"
            if candidates(members, without=without)
            else "no other node answers; start more nodes"
        )
    return place(free, 1, vid + bytes([index]), bytes_each)[0]
