"""Peers that hang, close, lie, speak other versions or send garbage, in both directions; and every byte flipped or cut."""

import os
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from ckptfs.cache import checksum
from ckptfs.cache.checksum import Buffer
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.replication import frame_format, peer_messages
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import AddressRefused, PeerRefused, PeerUnreachable, ProtocolViolation, RefusalReason
from ckptfs.replication.frame_stream import FrameStream
from ckptfs.replication.peer_client import KeptCells, Mended, PeerClient
from ckptfs.replication.peer_messages import (
    Cell,
    CellsDone,
    Copy,
    FooterPart,
    Hello,
    Message,
    Ping,
    PutBegin,
    PutDone,
    PutReady,
    Refused,
    SegmentData,
    SegmentHashed,
    Status,
    Welcome,
)
from ckptfs.replication.peer_server import PeerServer
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies
from ckptfs.replication.transport import PlainTransport, SocketConnection

VID = Vid(bytes(range(16)))
CLUSTER = b"c" * 16
HEADER = ShardHeader(VID, 0, 1, 1, 16, 40)
CELLS = [b"0" * 16, b"1" * 16, b"2" * 8]
FOOTER = ShardFooter(HEADER, b"".join(map(checksum.cell_hash, CELLS)), b"".join(map(checksum.cell_hash, CELLS)), InodeNumber(7))
ASKING = PeerIdentity(CLUSTER, StoreId(b"a" * 16), NodeId("asking"))
ANSWERING = PeerIdentity(CLUSTER, StoreId(b"b" * 16), NodeId("answering"))
WELCOME = Welcome(1, "ckptfs", CLUSTER, ANSWERING.store, "answering")
HELLO = Hello(1, 1, "ckptfs", CLUSTER, ASKING.store, "asking")
STALL_SECONDS = 0.05
"""Where a test waits for it. Elsewhere a busy machine would be taken for a peer that stalls."""


class KeepsNothing:
    async def mend_segment(self, vid: Vid) -> Mended:
        raise AssertionError("no segments here")

    async def verify(self, vid: Vid, *, mend: bool) -> KeptCells:
        return KeptCells(0, ())


class NoSegments:
    def path_of(self, segment: SegmentId) -> str:
        return f"/nonexistent/{segment.hex()}"


@dataclass
class Answering:
    """A real answering side, with a short patience."""

    server: PeerServer
    shards: ShardStore
    address: str


@pytest.fixture
async def answering(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Answering]:
    index = AgentDatabase(tmp_path / "agent.db")
    shards = ShardStore(tmp_path / "shards", index)
    copies = SmallCopies(tmp_path / "small_copies.db")
    server = PeerServer(shards, copies, NoSegments(), KeepsNothing(), ANSWERING, PlainTransport(stall_seconds=4 * STALL_SECONDS))
    yield Answering(server, shards, await nursery.start(server.serve, "127.0.0.1:0"))
    nursery.cancel_scope.cancel()
    index.close()
    copies.close()


async def put(client: PeerClient) -> bytes:
    stream = await client.put_shard(HEADER)
    for stripe in range(stream.resume_stripe, 3):
        await stream.send_cell(stripe, CELLS[stripe], checksum.cell_hash(CELLS[stripe]))
    return await stream.finish(FOOTER)


async def connect(address: str) -> FrameStream:
    return FrameStream(await PlainTransport(stall_seconds=2).connect(address))


async def answer_to(stream: FrameStream) -> Message | None:
    incoming = await stream.receive()
    return None if incoming is None else incoming.message


# ---- a hostile asking side


async def send_raw(address: str, data: bytes) -> Message | None:
    """What the server answers last to these bytes before it closes."""
    stream = await connect(address)
    try:
        await stream.connection.send(data)
        last: Message | None = None
        while True:
            try:
                message = await answer_to(stream)
            except PeerUnreachable:
                return last
            if message is None:
                return last
            last = message
    finally:
        stream.connection.close()


def frame(message: Message, request: int = 1, payload: bytes = b"") -> bytes:
    return frame_format.pack_head(*_numbered(message, request), payload or None) + payload


