"""Cutting the history of a catalog on etcd, which keeps every change until it is told that nobody needs it (R19).

Each node notes in `r/<store>`, bound to its session, how far its replica has come. The leader cuts far behind the least of
them: a replica whose watch breaks for a moment goes on where it was, one of a node that was away for long is loaded anew.
"""

import logging
from collections.abc import Callable, Sequence

import trio

from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_format import REPLICA_PREFIX, SESSION_PREFIX, Session, pack_number, replica_key, unpack, unpack_number
from ckptfs.cache.catalog_kv import Compare, KeyValue, Put
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import StoreId

log = logging.getLogger(__name__)

NOTE_SECONDS = 60.0
NOTED_AFTER_REVISIONS = 1_000
REVISIONS_KEPT = 10_000
"""So far behind every live replica the history goes back at least; it is cut when it is twice as long."""


async def note_progress(kv: KeyValue, store: StoreId, revision: Callable[[], int]) -> None:
    """Note now and then how far the own replica has come, until cancelled. `kv` has the node's session."""
    noted = 0
    while True:
        now = revision()
        if not noted or now - noted >= NOTED_AFTER_REVISIONS:
            try:
                await kv.transact([], [Put(replica_key(store), pack_number(now), bound_to_session=True)])
                noted = now
            except CacheError as error:
                noted = 0  # of a session that has ended it is gone
                log.info("progress_not_noted revision=%d error=%s", now, error)
        await trio.sleep(NOTE_SECONDS)


async def cut_history(kv: EtcdCatalog, compares: Sequence[Compare]) -> int:
    """Cut the history if it has become long; returns the revision it begins after now, 0 if it was left. `compares` are those of
    a leader. Raises `CacheError`."""
    sessions = {unpack(Session, entry.value).store for entry in await kv.range(SESSION_PREFIX)}
    noted = {entry.key[len(REPLICA_PREFIX) :]: unpack_number(entry.value) for entry in await kv.range(REPLICA_PREFIX)}
    live = [noted.get(replica_key(store)[len(REPLICA_PREFIX) :]) for store in sessions]
    if not live or None in live:  # one that has just started
        return 0
    before = await kv.compacted()
    revision = min(number for number in live if number is not None) - REVISIONS_KEPT
    if revision - before < REVISIONS_KEPT:
        return 0
    if not await kv.compact(revision, compares):
        return 0
    log.info("history_cut revision=%d before=%d", revision, before)
    return revision
