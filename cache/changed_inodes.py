"""Which inodes' records changed lately, from the catalog's own log: what a node has to look at again, instead of at everything.

Pure but for waiting: an engine that can't say soon is not waited for.
"""

from collections.abc import Callable, Collection
from contextlib import aclosing

import trio

from ckptfs.cache.catalog_format import INODE_PREFIX, Inode, inode_of_key, unpack
from ckptfs.cache.catalog_kv import Event, KeyValue
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.errors import CatalogCompacted
from ckptfs.cache.ids import InodeNumber, Vid

WAIT_SECONDS = 0.5


async def changed_inodes(kv: KeyValue, after_revision: int, newest_revision: int) -> set[InodeNumber] | None:
    """Inodes whose record was put or deleted after one revision, up to another one; later ones may be among them. None if the
    log does not go back so far, or if it can't be said soon. Raises `CatalogUnavailable`."""
    changed: set[InodeNumber] = set()
    if await _follow(kv, after_revision, newest_revision, lambda event: changed.add(inode_of_key(event.key))):
        return changed
    return None


async def remembered(kv: KeyValue, vids: Collection[Vid]) -> set[Vid]:
    """Those of these versions, whose own inodes are gone, that another inode remembers as what it replaced (`prev_local`), by a
    walk over all inodes; all of them, where a record is damaged, or the log can't tell whether one moved meanwhile. Nobody will
    ever name the others.

    Raises `CatalogUnavailable`, `DamagedData`.
    """
    if not vids:
        return set()
    before = await kv.revision()
    await kv.catch_up()
    wanted, named = set(vids), set[Vid]()

    def look(inode: Inode) -> None:
        if inode.prev_local is not None and inode.prev_local in wanted:
            named.add(inode.prev_local)

    damaged = set[bytes]()
    async with aclosing(scan(kv, INODE_PREFIX, damaged=damaged)) as entries:
        async for entry in entries:
            look(unpack(Inode, entry.value))
    is_known = await _follow(
        kv, before, await kv.revision(), lambda event: None if event.value is None else look(unpack(Inode, event.value))
    )
    return wanted if damaged or not is_known else named


async def _follow(kv: KeyValue, after_revision: int, newest_revision: int, see: Callable[[Event], None]) -> bool:
    """Show each change of an inode's record in that time. False if the log does not go back so far, or if it takes too long."""
    if after_revision == newest_revision:
        return True
    with trio.move_on_after(WAIT_SECONDS):
        try:
            async with aclosing(kv.watch(after_revision)) as transactions:
                async for events in transactions:
                    for event in events:
                        if event.key.startswith(INODE_PREFIX):
                            see(event)
                    if events and events[-1].revision >= newest_revision:
                        return True
        except CatalogCompacted:
            return False
    return False
