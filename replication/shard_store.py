"""The shards a store holds, as files: `shards/<first 2 hex digits>/<32 hex digits of the vid>.<index>`.

Blocking: the server calls it in threads. Nothing that comes from outside becomes part of a path but an id and a small
number. One process writes.

Write order: the file is made under its name with `.partial`; header, cells in order, footer; fsync; rename; fsync of the
directory; only then is the root returned. Cells are handed to the drive early, so that the final fsync is short. A
`.partial` file is a shard that was never acknowledged: the next put of the same shard goes on from its whole cells,
after hashing them again (what a power cut left of them may be wrong, which the footer then shows), and those nobody
goes on with are removed by age.
"""

import contextlib
import ctypes
import errno
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptfs.cache.checksum import Buffer, cell_hash
from ckptfs.cache.drive_refusal import refuses_writes
from ckptfs.cache.ids import ID_SIZE, Vid
from ckptfs.replication import shard_format
from ckptfs.replication.agent_db import AgentDatabase, Held, HeldShard
from ckptfs.replication.errors import (
    ShardConflict,
    ShardDamaged,
    ShardNotFound,
    StoreFailed,
    StoreFull,
    WriterRevoked,
)
from ckptfs.replication.shard_format import HEADER_SIZE, TRAILER_SIZE, ShardFooter, ShardHeader

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
PARTIAL_AGE_SECONDS_MAX = 24 * 3600
WRITE_BEHIND_BYTES = 8 << 20
"""How much is written before the drive is told to begin: large enough for one good request, small enough that the fsync
at the end has little left."""
BAD_STRIPES_MAX = 1000

DRIVE_ERRORS = {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE}
"""What a drive that fails, or a file system that gave up on one, answers. Any other is of what is in the store, or of the
system."""

_FAN = re.compile("[0-9a-f]{2}")
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class VerifyResult(NamedTuple):
    """What re-reading a shard showed. `bad_stripes` are those whose cell fails its hash, the first 1000 of them."""

    ok: bool
    bad_stripes: tuple[int, ...]
    message: str


class Recovered(NamedTuple):
    """What `recover` found: rows added and removed, shards that can't be read, partial files kept and removed."""

    added: int
    removed: int
    damaged: tuple[str, ...]
    partial_kept: int
    partial_removed: int


@dataclass(frozen=True, slots=True)
class ShardStoreStatistics:
    """`promised_bytes` are reserved for puts under way; `failed` says why the store takes nothing more, or is empty;
    `obstacle` why the newest shard that came could not be stored, without the drive being at fault.
    `held` is what the index says, None while it can't be read."""

    held: Held | None
    writing: int
    promised_bytes: int
    free_bytes: int
    failed: str
    obstacle: str