def _numbered(message: Message, request: int) -> tuple[int, int, bytes]:
    type_, header = peer_messages.encode(message)
    return type_, request, header


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100),
        os.urandom(500),
        bytes(500),
        frame(Ping()),
        frame(HELLO) + frame(HELLO),
        frame(HELLO) + frame(Cell(0), payload=b"x"),
        frame(HELLO) + frame(WELCOME),
        frame(HELLO) + frame(Ping())[:-1] + b"\x91",
        frame(HELLO) + struct.pack("<4sBBHIIIIQQQ", b"CKPF", 1, 60, 0, 1, 0xFFFFFFF, 0, 0, 0, 0, 0),
        frame(HELLO) + struct.pack("<4sBBHIIIIQQQ", b"CKPF", 1, 12, 0, 1, 0, 0xFFFFFFFF, 0, 0, 0, 0),
        frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(Cell(0), 3, b"x" * 16),
        frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(Cell(0), 2, b"x" * 17),
        frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(FooterPart(1, 100), 2, b"x"),
        frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(FooterPart(0, 1 << 26), 2, b"x"),
        frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(Ping(), 2),
    ],
    ids=range(15),
)
async def test_who_breaks_the_protocol_is_told_dropped_and_counted(data: bytes, answering: Answering) -> None:
    answer = await send_raw(answering.address, data)
    assert isinstance(answer, Refused)
    assert answer.reason == RefusalReason.INVALID
    with trio.fail_after(5):
        while answering.server.statistics().connections_current:
            await trio.sleep(0.001)
    assert answering.server.statistics().violations == 1
    client = PeerClient(PlainTransport(), answering.address, ASKING)
    assert await put(client) == FOOTER.root
    client.close()


async def test_cells_out_of_order_are_refused_and_the_rest_is_passed_over(answering: Answering) -> None:
    stream = await connect(answering.address)
    await stream.send(1, HELLO)
    await stream.send(2, PutBegin(VID, 0, 1, 1, 16, 40))
    for stripe in (1, 2):
        await stream.send(2, Cell(stripe), CELLS[stripe])
    await stream.send(3, Ping())
    answers = [await answer_to(stream) for _ in range(4)]
    assert [type(answer) for answer in answers] == [Welcome, PutReady, Refused, Status]
    stream.connection.close()


async def test_impossible_shards_are_refused(answering: Answering) -> None:
    stream = await connect(answering.address)
    await stream.send(1, HELLO)
    await answer_to(stream)
    for begin in (
        PutBegin(VID, 5, 4, 1, 16, 40),
        PutBegin(VID, 0, 255, 255, 16, 40),
        PutBegin(VID, 0, 1, 0, 1, 1 << 50),
    ):
        await stream.send(2, begin)
        answer = await answer_to(stream)
        assert isinstance(answer, Refused)
        assert answer.reason == RefusalReason.INVALID
    stream.connection.close()


@pytest.mark.parametrize("versions", [(3, 4), (9, 65535)])
async def test_an_asking_side_of_another_version_is_told(
    versions: tuple[int, int], answering: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await send_raw(answering.address, frame(Hello(*versions, "ckptfs 9", CLUSTER, ASKING.store, "newer")))
    assert isinstance(answer, Refused)
    assert answer.reason == RefusalReason.VERSION
    assert f"newer (ckptfs 9) speaks protocol {versions[0]} to {versions[1]}" in answer.message
    assert answer.message in caplog.text


async def test_the_newest_version_both_speak_is_taken(answering: Answering) -> None:
    stream = await connect(answering.address)
    await stream.send(1, Hello(1, 9, "ckptfs 9", CLUSTER, ASKING.store, "newer"))
    answer = await answer_to(stream)
    assert isinstance(answer, Welcome)
    assert answer.version == 2
    stream.connection.close()


async def test_frames_of_another_version_are_told(answering: Answering) -> None:
    data = bytearray(frame(HELLO))
    data[4] = 2
    answer = await send_raw(answering.address, bytes(data))
    assert answer == Refused(RefusalReason.VERSION, "a frame of version 2, this program speaks 1")


async def test_garbage_of_every_kind_leaves_the_server_standing(answering: Answering) -> None:
    """Valid conversations, mutated; seeded."""
    chance = random.Random(1)
    valid = frame(HELLO) + frame(PutBegin(VID, 0, 1, 1, 16, 40), 2) + frame(Cell(0), 2, CELLS[0]) + frame(Ping(), 3)
    for _ in range(60):
        data = bytearray(valid)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(1, 40)]
                case _:
                    data[at:at] = chance.randbytes(chance.randrange(1, 40))
        stream = await connect(answering.address)
        await stream.connection.send(data)
        stream.connection.close()
    client = PeerClient(PlainTransport(), answering.address, ASKING)
    with trio.fail_after(10):
        while True:  # a put of the same shard that came through whole, and is about to be dropped, may still take over
            try:
                assert await put(client) == FOOTER.root
                break
            except PeerRefused as refused:
                if not refused.retryable:
                    raise
    client.close()


