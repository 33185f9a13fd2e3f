"""Filling an empty catalog with what another one held (`ckptfs import`, `ckptfs recover`).

While it is filled it has `c/filling` and neither format nor settings, without which no node of any release starts on it; the
last transaction puts these and takes that away. One that was left half filled is emptied and filled from the beginning by whoever
fills it next; each transaction compares that nobody else has begun to.

Revisions go on beyond every one a store may have seen, and inode numbers beyond every one that may be in use, so that what nodes
and shards remember of the catalog that was keeps its meaning: see `Recovery`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_archive import ArchiveHeader, Record, belongs
from ckptfs.cache.catalog_format import (
    ENTRY_PREFIX,
    FILLING_KEY,
    FORMAT_KEY,
    FORMAT_VERSION,
    INODE_BLOCK_KEY,
    RECOVERED_KEY,
    SETTINGS_KEY,
    VERSION_PREFIX,
    Recovered,
    Recovery,
    Settings,
    Version,
    VersionState,
    check_format,
    entry_of_key,
    pack,
    pack_number,
    unpack,
    unpack_number,
)
from ckptfs.cache.catalog_kv import Delete, EmptyRange, KeyValue, Operation, Put, Unchanged
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.ids import InodeNumber

REVISIONS_SKIPPED = 10**9
"""More than a catalog can have gone on since the newest revision that is known: ten thousand changes a second for a day."""

INODES_SKIPPED = 1 << 24
"""As many files may have been made since, at least."""

OPERATIONS_AT_ONCE = 100
BYTES_AT_ONCE = 512 << 10
"""etcd takes 1.5 MiB in one request."""

TRANSACTIONS_UNDER_WAY = 16
"""etcd syncs all of them at once."""


class Facts(NamedTuple):
    """What of the records says how the new catalog begins: put by the last transaction, when all the others are there."""

    format: bytes
    settings: bytes
    inode_block: int
    recoveries: list[Recovery]


async def require_empty(kv: KeyValue, where: str) -> None:
    """Raise `StoreError` unless nothing is in the catalog, or only what was left half filled."""
    if await kv.get(FILLING_KEY) is None and await kv.range(b"", limit=1):
        raise StoreError(f"the catalog {where} is not empty; nothing was changed: name another one, or move that away first")


async def fill(kv: KeyValue, where: str, header: ArchiveHeader, records: Iterable[Record], recovery: Recovery) -> int:
    """Put all records into the empty catalog, whose `where` is for messages; returns how many there are.

    The handle is of no further use on etcd: revisions begin elsewhere then. Raises `StoreError` if the catalog isn't empty, the
    records are those of none or of a newer one, or somebody else fills it; `DamagedData`, `CatalogUnavailable`.
    """
    await require_empty(kv, where)
    begun = await _begin(kv, where, recovery)
    held: dict[bytes, bytes] = {}
    dead: list[Record] = []
    count = 0

    def others() -> Iterator[Record]:
        nonlocal count
        for key, value in records:
            if not belongs(key):
                continue
            count += 1
            if key in (FORMAT_KEY, SETTINGS_KEY, INODE_BLOCK_KEY, RECOVERED_KEY):
                held[key] = value
            elif key.startswith(VERSION_PREFIX) and unpack(Version, value).state is VersionState.DEAD:
                dead.append((key, value))
            else:
                yield key, value

    await _put_all(kv, where, begun, others())
    # Behind all that waits for protection: revisions say what a dead version has to outlive (R1).
    await _put_all(kv, where, begun, dead)
    facts = _facts(held, header)
    last: list[Operation] = [
        Delete(FILLING_KEY),
        Put(FORMAT_KEY, facts.format),
        Put(SETTINGS_KEY, facts.settings),
        Put(INODE_BLOCK_KEY, pack_number(facts.inode_block)),
        Put(RECOVERED_KEY, pack(Recovered(FORMAT_VERSION, [*facts.recoveries, recovery]))),
    ]
    await _put(kv, where, begun, last)
    await kv.make_durable()
    return count


def _facts(held: dict[bytes, bytes], header: ArchiveHeader) -> Facts:
    try:
        check_format(held[FORMAT_KEY])
        if unpack(Settings, held[SETTINGS_KEY]).cluster != header.cluster:
            raise DamagedData("the records are another cluster's than their header says")
        inode_block = unpack_number(held[INODE_BLOCK_KEY])
    except KeyError as missing:
        raise DamagedData(f"the records lack {missing}: they are no whole catalog") from None
    recoveries = unpack(Recovered, held[RECOVERED_KEY]).recoveries if RECOVERED_KEY in held else []
    return Facts(held[FORMAT_KEY], held[SETTINGS_KEY], inode_block + INODES_SKIPPED, recoveries)


async def _begin(kv: KeyValue, where: str, recovery: Recovery) -> int:
    """The revision of our mark. What an earlier attempt left is removed first, its mark last."""
    left = await kv.get(FILLING_KEY)
    while left is not None and (entries := await kv.range(b"", limit=OPERATIONS_AT_ONCE + 1)):
        some = [entry.key for entry in entries if entry.key != FILLING_KEY][:OPERATIONS_AT_ONCE]
        gone = await kv.transact([Unchanged(FILLING_KEY, left.mod_revision)], [Delete(key) for key in some or [FILLING_KEY]])
        if not gone.succeeded:
            raise _somebody_else(where)
    if isinstance(kv, SqliteCatalog):
        await kv.begin_at(recovery.begins_at)
    # The number of an inode, so that a release that doesn't know the mark doesn't take the catalog for an empty one either.
    begun = await kv.transact([EmptyRange(b"")], [Put(FILLING_KEY, recovery.id), Put(INODE_BLOCK_KEY, pack_number(0))])
    if not begun.succeeded:
        raise _somebody_else(where)
    return begun.revision


async def _put_all(kv: KeyValue, where: str, begun: int, records: Iterable[Record]) -> None:
    send, receive = trio.open_memory_channel[Sequence[Operation]](0)

    async def work() -> None:
        async for operations in receive:
            await _put(kv, where, begun, operations)

    try:
        async with trio.open_nursery() as nursery, send:
            for _ in range(TRANSACTIONS_UNDER_WAY):
                nursery.start_soon(work)
            for batch in batches(records):
                await send.send(batch)
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """They fail together, for one reason."""
    one = group.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


async def _put(kv: KeyValue, where: str, begun: int, operations: Sequence[Operation]) -> None:
    if not (await kv.transact([Unchanged(FILLING_KEY, begun)], operations)).succeeded:
        raise _somebody_else(where)


def _somebody_else(where: str) -> StoreError:
    return StoreError(f"somebody else fills the catalog {where}; it is theirs: look at it when they are done")


def batches(records: Iterable[Record]) -> Iterator[list[Operation]]:
    """Cut into transactions. None has two names of one directory: a name's place in readdir is its revision."""
    batch: list[Operation] = []
    directories: set[InodeNumber] = set()
    size = 0
    for key, value in records:
        directory = entry_of_key(key)[0] if key.startswith(ENTRY_PREFIX) else None
        if batch and (directory in directories or len(batch) >= OPERATIONS_AT_ONCE or size + len(value) > BYTES_AT_ONCE):
            yield batch
            batch, size = [], 0
            directories.clear()
        batch.append(Put(key, value))
        size += len(key) + len(value)
        if directory is not None:
            directories.add(directory)
    if batch:
        yield batch


def recovery_from(header: ArchiveHeader, id_: bytes, seen_revision: int = 0) -> Recovery:
    """How a catalog begins that goes on from this state. `seen_revision` is the newest that any store is known to have seen."""
    return Recovery(id_, header.revision, max(header.revision, seen_revision) + REVISIONS_SKIPPED)
