"""The write order of the product, broken on purpose, one rule at a time: the power cuts must catch each of them."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ckptfs.cache import seal
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs import open_files
from ckptfs.fs.files import FileOperations
from ckptfs.fs.mount_recovery import MountRecovery
from ckptfs.fs.reclaim import Reclaimer
from ckptfs.replication import shard_writer


async def _nothing(*_: Any) -> None: ...


def _without_syncs(module: Any) -> None:
    module.os = SimpleNamespace(**{**vars(os), "fsync": lambda descriptor: None, "fdatasync": lambda descriptor: None})


def fsync_forgets_the_bytes() -> None:
    _without_syncs(open_files)


def fsync_forgets_the_name_of_the_segment() -> None:
    Segments.sync_names = lambda self, segments: set()  # type: ignore[method-assign]


def fsync_forgets_the_catalog() -> None:
    SqliteCatalog.make_durable = _nothing  # type: ignore[method-assign, assignment]


def fsync_forgets_the_mark() -> None:
    Versions.mark_durable = _nothing  # type: ignore[method-assign, assignment]


def local_before_it_is_synced() -> None:
    _without_syncs(seal)


def segments_go_before_their_end_is_safe() -> None:
    Reclaimer.segment = lambda self, segment, *, at_once: self._segments.remove(segment)  # type: ignore[method-assign]


def what_was_never_synced_is_kept() -> None:
    restore = MountRecovery._restore

    async def believed(self: MountRecovery, row: Any, *, in_use: bool, power_was_cut: bool) -> bool:
        return await restore(self, row, in_use=in_use, power_was_cut=False)

    MountRecovery._restore = believed  # type: ignore[method-assign]


def what_was_synced_gives_way_to_what_was_not() -> None:
    FileOperations.before_replacing = _nothing  # type: ignore[method-assign, assignment]


def shard_named_before_it_is_synced() -> None:
    _without_syncs(shard_writer)


def shard_acknowledged_before_its_name_is_safe() -> None:
    shard_writer.sync_directory = lambda path: None  # type: ignore[attr-defined]


FILES: tuple[Callable[[], None], ...] = (
    fsync_forgets_the_bytes,
    fsync_forgets_the_name_of_the_segment,
    fsync_forgets_the_catalog,
    fsync_forgets_the_mark,
    local_before_it_is_synced,
    segments_go_before_their_end_is_safe,
    what_was_never_synced_is_kept,
    what_was_synced_gives_way_to_what_was_not,
)
SHARDS: tuple[Callable[[], None], ...] = (shard_named_before_it_is_synced, shard_acknowledged_before_its_name_is_safe)
BROKEN = {canary.__name__: canary for canary in (*FILES, *SHARDS)}
