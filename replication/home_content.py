"""The content of versions that aren't protected yet: read from the one node that has it, and proved against the content root."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.checksum import cell_hash, content_root
from ckptfs.cache.ids import SegmentId, StoreId, Vid
from ckptfs.replication.errors import ShardDamaged
from ckptfs.replication.local_copies import LocalCopies, copy_error

Result = TypeVar("Result")

FORWARD_BYTES = 1 << 20


class SegmentReaders(Protocol):
    """How bytes of a version that isn't protected are read from its home."""

    async def read_segment(self, store: StoreId, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes: ...


class HomeContent:
    """Reads it a cell at a time. `bytes_fetched` counts what went into local copies since the start."""

    def __init__(self, homes: SegmentReaders, copies: LocalCopies, disk_limiter: trio.CapacityLimiter) -> None:
        self.bytes_fetched = 0
        self._homes = homes
        self._copies = copies
        self._disk_limiter = disk_limiter

    async def forward(self, vid: Vid, version: Version) -> bytes:
        """Fetch the whole version to where its local copy is to be; the table of its cells. Nobody sees it before all of it is
        right. Raises `ReplicationError`."""
        path = self._copies.path_of(vid)
        temporary = path.with_name(path.name + ".fetching")
        table = bytearray()
        try:
            descriptor = await self._in_thread(_create, temporary)
        except OSError as error:
            raise copy_error(f"the local copy {path} can't be made", error) from None
        try:
            for offset in range(0, version.size, version.cell_size):
                cell = await self.cell_at_home(vid, version, offset)
                table += cell_hash(cell)
                await self._in_thread(_write_at, descriptor, cell, offset)
                self.bytes_fetched += len(cell)
            _require_root(vid, version, table)
            await self._in_thread(os.replace, temporary, path)
        except OSError as error:
            raise copy_error(f"the local copy {path} can't be written", error) from None
        finally:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        return bytes(table)

    async def hash_at_home(self, vid: Vid, version: Version) -> bytes:
        """The table of a local version, proved by reading all of it once; every cell that is read later is checked against it."""
        table = bytearray()
        for offset in range(0, version.size, version.cell_size):
            table += cell_hash(await self.cell_at_home(vid, version, offset))
        _require_root(vid, version, table)
        return bytes(table)

    async def cell_at_home(self, vid: Vid, version: Version, offset: int) -> bytearray:
        """The cell that begins there as the home has it, unchecked."""
        cell = bytearray()
        end = min(version.size, offset + version.cell_size)
        while offset + len(cell) < end:
            start = offset + len(cell)
            data = await self._homes.read_segment(version.home, vid, version.segment, start, min(FORWARD_BYTES, end - start))
            if not data:
                raise ShardDamaged(f"the home's file ends at byte {start} of {version.size}")
            cell += data
        return cell

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._disk_limiter)


def _require_root(vid: Vid, version: Version, table: bytes | bytearray) -> None:
    if content_root(vid, version.size, version.cell_size, table) != version.root:
        raise ShardDamaged("the home's file does not hold what was hashed when it was closed")


def _create(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write_at(descriptor: int, data: bytearray, offset: int) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
