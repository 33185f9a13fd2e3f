"""The catalog on a drive that is full to the last block: names go, however greedy writers are, and nothing is lost."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.catalog_kv import Delete, Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import CatalogFull
from ckptfs.cache.reserve import room_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]

MIB = 1 << 20


def fill(drive: Path) -> None:
    """Take every block there is."""
    with open(drive / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\1" * size)
    assert room_at(drive).free_bytes == 0


@contextlib.contextmanager
def greedy_writer(drive: Path) -> Iterator[None]:
    """Somebody who takes every block the moment it is free."""
    ends = threading.Event()

    def write() -> None:
        with open(drive / "greedy", "ab", buffering=0) as file:
            while not ends.is_set():
                with contextlib.suppress(OSError):
                    file.write(b"\2" * MIB)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def opened(drive: Path, reserve_bytes: int = 2 * MIB) -> SqliteCatalog:
    kv = SqliteCatalog.open(drive / "catalog.db", writer_label="test", reserve_bytes=reserve_bytes)
    assert kv.hold_room() == 0
    return kv


async def put(kv: SqliteCatalog, count: int) -> list[bytes]:
    keys = [b"k/%05d" % number for number in range(count)]
    for key in keys:
        await kv.transact([], [Put(key, os.urandom(200))])
    return keys


async def test_names_go_on_a_full_drive_however_many_and_however_greedy_others_are(make_drive: Any) -> None:
    drive = make_drive(64)
    kv = opened(drive)
    keys = await put(kv, 3000)
    fill(drive)
    with greedy_writer(drive):
        for key in keys[:2500]:
            assert (await kv.transact([], [Delete(key)])).succeeded
    await kv.make_durable()
    assert await kv.count(b"k/") == 500
    await kv.aclose()
    kv = SqliteCatalog.open(drive / "catalog.db", writer_label="test")
    assert [entry.key for entry in await kv.range(b"k/")] == keys[2500:]
    await kv.aclose()


async def test_a_catalog_that_can_t_grow_at_all_says_so_and_goes_on_when_there_is_room(make_drive: Any) -> None:
    drive = make_drive(64)
    kv = SqliteCatalog.open(drive / "catalog.db", writer_label="test")
    await put(kv, 10)
    fill(drive)

    async def put_more() -> None:
        for number in range(2000):
            await kv.transact([], [Put(b"n/%05d" % number, os.urandom(2000))])

    with pytest.raises(CatalogFull, match="no space left"):
        await put_more()
    assert await kv.count(b"k/") == 10
    (drive / "filler").unlink()
    await kv.transact([], [Put(b"again", b"")])
    assert await kv.get(b"again") is not None
    await kv.aclose()
