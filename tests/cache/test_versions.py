"""The life of versions: what each step answers, refuses and leaves in the catalog."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from ckptfs.cache import store_registry
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import (
    NO_SEGMENT,
    Settings,
    Shard,
    ShardLayout,
    StoreState,
    Version,
    VersionState,
    inode_key,
    version_key,
)
from ckptfs.cache.catalog_kv import Compare, KeyValue, Operation, Put, TransactionResult
from ckptfs.cache.errors import CatalogFull, ContentMoved, DamagedData, HeldElsewhere, NoSuchName, NotPermitted, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, StoreId, Vid, new_segment_id, new_vid
from ckptfs.cache.namespace import Created, Namespace
from ckptfs.cache.version_states import TRANSITIONS, version_step
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, RepairedCommit, Versions

OpenCatalog = Callable[..., Any]
ROOT = ROOT_INODE
ME, OTHER = StoreId(b"A" * 16), StoreId(b"B" * 16)
HOLDERS = [StoreId(bytes([number]) * 16) for number in range(1, 7)]
SETTINGS = Settings(1, b"C" * 16, 4, 2, 1 << 20)
GONE = None


class World:
    """Two nodes on one catalog with six stores; the catalog must be consistent at the end of each test."""

    def __init__(self, kv: KeyValue) -> None:
        self.kv = kv
        clock = count(1000).__next__
        self.tree = Namespace(kv, ME, 1, clock)
        self.mine = Versions(kv, ME, 1, clock)
        self.theirs = Versions(kv, OTHER, 1, clock)
        self.their_tree = Namespace(kv, OTHER, 1, clock)
        self.revisions: dict[StoreId, int] = {}

    async def start(self) -> None:
        await self.tree.format_if_empty(SETTINGS)
        for number, store in enumerate(HOLDERS):
            self.revisions[store] = await store_registry.register_store(
                self.kv, store, NodeId(f"node-{number}"), "127.0.0.1:1", "/store", {}
            )

    async def make(self, name: bytes) -> Created:
        return await self.tree.create_file(ROOT, name, 0o644, 0, 0, new_segment_id())

    async def make_local(self, name: bytes, size: int = 10) -> Created:
        made = await self.make(name)
        assert (await self.mine.commit_local([local(made.ino, made.vid, size)])).vids == {made.vid}
        return made

    async def make_protected(self, name: bytes) -> Created:
        made = await self.make_local(name)
        assert await self.mine.commit_protected([self.protected(made.ino, made.vid)]) == {made.vid}
        return made

    def protected(self, ino: InodeNumber, vid: Vid, **changes: Any) -> ProtectedCommit:
        shards = [Shard(store, bytes([index]) * 16) for index, store in enumerate(HOLDERS)]
        return ProtectedCommit(ino, vid, ShardLayout.STRIPED, 4, 2, 4096, shards, dict(self.revisions))._replace(**changes)

    async def state(self, vid: Vid) -> VersionState | None:
        version = await self.mine.version(vid)
        return None if version is None else version.state


def local(ino: InodeNumber, vid: Vid, size: int = 10, *, release_writer: bool = True) -> LocalCommit:
    return LocalCommit(ino, vid, size, b"r" * 16, 4096, 500, release_writer)


@pytest.fixture
async def world(kv: KeyValue) -> AsyncIterator[World]:
    world = World(kv)
    await world.start()
    yield world
    assert await catalog_problems(kv) == []


# From open to protected


async def test_a_version_that_became_local_by_an_attempt_nobody_heard_of_is_local(world: World) -> None:
    made = await world.make_local(b"a")
    assert (await world.mine.commit_local([local(made.ino, made.vid)])).vids == {made.vid}, "as its node's next session tries"
    assert (await world.mine.commit_local([local(made.ino, made.vid, 11)])).vids == set(), "other bytes"
    assert (await world.theirs.commit_local([local(made.ino, made.vid)])).vids == set()


async def test_a_file_becomes_local(world: World) -> None:
    made = await world.make(b"f")
    committed = await world.mine.commit_local([local(made.ino, made.vid, 1234)])
    assert committed == ({made.vid}, [])
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.open, inode.prot, inode.writer, inode.size, inode.mtime_ns) == (
        made.vid,
        None,
        None,
        None,
        1234,
        500,
    )
    assert inode.ctime_ns == made.inode.ctime_ns
    version = await world.mine.version(made.vid)
    assert version is not None
    assert (version.state, version.durable, version.size, version.root, version.cell_size) == (
        VersionState.LOCAL,
        True,
        1234,
        b"r" * 16,
        4096,
    )


async def test_a_file_becomes_protected(world: World) -> None:
    made = await world.make_local(b"f")
    assert await world.mine.commit_protected([world.protected(made.ino, made.vid)]) == {made.vid}
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.prot) == (made.vid, made.vid)
    version = await world.mine.version(made.vid)
    assert version is not None
    assert (version.state, version.data_shards, version.parity_shards) == (VersionState.PROTECTED, 4, 2)
    assert [shard.store for shard in version.shards] == HOLDERS
    # Nothing happens a second time.
    assert await world.mine.commit_protected([world.protected(made.ino, made.vid)]) == set()
    assert (await world.mine.commit_local([local(made.ino, made.vid)])).vids == set()


async def test_an_empty_file_is_protected_by_the_catalog_alone(world: World) -> None:
    made = await world.make_local(b"f", 0)
    commit = world.protected(
        made.ino, made.vid, layout=ShardLayout.COPIES, data_shards=1, parity_shards=0, cell_size=1, shards=[]
    )
    with pytest.raises(ValueError, match="no shards"):
        await world.mine.commit_protected([world.protected(made.ino, made.vid)])
    assert await world.mine.commit_protected([commit]) == {made.vid}
    version = await world.mine.version(made.vid)
    assert version is not None
    assert version.cell_size == 4096  # its root was computed over these


async def test_an_open_file_is_not_protected(world: World) -> None:
    made = await world.make(b"f")
    assert await world.mine.commit_protected([world.protected(made.ino, made.vid)]) == set()


async def test_only_the_home_makes_local(world: World) -> None:
    made = await world.make(b"f")
    assert (await world.theirs.commit_local([local(made.ino, made.vid)])).vids == set()
    assert await world.state(made.vid) is VersionState.OPEN


async def test_another_node_may_protect(world: World) -> None:
    made = await world.make_local(b"f")
    assert await world.theirs.commit_protected([world.protected(made.ino, made.vid)]) == {made.vid}


async def test_a_holder_that_left_voids_the_attempt(world: World) -> None:
    one, two = await world.make_local(b"one"), await world.make_local(b"two")
    revisions = dict(world.revisions)
    await store_registry.set_state(world.kv, HOLDERS[5], StoreState.LOST)
    four = [Shard(store, b"r" * 16) for store in HOLDERS[:4]]
    good = world.protected(
        two.ino, two.vid, data_shards=2, shards=four, store_revisions={store: revisions[store] for store in HOLDERS[:4]}
    )
    assert await world.mine.commit_protected([world.protected(one.ino, one.vid), good]) == {two.vid}
    assert await world.state(one.vid) is VersionState.LOCAL
    assert await world.state(two.vid) is VersionState.PROTECTED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_shards": 3}, "6 shards are not 3"),
        ({"data_shards": 0, "parity_shards": 6}, "6 shards are not 0"),
        ({"shards": []}, "0 shards"),
        ({"cell_size": 8192}, "cells"),
        ({"store_revisions": {}}, "revision"),
        ({"shards": [Shard(store, b"short") for store in HOLDERS]}, "16 bytes"),
    ],
)
async def test_commits_that_contradict_themselves(world: World, changes: dict[str, Any], message: str) -> None:
    made = await world.make_local(b"f")
    with pytest.raises(ValueError, match=message):
        await world.mine.commit_protected([world.protected(made.ino, made.vid, **changes)])
    assert await world.state(made.vid) is VersionState.LOCAL


async def test_a_shard_moves_to_another_holder(world: World) -> None:
    made = await world.make_protected(b"f")
    spare = StoreId(b"S" * 16)
    revision = await store_registry.register_store(world.kv, spare, NodeId("spare"), "127.0.0.1:1", "/store", {})
    before = await world.mine.version(made.vid)
    assert before is not None
    moved = {2: Shard(spare, before.shards[2].root)}
    repaired = RepairedCommit(made.vid, before.shards, moved, {spare: revision})
    with pytest.raises(ValueError, match="another root"):
        await world.theirs.commit_repaired(repaired._replace(moved={2: Shard(spare, b"x" * 16)}))
    with pytest.raises(ValueError, match="record"):
        await world.theirs.commit_repaired(repaired._replace(store_revisions={}))
    assert not await world.theirs.commit_repaired(repaired._replace(store_revisions={spare: revision - 1}))
    assert await world.theirs.commit_repaired(repaired)
    after = await world.mine.version(made.vid)
    assert after is not None
    assert [shard.store for shard in after.shards] == [*HOLDERS[:2], spare, *HOLDERS[3:]]
    assert msgspec.structs.replace(after, shards=before.shards) == before
    assert not await world.theirs.commit_repaired(repaired)  # the shards are no longer where that repair saw them


async def test_nothing_moves_to_a_holder_that_left_or_of_a_version_that_was_replaced(world: World) -> None:
    kept, replaced = await world.make_protected(b"kept"), await world.make_protected(b"replaced")
    spare = StoreId(b"S" * 16)
    revision = await store_registry.register_store(world.kv, spare, NodeId("spare"), "127.0.0.1:1", "/store", {})

    def repaired(vid: Vid) -> RepairedCommit:
        before = world.protected(kept.ino, vid).shards
        return RepairedCommit(vid, before, {0: Shard(spare, before[0].root)}, {spare: revision})

    await world.tree.unlink(ROOT, b"replaced")
    assert not await world.mine.commit_repaired(repaired(replaced.vid))
    await store_registry.set_state(world.kv, spare, StoreState.LOST)
    assert not await world.mine.commit_repaired(repaired(kept.vid))
    for made in (kept, replaced):
        version = await world.mine.version(made.vid)
        assert version is not None
        assert spare not in [shard.store for shard in version.shards]


async def test_many_in_few_transactions(world: World) -> None:
    made = [await world.make(b"%d" % number) for number in range(100)]
    before = await world.kv.revision()
    committed = await world.mine.commit_local([local(one.ino, one.vid) for one in made])
    assert committed.vids == {one.vid for one in made}
    assert await world.kv.revision() - before == 2  # 128 compares, two each
    before = await world.kv.revision()
    assert await world.mine.commit_protected([world.protected(one.ino, one.vid) for one in made]) == committed.vids
    assert await world.kv.revision() - before == 2


async def test_one_that_is_gone_does_not_hold_up_the_others(world: World) -> None:
    made = [await world.make(b"%d" % number) for number in range(5)]
    await world.tree.unlink(ROOT, b"2")
    committed = await world.mine.commit_local([local(one.ino, one.vid) for one in made])
    assert committed.vids == {one.vid for one in made} - {made[2].vid}
    await world.tree.unlink(ROOT, b"3")
    protected = await world.mine.commit_protected([world.protected(one.ino, one.vid) for one in made])
    assert protected == {made[number].vid for number in (0, 1, 4)}


class Interfering:
    """A `KeyValue` that does something of its own right before the next transaction."""

    def __init__(self, kv: KeyValue) -> None:
        self._kv = kv
        self.before: Callable[[], Awaitable[object]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        before, self.before = self.before, None
        if before is not None:
            await before()
        return await self._kv.transact(compares, operations)


async def test_a_batch_that_loses_is_committed_one_by_one(world: World) -> None:
    made = [await world.make(b"%d" % number) for number in range(4)]
    interfering = Interfering(world.kv)
    versions = Versions(interfering, ME, 1, lambda: 5)
    interfering.before = lambda: world.tree.unlink(ROOT, b"1")
    committed = await versions.commit_local([local(one.ino, one.vid) for one in made])
    assert committed.vids == {made[number].vid for number in (0, 2, 3)}
    interfering.before = lambda: store_registry.set_state(world.kv, HOLDERS[0], StoreState.DRAINING)
    assert await versions.commit_protected([world.protected(one.ino, one.vid) for one in made]) == set()


async def test_every_step_begins_again_when_it_loses(world: World) -> None:
    made = await world.make(b"f")
    interfering = Interfering(world.kv)
    versions = Versions(interfering, ME, 1, lambda: 5)

    async def touch() -> None:
        entry = await world.kv.get(inode_key(made.ino))
        assert entry is not None
        await world.kv.transact([], [Put(entry.key, entry.value)])

    interfering.before = touch
    assert (await versions.commit_local([local(made.ino, made.vid, release_writer=False)])).vids == {made.vid}
    interfering.before = touch
    assert await versions.release_writer(made.ino, made.vid)
    interfering.before = touch
    opened = await versions.open_for_writing(made.ino, truncate_to_new_segment=None)
    interfering.before = touch
    await versions.mark_durable(opened.vid)
    interfering.before = touch
    assert (await versions.commit_local([local(made.ino, opened.vid)])).vids == {opened.vid}


# Opening for writing


async def test_a_home_moves_with_the_content_it_was_copied_from(world: World) -> None:
    made = await world.make_protected(b"f")
    segment = new_segment_id()
    opened = await world.theirs.move_home(made.ino, segment, made.vid)
    assert (opened.segment, opened.version.home, opened.inode.cur) == (segment, OTHER, made.vid)
    with pytest.raises(HeldElsewhere):
        await world.mine.move_home(made.ino, new_segment_id(), made.vid)


async def test_a_home_does_not_move_with_content_that_was_replaced(world: World) -> None:
    """The copy was made; before the transaction, and in it, the file gets other content."""
    made = await world.make_protected(b"f")
    interfering = Interfering(world.kv)
    versions = Versions(interfering, OTHER, 1, lambda: 5)

    async def rewrite() -> None:
        opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
        assert (await world.mine.commit_local([local(made.ino, opened.vid)])).vids == {opened.vid}

    interfering.before = rewrite
    with pytest.raises(ContentMoved):
        await versions.move_home(made.ino, new_segment_id(), made.vid)
    with pytest.raises(ContentMoved):
        await versions.move_home(made.ino, new_segment_id(), None)
    inode = await world.tree.inode(made.ino)
    assert (inode.open, inode.writer) == (None, None)


async def test_opening_again_while_writing_commits_nothing(world: World) -> None:
    made = await world.make(b"f")
    before = await world.kv.revision()
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert (opened.vid, opened.carried_on, opened.previous) == (made.vid, True, None)
    assert await world.kv.revision() == before


async def test_a_later_incarnation_of_the_home_goes_on(world: World) -> None:
    made = await world.make(b"f")
    later = Versions(world.kv, ME, 2, lambda: 5)
    opened = await later.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert opened.vid == made.vid
    inode = await world.tree.inode(made.ino)
    assert inode.writer is not None
    assert (inode.writer.incarnation, inode.epoch) == (2, 2)


async def test_two_nodes_do_not_write_one_file(world: World) -> None:
    made = await world.make(b"f")
    for segment in (None, new_segment_id()):
        with pytest.raises(HeldElsewhere, match="being written"):
            await world.theirs.open_for_writing(made.ino, truncate_to_new_segment=segment)


async def test_a_local_version_carries_on_in_place(world: World) -> None:
    made = await world.make_local(b"f")
    before = await world.mine.version(made.vid)
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert before is not None
    assert opened.previous == (made.vid, before)
    assert opened.carried_on
    assert opened.segment == opened.version.segment == before.segment
    assert opened.version.durable
    assert await world.state(made.vid) is GONE
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.open, inode.epoch) == (None, opened.vid, 2)
    committed = await world.mine.commit_local([local(made.ino, opened.vid, 20)])
    assert committed == ({opened.vid}, [])


async def test_a_protected_version_gives_its_segment_up(world: World) -> None:
    """Its shards stay; nobody may take the bytes of the segment, which change from now on, for it."""
    made = await world.make_protected(b"f")
    before = await world.mine.version(made.vid)
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    after = await world.mine.version(made.vid)
    assert before is not None
    assert after is not None
    assert opened.segment == before.segment
    assert after.segment == NO_SEGMENT
    assert after.shards == before.shards
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.prot, inode.open) == (made.vid, made.vid, opened.vid)
    committed = await world.mine.commit_local([local(made.ino, opened.vid)])
    assert committed == ({opened.vid}, [])
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.prot) == (opened.vid, made.vid)
    assert await world.mine.commit_protected([world.protected(made.ino, opened.vid)]) == {opened.vid}
    assert await world.state(made.vid) is VersionState.DEAD


async def test_what_is_rewritten_in_place_is_durably_so_before_a_byte_changes(world: World) -> None:
    barriers: list[int] = []
    interfering = Interfering(world.kv)

    async def make_durable() -> None:
        barriers.append(await world.kv.revision())

    interfering.make_durable = make_durable  # type: ignore[attr-defined]
    versions = Versions(interfering, ME, 1, lambda: 5)
    made = await world.make_local(b"f")
    await versions.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert barriers == [await world.kv.revision()]


async def test_truncation_shows_the_old_content_until_the_new_is_local(world: World) -> None:
    made = await world.make_local(b"f")
    before = await world.mine.version(made.vid)
    segment = new_segment_id()
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=segment)
    assert (opened.carried_on, opened.previous, opened.segment) == (False, None, segment)
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.open, inode.size) == (made.vid, opened.vid, 10)
    committed = await world.mine.commit_local([local(made.ino, opened.vid, 3)])
    assert committed == ({opened.vid}, [(made.vid, before)])
    assert await world.state(made.vid) is GONE


async def test_truncation_of_a_protected_file_keeps_it_until_the_new_is_protected(world: World) -> None:
    made = await world.make_protected(b"f")
    first = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    assert (await world.mine.commit_local([local(made.ino, first.vid)])).freed == []
    second = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    committed = await world.mine.commit_local([local(made.ino, second.vid)])
    assert [vid for vid, _ in committed.freed] == [first.vid]
    assert (await world.tree.inode(made.ino)).prot == made.vid
    assert await world.mine.commit_protected([world.protected(made.ino, second.vid)]) == {second.vid}
    assert await world.state(made.vid) is VersionState.DEAD


async def test_truncation_while_writing_ends_what_was_open(world: World) -> None:
    made = await world.make(b"f")
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    assert opened.previous is not None
    assert opened.previous[0] == made.vid
    assert await world.state(made.vid) is GONE
    assert (await world.mine.commit_local([local(made.ino, made.vid)])).vids == set()


async def test_the_home_moves_with_truncation_only(world: World) -> None:
    made = await world.make_local(b"f")
    with pytest.raises(HeldElsewhere, match="bytes"):
        await world.theirs.open_for_writing(made.ino, truncate_to_new_segment=None)
    opened = await world.theirs.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    assert opened.version.home == OTHER
    committed = await world.theirs.commit_local([local(made.ino, opened.vid)])
    assert [(vid, version.home) for vid, version in committed.freed] == [(made.vid, ME)]


async def test_only_regular_files_are_opened(world: World) -> None:
    ino, _ = await world.tree.make_directory(ROOT, b"d", 0o755, 0, 0)
    with pytest.raises(NotPermitted):
        await world.mine.open_for_writing(ino, truncate_to_new_segment=None)
    with pytest.raises(NoSuchName):
        await world.mine.open_for_writing(InodeNumber(999), truncate_to_new_segment=None)


async def test_a_rewrite_voids_the_protection_of_what_it_rewrites(world: World) -> None:
    made = await world.make_local(b"f")
    await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert await world.mine.commit_protected([world.protected(made.ino, made.vid)]) == set()


async def test_the_writer_is_released(world: World) -> None:
    made = await world.make(b"f")
    assert not await world.mine.release_writer(made.ino, made.vid)  # still open
    await world.mine.commit_local([local(made.ino, made.vid, release_writer=False)])
    with pytest.raises(HeldElsewhere):
        await world.theirs.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    assert not await world.theirs.release_writer(made.ino, made.vid)
    assert not await world.mine.release_writer(made.ino, new_vid())
    assert await world.mine.release_writer(made.ino, made.vid)
    assert not await world.mine.release_writer(made.ino, made.vid)
    assert not await world.mine.release_writer(InodeNumber(999), made.vid)
    await world.theirs.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())


async def test_the_durable_mark(world: World) -> None:
    made = await world.make(b"f")
    await world.mine.mark_durable(made.vid)
    revision = await world.kv.revision()
    await world.mine.mark_durable(made.vid)
    await world.mine.mark_durable(new_vid())
    assert await world.kv.revision() == revision
    version = await world.mine.version(made.vid)
    assert version is not None
    assert version.durable


# Removing and replacing (R1)


async def test_removing_ends_versions(world: World) -> None:
    made = await world.make_protected(b"f")
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    removed = await world.tree.unlink(ROOT, b"f")
    assert {vid for vid, _ in removed.dead} == {made.vid, opened.vid}
    assert await world.state(opened.vid) is GONE
    tombstone = await world.mine.version(made.vid)
    assert tombstone is not None
    assert (tombstone.state, len(tombstone.shards)) == (VersionState.DEAD, 6)
    assert tombstone.dead_at_ns >= 1000
    assert (await world.mine.commit_local([local(made.ino, opened.vid)])).vids == set()


async def test_a_replacement_remembers_the_protected_version(world: World) -> None:
    old, new = await world.make_protected(b"f"), await world.make_local(b"new")
    renamed = await world.tree.rename(ROOT, b"new", ROOT, b"f")
    assert renamed.replaced is not None
    assert renamed.replaced.dead == []
    assert (await world.tree.inode(new.ino)).prev == old.vid
    assert await world.state(old.vid) is VersionState.PROTECTED
    assert await world.mine.commit_protected([world.protected(new.ino, new.vid)]) == {new.vid}
    assert (await world.tree.inode(new.ino)).prev is None
    assert await world.state(old.vid) is VersionState.DEAD


async def test_a_protected_replacement_needs_no_memory(world: World) -> None:
    old, _ = await world.make_protected(b"f"), await world.make_protected(b"new")
    renamed = await world.tree.rename(ROOT, b"new", ROOT, b"f")
    assert renamed.replaced is not None
    assert [vid for vid, _ in renamed.replaced.dead] == [old.vid]
    assert await world.state(old.vid) is VersionState.DEAD


async def test_a_chain_of_replacements_remembers_the_last_protected_version(world: World) -> None:
    first = await world.make_protected(b"f")
    second = await world.make_local(b"second")
    await world.tree.rename(ROOT, b"second", ROOT, b"f")
    third = await world.make_local(b"third")
    renamed = await world.tree.rename(ROOT, b"third", ROOT, b"f")
    assert renamed.replaced is not None
    assert [vid for vid, _ in renamed.replaced.dead] == [second.vid]
    assert (await world.tree.inode(third.ino)).prev == first.vid


async def test_an_open_replacement_remembers_the_local_version(world: World) -> None:
    """write, close, rename over the old file, power cut: the old content shows, not nothing."""
    old = await world.make_local(b"f")
    new = await world.make(b"new")
    renamed = await world.tree.rename(ROOT, b"new", ROOT, b"f")
    assert renamed.replaced is not None
    assert renamed.replaced.dead == []
    assert (await world.tree.inode(new.ino)).prev_local == old.vid
    committed = await world.mine.commit_local([local(new.ino, new.vid)])
    assert [vid for vid, _ in committed.freed] == [old.vid]
    assert await world.state(old.vid) is GONE


async def test_own_memory_gives_way_to_what_is_replaced(world: World) -> None:
    one, two, new = await world.make_protected(b"one"), await world.make_protected(b"two"), await world.make_local(b"new")
    await world.tree.rename(ROOT, b"new", ROOT, b"one")
    renamed = await world.tree.rename(ROOT, b"one", ROOT, b"two")
    assert [vid for vid, _ in renamed.dead] == [one.vid]
    assert (await world.tree.inode(new.ino)).prev == two.vid
    assert await world.state(one.vid) is VersionState.DEAD


async def test_a_victim_with_another_name_keeps_its_versions(world: World) -> None:
    old, new = await world.make_protected(b"f"), await world.make_local(b"new")
    await world.tree.link(old.ino, ROOT, b"other")
    await world.tree.rename(ROOT, b"new", ROOT, b"f")
    assert (await world.tree.inode(new.ino)).prev is None
    assert (await world.tree.inode(old.ino)).prot == old.vid


# Recovery


async def test_a_dropped_version_shows_what_was_before(world: World) -> None:
    made = await world.make_local(b"f")
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    assert await world.mine.drop_open_versions([(made.ino, opened.vid)]) == ([made.ino], [])
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.open, inode.writer, inode.size) == (made.vid, None, None, 10)
    assert await world.state(opened.vid) is GONE


async def test_a_dropped_replacement_shows_what_it_replaced(world: World) -> None:
    old, new = await world.make_local(b"f", 77), await world.make(b"new")
    await world.tree.rename(ROOT, b"new", ROOT, b"f")
    await world.mine.drop_open(new.ino, new.vid)
    ino, inode = await world.tree.lookup(ROOT, b"f")
    assert (ino, inode.cur, inode.size, inode.prev_local) == (new.ino, old.vid, 77, None)
    version = await world.mine.version(old.vid)
    assert version is not None
    assert version.ino == new.ino
    assert await world.mine.commit_protected([world.protected(new.ino, old.vid)]) == {old.vid}


async def test_a_dropped_replacement_of_a_protected_file(world: World) -> None:
    old, new = await world.make_protected(b"f"), await world.make(b"new")
    await world.tree.rename(ROOT, b"new", ROOT, b"f")
    await world.mine.drop_open(new.ino, new.vid)
    inode = await world.tree.inode(new.ino)
    assert (inode.cur, inode.prot, inode.prev, inode.open) == (old.vid, old.vid, None, None)


async def test_a_rewrite_in_place_that_is_dropped_shows_the_protected_version(world: World) -> None:
    made = await world.make_protected(b"f")
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    await world.mine.drop_open(made.ino, opened.vid)
    inode = await world.tree.inode(made.ino)
    assert (inode.cur, inode.prot) == (made.vid, made.vid)
    version = await world.mine.version(made.vid)
    assert version is not None
    assert version.segment == NO_SEGMENT


async def test_dropped_files_without_other_content_go_with_all_their_names(world: World) -> None:
    directory, _ = await world.tree.make_directory(ROOT, b"d", 0o755, 0, 0)
    made = await world.make(b"f")
    await world.tree.link(made.ino, directory, b"g")
    kept = await world.make(b"kept")
    assert await world.mine.drop_open_versions([(made.ino, made.vid)]) == ([], [made.ino])
    assert [item.name for item in await world.tree.readdir(ROOT)] == [b"d", b"kept"]
    assert await world.tree.readdir(directory) == []
    assert await world.state(made.vid) is GONE
    assert await world.state(kept.vid) is VersionState.OPEN


async def test_only_what_is_open_here_is_dropped(world: World) -> None:
    made, done = await world.make(b"f"), await world.make_local(b"done")
    for versions, ino, vid in (
        (world.theirs, made.ino, made.vid),
        (world.mine, made.ino, new_vid()),
        (world.mine, InodeNumber(999), made.vid),
        (world.mine, done.ino, done.vid),
    ):
        assert await versions.drop_open_versions([(ino, vid)]) == ([], [])


async def test_local_versions_of_a_store(world: World) -> None:
    opened, local_, protected = await world.make(b"a"), await world.make_local(b"b"), await world.make_protected(b"c")
    await world.their_tree.create_file(ROOT, b"theirs", 0o644, 0, 0, new_segment_id())
    assert {vid for vid, _ in await world.mine.local_versions(ME)} == {opened.vid, local_.vid}
    assert {vid for vid, _ in await world.mine.local_versions(ME, [VersionState.PROTECTED])} == {protected.vid}


async def test_content_that_is_missing_is_damage(world: World) -> None:
    made = await world.make_local(b"f")
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    inode = await world.tree.inode(made.ino)
    assert inode.cur is None
    assert await world.mine.drop_open_versions([(made.ino, opened.vid)]) == ([], [made.ino])
    made = await world.make(b"g")
    with pytest.raises(DamagedData):
        await world.mine._carry_on(made.ino, made.inode, None)  # type: ignore[arg-type]


# States


@pytest.mark.parametrize("before", [None, *VersionState])
@pytest.mark.parametrize("after", [None, *VersionState])
def test_steps_that_are_not_in_the_table_are_refused(before: VersionState | None, after: VersionState | None) -> None:
    def record(state: VersionState | None) -> Version | None:
        return None if state is None else Version(1, InodeNumber(2), state, ME, SegmentId(b"G" * 16), root=b"r" * 16)

    vid = Vid(b"v" * 16)
    if before is after or (before, after) in TRANSITIONS:
        assert version_step(vid, record(before), record(after)).key == version_key(vid)
    else:
        with pytest.raises(AssertionError, match="can't go"):
            version_step(vid, record(before), record(after))


# Stores and sessions


async def test_stores_register_once_and_move(kv: KeyValue) -> None:
    node = NodeId("n")
    revision = await store_registry.register_store(kv, ME, node, "127.0.0.1:1", "/a", {"rack": "r"})
    assert await store_registry.register_store(kv, ME, node, "127.0.0.1:1", "/a", {"rack": "r"}) == revision
    moved = await store_registry.register_store(kv, ME, node, "127.0.0.1:2", "/a", {"rack": "r"})
    assert moved > revision
    await store_registry.set_state(kv, ME, StoreState.DRAINING)
    await store_registry.register_store(kv, ME, node, "127.0.0.1:3", "/a", {})
    ((store, (record, _)),) = (await store_registry.stores(kv)).items()
    assert (store, record.state, record.address, record.labels) == (ME, StoreState.DRAINING, "127.0.0.1:3", {})
    await store_registry.set_state(kv, ME, StoreState.LOST)
    await store_registry.register_store(kv, ME, node, "127.0.0.1:4", "/a", {})
    ((_, (record, _)),) = (await store_registry.stores(kv)).items()
    assert (record.state, record.address) == (StoreState.LOST, "127.0.0.1:4")  # its mount brings its files back first
    await store_registry.set_state(kv, ME, StoreState.REMOVED)
    with pytest.raises(StoreError, match="new store directory"):
        await store_registry.register_store(kv, ME, node, "127.0.0.1:3", "/a", {})
    with pytest.raises(StoreError, match="not in this cluster"):
        await store_registry.set_state(kv, OTHER, StoreState.IN)


async def test_sessions_come_and_go(open_catalog: OpenCatalog) -> None:
    label = store_registry.session_label(ME, 3)
    kv = open_catalog(label)
    await store_registry.begin_session(kv, NodeId("n"), ME, 3)
    found = await store_registry.sessions(kv)
    assert {node: (session.store, session.incarnation) for node, session in found.items()} == {"n": (ME, 3)}
    assert await kv.end_session(label) == 1
    assert await store_registry.sessions(kv) == {}


# Segments that turned out to be damaged


async def test_what_hashing_a_segment_showed_is_put_down_and_taken_back(world: World) -> None:
    for made in (await world.make_local(b"local"), await world.make_protected(b"protected")):
        version = await world.mine.version(made.vid)
        assert version is not None
        for damaged in (True, True, False):
            assert await world.theirs.mark_damaged(made.vid, version.segment, damaged)
            after = await world.mine.version(made.vid)
            assert after == msgspec.structs.replace(version, damaged=damaged)


async def test_a_verdict_on_another_segment_says_nothing(world: World) -> None:
    opened = await world.make(b"open")
    protected = await world.make_protected(b"protected")
    version, open_version = await world.mine.version(protected.vid), await world.mine.version(opened.vid)
    assert version is not None
    assert open_version is not None
    assert not await world.mine.mark_damaged(protected.vid, new_segment_id(), True)
    assert not await world.mine.mark_damaged(opened.vid, open_version.segment, True)
    assert not await world.mine.mark_damaged(new_vid(), version.segment, True)
    # Opened for writing: the segment may hold other bytes from here on.
    await world.mine.open_for_writing(protected.ino, truncate_to_new_segment=None)
    assert not await world.mine.mark_damaged(protected.vid, version.segment, True)
    assert await world.state(protected.vid) is VersionState.PROTECTED


async def test_a_damaged_segment_is_never_carried_on(world: World) -> None:
    for made in (await world.make_local(b"local"), await world.make_protected(b"protected")):
        version = await world.mine.version(made.vid)
        assert version is not None
        await world.mine.mark_damaged(made.vid, version.segment, True)
        with pytest.raises(DamagedData, match="can't be carried on"):
            await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
        assert await world.mine.version(made.vid) == msgspec.structs.replace(version, damaged=True)
        opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
        assert not opened.version.damaged


async def test_protecting_a_version_takes_its_damage_back(world: World) -> None:
    made = await world.make_local(b"file")
    version = await world.mine.version(made.vid)
    assert version is not None
    await world.mine.mark_damaged(made.vid, version.segment, True)
    assert await world.mine.commit_protected([world.protected(made.ino, made.vid)]) == {made.vid}
    after = await world.mine.version(made.vid)
    assert after is not None
    assert not after.damaged


async def test_a_right_segment_takes_the_place_of_a_damaged_one(world: World) -> None:
    made = await world.make_protected(b"file")
    version, new = await world.mine.version(made.vid), new_segment_id()
    assert version is not None
    await world.mine.mark_damaged(made.vid, version.segment, True)
    assert not await world.theirs.replace_segment(made.vid, version.segment, new)  # it has its home elsewhere
    assert not await world.mine.replace_segment(made.vid, new_segment_id(), new)
    assert await world.mine.replace_segment(made.vid, version.segment, new)
    assert await world.mine.version(made.vid) == msgspec.structs.replace(version, segment=new)
    assert not await world.mine.replace_segment(made.vid, version.segment, new_segment_id())
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=None)
    assert opened.segment == new


async def test_what_is_not_protected_keeps_its_segment(world: World) -> None:
    made = await world.make_local(b"file")
    version = await world.mine.version(made.vid)
    assert version is not None
    assert not await world.mine.replace_segment(made.vid, version.segment, new_segment_id())
    assert not await world.mine.replace_segment(new_vid(), version.segment, new_segment_id())
    with pytest.raises(ValueError, match="no segment"):
        await world.mine.replace_segment(made.vid, version.segment, NO_SEGMENT)
    assert await world.mine.version(made.vid) == version


async def test_on_a_full_drive_what_makes_room_is_not_put_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was emptied: its old content goes only when the new one is local."""
    emptied, new = await world.make_local(b"emptied"), await world.make(b"new")
    opened = await world.mine.open_for_writing(emptied.ino, truncate_to_new_segment=new_segment_id())
    monkeypatch.setattr(world.kv, "is_short_of_room", lambda: True)
    committed = await world.mine.commit_local([local(new.ino, new.vid), local(emptied.ino, opened.vid, 0)])
    assert committed.vids == {opened.vid}
    assert [vid for vid, _ in committed.freed] == [emptied.vid]
    with pytest.raises(CatalogFull):
        await world.mine.commit_local([local(new.ino, new.vid)])