class ShardStore:
    """Makes, reads, checks and removes shard files. Safe to use from several threads."""

    def __init__(
        self,
        directory: Path,
        agent_db: AgentDatabase,
        *,
        reserve_bytes: int = 0,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`directory` is the `shards/` of a store. `reserve_bytes` stay free for local saves. `free_bytes` replaces the
        file system's own answer."""
        self._directory = os.fspath(directory)
        self._index = agent_db
        self._reserve_bytes = reserve_bytes
        self._free_bytes = free_bytes or self._free_bytes_of_file_system
        self._lock = threading.Lock()
        self._writers: dict[tuple[Vid, int], ShardWriter] = {}
        self._failed = ""
        self._obstacle = ""
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        self._made = set(os.listdir(self._directory))
        if reason := refuses_writes(self._directory):
            self._failed = f"the drive under {self._directory} takes no writes: {reason}; repair or replace it"

    def begin(self, header: ShardHeader) -> "ShardWriter":
        """A writer for this shard, which goes on where an earlier one stopped: see `ShardWriter.resume_stripe`. A complete
        shard is re-read; one that is damaged is written anew, and replaced when the new one is complete.

        Space is reserved before the first byte. An earlier writer of the same shard that still exists is revoked. Raises
        `StoreFull`, `StoreFailed`, `WriterRevoked` (a later call was faster).
        """
        key = (header.vid, header.index)
        with self._lock:
            if self._failed:
                raise StoreFailed(self._failed)
            earlier = self._writers.get(key)
            writer = self._writers[key] = ShardWriter(self, header)
        try:
            if earlier is not None:
                earlier._revoke()
            writer._open()
        except BaseException:
            self._forget(writer)
            raise
        return writer

    def open(self, vid: Vid, index: int) -> "ShardReader":
        """A reader of a complete shard. Raises `ShardNotFound`, `ShardDamaged`."""
        return ShardReader(self.path_of(vid, index), vid, index)

    def verify(self, vid: Vid, index: int) -> VerifyResult:
        """Re-read the whole shard, from the drive where the kernel lets go of its cached pages. Raises `ShardNotFound`."""
        try:
            with self.open(vid, index) as reader:
                return reader.verify()
        except ShardDamaged as error:
            return VerifyResult(False, (), str(error))

    def delete(self, vid: Vid, index: int) -> bool:
        """Remove a complete shard; False if there was none. The catalog's fact that nobody needs it comes first (R22)."""
        path = self.path_of(vid, index)
        there = True
        try:
            os.unlink(path)
        except FileNotFoundError:
            there = False
        self._strike([(vid, index)])
        return there

    def partials(self) -> Sequence[tuple[Vid, int]]:
        """The shards of which there is a partial file."""
        found = []
        for path in self._names():
            if path.endswith(PARTIAL) and (key := self._key_of(path.removesuffix(PARTIAL))) is not None:
                found.append(key)
        return found

    def delete_partial(self, vid: Vid, index: int) -> bool:
        """Remove a partial file that nobody writes; False if there was none, or somebody does."""
        with self._lock:
            if (vid, index) in self._writers:
                return False
            try:
                os.unlink(self.path_of(vid, index) + PARTIAL)
            except FileNotFoundError:
                return False
            return True

    def list(self, after: tuple[bytes, int] = (b"", -1), limit: int = 1000) -> list[HeldShard]:
        """The index's rows after that vid and index."""
        return self._index.list(after, limit)

    def statistics(self) -> ShardStoreStatistics:
        with self._lock:
            writers = list(self._writers.values())
            failed, obstacle = self._failed, self._obstacle
        promised = sum(writer.promised_bytes for writer in writers)
        try:
            held = self._index.held()
        except sqlite3.Error as error:
            logger.warning("index-unreadable error=%s", error)
            held = None
        return ShardStoreStatistics(held, len(writers), promised, self.free_bytes(), failed, obstacle)

    def free_bytes(self) -> int:
        """Bytes that shards may still take: free space without the reserve and without what is promised; at least 0. A drive that
        failed takes none: placement passes it over as it does a full one."""
        with self._lock:
            if self._failed:
                return 0
            promised = sum(writer.promised_bytes for writer in self._writers.values())
        return max(0, self._free_bytes() - self._reserve_bytes - promised)

    def path_of(self, vid: Vid, index: int) -> str:
        """Where the shard is, or would be; made from the ids only."""
        if len(vid) != ID_SIZE or not 0 <= index < shard_format.SHARDS_MAX:
            raise ValueError(f"no shard is called {vid.hex()}.{index}")
        name = vid.hex()
        return f"{self._directory}/{name[:2]}/{name}.{index}"

    def recover(self, partial_age_seconds_max: float = PARTIAL_AGE_SECONDS_MAX) -> Recovered:
        """Make the index agree with the files and clear old partial files; once, at start, before anything is written.

        Reads names only, and header and footer of the shards the index doesn't know.
        """
        found: dict[tuple[Vid, int], str] = dict(self._scan())
        known: set[tuple[Vid, int]] = set()
        after: tuple[bytes, int] = (b"", -1)
        while rows := self._index.list(after, 10_000):
            known.update((row.vid, row.index) for row in rows)
            after = (rows[-1].vid, rows[-1].index)
        gone = known - found.keys()
        self._strike(gone)
        added: list[HeldShard] = []
        damaged: list[str] = []
        for vid, index in found.keys() - known:
            try:
                with self.open(vid, index) as reader:
                    added.append(reader.held())
            except ShardDamaged:
                damaged.append(found[vid, index])
        self._enter(added)
        removed = self.remove_stale_partials(partial_age_seconds_max)
        kept = sum(1 for name in self._names() if name.endswith(PARTIAL))
        return Recovered(len(added), len(gone), tuple(sorted(damaged)), kept, removed)

    def remove_stale_partials(self, age_seconds_max: float = PARTIAL_AGE_SECONDS_MAX) -> int:
        """Remove partial files that nobody writes: those untouched for that long, and those no put can go on with."""
        removed = 0
        if self._failed:
            return removed
        for path in list(self._names()):
            if not path.endswith(PARTIAL):
                continue
            with self._lock:
                if any(writer.partial_path == path for writer in self._writers.values()):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - os.stat(path).st_mtime > age_seconds_max or not _has_header(path):
                        os.unlink(path)
                        removed += 1
        return removed

    def _names(self) -> Iterator[str]:
        for fan in sorted(name for name in self._made if _FAN.fullmatch(name)):
            with contextlib.suppress(NotADirectoryError), os.scandir(f"{self._directory}/{fan}") as entries:
                for entry in entries:
                    yield entry.path

    def _scan(self) -> Iterator[tuple[tuple[Vid, int], str]]:
        """Complete shards by their names; foreign names are passed over."""
        for path in self._names():
            if (key := self._key_of(path)) is not None:
                yield key, path

    def _key_of(self, path: str) -> tuple[Vid, int] | None:
        """Which shard is called so; None if none can be."""
        name, _, number = os.path.basename(path).partition(".")
        try:
            vid, index = Vid(bytes.fromhex(name)), int(number)
            return (vid, index) if self.path_of(vid, index) == path else None
        except ValueError:
            return None

    def _make_fan(self, vid: Vid) -> None:
        fan = vid[:1].hex()
        if fan in self._made:
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self._directory}/{fan}", mode=0o700)
        _sync_directory(self._directory)
        self._made.add(fan)

    def _free_bytes_of_file_system(self) -> int:
        status = os.statvfs(self._directory)
        if status.f_flag & os.ST_RDONLY:
            return 0
        return status.f_bavail * status.f_frsize

    def _reserve(self, writer: "ShardWriter", needed_bytes: int) -> None:
        with self._lock:
            others = sum(other.promised_bytes for other in self._writers.values() if other is not writer)
            available = self._free_bytes() - self._reserve_bytes - others
            if needed_bytes > available:
                raise StoreFull(f"a shard of {needed_bytes} bytes doesn't fit into the {max(0, available)} bytes left for shards")
            writer.promised_bytes = needed_bytes

    def _forget(self, writer: "ShardWriter") -> None:
        key = (writer.header.vid, writer.header.index)
        with self._lock:
            if self._writers.get(key) is writer:
                del self._writers[key]

    # The files are the truth: what a full drive keeps out of the index, or in it, the next `recover` mends.

    def _enter(self, shards: Sequence[HeldShard]) -> None:
        try:
            self._index.add(shards)
        except sqlite3.Error as error:
            logger.warning("shards-not-indexed count=%d error=%s", len(shards), error)

    def _strike(self, shards: Collection[tuple[Vid, int]]) -> None:
        try:
            self._index.remove(shards)
        except sqlite3.Error as error:
            logger.warning("shards-still-indexed count=%d error=%s", len(shards), error)

    def _fail(self, error: OSError, path: str) -> StoreFailed:
        """A write or sync that failed in the drive is final: the kernel may have dropped the pages, a second sync would lie.
        What else stands in the way is said, and the next shard is tried."""
        with self._lock:
            if error.errno not in DRIVE_ERRORS:
                self._obstacle = (
                    f"a shard could not be stored as {path}: {error.strerror}; its drive did not fail, look at what is there"
                )
                return StoreFailed(self._obstacle)
            self._failed = self._failed or f"the drive under {self._directory} failed: {error.strerror}; replace it"
            return StoreFailed(self._failed)


