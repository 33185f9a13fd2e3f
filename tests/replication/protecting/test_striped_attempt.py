"""One attempt with real shard stores and holders that fail at chosen moments."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_format import Shard
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.codec import choose_codec
from ckptfs.replication.errors import NotEnoughDomains, PeerRefused, PeerUnreachable, RefusalReason
from ckptfs.replication.own_store import OwnSink, OwnStore
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.shard_format import ShardHeader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies
from ckptfs.replication.striped_attempt import (
    AttemptVoid,
    ContentChanged,
    ShardSink,
    StripedAttempt,
    stripe_buffer_size,
)
from ckptfs.replication.stripes import Geometry

pytestmark = pytest.mark.slow  # every attempt syncs five shards

VID = Vid(b"v" * 16)
CELL = 4096
K, M = 3, 2


class NoSegments:
    def path_of(self, segment: SegmentId) -> str:
        raise AssertionError("no segments here")


class FlakySink:
    """Fails when a chosen cell comes, or at the end."""

    def __init__(self, sink: OwnSink, fail_at: int | None, error: Exception) -> None:
        self._sink = sink
        self._fail_at = fail_at
        self._error = error
        self.resume_stripe = sink.resume_stripe

    async def send_cell(self, stripe: int, cell: memoryview, digest: bytes) -> None:
        if stripe == self._fail_at:
            if isinstance(self._error, TimeoutError):
                await trio.sleep_forever()
            raise self._error
        await self._sink.send_cell(stripe, cell, digest)

    def send_cell_in_thread(self, stripe: int, cell: memoryview, digest: bytes) -> bool:
        return False

    async def send_zeros(self, stripe: int, count: int) -> None:
        if self._fail_at in range(stripe, stripe + count):
            await self._sink.send_zeros(stripe, 1)  # and then the connection is gone
            raise self._error
        await self._sink.send_zeros(stripe, count)

    async def finish(self, own_table: bytes, content_table: bytes) -> bytes:
        if self._fail_at == -1:
            raise self._error
        return await self._sink.finish(own_table, content_table)

    async def aclose(self) -> None:
        await self._sink.aclose()


class Stage:
    """Eight stores on disk, a segment, a list of what goes wrong, each once: (store number, cell or -1 for the end, error)."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory = directory
        self.stores: dict[StoreId, OwnStore] = {}
        self.shard_stores: dict[StoreId, ShardStore] = {}
        self.closing: list[Callable[[], None]] = []
        for number in range(8):
            place = directory / f"store-{number}"
            place.mkdir()
            database = AgentDatabase(place / "agent.db")
            copies = SmallCopies(place / "copies.db")
            self.closing += [database.close, copies.close]
            store = StoreId(bytes([number]) * 16)
            self.shard_stores[store] = ShardStore(place / "shards", database)
            self.stores[store] = OwnStore(self.shard_stores[store], copies, NoSegments())
        self.ids = list(self.stores)
        self.faults: list[tuple[int, int, Exception]] = []
        self.refused: set[int] = set()
        self.hanging: set[int] = set()
        self.opened: list[tuple[int, int, int]] = []
        self.failures: list[tuple[int, Exception]] = []
        self.spare = [6, 7]
        self.content = os.urandom(size)
        self.path = directory / "segment"
        self.path.write_bytes(self.content)
        self.descriptor = os.open(self.path, os.O_RDONLY)
        self.still_wanted_error: Exception | None = None
        self.threads = QuietThreads()
        self.geometry = Geometry(size, CELL, K, M)

    def close(self) -> None:
        os.close(self.descriptor)
        self.threads.__exit__()
        for close in self.closing:
            close()

    def attempt(
        self, *, k: int = K, m: int = M, root: bytes | None = None, stripes: int = 3, replace_after_seconds: float = 0.3
    ) -> StripedAttempt:
        size = len(self.content)
        geometry = Geometry(size, CELL, k, m)

        async def open_sink(store: StoreId, index: int) -> ShardSink:
            number = self.ids.index(store)
            if number in self.refused:
                raise PeerUnreachable(f"store {number} is away")
            header = ShardHeader(VID, index, k, m, CELL, size)
            sink = await self.stores[store].put_shard(header, InodeNumber(7), b"a/b", 11)
            self.opened.append((number, index, sink.resume_stripe))
            for fault in self.faults:
                if fault[0] == number:
                    self.faults.remove(fault)
                    return FlakySink(sink, fault[1], fault[2])
            return sink

        async def replace(index: int, used: Sequence[StoreId]) -> StoreId:
            for number in self.spare:
                if self.ids[number] not in used and number not in self.refused:
                    return self.ids[number]
            raise NotEnoughDomains("no store is left")

        def note_failure(store: StoreId, error: Exception) -> None:
            self.failures.append((self.ids.index(store), error))

        async def still_wanted() -> None:
            if self.still_wanted_error is not None:
                raise self.still_wanted_error

        return StripedAttempt(
            VID,
            root or content_root(VID, size, CELL, cell_table(self.content, CELL)),
            geometry,
            self.descriptor,
            memoryview(bytearray(stripes * stripe_buffer_size(geometry))),
            choose_codec("numpy"),
            self.threads,
            open_sink,
            replace,
            note_failure,
            still_wanted,
            lambda store: self.ids.index(store) in self.hanging,
            replace_after_seconds=replace_after_seconds,
            hang_seconds=0.3,
        )

    def first(self, count: int) -> list[StoreId]:
        return self.ids[:count]

    def content_of(self, shards: Sequence[Shard], k: int = K) -> bytes:
        """The content, from the data shards."""
        parts = []
        readers = [self.shard_stores[shard.store].open(VID, index) for index, shard in enumerate(shards)]
        for reader, shard in zip(readers, shards, strict=True):
            assert reader.footer.root == shard.root
            assert reader.footer.ino == 7
            assert reader.footer.path_hint == b"a/b"
        buffer = memoryview(bytearray(CELL))
        for stripe in range(readers[0].header.stripe_count):
            for index in range(k):
                parts.append(bytes(buffer[: readers[index].read_cell(stripe, buffer)]))
            for index in range(k, len(readers)):
                readers[index].read_cell(stripe, buffer)
        for reader in readers:
            reader.close()
        return b"".join(parts)

    def complete_shards(self) -> int:
        return sum(len(store.list()) for store in self.shard_stores.values())


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    stage = Stage(tmp_path, getattr(request, "param", 10 * K * CELL + 100))
    yield stage
    stage.close()


