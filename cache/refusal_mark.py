"""That a store's drive refused writes, noted where that survives this program and not the boot: in /run.

What was not synced when ext4 gave up after errors is in the page cache only. It is read there, by every later process of the
node, until the file system is unmounted, to be repaired, say: then it is gone, in the same boot, with nothing on the drive to say
so.
"""

import contextlib
import ctypes
import logging
import os
import struct
from pathlib import Path

from ckptfs.cache.ids import StoreId

log = logging.getLogger(__name__)

RUN = Path("/run/ckptfs")

_AT_FDCWD = -100
_STATX_MNT_ID_UNIQUE = 0x4000
"""Linux 6.8. The ids of before are given out again at once."""
_STATX_SIZE = 256
_STATX = struct.Struct("=I140xQ")  # stx_mask, stx_mnt_id
_libc = ctypes.CDLL(None, use_errno=True)


def mount_id_of(path: str | os.PathLike[str]) -> int | None:
    """A number that no other mount of this boot has; None where the kernel can't say."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID_UNIQUE, buffer):
        return None
    mask, mount_id = _STATX.unpack_from(buffer.raw)
    return mount_id if mask & _STATX_MNT_ID_UNIQUE else None


class RefusalMark:
    """The mark of one store, whose directory is `path`. Nothing here raises: without a mark the stop counts as a clean one."""

    def __init__(self, store: StoreId, path: Path) -> None:
        self._mark = RUN / f"{store.hex()}.refused"
        self._path = path

    def set(self) -> None:
        """The drive refuses writes. The first such moment since the file system was mounted counts."""
        if self.was_unmounted() is None:
            try:
                RUN.mkdir(mode=0o700, exist_ok=True)
                self._mark.write_text(f"{mount_id_of(self._path) or ''}\n")
            except OSError as error:
                log.warning("refusal_not_noted path=%s error=%s", self._mark, error)

    def was_unmounted(self) -> bool | None:
        """Whether the file system that refused writes is another mount than that of now; None if there is no mark."""
        try:
            noted = self._mark.read_text().strip()
        except OSError:
            return None
        return noted != str(mount_id_of(self._path) or "")

    def clear(self) -> None:
        """The file system that is mounted now takes writes."""
        with contextlib.suppress(OSError):
            self._mark.unlink()
