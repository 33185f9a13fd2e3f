"""Writing one shard file, cell after cell, from where an earlier writer of the same shard stopped.

Write order: the file is made under its name with `.partial`; header, cells in order, footer; fsync; rename; fsync of the
directory; only then is the root returned. Cells are handed to the drive early, so that the final fsync is short. A
`.partial` file is a shard that was never acknowledged: the next put of the same shard goes on from its whole cells,
after hashing them again (what a power cut left of them may be wrong, which the footer then shows).
"""

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ckptfs.cache.checksum import Buffer, cell_hash
from ckptfs.cache.holes import zero_hash
from ckptfs.cache.ids import Vid
from ckptfs.cache.store import sync_directory
from ckptfs.replication import shard_format
from ckptfs.replication.agent_db import HeldShard
from ckptfs.replication.errors import ShardConflict, ShardDamaged, ShardNotFound, StoreFailed, StoreFull, WriterRevoked
from ckptfs.replication.shard_format import HEADER_SIZE, ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import ShardReader, read_into

PARTIAL = ".partial"
WRITE_BEHIND_BYTES = 8 << 20
"""How much is written before the drive is told to begin: large enough for one good request, small enough that the fsync
at the end has little left."""

_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class WritersStore(Protocol):
    """What a writer needs of the `ShardStore` that made it."""

    def path_of(self, vid: Vid, index: int) -> str: ...

    def make_fan(self, vid: Vid) -> None: ...

    def reserve(self, writer: "ShardWriter", needed_bytes: int) -> None: ...

    def enter(self, shards: Sequence[HeldShard]) -> None: ...

    def forget(self, writer: "ShardWriter") -> None: ...

    def stored(self) -> None: ...

    def fail(self, error: OSError, path: str) -> StoreFailed: ...


