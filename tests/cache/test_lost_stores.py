"""A store that is declared lost, what becomes of the files only it had, and what its return changes: on every engine."""

import sqlite3
from collections.abc import Callable
from contextlib import aclosing, closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import (
    INODE_PREFIX,
    LEADER_KEY,
    Inode,
    Settings,
    Shard,
    ShardLayout,
    Store,
    StoreState,
    VersionState,
    Writer,
    inode_key,
    pack,
    store_key,
    unpack,
    version_key,
)
from ckptfs.cache.catalog_kv import OPERATIONS_MAX, Put, Unchanged
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import DamagedRecord, NoSuchName, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, Vid, new_segment_id, new_vid
from ckptfs.cache.lost_stores import Returned, RolledBack, be_in_again, declare_lost, give_back, roll_back
from ckptfs.cache.namespace import Created, Namespace
from ckptfs.cache.prefixes import Prefix, begin_prefix, void_prefix
from ckptfs.cache.segment_holds import held_by, hold
from ckptfs.cache.store_registry import begin_session, register_store, session_label, set_state, stores
from ckptfs.cache.store_removal import HoldsTheOnly, remove_node
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions

OpenCatalog = Callable[..., Any]
GONE, OTHER = StoreId(b"G" * 16), StoreId(b"O" * 16)
NODE = NodeId("node-0")


class World:
    """A node whose store gets lost, another one, and a leader."""

    def __init__(self, open_catalog: OpenCatalog) -> None:
        self.label = session_label(GONE, 1)
        self.kv, self.node_kv, self.new_kv = open_catalog(), open_catalog(self.label), open_catalog("new")
        clock = count(1000).__next__
        self.tree = Namespace(self.kv, GONE, 1, clock)
        self.mine = Versions(self.kv, GONE, 1, clock)
        self.theirs = Versions(self.kv, OTHER, 1, clock)

    async def start(self) -> None:
        await self.tree.format_if_empty(Settings(1, b"C" * 16, 1, 1, 4096))
        for node, store in (("node-0", GONE), ("node-1", OTHER)):
            await register_store(self.kv, store, NodeId(node), "127.0.0.1:1", "/store", {})
        await begin_session(self.node_kv, NODE, GONE, 1)
        self.leader = Unchanged(LEADER_KEY, (await self.kv.transact([], [Put(LEADER_KEY, b"")])).revision)

    async def make(self, name: bytes) -> Created:
        return await self.tree.create_file(ROOT_INODE, name, 0o644, 0, 0, new_segment_id())

    async def local(self, versions: Versions, ino: InodeNumber, vid: Vid, size: int) -> None:
        done = await versions.commit_local([LocalCommit(ino, vid, size, b"r" * 16, 4096, 500, True)])
        assert done.vids == {vid}

    async def protect(self, ino: InodeNumber, vid: Vid) -> None:
        revisions = {}
        for store in (GONE, OTHER):
            entry = await self.kv.get(store_key(store))
            revisions[store] = entry.mod_revision
        shards = [Shard(store, b"r" * 16) for store in (GONE, OTHER)]
        commit = ProtectedCommit(ino, vid, ShardLayout.STRIPED, 1, 1, 4096, shards, revisions)
        assert await self.mine.commit_protected([commit]) == {vid}

    async def rewrite(self, versions: Versions, ino: InodeNumber, size: int | None) -> Vid:
        """Anew, in a new segment; closed with `size` bytes, or left open."""
        opened = await versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
        if size is not None:
            await self.local(versions, ino, opened.vid, size)
        return opened.vid

    async def protected_prefix(self, ino: InodeNumber, vid: Vid, size: int) -> Vid:
        """Of what is being written at the store that gets lost."""
        prefix = Prefix(new_vid(), size, b"r" * 16, 4096, 600, await self.tree.inode(ino))
        assert await begin_prefix(self.kv, GONE, ino, vid, prefix)
        await self.protect(ino, prefix.vid)
        return prefix.vid

    async def state(self, vid: Vid) -> VersionState | None:
        version = await self.mine.version(vid)
        return None if version is None else version.state

    async def lose(self) -> list[RolledBack]:
        await self.kv.end_session(self.label)
        assert await declare_lost(self.kv, self.leader, GONE)
        return [one async for one in roll_back(self.kv, self.leader, GONE)]

    async def come_back(self) -> list[Returned]:
        returned = [one async for one in give_back(self.kv, Writer(GONE, 2))]
        await be_in_again(self.kv, GONE)
        return returned

    async def record(self) -> Store:
        return unpack(Store, (await self.kv.get(store_key(GONE))).value)

    async def inode(self, ino: InodeNumber) -> Inode:
        return await self.tree.inode(ino)


