"""Prefixes of what is being written: what leads to them, what voids them, and that they are never shown for what is newer."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest

from ckptfs.cache import store_registry
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import Inode, Settings, Shard, ShardLayout, VersionState
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, Vid, new_segment_id, new_vid
from ckptfs.cache.inode_changes import AttributeChanges
from ckptfs.cache.namespace import Namespace, RenameFlags
from ckptfs.cache.prefixes import Prefix, begin_prefix, give_up_prefix, void_prefix
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions

ROOT = ROOT_INODE
ME, OTHER = StoreId(b"A" * 16), StoreId(b"B" * 16)
HOLDERS = [StoreId(bytes([number]) * 16) for number in range(1, 7)]


class World:
    """A node that writes a file; the catalog must be consistent at the end of each test."""

    def __init__(self) -> None:
        self.kv = MemoryCatalog()
        clock = count(1000).__next__
        self.tree = Namespace(self.kv, ME, 1, clock)
        self.versions = Versions(self.kv, ME, 1, clock)
        self.revisions: dict[StoreId, int] = {}

    async def begin(self) -> None:
        await self.tree.format_if_empty(Settings(1, b"C" * 16, 4, 2, 1 << 20))
        for number, store in enumerate(HOLDERS):
            self.revisions[store] = await store_registry.register_store(self.kv, store, NodeId(f"n{number}"), "", "", {})

    async def make(self, name: bytes = b"log") -> tuple[InodeNumber, Vid]:
        made = await self.tree.create_file(ROOT, name, 0o644, 0, 0, new_segment_id())
        return made.ino, made.vid

    async def local(self, ino: InodeNumber, vid: Vid) -> None:
        commit = LocalCommit(ino, vid, 500, b"r" * 16, 4096, 700, release_writer=True)
        assert (await self.versions.commit_local([commit])).vids == {vid}

    async def prefix(self, ino: InodeNumber, vid: Vid, size: int = 100, seen: Inode | None = None) -> Vid | None:
        """One that is on its way; None if it may not be."""
        inode = seen or await self.tree.inode(ino)
        prefix = Prefix(new_vid(), size, b"p" * 16, 4096, 600, inode)
        return prefix.vid if await begin_prefix(self.kv, ME, ino, vid, prefix) else None

    async def protect(self, ino: InodeNumber, vid: Vid) -> bool:
        shards = [Shard(store, bytes([index]) * 16) for index, store in enumerate(HOLDERS)]
        commit = ProtectedCommit(ino, vid, ShardLayout.STRIPED, 4, 2, 4096, shards, dict(self.revisions))
        return await self.versions.commit_protected([commit]) == {vid}

    async def protected_prefix(self, ino: InodeNumber, vid: Vid, size: int = 100) -> Vid:
        prefix = await self.prefix(ino, vid, size)
        assert prefix is not None
        assert await self.protect(ino, prefix)
        return prefix

    async def state(self, vid: Vid | None) -> VersionState | None:
        version = None if vid is None else await self.versions.version(vid)
        return None if version is None else version.state

    async def shown(self, ino: InodeNumber) -> Vid | None:
        """The prefix that readers may have."""
        inode = await self.tree.inode(ino)
        return inode.prefix if inode.prefix_holds else None


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.begin()
    yield world
    assert await catalog_problems(world.kv) == []


async def test_a_prefix_is_protected_while_the_file_is_written_on(world: World) -> None:
    ino, vid = await world.make()
    first = await world.prefix(ino, vid)
    assert first is not None
    assert await world.state(first) is VersionState.LOCAL
    assert await world.shown(ino) is None
    assert await world.protect(ino, first)
    inode = await world.tree.inode(ino)
    assert (inode.open, inode.prefix, inode.prefix_next, inode.prefix_holds) == (vid, first, None, True)
    assert (inode.cur, inode.prot, inode.size, inode.mtime_ns) == (None, None, 100, 600)
    assert await world.state(vid) is VersionState.OPEN


async def test_a_longer_one_takes_the_place_of_a_shorter_one(world: World) -> None:
    ino, vid = await world.make()
    first = await world.protected_prefix(ino, vid)
    second = await world.prefix(ino, vid, 200)
    assert await world.shown(ino) == first  # until the longer one is protected
    third = await world.prefix(ino, vid, 300)
    assert await world.state(second) is None
    assert third is not None
    assert await world.protect(ino, third)
    assert await world.shown(ino) == third
    assert await world.state(first) is None  # no tombstone: its shards are swept


async def test_the_whole_file_takes_the_place_of_a_prefix(world: World) -> None:
    ino, vid = await world.make()
    first = await world.protected_prefix(ino, vid)
    late = await world.prefix(ino, vid, 200)
    await world.local(ino, vid)
    assert late is not None
    assert not await world.protect(ino, late)
    assert await world.state(late) is None
    inode = await world.tree.inode(ino)
    assert (inode.cur, inode.prefix, inode.prefix_holds) == (vid, first, False)  # kept, but not shown: something newer was closed
    assert await world.state(first) is VersionState.PROTECTED
    assert await world.protect(ino, vid)
    assert (await world.tree.inode(ino)).prefix is None
    assert await world.state(first) is None


@pytest.mark.parametrize("how", ["closed", "renamed", "renamed over", "exchanged", "begun anew", "given up"])
@pytest.mark.parametrize("state", ["on its way", "protected"])
async def test_what_voids_a_prefix(world: World, how: str, state: str) -> None:
    ino, vid = await world.make()
    other, _ = await world.make(b"other")
    prefix = await (world.prefix(ino, vid) if state == "on its way" else world.protected_prefix(ino, vid))
    assert prefix is not None
    if how == "closed":
        await void_prefix(world.kv, ino)
    elif how == "begun anew":
        await world.versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
    elif how == "given up":
        await give_up_prefix(world.kv, ino, prefix)
    else:
        target = b"new" if how == "renamed" else b"other"
        await world.tree.rename(ROOT, b"log", ROOT, target, RenameFlags.EXCHANGE if how == "exchanged" else RenameFlags(0))
    if state == "on its way":
        assert await world.state(prefix) is None
        assert not await world.protect(ino, prefix)
    else:
        assert await world.shown(ino) == (prefix if how == "given up" else None)
        assert await world.state(prefix) is VersionState.PROTECTED  # kept as what there is
    assert await world.shown(other) is None if how != "renamed over" else True


@pytest.mark.parametrize("how", ["renamed", "renamed elsewhere", "closed", "sealed", "removed", "attributes"])
async def test_a_prefix_of_what_has_changed_since_it_was_read_is_not_begun(world: World, how: str) -> None:
    ino, vid = await world.make()
    seen = await world.tree.inode(ino)
    if how == "renamed":
        await world.tree.rename(ROOT, b"log", ROOT, b"new")
    elif how == "renamed elsewhere":
        await Namespace(world.kv, OTHER, 1, lambda: 10**6).rename(ROOT, b"log", ROOT, b"new")
    elif how == "attributes":
        await world.tree.set_attributes(ino, AttributeChanges(mode=0o600))
    elif how == "removed":
        await world.tree.unlink(ROOT, b"log")
    else:
        await world.local(ino, vid)
    assert await world.prefix(ino, vid, seen=seen) is None


async def test_another_node_makes_no_prefix(world: World) -> None:
    ino, vid = await world.make()
    prefix = Prefix(new_vid(), 5, b"p" * 16, 4096, 1, await world.tree.inode(ino))
    assert not await begin_prefix(world.kv, OTHER, ino, vid, prefix)
    assert not await begin_prefix(world.kv, ME, ino, new_vid(), prefix)


@pytest.mark.parametrize("how", ["unlink", "rename over"])
async def test_a_removed_file_s_prefix_ends_as_its_protected_version_would(world: World, how: str) -> None:
    ino, vid = await world.make()
    first = await world.protected_prefix(ino, vid)
    second = await world.prefix(ino, vid)
    if how == "unlink":
        await world.tree.unlink(ROOT, b"log")
        assert await world.state(first) is VersionState.DEAD
    else:
        other, other_vid = await world.make(b"new")
        await world.tree.rename(ROOT, b"new", ROOT, b"log")
        assert (await world.tree.inode(other)).prev == first  # R1: it is all that is protected under this name
        await world.local(other, other_vid)
        assert await world.protect(other, other_vid)
        assert await world.state(first) is VersionState.DEAD
    assert await world.state(second) is None


async def test_after_a_power_cut_a_prefix_is_better_than_nothing(world: World) -> None:
    ino, vid = await world.make()
    first = await world.protected_prefix(ino, vid)
    await world.prefix(ino, vid, 200)
    dropped = await world.versions.drop_open_versions([(ino, vid)])
    assert dropped == ([ino], [])
    inode = await world.tree.inode(ino)
    assert (inode.cur, inode.prot, inode.prefix, inode.prefix_next, inode.size) == (first, first, None, None, 100)


async def test_after_a_power_cut_the_content_the_file_had_is_better_than_a_part_of_the_new_one(world: World) -> None:
    ino, vid = await world.make()
    await world.local(ino, vid)
    opened = await world.versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
    first = await world.protected_prefix(ino, opened.vid)
    await world.versions.drop_open_versions([(ino, opened.vid)])
    inode = await world.tree.inode(ino)
    assert (inode.cur, inode.prefix, inode.prefix_holds) == (vid, first, False)


async def test_a_version_that_is_protected_while_a_later_one_is_written_leaves_that_one_s_prefix(world: World) -> None:
    ino, vid = await world.make()
    await world.local(ino, vid)
    opened = await world.versions.open_for_writing(ino, truncate_to_new_segment=new_segment_id())
    first = await world.protected_prefix(ino, opened.vid)
    assert await world.protect(ino, vid)
    inode = await world.tree.inode(ino)
    assert (inode.cur, inode.prot, inode.prefix, inode.prefix_holds) == (vid, vid, first, True)


async def test_times_set_elsewhere_stay(world: World) -> None:
    ino, vid = await world.make()
    await Namespace(world.kv, OTHER, 1, lambda: 10**6).set_attributes(ino, AttributeChanges(mtime_ns=5))
    await world.protected_prefix(ino, vid)
    assert (await world.tree.inode(ino)).mtime_ns == 5


async def test_nothing_happens_to_what_has_no_prefix(world: World) -> None:
    ino, vid = await world.make()
    before: Any = await world.kv.revision()
    await void_prefix(world.kv, ino)
    await give_up_prefix(world.kv, ino, vid)
    await void_prefix(world.kv, InodeNumber(999))
    await give_up_prefix(world.kv, InodeNumber(999), vid)
    assert await world.kv.revision() == before
