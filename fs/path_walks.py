"""How far each thread has come with the path of its call, as its requests tell.

The kernel walks a path name by name, in the thread that calls, and says with each request which thread that is. An open names
the inode only: the name is the one that its thread has looked up last. Told that what it came to is gone or has moved (ESTALE),
the kernel walks the path once more from its beginning, in the same thread; told so a second time, it tells the program, which on
a drive would never hear of that.
"""

from collections import OrderedDict

from ckptfs.cache.ids import InodeNumber

THREADS_MAX = 16_384
LOOKUPS_AGAIN_MAX = 64
"""So many names a path is taken to have at most; a walk that is begun again and comes to nothing ends unseen."""


class Walk:
    """Of one thread."""

    __slots__ = ("ino", "is_current", "key", "lookups_again", "opens_again")

    def __init__(self) -> None:
        self.ino: InodeNumber | None = None
        """What its last lookup led to; None: to nothing, or there was none."""
        self.key = b""
        """The name's, in the catalog."""
        self.is_current = False
        """That lookup was of a walk begun again, and behind a barrier: during this call the name did lead there."""
        self.lookups_again = 0
        """So many of its next lookups are taken for those of a walk begun again."""
        self.opens_again = False
        """It is an open that the walk was begun again for."""

    def looks_up(self) -> bool:
        """A lookup begins; says whether it is one of a walk begun again."""
        self.ino = None
        if not self.lookups_again:
            self.opens_again = False
            return False
        self.lookups_again -= 1
        return True

    def came_to(self, key: bytes, ino: InodeNumber, *, is_current: bool) -> None:
        """What that lookup led to."""
        self.key, self.ino, self.is_current = key, ino, is_current

    def begins_again(self, *, opens: bool) -> None:
        """The kernel is told ESTALE, by an open or by what comes before it."""
        self.ino, self.lookups_again, self.opens_again = None, LOOKUPS_AGAIN_MAX, opens

    def ends(self) -> None:
        """The file is open."""
        self.is_current, self.lookups_again, self.opens_again = False, 0, False


class PathWalks:
    """Of the threads that looked something up last."""

    def __init__(self) -> None:
        self._walks: OrderedDict[int, Walk] = OrderedDict()

    def of(self, thread: int) -> Walk:
        """The walk of the thread with this number (`RequestHeader.pid`). Of 0, which are all whose numbers mean nothing where the
        file system was mounted, nothing is remembered."""
        if not thread:
            return Walk()
        if (walk := self._walks.get(thread)) is None:
            walk = self._walks[thread] = Walk()
            if len(self._walks) > THREADS_MAX:
                self._walks.popitem(last=False)
        else:
            self._walks.move_to_end(thread)
        return walk