@pytest.fixture
async def world(open_catalog: OpenCatalog) -> World:
    world = World(open_catalog)
    await world.start()
    return world


async def test_a_store_whose_node_is_up_is_not_lost(world: World) -> None:
    assert not await declare_lost(world.kv, world.leader, GONE)
    await world.kv.end_session(world.label)
    assert not await declare_lost(world.kv, Unchanged(LEADER_KEY, 1), GONE)  # by who doesn't lead any more
    assert await declare_lost(world.kv, world.leader, GONE)
    assert not await declare_lost(world.kv, world.leader, GONE)
    assert (await world.record()).state is StoreState.LOST


async def test_a_wiped_machine_is_a_new_store_and_its_old_one_may_be_lost(world: World) -> None:
    await world.kv.end_session(world.label)
    await begin_session(world.new_kv, NODE, StoreId(b"N" * 16), 2)
    assert await declare_lost(world.kv, world.leader, GONE)


async def test_a_protected_file_is_as_before(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    before = await world.inode(made.ino)
    assert await world.lose() == []
    assert await world.inode(made.ino) == before
    assert (await world.record()).settled


async def test_a_file_shows_what_was_protected_before_and_says_so(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    newer = await world.rewrite(world.mine, made.ino, 20)
    before = await world.inode(made.ino)
    assert await world.lose() == [RolledBack(made.ino, newer, made.vid)]
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prot, inode.rolled_back_from, inode.lost) == (made.vid, made.vid, newer, False)
    assert (inode.writer, inode.open, inode.size, inode.epoch) == (None, None, 10, before.epoch + 1)
    assert await catalog_problems(world.kv) == []


async def test_a_file_that_was_nowhere_else_is_lost(world: World) -> None:
    closed, written = await world.make(b"closed"), await world.make(b"written")
    await world.local(world.mine, closed.ino, closed.vid, 10)
    assert sorted(await world.lose()) == [
        RolledBack(closed.ino, closed.vid, None),
        RolledBack(written.ino, written.vid, None),
    ]
    for made in (closed, written):
        inode = await world.inode(made.ino)
        assert (inode.lost, inode.cur, inode.open, inode.writer, inode.rolled_back_from) == (True, None, None, None, made.vid)
    assert await catalog_problems(world.kv) == []


async def test_what_programs_on_its_node_had_open_is_not_kept_for_them(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    segments = [new_segment_id() for _ in range(OPERATIONS_MAX + 1)]
    for segment in segments:
        assert await hold(world.kv, segment, GONE, made.vid)
    assert await hold(world.kv, segments[0], OTHER, made.vid)
    await world.lose()
    assert await held_by(world.kv, GONE) == []
    assert await held_by(world.kv, OTHER) == segments[:1]


async def test_what_was_being_written_goes_and_what_another_node_has_stays(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    theirs = await world.rewrite(world.theirs, made.ino, 30)
    mine = await world.rewrite(world.mine, made.ino, None)
    assert await world.lose() == [RolledBack(made.ino, mine, theirs)]
    assert (await world.inode(made.ino)).size == 30


async def test_what_another_node_is_writing_is_not_touched(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    theirs = await world.rewrite(world.theirs, made.ino, None)
    assert await world.lose() == []
    inode = await world.inode(made.ino)
    assert (inode.open, inode.cur) == (theirs, made.vid)
    await world.local(world.theirs, made.ino, theirs, 30)
    assert (await world.inode(made.ino)).cur == theirs


@pytest.mark.parametrize("begun", ["carried on", "anew"])
async def test_readers_keep_the_prefix_they_had(world: World, begun: str) -> None:
    """It is newer than the protected version, and the next save that is protected would have ended it."""
    made = await world.make(b"log")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    segment = new_segment_id() if begun == "anew" else None
    opened = await world.mine.open_for_writing(made.ino, truncate_to_new_segment=segment)
    prefix = await world.protected_prefix(made.ino, opened.vid, 50)
    assert await world.lose() == [RolledBack(made.ino, opened.vid, prefix)]
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prot, inode.prefix, inode.prefix_holds, inode.size) == (prefix, prefix, None, False, 50)
    assert await world.state(made.vid) is VersionState.DEAD
    assert [(one.vid, one.reattached) for one in await world.come_back()] == [(opened.vid, True)]
    inode = await world.inode(made.ino)
    assert (inode.open, inode.cur, inode.prot, inode.rolled_back_from) == (opened.vid, prefix, prefix, None)
    assert await catalog_problems(world.kv) == []


async def test_readers_keep_the_prefix_of_what_replaced_a_version_another_node_has(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    theirs = await world.rewrite(world.theirs, made.ino, 30)
    mine = await world.rewrite(world.mine, made.ino, None)
    prefix = await world.protected_prefix(made.ino, mine, 50)
    assert await world.lose() == [RolledBack(made.ino, mine, prefix)]
    assert await world.state(theirs) is None
    await world.come_back()
    assert await catalog_problems(world.kv) == []


async def test_a_closed_version_whose_store_is_gone_too_does_not_hide_the_prefix(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    newer = await world.rewrite(world.mine, made.ino, None)
    prefix = await world.protected_prefix(made.ino, newer, 50)
    assert await world.lose() == [RolledBack(made.ino, newer, prefix)]
    assert {(one.vid, one.reattached) for one in await world.come_back()} == {(newer, True), (made.vid, True)}
    inode = await world.inode(made.ino)
    assert (inode.open, inode.cur, inode.prot, inode.size) == (newer, made.vid, prefix, 10)
    assert await catalog_problems(world.kv) == []


async def test_what_is_whole_is_better_than_a_prefix_readers_could_not_have(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    newer = await world.rewrite(world.mine, made.ino, None)
    prefix = await world.protected_prefix(made.ino, newer, 50)
    await void_prefix(world.kv, made.ino)
    assert await world.lose() == [RolledBack(made.ino, newer, made.vid)]
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prot, inode.prefix) == (made.vid, made.vid, prefix)
    await world.come_back()
    assert await catalog_problems(world.kv) == []


async def test_it_is_gone_on_with_after_an_interruption(world: World) -> None:
    made = [await world.make(b"%d" % number) for number in range(5)]
    await world.kv.end_session(world.label)
    assert await declare_lost(world.kv, world.leader, GONE)
    rolled = roll_back(world.kv, world.leader, GONE)
    first = await anext(rolled)
    await rolled.aclose()
    assert not (await world.record()).settled
    rest = [one async for one in roll_back(world.kv, world.leader, GONE)]
    assert {one.ino for one in [first, *rest]} == {one.ino for one in made}
    assert len(rest) == 4


async def test_a_returning_store_gives_back_what_nobody_touched(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    newer = await world.rewrite(world.mine, made.ino, 20)
    lost, written = await world.make(b"lost"), await world.make(b"written")
    await world.local(world.mine, lost.ino, lost.vid, 5)
    await world.lose()
    assert {(one.vid, one.reattached) for one in await world.come_back()} == {
        (newer, True),
        (lost.vid, True),
        (written.vid, True),
    }
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prot, inode.rolled_back_from, inode.size) == (newer, made.vid, None, 20)
    inode = await world.inode(lost.ino)
    assert (inode.cur, inode.lost, inode.size) == (lost.vid, False, 5)
    inode = await world.inode(written.ino)
    assert (inode.open, inode.writer, inode.lost) == (written.vid, Writer(GONE, 2), False)
    assert (await world.record()).state is StoreState.IN
    assert await catalog_problems(world.kv) == []


async def closed_and_written_anew(world: World, name: bytes, *, was_protected: bool = False) -> tuple[Created, Vid, Vid]:
    """A file of the store that gets lost; the version it closed last, and the newer one, which isn't local yet."""
    made = await world.make(name)
    closed = made.vid
    await world.local(world.mine, made.ino, made.vid, 10)
    if was_protected:
        await world.protect(made.ino, made.vid)
        closed = await world.rewrite(world.mine, made.ino, 20)
    return made, closed, await world.rewrite(world.mine, made.ino, None)


@pytest.mark.parametrize("was_protected", [True, False])
async def test_what_was_written_over_what_was_closed_is_given_back_with_it(world: World, was_protected: bool) -> None:
    """The newest content, though the one before is what the file names as gone; also when that happens again."""
    made, closed, newer = await closed_and_written_anew(world, b"f", was_protected=was_protected)
    before = await world.inode(made.ino)
    shown = made.vid if was_protected else None
    for session in ("one", "another"):
        assert await world.lose() == [RolledBack(made.ino, closed, shown)]
        assert {(one.vid, one.reattached) for one in await world.come_back()} == {(closed, True), (newer, True)}
        inode = await world.inode(made.ino)
        assert inode == msgspec.structs.replace(before, writer=Writer(GONE, 2), epoch=inode.epoch), session
        assert await catalog_problems(world.kv) == []
    await world.local(world.mine, made.ino, newer, 30)
    assert await world.state(closed) is None
    assert await catalog_problems(world.kv) == []


async def test_what_was_renamed_meanwhile_has_both_again(world: World) -> None:
    made, closed, newer = await closed_and_written_anew(world, b"f")
    await world.lose()
    await world.tree.rename(ROOT_INODE, b"f", ROOT_INODE, b"g")
    await world.come_back()
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.open, inode.lost) == (closed, newer, False)
    assert await catalog_problems(world.kv) == []


@pytest.mark.parametrize("was_protected", [False, True])
async def test_a_lost_file_shows_what_it_has_replaced_until_it_is_back(world: World, was_protected: bool) -> None:
    """It would be an error instead, and what it replaced stay unprotected for good."""
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    replaced = await Namespace(world.kv, OTHER, 1, count(5000).__next__).create_file(
        ROOT_INODE, b"g", 0o644, 0, 0, new_segment_id()
    )
    await world.local(world.theirs, replaced.ino, replaced.vid, 20)
    if was_protected:
        await world.protect(replaced.ino, replaced.vid)
    await world.lose()
    await world.tree.rename(ROOT_INODE, b"f", ROOT_INODE, b"g")
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.size, inode.lost, inode.rolled_back_from) == (replaced.vid, 20, False, made.vid)
    version = await world.theirs.version(replaced.vid)
    assert version is not None
    assert version.ino == made.ino
    assert await catalog_problems(world.kv) == []
    if not was_protected:
        await world.protect(made.ino, replaced.vid)
    assert await world.state(replaced.vid) is VersionState.PROTECTED
    await world.come_back()
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prot, inode.rolled_back_from) == (made.vid, replaced.vid, None)
    await world.protect(made.ino, made.vid)
    assert await world.state(replaced.vid) is VersionState.DEAD
    assert await catalog_problems(world.kv) == []


async def test_what_a_lost_file_has_replaced_meanwhile_ends_when_it_is_back_before_that_is_protected(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    replaced = await Namespace(world.kv, OTHER, 1, count(5000).__next__).create_file(
        ROOT_INODE, b"g", 0o644, 0, 0, new_segment_id()
    )
    await world.local(world.theirs, replaced.ino, replaced.vid, 20)
    await world.lose()
    await world.tree.rename(ROOT_INODE, b"f", ROOT_INODE, b"g")
    await world.come_back()
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.prev_local, await world.state(replaced.vid)) == (made.vid, None, None)
    assert await catalog_problems(world.kv) == []


async def test_a_lost_file_that_replaces_one_whose_store_is_gone_too_stays_lost(world: World) -> None:
    made, replaced = await world.make(b"f"), await world.make(b"g")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.local(world.mine, replaced.ino, replaced.vid, 20)
    await world.kv.end_session(world.label)
    assert await declare_lost(world.kv, world.leader, GONE)
    async with aclosing(roll_back(world.kv, world.leader, GONE)) as rolling:
        async for one in rolling:
            if one.ino == made.ino:
                break
    await world.tree.rename(ROOT_INODE, b"f", ROOT_INODE, b"g")
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.lost, inode.rolled_back_from) == (None, True, made.vid)
    assert await catalog_problems(world.kv) == []


@pytest.mark.parametrize("happens", ["before", "amid"])
async def test_of_what_was_written_elsewhere_meanwhile_both_are_told(
    world: World, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    made, closed, newer = await closed_and_written_anew(world, b"f")
    await world.lose()
    transact = world.kv.transact
    theirs: list[Vid] = []

    async def write_first(compares: Any, operations: Any) -> Any:
        if any(isinstance(one, Put) and one.key == inode_key(made.ino) for one in operations) and not theirs:
            monkeypatch.setattr(world.kv, "transact", transact)
            theirs.append(await world.rewrite(world.theirs, made.ino, 30))
        return await transact(compares, operations)

    if happens == "before":
        theirs.append(await world.rewrite(world.theirs, made.ino, 30))
    else:
        monkeypatch.setattr(world.kv, "transact", write_first)
    assert {(one.vid, one.reattached) for one in await world.come_back()} == {(closed, False), (newer, False)}
    inode = await world.inode(made.ino)
    assert (inode.cur, inode.open, inode.size) == (theirs[0], None, 30)
    assert (await world.state(closed), await world.state(newer)) == (VersionState.LOCAL, VersionState.OPEN)


async def test_what_was_removed_meanwhile_has_neither(world: World) -> None:
    _, closed, newer = await closed_and_written_anew(world, b"f")
    await world.lose()
    await world.tree.unlink(ROOT_INODE, b"f")
    assert await world.come_back() == []
    assert (await world.state(closed), await world.state(newer)) == (None, None)
    assert await catalog_problems(world.kv) == []


async def test_a_return_amid_the_roll_back_leaves_both_or_gives_both_back(world: World) -> None:
    made = [await closed_and_written_anew(world, b"%d" % number) for number in range(4)]
    await world.kv.end_session(world.label)
    assert await declare_lost(world.kv, world.leader, GONE)
    rolled = roll_back(world.kv, world.leader, GONE)
    await anext(rolled)
    await begin_session(world.new_kv, NODE, GONE, 2)
    assert [one.reattached for one in await world.come_back()] == [True, True]
    assert [one async for one in rolled] == []
    for one, closed, newer in made:
        inode = await world.inode(one.ino)
        assert (inode.cur, inode.open, inode.rolled_back_from) == (closed, newer, None)
    assert await catalog_problems(world.kv) == []


@pytest.mark.parametrize("goes_again", [True, False])
async def test_a_return_that_was_interrupted_is_gone_on_with_or_undone(world: World, goes_again: bool) -> None:
    """Where the node goes again before it is `IN`, what it had been given back is rolled back with it."""
    made = [await closed_and_written_anew(world, b"%d" % number, was_protected=True) for number in range(3)]
    await world.lose()
    returning = give_back(world.kv, Writer(GONE, 2))
    await anext(returning)
    await returning.aclose()
    inodes = [await world.inode(one.ino) for one, _, _ in made]
    (first,) = [number for number, inode in enumerate(inodes) if inode.open is not None]
    assert (inodes[first].cur, inodes[first].open) == made[first][1:]
    assert not (await world.record()).settled  # the leader looks again
    if goes_again:
        one, closed, _ = made[first]
        assert [again async for again in roll_back(world.kv, world.leader, GONE)] == [RolledBack(one.ino, closed, one.vid)]
        assert (await world.record()).settled
    await world.come_back()
    assert [(inode.cur, inode.open) for inode in [await world.inode(one.ino) for one, _, _ in made]] == [
        (closed, newer) for _, closed, newer in made
    ]
    assert await catalog_problems(world.kv) == []


async def test_a_returning_store_changes_nothing_written_since(world: World) -> None:
    """I14: what was written or removed meanwhile stays so."""
    rewritten, removed = await world.make(b"rewritten"), await world.make(b"removed")
    for made in (rewritten, removed):
        await world.local(world.mine, made.ino, made.vid, 10)
    await world.lose()
    theirs = await world.rewrite(world.theirs, rewritten.ino, 30)
    await world.tree.unlink(ROOT_INODE, b"removed")
    assert [(one.vid, one.reattached) for one in await world.come_back()] == [(rewritten.vid, False)]
    inode = await world.inode(rewritten.ino)
    assert (inode.cur, inode.size, inode.rolled_back_from) == (theirs, 30, None)
    assert await world.mine.version(removed.vid) is None
    assert await world.state(rewritten.vid) is VersionState.LOCAL


async def test_a_returning_store_keeps_nothing_of_a_file_that_was_written_and_removed_meanwhile(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.lose()
    await world.rewrite(world.theirs, made.ino, None)
    await world.tree.unlink(ROOT_INODE, b"f")
    assert await world.state(made.vid) is VersionState.LOCAL
    assert await world.come_back() == []
    assert await world.state(made.vid) is None
    assert await catalog_problems(world.kv) == []


async def test_what_a_file_that_replaced_one_may_fall_back_to_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is replaced in its turn while the walk that finds that out is on its way."""
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    tree = Namespace(world.kv, OTHER, 1, count(5000).__next__)
    last, first = [await tree.create_file(ROOT_INODE, name, 0o644, 0, 0, new_segment_id()) for name in (b"last", b"first")]
    await tree.rename(ROOT_INODE, b"first", ROOT_INODE, b"f")
    assert await world.lose() == []
    existing = world.kv.range

    async def replace_amid(prefix: bytes, **limits: Any) -> Any:
        entries = await existing(prefix, **limits)
        if prefix == INODE_PREFIX and (await world.inode(last.ino)).prev_local is None:
            await tree.rename(ROOT_INODE, b"last", ROOT_INODE, b"f")
            entries = [entry for entry in entries if entry.key != inode_key(first.ino)]  # had it been on a later page
        return entries

    monkeypatch.setattr(world.kv, "range", replace_amid)
    assert await world.come_back() == []
    assert (await world.inode(last.ino)).prev_local == made.vid
    assert await world.state(made.vid) is VersionState.LOCAL
    assert await catalog_problems(world.kv) == []


async def test_a_store_that_returns_before_its_files_were_rolled_back_has_lost_nothing(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.kv.end_session(world.label)
    assert await declare_lost(world.kv, world.leader, GONE)
    assert await world.come_back() == []
    assert [one async for one in roll_back(world.kv, world.leader, GONE)] == []
    assert (await world.inode(made.ino)).cur == made.vid


async def test_nothing_is_rolled_back_once_the_node_is_up(world: World) -> None:
    """It has looked at a file that the leader hadn't come to yet: rolled back after that, it would never be given back."""
    made = [await world.make(b"%d" % number) for number in range(3)]
    await world.kv.end_session(world.label)
    assert await declare_lost(world.kv, world.leader, GONE)
    rolled = roll_back(world.kv, world.leader, GONE)
    first = await anext(rolled)
    await begin_session(world.new_kv, NODE, GONE, 2)
    assert [one.vid async for one in give_back(world.kv, Writer(GONE, 2))] == [first.gone]
    assert [one async for one in rolled] == []
    assert [one async for one in roll_back(world.kv, world.leader, GONE)] == []
    assert not (await world.record()).settled
    await be_in_again(world.kv, GONE)
    assert {(await world.inode(one.ino)).open for one in made} == {one.vid for one in made}
    assert await catalog_problems(world.kv) == []


async def test_a_removed_store_is_rolled_back_though_its_node_is_up(world: World) -> None:
    made = await world.make(b"f")
    await world.kv.end_session(world.label)
    assert await remove_node(world.kv, NODE, force=True) == [made.ino]
    await begin_session(world.new_kv, NODE, GONE, 2)
    assert [one async for one in roll_back(world.kv, world.leader, GONE)] == [RolledBack(made.ino, made.vid, None)]
    assert (await world.record()).settled


@pytest.mark.parametrize("how", ["lost", "removed"])
@pytest.mark.parametrize("was_protected", [True, False])
async def test_what_a_power_cut_elsewhere_uncovers_is_rolled_back(world: World, how: str, was_protected: bool) -> None:
    """The store was done with while the file was being written on another node, and that one forgets what it wrote."""
    made = await world.make(b"f")
    newest = made.vid
    await world.local(world.mine, made.ino, made.vid, 10)
    if was_protected:
        await world.protect(made.ino, made.vid)
        newest = await world.rewrite(world.mine, made.ino, 20)
    theirs = await world.rewrite(world.theirs, made.ino, None)
    if how == "lost":
        assert await world.lose() == []
    else:
        await world.kv.end_session(world.label)
        await remove_node(world.kv, NODE, force=True)
        assert [one async for one in roll_back(world.kv, world.leader, GONE)] == []
    assert (await world.record()).settled
    assert await world.theirs.drop_open_versions([(made.ino, theirs)]) == ([made.ino], [])
    assert not (await world.record()).settled
    shown = made.vid if was_protected else None
    assert [one async for one in roll_back(world.kv, world.leader, GONE)] == [RolledBack(made.ino, newest, shown)]
    assert (await world.record()).settled
    if how == "lost":
        assert [(one.vid, one.reattached) for one in await world.come_back()] == [(newest, True)]
        assert (await world.inode(made.ino)).cur == newest
    assert await catalog_problems(world.kv) == []


async def test_a_store_that_is_declared_lost_amid_a_drop_is_rolled_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    theirs = await world.rewrite(world.theirs, made.ino, None)
    transact, rolled = world.kv.transact, []

    async def lose_first(*arguments: Any) -> Any:
        monkeypatch.setattr(world.kv, "transact", transact)
        rolled.extend(await world.lose())
        return await transact(*arguments)

    monkeypatch.setattr(world.kv, "transact", lose_first)
    await world.theirs.drop_open_versions([(made.ino, theirs)])
    assert rolled == []
    assert not (await world.record()).settled
    assert [one async for one in roll_back(world.kv, world.leader, GONE)] == [RolledBack(made.ino, made.vid, None)]


async def test_a_draining_store_that_was_lost_drains_when_it_is_back(world: World) -> None:
    await set_state(world.kv, GONE, StoreState.DRAINING)
    await world.lose()
    assert (await world.record()).state is StoreState.LOST
    await world.come_back()
    assert (await world.record()).state is StoreState.DRAINING
    await set_state(world.kv, GONE, StoreState.IN)
    await world.lose()
    await world.come_back()
    record = await world.record()
    assert (record.state, record.was_draining) == (StoreState.IN, False)


# Removal


async def test_a_damaged_record_keeps_no_other_file_from_being_rolled_back_and_given_back(tmp_path: Path) -> None:
    catalogs: list[SqliteCatalog] = []

    def open_sqlite(session: str | None = None) -> SqliteCatalog:
        catalogs.append(SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session))
        return catalogs[-1]

    try:
        world = World(open_sqlite)
        await world.start()
        made = [await world.make(b"%d" % number) for number in range(6)]
        for one in made:
            await world.local(world.mine, one.ino, one.vid, 10)
        with closing(sqlite3.connect(tmp_path / "catalog.db")) as database, database:
            for key in (inode_key(made[0].ino), version_key(made[1].vid)):
                database.execute("UPDATE kv SET value = x'00' WHERE key = ?", (key,))
        rolled_back = await world.lose()
        assert {one.ino for one in rolled_back} == {one.ino for one in made[2:]}
        assert (await world.record()).settled
        with pytest.raises(DamagedRecord):
            await remove_node(world.kv, NODE, force=False)
        returned = await world.come_back()
        assert {(one.vid, one.reattached) for one in returned} == {(one.vid, True) for one in made[2:]}
        await world.kv.end_session(world.label)
        given_up = await remove_node(world.kv, NODE, force=True)
        assert set(given_up) == {one.ino for one in made} - {made[1].ino}
    finally:
        for catalog in catalogs:
            await catalog.aclose()


async def test_a_node_that_is_up_or_unknown_is_not_removed(world: World) -> None:
    with pytest.raises(StoreError, match="is up: stop it first"):
        await remove_node(world.kv, NODE, force=True)
    with pytest.raises(NoSuchName, match="no node nobody"):
        await remove_node(world.kv, NodeId("nobody"), force=True)
    assert (await world.record()).state is StoreState.IN


async def test_a_node_that_holds_nothing_alone_is_removed_and_can_not_return(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    await world.kv.end_session(world.label)
    assert await remove_node(world.kv, NODE, force=False) == []
    assert (await world.record()).state is StoreState.REMOVED
    assert await world.come_back() == []
    assert (await world.record()).state is StoreState.REMOVED
    with pytest.raises(StoreError, match="was removed from the cluster"):
        await register_store(world.kv, GONE, NODE, "127.0.0.1:1", "/store", {})
    with pytest.raises(NoSuchName):
        await remove_node(world.kv, NODE, force=False)


async def test_what_only_it_has_is_named_and_given_up_by_force_only(world: World) -> None:
    local, written, gone = await world.make(b"local"), await world.make(b"written"), await world.make(b"gone")
    for made in (local, gone):
        await world.local(world.mine, made.ino, made.vid, 10)
    await world.tree.unlink(ROOT_INODE, b"gone")
    await world.kv.end_session(world.label)
    with pytest.raises(HoldsTheOnly) as holds:
        await remove_node(world.kv, NODE, force=False)
    assert sorted(holds.value.inos) == [local.ino, written.ino]
    assert (await world.record()).state is StoreState.IN
    assert sorted(await remove_node(world.kv, NODE, force=True)) == [local.ino, written.ino]
    assert not (await world.record()).settled
    rolled = [one async for one in roll_back(world.kv, world.leader, GONE)]
    assert {one.ino for one in rolled} == {local.ino, written.ino}
    assert (await world.inode(local.ino)).lost
    assert (await world.record()).settled


async def test_shards_that_are_the_last_count(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.protect(made.ino, made.vid)
    await world.kv.end_session(world.label)
    other = await world.kv.get(store_key(OTHER))
    lost = msgspec.structs.replace(unpack(Store, other.value), state=StoreState.LOST)
    await world.kv.transact([], [Put(store_key(OTHER), pack(lost))])
    with pytest.raises(HoldsTheOnly) as holds:
        await remove_node(world.kv, NODE, force=False)
    assert holds.value.inos == [made.ino]


async def test_what_was_rolled_back_is_given_up_with_the_store(world: World) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.lose()
    with pytest.raises(HoldsTheOnly):
        await remove_node(world.kv, NODE, force=False)
    assert await remove_node(world.kv, NODE, force=True) == [made.ino]
    assert (await world.record()).settled


@pytest.mark.parametrize("new_one", ["up", "down"])
async def test_of_a_machine_that_was_set_up_anew_the_lost_store_is_removed(world: World, new_one: str) -> None:
    made = await world.make(b"f")
    await world.local(world.mine, made.ino, made.vid, 10)
    await world.lose()
    new = StoreId(b"N" * 16)
    await register_store(world.kv, new, NODE, "127.0.0.1:1", "/store", {})
    if new_one == "up":
        await begin_session(world.new_kv, NODE, new, 2)
    with pytest.raises(HoldsTheOnly) as holds:
        await remove_node(world.kv, NODE, force=False)
    assert holds.value.inos == [made.ino]
    assert await remove_node(world.kv, NODE, force=True) == [made.ino]
    states = {store: record.state for store, (record, _) in (await stores(world.kv)).items()}
    assert (states[GONE], states[new]) == (StoreState.REMOVED, StoreState.IN)
    if new_one == "up":
        with pytest.raises(StoreError, match="is up: stop it first"):
            await remove_node(world.kv, NODE, force=True)
    else:
        assert await remove_node(world.kv, NODE, force=False) == []
        assert (await stores(world.kv))[new][0].state is StoreState.REMOVED


async def test_a_node_s_stores_are_removed_together_or_not(world: World) -> None:
    """Two that were never lost: what one of them has alone keeps both."""
    await world.kv.end_session(world.label)
    second = StoreId(b"N" * 16)
    await register_store(world.kv, second, NODE, "127.0.0.1:1", "/store", {})
    made = await Namespace(world.kv, second, 1, count(5000).__next__).create_file(ROOT_INODE, b"f", 0o644, 0, 0, new_segment_id())
    with pytest.raises(HoldsTheOnly):
        await remove_node(world.kv, NODE, force=False)
    assert all(record.state is StoreState.IN for record, _ in (await stores(world.kv)).values())
    assert await remove_node(world.kv, NODE, force=True) == [made.ino]
    known = await stores(world.kv)
    assert (known[GONE][0].state, known[second][0].state) == (StoreState.REMOVED, StoreState.REMOVED)
