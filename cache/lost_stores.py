"""What a store that is lost takes with it, and how its return undoes that (R8, R10). Pure.

The leader declares a store lost, and only while its node has no session. Then for each file whose newest content only that store
had, one transaction shows what is left of it: the prefix that readers have while it holds (R16), else the newest of its versions
that another store has, `rolled_back_from` naming what is gone; or the file is `lost` where there is none. A prefix that doesn't
hold is a part of what was closed, and only better than nothing. The version's key stays, and so does that of one that was being
written over it: a store that returns gives its files back what nobody touched since. What it has besides of files that are still
there is told to the caller (`fs/returned_store.py` makes files of their own of it): it never replaces newer content. What was
removed meanwhile stays removed.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import msgspec

from ckptfs.cache.catalog_format import (
    BLOCKS_UNKNOWN,
    Session,
    Store,
    StoreState,
    Version,
    VersionState,
    Writer,
    hold_key,
    inode_key,
    pack,
    session_key,
    store_key,
    unpack,
    version_key,
)
from ckptfs.cache.catalog_kv import OPERATIONS_MAX, Compare, Delete, Entry, KeyValue, Operation, Put, Unchanged
from ckptfs.cache.catalog_records import commit, existing_inode, find_version, repeated
from ckptfs.cache.changed_inodes import remembered
from ckptfs.cache.errors import DamagedRecord, NoSuchName
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId, Vid
from ckptfs.cache.prefixes import without_prefix
from ckptfs.cache.removal import end_versions
from ckptfs.cache.segment_holds import held_by
from ckptfs.cache.store_registry import stores
from ckptfs.cache.version_recovery import newest_left, versions_at_home
from ckptfs.cache.version_states import version_step

HOME_ONLY = (VersionState.OPEN, VersionState.LOCAL)
"""Versions whose bytes only their home has."""


class RolledBack(NamedTuple):
    """A file whose newest content is gone with its store. `shown`: what it shows now; None: it is lost."""

    ino: InodeNumber
    gone: Vid
    shown: Vid | None


async def declare_lost(kv: KeyValue, leader: Unchanged, store: StoreId) -> bool:
    """Make the store `LOST`; False, and nothing is changed, if its node is up, or it isn't `IN` or `DRAINING` any more, or
    `leader` doesn't hold."""
    entry = await kv.get(store_key(store))
    if entry is None:
        return False
    record = unpack(Store, entry.value)
    session = await kv.get(session_key(record.node))
    if _is_of(session, store) or record.state.is_gone:
        return False
    compares = [
        leader,
        Unchanged(store_key(store), entry.mod_revision),
        _unchanged_session(record.node, session),
    ]
    was_draining = record.state is StoreState.DRAINING
    lost = msgspec.structs.replace(record, state=StoreState.LOST, settled=False, was_draining=was_draining)
    return (await kv.transact(compares, [Put(store_key(store), pack(lost))])).succeeded


async def roll_back(kv: KeyValue, leader: Unchanged, store: StoreId) -> AsyncGenerator[RolledBack, None]:
    """Each file whose newest content only this store had, which is lost or removed, as it is rolled back; at the end the store
    holds no segments any more, and is `settled`.

    Begun again after an interruption it goes on with what is left. A file of which a record is damaged is passed over. Ends early
    if `leader` doesn't hold any more, the store has returned, or its node is up: that gives its files back itself, and would pass
    over what is rolled back after it has looked.
    """
    if await _still_gone(kv, leader, store) is None:
        return
    known = {known: record for known, (record, _) in (await stores(kv)).items()}
    async with aclosing(versions_at_home(kv, store, HOME_ONLY, damaged=set())) as versions:
        async for vid, version in versions:
            try:
                done = await repeated(partial(_attempt_roll_back, kv, leader, store, known, vid, version.ino))
            except DamagedRecord:
                continue  # its file is an error for all who ask; the others are not
            if done is not None:
                yield done
    if (gone := await _still_gone(kv, leader, store)) is not None:
        record, compares = gone
        # Nobody there reads any more: what died may go.
        holds: list[Operation] = [Delete(hold_key(segment, store)) for segment in await held_by(kv, store)]
        for start in range(0, len(holds), OPERATIONS_MAX):
            await kv.transact(compares, holds[start : start + OPERATIONS_MAX])
        settled = msgspec.structs.replace(record, settled=True)
        await kv.transact(compares, [Put(store_key(store), pack(settled))])


