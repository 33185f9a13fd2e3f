"""`ckptfs recover`: reading stores and what was made of other machines' stores, and filling a catalog with what follows."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from ckptfs.cache.catalog_archive import open_archive
from ckptfs.cache.catalog_fill import fill, recovery_from, require_empty
from ckptfs.cache.errors import CacheError, StoreError
from ckptfs.cache.ids import ID_SIZE
from ckptfs.fs.catalog import open_catalog
from ckptfs.fs.config import NodeConfig
from ckptfs.replication.inventory import MAGIC, Inventory, pack_inventory, take_inventory, unpack_inventory
from ckptfs.replication.recovery import State, rebuild
from ckptfs.replication.recovery_report import RecoveryReport


class Sources(NamedTuple):
    """What a catalog is rebuilt from."""

    inventories: list[Inventory]
    states: list[State]


def write_inventory(store: Path, path: Path) -> Inventory:
    """What the store holds, into a file. Raises `StoreError`."""
    inventory = take_inventory(store)
    try:
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(pack_inventory(inventory))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path} can't be written: {error.strerror}") from None
    return inventory


def read_sources(paths: Sequence[Path], held: contextlib.ExitStack) -> Sources:
    """Stores, inventories and archives, each known by what it is. The archives stay open in `held`. Raises `StoreError`,
    `DamagedData`."""
    sources = Sources([], [])
    for path in paths:
        if path.is_dir():
            sources.inventories.append(take_inventory(path))
            continue
        try:
            with open(path, "rb") as file:
                is_inventory = file.read(len(MAGIC)) == MAGIC
            if is_inventory:
                sources.inventories.append(unpack_inventory(path.read_bytes()))
                continue
        except OSError as error:
            raise StoreError(f"{path} can't be read: {error.strerror}") from None
        except CacheError as error:
            raise type(error)(f"{path}: {error}") from None
        archive = held.enter_context(open_archive(path))
        sources.states.append(State(archive.header, archive.records(), str(path)))
    return sources


async def recover_catalog(target: NodeConfig, paths: Sequence[Path], *, dry_run: bool) -> RecoveryReport:
    """Fill the catalog that the configuration names, which must be empty, with what follows from these. Raises `CacheError`."""
    with contextlib.ExitStack() as held:
        sources = await trio.to_thread.run_sync(read_sources, paths, held)
        rebuilt = await rebuild(sources.inventories, sources.states, time.time_ns)
        if dry_run:
            return rebuilt.report
        where = target.node.catalog
        catalog = open_catalog(target, "recover", create=True)
        try:
            await require_empty(catalog, where)
            records = ((entry.key, entry.value) for entry in await rebuilt.catalog.range(b""))
            recovery = recovery_from(rebuilt.header, os.urandom(ID_SIZE), rebuilt.seen_revision)
            await fill(catalog, where, rebuilt.header, records, recovery)
        finally:
            with trio.CancelScope(shield=True):
                await catalog.aclose()
        return rebuilt.report
