"""How a store was used last, and so which of its segments may have lost what was not synced.

Which boot the store was last used in stands in `mount.db`, and in a file of its own for when that is lost. Only where both are
gone does the clock decide: it may have been set since, forwards or back. A file system that refused writes and was unmounted then
is as good as a power cut (`refusal_mark`), and so is a store that was set back (`set_back_mark`).
"""

import contextlib
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.boot import boot_id, booted_at_seconds
from ckptfs.cache.ids import SegmentId, segment_made_at
from ckptfs.cache.mount_db import BOOT_FACT, MountDatabase
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.set_back_mark import SetBackMark


class LastUse(NamedTuple):
    """`is_noted`: `mount.db` knew the boot. `power_was_cut`: nothing that was not synced is to be believed. `booted_at`: nor
    what is in segments older than this (seconds, wall time); 0 where the boot is known."""

    is_noted: bool
    power_was_cut: bool
    booted_at: float

    def may_have_lost(self, segment: SegmentId) -> bool:
        """Whether bytes of it that were not synced may be missing."""
        return self.power_was_cut or segment_made_at(segment) < self.booted_at


def last_use(
    database: MountDatabase, boot: Path, refusal: RefusalMark, set_back: SetBackMark, *, new_connection: bool
) -> LastUse:
    """As it is before the store is used anew: `MountRecovery` notes that it is. `boot` is the store's file of that name."""
    noted = database.fact(BOOT_FACT)
    known = noted or boot_of_file(boot)
    # A store that programs have files open on can't have been set back.
    was_set_back = new_connection and set_back.was_set_back()
    power_was_cut = known not in (None, boot_id()) or bool(refusal.was_unmounted()) or was_set_back
    return LastUse(noted is not None, power_was_cut, booted_at_seconds() if known is None else 0.0)


def boot_of_file(boot: Path) -> bytes | None:
    """The boot in the store's file of that name."""
    with contextlib.suppress(OSError):
        return boot.read_bytes().strip() or None
    return None
