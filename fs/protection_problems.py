"""What keeps files from being as safe as was asked for, as an operator is to hear it: a line for each cause. Pure."""

from collections.abc import Callable, Mapping, Sequence

from ckptfs.cache.catalog_format import NODE_DOMAIN, StoreState
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.replication.members import Member
from ckptfs.replication.placement import code_for
from ckptfs.replication.rebuild import RebuildStatistics
from ckptfs.replication.replicator import LISTED_MAX, ReplicatorStatistics

LOST_SHOWN_MAX = 5


def protection_problems(
    members: Sequence[Member],
    why_away: Callable[[StoreId], str],
    data_shards: int,
    parity_shards: int,
    waiting: ReplicatorStatistics,
) -> list[str]:
    """The causes there are now. `why_away` says why a store does not answer, and nothing if it was not asked yet.

    No file is looked at: what a node that is away means for one of them, `ckptfs status` of its path tells.
    """
    joined = [member for member in members if not member.state.is_gone]
    refused = [member for member in joined if member.refusal]
    away = sorted(str(member.node) for member in joined if not member.live and not member.refusal and why_away(member.store))
    live = {member.domain for member in joined if member.live and member.state is StoreState.IN}
    problems = [
        f"{member.node} can't be talked to: {member.refusal}. Until that is mended it counts as away: files may be "
        "degraded, or unreachable; nothing is lost by that"
        for member in refused
    ]
    if away:
        verb, them = ("does", "it") if len(away) == 1 else ("do", "them")
        problems.append(
            f"{', '.join(away)} {verb} not answer: files may be degraded (fewer losses are survived), or unreachable until "
            f"they are back; nothing is lost by that. Start {them}; `ckptfs status PATH` tells how a file or directory stands"
        )
    k, m = code_for(data_shards, parity_shards, len(live))
    needed = f"{data_shards}+{parity_shards} needs {data_shards + parity_shards} failure domains, {_are(len(live))} live"
    if m == 0:
        problems.append(
            f"{_waits(waiting)}: {needed}, and with fewer than 2 nothing can be protected. What is closed is safe on this node's "
            "drive, and lost with it; start more nodes, and it is protected by itself"
        )
        return problems
    if m < parity_shards:
        problems.append(
            f"{needed}: files are protected with {k}+{m} meanwhile, are degraded, and survive the loss of {m} only; "
            "start more nodes, and they are raised by themselves"
        )
    if waiting.stuck_count:
        problems.append(
            f"{_files(waiting.stuck_count, 'waits', 'wait')} for protection, tried {waiting.stuck_attempts} times or more in "
            f"vain, the last time because of: {waiting.stuck_error}. They are safe on this node's drive, and tried again"
        )
    return problems


def label_problems(members: Sequence[Member], domain_label: str) -> list[str]:
    """Nodes that don't say in which failure domain they stand: each counts as one of its own."""
    joined = [member for member in members if not member.state.is_gone]
    without = sorted(str(member.node) for member in joined if member.domain == member.node)
    if domain_label == NODE_DOMAIN or not without:
        return []
    return [
        f"{', '.join(without)}: no label {domain_label}, so files may survive fewer losses than is said: put it into labels in "
        "the node's node.toml, and restart the node"
    ]


def rebuild_problems(rebuild: RebuildStatistics, names: Mapping[InodeNumber, bytes]) -> list[str]:
    """What the leader found of the shards of stores that are lost or draining; other nodes' statistics are empty."""
    problems = []
    if rebuild.lost_count:
        shown = [names[ino].decode(errors="replace") for ino in rebuild.lost if ino in names][:LOST_SHOWN_MAX]
        named = f": {', '.join(shown)}" if shown else ""
        more = f" and {rebuild.lost_count - len(shown)} more" if shown and rebuild.lost_count > len(shown) else ""
        problems.append(
            f"{_files(rebuild.lost_count, 'is', 'are')} lost, too few of the stores that held the shards are left{named}{more}. "
            "`ckptfs verify` names every one; restore them from elsewhere, or delete them"
        )
    if rebuild.homeless:
        problems.append(
            f"{_files(rebuild.homeless, 'has', 'have')} shards on nodes that are lost or draining, and no failure domain is "
            "free to take them: they survive fewer losses meanwhile. Start more nodes, and the shards are made again there"
        )
    if rebuild.stuck:
        problems.append(
            f"shards of {_files(rebuild.stuck, 'could', 'could')} not be made again on other nodes, the last one because of: "
            f"{rebuild.last_error}. It is tried again"
        )
    return problems


def _waits(waiting: ReplicatorStatistics) -> str:
    if not waiting.waiting_count:
        return "no file can be protected now"
    return f"{_files(waiting.waiting_count, 'waits', 'wait')} for protection"


def _files(count: int, one: str, many: str) -> str:
    if count == 1:
        return f"1 file {one}"
    return f"{count}{' or more' if count >= LISTED_MAX else ''} files {many}"


def _are(count: int) -> str:
    return f"{count} {'is' if count == 1 else 'are'}"
