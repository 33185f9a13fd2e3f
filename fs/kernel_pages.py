"""Which served files the kernel's page cache has as they are now, so that an open may leave it what it has.

An open that is answered without KEEP_CACHE drops the inode's pages. At home in the served lane every change goes through this
kernel, which keeps its pages right itself; wrong they are only after the bytes were others: another version, another segment, or
one that was written past them in the passthrough lane. A file of another node is not looked after: its pages are always dropped.
"""

from collections import OrderedDict

from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.fs.open_files import FileInUse, Lane

REMEMBERED_MAX = 16_384
"""Files; of one that is forgotten the next open drops the pages once."""


class KernelPages:
    """The memory of one mount process. It begins with none: the first open of each file drops what was cached before."""

    def __init__(self) -> None:
        self._contents: OrderedDict[InodeNumber, tuple[Vid, SegmentId]] = OrderedDict()

    def may_stay(self, file: FileInUse) -> bool:
        """Whether the open that is answered now may leave the kernel its pages; the next one relies on this answer."""
        before = self._contents.pop(file.ino, None)
        if file.segment is None or file.lane is not Lane.SERVED:
            return False
        content = self._contents[file.ino] = file.vid, file.segment
        if len(self._contents) > REMEMBERED_MAX:
            self._contents.popitem(last=False)
        return content == before
