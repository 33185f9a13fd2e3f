"""Messages: golden vectors, every type there and back, ranges, garbage, later versions."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.replication import peer_messages as m
from ckptfs.replication.errors import ProtocolViolation, RefusalReason

ID = bytes(range(16))

EXAMPLES: list[tuple[m.Message, str]] = [
    (
        m.Hello(1, 1, "ckptfs 1", ID, ID, "node-1"),
        "1 960101a8636b707466732031c410000102030405060708090a0b0c0d0e0fc410000102030405060708090a0b0c0d0e0fa66e6f64652d31",
    ),
    (
        m.Welcome(1, "ckptfs 1", ID, ID, "node-2"),
        "2 9501a8636b707466732031c410000102030405060708090a0b0c0d0e0fc410000102030405060708090a0b0c0d0e0fa66e6f64652d32",
    ),
    (m.Refused(RefusalReason.FULL, "no space"), "3 9201a86e6f207370616365"),
    (m.Working(), "4 90"),
    (m.PutBegin(ID, 5, 4, 2, 1 << 20, 1 << 40), "10 97c410000102030405060708090a0b0c0d0e0f050402ce00100000cf000001000000000000"),
    (m.PutReady(3), "11 9103"),
    (m.Cell(7), "12 920700"),
    (m.Cell(7, zeros=300), "12 9207cd012c"),
    (m.FooterPart(0, 300, b"header"), "13 9300cd012cc406686561646572"),
    (m.PutDone(ID), "14 91c410000102030405060708090a0b0c0d0e0f"),
    (m.PutStop(), "15 90"),
    (m.FooterGet(ID, 5), "20 92c410000102030405060708090a0b0c0d0e0f05"),
    (m.CellsGet(ID, 5, 7, 1), "21 94c410000102030405060708090a0b0c0d0e0f050701"),
    (m.CellsDone(), "22 90"),
    (m.CopiesPut([m.CopyFields(ID, 9, 100, b"run/a", 3)]), "30 919195c410000102030405060708090a0b0c0d0e0f0964c40572756e2f6103"),
    (m.CopiesDone([ID]), "31 9191c410000102030405060708090a0b0c0d0e0f"),
    (m.CopyGet(ID), "32 91c410000102030405060708090a0b0c0d0e0f"),
    (m.Copy(ID), "33 91c410000102030405060708090a0b0c0d0e0f"),
    (m.SegmentGet(ID, ID, 5, 6), "40 94c410000102030405060708090a0b0c0d0e0fc410000102030405060708090a0b0c0d0e0f0506"),
    (m.SegmentData(), "41 90"),
    (m.SegmentAsk(ID), "42 91c410000102030405060708090a0b0c0d0e0f"),
    (m.SegmentIs(5, -6, 7), "43 9305fa07"),
    (m.SegmentHash(ID, 1 << 20, 7, 4096), "44 94c410000102030405060708090a0b0c0d0e0fce0010000007cd1000"),
    (m.SegmentHashed(1 << 40), "45 91cf0000010000000000"),
    (m.SegmentMend(ID), "46 91c410000102030405060708090a0b0c0d0e0f"),
    (m.SegmentMended(True, "made anew"), "47 92c3a96d61646520616e6577"),
    (m.Verify(ID, 5), "50 92c410000102030405060708090a0b0c0d0e0f05"),
    (m.Verified(False, [1, 2], "2 bad"), "51 93c2920102a53220626164"),
    (m.KeptVerify(ID, True), "52 92c410000102030405060708090a0b0c0d0e0fc3"),
    (m.KeptVerified(9, [1, 2]), "53 9209920102"),
    (m.Ping(), "60 91c2"),
    (
        m.Status("node-2", ID, 1 << 40, "ckptfs 1"),
        "61 94a66e6f64652d32c410000102030405060708090a0b0c0d0e0fcf0000010000000000a8636b707466732031",
    ),
    (m.HomeCall(2, 7, 9, 3, 4, 1 << 40, 6, 0o2001, [5]), "70 990207090304cf000001000000000006cd04019105"),
    (m.HomeAnswer(28, 0, "no space"), "71 931c00a86e6f207370616365"),
]


def payload_of(message: m.Message) -> int:
    return 1 if type(message) in m.PAYLOAD_CARRIERS else 0


@pytest.mark.parametrize(("message", "golden"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_golden_messages(message: m.Message, golden: str) -> None:
    type_, header = m.encode(message)
    assert f"{type_} {header.hex()}" == golden
    assert m.decode(type_, header, payload_of(message)) == message


def test_a_ping_of_an_earlier_program_is_understood() -> None:
    assert m.decode(60, b"\x90", 0) == m.Ping(hurry=False)


def test_every_type_has_an_example() -> None:
    assert {type(message) for message, _ in EXAMPLES} == set(m.MESSAGE_TYPES.values())


@pytest.mark.parametrize("message", [message for message, _ in EXAMPLES], ids=lambda value: type(value).__name__)
def test_only_carriers_have_a_payload(message: m.Message) -> None:
    if not payload_of(message):
        with pytest.raises(ProtocolViolation, match="with a payload"):
            m.decode(*m.encode(message), 1)


@pytest.mark.parametrize(
    "bad",
    [
        m.Hello(0, 1, "", ID, ID, ""),
        m.Hello(1, 1 << 16, "", ID, ID, ""),
        m.Hello(1, 1, "", ID[:15], ID, ""),
        m.Hello(1, 1, "x" * 1001, ID, ID, ""),
        m.PutBegin(ID + b"x", 0, 1, 0, 1, 1),
        m.PutBegin(ID, 255, 1, 0, 1, 1),
        m.PutBegin(ID, -1, 1, 0, 1, 1),
        m.PutBegin(ID, 0, 0, 0, 1, 1),
        m.PutBegin(ID, 0, 1, 0, (4 << 20) + 1, 1),
        m.PutBegin(ID, 0, 1, 0, 1, 0),
        m.PutBegin(ID, 0, 1, 0, 1, 1 << 63),
        m.Cell(-1),
        m.FooterPart(0, 0),
        m.FooterPart(0, 1 << 40),
        m.CellsGet(ID, 0, 0, 0),
        m.CopiesPut([]),
        m.CopiesPut([m.CopyFields(ID, 1, 1, b"", 1)] * 257),
        m.CopiesPut([m.CopyFields(ID, 1, 0, b"", 1)]),
        m.CopiesPut([m.CopyFields(ID, 1, 1 << 16, b"", 1)]),
        m.CopiesPut([m.CopyFields(ID, 1, 1, b"x" * 4097, 1)]),
        m.SegmentGet(ID, ID, 0, (4 << 20) + 1),
        m.SegmentGet(ID, ID, -1, 1),
        m.SegmentHash(ID, 0, 0, 1),
        m.SegmentHash(ID, (4 << 20) + 1, 0, 1),
        m.SegmentHash(ID, 1, -1, 1),
        m.SegmentHash(ID, 1, 0, 0),
        m.SegmentHash(ID, 1, 0, 4097),
        m.Verified(True, [0] * 1001, ""),
        m.KeptVerified(0, [0] * 1001),
        m.HomeCall(0, 1, 1),
        m.HomeCall(256, 1, 1),
        m.HomeCall(1, 1, 1 << 63),
        m.HomeCall(1, 1, 1, offset=-1),
        m.HomeCall(1, 1, 1, flags=1 << 32),
        m.HomeCall(1, 1, 1, answered=[0] * 1001),
        m.HomeAnswer(4096, 0, ""),
        m.HomeAnswer(0, -1, ""),
    ],
    ids=repr,
)
def test_what_is_out_of_range_is_refused(bad: m.Message) -> None:
    type_, header = m.encode(bad)
    with pytest.raises(ProtocolViolation, match="can't be read"):
        m.decode(type_, header, 0)


def test_fields_of_a_later_version_are_ignored() -> None:
    header = msgspec.msgpack.encode([3, "later", {"more": 1}])
    assert m.decode(11, header, 0) == m.PutReady(3)


@settings(max_examples=40)
@given(st.integers(0, 300), st.one_of(st.binary(max_size=100), st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=20) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=20,
).map(msgspec.msgpack.encode)))  # fmt: skip
def test_anything_else_is_refused_by_name(type_: int, header: bytes) -> None:
    try:
        message = m.decode(type_, header, 0)
    except ProtocolViolation:
        return
    assert m.decode(*m.encode(message), 0) == message


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        m.decode(1, b"\x91" * 60_000, 0)


def test_a_header_too_large_for_a_frame_is_not_packed() -> None:
    with pytest.raises(ValueError, match="a CopiesPut of"):
        m.encode(m.CopiesPut([m.CopyFields(ID, 1, 1, b"x" * 4096, 1)] * 17))


def test_long_messages_are_shortened() -> None:
    assert m.shorten("x" * 1000) == "x" * 1000
    assert m.shorten("x" * 1001) == "x" * 997 + "..."