async def test_who_stops_in_the_middle_of_a_frame_is_let_go(answering: Answering) -> None:
    stream = await connect(answering.address)
    await stream.connection.send(frame(HELLO) + frame(Ping())[:20])
    assert isinstance(await answer_to(stream), Welcome)
    with trio.fail_after(1):
        assert await answer_to(stream) is None
    stream.connection.close()


# ---- a hostile answering side

Script = Callable[[FrameStream], Awaitable[None]]


async def serve_script(script: Script, *, task_status: trio.TaskStatus[str]) -> None:
    """Take one connection after the other and answer as the script does; close when it returns."""
    listener = PlainTransport(stall_seconds=2).listen("127.0.0.1:0")
    task_status.started(listener.address)
    try:
        while True:
            stream = FrameStream(await listener.accept())
            try:
                await script(stream)
            except PeerUnreachable:
                pass
            finally:
                stream.connection.close()
    finally:
        listener.close()


async def client_of(script: Script, nursery: trio.Nursery, *, stall_seconds: float = 2.0) -> PeerClient:
    return PeerClient(PlainTransport(stall_seconds=stall_seconds), await nursery.start(serve_script, script), ASKING)


async def hang(_: FrameStream) -> None:
    await trio.sleep_forever()


async def greet(stream: FrameStream) -> None:
    await stream.receive()
    await stream.send(1, WELCOME)


def then(*answers: tuple[Message, bytes], request: int = 2) -> Script:
    """Greet, take one request in, and send these."""

    async def script(stream: FrameStream) -> None:
        await greet(stream)
        await stream.receive()
        for message, payload in answers:
            await stream.send(request, message, payload or None)

    return script


async def hang_after_greeting(stream: FrameStream) -> None:
    await greet(stream)
    await trio.sleep_forever()


@pytest.mark.parametrize("script", [hang, hang_after_greeting])
async def test_a_peer_that_hangs(script: Script, nursery: trio.Nursery) -> None:
    client = await client_of(script, nursery, stall_seconds=STALL_SECONDS)
    with trio.fail_after(5), pytest.raises(PeerUnreachable, match="hangs"):
        await client.ping()
    assert not client.connected
    client.close()
    nursery.cancel_scope.cancel()


async def test_a_peer_that_takes_in_nothing_more(nursery: trio.Nursery) -> None:
    async def script(stream: FrameStream) -> None:
        await greet(stream)
        await stream.receive()
        await stream.send(2, PutReady(0))
        await trio.sleep_forever()

    client = await client_of(script, nursery, stall_seconds=STALL_SECONDS)
    header = ShardHeader(VID, 0, 1, 1, 4 << 20, 1 << 30)
    cell = b"x" * (4 << 20)
    digest = checksum.cell_hash(cell)
    stream = await client.put_shard(header)

    async def send_all() -> None:
        for stripe in range(256):
            await stream.send_cell(stripe, cell, digest)

    with trio.fail_after(10), pytest.raises(PeerUnreachable, match="takes in nothing more"):
        await send_all()
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "script",
    [
        then(),
        then((PutReady(0), b"")),
    ],
)
async def test_a_peer_that_closes_in_the_middle(script: Script, nursery: trio.Nursery) -> None:
    client = await client_of(script, nursery)
    with pytest.raises(PeerUnreachable):
        await put(client)
    with pytest.raises(PeerUnreachable):
        await put(client)
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "script",
    [
        then((Status("x", bytes(16), 1, ""), b""), request=7),
        then((PutReady(0), b"")),
        then((Ping(), b"")),
        then((HELLO, b"")),
    ],
)
async def test_answers_out_of_turn(script: Script, nursery: trio.Nursery) -> None:
    client = await client_of(script, nursery)
    with pytest.raises(ProtocolViolation):
        await client.ping()
    assert not client.connected
    client.close()
    nursery.cancel_scope.cancel()


