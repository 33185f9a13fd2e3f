"""Sealing: a segment that nothing can write to any more is synced and hashed, which makes its version `local`.

The lease test (`segments.has_no_writer`) is the truth about writers; the caller's `still_wanted` is the truth about opens,
truncations and removals that came meanwhile. A seal is void if either fails, or if the file's size or times moved while it
was hashed; the bytes stay `open` and are tried again after the next close.

Write order: fsync of the segment with its label, then its directory, then the hash, then (the caller's) catalog transaction.
"""

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptfs.cache.checksum import cell_hash, cell_size_for, content_root
from ckptfs.cache.holes import Holes, zero_hash
from ckptfs.cache.ids import InodeNumber, SegmentId, Vid
from ckptfs.cache.segments import NO_DESCRIPTOR, Segments, has_no_writer

_SYNC_FILE_RANGE_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class SealCandidate(NamedTuple):
    """A segment to seal. The descriptor is read-only and stays open until `seal` returns."""

    ino: InodeNumber
    vid: Vid
    segment: SegmentId
    descriptor: int
    still_wanted: Callable[[], bool]


class Sealed(NamedTuple):
    """What sealing found: the content's size, root and cell size, the segment's mtime, and the blocks of 512 bytes it takes."""

    candidate: SealCandidate
    size: int
    root: bytes
    cell_size: int
    mtime_ns: int
    blocks: int


class SealFailed(NamedTuple):
    """The segment can't be synced or read: its bytes are not safe here."""

    candidate: SealCandidate
    error: OSError


class Sealer:
    """Seals segments of one store. Blocking: for a thread, one at a time."""

    def __init__(self, segments: Segments, data_shards: int, cell_size_max: int, small_file_size: int) -> None:
        self._segments = segments
        self._data_shards = data_shards
        self._cell_size_max = cell_size_max
        self._small_file_size = small_file_size
        self._buffer = bytearray(max(cell_size_max, small_file_size))

    def seal(self, candidates: Sequence[SealCandidate]) -> list[Sealed | SealFailed]:
        """Sync and hash; candidates that something can still write to, or that moved meanwhile, are left out.

        Writing of all of them begins before the first is waited for, so that a batch shares its journal commits.
        """
        quiet = [candidate for candidate in candidates if candidate.still_wanted() and has_no_writer(candidate.descriptor)]
        for candidate in quiet:
            _libc.sync_file_range(candidate.descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)
        results: list[Sealed | SealFailed] = []
        synced = []
        for candidate in quiet:
            try:
                os.fsync(candidate.descriptor)  # with its label
                synced.append(candidate)
            except OSError as error:
                results.append(SealFailed(candidate, error))
        try:
            gone = self._segments.sync_names([candidate.segment for candidate in synced])
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return results
            return results + [SealFailed(candidate, error) for candidate in synced]
        for candidate in synced:
            if candidate.segment in gone:
                if candidate.still_wanted():  # else its file was removed meanwhile
                    results.append(SealFailed(candidate, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))
                continue
            try:
                sealed = self._hash(candidate)
            except OSError as error:
                results.append(SealFailed(candidate, error))
                continue
            if sealed is not None:
                results.append(sealed)
        return results

    def hash_prefix(self, candidate: SealCandidate) -> Sealed | SealFailed | None:
        """Sync and hash what the segment has now, though programs write to it; None if it becomes shorter, or unwanted.

        That all of this was there at one moment is known when it is read again afterwards and has the same hashes.
        """
        try:
            os.fsync(candidate.descriptor)
            self._segments.sync_name(candidate.segment)
            before = os.fstat(candidate.descriptor)
            return self._hashed(candidate, before)
        except OSError as error:
            return None if error.errno in NO_DESCRIPTOR or not candidate.still_wanted() else SealFailed(candidate, error)

    def _hash(self, candidate: SealCandidate) -> Sealed | None:
        before = os.fstat(candidate.descriptor)
        sealed = self._hashed(candidate, before)
        after = os.fstat(candidate.descriptor)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns) or not has_no_writer(candidate.descriptor):
            return None
        return sealed

    def _hashed(self, candidate: SealCandidate, status: os.stat_result) -> Sealed | None:
        size, holes = status.st_size, Holes(candidate.descriptor)
        cell_size = cell_size_for(size, self._data_shards, self._cell_size_max, self._small_file_size)
        table = bytearray()
        with memoryview(self._buffer) as buffer:
            for offset in range(0, size, cell_size):
                wanted = min(cell_size, size - offset)
                if holes.cover(offset, wanted):
                    table += zero_hash(wanted)
                    continue
                if os.preadv(candidate.descriptor, [buffer[:wanted]], offset) != wanted or not candidate.still_wanted():
                    return None
                table += cell_hash(buffer[:wanted])
        root = content_root(candidate.vid, size, cell_size, table)
        return Sealed(candidate, size, root, cell_size, status.st_mtime_ns, status.st_blocks)
