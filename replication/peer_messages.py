"""The messages peers exchange: what the header of each type of frame holds. Protocol version 2. Pure.

A header is a msgpack array, the fields in order. Later versions append fields with defaults; readers ignore those they
don't know. `decode` checks types, lengths and ranges, so that no message that makes no sense goes any further.

======== ============== ================ ======================================================================
  type   message        from             payload
======== ============== ================ ======================================================================
     1   Hello          asking side
     2   Welcome        answering side
     3   Refused        answering side
     4   Working        answering side                 the answer takes its time; resets the other side's deadline
    10   PutBegin       asking side
    11   PutReady       answering side
    12   Cell           both             one cell
    13   FooterPart     both             a part of a shard's footer and trailer, as in `shard_format`
    14   PutDone        answering side
    15   PutStop        asking side
    20   FooterGet      asking side
    21   CellsGet       asking side
    22   CellsDone      answering side
    30   CopiesPut      asking side      the contents, one after the other
    31   CopiesDone     answering side
    32   CopyGet        asking side
    33   Copy           answering side   the content
    40   SegmentGet     asking side
    41   SegmentData    answering side   the bytes; fewer than asked for at the end of the segment
    42   SegmentAsk     asking side
    43   SegmentIs      answering side
    44   SegmentHash    asking side
    45   SegmentHashed  answering side   16 bytes for each cell there is, in order
    46   SegmentMend    asking side
    47   SegmentMended  answering side
    50   Verify         asking side
    51   Verified       answering side
    52   KeptVerify     asking side
    53   KeptVerified   answering side
    60   Ping           asking side
    61   Status         answering side
    70   HomeCall       asking side      the bytes to be written, or the handles to be kept        (since version 2)
    71   HomeAnswer     answering side                                                             (since version 2)
======== ============== ================ ======================================================================
"""

from typing import Annotated, TypeVar

import msgspec

from ckptfs.cache.ids import ID_SIZE
from ckptfs.replication.errors import ProtocolViolation
from ckptfs.replication.frame_format import HEADER_SIZE_MAX, PAYLOAD_SIZE_MAX
from ckptfs.replication.shard_format import CELL_SIZE_MAX, FOOTER_SIZE_MAX, SHARDS_MAX, TRAILER_SIZE
from ckptfs.replication.small_copies import BATCH_COUNT_MAX, COPY_SIZE_MAX, PATH_HINT_SIZE_MAX

PROTOCOL_VERSION_MIN = 1
PROTOCOL_VERSION_MAX = 2
"""The range this program speaks; the answering side takes the newest that both do."""

HOME_CALLS_SINCE = 2
"""A peer that speaks less takes no writes of other nodes."""

ANSWERED_MAX = 1000
"""So many numbers of answered calls one call carries at most."""

FOOTER_PART_BYTES = 1 << 20
"""How much of a footer goes into one frame."""

HASHES_MAX = 4096
"""Of so many cells one answer has the hashes: 4 GiB of a large file, which a drive gives in seconds."""

