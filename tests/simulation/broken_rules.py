"""Rules of docs/protocol.md, broken on purpose, one at a time: the simulation must find each of them within some seeds."""

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import simulated_node
import trio

from ckptfs.cache import seal
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import Version, VersionState, pack
from ckptfs.cache.versions import Versions
from ckptfs.fs.repeats import Repeats
from ckptfs.replication import shard_writer
from ckptfs.replication.collector import Collector, Frontier
from ckptfs.replication.holders import PeerSink
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.shard_sweep import ShardSweep


def reclaim_at_unlink() -> None:
    """I3: nobody waits for the grace, nor until what was saved before is protected."""
    init = Collector.__init__

    def at_once(self: Collector, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **{**named, "grace_seconds": 0.0, "pause_seconds": 0.5})

    Collector.__init__ = at_once  # type: ignore[method-assign]
    Frontier.allows = lambda self, dead, age_seconds: True  # type: ignore[method-assign]


def commit_before_the_last_acknowledgement() -> None:
    """I4: a shard counts as stored when its last byte was sent."""
    finish = PeerSink.finish

    async def not_waiting(self: PeerSink, own_table: bytes, content_table: bytes) -> bytes:
        footer = ShardFooter(self._stream.header, own_table, content_table, self._ino, self._path_hint, self._revision)

        async def later() -> None:
            try:
                await finish(self, own_table, content_table)
            except Exception:
                return

        trio.lowlevel.spawn_system_task(later)
        return footer.root

    PeerSink.finish = not_waiting  # type: ignore[method-assign]
    PeerSink.aclose = _nothing  # type: ignore[method-assign]


def shard_not_synced() -> None:
    """I4: a shard is acknowledged before it survives a power cut."""
    _without_syncs(shard_writer)


def local_not_synced() -> None:
    """I2: readers get what a power cut could take."""
    _without_syncs(seal)


def collect_without_looking() -> None:
    """I5: a shard goes because its version was absent when it was looked at before, not now."""

    async def unwanted(self: ShardSweep, vid: Any, index: int, still_unnamed: Any) -> bool:
        version = await self._versions.version(vid)
        return version is not None and version.state is not VersionState.LOCAL and self._is_named(version, index)

    ShardSweep._is_wanted = unwanted  # type: ignore[method-assign]


def cur_set_at_close() -> None:
    """I2, I10: the name moves to the new content before it was synced and hashed."""
    opened = Versions._opened

    def at_once(self: Versions, ino: Any, inode: Any, version: Version, previous: Any, plan: Any, *, carried_on: bool) -> Any:
        found = opened(self, ino, inode, version, previous, plan, carried_on=carried_on)
        operation = plan.operations.pop()
        changed = msgspec.structs.replace(found.inode, cur=found.vid, open=found.vid)
        plan.operations.append(operation._replace(value=pack(changed)))
        return found

    Versions._opened = at_once  # type: ignore[method-assign]


def watch_resumed_at_the_compaction() -> None:
    """I12: a watch is taken up where etcd has cut its history, and loses a deletion."""
    EtcdCatalog._check_history = _nothing  # type: ignore[method-assign]


def no_operation_key() -> None:
    """I11: a request that comes again after a kill is carried out again."""

    async def without_note(self: Repeats, compares: Sequence[Any], operations: Sequence[Any]) -> Any:
        return await self._kv.transact(compares, operations)

    Repeats.transact = without_note  # type: ignore[method-assign]


def no_session_compare() -> None:
    """I7: a node whose session has ended goes on committing."""
    simulated_node.session_for = lambda label: None


def fsync_forgets_the_mark() -> None:
    """I9: what was synced is dropped after a power cut, because nothing says that it was."""
    Versions.mark_durable = _nothing  # type: ignore[method-assign]


def _without_syncs(module: Any) -> None:
    module.os = SimpleNamespace(**{**vars(os), "fsync": lambda descriptor: None})


async def _nothing(*_: Any, **__: Any) -> None: ...


RULES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "reclaim_at_unlink": (reclaim_at_unlink, ()),
    "commit_before_the_last_acknowledgement": (commit_before_the_last_acknowledgement, ()),
    "shard_not_synced": (shard_not_synced, ()),
    "local_not_synced": (local_not_synced, ()),
    "collect_without_looking": (collect_without_looking, ()),
    "cur_set_at_close": (cur_set_at_close, ()),
    "watch_resumed_at_the_compaction": (watch_resumed_at_the_compaction, ("compact",)),
    "no_operation_key": (no_operation_key, ("kill_before_answer",)),
    "no_session_compare": (no_session_compare, ("freeze", "cut_from_etcd", "isolate")),
    "fsync_forgets_the_mark": (fsync_forgets_the_mark, ("cut_power",)),
}
"""Each with the kinds of fault that show it, if it takes certain ones."""
