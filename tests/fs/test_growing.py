"""Files that stay open: when what they have so far is protected, and what voids that. No agents; the clock is the test's."""

import os
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ckptfs.cache import store_registry
from ckptfs.cache.catalog_format import Shard, ShardLayout, VersionState
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.seal import SealFailed
from ckptfs.cache.versions import ProtectedCommit
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, SetattrField
from ckptfs.fs.growing import BUSY_BYTES, MINUTE_SECONDS, PENDING_SECONDS

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)
SETTLE_SECONDS = 2.0
HOLDERS = [StoreId(bytes([number]) * 16) for number in range(1, 3)]


class Bench:
    """One node, and an agent's part played by hand."""

    def __init__(self, node: Any, clock: MockClock) -> None:
        self.node = node
        self.clock = clock
        self.revisions: dict[StoreId, int] = {}

    async def begin(self) -> None:
        for number, store in enumerate(HOLDERS):
            self.revisions[store] = await store_registry.register_store(self.node.kv, store, NodeId(f"h{number}"), "", "", {})

    async def after(self, seconds: float) -> None:
        self.clock.jump(seconds)
        await self.node.growing.look()

    async def open(self, content: bytes, name: bytes = b"log") -> tuple[int, int]:
        """A file that stays open; it is seen at once."""
        ino, fh = await self.node.create(name)
        await self.node.write(fh, content)
        await self.node.growing.look()
        return int(ino), int(fh)

    def waiting(self) -> list[tuple[int, int]]:
        """(inode, size) of the prefixes on their way."""
        return [(row.ino, row.size) for row in self.node.database.prefixes()]

    async def inode(self, ino: int) -> Any:
        return await self.node.namespace.inode(InodeNumber(ino))

    async def protect(self, ino: int) -> None:
        """What the agent does, checked bytes included."""
        (row,) = [row for row in self.node.database.prefixes() if row.ino == ino]
        version = await self.node.versions.version(row.vid)
        with open(self.node.segments.path_of(row.segment), "rb") as file:
            content = file.read(row.size)
        assert content_root(row.vid, row.size, version.cell_size, cell_table(content, version.cell_size)) == version.root
        shards = [Shard(store, b"h" * 16) for store in HOLDERS]
        commit = ProtectedCommit(row.ino, row.vid, ShardLayout.COPIES, 1, 1, version.cell_size, shards, self.revisions)
        assert await self.node.versions.commit_protected([commit]) == {row.vid}
        self.node.growing.protected([row.vid])

    async def shown(self, ino: int) -> int | None:
        """The size of what readers elsewhere may have, None for nothing."""
        inode = await self.inode(ino)
        if not inode.prefix_holds:
            return None
        return int((await self.node.versions.version(inode.prefix)).size)


@pytest.fixture
async def bench(start_node: StartNode, mock_clock: MockClock) -> Bench:
    bench = Bench(await start_node(), mock_clock)
    await bench.begin()
    return bench


async def test_what_was_synced_is_protected_if_the_file_is_not_closed_soon(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"first line\n")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS * 0.9)
    assert bench.waiting() == []
    await bench.after(SETTLE_SECONDS * 0.2)
    assert bench.waiting() == [(ino, 11)]
    assert await bench.shown(ino) is None
    await bench.protect(ino)
    assert await bench.shown(ino) == 11
    assert bench.waiting() == []
    assert await bench.node.state(ino) is VersionState.OPEN
    await bench.node.write(fh, b"more", 11)
    assert await bench.node.read(fh) == b"first line\nmore"


async def test_a_file_that_is_closed_after_its_sync_is_not_sent_twice(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"a checkpoint")
    await bench.node.fsync(fh)
    await bench.node.release(fh)
    await bench.after(SETTLE_SECONDS * 2)
    assert bench.waiting() == []
    await bench.node.settle()
    assert await bench.node.state(ino) is VersionState.LOCAL


async def test_without_a_sync_once_a_minute_and_only_if_there_is_something_new(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"line")
    await bench.after(MINUTE_SECONDS - 1)
    assert bench.waiting() == []
    await bench.after(1)
    assert bench.waiting() == [(ino, 4)]
    await bench.protect(ino)
    for _ in range(3):
        await bench.after(MINUTE_SECONDS)
        assert bench.waiting() == []
    await bench.node.write(fh, b"LINE")  # in place
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == [(ino, 4)]


async def test_a_file_that_is_being_saved_is_left_alone(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"x")
    path = bench.node.segments.path_of(bench.node.open_files.get(InodeNumber(ino)).segment)
    os.truncate(path, BUSY_BYTES + 100)  # a hole costs nothing; the times are those of a write
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == []
    os.utime(path, ns=(0, 0))  # that was long ago
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == [(ino, BUSY_BYTES + 100)]
    await bench.node.release(fh)


