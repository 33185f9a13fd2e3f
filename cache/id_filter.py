"""A set of ids in a few bytes each: for walks over everything there is, whose memory must not grow with it much. Pure."""

import os

SLOTS_PER_ID = 64
SLOTS_MIN = 1 << 20


class IdFilter:
    """It may have an id that was not added, by chance and another one in each filter: one of 64 where `count` were, of far more
    where few were. It never lacks one that was. 8 to 16 bytes an id.
    """

    def __init__(self, count: int) -> None:
        self._mask = (1 << max(SLOTS_MIN, SLOTS_PER_ID * count).bit_length()) - 1
        self._slots = bytearray(self._mask + 1 >> 3)
        self._salt = os.urandom(8)

    def add(self, one: bytes) -> None:
        slot = hash(self._salt + one) & self._mask
        self._slots[slot >> 3] |= 1 << (slot & 7)

    def __contains__(self, one: bytes) -> bool:
        slot = hash(self._salt + one) & self._mask
        return bool(self._slots[slot >> 3] >> (slot & 7) & 1)