class ShardWriter:
    """Writes one shard, cell after cell. One caller at a time; made by `ShardStore.begin`.

    Ends with exactly one of `finish` (stored), `suspend` (what is there is kept for the next put) or `abandon` (removed).
    """

    def __init__(self, store: ShardStore, header: ShardHeader) -> None:
        self.header = header
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
        """Append the cell of that stripe, the next one. Does not keep the buffer. Cells of length 0 are not written.

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
            if self._complete is None:
                offset = self.header.cell_offset(stripe)
                self._write(cell, offset)
                self.promised_bytes = max(0, self.promised_bytes - length)
                if offset + length - self._handed_over >= WRITE_BEHIND_BYTES:
                    _start_writeback(self._descriptor, self._handed_over, offset + length - self._handed_over)
                    self._handed_over = offset + length
            self._table += hash_
            self._next_stripe = stripe + 1

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
                _sync_directory(os.path.dirname(self._path))
            except OSError as error:
                self._remove()
                raise self._error(error) from None
            self._close()
            self._store._obstacle = ""
            root = footer.root
            held = HeldShard(self.header.vid, self.header.index, root, offset + len(end), time.time_ns())
        self._store._enter([held])
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

    def _open(self) -> None:
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
                self._store._make_fan(self.header.vid)
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
            if self._revoked or offset + length > there or _read_into(descriptor, buffer[:length], offset) != length:
                break
            self._table += cell_hash(buffer[:length])
            self._next_stripe = stripe + 1
        self._check()
        kept = header.cell_offset(self._next_stripe - 1) + header.cell_length(self._next_stripe - 1) if self._next_stripe else 0
        self._store._reserve(self, header.file_length() - kept)
        os.ftruncate(descriptor, kept)
        if not kept:
            self._write(packed, 0)
        self.resume_stripe = self._next_stripe
        self._handed_over = max(HEADER_SIZE, kept)

    def _finish_again(self, footer: ShardFooter, complete: HeldShard) -> bytes:
        """The shard was complete already: acknowledge it, after making sure again that it survives a power cut."""
        self._close()
        if footer.root != complete.root:
            raise ShardConflict("a complete shard with another root is stored under this vid and index")
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_directory(os.path.dirname(self._path))
        except OSError as error:
            raise self._error(error) from None
        self._store._enter([complete])
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
        return self._store._fail(error, self._path)

    def _check(self) -> None:
        if self._revoked:
            raise WriterRevoked("a newer put of the same shard took over")
        if self._ended:
            raise ValueError("this writer has ended")

    def _revoke(self) -> None:
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
        self._store._forget(self)


class ShardReader:
    """Reads one complete shard. Header and footer were checked; cells are checked as they are read."""

    def __init__(self, path: str, vid: Vid, index: int) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            raise ShardNotFound(f"no shard {vid.hex()}.{index} in this store") from None
        try:
            status = os.fstat(self._descriptor)
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
            count = _read_into(self._descriptor, buffer[:length], self.header.cell_offset(stripe))
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
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
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
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, offset: int, length: int) -> bytes:
        data = bytearray(length)
        count = _read_into(self._descriptor, memoryview(data), offset)
        return bytes(data[:count])


def _read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _has_header(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            shard_format.unpack_header(file.read(HEADER_SIZE))
    except ShardDamaged:
        return False
    return True


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the drive begin. Without effect on what is promised, so a failure shows at the fsync."""
    if _sync_file_range is None or _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