async def _still_gone(kv: KeyValue, leader: Unchanged, store: StoreId) -> tuple[Store, list[Compare]] | None:
    """The store's record, and what holds while its files may be rolled back; None if they may not: it is back, or it was lost
    and its node is up. One that was removed never returns."""
    entry = await kv.get(store_key(store))
    if entry is None:
        return None
    record = unpack(Store, entry.value)
    compares: list[Compare] = [leader, Unchanged(store_key(store), entry.mod_revision)]
    if record.state is StoreState.REMOVED:
        return record, compares
    session = await kv.get(session_key(record.node))
    if record.state is not StoreState.LOST or _is_of(session, store):
        return None
    return record, [*compares, _unchanged_session(record.node, session)]


def _is_of(session: Entry | None, store: StoreId) -> bool:
    return session is not None and unpack(Session, session.value).store == store


def _unchanged_session(node: NodeId, session: Entry | None) -> Unchanged:
    return Unchanged(session_key(node), 0 if session is None else session.mod_revision)


async def _attempt_roll_back(
    kv: KeyValue, leader: Unchanged, store: StoreId, known: Mapping[StoreId, Store], vid: Vid, ino: InodeNumber
) -> RolledBack | None:
    still_gone = await _still_gone(kv, leader, store)
    if still_gone is None:
        return None
    try:
        inode, inode_revision = await existing_inode(kv, ino)
    except NoSuchName:
        return None
    found = await find_version(kv, vid)
    if found is None or vid not in (inode.open, inode.cur):
        return None
    compares = [*still_gone[1], Unchanged(inode_key(ino), inode_revision), Unchanged(version_key(vid), found[1])]
    operations: list[Operation] = []
    unfinished = None if inode.open is None else await find_version(kv, inode.open)
    if unfinished is not None and unfinished[0].home != store:
        return None  # it is written elsewhere now: that is newer than what is gone
    shown = inode.prefix if inode.prefix_holds else None
    left = await newest_left(kv, (shown, inode.cur, inode.prev_local, inode.prot, inode.prev, inode.prefix), known)
    closed = None if inode.cur is None else await find_version(kv, inode.cur)
    if left is not None and left[0] == shown:
        gone = inode.open  # which the prefix is a part of
    elif closed is not None and _only_at(closed[0], store):
        gone = inode.cur  # what was closed rather than what was being written: it is whole
    else:
        gone = vid
    assert gone is not None
    older = [] if left is None or left[0] != inode.prefix else [inode.cur, inode.prev_local, inode.prot, inode.prev]
    replaced = [one for one in older if one != gone and await newest_left(kv, (one,), known)]
    ended = await end_versions(kv, replaced, 0)
    inode, ending = await without_prefix(kv, inode)
    for plan in (ended.plan, ending.plan):
        compares += plan.compares
        operations += plan.operations
    changed = msgspec.structs.replace(inode, open=None, writer=None, epoch=inode.epoch + 1, rolled_back_from=gone, cur=None)
    if left is None:
        changed = msgspec.structs.replace(changed, lost=True)
    else:
        left_vid, left_version, left_revision = left
        compares.append(Unchanged(version_key(left_vid), left_revision))
        protected = left_version.state is VersionState.PROTECTED
        changed = msgspec.structs.replace(
            changed,
            cur=left_vid,
            prot=left_vid if protected else changed.prot,
            prev=None if changed.prev in (left_vid, *replaced) else changed.prev,
            prefix=None if left_vid == changed.prefix else changed.prefix,
            prev_local=None if changed.prev_local in (left_vid, *replaced) else changed.prev_local,
            size=left_version.size,
            blocks=BLOCKS_UNKNOWN,
        )
        if left_version.ino != ino:  # the content of a file this one has replaced
            operations.append(version_step(left_vid, left_version, msgspec.structs.replace(left_version, ino=ino)))
    await commit(kv, compares, [*operations, Put(inode_key(ino), pack(changed))])
    return RolledBack(ino, gone, changed.cur)


def _only_at(version: Version, store: StoreId) -> bool:
    return version.home == store and version.state in HOME_ONLY


# Return


class Returned(NamedTuple):
    """A version that a returning store has. `reattached`: its file shows it again; else somebody has written the file since, and
    nothing names `version` any more."""

    vid: Vid
    version: Version
    reattached: bool


async def give_back(kv: KeyValue, writer: Writer) -> AsyncGenerator[Returned, None]:
    """What this store, which was lost and has returned, had alone: each version that was rolled back and whose file is still
    there, after that was given it back if nobody touched it. What it had of removed files ends.

    A file names one version that is gone. Where the store had closed one and was writing the next, it has both again. What isn't
    given back comes last: what an earlier attempt made of it, and was rolled back since, is there again then.
    """
    await repeated(partial(_attempt_unsettle, kv, writer.store))
    of_removed: list[Vid] = []
    others: list[Returned] = []
    async with aclosing(_had_alone(kv, writer.store)) as candidates:
        async for ino, vid, over in candidates:
            try:
                returned = await repeated(partial(_attempt_give_back, kv, writer, ino, vid, over))
            except NoSuchName:
                of_removed.append(vid)
                continue
            except DamagedRecord:
                continue  # its file is an error for all who ask; the others are not
            for one in returned:
                if one.reattached:
                    yield one
                else:
                    others.append(one)
    for one in others:
        yield one
    kept = await remembered(kv, of_removed)  # the file that replaced one may fall back to its bytes
    for vid in of_removed:
        if vid not in kept:
            await end_unnamed(kv, vid)


