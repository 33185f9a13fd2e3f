"""Where directories are, as far as programs have lately come through them: for the paths that files' shards are labelled with.

Only hints: a path may be old, where another node has moved a directory, or lack its beginning.
"""

from collections import OrderedDict

from ckptfs.cache.ids import ROOT_INODE, InodeNumber

DIRECTORIES_MAX = 10_000
"""About 2 MB."""

DEPTH_MAX = 100
PATH_SIZE_MAX = 1024


class DirectoryPaths:
    """The names of some directories, those met last."""

    def __init__(self) -> None:
        self._places: OrderedDict[InodeNumber, tuple[InodeNumber, bytes]] = OrderedDict()

    def note(self, directory: InodeNumber, parent: InodeNumber, name: bytes) -> None:
        """The directory has that name now."""
        places = self._places
        places[directory] = (parent, name)
        places.move_to_end(directory)
        if len(places) > DIRECTORIES_MAX:
            places.popitem(last=False)

    def moved(self, ino: InodeNumber, parent: InodeNumber, name: bytes) -> None:
        """As `note`, for what may be no directory."""
        if ino in self._places:
            self.note(ino, parent, name)

    def path(self, directory: InodeNumber, name: bytes) -> bytes:
        """The path of what has that name there, without a leading slash; without its beginning where that is not known, or too
        long."""
        parts = [name]
        size = len(name)
        for _ in range(DEPTH_MAX):
            place = self._places.get(directory)
            if directory == ROOT_INODE or place is None:
                break
            directory, part = place
            size += len(part) + 1
            if size > PATH_SIZE_MAX:
                break
            parts.append(part)
        return b"/".join(reversed(parts))
