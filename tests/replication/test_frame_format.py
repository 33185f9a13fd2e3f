"""Frames: golden vectors, round trips, every flipped bit, every cut, garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.cache.checksum import cell_hash
from ckptfs.replication import frame_format
from ckptfs.replication.errors import ProtocolViolation
from ckptfs.replication.frame_format import PRELUDE_SIZE, ForeignVersion
from ckptfs.replication.shard_format import CELL_SIZE_MAX


def read(frame: bytes) -> tuple[int, int, bytes, bytes]:
    """Type, request, header and payload of exactly one frame."""
    prelude = frame_format.unpack_prelude(frame[:PRELUDE_SIZE])
    end = PRELUDE_SIZE + prelude.header_length
    header = frame_format.check_header(prelude, frame[PRELUDE_SIZE:end])
    frame_format.check_payload(prelude, frame[end:])
    return prelude.type, prelude.request, header, frame[end:]


def test_golden_frames() -> None:
    assert frame_format.pack_head(60, 7, b"\x90").hex() == (
        "434b5046" "01" "3c" "0000" "07000000" "01000000" "00000000" "00000000" "00000000000000000000000000000000"
        "95996a3bfddd9706" "90"
    )  # fmt: skip
    assert frame_format.pack_head(12, 0xFFFFFFFF, b"\x91\x05", b"payload").hex() == (
        "434b5046" "01" "0c" "0000" "ffffffff" "02000000" "07000000" "00000000" "f3d6e72eb800dea99613f8bbf13ce4e5"
        "0219b0cda303b66a" "9105"
    )  # fmt: skip


@given(st.integers(1, 255), st.integers(1, (1 << 32) - 1), st.binary(max_size=200), st.binary(max_size=200))
def test_what_was_packed_is_read(type_: int, request: int, header: bytes, payload: bytes) -> None:
    frame = frame_format.pack_head(type_, request, header, payload) + payload
    assert read(frame) == (type_, request, header, payload)
    assert frame_format.pack_head(type_, request, header, payload, cell_hash(payload)) + payload == frame


def test_every_flipped_bit_is_found() -> None:
    frame = bytearray(frame_format.pack_head(12, 3, b"header", b"payload") + b"payload")
    for at in range(len(frame)):
        for bit in range(8):
            frame[at] ^= 1 << bit
            with pytest.raises(ProtocolViolation):
                read(bytes(frame))
            frame[at] ^= 1 << bit
    assert read(bytes(frame))[3] == b"payload"


def test_every_cut_is_found() -> None:
    frame = frame_format.pack_head(12, 3, b"header", b"payload") + b"payload"
    for length in range(len(frame)):
        with pytest.raises(ProtocolViolation):
            read(frame[:length])


def test_another_version_is_told_from_garbage() -> None:
    frame = bytearray(frame_format.pack_head(60, 1, b""))
    frame[4] = 2
    with pytest.raises(ForeignVersion, match="version 2, this program speaks 1"):
        frame_format.unpack_prelude(frame)


@pytest.mark.parametrize(("offset", "length"), [(12, (64 << 10) + 1), (16, (4 << 20) + 1), (12, 0xFFFFFFFF), (16, 0xFFFFFFFF)])
def test_oversize_frames_are_refused_before_anything_is_read_of_them(offset: int, length: int) -> None:
    frame = bytearray(frame_format.pack_head(12, 1, b""))
    frame[offset : offset + 4] = length.to_bytes(4, "little")
    with pytest.raises(ProtocolViolation, match="oversize"):
        frame_format.unpack_prelude(frame)


@pytest.mark.parametrize(
    ("type_", "request_number", "header", "payload"),
    [(0, 1, b"", b""), (256, 1, b"", b""), (1, 0, b"", b""), (1, 1 << 32, b"", b""), (1, 1, bytes((64 << 10) + 1), b"")],
)
def test_impossible_frames_are_not_packed(type_: int, request_number: int, header: bytes, payload: bytes) -> None:
    with pytest.raises(ValueError, match="a frame of type"):
        frame_format.pack_head(type_, request_number, header, payload)
    with pytest.raises(ValueError, match="a frame of type"):
        frame_format.pack_head(1, 1, b"", memoryview(bytes((4 << 20) + 1)))


def test_the_largest_cell_fits_into_a_frame() -> None:
    assert frame_format.PAYLOAD_SIZE_MAX >= CELL_SIZE_MAX


@given(st.binary(min_size=40, max_size=60))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    for start in (data, b"CKPF" + data, b"CKPF\x01" + data):
        with pytest.raises(ProtocolViolation):
            read(start)