async def _attempt_unsettle(kv: KeyValue, store: StoreId) -> None:
    """If the node goes again before it is `IN`, what it was given back is to be rolled back with it."""
    entry = await kv.get(store_key(store))
    if entry is not None and (record := unpack(Store, entry.value)).state is StoreState.LOST and record.settled:
        unsettled = msgspec.structs.replace(record, settled=False)
        await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(unsettled))])


async def _had_alone(kv: KeyValue, store: StoreId) -> AsyncGenerator[tuple[InodeNumber, Vid, Vid | None], None]:
    """Each closed version, with its file and what was being written over it, if anything; then each that was being written."""
    written: dict[InodeNumber, list[Vid]] = {}
    async with aclosing(versions_at_home(kv, store, (VersionState.OPEN,), damaged=set())) as versions:
        async for vid, version in versions:
            written.setdefault(version.ino, []).append(vid)
    async with aclosing(versions_at_home(kv, store, (VersionState.LOCAL,), damaged=set())) as versions:
        async for vid, version in versions:
            over = written.get(version.ino, [])
            yield version.ino, vid, over[0] if len(over) == 1 else None
    for ino, vids in written.items():
        for vid in vids:
            yield ino, vid, None


async def end_unnamed(kv: KeyValue, vid: Vid) -> None:
    """End a version of a returned store that no inode names any more, and none will."""

    async def attempt() -> None:
        ending = await end_versions(kv, [vid], 0)
        if ending.dead:
            await commit(kv, ending.plan.compares, ending.plan.operations)

    await repeated(attempt)


async def _attempt_give_back(kv: KeyValue, writer: Writer, ino: InodeNumber, vid: Vid, over: Vid | None) -> list[Returned]:
    """`over`: the version that was being written when the file had `vid`, if any. Raises `NoSuchName` if the file was removed,
    perhaps by one that replaced it."""
    found = await find_version(kv, vid)
    if found is None or found[0].ino != ino:
        return []
    inode, inode_revision = await existing_inode(kv, ino)
    if vid in (inode.open, inode.cur, inode.prev_local, inode.prefix_next):
        return []  # the leader hadn't come to it, or it was given back
    if inode.rolled_back_from is None or inode.rolled_back_from not in (vid, over):
        return [Returned(vid, found[0], False)]
    given = msgspec.structs.replace(inode, rolled_back_from=None, lost=False, epoch=inode.epoch + 1)
    compares: list[Compare] = [Unchanged(inode_key(ino), inode_revision)]
    operations: list[Operation] = []
    returned = []
    for one in (vid, over):
        found = None if one is None else await find_version(kv, one)
        if one is None or found is None:
            continue
        version, revision = found
        compares.append(Unchanged(version_key(one), revision))
        if version.state is VersionState.OPEN:
            given = msgspec.structs.replace(given, open=one, writer=writer)
        else:
            replaced = [other for other in (inode.cur, inode.prev_local) if other != inode.prot]
            ending = await end_versions(kv, replaced, 0)
            compares += ending.plan.compares
            operations += ending.plan.operations
            given = msgspec.structs.replace(given, cur=one, prev_local=None, size=version.size, blocks=BLOCKS_UNKNOWN)
        returned.append(Returned(one, version, True))
    await commit(kv, compares, [*operations, Put(inode_key(ino), pack(given))])
    return returned


async def be_in_again(kv: KeyValue, store: StoreId) -> None:
    """The store holds what it is named for, and takes shards again, unless it drained when it was lost; what others hold in its
    place now is garbage here (R9)."""
    await repeated(partial(_attempt_be_in_again, kv, store))


async def _attempt_be_in_again(kv: KeyValue, store: StoreId) -> None:
    entry = await kv.get(store_key(store))
    if entry is not None and (record := unpack(Store, entry.value)).state is StoreState.LOST:
        state = StoreState.DRAINING if record.was_draining else StoreState.IN
        returned = msgspec.structs.replace(record, state=state, settled=False, was_draining=False)
        await commit(kv, [Unchanged(store_key(store), entry.mod_revision)], [Put(store_key(store), pack(returned))])
