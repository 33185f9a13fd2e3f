"""Files written, renamed, removed, protected and dropped in any order: what R1 and R4 promise holds after every step."""

import os
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ckptfs.cache import store_registry
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import NO_SEGMENT, Settings, Shard, ShardLayout, Version, VersionState, unpack, vid_of_key
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import HeldElsewhere, NamespaceError, NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.namespace import Namespace, RenameFlags
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions

Result = TypeVar("Result")
STORES = [StoreId(b"A" * 16), StoreId(b"B" * 16)]
names = st.sampled_from([b"a", b"b", b"c"])
nodes = st.integers(0, 1)


def driven(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine over the engine in memory, which never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("it waited")


class LivesOfVersions(RuleBasedStateMachine):
    """Two nodes, three names. `free` are segments the node was told to free: no version that counts may need one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = MemoryCatalog()
        clock = count(1).__next__
        self.vids = map(Vid, (b"%016d" % number for number in count()))
        self.segments = map(SegmentId, (b"%016d" % number for number in count(10**9)))
        make_vid = self.vids.__next__
        self.trees = [Namespace(self.kv, store, 1, clock, make_vid=make_vid) for store in STORES]
        self.versions = [Versions(self.kv, store, 1, clock, make_vid=make_vid) for store in STORES]
        driven(self.trees[0].format_if_empty(Settings(1, b"C" * 16, 1, 1, 4096)))
        self.holders = {
            store: driven(store_registry.register_store(self.kv, store, NodeId(store.decode()), "", "", {})) for store in STORES
        }
        self.free: set[SegmentId] = set()

    def freed(self, ended: list[tuple[Vid, Version]]) -> None:
        self.free |= {version.segment for _, version in ended if version.segment != NO_SEGMENT}

    def inode_of(self, name: bytes) -> Any:
        try:
            return driven(self.trees[0].lookup(ROOT_INODE, name))
        except NoSuchName:
            return None, None

    @rule(name=names, node=nodes)
    def create(self, name: bytes, node: int) -> None:
        try:
            driven(self.trees[node].create_file(ROOT_INODE, name, 0o644, 0, 0, next(self.segments)))
        except NamespaceError:
            return

    @rule(name=names, node=nodes, anew=st.booleans())
    def open_for_writing(self, name: bytes, node: int, anew: bool) -> None:
        ino, inode = self.inode_of(name)
        if ino is None:
            return
        current = None if inode.cur is None else driven(self.versions[node].version(inode.cur))
        if not anew and inode.open is None and (current is None or current.segment in self.free | {NO_SEGMENT}):
            return
        segment = next(self.segments) if anew else None
        try:
            opened = driven(self.versions[node].open_for_writing(ino, truncate_to_new_segment=segment))
        except HeldElsewhere:
            return
        assert opened.version.home == STORES[node]
        assert opened.segment not in self.free
        if not opened.carried_on and opened.previous is not None:
            self.freed([opened.previous])

    @rule(name=names, node=nodes, release=st.booleans())
    def commit_local(self, name: bytes, node: int, release: bool) -> None:
        ino, inode = self.inode_of(name)
        if ino is None or inode.open is None:
            return
        commit = LocalCommit(ino, inode.open, 7, b"r" * 16, 4096, 1, release)
        committed = driven(self.versions[node].commit_local([commit]))
        mine = inode.writer.store == STORES[node]
        assert committed.vids == ({inode.open} if mine else set())
        self.freed(committed.freed)

    @rule(name=names, node=nodes)
    def release_writer(self, name: bytes, node: int) -> None:
        ino, inode = self.inode_of(name)
        if ino is not None and inode.cur is not None:
            driven(self.versions[node].release_writer(ino, inode.cur))

    @rule(name=names, node=nodes)
    def protect(self, name: bytes, node: int) -> None:
        ino, inode = self.inode_of(name)
        if ino is None or inode.cur is None:
            return
        shards = [Shard(store, b"h" * 16) for store in STORES]
        commit = ProtectedCommit(ino, inode.cur, ShardLayout.STRIPED, 1, 1, 4096, shards, self.holders)
        driven(self.versions[node].commit_protected([commit]))

    @rule(name=names, node=nodes)
    def drop(self, name: bytes, node: int) -> None:
        ino, inode = self.inode_of(name)
        if ino is None or inode.open is None or inode.writer.store != STORES[node]:
            return
        dropped = driven(self.versions[node].drop_open_versions([(ino, inode.open)]))
        assert dropped.shown + dropped.gone == [ino]
        had = inode.cur or inode.prev_local or inode.prot or inode.prev
        assert (dropped.shown == [ino]) is (had is not None)
        if had is None:
            assert self.inode_of(name) == (None, None)
        else:
            assert self.inode_of(name)[1].cur == had

    @rule(name=names, node=nodes)
    def unlink(self, name: bytes, node: int) -> None:
        try:
            removed = driven(self.trees[node].unlink(ROOT_INODE, name))
        except NoSuchName:
            return
        self.freed(removed.dead)

    @rule(old=names, new=names, node=nodes, flags=st.sampled_from([0, 0, 2]))
    def rename(self, old: bytes, new: bytes, node: int, flags: int) -> None:
        two = [self.best_protected(name) for name in (old, new)]
        try:
            renamed = driven(self.trees[node].rename(ROOT_INODE, old, ROOT_INODE, new, RenameFlags(flags)))
        except NoSuchName:
            return
        self.freed(renamed.dead)
        if renamed.replaced is not None:
            self.freed(renamed.replaced.dead)
            # R1: a name that led to something protected still has something protected behind it.
            assert two[1] is None or self.best_protected(new) is not None

    @rule(old=names, new=names)
    def link(self, old: bytes, new: bytes) -> None:
        ino, _ = self.inode_of(old)
        if ino is None:
            return
        try:
            driven(self.trees[0].link(InodeNumber(ino), ROOT_INODE, new))
        except NamespaceError:
            return

    def best_protected(self, name: bytes) -> Vid | None:
        _, inode = self.inode_of(name)
        found: Vid | None = None if inode is None else inode.prot or inode.prev
        return found

    @invariant()
    def consistent(self) -> None:
        assert driven(catalog_problems(self.kv)) == []
        for entry in driven(self.kv.range(b"v/")):
            version = unpack(Version, entry.value)
            if version.state in (VersionState.OPEN, VersionState.LOCAL):
                assert version.segment not in self.free, vid_of_key(entry.key)


@pytest.mark.slow
def test_any_life_of_versions() -> None:
    examples = int(os.environ.get("CKPTFS_EXAMPLES", "150"))
    run_state_machine_as_test(LivesOfVersions, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))
