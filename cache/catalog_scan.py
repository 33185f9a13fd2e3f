"""All records of one kind, one after the other, also where some of them are damaged. Pure."""

from collections.abc import AsyncGenerator

from ckptfs.cache.catalog_kv import Entry, KeyValue
from ckptfs.cache.errors import DamagedRecord

PAGE_COUNT = 5_000


async def scan(
    kv: KeyValue, prefix: bytes, *, after: bytes = b"", damaged: set[bytes] | None = None, page_count: int = PAGE_COUNT
) -> AsyncGenerator[Entry, None]:
    """All entries with the prefix whose key is greater than `after`, read in pages: not one moment of the catalog, but nothing
    that stays is missed.

    A record that fails its checksum raises `DamagedRecord`, or with `damaged` is passed over, and its key put there: for those
    whose work on all other files must go on.
    """
    limit = page_count
    while True:
        try:
            entries = await kv.range(prefix, after=after, limit=limit)
        except DamagedRecord as damage:
            if damaged is None:
                raise
            if limit > 1:  # what stands before it is read first, in ever smaller pages
                limit = max(1, limit // 10)
                continue
            if not (damage.key > after and damage.key.startswith(prefix)):
                raise  # its key is damaged too: nobody can tell where to go on
            damaged.add(damage.key)
            after, limit = damage.key, page_count
            continue
        if not entries:
            return
        for entry in entries:
            yield entry
        after = entries[-1].key
