"""What can go wrong in this room. A class says who must act; the message says what happened, what is safe, what to do."""

from collections.abc import Awaitable, Callable


class CacheError(Exception):
    """Base of this room's errors."""


class StoreError(CacheError):
    """The store directory can't be used: missing, of a newer format, or in use. The operator must act."""


class DamagedData(CacheError):
    """Bytes on disk or from a peer fail their checksum or make no sense. Nothing of them was used."""


class DamagedRecord(DamagedData):
    """One record of the catalog fails its checksum; the others can be used. `key` is as it was read: it may be damaged itself."""

    def __init__(self, key: bytes, message: str) -> None:
        super().__init__(message)
        self.key = key


class CatalogUnavailable(CacheError):
    """The catalog's engine can't be reached now; the call may be repeated."""


class CatalogFull(CatalogUnavailable):
    """The catalog can't grow: no space is left on its file system. Reads, and changes that free space, go on."""


class SessionEnded(CatalogUnavailable):
    """The node's session in the catalog has ended: it was not renewed in time. What is open stays usable; the node returns with a
    new session. `wait_renewed` waits for that, and says whether it came to it."""

    wait_renewed: Callable[[], Awaitable[bool]] | None = None


class CatalogReplaced(CatalogUnavailable):
    """The catalog is another one than before, or was set back to an older state. Nothing may be collected or written by it."""


class CatalogCompacted(CacheError):
    """The history a watch asked for is gone; the caller reloads in full."""


class NamespaceError(CacheError):
    """Base of the answers a name operation can have besides success; each is one errno."""


class NoSuchName(NamespaceError):
    """ENOENT: the name or the inode does not exist (any more)."""


class InodeGone(NoSuchName):
    """ESTALE: the inode itself is gone, removed or replaced on another node; the kernel looks the name up again."""


class NameExists(NamespaceError):
    """EEXIST: the name is taken."""


class NotADirectory(NamespaceError):
    """ENOTDIR: a directory was needed."""


class IsADirectory(NamespaceError):
    """EISDIR: something other than a directory was needed."""


class DirectoryNotEmpty(NamespaceError):
    """ENOTEMPTY: the directory still has entries."""


class InvalidMove(NamespaceError):
    """EINVAL: a directory can't become its own descendant, or the flags contradict each other."""


class NameTooLong(NamespaceError):
    """ENAMETOOLONG: a name is at most 255 bytes, a link's target at most 4095."""


class TooManyLinks(NamespaceError):
    """EMLINK: the link count can't grow further."""


class NoSuchAttribute(NamespaceError):
    """ENODATA: the extended attribute is not set."""


class AttributesTooLarge(NamespaceError):
    """ENOSPC: the inode's extended attributes would take more room than its record has."""


class NotPermitted(NamespaceError):
    """EPERM: the operation is never allowed on this kind of inode."""


class HeldElsewhere(NamespaceError):
    """EBUSY: another node is writing this file."""


class NameMoved(NamespaceError):
    """ESTALE: the inode was replaced or removed since the kernel looked it up; the kernel looks up again."""


class ContentMoved(NameMoved):
    """ESTALE: the file has other content now than was copied for its new home."""
