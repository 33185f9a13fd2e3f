"""From inodes to names, for messages: the catalog has only the way from names to inodes. Pure."""

from collections.abc import Collection
from contextlib import aclosing

from ckptfs.cache.catalog_format import ENTRY_PREFIX, DirectoryEntry, entry_of_key, unpack
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_scan import scan
from ckptfs.cache.ids import ROOT_INODE, InodeNumber

DEPTH_MAX = 1000


async def paths_of(kv: KeyValue, inos: Collection[InodeNumber]) -> dict[InodeNumber, bytes]:
    """A path from the root on, without a leading slash, for each of the inodes that has a name. Walks over all names, once for
    each directory level above them; those whose record is damaged have none."""
    wanted = set(inos)
    places: dict[InodeNumber, tuple[InodeNumber, bytes]] = {}
    for _ in range(DEPTH_MAX):
        if not wanted:
            break
        found = set()
        async with aclosing(scan(kv, ENTRY_PREFIX, damaged=set())) as entries:
            async for entry in entries:
                ino = unpack(DirectoryEntry, entry.value).ino
                if ino in wanted and ino not in places:
                    directory, name = entry_of_key(entry.key)
                    places[ino] = directory, name
                    found.add(directory)
        wanted = found - places.keys() - {InodeNumber(ROOT_INODE)}
    paths = {}
    for ino in inos:
        parts: list[bytes] = []
        at = ino
        while at in places and len(parts) < DEPTH_MAX:
            at, name = places[at]
            parts.append(name)
        if parts:
            paths[ino] = b"/".join(reversed(parts))
    return paths
