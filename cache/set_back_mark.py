"""How often files were opened for writing and closed, counted twice: in the store, and in /run, where it outlives this program
and not the boot. Neither is ever synced.

A store may lose what was not synced in the same boot: a snapshot or a copied image of its drive is put in its place, say. Then
nothing on the drive says so, and what is left of unsynced segments would be taken for all of it; but the store's count is behind.
"""

import contextlib
import logging
import os
from pathlib import Path

from ckptfs.cache import refusal_mark
from ckptfs.cache.ids import StoreId

log = logging.getLogger(__name__)

_SIZE = 8  # little-endian


class SetBackMark:
    """The two counts of one store, whose own is at `path`. Nothing here raises: without them a store counts as never set back."""

    def __init__(self, store: StoreId, path: Path) -> None:
        self._places = (path, refusal_mark.RUN / f"{store.hex()}.uses")
        self._descriptors: list[int] = []
        self._count = 0

    def was_set_back(self) -> bool:
        """Whether the store has lost what was not synced, since it was used last in this boot."""
        in_store, in_run = map(_counted, self._places)
        return in_store < in_run

    def begin(self) -> None:
        """Count from now on, beginning with this start."""
        self._count = max(map(_counted, self._places))
        try:
            self._places[1].parent.mkdir(mode=0o700, exist_ok=True)
            for path in self._places:
                self._descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            log.warning("uses_not_counted error=%s: a store that is set back in this boot is not known to be", error)
            self.close()
        self.count()

    def count(self) -> None:
        """Once more: that of the store first, for this program may be killed in between."""
        self._count += 1
        try:
            for descriptor in self._descriptors:
                os.pwrite(descriptor, self._count.to_bytes(_SIZE, "little"), 0)
        except OSError as error:  # the drive takes no writes: the refusal mark says what that means
            log.warning("uses_not_counted error=%s", error)
            self.close()

    def close(self) -> None:
        """Count no more."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def clear(self) -> None:
        """Forget what this boot knows of the store."""
        with contextlib.suppress(OSError):
            self._places[1].unlink()


def _counted(path: Path) -> int:
    """0 where none is."""
    try:
        return int.from_bytes(path.read_bytes()[:_SIZE], "little")
    except OSError:
        return 0
