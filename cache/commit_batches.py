"""Many small changes of the catalog in as few transactions as they fit into; one that fails holds up no other."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.catalog_kv import COMPARES_MAX, OPERATIONS_MAX, Compare, KeyValue, Operation
from ckptfs.cache.catalog_records import Conflict, Plan, commit, repeated, require_room
from ckptfs.cache.errors import DamagedRecord
from ckptfs.cache.ids import Vid

Item = TypeVar("Item")
Planned = tuple[Plan, list[tuple[Vid, Version]]]
"""A part of a transaction, and the versions that end with it."""
Planner = Callable[[Item], Awaitable[Planned | None]]
Done = list[tuple[Item, list[tuple[Vid, Version]]]]
"""What was committed, and the versions that ended with it."""


async def commit_batched(
    kv: KeyValue, items: Sequence[Item], planner: Planner[Item], careful_planner: Planner[Item]
) -> Done[Item]:
    """Plan and commit the items, as many in a transaction as fit; where one of those fails, one by one. One of which a record is
    damaged is left out.

    Records grow with each step: on a drive that is full they wait, all but those that end another version, whose segment makes
    room. Raises `CatalogFull` if that leaves none, and what `commit` raises.
    """
    done: Done[Item] = []
    batch = _Batch[Item]()
    is_short = kv.is_short_of_room()
    for item in items:
        planned = await _planned(planner, item)
        if planned is None or (is_short and not planned[1]):
            continue
        if not batch.fits(planned[0]):
            done += await _commit_batch(kv, batch, careful_planner)
            batch = _Batch()
            # Read again: what was just committed may have changed what this plan compares.
            planned = await _planned(planner, item)
            if planned is None:
                continue
        batch.add(item, *planned)
    done += await _commit_batch(kv, batch, careful_planner)
    if is_short and not done:
        require_room(kv)
    return done


async def _planned(planner: Planner[Item], item: Item) -> Planned | None:
    try:
        return await planner(item)
    except DamagedRecord:  # an error of this file, and of no other
        return None


async def _commit_batch(kv: KeyValue, batch: "_Batch[Item]", careful_planner: Planner[Item]) -> Done[Item]:
    if not batch.done:
        return []
    try:
        await commit(kv, list(batch.compares), list(batch.operations.values()))
    except Conflict:
        return [one for item, _ in batch.done for one in await _commit_one(kv, item, careful_planner)]
    return batch.done


async def _commit_one(kv: KeyValue, item: Item, careful_planner: Planner[Item]) -> Done[Item]:
    async def attempt() -> Done[Item]:
        planned = await _planned(careful_planner, item)
        if planned is None:
            return []
        plan, ended = planned
        await commit(kv, plan.compares, plan.operations)
        return [(item, ended)]

    return await repeated(attempt)


class _Batch(Generic[Item]):
    """Plans that fit into one transaction together."""

    def __init__(self) -> None:
        self.done: Done[Item] = []
        self.compares: dict[Compare, None] = {}
        self.operations: dict[bytes, Operation] = {}

    def fits(self, plan: Plan) -> bool:
        if not self.done:
            return True
        compares = self.compares.keys() | set(plan.compares)
        keys = {operation.key for operation in plan.operations}
        if not keys.isdisjoint(self.operations):
            return False
        return len(compares) <= COMPARES_MAX and len(self.operations) + len(keys) <= OPERATIONS_MAX

    def add(self, item: Item, plan: Plan, ended: list[tuple[Vid, Version]]) -> None:
        self.done.append((item, ended))
        self.compares.update(dict.fromkeys(plan.compares))
        self.operations.update((operation.key, operation) for operation in plan.operations)
