"""Local copies of versions whose bytes live elsewhere: `copies/<2 hex>/<32 hex digits of the vid>`, and `….cells` beside it.

A copy is a sparse file of the content's size; which parts of it are there is known in memory only. Beside it lies the table
of the content's cell hashes, which proves itself against the content root in the catalog. So nothing here has to be
synced or believed after a restart: what a copy holds is hashed again, part by part, before its first use, and a hole, a torn
page or a flipped bit is simply not there. A copy may be deleted at any time; whoever has it open keeps what was promised.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.checksum import HASH_SIZE, cell_hash, content_root
from ckptfs.cache.file_identity import FileIdentity, file_identity
from ckptfs.cache.ids import ID_SIZE, Vid
from ckptfs.replication.errors import ReplicationError

TABLE_SUFFIX = ".cells"
IN_USE_SECONDS = 5.0
"""A copy asked for within this time is not evicted: a reader between two reads would have to fetch it again."""


class CopyPlace(NamedTuple):
    """Where a local copy is. A name may come to lead to another copy of the same content, of which less is there: so who reads
    one opens it here."""

    path: Path
    identity: FileIdentity

    def open(self) -> int:
        """A descriptor for reading, which the caller owns. Raises `FileNotFoundError` if that copy has made room meanwhile."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        if file_identity(descriptor) != self.identity:
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "another copy has its name", str(self.path))
        return descriptor


class CopyFailed(ReplicationError):
    """The local copy can't be written or read: the store's drive is broken. The shards are untouched."""


class CopyFull(CopyFailed):
    """The local copy can't be made or go on: no space is left on the store's drive."""


class CopyRefused(CopyFull):
    """As `CopyFull`, because the store's drive takes no writes any more."""


def copy_error(message: str, error: OSError) -> CopyFailed:
    """The error of this room for one of the file system's."""
    kind = CopyFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else CopyFailed
    if error.errno in (errno.EROFS, errno.EIO):
        kind = CopyRefused
    return kind(f"{message}: {error.strerror}")


@dataclass(frozen=True)
class LocalCopiesStatistics:
    """`bytes` are those copies take on the disk; `evicted` counts copies removed to make room."""

    copies: int
    bytes: int
    evicted: int


