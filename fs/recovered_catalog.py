"""What a node does when it meets a catalog that was recovered since: once for each recovery, before anything is mounted.

What the node has noted about the catalog that was, and about files in flight, holds no more: `mount.db` is set aside, so that all
is looked at, and so that segments the recovered catalog doesn't know are kept (`segment_sweep`): they may be all that is left of
what was saved last. Revisions and inode numbers go on beyond those of before, so nothing else has to be forgotten.
"""

import contextlib
import logging
import os

from ckptfs.cache.catalog_format import RECOVERED_KEY, Recovered, unpack
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import StoreError
from ckptfs.cache.store import StoreDirectory, sync_directory

log = logging.getLogger(__name__)

ASIDE = ".before-recovery-"
"""What follows the name of what was set aside; then the beginning of the recovery's id."""


async def take_note_of_recovery(kv: KeyValue, store: StoreDirectory) -> bool:
    """Whether the catalog was recovered since this store was last used. Raises `StoreError`, `DamagedData`.

    Precondition: the catalog is the store's, and not older than what it has seen; no process of the node has `mount.db` open.
    """
    entry = await kv.get(RECOVERED_KEY)
    if entry is None:
        return False
    recoveries = unpack(Recovered, entry.value).recoveries
    newest = recoveries[-1]
    if newest.id.hex() in store.recoveries:
        return False
    try:
        for suffix in ("-wal", "-shm", ""):  # the database last: without it the others are looked at again
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{store.mount_db}{suffix}", f"{store.mount_db}{ASIDE}{newest.id.hex()[:8]}{suffix}")
        sync_directory(store.path)
    except OSError as error:
        raise StoreError(f"{store.mount_db} can't be set aside: {error.strerror}; nothing was mounted") from None
    store.note_recoveries([recovery.id.hex() for recovery in recoveries])
    log.error(
        "catalog_recovered id=%s known_to=%d: files saved after that revision may be under /.ckptfs/recovered, or only in this"
        " store, where nothing is removed that the catalog doesn't know; ckptfs verify --repair makes shards whole",
        newest.id.hex(),
        newest.known_to,
    )
    return True