AWAY = PeerUnreachable("reset")


@pytest.mark.parametrize("stage", [1, CELL - 1, CELL, CELL + 1, K * CELL, K * CELL + 1, 7 * K * CELL - 5], indirect=True)
async def test_every_store_gets_its_shard(stage: Stage) -> None:
    shards = await stage.attempt().run(stage.first(5))
    assert [shard.store for shard in shards] == stage.first(5)
    assert stage.content_of(shards) == stage.content


async def test_one_buffer_is_enough(stage: Stage) -> None:
    shards = await stage.attempt(stripes=1).run(stage.first(5))
    assert stage.content_of(shards) == stage.content


@pytest.mark.parametrize("at", [0, 4, 9, -1])
async def test_a_holder_that_breaks_off_is_gone_on_with(stage: Stage, at: int) -> None:
    stage.faults = [(1, at, AWAY)]
    shards = await stage.attempt(replace_after_seconds=60.0).run(stage.first(5))
    assert [shard.store for shard in shards] == stage.first(5)
    assert stage.content_of(shards) == stage.content
    last = [opened for opened in stage.opened if opened[0] == 1][-1]
    assert last[2] == (stage.geometry.shard_cell_count(1) if at == -1 else at)


async def test_a_holder_that_stays_away_is_replaced(stage: Stage) -> None:
    stage.faults = [(1, 4, AWAY)]
    attempt = stage.attempt()
    original = stage.failures

    class Watch(list[tuple[int, Exception]]):
        def append(self, item: tuple[int, Exception]) -> None:
            super().append(item)
            stage.refused.add(1)

    stage.failures = Watch(original)
    shards = await attempt.run(stage.first(5))
    assert [stage.ids.index(shard.store) for shard in shards] == [0, 6, 2, 3, 4]
    assert stage.content_of(shards) == stage.content


async def test_holders_that_are_away_from_the_start_are_replaced_at_once(stage: Stage) -> None:
    stage.refused = {0, 4}
    shards = await stage.attempt().run(stage.first(5))
    assert sorted(stage.ids.index(shard.store) for shard in shards) == [1, 2, 3, 6, 7]
    assert stage.content_of(shards) == stage.content


async def test_a_holder_that_hangs_is_replaced(stage: Stage) -> None:
    stage.faults = [(1, 4, TimeoutError())]
    stage.hanging = {1}
    shards = await stage.attempt().run(stage.first(5))
    assert [stage.ids.index(shard.store) for shard in shards] == [0, 6, 2, 3, 4]
    assert stage.content_of(shards) == stage.content


