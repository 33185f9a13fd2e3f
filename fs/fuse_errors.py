"""The one boundary between exceptions and errnos: everything a handler raises becomes one, here."""

import errno

import trio

from ckptfs.cache import errors as cache
from ckptfs.fs.local_socket import NodeNotAnswering


class ContentUnreachable(Exception):
    """EIO: the bytes exist, but no node that answers now has them. The message names the node and the remedy."""


_TABLE: tuple[tuple[type[Exception], int], ...] = (
    (cache.InodeGone, errno.ESTALE),
    (cache.NoSuchName, errno.ENOENT),
    (cache.NameExists, errno.EEXIST),
    (cache.NotADirectory, errno.ENOTDIR),
    (cache.IsADirectory, errno.EISDIR),
    (cache.DirectoryNotEmpty, errno.ENOTEMPTY),
    (cache.InvalidMove, errno.EINVAL),
    (cache.NameTooLong, errno.ENAMETOOLONG),
    (cache.TooManyLinks, errno.EMLINK),
    (cache.NoSuchAttribute, errno.ENODATA),
    (cache.AttributesTooLarge, errno.ENOSPC),
    (cache.NotPermitted, errno.EPERM),
    (cache.HeldElsewhere, errno.EBUSY),
    (cache.NameMoved, errno.ESTALE),
    (cache.CatalogFull, errno.ENOSPC),
    (cache.CatalogUnavailable, errno.EIO),
    (cache.DamagedData, errno.EIO),
    (cache.StoreError, errno.EIO),
    (ContentUnreachable, errno.EIO),
    (NodeNotAnswering, errno.EIO),
    (trio.TooSlowError, errno.EIO),
)


def errno_of(error: Exception) -> int | None:
    """The errno this exception means to a program, or None for one that nobody foresaw: a bug, answered with EIO and logged.

    An `OSError` of the store's own file system passes through: ENOSPC, EDQUOT, EFBIG mean to the program what they mean there.
    """
    kind = type(error)
    if kind not in _number_of:
        _number_of[kind] = next((number for known, number in _TABLE if issubclass(kind, known)), 0)
    number = _number_of[kind]
    return number or (error.errno if isinstance(error, OSError) else None) or None


_number_of: dict[type[Exception], int] = {}
"""What the table says of each kind that came before: most lookups of new files end here."""
