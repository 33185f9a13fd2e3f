"""The log: one plain file for the bytes of an inode that this node is the home of.

A segment is `segments/<first 8 hex digits>/<32 hex digits of its id>`, mode 0600, with the extended attribute
`user.ckptfs` = format (1 byte, 1), inode number (8 bytes, little-endian): with the databases gone, segments and the catalog
say together what belongs where. Its bytes are the file's bytes, so a disaster leaves ordinary files. Once a sync of it failed it
also has `user.ckptfs.sync_failed`, empty: the kernel has marked its pages clean, so a later sync would succeed and lie.

The kernel writes a segment directly (passthrough); this process only ever holds read-only descriptors, so that
`has_no_writer` tells the truth.
"""

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

from ckptfs.cache.checksum import HASH_SIZE, cell_hash
from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.file_identity import FileIdentity, file_identity
from ckptfs.cache.holes import Holes, zero_hash
from ckptfs.cache.ids import ID_SIZE, InodeNumber, SegmentId

ATTRIBUTE = "user.ckptfs"
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""No sync fails with these: a directory could not be opened to be synced, and nothing of the file is lost."""

SYNC_FAILED_ATTRIBUTE = "user.ckptfs.sync_failed"
FORMAT_VERSION = 1
_LABEL = struct.Struct("<BQ")
_HEX = re.compile("[0-9a-f]+")
UNREADABLE = bytes(HASH_SIZE)
"""In place of a cell's hash: the drive doesn't give the cell. No content is known that has this hash."""


class Segments:
    """The segments of one store. Blocking; every method raises `OSError` as the file system gives it."""

    def __init__(self, directory: Path) -> None:
        self._directory = os.fspath(directory)

    def check_usable(self) -> None:
        """Make a segment, label, lease, sync and remove it. Raises `StoreError` if the file system can't do one of these.

        A drive without room for it is passed over: what is on it must be readable. One that a kill or a power cut leaves goes the
        next time.
        """
        segment = SegmentId(bytes(ID_SIZE))
        try:
            self.remove(segment)
            descriptor = self.create(segment, InodeNumber(0))
            try:
                has_no_writer(descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                self.remove(segment)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(
                    f"the file system under {self._directory} can't hold segments ({error.strerror}): extended attributes and"
                    " leases are needed, as ext4 and xfs have them; nothing was mounted: put node.store on such a drive"
                ) from None

    def path_of(self, segment: SegmentId) -> str:
        """Where the segment is, or would be; made from the id only, never from a name that came from outside."""
        if len(segment) != ID_SIZE:
            raise ValueError("a segment id has 16 bytes")
        name = segment.hex()
        return f"{self._directory}/{name[:8]}/{name}"

    def create(self, segment: SegmentId, ino: InodeNumber) -> int:
        """Make an empty segment and return a read-only descriptor of it, which the caller owns."""
        path = self.path_of(segment)
        flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOATIME
        while True:
            try:
                descriptor = os.open(path, flags, 0o600)
                break
            except FileNotFoundError:  # none is there yet, or a thread removed it with its last segment
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.dirname(path), 0o700)
        try:
            os.setxattr(descriptor, ATTRIBUTE, _LABEL.pack(FORMAT_VERSION, ino))
        except BaseException:
            os.close(descriptor)
            self.remove(segment)
            raise
        return descriptor

    def relabel(self, segment: SegmentId, ino: InodeNumber) -> None:
        """The segment is another inode's from now on."""
        os.setxattr(self.path_of(segment), ATTRIBUTE, _LABEL.pack(FORMAT_VERSION, ino))

    def open_read(self, segment: SegmentId) -> int:
        """A read-only descriptor of the segment, which the caller owns."""
        try:
            return os.open(self.path_of(segment), os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME)
        except PermissionError:  # the segment is another user's: the agent's way
            return os.open(self.path_of(segment), os.O_RDONLY | os.O_CLOEXEC)

    def create_from(self, segment: SegmentId, ino: InodeNumber, source: str, identity: FileIdentity | None = None) -> int:
        """Make a segment with the bytes of another file, and return a read-only descriptor. Nothing is left if it fails.

        With an `identity` it is `FileNotFoundError` if the name leads to another file.
        """
        descriptor = self.create(segment, ino)
        try:
            with open(source, "rb") as original, open(self.path_of(segment), "r+b") as copy:
                if identity is not None and file_identity(original.fileno()) != identity:
                    raise FileNotFoundError(errno.ENOENT, "another file has its name", source)
                size = os.fstat(original.fileno()).st_size
                offset = 0
                while offset < size:
                    count = os.copy_file_range(original.fileno(), copy.fileno(), size - offset)
                    if count == 0:
                        raise OSError(errno.EIO, "the copy is shorter than it should be")
                    offset += count
        except BaseException:
            os.close(descriptor)
            self.remove(segment)
            raise
        return descriptor

    def size(self, segment: SegmentId) -> int:
        """The segment's size in bytes; 0 if it does not exist."""
        try:
            return os.stat(self.path_of(segment)).st_size
        except FileNotFoundError:
            return 0

    def written_at_ns(self, segment: SegmentId) -> int:
        """When the segment was last written, wall time; 0 if it does not exist."""
        try:
            return os.stat(self.path_of(segment)).st_mtime_ns
        except FileNotFoundError:
            return 0

    def inode_of(self, descriptor: int) -> InodeNumber:
        """The inode a segment says it belongs to. Raises `DamagedData` if it doesn't say."""
        try:
            label = os.getxattr(descriptor, ATTRIBUTE)
            version, ino = _LABEL.unpack(label)
        except (OSError, struct.error):
            raise DamagedData("a file among the segments carries no readable label; it was left alone") from None
        if version != FORMAT_VERSION:
            raise DamagedData(f"a segment has format {version}, this program reads {FORMAT_VERSION}; it was left alone")
        return InodeNumber(ino)

    def mark_sync_failed(self, segment: SegmentId) -> None:
        """Remember, also for the processes to come, that the segment's bytes are not safe on this drive."""
        os.setxattr(self.path_of(segment), SYNC_FAILED_ATTRIBUTE, b"")

    def has_sync_failed(self, descriptor: int) -> bool:
        """Whether a sync of the segment ever failed."""
        try:
            os.getxattr(descriptor, SYNC_FAILED_ATTRIBUTE)
        except OSError as error:
            if error.errno == errno.ENODATA:
                return False
            raise
        return True

    def remove(self, segment: SegmentId) -> None:
        """Unlink the segment; nothing happens if it is gone already."""
        path = self.path_of(segment)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        with contextlib.suppress(OSError):  # the directory goes with its last segment
            os.rmdir(os.path.dirname(path))

    def all(self) -> list[SegmentId]:
        """Every segment there is. Other files among them are passed over."""
        listing = self.listing()
        return [SegmentId(listing[at : at + ID_SIZE]) for at in range(0, len(listing), ID_SIZE)]

    def listing(self) -> bytes:
        """As `all`, one id after the other: of a million segments a quarter of the memory. Blocks."""
        found = bytearray()
        for directory in os.scandir(self._directory):
            if directory.is_dir(follow_symlinks=False):
                names = [name for name in os.listdir(directory.path) if len(name) == 2 * ID_SIZE and name[:8] == directory.name]
                found += b"".join(bytes.fromhex(name) for name in names if _HEX.fullmatch(name))
        return bytes(found)

    def sync_name(self, segment: SegmentId) -> None:
        """Make the segment's name survive a power cut. Raises `OSError`: `FileNotFoundError` if its directory is gone, which goes
        with its last segment; with one of `NO_DESCRIPTOR` nothing failed."""
        if self.sync_names([segment]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path_of(segment))

    def sync_names(self, segments: list[SegmentId]) -> set[SegmentId]:
        """As `sync_name`; each directory is synced once. Those whose directory is gone are returned: the others are safe."""
        inside: dict[str, set[SegmentId]] = {}
        for segment in segments:
            inside.setdefault(os.path.dirname(self.path_of(segment)), set()).add(segment)
        gone: set[SegmentId] = set()
        for directory, its_segments in inside.items():
            try:
                _sync_directory(directory)
            except FileNotFoundError:
                gone |= its_segments
        if inside:
            _sync_directory(self._directory)
        return gone


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_no_writer(descriptor: int) -> bool:
    """Whether nothing can write to the file at this moment: no descriptor open for writing, no mapping made from one.

    `descriptor` must be read-only. The kernel grants a read lease exactly then (fcntl(2), F_SETLEASE); it is given back at
    once. RELEASE does not tell this: a shared writable mapping lives on after it. Whoever opens the file just then waits for the
    moment, and has the kernel send SIGIO, which this process must ignore.
    """
    return _is_granted(descriptor, fcntl.F_RDLCK)


