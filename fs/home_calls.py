"""What a program does to a file whose home is another node, as one call (`replication.peer_messages.HomeCall`) to that home (R5).

======== ====================================== ======================================= ==========================
call     fields                                 payload                                 value of the answer
======== ====================================== ======================================= ==========================
OPEN     ino, fh, flags: those of open(2)       --                                      0
WRITE    ino, fh, offset, flags: the file's     the bytes; with O_APPEND they go to     bytes written
         flags now                              the end, wherever the offset
TRUNCATE ino, fh or 0, length: the new size     --                                      0
ALLOCATE ino, fh, offset, length, flags: mode   --                                      0
SYNC     ino, fh                                --                                      0
CLOSE    ino, fh                                --                                      0
JOIN     as OPEN                                --                                      1 if nothing was opened,
                                                                                        because no program of the
                                                                                        home has the file open
KEEP     --                                     the handles that are open, u64 each,    0
                                                little-endian: others of this node are
                                                nobody's, and end after a while
======== ====================================== ======================================= ==========================

`fh` is the number of the request the handle was opened for. The answer to EBUSY: the file's home is another node by now.
"""

import enum
import errno
import sys
from array import array
from collections.abc import Iterable

import msgspec

from ckptfs.cache.checksum import Buffer
from ckptfs.fs.local_socket import Message
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall


class Call(enum.IntEnum):
    """As on the wire: numbers are never reused, 0 is never valid."""

    OPEN = 1
    WRITE = 2
    TRUNCATE = 3
    ALLOCATE = 4
    SYNC = 5
    CLOSE = 6
    KEEP = 7
    JOIN = 8


SYNC_SECONDS_MAX = 600.0
"""How long the home's drive may take over one sync."""
JOIN_SECONDS_MAX = 3.0
"""A home that takes longer to say whether its programs have a file open counts as away: opening goes on without it."""
CALL_SECONDS_MAX = 20.0
"""How long any other call may take a mount that is there; after that it counts as hanging."""


def seconds_max(call: int) -> float:
    """How long the mount at the home is waited for."""
    return SYNC_SECONDS_MAX if call == Call.SYNC else CALL_SECONDS_MAX


def pack_handles(handles: Iterable[int]) -> bytes:
    """The payload of KEEP."""
    packed = array("Q", handles)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_handles(data: Buffer) -> set[int]:
    """Raises `OSError` (EINVAL) for bytes that are none."""
    if len(data) % 8:
        raise OSError(errno.EINVAL, "these are no handles")
    packed = array("Q")
    packed.frombytes(bytes(data))
    if sys.byteorder == "big":
        packed.byteswap()
    return set(packed)


def as_message(call: HomeCall, data: Buffer) -> Message:
    """The call as it goes over a node's own sockets."""
    return {"call": msgspec.structs.astuple(call), "data": bytes(data)}


def from_message(message: Message) -> tuple[HomeCall, bytes]:
    """Raises `KeyError`, `TypeError`, `ValueError` for one that makes no sense."""
    return msgspec.convert(message["call"], HomeCall), bytes(message["data"])


def answer_as_message(answer: HomeAnswer) -> Message:
    return {"ok": True, "errno": answer.errno, "value": answer.value, "message": answer.message}


def answer_from_message(message: Message) -> HomeAnswer:
    return HomeAnswer(int(message["errno"]), int(message["value"]), str(message["message"]))
