"""A version's segment at its home, seen by whoever can ask the home: is it what was hashed when the file was closed?

The home re-reads and hashes; that the hashes lead to the content root in the catalog is decided here. So a segment that is
right is also a source of the content's table, and of its cells, where too few shards are right.
"""

import enum
from typing import NamedTuple, Protocol

from ckptfs.cache.catalog_format import NO_SEGMENT, Version, VersionState
from ckptfs.cache.checksum import HASH_SIZE, content_root
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.cache.segments import UNREADABLE
from ckptfs.replication.errors import ReplicationError, ShardDamaged, ShardNotFound
from ckptfs.replication.peer_messages import HASHES_MAX
from ckptfs.replication.segment_files import SegmentHashes

CELLS_SHOWN_MAX = 8


class SegmentHashers(Protocol):
    """How a home is asked; the own store is one of them. Raises `ReplicationError`."""

    async def segment_hashes(
        self, store: StoreId, segment: SegmentId, cell_size: int, first_cell: int, count: int
    ) -> SegmentHashes: ...


class SegmentStanding(enum.StrEnum):
    """What became known of a segment. NONE: the version has none, its bytes are in its shards only."""

    NONE = ""
    RIGHT = "ok"
    DAMAGED = "damaged"
    MISSING = "missing"
    UNREACHABLE = "unreachable"
    REPAIRED = "repaired"


class SegmentCheck(NamedTuple):
    """What hashing showed. `table` are the cells' hashes as they are: proved, if the segment is right."""

    standing: SegmentStanding
    message: str = ""
    table: bytes = b""


def has_segment(version: Version) -> bool:
    """Whether the version's home should have its bytes in a segment, hashed."""
    return version.state in (VersionState.LOCAL, VersionState.PROTECTED) and version.segment != NO_SEGMENT


async def segment_table(homes: SegmentHashers, version: Version) -> SegmentHashes:
    """Size and table of the version's segment as they are now. Raises `ReplicationError`."""
    cell_size = max(version.cell_size, 1)
    cells = max(1, -(-version.size // cell_size))
    table = bytearray()
    size = 0
    for first in range(0, cells, HASHES_MAX):
        wanted = min(HASHES_MAX, cells - first)
        found = await homes.segment_hashes(version.home, version.segment, cell_size, first, wanted)
        size = found.size
        table += found.hashes
        if len(found.hashes) < wanted * HASH_SIZE:
            break
    return SegmentHashes(size, bytes(table))


async def check_segment(homes: SegmentHashers, vid: Vid, version: Version, table: bytes = b"") -> SegmentCheck:
    """Have the home hash the version's segment. `table`, if it is known, is the content's: it says which cells are wrong.

    Whether the version still has this segment is for the caller to ask afterwards, if it is damaged: programs that open a file
    for writing may change it from then on. Raises nothing for what is wrong with segment or home.
    """
    if not has_segment(version):
        return SegmentCheck(SegmentStanding.NONE)
    try:
        size, found = await segment_table(homes, version)
    except ShardNotFound as error:
        return SegmentCheck(SegmentStanding.MISSING, str(error))
    except ShardDamaged as error:
        return SegmentCheck(SegmentStanding.DAMAGED, str(error))
    except ReplicationError as error:
        return SegmentCheck(SegmentStanding.UNREACHABLE, str(error))
    if size != version.size:
        return SegmentCheck(SegmentStanding.DAMAGED, f"it has {size} bytes, {version.size} were hashed", found)
    if version.size == 0:
        return SegmentCheck(SegmentStanding.RIGHT)
    if is_table_of(vid, version, found):
        return SegmentCheck(SegmentStanding.RIGHT, table=found)
    return SegmentCheck(SegmentStanding.DAMAGED, _what_is_wrong(found, table), found)


def is_table_of(vid: Vid, version: Version, table: bytes) -> bool:
    """Whether these are the hashes of the version's content."""
    if len(table) != -(-version.size // max(version.cell_size, 1)) * HASH_SIZE:
        return False
    return content_root(vid, version.size, version.cell_size, table) == version.root


def _what_is_wrong(found: bytes, table: bytes) -> str:
    cells = range(len(found) // HASH_SIZE)
    if unreadable := [cell for cell in cells if _hash_of(found, cell) == UNREADABLE]:
        return f"the drive doesn't give {_named(unreadable)}"
    if len(table) == len(found) and (wrong := [cell for cell in cells if _hash_of(found, cell) != _hash_of(table, cell)]):
        return (
            f"{_named(wrong)} of {len(cells)} {'is' if len(wrong) == 1 else 'are'} not what was hashed when the file was closed"
        )
    return "it is not what was hashed when the file was closed"


def _hash_of(table: bytes, cell: int) -> bytes:
    return table[cell * HASH_SIZE : (cell + 1) * HASH_SIZE]


def _named(cells: list[int]) -> str:
    more = f" and {len(cells) - CELLS_SHOWN_MAX} more" if len(cells) > CELLS_SHOWN_MAX else ""
    return f"cell{'s' if len(cells) > 1 else ''} {', '.join(map(str, cells[:CELLS_SHOWN_MAX]))}{more}"