def has_no_other_user(descriptor: int) -> bool:
    """As `has_no_writer`, for readers too: nothing but this one descriptor has the file open or mapped."""
    return _is_granted(descriptor, fcntl.F_WRLCK)


def _is_granted(descriptor: int, lease: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, lease)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        raise
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def hash_cells(
    descriptor: int, cell_size: int, first_cell: int, count: int, still_wanted: Callable[[], object] = lambda: None
) -> bytes:
    """The hashes of up to `count` cells of the file, read from the drive where the kernel lets go of its cached pages: fewer at
    the file's end, where the last cell may be short. `still_wanted` is called before each cell, and raises to end it."""
    start = first_cell * cell_size
    os.posix_fadvise(descriptor, start, count * cell_size, os.POSIX_FADV_DONTNEED)
    end = min(os.fstat(descriptor).st_size, start + count * cell_size)
    table = bytearray()
    buffer, holes = memoryview(bytearray(min(cell_size, max(end - start, 0)))), Holes(descriptor)
    for offset in range(start, end, cell_size):
        still_wanted()
        length = min(cell_size, end - offset)
        if holes.cover(offset, length):
            table += zero_hash(length)
            continue
        try:
            read = os.preadv(descriptor, [buffer[:length]], offset)
        except OSError:
            table += UNREADABLE
            continue
        if not read:
            break
        table += cell_hash(buffer[:read])
    return bytes(table)
