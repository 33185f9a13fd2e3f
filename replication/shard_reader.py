"""Reading one complete shard file, and whether it is right."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import Vid
from ckptfs.replication import shard_format
from ckptfs.replication.agent_db import HeldShard
from ckptfs.replication.errors import ShardDamaged, ShardNotFound
from ckptfs.replication.shard_format import HEADER_SIZE, TRAILER_SIZE
from ckptfs.replication.unopened import unopened

BAD_STRIPES_MAX = 1000


class VerifyResult(NamedTuple):
    """What re-reading a shard showed. `bad_stripes` are those whose cell fails its hash, the first 1000 of them."""

    ok: bool
    bad_stripes: tuple[int, ...]
    message: str


class ShardReader:
    """Reads one complete shard. Header and footer were checked; cells are checked as they are read, but for what others send out
    of `descriptor` themselves."""

    def __init__(self, path: str, vid: Vid, index: int) -> None:
        """Raises `ShardNotFound`, `ShardDamaged`, and `PeerRefused` (busy) where it isn't its fault that it can't be opened."""
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            raise ShardNotFound(f"no shard {vid.hex()}.{index} in this store") from None
        except OSError as error:
            raise unopened(error, f"the shard {vid.hex()}.{index}") from None
        try:
            status = os.fstat(self.descriptor)
            self.file_bytes = status.st_size
            self._stored_at_ns = status.st_mtime_ns
            self.header = shard_format.unpack_header(self._read(0, HEADER_SIZE))
            if (self.header.vid, self.header.index) != (vid, index):
                raise ShardDamaged("the file is another shard than its name says")
            length = shard_format.unpack_trailer(self._read(max(0, self.file_bytes - TRAILER_SIZE), TRAILER_SIZE))
            if self.file_bytes != HEADER_SIZE + self.header.cells_length + length:
                raise ShardDamaged(f"the shard's file has {self.file_bytes} bytes, its fields say otherwise")
            self.footer_bytes = self._read(self.file_bytes - length, length)
            self.footer = shard_format.unpack_footer(self.header, self.footer_bytes)
        except OSError as error:
            self.close()
            raise ShardDamaged(f"the shard can't be read: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def read_cell(self, stripe: int, buffer: memoryview, *, check: bool = True) -> int:
        """Read the cell of that stripe into the buffer and return its length (0 where the shard has none).

        Raises `ShardDamaged` if it can't be read or, unless `check` is off, fails its hash.
        """
        length = self.header.cell_length(stripe)
        try:
            count = read_into(self.descriptor, buffer[:length], self.header.cell_offset(stripe))
        except OSError as error:
            raise ShardDamaged(f"cell {stripe} can't be read: {error.strerror}") from None
        if count != length or (check and length and cell_hash(buffer[:length]) != self.footer.cell_hash(stripe)):
            raise ShardDamaged(f"cell {stripe} fails its hash")
        return length

    def verify(self) -> VerifyResult:
        """Re-read every cell."""
        bad: list[int] = []
        count = 0
        for stripe, right in enumerate(self.check_cells()):
            if not right:
                count += 1
                if len(bad) < BAD_STRIPES_MAX:
                    bad.append(stripe)
        return VerifyResult(not count, tuple(bad), f"{count} of {self.header.cell_count} cells fail their hash" if count else "")

    def check_cells(self) -> Iterator[bool]:
        """Whether each cell is right, in order, re-read from the drive where the kernel lets go of its cached pages."""
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(self.header.cell_size))
        for stripe in range(self.header.cell_count):
            try:
                self.read_cell(stripe, buffer)
            except ShardDamaged:
                yield False
            else:
                yield True

    def held(self) -> HeldShard:
        """This shard's row in the index."""
        return HeldShard(self.header.vid, self.header.index, self.footer.root, self.file_bytes, self._stored_at_ns)

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        count = read_into(self.descriptor, memoryview(data), offset)
        return bytes(data[:count])


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer from there; how many bytes there were."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done