async def test_a_peer_that_wants_to_go_on_beyond_the_end(nursery: trio.Nursery) -> None:
    client = await client_of(then((PutReady(4), b"")), nursery)
    with pytest.raises(ProtocolViolation, match="go on at stripe 4 of 3"):
        await client.put_shard(HEADER)
    client.close()
    nursery.cancel_scope.cancel()


async def test_a_peer_that_is_done_before_the_end(nursery: trio.Nursery) -> None:
    client = await client_of(then((PutReady(0), b""), (PutDone(bytes(16)), b"")), nursery)
    stream = await client.put_shard(HEADER)
    await trio.testing.wait_all_tasks_blocked(0.02)
    with pytest.raises((ProtocolViolation, PeerUnreachable)):
        await stream.send_cell(0, CELLS[0], checksum.cell_hash(CELLS[0]))
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answers",
    [
        [(Cell(1), b"x")],
        [(Cell(0), b"x" * 100)],
        [(Cell(0), b"x"), (Cell(0), b"x")],
        [(Cell(0), b"x"), (Cell(1), b"x"), (Cell(2), b"x"), (Cell(3), b"x")],
    ],
)
async def test_cells_that_were_not_asked_for(answers: list[tuple[Message, bytes]], nursery: trio.Nursery) -> None:
    client = await client_of(then(*answers), nursery)
    buffer = memoryview(bytearray(16))
    with pytest.raises(ProtocolViolation):
        async for _ in client.read_cells(VID, 0, 0, 3, into=lambda _: buffer):
            pass
    client.close()
    nursery.cancel_scope.cancel()


async def test_fewer_cells_than_asked_for_end_the_iteration(nursery: trio.Nursery) -> None:
    client = await client_of(then((Cell(0), b"x"), (CellsDone(), b"")), nursery)
    assert [bytes(cell) async for cell in client.read_cells(VID, 0, 0, 3)] == [b"x"]
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answers",
    [[(FooterPart(0, 10), b"")], [(FooterPart(1, 10), b"x")], [(FooterPart(0, 10), b"x" * 5), (FooterPart(5, 11), b"x" * 6)]],
)
async def test_footers_in_wrong_parts(answers: list[tuple[Message, bytes]], nursery: trio.Nursery) -> None:
    client = await client_of(then(*answers), nursery)
    with pytest.raises(ProtocolViolation, match="a footer part"):
        await client.shard_footer(VID, 0)
    client.close()
    nursery.cancel_scope.cancel()


async def test_more_of_a_segment_than_asked_for(nursery: trio.Nursery) -> None:
    client = await client_of(then((SegmentData(), b"12345")), nursery)
    with pytest.raises(ProtocolViolation, match="5 bytes of a segment instead of 4"):
        await client.read_segment(VID, SegmentId(VID), 0, 4)
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("hashes", [b"x" * 48, b"x" * 31])
async def test_other_hashes_than_asked_for(hashes: bytes, nursery: trio.Nursery) -> None:
    client = await client_of(then((SegmentHashed(100), hashes)), nursery)
    with pytest.raises(ProtocolViolation, match="bytes of hashes of 2 cells"):
        await client.segment_hashes(SegmentId(VID), 4096, 0, 2)
    client.close()
    nursery.cancel_scope.cancel()


async def test_a_payload_that_was_changed_under_way(nursery: trio.Nursery) -> None:
    async def script(stream: FrameStream) -> None:
        await greet(stream)
        await stream.receive()
        await stream.connection.send(frame(Copy(bytes(16)), 2, b"content")[:-1] + b"T")

    client = await client_of(script, nursery)
    with pytest.raises(ProtocolViolation, match="payload fails its hash"):
        await client.read_copy(VID)
    client.close()
    nursery.cancel_scope.cancel()


