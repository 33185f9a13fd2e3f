"""The shards a store holds, as files: `shards/<first 2 hex digits>/<32 hex digits of the vid>.<index>`.

Blocking: the server calls it in threads. Nothing that comes from outside becomes part of a path but an id and a small
number. One process writes.

A `.partial` file is a shard that was never acknowledged (see `shard_writer`); those nobody goes on with are removed by age.
"""

import contextlib
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

from ckptfs.cache.drive_refusal import refuses_writes
from ckptfs.cache.ids import ID_SIZE, Vid
from ckptfs.cache.store import sync_directory
from ckptfs.replication import shard_format
from ckptfs.replication.agent_db import AgentDatabase, Held, HeldShard
from ckptfs.replication.errors import PeerRefused, ShardDamaged, StoreFailed, StoreFull
from ckptfs.replication.shard_format import HEADER_SIZE, ShardHeader
from ckptfs.replication.shard_reader import ShardReader, VerifyResult
from ckptfs.replication.shard_writer import PARTIAL, ShardWriter

logger = logging.getLogger(__name__)

PARTIAL_AGE_SECONDS_MAX = 24 * 3600

DRIVE_ERRORS = {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.ESTALE}
"""What a drive that fails, or a file system that gave up on one, answers. Any other is of what is in the store, or of the
system."""

_FAN = re.compile("[0-9a-f]{2}")


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

    def begin(self, header: ShardHeader, hole_bytes: int = 0) -> ShardWriter:
        """A writer for this shard, which goes on where an earlier one stopped: see `ShardWriter.resume_stripe`. A complete
        shard is re-read; one that is damaged is written anew, and replaced when the new one is complete.

        Space is reserved before the first byte, but not for `hole_bytes`: so many of the cells' bytes will be zeros. An earlier
        writer of the same shard that still exists is revoked. Raises `StoreFull`, `StoreFailed`, `WriterRevoked` (a later call
        was faster).
        """
        key = (header.vid, header.index)
        with self._lock:
            if self._failed:
                raise StoreFailed(self._failed)
            earlier = self._writers.get(key)
            writer = self._writers[key] = ShardWriter(self, header, hole_bytes)
        try:
            if earlier is not None:
                earlier.revoke()
            writer.open()
        except BaseException:
            self.forget(writer)
            raise
        return writer

    def open(self, vid: Vid, index: int) -> ShardReader:
        """A reader of a complete shard. Raises as it does."""
        return ShardReader(self.path_of(vid, index), vid, index)

    def verify(self, vid: Vid, index: int) -> VerifyResult:
        """Re-read the whole shard, from the drive where the kernel lets go of its cached pages. Raises `ShardNotFound`,
        and `PeerRefused` (busy) where it can't be opened now."""
        try:
            with self.open(vid, index) as reader:
                return reader.verify()
        except ShardDamaged as error:
            return VerifyResult(False, (), str(error))

    def delete(self, vid: Vid, index: int, stored_at_ns: int) -> bool:
        """Remove a complete shard; False if there was none. The catalog's fact that nobody needs it comes first (R22).

        Nor is one removed that was acknowledged again since the row with that time was read, or is being put: it may be named
        any moment. Raises `OSError`, `sqlite3.Error`.
        """
        path = self.path_of(vid, index)
        there = True
        with self._lock:
            row = self._index.get(vid, index)
            if (vid, index) in self._writers or (row is not None and row.stored_at_ns != stored_at_ns):
                return False
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
        known: dict[tuple[Vid, int], bool] = {}  # whether it could be read when it was entered
        after: tuple[bytes, int] = (b"", -1)
        while rows := self._index.list(after, 10_000):
            known.update({(row.vid, row.index): bool(row.root) for row in rows})
            after = (rows[-1].vid, rows[-1].index)
        gone = known.keys() - found.keys()
        self._strike(gone)
        added: list[HeldShard] = []
        unreadable: list[HeldShard] = []
        damaged: list[str] = []
        for vid, index in found.keys() - {key for key, was_readable in known.items() if was_readable}:
            try:
                with self.open(vid, index) as reader:
                    added.append(reader.held())
            except (ShardDamaged, PeerRefused):  # the sweep has to know of it too
                damaged.append(found[vid, index])
                unreadable.append(HeldShard(vid, index, b"", *_size_and_age(found[vid, index])))
        self.enter([*added, *unreadable])
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

    def make_fan(self, vid: Vid) -> None:
        fan = vid[:1].hex()
        if fan in self._made:
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{self._directory}/{fan}", mode=0o700)
        sync_directory(Path(self._directory))
        self._made.add(fan)

    def _free_bytes_of_file_system(self) -> int:
        status = os.statvfs(self._directory)
        if status.f_flag & os.ST_RDONLY:
            return 0
        return status.f_bavail * status.f_frsize

    def reserve(self, writer: ShardWriter, needed_bytes: int) -> None:
        with self._lock:
            others = sum(other.promised_bytes for other in self._writers.values() if other is not writer)
            available = self._free_bytes() - self._reserve_bytes - others
            if needed_bytes > available:
                raise StoreFull(f"a shard of {needed_bytes} bytes doesn't fit into the {max(0, available)} bytes left for shards")
            writer.promised_bytes = needed_bytes

    def forget(self, writer: ShardWriter) -> None:
        key = (writer.header.vid, writer.header.index)
        with self._lock:
            if self._writers.get(key) is writer:
                del self._writers[key]

    # The files are the truth: what a full drive keeps out of the index, or in it, the next `recover` mends.

    def enter(self, shards: Sequence[HeldShard]) -> None:
        try:
            self._index.add(shards)
        except sqlite3.Error as error:
            logger.warning("shards-not-indexed count=%d error=%s", len(shards), error)

    def _strike(self, shards: Collection[tuple[Vid, int]]) -> None:
        try:
            self._index.remove(shards)
        except sqlite3.Error as error:
            logger.warning("shards-still-indexed count=%d error=%s", len(shards), error)

    def stored(self) -> None:
        """A shard was stored: nothing is in the way any more."""
        self._obstacle = ""

    def fail(self, error: OSError, path: str) -> StoreFailed:
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


def _size_and_age(path: str) -> tuple[int, int]:
    """Its bytes, and when it was stored (wall time)."""
    try:
        status = os.lstat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _has_header(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            shard_format.unpack_header(file.read(HEADER_SIZE))
    except ShardDamaged:
        return False
    return True
