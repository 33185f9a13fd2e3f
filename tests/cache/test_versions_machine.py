"""Files written, renamed, removed, protected and dropped in any order: what R1 and R4 promise holds after every step."""

import os
import random
from collections import Counter
from collections.abc import Coroutine
from itertools import count
from typing import Any, TypeVar

import pytest

from ckptfs.cache import prefixes, store_registry
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import NO_SEGMENT, Inode, Settings, Shard, ShardLayout, Version, VersionState, unpack, vid_of_key
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import HeldElsewhere, NamespaceError, NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.cache.namespace import Namespace, RenameFlags
from ckptfs.cache.prefixes import Prefix
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions

Result = TypeVar("Result")
STORES = [StoreId(b"A" * 16), StoreId(b"B" * 16)]
NAMES = (b"a", b"b", b"c")
STEPS = 4_500


def driven(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine over the engine in memory, which never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("it waited")


class LivesOfVersions:
    """Two nodes, three names. `free` are segments the node was told to free: no version that counts may need one of them."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.history: list[str] = []
        self.last_name = b""
        self.met: Counter[str] = Counter()
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

    def step(self) -> None:
        weights = {"create": 8, "open_for_writing": 3, "commit_local": 6, "release_writer": 1, "protect": 4, "drop": 1}
        weights |= {"unlink": 1, "rename": 4, "link": 1, "begin_prefix": 4, "protect_prefix": 4, "void_prefix": 3}
        operation = self.choose.choices(list(weights), list(weights.values()))[0]
        self.history.append(operation)
        getattr(self, operation)()
        self.check()

    def name(self) -> bytes:
        name = self.last_name = self.choose.choice(NAMES)
        self.history.append(name.decode())
        return name

    def node(self, inode: Inode | None = None) -> int:
        """Mostly the one that writes the file."""
        if inode is not None and inode.writer is not None and self.choose.random() < 0.9:
            return STORES.index(inode.writer.store)
        return self.choose.randrange(2)

    def freed(self, ended: list[tuple[Vid, Version]]) -> None:
        self.free |= {version.segment for _, version in ended if version.segment != NO_SEGMENT}

    def inode_of(self, name: bytes) -> Any:
        try:
            return driven(self.trees[0].lookup(ROOT_INODE, name))
        except NoSuchName:
            return None, None

    def create(self) -> None:
        name, node = self.name(), self.node()
        try:
            driven(self.trees[node].create_file(ROOT_INODE, name, 0o644, 0, 0, next(self.segments)))
        except NamespaceError:
            return

    def open_for_writing(self) -> None:
        ino, inode = self.inode_of(self.name())
        node, anew = self.node(inode), self.choose.random() < 0.5
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

    def commit_local(self) -> None:
        ino, inode = self.inode_of(self.name())
        node, release = self.node(inode), self.choose.random() < 0.7
        if ino is None or inode.open is None:
            return
        commit = LocalCommit(ino, inode.open, 7, b"r" * 16, 4096, 1, release)
        committed = driven(self.versions[node].commit_local([commit]))
        mine = inode.writer.store == STORES[node]
        assert committed.vids == ({inode.open} if mine else set())
        self.freed(committed.freed)
        if mine:
            # R1: what the new content made superfluous is given back.
            after = self.inode_of(self.last_name)[1]
            assert after.prev_local is None
            assert after.prot == inode.prot

    def release_writer(self) -> None:
        name = self.name()
        ino, inode = self.inode_of(name)
        node = self.node(inode)
        if ino is not None and inode.cur is not None:
            driven(self.versions[node].release_writer(ino, inode.cur))

    def protect(self) -> None:
        name = self.name()
        ino, inode = self.inode_of(name)
        node = self.node(inode)
        if ino is None or inode.cur is None:
            return
        shards = [Shard(store, b"h" * 16) for store in STORES]
        commit = ProtectedCommit(ino, inode.cur, ShardLayout.STRIPED, 1, 1, 4096, shards, self.holders)
        done = driven(self.versions[node].commit_protected([commit]))
        if done:
            after = self.inode_of(name)[1]
            assert (after.prot, after.prev) == (inode.cur, None)
            self.met["protected"] += 1

    def begin_prefix(self) -> None:
        ino, inode = self.inode_of(self.name())
        if ino is None or inode.open is None:
            return
        node = self.node(inode)
        made = Prefix(next(self.vids), 7, b"r" * 16, 4096, 1, inode)
        begun = driven(prefixes.begin_prefix(self.kv, STORES[node], ino, inode.open, made))
        assert begun == (inode.writer.store == STORES[node])

    def protect_prefix(self) -> None:
        name = self.name()
        ino, inode = self.inode_of(name)
        if ino is None or inode.prefix_next is None:
            return
        shards = [Shard(store, b"h" * 16) for store in STORES]
        commit = ProtectedCommit(ino, inode.prefix_next, ShardLayout.STRIPED, 1, 1, 4096, shards, self.holders)
        assert driven(self.versions[self.node(inode)].commit_protected([commit])) == {inode.prefix_next}
        after = self.inode_of(name)[1]
        assert (after.prefix, after.prefix_holds, after.cur, after.prot) == (inode.prefix_next, True, inode.cur, inode.prot)
        self.met["prefix protected"] += 1

    def void_prefix(self) -> None:
        name = self.name()
        ino, inode = self.inode_of(name)
        if ino is not None:
            driven(prefixes.void_prefix(self.kv, ino))
            assert not self.inode_of(name)[1].prefix_holds
            self.met["prefix voided"] += inode.prefix_holds

    def drop(self) -> None:
        name = self.name()
        ino, inode = self.inode_of(name)
        node = self.node(inode)
        if ino is None or inode.open is None or inode.writer.store != STORES[node]:
            return
        dropped = driven(self.versions[node].drop_open_versions([(ino, inode.open)]))
        assert dropped.shown + dropped.gone == [ino]
        had = inode.cur or inode.prev_local or inode.prot or inode.prev or inode.prefix
        assert (dropped.shown == [ino]) is (had is not None)
        self.met["dropped to nothing" if had is None else "dropped to what was before"] += 1
        if had is None:
            assert self.inode_of(name) == (None, None)
        else:
            assert self.inode_of(name)[1].cur == had

    def unlink(self) -> None:
        name, node = self.name(), self.node()
        try:
            removed = driven(self.trees[node].unlink(ROOT_INODE, name))
        except NoSuchName:
            return
        self.freed(removed.dead)

    def rename(self) -> None:
        old, new, node, flags = self.name(), self.name(), self.node(), self.choose.choice([0, 0, 2])
        protected, (_, victim) = self.best_protected(new), self.inode_of(new)
        try:
            renamed = driven(self.trees[node].rename(ROOT_INODE, old, ROOT_INODE, new, RenameFlags(flags)))
        except NoSuchName:
            return
        self.freed(renamed.dead)
        if renamed.replaced is not None:
            self.freed(renamed.replaced.dead)
            if protected is not None and victim.nlink == 1:
                # R1: the name led to something protected, and still has something protected behind it.
                assert self.best_protected(new) is not None
                self.met["protected replaced"] += 1
            self.met["local remembered"] += self.inode_of(new)[1].prev_local is not None

    def link(self) -> None:
        old, new = self.name(), self.name()
        ino, _ = self.inode_of(old)
        if ino is None:
            return
        try:
            driven(self.trees[0].link(InodeNumber(ino), ROOT_INODE, new))
        except NamespaceError:
            return

    def best_protected(self, name: bytes) -> Vid | None:
        _, inode = self.inode_of(name)
        found: Vid | None = None if inode is None else inode.prot or inode.prev or inode.prefix
        return found

    def check(self) -> None:
        assert driven(catalog_problems(self.kv)) == []
        for entry in driven(self.kv.range(b"v/")):
            version = unpack(Version, entry.value)
            if version.state in (VersionState.OPEN, VersionState.LOCAL):
                assert version.segment not in self.free, vid_of_key(entry.key)


SEEDS_COUNTED = 5
"""Those of the short run show that lives meet all there is. Of hundreds, one never meets the rarest of it."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("CKPTFS_WALKS", "5"))))
def test_any_life_of_versions(seed: int) -> None:
    world = LivesOfVersions(seed)
    try:
        for _ in range(STEPS):
            world.step()
    except BaseException as error:
        error.add_note(" ".join(world.history[-60:]))
        raise
    if seed >= SEEDS_COUNTED:
        return
    expected = ("protected", "protected replaced", "local remembered", "dropped to nothing", "dropped to what was before")
    for what in expected:
        assert world.met[what] >= 3, world.met
    assert world.met["prefix protected"], world.met
    assert world.met["prefix voided"], world.met