async def test_after_a_sync_a_longer_one_is_made_when_it_has_grown_by_an_eighth_or_within_a_minute(
    mock_clock: MockClock, bench: Bench
) -> None:
    ino, fh = await bench.open(b"x" * 800)
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    await bench.protect(ino)
    await bench.node.write(fh, b"y" * 99, 800)
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS * 2)
    assert bench.waiting() == []
    await bench.node.write(fh, b"y", 899)
    await bench.after(0)
    assert bench.waiting() == [(ino, 900)]
    await bench.protect(ino)
    await bench.node.write(fh, b"z", 900)
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS * 2)
    assert bench.waiting() == []
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == [(ino, 901)]


async def test_the_next_one_waits_ten_times_as_long_as_the_last_took(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"x")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    bench.clock.jump(7.0)
    await bench.protect(ino)
    await bench.node.write(fh, b"xxxx")
    await bench.node.fsync(fh)
    await bench.after(69.0)
    assert bench.waiting() == []
    await bench.after(1.0)
    assert bench.waiting() == [(ino, 4)]


@pytest.mark.parametrize("how", ["close", "truncate", "cut", "rename", "replace", "fallocate"])
@pytest.mark.parametrize("state", ["on its way", "protected"])
async def test_what_voids_a_prefix(mock_clock: MockClock, bench: Bench, how: str, state: str) -> None:
    node = bench.node
    ino, fh = await bench.open(b"0123456789")
    await node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    if state == "protected":
        await bench.protect(ino)
    prefix = (await bench.inode(ino)).prefix or (await bench.inode(ino)).prefix_next
    if how == "close":
        second = await node.open(ino, os.O_WRONLY)
        await node.release(second)
    elif how == "truncate":
        await node.open(ino, os.O_RDWR | os.O_TRUNC)
    elif how == "cut":
        body = fuse.SETATTR_IN.pack(SetattrField.SIZE, 0, 0, 5, *[0] * 12)
        await node.ask(Opcode.SETATTR, ino, body)
    elif how == "fallocate":
        await node.ask(Opcode.FALLOCATE, ino, fuse.FALLOCATE_IN.pack(fh, 0, 100, 0, 0))
    else:
        if how == "replace":
            await node.save(b"new", b"what is replaced")
        await node.rename(b"log", b"new")
    assert await bench.shown(ino) is None
    assert bench.waiting() == []
    assert await node.versions.version(prefix) is None if state == "on its way" else True
    await bench.after(SETTLE_SECONDS * 2)  # a new one is not long in coming
    if how != "truncate":
        assert [number for number, _ in bench.waiting()] == [ino]
        await bench.protect(ino)
        assert await bench.shown(ino) == (await node.getattr(ino)).size