async def test_an_answering_side_of_another_version(nursery: trio.Nursery) -> None:
    async def newer(stream: FrameStream) -> None:
        await stream.receive()
        await stream.send(1, Welcome(3, "ckptfs 9", CLUSTER, ANSWERING.store, "newer"))

    async def other_frames(stream: FrameStream) -> None:
        await stream.receive()
        data = bytearray(frame(WELCOME))
        data[4] = 2
        await stream.connection.send(data)

    client = await client_of(newer, nursery)
    with pytest.raises(PeerRefused, match=r"newer \(ckptfs 9\) chose protocol 3") as caught:
        await client.ping()
    assert caught.value.reason is RefusalReason.VERSION
    client = await client_of(other_frames, nursery)
    with pytest.raises(PeerRefused, match="a frame of version 2, this program speaks 1") as caught:
        await client.ping()
    assert caught.value.reason is RefusalReason.VERSION
    client.close()
    nursery.cancel_scope.cancel()


async def test_a_reason_of_a_later_version_is_understood_as_a_no(nursery: trio.Nursery) -> None:
    client = await client_of(then((Refused(999, "too purple"), b"")), nursery)
    with pytest.raises(PeerRefused, match="too purple") as caught:
        await client.ping()
    assert caught.value.reason is RefusalReason.INVALID
    client.close()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "0.0.0.0:7000", "[::]:7000", "example.org:7000", "127.0.0.1", ":1", "x"])
async def test_only_loopback_is_used_without_certificates(address: str) -> None:
    with pytest.raises(AddressRefused):
        await PlainTransport().connect(address)
    with pytest.raises(AddressRefused):
        PlainTransport().listen(address)


# ---- every byte flipped, every cut


@dataclass
class Spoiler(PlainTransport):
    """Connections whose asking side changes byte `at` of all it sends, or closes before it."""

    at: int
    cut: bool
    sent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__init__(stall_seconds=1.0)

    async def connect(self, address: str) -> SocketConnection:
        connection = await super().connect(address)
        whole = connection.send

        async def send(head: Buffer, payload: Buffer | None = None) -> None:
            data = bytearray(head) + (b"" if payload is None else payload)
            within = self.at - self.sent
            self.sent += len(data)
            if 0 <= within < len(data):
                if self.cut:
                    await whole(data[:within])
                    connection.close()
                    raise PeerUnreachable("cut off")
                data[within] ^= 0x20
            await whole(data)

        connection.send = send  # type: ignore[method-assign]
        return connection


async def spoil(answering: Answering, at: int, *, cut: bool) -> int:
    """One put with that byte spoilt; then one without. Returns how many bytes the first one sent."""
    transport = Spoiler(at, cut)
    client = PeerClient(transport, answering.address, ASKING)
    try:
        assert await put(client) == FOOTER.root
    except (PeerRefused, PeerUnreachable, ProtocolViolation):
        pass
    finally:
        client.close()
    good = PeerClient(PlainTransport(), answering.address, ASKING)
    while not await _put_unless_busy(good):
        pass
    good.close()
    assert answering.shards.verify(VID, 0).ok
    (held,) = answering.shards.list()
    assert answering.shards.delete(VID, 0, held.stored_at_ns)
    return transport.sent


async def _put_unless_busy(client: PeerClient) -> bool:
    """Whether the put was made. What is left of the spoilt one may be in its way for a moment."""
    try:
        return await put(client) == FOOTER.root
    except PeerRefused as refused:
        if not refused.retryable:
            raise
        return False


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
async def test_every_spoilt_byte_is_a_named_error_or_exact_data(cut: bool, answering: Answering) -> None:
    whole = await spoil(answering, 1 << 30, cut=cut)
    assert whole > 500
    for at in range(whole):
        await spoil(answering, at, cut=cut)


@pytest.mark.parametrize("cut", [False, True])
async def test_some_spoilt_bytes_are_a_named_error_or_exact_data(cut: bool, answering: Answering) -> None:
    for at in range(3, 700, 90):
        await spoil(answering, at, cut=cut)
