"""Frames: the units of the conversation between peers, protocol version 1. Pure: bytes in, frames out.

Every frame is a prelude of 48 bytes, a header (one msgpack array, see `peer_messages`) and a payload (raw bytes, what the
protocol exists for). Integers are little-endian::

    offset size type  field
         0    4 bytes magic            b"CKPF"
         4    1 u8    frame version    1; the first 5 bytes mean the same in every version
         5    1 u8    type             of message, 1 .. 255; 0 is never valid
         6    2 u16   zero
         8    4 u32   request          chosen by the asking side, 1 .. 2^32 - 1, the same in all frames that belong to it
        12    4 u32   header_length    at most 64 KiB
        16    4 u32   payload_length   at most 4 MiB
        20    4 u32   zero
        24   16 hash  payload_hash     xxh3-128 of the payload; zero if there is none
        40    8 u64   head_hash        xxh3-64 of bytes 0 .. 39 followed by the header
        48      ...   header, payload

A frame is valid if and only if all of that holds. No length is believed before it is checked against its limit, nothing
of a header is used before its hash is, and no payload before its own: with one exception. The payload of a CELL that is
read back is handed on as the holder has it, with the hash the holder's table has for it: who asked compares, because a
cell that differs is a damaged shard and no damaged frame.

There is no resynchronization: after an invalid frame the connection is dropped.
"""

import struct
from dataclasses import dataclass

import xxhash

from ckptfs.cache.checksum import HASH_SIZE, Buffer, cell_hash
from ckptfs.replication.errors import ProtocolViolation

FRAME_VERSION = 1
PRELUDE_SIZE = 48
HEADER_SIZE_MAX = 64 << 10
PAYLOAD_SIZE_MAX = 4 << 20

_MAGIC = b"CKPF"
_PRELUDE = struct.Struct("<4sBBHIIII16sQ")
_HASHED = 40
_NO_HASH = bytes(HASH_SIZE)


@dataclass(frozen=True, slots=True)
class Prelude:
    """The fields of a prelude whose lengths are within their limits. Its `head_hash` is checked by `check_header`."""

    type: int
    request: int
    header_length: int
    payload_length: int
    payload_hash: bytes
    head_hash: int
    hashed: bytes
    """The bytes the head hash covers, without the header."""


class ForeignVersion(ProtocolViolation):
    """The peer's frames are of another version; it can't be understood, but it can be told."""


def pack_head(type_: int, request: int, header: bytes, payload: Buffer | None = None, payload_hash: bytes | None = None) -> bytes:
    """Prelude and header; the payload follows as it is. `payload_hash` is computed unless it is known.

    Raises `ValueError` for what no frame can carry.
    """
    return _pack_head(type_, request, header, payload, 0 if payload is None else len(payload), payload_hash)


def pack_head_of_file(type_: int, request: int, header: bytes, length: int, payload_hash: bytes) -> bytes:
    """As `pack_head`, for a payload of so many bytes that aren't in memory."""
    return _pack_head(type_, request, header, None, length, payload_hash)


def _pack_head(type_: int, request: int, header: bytes, payload: Buffer | None, length: int, payload_hash: bytes | None) -> bytes:
    if not 1 <= type_ <= 255 or not 1 <= request < 1 << 32 or len(header) > HEADER_SIZE_MAX or length > PAYLOAD_SIZE_MAX:
        raise ValueError(f"a frame of type {type_}, request {request}, with {len(header)} + {length} bytes")
    if length == 0:
        digest = _NO_HASH
    elif payload_hash is not None:
        digest = payload_hash
    else:
        assert payload is not None
        digest = cell_hash(payload)
    packed = bytearray(_PRELUDE.pack(_MAGIC, FRAME_VERSION, type_, 0, request, len(header), length, 0, digest, 0))
    struct.pack_into("<Q", packed, _HASHED, xxhash.xxh3_64_intdigest(bytes(packed[:_HASHED]) + header))
    return bytes(packed) + header


def unpack_prelude(data: Buffer) -> Prelude:
    """The prelude in these 48 bytes. Raises `ForeignVersion`, `ProtocolViolation`."""
    data = bytes(data)
    if len(data) != PRELUDE_SIZE or data[:4] != _MAGIC:
        raise ProtocolViolation("bytes that are not a frame")
    if data[4] != FRAME_VERSION:
        raise ForeignVersion(f"a frame of version {data[4]}, this program speaks {FRAME_VERSION}")
    _, _, type_, zero_1, request, header_length, payload_length, zero_2, payload_hash, head_hash = _PRELUDE.unpack(data)
    if not type_ or not request or zero_1 or zero_2:
        raise ProtocolViolation("a frame with a zero where none may be, or something where a zero must be")
    if header_length > HEADER_SIZE_MAX or payload_length > PAYLOAD_SIZE_MAX:
        raise ProtocolViolation(f"an oversize frame: {header_length} + {payload_length} bytes")
    if not payload_length and payload_hash != _NO_HASH:
        raise ProtocolViolation("a frame without a payload but with its hash")
    return Prelude(type_, request, header_length, payload_length, payload_hash, head_hash, data[:_HASHED])


def check_header(prelude: Prelude, header: Buffer) -> bytes:
    """The header, once it and the prelude have the hash they came with. Raises `ProtocolViolation`."""
    header = bytes(header)
    if len(header) != prelude.header_length or xxhash.xxh3_64_intdigest(prelude.hashed + header) != prelude.head_hash:
        raise ProtocolViolation("a frame whose head fails its hash")
    return header


def check_payload(prelude: Prelude, payload: Buffer) -> None:
    """Raises `ProtocolViolation` unless the payload has the length and hash the prelude says."""
    if len(payload) != prelude.payload_length:
        raise ProtocolViolation(f"a payload of {len(payload)} bytes instead of {prelude.payload_length}")
    if prelude.payload_length and cell_hash(payload) != prelude.payload_hash:
        raise ProtocolViolation("a frame whose payload fails its hash")
