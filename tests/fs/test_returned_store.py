"""A store that was declared lost comes back, in a process: where its own content goes of files that were written meanwhile."""

import os
from contextlib import closing
from itertools import count
from pathlib import Path

from ckptfs.cache.catalog_format import LEADER_KEY, Settings
from ckptfs.cache.catalog_kv import Put, Unchanged
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.ids import ROOT_INODE, NodeId, StoreId, new_segment_id
from ckptfs.cache.lost_stores import declare_lost, roll_back
from ckptfs.cache.mount_db import MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import register_store
from ckptfs.cache.versions import LocalCommit, Versions
from ckptfs.fs.returned_store import ReturnedStore

OTHER = StoreId(b"O" * 16)


async def test_conflicts_find_a_place_where_files_have_its_names(tmp_path: Path) -> None:
    kv, clock = MemoryCatalog(), count(1000).__next__
    store = StoreDirectory.create_or_open(tmp_path / "store", NodeId("node-0"))
    segments, mine = Segments(store.segments), store.store_id
    tree, versions = Namespace(kv, mine, 1, clock), Versions(kv, mine, 1, clock)
    await tree.format_if_empty(Settings(1, b"C" * 16, 1, 1, 4096))
    for node, one in (("node-0", mine), ("node-1", OTHER)):
        await register_store(kv, one, NodeId(node), "127.0.0.1:1", "/store", {})
    await tree.create_file(ROOT_INODE, b".ckptfs", 0o644, 0, 0, new_segment_id())
    segment = new_segment_id()
    made = await tree.create_file(ROOT_INODE, b"f", 0o644, 0, 0, segment)
    os.close(segments.create(segment, made.ino))
    Path(segments.path_of(segment)).write_bytes(b"mine")
    await versions.commit_local([LocalCommit(made.ino, made.vid, 4, b"r" * 16, 4096, 500, True)])
    leader = Unchanged(LEADER_KEY, (await kv.transact([], [Put(LEADER_KEY, b"")])).revision)
    assert await declare_lost(kv, leader, mine)
    assert made.ino in [one.ino async for one in roll_back(kv, leader, mine)]
    theirs = Versions(kv, OTHER, 1, clock)
    opened = await theirs.open_for_writing(made.ino, truncate_to_new_segment=new_segment_id())
    await theirs.commit_local([LocalCommit(made.ino, opened.vid, 9, b"r" * 16, 4096, 500, True)])
    with closing(MountDatabase(store.mount_db)) as database:
        assert await ReturnedStore(tree, database, segments, mine, 2, store.boot).bring_back()
    place, _ = await tree.lookup(ROOT_INODE, b".ckptfs~")
    place, _ = await tree.lookup(place, b"conflicts")
    _, inode = await tree.lookup(place, b"%x-%b" % (made.ino, made.vid.hex()[:8].encode()))
    assert inode.open is not None
    found = await versions.version(inode.open)
    assert found is not None
    assert found.segment == segment
    assert (await tree.inode(made.ino)).cur == opened.vid
