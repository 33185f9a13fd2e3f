"""The asking and the answering side over real sockets: what is stored, read back, refused and resumed."""

import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache import checksum
from ckptfs.cache.ids import InodeNumber, NodeId, SegmentId, StoreId, Vid
from ckptfs.replication import peer_answers, peer_streams
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import PeerRefused, PeerUnreachable, RefusalReason
from ckptfs.replication.peer_answers import PeerServerLimits
from ckptfs.replication.peer_client import KeptCells, Mended, PeerClient
from ckptfs.replication.peer_pool import PeerPool
from ckptfs.replication.peer_server import PeerServer
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.small_copies import SmallCopies, SmallCopy
from ckptfs.replication.tls_transport import TlsFiles, TlsTransport
from ckptfs.replication.transport import Connection, PlainTransport, Transport

Certify = Callable[..., TlsFiles]

VID = Vid(bytes(range(16)))
SEGMENT = SegmentId(bytes(range(16, 32)))
CLUSTER = b"c" * 16
HEADER = ShardHeader(VID, 1, 2, 1, 64, 64 * 7 + 10)
"""Shard 1 of 2+1, four cells: three of 64 bytes, and the last with the content's last 10 bytes."""

ASKING = PeerIdentity(CLUSTER, StoreId(b"a" * 16), NodeId("asking"))
ANSWERING = PeerIdentity(CLUSTER, StoreId(b"b" * 16), NodeId("answering"))


def cells_of(header: ShardHeader, salt: int = 0) -> list[bytes]:
    return [bytes([stripe + salt + 1]) * header.cell_length(stripe) for stripe in range(header.cell_count)]


def footer_of(header: ShardHeader, cells: list[bytes]) -> ShardFooter:
    content = b"".join(checksum.cell_hash(b"%d" % cell) for cell in range(header.content_cell_count))
    return ShardFooter(header, b"".join(map(checksum.cell_hash, cells)), content, InodeNumber(7), b"run/model.pt", 5)


@dataclass
class Segments:
    """Plain files by the hex digits of their ids."""

    directory: Path

    def path_of(self, segment: SegmentId) -> str:
        return f"{self.directory}/{segment.hex()}"


class KeptByNode:
    """What a node keeps besides shards: nothing that is wrong, but what it is told to say."""

    def __init__(self) -> None:
        self.mended = Mended(True, "it is right")
        self.cells = KeptCells(0, ())
        self.asked: list[tuple[Vid, bool]] = []

    async def mend_segment(self, vid: Vid) -> Mended:
        return self.mended

    async def verify(self, vid: Vid, *, mend: bool) -> KeptCells:
        self.asked.append((vid, mend))
        return self.cells


class SlowStore(ShardStore):
    """A store whose verification waits until it is let go on."""

    def __init__(self, directory: Path, index: AgentDatabase, free_bytes: Callable[[], int] | None) -> None:
        super().__init__(directory, index, free_bytes=free_bytes)
        self.go_on = threading.Event()
        self.go_on.set()

    def verify(self, vid: Vid, index: int) -> VerifyResult:
        self.go_on.wait(10)
        return super().verify(vid, index)


@dataclass
class Node:
    """An answering node, made anew on the same directory by `start`."""

    directory: Path
    nursery: trio.Nursery
    free_bytes: Callable[[], int] | None = None
    limits: PeerServerLimits | None = None
    stall_seconds: float = 30.0
    address: str = "127.0.0.1:0"
    certify: Certify | None = None

    def transport(self, who: PeerIdentity, stall_seconds: float = 30.0) -> Transport:
        """How that side connects: with a certificate of its own, where the test has them."""
        if self.certify is None:
            return PlainTransport(stall_seconds=stall_seconds)
        return TlsTransport(self.certify(who.node), stall_seconds=stall_seconds)

    async def start(self) -> None:
        self.index = AgentDatabase(self.directory / "agent.db")
        self.shards = SlowStore(self.directory / "shards", self.index, self.free_bytes)
        self.shards.recover()
        self.copies = SmallCopies(self.directory / "small_copies.db", free_bytes=self.free_bytes)
        transport = self.transport(ANSWERING, self.stall_seconds)
        segments = Segments(self.directory)
        self.kept = KeptByNode()
        self.server = PeerServer(self.shards, self.copies, segments, self.kept, ANSWERING, transport, self.limits)
        self.stopped = trio.Event()
        self.scope = trio.CancelScope()
        self.address = await self.nursery.start(self._serve)

    async def _serve(self, task_status: trio.TaskStatus[str]) -> None:
        try:
            with self.scope:
                await self.server.serve(self.address, task_status=task_status)
        finally:
            self.index.close()
            self.copies.close()
            self.stopped.set()

    async def stop(self) -> None:
        self.scope.cancel()
        await self.stopped.wait()

    @contextlib.contextmanager
    def client(self, stall_seconds: float = 30.0) -> Iterator[PeerClient]:
        client = PeerClient(
            self.transport(ASKING, stall_seconds), self.address, ASKING, expected_store=ANSWERING.store
        )  # fmt: skip
        try:
            yield client
        finally:
            client.close()


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.slow)])
async def node(request: pytest.FixtureRequest, tmp_path: Path, nursery: trio.Nursery, certify: Certify) -> AsyncIterator[Node]:
    started = Node(tmp_path, nursery, certify=certify if request.param == "tls" else None)
    await started.start()
    yield started
    await started.stop()


