"""Which stores are lost: the leader declares it of those that have been suspect for long, and rolls back what only they had.

R8 and R15.
Time is the leader's own monotonic clock, from when it first saw the store without a session; a new leader begins to count anew,
and so does one that could not reach the catalog. While many are away at once it is the network or the catalog rather than the
drives: then nobody is declared lost, and counting begins anew when that has passed.
"""

import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import trio

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import StoreId
from ckptfs.cache.lost_stores import declare_lost, roll_back
from ckptfs.replication.leadership import Leadership
from ckptfs.replication.members import Member, Members

logger = logging.getLogger(__name__)

REPAIR_AFTER_SECONDS = 600.0
LOOK_SECONDS = 1.0


def joined(members: Sequence[Member]) -> list[Member]:
    """The stores that belong to the cluster: not those that were lost or removed."""
    return [member for member in members if not member.state.is_gone]


def without_session(members: Sequence[Member]) -> list[Member]:
    """Those of the cluster's stores whose nodes are not up."""
    return [member for member in joined(members) if not member.has_session]


def is_storm(members: Sequence[Member], parity_shards: int) -> bool:
    """Whether so many are away at once that nobody may be declared lost: more than a quarter of the nodes (and more than one),
    or more failure domains than the code survives. A machine that was wiped again and again left several stores, and is one."""
    away = without_session(members)
    too_many = len(_nodes(away)) > max(1, len(_nodes(joined(members))) / 4)
    return too_many or len({member.domain for member in away}) > max(1, parity_shards)


def _nodes(members: Sequence[Member]) -> list[str]:
    return sorted({str(member.node) for member in members})


@dataclass
class StoreWatchStatistics:
    """Since the agent started, while it led."""

    declared_lost: int = 0
    rolled_back: int = 0
    files_lost: int = 0


class StoreWatch:
    """`run` in every agent; only the leader's decides."""

    def __init__(
        self,
        kv: KeyValue,
        members: Members,
        leadership: Leadership,
        parity_shards: int,
        *,
        repair_after_seconds: float = REPAIR_AFTER_SECONDS,
    ) -> None:
        self.statistics = StoreWatchStatistics()
        self._kv = kv
        self._members = members
        self._leadership = leadership
        self._parity_shards = parity_shards
        self._repair_after_seconds = repair_after_seconds
        self._suspect_since: dict[StoreId, float] = {}
        self._in_storm = False

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except CacheError as error:
                self._suspect_since.clear()
                logger.warning("stores-not-watched error=%s", error)

    async def look(self) -> None:
        """Declare lost what has been suspect for too long, and roll back what is left to. Raises `CacheError`."""
        if not self._leadership.is_held:
            self._suspect_since.clear()
            return
        members = self._members.known()
        away = without_session(members)
        if is_storm(members, self._parity_shards):
            self._suspect_since.clear()
            if not self._in_storm:
                logger.critical("storm away=%s: none of them is declared lost", ",".join(_nodes(away)))
            self._in_storm = True
            return
        self._in_storm = False
        now = trio.current_time()
        self._suspect_since = {one.store: self._suspect_since.get(one.store, now) for one in away}
        for one in away:
            if one.unreadable:
                continue  # nothing can be written into it: an operator has to say so
            if now - self._suspect_since[one.store] >= self._repair_after_seconds and await self._declare(one):
                await self._members.refresh()
        for member in self._members.known():
            if member.state.is_gone and not member.settled and not member.unreadable:
                await self._roll_back(member)
                await self._members.refresh()

    async def _declare(self, member: Member) -> bool:
        if not self._leadership.is_held or not await declare_lost(self._kv, self._leadership.compare(), member.store):
            return False
        self.statistics.declared_lost += 1
        logger.critical(
            "store-lost node=%s store=%s: without a session for %g s", member.node, member.store.hex(), self._repair_after_seconds
        )
        return True

    async def _roll_back(self, member: Member) -> None:
        if not self._leadership.is_held:
            return
        async with aclosing(roll_back(self._kv, self._leadership.compare(), member.store)) as files:
            async for file in files:
                if file.shown is None:
                    self.statistics.files_lost += 1
                    logger.error(
                        "file-lost inode=%d vid=%s node=%s: only this node had its content, which was not protected; it reads as"
                        " an error until the node returns, or it is saved again",
                        file.ino, file.gone.hex(), member.node,
                    )  # fmt: skip
                else:
                    self.statistics.rolled_back += 1
                    logger.error(
                        "file-rolled-back inode=%d from=%s to=%s node=%s: only this node had the newer content",
                        file.ino, file.gone.hex(), file.shown.hex(), member.node,
                    )  # fmt: skip


def store_problems(members: Sequence[Member], parity_shards: int, repair_after_seconds: float) -> list[str]:
    """What an operator is to hear about stores that are away or gone, a line each."""
    problems = []
    away = without_session(members)
    names = ", ".join(_nodes(away))
    if away and is_storm(members, parity_shards):
        problems.append(
            f"ALARM: {len(_nodes(away))} of {len(_nodes(joined(members)))} nodes are away at once ({names}): none of them is"
            " declared lost, and nothing of theirs is rebuilt elsewhere, until fewer are. Look at the network, the power and the"
            " catalog; a node that is gone for good is taken out by `ckptfs nodes remove NODE --force`"
        )
    elif away:
        problems.append(
            f"{names}: suspect, {'its' if len(away) == 1 else 'their'} session in the catalog has ended; after"
            f" {repair_after_seconds:g} s it is declared lost, and files whose newest content only it had are rolled back"
        )
    if unreadable := sorted(f"{member.node} ({member.store.hex()})" for member in members if member.unreadable):
        problems.append(
            f"{', '.join(unreadable)}: its record in the catalog is damaged. What it holds is not touched, and goes on being"
            " used where that is known; its node can't be started again. Bring the catalog back from a copy; or end its node,"
            " take that store out (`ckptfs nodes remove NAME`, with its name in `nodes list`) and start the machine with an empty"
            " one"
        )
    if lost := sorted(str(member.node) for member in members if member.state is StoreState.LOST):
        problems.append(
            f"{', '.join(lost)}: declared lost; files whose newest content only it had show older content, or are lost:"
            " `ckptfs status PATH` names them. Start it, if its drive is whole: what nobody changed since comes back by itself;"
            " else `ckptfs nodes remove NODE`"
        )
    return problems
