"""Rules of docs/protocol.md, broken on purpose, one at a time: the simulation must find each of them within some seeds."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import simulated_node
import trio
from virtual_machine import Process, process

from ckptfs.cache import lost_stores, seal
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import Version, VersionState, inode_key, pack, version_key
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.catalog_records import existing_inode
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import ID_SIZE, InodeNumber, Vid
from ckptfs.cache.mount_db import FileRow
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.versions import Versions
from ckptfs.fs import growing
from ckptfs.fs.repeats import Repeats
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.replication import protect, shard_writer
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


def seal_at_release() -> None:
    """I6: a file is sealed because it was closed, though a mapping still writes to its segment."""
    for module in (seal, protect):
        vars(module)["has_no_writer"] = lambda descriptor: True


def counter_instead_of_vid() -> None:
    """I6: versions are counted, by processes that begin anew."""
    counts: Counter[Process | None] = Counter()

    def counted() -> Vid:
        now = process.get()
        counts[now] += 1
        number = 0 if now is None else now.machine.number
        return Vid(bytes([number]) + counts[now].to_bytes(ID_SIZE - 1))

    for kind in (Namespace, Versions):
        _with_argument(kind, "make_vid", counted)
    vars(growing)["new_vid"] = counted


def collect_without_looking() -> None:
    """I5: a shard goes because its version was absent when it was looked at before, not now."""

    async def unwanted(self: ShardSweep, key: Any, still_unnamed: Any) -> bool:
        vid, index, _ = key
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
    EtcdCatalog.fence_with = lambda self, fence: None  # type: ignore[method-assign]


def return_over_newer() -> None:
    """I14: a store that was lost gives its files back though others were writing them while it was away."""
    attempt = lost_stores._attempt_give_back

    async def over_newer(kv: Any, writer: Any, ino: InodeNumber, vid: Vid, over: Vid | None) -> Any:
        with suppress(NoSuchName):
            inode, revision = await existing_inode(kv, ino)
            back = msgspec.structs.replace(inode, rolled_back_from=vid, open=None, writer=None)
            await kv.transact([Unchanged(inode_key(ino), revision)], [Put(inode_key(ino), pack(back))])
        return await attempt(kv, writer, ino, vid, over)

    lost_stores._attempt_give_back = over_newer


def fsync_forgets_the_mark() -> None:
    """I9: what was synced is dropped after a power cut, because nothing says that it was."""
    Versions.mark_durable = _nothing  # type: ignore[method-assign]


def _with_argument(kind: Any, name: str, value: Any) -> None:
    init = kind.__init__
    kind.__init__ = lambda self, *arguments, **named: init(self, *arguments, **{**named, name: value})


def _without_syncs(module: Any) -> None:
    module.os = SimpleNamespace(**{**vars(os), "fsync": lambda descriptor: None})


async def _nothing(*_: Any, **__: Any) -> None: ...


def replaced_rows_are_forgotten() -> None:
    """I15: what another node's file replaced is looked at once, while that file may still fall back to it."""

    async def without_version(self: SegmentSweep, rows: Sequence[FileRow]) -> list[FileRow]:
        entries = await self._namespace.kv.get_many([version_key(row.vid) for row in rows])
        return [row for row, entry in zip(rows, entries, strict=True) if entry is None]

    sweep_rows = SegmentSweep.sweep_rows

    async def of_what_changed(self: SegmentSweep, *, all_rows: bool = False) -> int:
        return await sweep_rows(self)

    SegmentSweep._without_content = without_version  # type: ignore[method-assign]
    SegmentSweep.sweep_rows = of_what_changed  # type: ignore[method-assign]


RULES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "reclaim_at_unlink": (reclaim_at_unlink, ()),
    "commit_before_the_last_acknowledgement": (commit_before_the_last_acknowledgement, ()),
    "shard_not_synced": (shard_not_synced, ()),
    "local_not_synced": (local_not_synced, ()),
    "seal_at_release": (seal_at_release, ()),
    "counter_instead_of_vid": (counter_instead_of_vid, ("kill_mount", "kill_node")),
    "collect_without_looking": (collect_without_looking, ()),
    "cur_set_at_close": (cur_set_at_close, ()),
    "watch_resumed_at_the_compaction": (watch_resumed_at_the_compaction, ("compact",)),
    "no_operation_key": (no_operation_key, ("kill_before_answer",)),
    "no_session_compare": (no_session_compare, ("freeze", "cut_from_etcd", "isolate")),
    "return_over_newer": (return_over_newer, ("lose_store",)),
    "fsync_forgets_the_mark": (fsync_forgets_the_mark, ("cut_power",)),
    "replaced_rows_are_forgotten": (replaced_rows_are_forgotten, ()),
}
"""Each with the kinds of fault that show it, if it takes certain ones."""
