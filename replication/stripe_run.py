"""Stripes of one version, one after another in one thread: from the sockets into a buffer, proved, and decoded there.

This is the fast way, for stripes that are whole and holders that answer in time; whatever else comes is `stripe_reader`'s to deal
with, stripe by stripe. (m) A cell of 1 MiB that an event loop receives is some twenty turns of it; here it is a few calls in
which no Python runs, and its bytes are still in that core's cache when they are hashed and decoded.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.checksum import HASH_SIZE, cell_hash
from ckptfs.cache.ids import Vid
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import ReplicationError, ShardDamaged
from ckptfs.replication.stripes import Geometry


@dataclass
class StripedContent:
    """A protected, striped version with the tables that were fetched and proved so far. `own_tables` are those of shards by
    their index; `unfit` are shards with something wrong, of which no run is made any more."""

    vid: Vid
    version: Version
    table: bytes
    own_tables: dict[int, bytes] = field(default_factory=dict)
    unfit: set[int] = field(default_factory=set)

    @property
    def geometry(self) -> Geometry:
        version = self.version
        return Geometry(version.size, version.cell_size, version.data_shards, version.parity_shards)

    def digest(self, index: int, stripe: int) -> bytes | None:
        """The hash the cell of that shard must have; None where nothing that is proved says it."""
        k = self.version.data_shards
        table = self.table if index < k else self.own_tables.get(index)
        number = stripe * k + index if index < k else stripe
        return None if table is None else table[number * HASH_SIZE : (number + 1) * HASH_SIZE]


class CellRun(Protocol):
    """Cells of one shard, of consecutive stripes."""

    def next_in_thread(self, buffer: memoryview, seconds: float) -> int:
        """Take the next cell into the front of the buffer, unchecked, from a thread of `trio.to_thread`; its length. Raises
        `ReplicationError`, also after so many seconds."""


class RunBroken(Exception):
    """The next cell of shard `index` did not come, or not in time (`trio.TooSlowError`), or it is wrong; None: what k right ones
    give is wrong."""

    def __init__(self, index: int | None, error: Exception) -> None:
        super().__init__(f"shard {index}: {error}")
        self.index = index
        self.error = error


class StripeRun:
    """`next` from one thread. `sources` are k shards of the version; nothing but proved cells leaves here."""

    def __init__(
        self, content: StripedContent, codec: Codec, sources: Mapping[int, CellRun], buffer: memoryview, late_seconds: float
    ) -> None:
        """`buffer` has room for a stripe's cells, in the order of their shards."""
        self._content = content
        self._codec = codec
        self._sources = sources
        self._late_seconds = late_seconds
        size = content.geometry.cell_size
        self._cells = [buffer[index * size :][:size] for index in range(content.geometry.shard_count)]
        self.cells_read = self.cells_decoded = 0

    def next(self, stripe: int, wanted: Sequence[int]) -> dict[int, memoryview]:
        """These cells of the next stripe, in the buffer: proved, but for those of a shard whose table isn't known, which follow
        from k that are. Raises `RunBroken`, `trio.Cancelled`."""
        for index, source in self._sources.items():
            self._take(index, source, stripe)
        version = self._content.version
        made = {index: self._cells[index] for index in wanted if index not in self._sources}
        if made:
            given = {index: self._cells[index] for index in self._sources}
            self._codec.reconstruct(given, made, version.data_shards, version.parity_shards)
            for index, cell in made.items():
                if self._content.digest(index, stripe) not in (None, cell_hash(cell)):
                    raise RunBroken(
                        None, ShardDamaged(f"cell {index} of stripe {stripe}, decoded from right ones, fails its hash")
                    )
            self.cells_decoded += len(made)
        return {index: self._cells[index] for index in wanted}

    def _take(self, index: int, source: CellRun, stripe: int) -> None:
        cell, began = self._cells[index], time.monotonic()
        try:
            length = source.next_in_thread(cell, self._late_seconds)
        except ReplicationError as error:
            late = time.monotonic() - began >= self._late_seconds
            raise RunBroken(index, trio.TooSlowError() if late else error) from None
        if length != len(cell) or cell_hash(cell) != self._content.digest(index, stripe):
            raise RunBroken(index, ShardDamaged(f"cell {stripe} of shard {index} fails its hash"))
        self.cells_read += 1
