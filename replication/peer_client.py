"""The asking side: puts shards and copies to a peer and reads them back.

A `PeerClient` is one connection with the requests there are; a `PeerPool` keeps some for each peer. Errors:
`PeerUnreachable` (may be tried again, the connection is gone), `PeerRefused` (the peer said no; the connection lives on),
`ProtocolViolation` (the peer, or something in between, is wrong).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptfs.cache.checksum import HASH_SIZE, Buffer
from ckptfs.cache.ids import NodeId, SegmentId, StoreId, Vid
from ckptfs.replication import shard_format
from ckptfs.replication.errors import PeerRefused, ProtocolViolation, RefusalReason, ShardDamaged
from ckptfs.replication.frame_format import PAYLOAD_SIZE_MAX
from ckptfs.replication.peer_connection import PeerConnection
from ckptfs.replication.peer_messages import (
    HOME_CALLS_SINCE,
    CellsGet,
    CopiesDone,
    CopiesPut,
    Copy,
    CopyFields,
    CopyGet,
    FooterGet,
    FooterPart,
    HomeAnswer,
    HomeCall,
    KeptVerified,
    KeptVerify,
    Ping,
    PutBegin,
    PutReady,
    SegmentAsk,
    SegmentData,
    SegmentGet,
    SegmentHash,
    SegmentHashed,
    SegmentIs,
    SegmentMend,
    SegmentMended,
    Status,
    Verified,
    Verify,
)
from ckptfs.replication.peer_streams import CellStream, PutStream
from ckptfs.replication.segment_files import SegmentHashes, SegmentStatus
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.small_copies import BATCH_COUNT_MAX, COPY_SIZE_MAX, SmallCopy

COPIES_HEADER_BYTES_MAX = 48 << 10


class Mended(NamedTuple):
    """What came of a request to make a damaged segment right: whether it is now, and what was done or why not."""

    right: bool
    message: str


class KeptCells(NamedTuple):
    """A node's local copy of a version: how many cells it has, and which of them are wrong."""

    cells: int
    wrong: tuple[int, ...]


class PeerStatus(NamedTuple):
    """What a peer says of itself. `free_bytes` is what shards may still take there."""

    node: NodeId
    store: StoreId
    free_bytes: int
    version: str


