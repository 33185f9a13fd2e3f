"""What was unneeded for a long time and is put again, to be named, is not taken by the sweep that had come for it."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from trio.testing import MockClock

from ckptfs.cache.catalog_format import ShardLayout, Version, VersionState
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_sweep import UNNAMED_SECONDS, ShardSweep
from ckptfs.replication.small_copies import SmallCopies, SmallCopy

CELL = 4096
SHARD, COPY = Vid(b"s" * 16), Vid(b"c" * 16)


class NamedElsewhere:
    """Two versions that are protected, but not by this store."""

    async def version(self, vid: Vid) -> Version | None:
        layout = ShardLayout.COPIES if vid == COPY else ShardLayout.STRIPED
        return Version(1, InodeNumber(5), VersionState.PROTECTED, StoreId(b"h" * 16), SegmentId(bytes(16)), layout=layout)


class AskedCatalog(MemoryCatalog):
    """`before_removals`: what happens after the sweep has decided what to remove, of shards and then of copies, and before it
    removes anything."""

    before_removals: Sequence[Callable[[], None]] = ()
    asked = 0

    async def make_durable(self) -> None:
        self.asked += 1  # the first time it asks which catalog it is
        if 2 <= self.asked < 2 + len(self.before_removals):
            self.before_removals[self.asked - 2]()


class Bench(NamedTuple):
    shards: ShardStore
    copies: SmallCopies
    catalog: AskedCatalog
    sweep: ShardSweep

    def put(self) -> None:
        """Both, as a repair does it; acknowledged, and not named yet."""
        self.put_shard()
        self.put_copy()

    def put_shard(self) -> None:
        header = ShardHeader(SHARD, 0, 1, 1, CELL, CELL)
        writer, cell = self.shards.begin(header), bytes([7]) * CELL
        if not writer.resume_stripe:
            writer.write_cell(0, cell, cell_hash(cell))
        writer.finish(ShardFooter(header, cell_hash(cell), cell_hash(cell), InodeNumber(5), b"", 0))

    def put_copy(self) -> None:
        self.copies.put([SmallCopy(COPY, InodeNumber(5), 1, b"", 0, b"x")])

    def there(self) -> tuple[bool, int, int]:
        """The shard's file, and how many rows the two databases have."""
        return os.path.exists(self.shards.path_of(SHARD, 0)), len(self.shards.list()), len(self.copies.list())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    index = AgentDatabase(tmp_path / "agent.db")
    shards, copies = ShardStore(tmp_path / "shards", index), SmallCopies(tmp_path / "small_copies.db")
    catalog = AskedCatalog()
    sweep = ShardSweep(catalog, NamedElsewhere(), shards, copies, index, StoreId(b"o" * 16), b"c" * 16)
    yield Bench(shards, copies, catalog, sweep)
    copies.close()
    index.close()


async def sweep_after(bench: Bench, clock: MockClock, seconds: float) -> None:
    clock.jump(seconds)
    bench.catalog.asked = 0
    await bench.sweep.sweep()


async def test_what_is_put_again_counts_its_time_anew(bench: Bench, mock_clock: MockClock) -> None:
    bench.put()
    await bench.sweep.sweep()
    bench.put()
    await sweep_after(bench, mock_clock, UNNAMED_SECONDS + 1.0)
    assert bench.there() == (True, 1, 1)
    await sweep_after(bench, mock_clock, UNNAMED_SECONDS + 1.0)
    assert bench.there() == (False, 0, 0)
    assert (bench.sweep.statistics.shards_removed, bench.sweep.statistics.copies_removed) == (1, 1)


async def test_what_is_put_again_as_it_is_about_to_be_removed_stays(bench: Bench, mock_clock: MockClock) -> None:
    bench.put()
    await bench.sweep.sweep()
    bench.catalog.before_removals = (bench.put_shard, bench.put_copy)
    await sweep_after(bench, mock_clock, UNNAMED_SECONDS + 1.0)
    assert bench.there() == (True, 1, 1)
    assert (bench.sweep.statistics.shards_removed, bench.sweep.statistics.copies_removed) == (0, 0)


async def test_what_somebody_is_putting_again_stays(bench: Bench, mock_clock: MockClock) -> None:
    bench.put()
    await bench.sweep.sweep()
    writer = bench.shards.begin(ShardHeader(SHARD, 0, 1, 1, CELL, CELL))
    await sweep_after(bench, mock_clock, UNNAMED_SECONDS + 1.0)
    assert bench.there() == (True, 1, 0)
    writer.suspend()
    await sweep_after(bench, mock_clock, 1.0)
    assert bench.there() == (False, 0, 0)
