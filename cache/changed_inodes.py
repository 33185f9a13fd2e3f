"""Which inodes' records changed lately, from the catalog's own log: what a node has to look at again, instead of at everything.

Pure but for waiting: an engine that can't say soon is not waited for.
"""

from contextlib import aclosing

import trio

from ckptfs.cache.catalog_format import INODE_PREFIX, inode_of_key
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import CatalogCompacted
from ckptfs.cache.ids import InodeNumber

WAIT_SECONDS = 0.5


async def changed_inodes(kv: KeyValue, after_revision: int, newest_revision: int) -> set[InodeNumber] | None:
    """Inodes whose record was put or deleted after one revision, up to another one; later ones may be among them. None if the
    log does not go back so far, or if it can't be said soon. Raises `CatalogUnavailable`."""
    changed: set[InodeNumber] = set()
    if after_revision == newest_revision:
        return changed
    with trio.move_on_after(WAIT_SECONDS):
        try:
            async with aclosing(kv.watch(after_revision)) as transactions:
                async for events in transactions:
                    changed.update(inode_of_key(event.key) for event in events if event.key.startswith(INODE_PREFIX))
                    if events and events[-1].revision >= newest_revision:
                        return changed
        except CatalogCompacted:
            return None
    return None