class PeerClient(PeerConnection):
    """What can be asked of one peer."""

    async def ping(self, *, hurry: bool = False) -> PeerStatus:
        async with self.asking(Ping(hurry)) as request:
            status = await self.receive(request, Status)
        return PeerStatus(NodeId(status.node), StoreId(status.store), status.free_bytes, status.program)

    async def put_shard(self, header: ShardHeader, hole_bytes: int = 0) -> "PutStream":
        """Begin (or go on with) a shard, of whose cells so many bytes are zeros. The stream returned owns this client until
        `finish` or `aclose`."""
        begin = PutBegin(
            header.vid, header.index, header.data_shards, header.parity_shards, header.cell_size, header.size, hole_bytes
        )
        async with self.asking(begin) as request:
            ready = await self.receive(request, PutReady)
            if ready.resume_stripe > header.cell_count:
                raise ProtocolViolation(f"the peer wants to go on at stripe {ready.resume_stripe} of {header.cell_count}")
        self.under_way = stream = PutStream(self, request, header, ready.resume_stripe)
        return stream

    async def shard_footer(self, vid: Vid, index: int) -> ShardFooter:
        """Footer and, in it, header of a shard. Raises `ShardDamaged` if what the peer sends isn't one."""
        packed_header, end, total = b"", bytearray(), None
        async with self.asking(FooterGet(vid, index)) as request:
            while total is None or len(end) < total:
                incoming, part = await self.receive_any(request, FooterPart)
                packed_header = packed_header or part.header
                total = part.total if total is None else total
                length = incoming.payload_length
                if part.total != total or part.offset != len(end) or not length or len(end) + length > total:
                    raise ProtocolViolation(f"a footer part of {length} bytes at {part.offset} of {part.total}")
                end += await self.payload(incoming, memoryview(bytearray(length)))
        header = shard_format.unpack_header(packed_header)
        if (header.vid, header.index) != (vid, index):
            raise ShardDamaged("the peer sent the footer of another shard")
        return shard_format.unpack_footer(header, end)

    def read_cells(
        self, vid: Vid, index: int, first_stripe: int, count: int, *, into: Callable[[int], memoryview] | None = None
    ) -> "CellStream":
        """The shard's cells of those stripes as they are at the peer: who reads compares them with their hashes.

        Iterate over the result (`async for`), in an `async with` if the iteration may end early. Each cell is a view that
        is valid until the next; with `into`, the buffer for a stripe's cell is that function's answer.
        """
        return CellStream(self, CellsGet(vid, index, first_stripe, count), into)

    async def read_cell(self, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        """Read one cell, unchecked, into the buffer; returns its length, 0 where the shard has none."""
        length = 0
        async with self.read_cells(vid, index, stripe, 1, into=lambda _: buffer) as cells:
            async for cell in cells:
                length = len(cell)
        return length

    async def put_copies(self, copies: Sequence[SmallCopy]) -> list[bytes]:
        """Store small files; returns their content roots as the peer computed them. Synced batch by batch, so that after an
        error some may be stored."""
        roots: list[bytes] = []
        for batch in _batches(copies):
            fields = [CopyFields(copy.vid, copy.ino, copy.size, copy.path_hint, copy.revision) for copy in batch]
            async with self.asking(CopiesPut(fields), b"".join(copy.content for copy in batch)) as request:
                answer = await self.receive(request, CopiesDone)
            if len(answer.roots) != len(batch):
                raise ProtocolViolation(f"{len(answer.roots)} roots for {len(batch)} copies")
            roots += answer.roots
        return roots

    async def read_copy(self, vid: Vid) -> bytes:
        """A small file's content; who reads compares it with its root."""
        async with self.asking(CopyGet(vid)) as request:
            incoming, _ = await self.receive_any(request, Copy)
            if not 1 <= incoming.payload_length <= COPY_SIZE_MAX:
                raise ProtocolViolation(f"a copy of {incoming.payload_length} bytes")
            return bytes(await self.payload(incoming, memoryview(bytearray(incoming.payload_length))))

    async def read_segment(self, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes:
        """Bytes of a segment at its home as they are now, short at its end."""
        data = bytearray()
        while len(data) < length:
            wanted = min(length - len(data), PAYLOAD_SIZE_MAX)
            async with self.asking(SegmentGet(vid, segment, offset + len(data), wanted)) as request:
                incoming, _ = await self.receive_any(request, SegmentData)
                if incoming.payload_length > wanted:
                    raise ProtocolViolation(f"{incoming.payload_length} bytes of a segment instead of {wanted}")
                data += await self.payload(incoming, memoryview(bytearray(incoming.payload_length)))
            if incoming.payload_length < wanted:
                break
        return bytes(data)

    async def segment_status(self, segment: SegmentId) -> SegmentStatus:
        async with self.asking(SegmentAsk(segment)) as request:
            answer = await self.receive(request, SegmentIs)
        return SegmentStatus(answer.size, answer.mtime_ns, answer.blocks)

    async def segment_hashes(self, segment: SegmentId, cell_size: int, first_cell: int, count: int) -> SegmentHashes:
        """Have the home hash cells of a segment, at most `HASHES_MAX`."""
        async with self.asking(SegmentHash(segment, cell_size, first_cell, count)) as request:
            incoming, answer = await self.receive_any(request, SegmentHashed)
            if incoming.payload_length > count * HASH_SIZE or incoming.payload_length % HASH_SIZE:
                raise ProtocolViolation(f"{incoming.payload_length} bytes of hashes of {count} cells")
            hashes = await self.payload(incoming, memoryview(bytearray(incoming.payload_length)))
        return SegmentHashes(answer.size, bytes(hashes))

    async def call_home(self, call: HomeCall, data: Buffer = b"") -> HomeAnswer:
        """Have a file's home carry out what a program here asked for; the call may be sent again. Raises `PeerRefused` (version)
        for a peer whose release takes no such calls."""
        with self.closing_on_error():
            await self._ready()
        assert self.peer is not None
        if self.peer.version < HOME_CALLS_SINCE:
            raise PeerRefused(
                RefusalReason.VERSION,
                f"{self.peer.node} ({self.peer.program}) takes no writes of other nodes: upgrade it, or close the file there",
            )
        async with self.asking(call, data) as request:
            return await self.receive(request, HomeAnswer)

    async def mend_segment(self, vid: Vid) -> Mended:
        """Have the home of a protected version make its segment right."""
        async with self.asking(SegmentMend(vid)) as request:
            answer = await self.receive(request, SegmentMended)
        return Mended(answer.right, answer.message)

    async def verify_kept(self, vid: Vid, *, mend: bool) -> KeptCells:
        """Have the peer hash its local copy of a version."""
        async with self.asking(KeptVerify(vid, mend)) as request:
            answer = await self.receive(request, KeptVerified)
        return KeptCells(answer.cells, tuple(answer.wrong))

    async def verify_shard(self, vid: Vid, index: int) -> VerifyResult:
        """Have the peer re-read a shard from its drive."""
        async with self.asking(Verify(vid, index)) as request:
            answer = await self.receive(request, Verified)
        return VerifyResult(answer.ok, tuple(answer.bad_stripes), answer.message)


def _batches(copies: Sequence[SmallCopy]) -> list[list[SmallCopy]]:
    """The copies in batches that fit into a frame."""
    batches: list[list[SmallCopy]] = []
    payload = header = 0
    for copy in copies:
        own_header = len(copy.path_hint) + 64
        full = not batches or len(batches[-1]) == BATCH_COUNT_MAX
        if full or payload + copy.size > PAYLOAD_SIZE_MAX or header + own_header > COPIES_HEADER_BYTES_MAX:
            batches.append([])
            payload = header = 0
        batches[-1].append(copy)
        payload += copy.size
        header += own_header
    return batches
