"""The identifiers, as distinct types so that one is never passed for another."""

import os
import time
from typing import NewType

Vid = NewType("Vid", bytes)
"""A version's name: 16 random bytes, never reused. Shown to people as 32 hex digits."""

SegmentId = NewType("SegmentId", bytes)
"""A backing file's name: 16 bytes, the first 4 of them the time. It outlives a version when a file is rewritten in place."""

StoreId = NewType("StoreId", bytes)
"""A store's name: 16 random bytes, made with the store directory; a wiped machine comes back as another store."""

NodeId = NewType("NodeId", str)
"""A machine's configured name, for people and failure domains: never the identity of a store."""

InodeNumber = NewType("InodeNumber", int)
"""A catalog inode number, which is also the FUSE node id and `st_ino`. Never reused. The root is 1."""

ROOT_INODE = InodeNumber(1)
ID_SIZE = 16
SEGMENT_WINDOW_SECONDS = 16


def new_vid() -> Vid:
    """A fresh random version id."""
    return Vid(os.urandom(ID_SIZE))


def new_segment_id() -> SegmentId:
    """A fresh segment id: the time in steps of 16 seconds (4 bytes, big-endian), then 12 random bytes.

    Segments lie in directories by that time. So a directory is quiet when its segments are sealed, and syncing it is free; spread
    by random digits, every sync of a directory waited for a journal commit of the newest creates (creates took 5 times as long).
    """
    window = int(time.time()) // SEGMENT_WINDOW_SECONDS & 0xFFFFFFFF
    return SegmentId(window.to_bytes(4, "big") + os.urandom(ID_SIZE - 4))


def segment_made_at(segment: SegmentId) -> int:
    """The earliest second of wall time at which the segment can have been made."""
    return int.from_bytes(segment[:4], "big") * SEGMENT_WINDOW_SECONDS


def new_store_id() -> StoreId:
    """A fresh random store id."""
    return StoreId(os.urandom(ID_SIZE))
