"""`mount.notes`: changes of `mount.db` that it has not committed yet, in a file beside it.

A commit of two rows is ten times the work of writing them down, and every file that is made or closed has one. So what concerns
handles is noted here and committed later, many changes in one transaction. Notes are in the page cache when `add` returns: they
outlive the process, as a commit of the database does, and like it are not synced.

::

    note     length u32, CRC-32 u32 of what follows, owner u64, number u64, msgpack [change, values]      little-endian
    file     notes of growing number from offset 0; what follows the last one is older

`owner` is when the database was made and in which boot it is written (a power cut takes committed rows back, and the numbers of
their notes are given out again): another's notes mean nothing. Numbers grow by one. The database remembers the newest one it has
committed; notes that don't go on from there (a power cut took commits) are passed over.
"""

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

SIZE_BYTES = 256 << 10
"""Room for a thousand notes. It is filled on a full drive only, when nothing can be committed."""

_HEAD = struct.Struct("<II")
_NUMBERS = struct.Struct("<QQ")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, list[Any]]).decode


class Note(NamedTuple):
    """One change and its values."""

    number: int
    change: str
    values: list[Any]


class RowNotes:
    """The file. One process has it at a time."""

    def __init__(self, path: Path, owner: int) -> None:
        """Raises `OSError`: there must be room for all of it."""
        self._owner = owner
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, SIZE_BYTES)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._offset = 0

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, committed: int) -> list[Note]:
        """The notes after number `committed`, and those that are added next follow them."""
        content = memoryview(os.pread(self._descriptor, SIZE_BYTES, 0))
        found: list[Note] = []
        offset = 0
        expected: int | None = None
        while (note := self._note_at(content, offset)) is not None:
            number, end, payload = note
            if number != expected and (expected is not None or number > committed + 1):
                break
            if number > committed:
                try:
                    change, values = _decode(payload)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                found.append(Note(number, change, values))
            expected, offset = number + 1, end
        self._offset = offset if found else 0
        return found

    def _note_at(self, content: memoryview, offset: int) -> tuple[int, int, memoryview] | None:
        """Number, end and payload of a whole note of this owner."""
        begins = offset + _HEAD.size
        if begins > len(content):
            return None
        length, check_sum = _HEAD.unpack_from(content, offset)
        if not _NUMBERS.size < length <= len(content) - begins:
            return None
        body = content[begins : begins + length]
        owner, number = _NUMBERS.unpack_from(body)
        if crc32(body) != check_sum or owner != self._owner:
            return None
        return number, begins + length, body[_NUMBERS.size :]

    def add(self, number: int, change: str, values: Sequence[object]) -> None:
        """Write a note. Raises `OSError`, ENOSPC when the file is full."""
        body = _NUMBERS.pack(self._owner, number) + _encode((change, values))
        length = _HEAD.size + len(body)
        if self._offset + length > SIZE_BYTES:
            raise OSError(errno.ENOSPC, "the notes are full")
        if os.pwrite(self._descriptor, _HEAD.pack(len(body), crc32(body)) + body, self._offset) != length:
            raise OSError(errno.EIO, "a note was written in part")
        self._offset += length

    def begin_again(self) -> None:
        """Everything noted is committed."""
        self._offset = 0