async def test_a_holder_that_is_slow_but_answers_pings_is_waited_for(stage: Stage) -> None:
    stage.faults = [(1, 4, TimeoutError())]
    with trio.move_on_after(1.0) as waited:
        await stage.attempt().run(stage.first(5))
    assert waited.cancelled_caught
    assert stage.failures == []


async def test_too_few_holders_leave_no_complete_shard(stage: Stage) -> None:
    stage.faults = [(3, 5, AWAY)]
    stage.spare = []

    class Watch(list[tuple[int, Exception]]):
        def append(self, item: tuple[int, Exception]) -> None:
            stage.refused.add(item[0])

    stage.failures = Watch()
    with pytest.raises(NotEnoughDomains):
        await stage.attempt().run(stage.first(5))
    assert stage.complete_shards() == 0


async def test_a_full_store_is_replaced(stage: Stage) -> None:
    stage.faults = [(2, 3, PeerRefused(RefusalReason.FULL, "no space"))]
    shards = await stage.attempt().run(stage.first(5))
    assert [stage.ids.index(shard.store) for shard in shards] == [0, 1, 6, 3, 4]
    assert stage.content_of(shards) == stage.content


async def test_a_smaller_code_after_shards_of_a_larger_one(stage: Stage) -> None:
    """The end of the first attempt was cut off: complete shards of 3+2 are on five stores, only four are left."""
    await stage.attempt().run(stage.first(5))
    stage.refused = {4, 6, 7}
    shards = await stage.attempt(k=2, m=2).run(stage.first(4))
    assert {shard.store for shard in shards} == set(stage.first(4))
    assert stage.content_of(shards, k=2) == stage.content


async def test_content_that_is_not_what_was_hashed_never_becomes_a_shard(stage: Stage) -> None:
    with pytest.raises(ContentChanged):
        await stage.attempt(root=b"r" * 16).run(stage.first(5))
    assert stage.complete_shards() == 0


async def test_a_segment_cut_short_never_becomes_a_shard(stage: Stage) -> None:
    attempt = stage.attempt()
    os.truncate(stage.path, len(stage.content) - 1)
    with pytest.raises(ContentChanged):
        await attempt.run(stage.first(5))
    assert stage.complete_shards() == 0


async def test_what_is_read_again_must_be_what_it_was(stage: Stage) -> None:
    class Watch(list[tuple[int, Exception]]):
        def append(self, item: tuple[int, Exception]) -> None:
            with open(stage.path, "r+b") as file:
                file.seek(9 * K * CELL)
                file.write(b"changed")

    stage.faults = [(1, -1, AWAY), (2, 8, AWAY)]
    attempt = stage.attempt()
    stage.failures = Watch()
    with pytest.raises(ContentChanged):
        await attempt.run(stage.first(5))
    assert stage.complete_shards() == 0


async def test_a_version_nobody_wants_any_more_gets_no_footers(stage: Stage) -> None:
    stage.still_wanted_error = AttemptVoid("deleted")
    with pytest.raises(AttemptVoid):
        await stage.attempt().run(stage.first(5))
    assert stage.complete_shards() == 0


async def test_a_second_attempt_goes_on_where_the_first_stopped(stage: Stage) -> None:
    stage.faults = [(0, 10, PeerRefused(RefusalReason.FULL, "no space"))]
    stage.spare = []
    with pytest.raises(NotEnoughDomains):
        await stage.attempt().run(stage.first(5))
    stage.opened.clear()
    shards = await stage.attempt().run(stage.first(5))
    assert stage.content_of(shards) == stage.content
    assert all(resume > 0 for _, _, resume in stage.opened)


@pytest.mark.parametrize("fault", [None, (1, 9, AWAY), (3, -1, AWAY)])
async def test_a_hole_is_neither_read_nor_stored(stage: Stage, fault: tuple[int, int, Exception] | None) -> None:
    """Stripes that are holes, beside some that are so in part, and at the end."""
    stage.faults = [fault] if fault else []
    stripe, size = K * CELL, len(stage.content)
    os.truncate(stage.path, 0)
    os.truncate(stage.path, size)
    with open(stage.path, "r+b") as file:
        for at in (0, 3 * stripe + CELL, 6 * stripe - 1):
            file.seek(at)
            file.write(b"data")
    os.sync()
    stage.content = stage.path.read_bytes()
    shards = await stage.attempt().run(stage.first(5))
    assert stage.content_of(shards) == stage.content
    for index, shard in enumerate(shards):
        status = os.stat(stage.shard_stores[shard.store].path_of(VID, index))
        assert status.st_blocks * 512 < status.st_size - 4 * CELL