class ShardWriter:
    """Writes one shard, cell after cell. One caller at a time; made by `ShardStore.begin`.

    Ends with exactly one of `finish` (stored), `suspend` (what is there is kept for the next put) or `abandon` (removed).
    """

    def __init__(self, store: "WritersStore", header: ShardHeader, hole_bytes: int = 0) -> None:
        self.header = header
        self._hole_bytes = hole_bytes
        self.partial_path = store.path_of(header.vid, header.index) + PARTIAL
        self.promised_bytes = 0
        self.resume_stripe = 0
        """The first stripe the store doesn't have yet, as of `begin`."""
        self._store = store
        self._path = store.path_of(header.vid, header.index)
        self._mutex = threading.Lock()
        self._revoked = False
        self._ended = False
        self._descriptor = -1
        self._complete: HeldShard | None = None
        self._root_before: bytes | None = None
        self._table = bytearray()
        self._next_stripe = 0
        self._handed_over = HEADER_SIZE

    @property
    def ended(self) -> bool:
        """Whether it was finished, suspended, abandoned or revoked."""
        return self._ended

    def write_cell(self, stripe: int, cell: Buffer, hash_: bytes) -> None:
        """Append the cell of that stripe, the next one. Does not keep the buffer. Cells of length 0 are not written, and one of
        zeros takes no space: it becomes a hole.

        Raises `ShardDamaged` (the bytes don't match their hash: nothing was written, the cell may come again),
        `ValueError` (out of order, or another length than the header says), `StoreFull`, `StoreFailed`, `WriterRevoked`.
        """
        length = self.header.cell_length(stripe)
        if stripe != self._next_stripe or not length or len(cell) != length:
            raise ValueError(f"cell {stripe} of {len(cell)} bytes, expected {self._next_stripe} of {length}")
        if cell_hash(cell) != hash_:
            raise ShardDamaged(f"cell {stripe} doesn't match its hash")
        with self._mutex:
            self._check()
            if self._complete is None and hash_ != zero_hash(length):
                offset = self.header.cell_offset(stripe)
                self._write(cell, offset)
                self.promised_bytes = max(0, self.promised_bytes - length)
                if offset + length - self._handed_over >= WRITE_BEHIND_BYTES:
                    _start_writeback(self._descriptor, self._handed_over, offset + length - self._handed_over)
                    self._handed_over = offset + length
            self._table += hash_
            self._next_stripe = stripe + 1

    def write_zeros(self, stripe: int, count: int = 1) -> None:
        """As `write_cell`, for so many cells of zeros from that stripe on."""
        if stripe != self._next_stripe or not 1 <= count <= self.header.cell_count - stripe:
            raise ValueError(f"{count} cells of zeros from {stripe} on, expected {self._next_stripe} of {self.header.cell_count}")
        last = stripe + count - 1
        with self._mutex:
            self._check()
            self._table += zero_hash(self.header.cell_size) * (count - 1) + zero_hash(self.header.cell_length(last))
            self._next_stripe = last + 1

    def finish(self, footer: ShardFooter) -> bytes:
        """Complete the shard and return its root: from then on it survives a power cut.

        Raises `ShardDamaged` if the footer isn't that of the cells written (nothing is kept), `ShardConflict` if another
        shard is stored under this name, `StoreFull`, `StoreFailed`, `WriterRevoked`, `ValueError` (cells are missing).
        """
        with self._mutex:
            self._check()
            if footer.header != self.header or self._next_stripe != self.header.cell_count:
                raise ValueError(f"a footer after {self._next_stripe} of {self.header.cell_count} cells")
            if self._complete is not None:
                return self._finish_again(footer, self._complete)
            if footer.cell_hashes != bytes(self._table):
                self._remove()
                raise ShardDamaged("the cells that arrived are not those of the footer; all of them were dropped")
            if self._root_before not in (None, footer.root):
                self._remove()
                raise ShardConflict("a shard with another root, though with damaged cells, is stored under this vid and index")
            end = shard_format.pack_footer(footer)
            offset = HEADER_SIZE + self.header.cells_length
            self._write(end, offset)
            try:
                os.fsync(self._descriptor)
                os.rename(self.partial_path, self._path)
                sync_directory(Path(self._path).parent)
            except OSError as error:
                self._remove()
                raise self._error(error) from None
            self._store.stored()
            root = footer.root
            held = HeldShard(self.header.vid, self.header.index, root, offset + len(end), time.time_ns())
            self._store.enter([held])  # before it ends: until then nobody removes the shard
            self._close()
        return root

    def suspend(self) -> None:
        """Stop, and keep what was written for a later put of the same shard. Harmless after another ending."""
        with self._mutex:
            self._close()

    def abandon(self) -> None:
        """Stop, and remove what was written. Harmless after another ending."""
        with self._mutex:
            if self._descriptor >= 0 and not self._revoked:
                self._remove()
            self._close()

    def open(self) -> None:
        with self._mutex:
            self._check()
            try:
                with ShardReader(self._path, self.header.vid, self.header.index) as reader:
                    if reader.header != self.header:
                        raise ShardConflict("a shard of another size or code is stored under this vid and index")
                    self._root_before = reader.footer.root
                    for right in reader.check_cells():
                        self._check()
                        if not right:
                            raise ShardDamaged("some of its cells fail their hash")
                    self._complete = reader.held()
                    self._table[:] = reader.footer.cell_hashes
                    self._next_stripe = self.resume_stripe = self.header.cell_count
                    return
            except ShardNotFound:
                pass
            except ShardDamaged:
                # `finish` replaces the damaged file, by rename, with one that is right. Until then it stays: its other cells
                # may be what a stripe of this content is short of.
                pass
            try:
                self._store.make_fan(self.header.vid)
                self._descriptor = os.open(self.partial_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                self._resume()
            except OSError as error:
                self._close()
                raise self._error(error) from None
            except BaseException:
                self._close()
                raise

    def _resume(self) -> None:
        """Go on from the whole cells of the partial file, if it is one of this shard; else from nothing."""
        header, descriptor = self.header, self._descriptor
        packed = shard_format.pack_header(header).ljust(HEADER_SIZE, b"\0")
        there = os.fstat(descriptor).st_size
        if os.pread(descriptor, HEADER_SIZE, 0) != packed:
            there = 0
        buffer = memoryview(bytearray(header.cell_size))
        for stripe in range(header.cell_count):
            offset, length = header.cell_offset(stripe), header.cell_length(stripe)
            if self._revoked or offset + length > there or read_into(descriptor, buffer[:length], offset) != length:
                break
            self._table += cell_hash(buffer[:length])
            self._next_stripe = stripe + 1
        self._check()
        kept = header.cell_offset(self._next_stripe - 1) + header.cell_length(self._next_stripe - 1) if self._next_stripe else 0
        self._store.reserve(self, max(0, header.file_length() - kept - self._hole_bytes))
        os.ftruncate(descriptor, kept)
        if not kept:
            self._write(packed, 0)
        self.resume_stripe = self._next_stripe
        self._handed_over = max(HEADER_SIZE, kept)

    def _finish_again(self, footer: ShardFooter, complete: HeldShard) -> bytes:
        """The shard was complete already: acknowledge it, after making sure again that it survives a power cut. Its age counts
        anew, so that the sweep doesn't take it before it can be named."""
        try:
            if footer.root != complete.root:
                raise ShardConflict("a complete shard with another root is stored under this vid and index")
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                sync_directory(Path(self._path).parent)
            except OSError as error:
                raise self._error(error) from None
            self._store.enter([replace(complete, stored_at_ns=time.time_ns())])
        finally:
            self._close()
        return complete.root

    def _write(self, data: Buffer, offset: int) -> None:
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(view):
                    done += os.pwrite(self._descriptor, view[done:], offset + done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._remove()
            else:
                self._close()
            raise self._error(error) from None

    def _error(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull("the store ran full while the shard arrived; nothing of it was kept")
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG):
            return StoreFull(f"the agent is at a limit of the system: {error.strerror}")
        return self._store.fail(error, self._path)

    def _check(self) -> None:
        if self._revoked:
            raise WriterRevoked("a newer put of the same shard took over")
        if self._ended:
            raise ValueError("this writer has ended")

    def revoke(self) -> None:
        self._revoked = True
        with self._mutex:
            self._close()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.partial_path)
        self._close()

    def _close(self) -> None:
        self._ended = True
        self.promised_bytes = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._store.forget(self)


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the drive begin. Without effect on what is promised, so a failure shows at the fsync."""
    if _sync_file_range is None or _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
