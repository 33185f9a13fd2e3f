"""What it says about a file that the system doesn't open it, or doesn't say what it is: that it is damaged, or nothing."""

import errno

from ckptfs.replication.errors import PeerRefused, RefusalReason, ReplicationError, ShardDamaged

_NOT_ITS_FAULT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EINTR)


def unopened(error: OSError, what: str) -> ReplicationError:
    """The error to raise for `what`, a shard or segment that is there: `PeerRefused` (busy) if the process or the system lacks
    something, for what is called damaged isn't read any more; else `ShardDamaged`, for the drive can't give it."""
    if error.errno in _NOT_ITS_FAULT:
        return PeerRefused(RefusalReason.BUSY, f"{what} can't be opened now: {error.strerror}")
    return ShardDamaged(f"{what} can't be opened: {error.strerror}")