Id = Annotated[bytes, msgspec.Meta(min_length=ID_SIZE, max_length=ID_SIZE)]
ShardIndex = Annotated[int, msgspec.Meta(ge=0, lt=SHARDS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Who asks, and which protocol versions it speaks. Always the first frame."""

    version_min: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    version_max: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    program: Text
    cluster: Id
    store: Id
    node: Text


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Who answers, and the protocol version from here on."""

    version: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    program: Text
    cluster: Id
    store: Id
    node: Text


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The answer is no (`errors.RefusalReason`, which may be one of a later version). More frames of the same request
    that are under way already are passed over."""

    reason: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    message: Text


class Working(msgspec.Struct, array_like=True, frozen=True):
    """Nothing but a sign of life."""


class PutBegin(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a `ShardHeader`. Of so many of the cells' bytes the sender knows that they are zeros (`hole_bytes`): no space
    is reserved for them."""

    vid: Id
    index: ShardIndex
    data_shards: Annotated[int, msgspec.Meta(ge=1, le=SHARDS_MAX)]
    parity_shards: Annotated[int, msgspec.Meta(ge=0, le=SHARDS_MAX)]
    cell_size: Annotated[int, msgspec.Meta(ge=1, le=CELL_SIZE_MAX)]
    size: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    hole_bytes: Number = 0


class PutReady(msgspec.Struct, array_like=True, frozen=True):
    """Space is reserved; cells are expected in order, from this stripe on."""

    resume_stripe: Number


class Cell(msgspec.Struct, array_like=True, frozen=True):
    """One cell; the frame's payload hash is its hash. Without payload, to a holder, it is so many cells of zeros
    (`zeros`) from that stripe on."""

    stripe: Number
    zeros: Number = 0


class FooterPart(msgspec.Struct, array_like=True, frozen=True):
    """A part of the footer; complete when offset and length of the payload reach `total`. `header`, the first 64 bytes of the
    shard file, comes with the first part of what is read, and is empty otherwise."""

    offset: Annotated[int, msgspec.Meta(ge=0, le=FOOTER_SIZE_MAX + TRAILER_SIZE)]
    total: Annotated[int, msgspec.Meta(ge=1, le=FOOTER_SIZE_MAX + TRAILER_SIZE)]
    header: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class PutDone(msgspec.Struct, array_like=True, frozen=True):
    """The shard is stored and survives a power cut; `root` is computed from what was received."""

    root: Id


class PutStop(msgspec.Struct, array_like=True, frozen=True):
    """Give up; what arrived is kept for a later put of the same shard. Has no answer."""


class FooterGet(msgspec.Struct, array_like=True, frozen=True):
    """Asks for header and footer of a shard."""

    vid: Id
    index: ShardIndex


class CellsGet(msgspec.Struct, array_like=True, frozen=True):
    """Asks for the cells of `count` stripes; those the shard doesn't store are left out."""

    vid: Id
    index: ShardIndex
    first_stripe: Number
    count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


class CellsDone(msgspec.Struct, array_like=True, frozen=True):
    """All cells asked for were sent."""


class CopyFields(msgspec.Struct, array_like=True, frozen=True):
    """One content of a batch, without its bytes."""

    vid: Id
    ino: Number
    size: Annotated[int, msgspec.Meta(ge=1, le=COPY_SIZE_MAX)]
    path_hint: Annotated[bytes, msgspec.Meta(max_length=PATH_HINT_SIZE_MAX)]
    revision: Number


class CopiesPut(msgspec.Struct, array_like=True, frozen=True):
    """A batch of small files, stored in one synced transaction."""

    copies: Annotated[list[CopyFields], msgspec.Meta(min_length=1, max_length=BATCH_COUNT_MAX)]


class CopiesDone(msgspec.Struct, array_like=True, frozen=True):
    """The batch is stored and survives a power cut; content roots in its order."""

    roots: Annotated[list[Id], msgspec.Meta(max_length=BATCH_COUNT_MAX)]


class CopyGet(msgspec.Struct, array_like=True, frozen=True):
    """Asks for a small file."""

    vid: Id


class Copy(msgspec.Struct, array_like=True, frozen=True):
    """A small file. `root` is its content root."""

    root: Id


class SegmentGet(msgspec.Struct, array_like=True, frozen=True):
    """Asks the home for bytes of a segment as they are now."""

    vid: Id
    segment: Id
    offset: Number
    length: Annotated[int, msgspec.Meta(ge=1, le=PAYLOAD_SIZE_MAX)]


class SegmentData(msgspec.Struct, array_like=True, frozen=True):
    """Bytes of a segment."""


class SegmentAsk(msgspec.Struct, array_like=True, frozen=True):
    """Asks the home for a segment's size and times as they are now."""

    segment: Id


class SegmentIs(msgspec.Struct, array_like=True, frozen=True):
    """Size in bytes, blocks of 512 bytes."""

    size: Number
    mtime_ns: int
    blocks: Number


class SegmentHash(msgspec.Struct, array_like=True, frozen=True):
    """Asks the home to re-read a segment's cells from its drive and to hash them."""

    segment: Id
    cell_size: Annotated[int, msgspec.Meta(ge=1, le=CELL_SIZE_MAX)]
    first_cell: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    count: Annotated[int, msgspec.Meta(ge=1, le=HASHES_MAX)]


class SegmentHashed(msgspec.Struct, array_like=True, frozen=True):
    """The segment's size in bytes; the hashes are the payload. One of zeros: the drive doesn't give the cell."""

    size: Number


class SegmentMend(msgspec.Struct, array_like=True, frozen=True):
    """Asks the home of a protected version to hash its segment and, if it finds it damaged, to make another from the shards."""

    vid: Id


class SegmentMended(msgspec.Struct, array_like=True, frozen=True):
    """Whether the version's segment is right now, and what was done, or why it could not be."""

    right: bool
    message: Text


class Verify(msgspec.Struct, array_like=True, frozen=True):
    """Asks the holder to re-read a shard from its drive."""

    vid: Id
    index: ShardIndex


class Verified(msgspec.Struct, array_like=True, frozen=True):
    """What re-reading showed; the first bad stripes."""

    ok: bool
    bad_stripes: Annotated[list[Number], msgspec.Meta(max_length=1000)]
    message: Text


class KeptVerify(msgspec.Struct, array_like=True, frozen=True):
    """Asks a node to hash what it keeps of a version as a local copy, and with `mend` to fetch anew what is wrong."""

    vid: Id
    mend: bool


class KeptVerified(msgspec.Struct, array_like=True, frozen=True):
    """How many cells it has, and the first of those that are wrong, still."""

    cells: Number
    wrong: Annotated[list[Number], msgspec.Meta(max_length=1000)]


class Ping(msgspec.Struct, array_like=True, frozen=True):
    """Asks who is there. With `hurry`, somebody waits for files whose home this is: what the node puts off is due now."""

    hurry: bool = False


class Status(msgspec.Struct, array_like=True, frozen=True):
    """Who is there. `free_bytes` is what shards may still take."""

    node: Text
    store: Id
    free_bytes: Number
    program: Text


class HomeCall(msgspec.Struct, array_like=True, frozen=True):
    """A program on the asking node writes a file whose home the answering node is.

    `incarnation` and `unique` are the FUSE connection and the number of the program's request: the same call sent again has one
    effect and one answer. `answered` are numbers of earlier calls whose answers the kernel has: they are never sent again. `fh`
    is the handle, which has the number of the request it was opened for; 0 for none. `call` is a `home_calls.Call`, which says
    what the other fields and the payload mean.
    """

    call: Annotated[int, msgspec.Meta(ge=1, le=255)]
    incarnation: Number
    unique: Number
    ino: Number = 0
    fh: Number = 0
    offset: Number = 0
    length: Number = 0
    flags: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    answered: Annotated[list[Number], msgspec.Meta(max_length=ANSWERED_MAX)] = []


class HomeAnswer(msgspec.Struct, array_like=True, frozen=True):
    """What came of it: an errno of Linux, 0 if it was carried out, and a number that the kind of call gives its meaning."""

    errno: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    value: Number
    message: Text


Message = (
    Hello
    | Welcome
    | Refused
    | Working
    | PutBegin
    | PutReady
    | Cell
    | FooterPart
    | PutDone
    | PutStop
    | FooterGet
    | CellsGet
    | CellsDone
    | CopiesPut
    | CopiesDone
    | CopyGet
    | Copy
    | SegmentGet
    | SegmentData
    | SegmentAsk
    | SegmentIs
    | SegmentHash
    | SegmentHashed
    | SegmentMend
    | SegmentMended
    | Verify
    | Verified
    | KeptVerify
    | KeptVerified
    | Ping
    | Status
    | HomeCall
    | HomeAnswer
)

MESSAGE_TYPES: dict[int, type[Message]] = {
    1: Hello,
    2: Welcome,
    3: Refused,
    4: Working,
    10: PutBegin,
    11: PutReady,
    12: Cell,
    13: FooterPart,
    14: PutDone,
    15: PutStop,
    20: FooterGet,
    21: CellsGet,
    22: CellsDone,
    30: CopiesPut,
    31: CopiesDone,
    32: CopyGet,
    33: Copy,
    40: SegmentGet,
    41: SegmentData,
    42: SegmentAsk,
    43: SegmentIs,
    44: SegmentHash,
    45: SegmentHashed,
    46: SegmentMend,
    47: SegmentMended,
    50: Verify,
    51: Verified,
    52: KeptVerify,
    53: KeptVerified,
    60: Ping,
    61: Status,
    70: HomeCall,
    71: HomeAnswer,
}

PAYLOAD_CARRIERS = frozenset({Cell, FooterPart, CopiesPut, Copy, SegmentData, SegmentHashed, HomeCall})

_TYPES_BY_MESSAGE = {kind: number for number, kind in MESSAGE_TYPES.items()}
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[Message]] = {
    number: msgspec.msgpack.Decoder(kind) for number, kind in MESSAGE_TYPES.items()
}
Expected = TypeVar("Expected", bound=Message)


def encode(message: Message) -> tuple[int, bytes]:
    """The frame's type and header. Raises `ValueError` if the header is larger than a frame's can be."""
    header = _encoder.encode(message)
    if len(header) > HEADER_SIZE_MAX:
        raise ValueError(f"a {type(message).__name__} of {len(header)} bytes")
    return _TYPES_BY_MESSAGE[type(message)], header


def decode(type_: int, header: bytes, payload_length: int) -> Message:
    """The message in a frame whose hash was checked. Raises `ProtocolViolation` for what is no message of this protocol."""
    decoder = _decoders.get(type_)
    if decoder is None:
        raise ProtocolViolation(f"a message of unknown type {type_}")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolViolation(f"a {MESSAGE_TYPES[type_].__name__} that can't be read: {error}") from None
    if payload_length and type(message) not in PAYLOAD_CARRIERS:
        raise ProtocolViolation(f"a {MESSAGE_TYPES[type_].__name__} with a payload")
    return message


def shorten(text: str) -> str:
    """Text that fits into a message."""
    return text if len(text) <= 1000 else text[:997] + "..."