class LocalCopy:
    """One copy, open for reading and writing. Blocking; cells are numbered as in the content's table.

    `present` has a 1 for each cell known to be right; the caller's tasks read and set it between their awaits.
    """

    def __init__(self, path: Path, vid: Vid, size: int, cell_size: int, table: bytes) -> None:
        """Open or make the copy. Raises `CopyFailed`, `CopyFull`."""
        self.path = path
        self.vid = vid
        self.size = size
        self.cell_size = cell_size
        self.table = table
        self.present = bytearray(-(-size // cell_size))
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self.place = CopyPlace(path, file_identity(self._descriptor))
            self.may_hold_cells = os.fstat(self._descriptor).st_blocks > 0
            os.ftruncate(self._descriptor, size)
            _write_table(path, table)
        except OSError as error:
            raise copy_error(f"the local copy {path} can't be made", error) from None

    def cell_length(self, cell: int) -> int:
        return min(self.cell_size, self.size - cell * self.cell_size)

    def cell_digest(self, cell: int) -> bytes:
        return self.table[cell * HASH_SIZE : (cell + 1) * HASH_SIZE]

    def check(self, first_cell: int, cells: int, buffer: memoryview) -> list[int]:
        """Which of these cells the file already holds, by their hashes. `buffer` has room for one cell."""
        found = []
        for cell in range(first_cell, first_cell + cells):
            length = self.cell_length(cell)
            try:
                count = os.preadv(self._descriptor, [buffer[:length]], cell * self.cell_size)
            except OSError:
                continue
            if count == length and cell_hash(buffer[:length]) == self.cell_digest(cell):
                found.append(cell)
        return found

    def wrong(self, first_cell: int, cells: int, buffer: memoryview) -> tuple[int, list[int]]:
        """How many of these cells the file has, and which of those fail their hash. `buffer` has room for one cell."""
        numbers = range(first_cell, first_cell + cells)
        held = [cell for cell in numbers if self.present[cell] or self._is_whole(cell)]
        return len(held), [cell for cell in held if not self.check(cell, 1, buffer)]

    def _is_whole(self, cell: int) -> bool:
        """Whether the file holds bytes for all of this cell, right or wrong. A hole in it means that the cell was never written
        to its end, so that nothing is wrong with it: it just isn't there."""
        offset = cell * self.cell_size
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_HOLE) >= offset + self.cell_length(cell)
        except OSError:  # beyond the end of a file that was cut off
            return False

    def write(self, offset: int, data: memoryview) -> None:
        """Write checked bytes. Does not keep the buffer. Raises `CopyFailed`, `CopyFull`."""
        try:
            while data:
                count = os.pwrite(self._descriptor, data, offset)
                offset, data = offset + count, data[count:]
        except OSError as error:
            raise copy_error(f"the local copy {self.path} can't be written", error) from None

    def sync(self) -> None:
        """Make the bytes survive a power cut, for a copy that becomes a segment. Raises `CopyFailed`."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise copy_error(f"the local copy {self.path} can't be synced", error) from None

    def exists(self) -> bool:
        """Whether the file still has its name: nobody removed or took it. Two stats of a file in use: no need for a thread."""
        try:
            there, own = os.stat(self.path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LocalCopies:
    """The `copies/` directory of a store. Blocking."""

    def __init__(self, directory: Path, *, reserve_bytes: int = 0, free_bytes: Callable[[], int] | None = None) -> None:
        """`reserve_bytes` stay free for local saves. `free_bytes` replaces the file system's own answer."""
        self._directory = directory
        self.reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes or self._free_bytes_of_file_system
        self._evicted = 0
        directory.mkdir(mode=0o700, exist_ok=True)

    def path_of(self, vid: Vid) -> Path:
        """Where the copy is, or would be; made from the id only."""
        if len(vid) != ID_SIZE:
            raise ValueError("a vid has 16 bytes")
        name = vid.hex()
        return self._directory / name[:2] / name

    def exists(self, vid: Vid) -> bool:
        """Whether there is a copy of this version."""
        return self.path_of(vid).exists()

    def table_of(self, vid: Vid, size: int, cell_size: int, root: bytes) -> bytes | None:
        """The content's table of cell hashes if it lies beside the copy and matches the root."""
        path = self.path_of(vid)
        try:
            table = path.with_name(path.name + TABLE_SUFFIX).read_bytes()
            return table if content_root(vid, size, cell_size, table) == root else None
        except (OSError, ValueError):
            return None

    def open(self, vid: Vid, size: int, cell_size: int, table: bytes) -> LocalCopy:
        """The copy, made if absent. Raises `CopyFailed`, `CopyFull`."""
        return LocalCopy(self.path_of(vid), vid, size, cell_size, table)

    def remove(self, vid: Vid) -> None:
        """Remove the copy and its table; nothing happens if there is none."""
        path = self.path_of(vid)
        for name in (path, path.with_name(path.name + TABLE_SUFFIX)):
            with contextlib.suppress(FileNotFoundError):
                name.unlink()

    def vids(self) -> list[Vid]:
        """The versions that have a copy."""
        return [vid for vid, _ in self._scan()]

    def has_room(self, needed_bytes: int) -> bool:
        """Whether `needed_bytes` are free besides the reserve."""
        return self._free_bytes() >= needed_bytes + self.reserve_bytes

    def missing_bytes(self, vid: Vid, size: int) -> int:
        """How much the drive has to give until the copy is complete."""
        try:
            return max(0, size - os.stat(self.path_of(vid)).st_blocks * 512)
        except FileNotFoundError:
            return size

    def evictable(self, last_used_at: dict[Vid, float]) -> list[Vid]:
        """The copies that may go, the one used longest ago first; those in use may not.

        `last_used_at` holds the monotonic times of copies this process served; others were used before it began, in the order of
        their files' times, which a clock that was set makes wrong and no more.
        """
        now = time.monotonic()
        ages = sorted((last_used_at.get(vid, float("-inf")), status.st_mtime, vid) for vid, status in self._scan())
        return [vid for used_at, _, vid in ages if now - used_at >= IN_USE_SECONDS]

    def evict(self, vid: Vid) -> None:
        """As `remove`, to make room. What it took is free when nobody has it open any more."""
        self.remove(vid)
        self._evicted += 1

    def statistics(self) -> LocalCopiesStatistics:
        sizes = [status.st_blocks * 512 for _, status in self._scan()]
        return LocalCopiesStatistics(len(sizes), sum(sizes), self._evicted)

    def _free_bytes_of_file_system(self) -> int:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def _scan(self) -> Iterator[tuple[Vid, os.stat_result]]:
        for fan in self._directory.iterdir():
            with contextlib.suppress(NotADirectoryError, FileNotFoundError), os.scandir(fan) as entries:
                for entry in entries:
                    with contextlib.suppress(ValueError, FileNotFoundError):
                        vid = Vid(bytes.fromhex(entry.name))
                        if len(vid) == ID_SIZE:
                            yield vid, entry.stat(follow_symlinks=False)


def _write_table(path: Path, table: bytes) -> None:
    name = path.with_name(path.name + TABLE_SUFFIX)
    with contextlib.suppress(FileNotFoundError):
        if name.read_bytes() == table:
            return
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(table)
