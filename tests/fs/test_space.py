"""When new names are refused, and what is kept back."""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import NodeId
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.reserve import Reserve, Room
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs import space as module
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.space import FLOOR_INODES, MIB, Space, make_room_to_start, store_reserve

HEADER = RequestHeader(fuse.IN_HEADER.size, Opcode.CREATE, 2, 1, 0, 0, 1, 0, 0)


class Drive:
    """What the drives seem to have."""

    def __init__(self) -> None:
        self.free_bytes = 100 * MIB
        self.free_inodes = 1000

    def room_at(self, path: str | os.PathLike[str]) -> Room:
        return Room(self.free_bytes, 1000 * MIB, self.free_inodes)


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Drive:
    drive = Drive()
    monkeypatch.setattr(module, "room_at", drive.room_at)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    return drive


class Started:
    """Whether the node's other processes have started."""

    value = True

    async def get(self) -> bool:
        return self.value


@pytest.fixture
def started() -> Started:
    return Started()


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    return StoreDirectory.create_or_open(tmp_path / "store", NodeId("n"))


@pytest.fixture
async def space(store: StoreDirectory, drive: Drive, tmp_path: Path, started: Started) -> AsyncIterator[Space]:
    kv = SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", reserve_bytes=MIB)
    reserve = Reserve(store.reserve, 2 * MIB)
    reserve.make()
    yield Space(store.path, reserve, kv, started.get, RefusalMark(store.store_id, store.path))
    await kv.aclose()


def catalog_held(space: Space) -> int:
    """What the log of the catalog holds beyond its end, in bytes."""
    assert space._catalog is not None
    status = os.stat(f"{space._catalog.path}-wal")
    return max(0, status.st_blocks * 512 - status.st_size)


def errno_of(space: Space) -> int:
    try:
        space.require_room()
    except OSError as error:
        return error.errno or -1
    return 0


async def test_new_names_are_refused_on_a_full_drive_and_allowed_again(space: Space, drive: Drive) -> None:
    assert errno_of(space) == 0
    drive.free_bytes = MIB - 1
    assert errno_of(space) == errno.ENOSPC
    assert "full" in space.status()["shortage"]
    drive.free_bytes = 100 * MIB
    assert errno_of(space) == 0
    drive.free_inodes = FLOOR_INODES - 1
    assert errno_of(space) == errno.ENOSPC
    assert "inodes" in space.shortage


async def test_what_the_reserve_lacks_is_not_for_new_names(space: Space, drive: Drive, store: StoreDirectory) -> None:
    store.reserve.unlink()
    drive.free_bytes = 3 * MIB - 1
    assert space.withheld_bytes() == 2 * MIB
    assert errno_of(space) == errno.ENOSPC
    space.mend()
    assert space.withheld_bytes() == 0
    assert errno_of(space) == 0
    status = space.status()
    assert (status["reserve_bytes"], status["reserve_lacks_bytes"], status["catalog_reserve_lacks_bytes"]) == (2 * MIB, 0, 0)


async def test_the_reserve_is_left_to_a_process_that_still_starts(space: Space, store: StoreDirectory, started: Started) -> None:
    store.reserve.unlink()
    started.value = False
    await space.keep()
    assert not store.reserve.exists()
    started.value = True
    await space.keep()
    assert space.withheld_bytes() == 0


async def test_the_catalog_has_its_room_at_once_where_no_process_needs_the_reserve(space: Space, started: Started) -> None:
    started.value = False
    assert catalog_held(space) < MIB // 2
    await space.keep()
    assert catalog_held(space) >= MIB // 2


async def test_only_what_makes_names_is_guarded(space: Space, drive: Drive) -> None:
    asked = []

    async def handler(header: RequestHeader, body: memoryview) -> bytes:
        asked.append(header.opcode)
        return b""

    handlers = space.guarded(dict.fromkeys(Opcode, handler), lambda unique: unique == 6)
    drive.free_bytes = 0
    for opcode, guarded in handlers.items():
        if opcode in module.MAKES_NAMES:
            with pytest.raises(OSError, match="full"):
                await guarded(HEADER._replace(opcode=opcode), memoryview(b""))
        else:
            await guarded(HEADER._replace(opcode=opcode), memoryview(b""))
    assert Opcode.UNLINK in asked
    assert Opcode.CREATE not in asked
    await handlers[Opcode.CREATE](HEADER._replace(unique=6), memoryview(b""))  # it was made, and is only asked for again


def test_a_start_on_a_full_drive_takes_the_reserve(store: StoreDirectory, drive: Drive) -> None:
    reserve = store_reserve(store)
    make_room_to_start(reserve)
    assert reserve.lacking_bytes() == 0
    drive.free_bytes = 4096
    make_room_to_start(reserve)
    assert not store.reserve.exists()
    make_room_to_start(reserve)
    drive.free_bytes = 100 * MIB
    make_room_to_start(reserve)
    assert reserve.lacking_bytes() == 0
    drive.free_inodes = 3
    make_room_to_start(reserve)
    assert not store.reserve.exists()