async def put(client: PeerClient, header: ShardHeader = HEADER, salt: int = 0) -> bytes:
    cells = cells_of(header, salt)
    async with await client.put_shard(header) as stream:
        for stripe in range(stream.resume_stripe, header.cell_count):
            await stream.send_cell(stripe, memoryview(cells[stripe]), checksum.cell_hash(cells[stripe]))
        return await stream.finish(footer_of(header, cells))


async def read_all(client: PeerClient, header: ShardHeader = HEADER) -> list[bytes]:
    async with client.read_cells(header.vid, header.index, 0, header.stripe_count) as cells:
        return [bytes(cell) async for cell in cells]


async def test_a_shard_is_stored_and_read_back(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        root = await put(client)
        assert root == footer_of(HEADER, cells).root
        assert await read_all(client) == cells
        assert await client.shard_footer(VID, 1) == footer_of(HEADER, cells)
        assert (await client.verify_shard(VID, 1)).ok
        buffer = memoryview(bytearray(64))
        assert await client.read_cell(VID, 1, 3, buffer) == 10
        assert bytes(buffer[:10]) == cells[3]
        assert await client.read_cell(VID, 1, 4, buffer) == 0
        status = await client.ping()
    assert (status.node, status.store) == ("answering", ANSWERING.store)
    assert status.free_bytes > 0
    assert node.server.statistics().connections == 1
    assert node.shards.verify(VID, 1).ok


async def test_a_thread_takes_cells_in(node: Node) -> None:
    """The connection is as good as before when all were taken, and is given up when some were not."""
    cells = cells_of(HEADER)
    buffer = memoryview(bytearray(64))

    def take(stream: peer_streams.CellStream, count: int) -> list[bytes]:
        return [bytes(buffer[: stream.next_in_thread(buffer, 10.0)]) for _ in range(count)]

    with node.client() as client:
        await put(client)
        for first, count in ((0, 4), (1, 2), (3, 5)):
            async with client.read_cells(VID, 1, first, count) as stream:
                await stream.begin()
                taken = await trio.to_thread.run_sync(take, stream, min(count, 2 if first else 4))
            assert taken == [*cells, b""][first:][: len(taken)]
        await client.ping()
        assert node.server.statistics().connections == 1
        async with client.read_cells(VID, 1, 0, 4) as stream:
            await stream.begin()
            assert await trio.to_thread.run_sync(take, stream, 1) == cells[:1]
        with pytest.raises(PeerUnreachable):
            stream.next_in_thread(buffer, 1.0)
        async with client.read_cells(Vid(bytes(16)), 1, 0, 4) as stream:
            await stream.begin()
            with pytest.raises(PeerRefused) as refused:
                await trio.to_thread.run_sync(take, stream, 1)
        assert refused.value.reason is RefusalReason.NOT_FOUND
        assert await read_all(client) == cells


async def test_a_thread_waits_for_a_cell_only_so_long(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = peer_answers.PeerAnswers._send_cells_in_thread

    def slow(*arguments: Any) -> None:
        go_on.wait(30)
        real(*arguments)

    with node.client() as client:
        await put(client)
        monkeypatch.setattr(peer_answers.PeerAnswers, "_send_cells_in_thread", slow)
        try:
            async with client.read_cells(VID, 1, 0, 4) as stream:
                await stream.begin()
                with pytest.raises(PeerUnreachable, match=r"nothing whole for 0\.05 s"):
                    await trio.to_thread.run_sync(stream.next_in_thread, memoryview(bytearray(64)), 0.05)
        finally:
            go_on.set()


@pytest.mark.parametrize("how", ["sent", "refused by the file system", "the drive fails"])
async def test_what_the_drive_does_not_give_is_sent_as_zeros(node: Node, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was announced is complete: who knows the hash finds one cell wrong, and loses no connection."""
    content = os.urandom(300_000)
    path = node.directory / "file"
    path.write_bytes(content)
    given = content if how != "the drive fails" else b""
    if how != "sent":
        error = errno.EIO if how == "the drive fails" else errno.EINVAL

        def fails(*_: Any) -> int:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr("os.sendfile", fails)
        if how == "the drive fails":
            monkeypatch.setattr("os.pread", fails)
    ends: list[Connection] = []
    listener = node.transport(ANSWERING).listen("127.0.0.1:0")

    async def accept() -> None:
        ends.append(await listener.accept())
        await ends[0].send(b"!")  # which takes a handshake

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        asking = await node.transport(ASKING).connect(listener.address)
    listener.close()
    buffer = memoryview(bytearray(5 + 500_000))
    with open(path, "rb") as file, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, ends[0].send_file_in_thread, b"head", file.fileno(), 100, 500_000)
            assert await asking.receive(buffer)
    assert buffer == b"!head" + given[100:].ljust(500_000, b"\0")
    for end in (asking, *ends):
        end.close()


async def test_cells_of_zeros_are_not_sent(node: Node) -> None:
    header = ShardHeader(VID, 0, 1, 1, 1 << 20, (5 << 20) + 10)
    cells = [b"x" * (1 << 20), bytes(1 << 20), bytes(1 << 20), b"y" * (1 << 20), bytes(1 << 20), bytes(10)]
    with node.client() as client:
        stream = await client.put_shard(header, hole_bytes=2 << 20)
        for stripe, cell in enumerate(cells):
            await stream.send_cell(stripe, cell, checksum.cell_hash(cell))
        await stream.finish(footer_of(header, cells))
        async with client.read_cells(VID, 0, 0, 6) as read:
            assert [bytes(cell) async for cell in read] == cells
        client.close()
        assert client.sent_bytes < (2 << 20) + 2000


async def test_cells_go_into_the_buffers_of_who_reads(node: Node) -> None:
    whole = memoryview(bytearray(64 * 4))
    with node.client() as client:
        await put(client)
        async with client.read_cells(VID, 1, 1, 2, into=lambda stripe: whole[stripe * 64 :][:64]) as cells:
            stripes = [cells.stripe async for _ in cells]
    assert stripes == [1, 2]
    assert bytes(whole) == bytes(64) + b"".join(cells_of(HEADER)[1:3]) + bytes(64)


async def test_a_shard_without_cells(node: Node) -> None:
    header = ShardHeader(VID, 9, 10, 2, 8192, 65_536)
    with node.client() as client:
        assert await put(client, header) == footer_of(header, []).root
        assert await read_all(client, header) == []


async def test_a_footer_of_many_parts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_streams, "FOOTER_PART_BYTES", 37)
    monkeypatch.setattr(peer_answers, "FOOTER_PART_BYTES", 41)
    with node.client() as client:
        root = await put(client)
        assert (await client.shard_footer(VID, 1)).root == root


@pytest.mark.parametrize("stop", range(5))
async def test_a_put_that_was_given_up_goes_on_where_it_stopped(stop: int, node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        async with await client.put_shard(HEADER) as stream:
            for stripe in range(stop):
                await stream.send_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))
        async with await client.put_shard(HEADER) as stream:
            assert stream.resume_stripe == stop
        await put(client)
        assert await read_all(client) == cells
    assert node.server.statistics().connections == 1


async def test_a_put_goes_on_after_its_connection_broke(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as first, node.client() as second:
        stream = await first.put_shard(HEADER)
        for stripe in range(3):
            await stream.send_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))
        first.close()
        with pytest.raises(PeerUnreachable):
            await stream.send_cell(3, cells[3], checksum.cell_hash(cells[3]))
        again = await second.put_shard(HEADER)
        assert again.resume_stripe <= 3
        await again.aclose()
        await put(second)
        assert await read_all(second) == cells


async def test_a_put_goes_on_after_the_peer_was_restarted(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        for stripe in range(2):
            await stream.send_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))
        await stream.aclose()
        await client.ping()
        await node.stop()
        await node.start()
        again = await client.put_shard(HEADER)
        assert again.resume_stripe == 2
        await again.aclose()
        await put(client)
        assert await read_all(client) == cells


async def test_a_cancelled_put_leaves_client_and_server_usable(node: Node) -> None:
    with node.client() as client:
        with trio.CancelScope() as scope:
            async with await client.put_shard(HEADER) as stream:
                scope.cancel()
                await stream.send_cell(0, cells_of(HEADER)[0], checksum.cell_hash(cells_of(HEADER)[0]))
                await stream.send_cell(1, cells_of(HEADER)[1], checksum.cell_hash(cells_of(HEADER)[1]))
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        await put(client)
        assert await read_all(client) == cells_of(HEADER)


async def test_a_newer_put_takes_over_from_a_connection_that_hangs(node: Node) -> None:
    with node.client() as hanging, node.client() as client:
        await hanging.put_shard(HEADER)
        await put(client)
        assert await read_all(client) == cells_of(HEADER)


async def test_a_wrong_hash_is_refused_and_the_put_can_be_made_again(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        await stream.send_cell(0, cells[0], checksum.cell_hash(cells[0]))
        await stream.send_cell(1, cells[1], bytes(16))
        with pytest.raises(PeerRefused) as caught:
            await _send_the_rest(stream, cells)
        assert caught.value.reason is RefusalReason.MISMATCH
        assert caught.value.retryable
        assert (await client.ping()).node == "answering"
        again = await client.put_shard(HEADER)
        assert again.resume_stripe == 1
        await again.aclose()
        await put(client)
        assert await read_all(client) == cells
    assert node.server.statistics().refusals == {"mismatch": 1}


async def _send_the_rest(stream: peer_streams.PutStream, cells: list[bytes]) -> None:
    for stripe in (2, 3):
        await stream.send_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))
    await stream.finish(footer_of(HEADER, cells))


async def test_a_footer_of_other_cells_is_refused_and_nothing_is_kept(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        for stripe, cell in enumerate(cells):
            await stream.send_cell(stripe, cell, checksum.cell_hash(cell))
        with pytest.raises(PeerRefused) as caught:
            await stream.finish(footer_of(HEADER, cells_of(HEADER, 1)))
        assert caught.value.reason is RefusalReason.MISMATCH
        assert (await client.put_shard(HEADER)).resume_stripe == 0
    assert os.listdir(node.directory / "shards/00") in ([], [VID.hex() + ".1.partial"])


async def test_other_bytes_under_one_vid_are_a_conflict(node: Node) -> None:
    with node.client() as client:
        root = await put(client)
        assert await put(client) == root
        with pytest.raises(PeerRefused) as caught:
            await put(client, salt=1)
        assert caught.value.reason is RefusalReason.CONFLICT
        assert not caught.value.retryable
        with pytest.raises(PeerRefused) as caught:
            await client.put_shard(ShardHeader(VID, 1, 2, 1, 64, 99))
        assert caught.value.reason is RefusalReason.CONFLICT
        assert await read_all(client) == cells_of(HEADER)
    assert node.server.statistics().connections == 1


async def test_a_full_peer_says_so(tmp_path: Path, nursery: trio.Nursery) -> None:
    node = Node(tmp_path, nursery, free_bytes=lambda: 5000)
    await node.start()
    with node.client() as client:
        with pytest.raises(PeerRefused, match=r"full: .* doesn't fit") as caught:
            await client.put_shard(HEADER)
        assert caught.value.reason is RefusalReason.FULL
        with pytest.raises(PeerRefused) as caught:
            await client.put_copies([copy_of(number, 3000) for number in range(2)])
        assert caught.value.reason is RefusalReason.FULL
        assert (await client.ping()).free_bytes == 5000
    assert node.server.statistics().connections == 1
    await node.stop()


async def test_what_a_peer_does_not_hold(node: Node) -> None:
    requests: list[Callable[[PeerClient], object]] = [
        lambda client: client.shard_footer(VID, 0),
        lambda client: client.read_cell(VID, 0, 0, memoryview(bytearray(64))),
        lambda client: client.verify_shard(VID, 0),
        lambda client: client.read_copy(VID),
        lambda client: client.read_segment(VID, SEGMENT, 0, 10),
        lambda client: client.segment_status(SEGMENT),
        lambda client: client.segment_hashes(SEGMENT, 4096, 0, 10),
    ]
    with node.client() as client:
        for request in requests:
            with pytest.raises(PeerRefused) as caught:
                await request(client)  # type: ignore[misc]
            assert caught.value.reason is RefusalReason.NOT_FOUND
    assert node.server.statistics().refusals == {"not_found": len(requests)}
    assert node.server.statistics().connections == 1


async def test_a_damaged_cell_is_handed_on_and_found_by_who_compares(node: Node) -> None:
    cells = cells_of(HEADER)
    with node.client() as client:
        await put(client)
        with open(node.shards.path_of(VID, 1), "r+b") as file:
            file.seek(HEADER.cell_offset(2))
            file.write(b"!")
        footer = await client.shard_footer(VID, 1)
        read = await read_all(client)
        assert [checksum.cell_hash(cell) == footer.cell_hash(stripe) for stripe, cell in enumerate(read)] == [
            True, True, False, True,
        ]  # fmt: skip
        assert await client.verify_shard(VID, 1) == (False, (2,), "1 of 4 cells fail their hash")
        os.truncate(node.shards.path_of(VID, 1), 5000)
        assert not (await client.verify_shard(VID, 1)).ok
        with pytest.raises(PeerRefused) as caught:
            await client.shard_footer(VID, 1)
        assert caught.value.reason is RefusalReason.DAMAGED
        await put(client)
        assert await read_all(client) == cells


async def test_a_reading_given_up_halfway(node: Node) -> None:
    with node.client() as client:
        await put(client)
        async with client.read_cells(VID, 1, 0, 4) as stream:
            async for _ in stream:
                break
        assert await read_all(client) == cells_of(HEADER)
        forgotten = client.read_cells(VID, 1, 0, 4)
        await forgotten.__anext__()
        assert await read_all(client) == cells_of(HEADER)
        with pytest.raises(PeerUnreachable, match="given up"):
            await forgotten.__anext__()


def copy_of(number: int, size: int) -> SmallCopy:
    content = bytes([number % 251]) * size
    return SmallCopy(Vid(number.to_bytes(16, "big")), InodeNumber(number), size, b"run/%d" % number, 3, content)


async def test_small_copies_in_batches(node: Node) -> None:
    copies = [copy_of(number, 1 + number) for number in range(600)] + [copy_of(1000 + number, 65_535) for number in range(70)]
    with node.client() as client:
        roots = await client.put_copies(copies)
        assert roots == [checksum.content_root(one.vid, one.size, one.size, checksum.cell_hash(one.content)) for one in copies]
        assert await client.read_copy(copies[5].vid) == copies[5].content
        assert await client.read_copy(copies[-1].vid) == copies[-1].content
        assert await client.put_copies(copies[:3]) == roots[:3]
        assert await client.put_copies([]) == []
        with pytest.raises(PeerRefused) as caught:
            await client.put_copies([copies[0]._replace(content=b"?")])
        assert caught.value.reason is RefusalReason.CONFLICT
    assert node.copies.count()[0] == 670


async def test_long_path_hints_make_smaller_batches(node: Node) -> None:
    copies = [copy_of(number, 10)._replace(path_hint=b"x" * 4096) for number in range(50)]
    with node.client() as client:
        assert len(await client.put_copies(copies)) == 50


async def test_segments_are_read_as_they_are(node: Node) -> None:
    content = os.urandom(5 << 20)
    path = node.directory / SEGMENT.hex()
    path.write_bytes(content)
    with node.client() as client:
        assert await client.read_segment(VID, SEGMENT, 0, len(content) + 100) == content
        assert await client.read_segment(VID, SEGMENT, 1000, 10) == content[1000:1010]
        assert await client.read_segment(VID, SEGMENT, len(content), 10) == b""
        status = await client.segment_status(SEGMENT)
        assert status == (len(content), path.stat().st_mtime_ns, path.stat().st_blocks)


async def test_segments_are_hashed_where_they_lie(node: Node) -> None:
    content = os.urandom(9 * 4096 + 5)
    (node.directory / SEGMENT.hex()).write_bytes(content)
    table = checksum.cell_table(content, 4096)
    with node.client() as client:
        assert await client.segment_hashes(SEGMENT, 4096, 0, 4096) == (len(content), table)
        assert await client.segment_hashes(SEGMENT, 4096, 3, 2) == (len(content), table[3 * 16 : 5 * 16])
        assert await client.segment_hashes(SEGMENT, 4096, 10, 2) == (len(content), b"")
        assert await client.segment_hashes(SEGMENT, 1 << 20, 0, 1) == (len(content), checksum.cell_hash(content))


async def test_what_a_node_keeps_besides_shards(node: Node) -> None:
    with node.client() as client:
        node.kept.mended = Mended(False, "x" * 2000)
        mended = await client.mend_segment(VID)
        assert (mended.right, len(mended.message)) == (False, 1000)
        node.kept.cells = KeptCells(5000, tuple(range(2000)))
        assert await client.verify_kept(VID, mend=True) == KeptCells(5000, tuple(range(1000)))
        await client.verify_kept(VID, mend=False)
    assert node.kept.asked == [(VID, True), (VID, False)]


async def test_a_slow_answer_is_no_silence(tmp_path: Path, nursery: trio.Nursery) -> None:
    node = Node(tmp_path, nursery, limits=PeerServerLimits(working_seconds=0.02))
    await node.start()
    with node.client(stall_seconds=0.1) as client:
        await put(client)
        node.shards.go_on.clear()
        async with trio.open_nursery() as inner:

            async def let_go_on() -> None:
                await trio.sleep(0.2)
                node.shards.go_on.set()

            inner.start_soon(let_go_on)
            assert (await client.verify_shard(VID, 1)).ok
    await node.stop()


async def test_connections_are_bounded_and_idle_ones_make_room(tmp_path: Path, nursery: trio.Nursery) -> None:
    node = Node(tmp_path, nursery, limits=PeerServerLimits(connections_max=2))
    await node.start()
    with node.client() as first, node.client() as second, node.client() as third:
        await first.put_shard(HEADER)
        await second.ping()
        await third.put_shard(ShardHeader(VID, 0, 2, 1, 64, 100))
        with pytest.raises(PeerRefused) as caught:
            await second.ping()
        assert caught.value.reason is RefusalReason.BUSY
        third.close()
        await trio.testing.wait_all_tasks_blocked(0.05)
        await second.ping()
    assert node.server.statistics().turned_away == 1
    await node.stop()


async def test_payloads_together_are_bounded(tmp_path: Path, nursery: trio.Nursery) -> None:
    node = Node(tmp_path, nursery, limits=PeerServerLimits(payload_bytes_max=4096, buffer_wait_seconds=0.02))
    await node.start()
    with node.client() as first, node.client() as second:
        await first.put_shard(HEADER)
        with pytest.raises(PeerRefused) as caught:
            await put(second, ShardHeader(VID, 0, 2, 1, 64, 100))
        assert caught.value.reason is RefusalReason.BUSY
        with pytest.raises(PeerRefused) as caught:
            await second.put_copies([copy_of(1, 5000)])
        assert caught.value.reason is RefusalReason.BUSY
        first.close()
        await trio.testing.wait_all_tasks_blocked(0.05)
        await put(second)
        assert node.server.statistics().peak_payload_bytes <= 4096
    await node.stop()


async def test_a_peer_silent_in_the_middle_of_a_shard_is_dropped(tmp_path: Path, nursery: trio.Nursery) -> None:
    node = Node(tmp_path, nursery, stall_seconds=0.05)
    await node.start()
    cells = cells_of(HEADER)
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        await stream.send_cell(0, cells[0], checksum.cell_hash(cells[0]))
        with trio.fail_after(5):
            while node.server.statistics().connections_current:
                await trio.sleep(0.01)
        with pytest.raises(PeerUnreachable):
            await stream.send_cell(1, cells[1], checksum.cell_hash(cells[1]))
        again = await client.put_shard(HEADER)
        assert again.resume_stripe == 1
        await again.aclose()
        await client.ping()
    assert node.shards.statistics().promised_bytes == 0
    await node.stop()


async def test_a_pool_keeps_connections_and_survives_a_restart(node: Node) -> None:
    pool = PeerPool(node.transport(ASKING), ASKING, connections_per_peer_max=2, idle_per_peer_max=1)
    for _ in range(3):
        async with pool.client(ANSWERING.store, node.address) as client:
            await client.ping()
    assert node.server.statistics().connections == 1
    async with pool.client(ANSWERING.store, node.address) as one, pool.client(ANSWERING.store, node.address) as two:
        await one.ping()
        await two.ping()
        with trio.move_on_after(0.01) as scope:
            async with pool.client(ANSWERING.store, node.address):
                raise AssertionError("a third connection")
        assert scope.cancelled_caught
    assert pool.statistics().connections_idle == 1
    await node.stop()
    async with pool.client(ANSWERING.store, node.address) as client:
        with pytest.raises(PeerUnreachable):
            await client.ping()
    await node.start()
    async with pool.client(ANSWERING.store, node.address) as client:
        await client.ping()
        await client.put_shard(HEADER)
    assert pool.statistics().connections_idle == 0
    assert pool.statistics().sent_bytes > 0
    pool.forget(ANSWERING.store)
    await pool.aclose()


async def test_a_store_that_has_not_joined_is_refused(node: Node) -> None:
    """Also with a certificate: who has one could join, and has not, or was removed."""
    asked: list[tuple[StoreId, str]] = []
    joined = False

    async def is_member(store: StoreId, name: str) -> bool:
        asked.append((store, name))
        return joined

    node.server._is_member = is_member
    client = PeerClient(node.transport(ASKING), node.address, ASKING)
    with pytest.raises(PeerRefused, match="asking has not joined the cluster") as caught:
        await client.ping()
    assert caught.value.reason is RefusalReason.WRONG_PEER
    assert asked == [(ASKING.store, ASKING.node)]
    assert node.server.statistics().refusals == {"wrong_peer": 1}
    joined = True
    await client.ping()
    await client.aclose()


async def test_another_store_or_cluster_at_the_address_is_refused(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    stranger = PeerClient(node.transport(ASKING), node.address, ASKING, expected_store=StoreId(b"x" * 16))
    with pytest.raises(PeerRefused, match="is store 6262") as caught:
        await stranger.ping()
    assert caught.value.reason is RefusalReason.WRONG_PEER
    foreign = PeerClient(node.transport(ASKING), node.address, PeerIdentity(b"d" * 16, ASKING.store, ASKING.node))
    with pytest.raises(PeerRefused, match="another cluster") as caught:
        await foreign.ping()
    assert caught.value.reason is RefusalReason.WRONG_PEER
    assert "answering belongs to another cluster than asking" in caplog.text


async def test_nobody_listens() -> None:
    client = PeerClient(PlainTransport(), "127.0.0.1:1", ASKING)
    with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:1 can't be reached: Connection refused"):
        await client.ping()


async def test_a_hole_of_many_cells_is_one_message(node: Node) -> None:
    header = ShardHeader(VID, 0, 1, 1, 64 << 10, 1 << 30)
    cells = [b"x" * header.cell_size, *[bytes(header.cell_size)] * (header.cell_count - 1)]
    with node.client() as client:
        stream = await client.put_shard(header, hole_bytes=(1 << 30) - header.cell_size)
        await stream.send_cell(0, cells[0], checksum.cell_hash(cells[0]))
        await stream.send_zeros(1, header.cell_count - 1)
        await stream.finish(footer_of(header, cells))
        assert (await client.verify_shard(VID, 0)).ok
        client.close()
        assert client.sent_bytes < 2 << 20  # the cell, and the footer with its two tables


@pytest.mark.parametrize("count", [0, -1])
async def test_no_zeros_are_a_mistake(node: Node, count: int) -> None:
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        with pytest.raises(ValueError, match="zeros"):
            await stream.send_zeros(0, count)
        client.close()


async def test_zeros_beyond_the_shard_are_refused(node: Node) -> None:
    with node.client() as client:
        stream = await client.put_shard(HEADER)
        await stream.send_zeros(0, HEADER.cell_count + 1)
        with pytest.raises(PeerRefused, match="cells of zeros"):
            await stream.finish(footer_of(HEADER, cells_of(HEADER)))
        client.close()