async def test_readers_and_other_changes_void_nothing(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    await bench.protect(ino)
    await bench.node.release(await bench.node.open(ino))
    body = fuse.SETATTR_IN.pack(SetattrField.MODE, 0, 0, 0, *[0] * 7, 0o600, *[0] * 4)
    await bench.node.ask(Opcode.SETATTR, ino, body)
    await bench.node.write(fh, b"more", 10)
    assert await bench.shown(ino) == 10


async def test_the_last_close_voids_it_and_the_file_becomes_local(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    await bench.protect(ino)
    await bench.node.write(fh, b"more", 10)
    await bench.node.release(fh)
    assert await bench.shown(ino) is None
    await bench.node.settle()
    assert await bench.node.state(ino) is VersionState.LOCAL
    assert await bench.node.content(ino) == b"0123456789more"
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == []


async def test_a_rename_while_it_is_hashed_voids_it(mock_clock: MockClock, bench: Bench) -> None:
    """On another node, of which this process hears nothing."""
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    other = Namespace(bench.node.kv, StoreId(b"another store id"), 1, count(10**18).__next__)
    hashed = bench.node.growing._sealer.hash_prefix

    def hash_and_rename(candidate: Any) -> Any:
        trio.from_thread.run(other.rename, ROOT_INODE, b"log", ROOT_INODE, b"new")
        return hashed(candidate)

    bench.node.growing._sealer.hash_prefix = hash_and_rename
    await bench.after(SETTLE_SECONDS)
    assert bench.waiting() == []
    assert (await bench.inode(ino)).prefix_next is None


async def test_a_prefix_that_was_given_up_is_made_again_later_and_later(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"0123456789")
    pauses = []
    await bench.after(MINUTE_SECONDS)
    for _ in range(6):
        inode = await bench.inode(ino)
        await bench.node.versions.give_up_prefix(InodeNumber(ino), inode.prefix_next)
        await bench.after(PENDING_SECONDS)
        assert bench.waiting() == []
        seconds = 0
        while not bench.waiting():
            await bench.after(5)
            seconds += 5
        pauses.append(seconds)
    assert pauses == sorted(pauses), pauses
    assert pauses[-1] > 2 * MINUTE_SECONDS, pauses
    await bench.node.release(fh)


async def test_a_prefix_that_was_protected_without_our_hearing_it_is_found(mock_clock: MockClock, bench: Bench) -> None:
    ino, _ = await bench.open(b"0123456789")
    await bench.after(MINUTE_SECONDS)
    protected = bench.node.growing.protected
    bench.node.growing.protected = lambda vids: None
    await bench.protect(ino)
    bench.node.growing.protected = protected
    assert bench.waiting() == [(ino, 10)]
    await bench.after(PENDING_SECONDS)
    assert bench.waiting() == []
    assert bench.node.growing.exposure().files == 0


async def test_a_catalog_that_is_away_while_it_is_voided_is_asked_again(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    await bench.protect(ino)
    second = await bench.node.open(ino, os.O_WRONLY)
    transact = bench.node.kv.transact

    async def away(*_: object) -> None:
        raise CatalogUnavailable("as the test wants it")

    bench.node.kv.transact = away
    await bench.node.release(second)
    bench.node.kv.transact = transact
    assert await bench.shown(ino) == 10
    await bench.after(0)
    assert await bench.shown(ino) is None


async def test_what_a_death_would_lose(mock_clock: MockClock, bench: Bench) -> None:
    growing, database = bench.node.growing, bench.node.database
    assert growing.exposure() == (0, 0, None)
    ino, fh = await bench.open(b"0123456789")
    first = growing.exposure()
    assert (first.files, first.bytes) == (1, 10)
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    await bench.protect(ino)
    assert growing.exposure() == (0, 0, None)
    await bench.node.write(fh, b"more", 10)
    exposure = growing.exposure()
    assert (exposure.files, exposure.bytes) == (1, 4)
    assert exposure.oldest_ns > first.oldest_ns
    assert database.file(InodeNumber(ino)).exposed_ns == exposure.oldest_ns
    await bench.node.write(fh, b"in place")  # how much of it changed isn't known
    os.truncate(bench.node.segments.path_of(bench.node.open_files.get(InodeNumber(ino)).segment), 10)
    assert growing.exposure().bytes == 10


@pytest.mark.parametrize("state", ["on its way", "protected"])
async def test_after_a_kill_it_goes_on(mock_clock: MockClock, bench: Bench, start_node: StartNode, state: str) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    if state == "protected":
        await bench.protect(ino)
    bench.node.kill()
    bench.node = await start_node()
    if state == "on its way":
        assert bench.waiting() == [(ino, 10)]
        await bench.protect(ino)
    assert await bench.shown(ino) == 10
    await bench.node.write(fh, b"more", 10)
    await bench.node.release(fh)
    assert await bench.shown(ino) is None


async def test_a_prefix_whose_row_is_lost_is_given_up(mock_clock: MockClock, bench: Bench, start_node: StartNode) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    bench.node.database.remove_prefixes([InodeNumber(ino)])
    bench.node.kill()
    bench.node = await start_node()
    assert (await bench.inode(ino)).prefix_next is None
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == [(ino, 10)]


async def test_rows_of_what_is_closed_go(mock_clock: MockClock, bench: Bench, start_node: StartNode) -> None:
    ino, fh = await bench.open(b"0123456789")
    await bench.node.fsync(fh)
    await bench.after(SETTLE_SECONDS)
    bench.node.database.forget_handles()  # the connection ended: nobody has it open
    bench.node.kill()
    bench.node = await start_node()
    await bench.node.settle()
    await bench.after(0)
    assert bench.waiting() == []
    assert await bench.node.state(ino) is VersionState.LOCAL


async def test_a_mapping_that_outlives_close_keeps_it_growing(mock_clock: MockClock, bench: Bench) -> None:
    ino, fh = await bench.open(b"0123456789")
    segment = bench.node.open_files.get(InodeNumber(ino)).segment
    with open(bench.node.segments.path_of(segment), "r+b"):  # the kernel's view of it
        await bench.node.release(fh)
        await bench.node.settle()
        assert await bench.node.state(ino) is VersionState.OPEN
        await bench.after(MINUTE_SECONDS)
        assert bench.waiting() == [(ino, 10)]
    await bench.node.settle()
    assert await bench.node.state(ino) is VersionState.LOCAL


async def test_what_is_protected_survives_a_power_cut_at_home_too(mock_clock: MockClock, bench: Bench) -> None:
    """Else the shorter file that is left would take the place of what was protected."""
    ino, _ = await bench.open(b"0123456789")
    vid = (await bench.inode(ino)).open
    assert not (await bench.node.versions.version(vid)).durable
    await bench.after(MINUTE_SECONDS)
    assert (await bench.node.versions.version(vid)).durable


async def test_a_sync_that_fails_is_final(mock_clock: MockClock, bench: Bench) -> None:
    _, fh = await bench.open(b"0123456789")
    failure = OSError(5, "Input/output error")
    bench.node.growing._sealer.hash_prefix = lambda candidate: SealFailed(candidate, failure)
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == []
    assert await bench.node.errno(bench.node.fsync(fh)) == "EIO"


async def test_removed_files_and_failed_drives_have_none(mock_clock: MockClock, bench: Bench) -> None:
    _, removed = await bench.open(b"0123456789", b"removed")
    failed, _ = await bench.open(b"0123456789", b"failed")
    await bench.node.unlink(b"removed")
    bench.node.open_files.get(InodeNumber(failed)).sync_failed = True
    await bench.node.fsync(removed)
    await bench.after(MINUTE_SECONDS)
    assert bench.waiting() == []
