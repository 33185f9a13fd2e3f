"""All stores as holders of shards, copies and segments: the own one through its files, the others through their agents.

Putting and reading have connections of their own, so that a long put never keeps a reader waiting. What a holder says of
shards it should have comes as `ShardNotFound` or `ShardDamaged`, whoever it is.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from ckptfs.cache.checksum import Buffer
from ckptfs.cache.ids import InodeNumber, SegmentId, StoreId, Vid
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.errors import (
    PeerRefused,
    PeerUnreachable,
    RefusalReason,
    ReplicationError,
    ShardDamaged,
    ShardNotFound,
)
from ckptfs.replication.members import Members
from ckptfs.replication.own_store import OwnStore
from ckptfs.replication.peer_answers import Kept
from ckptfs.replication.peer_client import KeptCells, Mended, PeerClient
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall
from ckptfs.replication.peer_pool import PeerPool
from ckptfs.replication.peer_streams import CellStream, PutStream
from ckptfs.replication.segment_files import SegmentHashes, SegmentStatus
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.small_copies import SmallCopy
from ckptfs.replication.stripe_run import CellRun
from ckptfs.replication.striped_attempt import ShardSink
from ckptfs.replication.transport import Transport


class PeerSink:
    """One shard on its way to a peer (a `striped_attempt.ShardSink`); holds a connection until it is closed."""

    def __init__(self, stream: PutStream, connection: AsyncExitStack, ino: InodeNumber, path_hint: bytes, revision: int) -> None:
        self.resume_stripe = stream.resume_stripe
        self._stream = stream
        self._connection = connection
        self._ino = ino
        self._path_hint = path_hint
        self._revision = revision

    async def send_cell(self, stripe: int, cell: memoryview, digest: bytes) -> None:
        await self._stream.send_cell(stripe, cell, digest)

    def send_cell_in_thread(self, stripe: int, cell: memoryview, digest: bytes) -> bool:
        return self._stream.send_cell_in_thread(stripe, cell, digest)

    async def send_zeros(self, stripe: int, count: int) -> None:
        await self._stream.send_zeros(stripe, count)

    async def finish(self, own_table: bytes, content_table: bytes) -> bytes:
        footer = ShardFooter(self._stream.header, own_table, content_table, self._ino, self._path_hint, self._revision)
        return await self._stream.finish(footer)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._connection.aclose()


class PeerCells:
    """Cells on their way from a peer (a `stripe_run.CellRun`)."""

    def __init__(self, stream: CellStream) -> None:
        self._stream = stream

    def next_in_thread(self, buffer: memoryview, seconds: float) -> int:
        try:
            return self._stream.next_in_thread(buffer, seconds)
        except PeerRefused as refused:
            raise of_shard(refused) from None


class Peers:
    """The connections to other nodes' agents."""

    def __init__(self, transport: Transport, identity: PeerIdentity) -> None:
        self._putting = PeerPool(transport, identity)
        self._reading = PeerPool(transport, identity, connections_per_peer_max=16)
        self._calling = PeerPool(transport, identity, connections_per_peer_max=16)
        self._calling_long = PeerPool(transport, identity)

    @property
    def _pools(self) -> tuple[PeerPool, ...]:
        return self._putting, self._reading, self._calling, self._calling_long

    async def ping(self, store: StoreId, address: str) -> int:
        """The free bytes of the store at that address. Raises `PeerUnreachable`, `PeerRefused`."""
        async with self._reading.client(store, address) as client:
            return (await client.ping()).free_bytes

    async def hurry(self, store: StoreId, address: str) -> None:
        """Tell the store's agent that somebody waits for files of its node. Raises `PeerUnreachable`, `PeerRefused`."""
        async with self._reading.client(store, address) as client:
            await client.ping(hurry=True)

    def putting(self, store: StoreId, address: str) -> AbstractAsyncContextManager[PeerClient]:
        return self._putting.client(store, address)

    def reading(self, store: StoreId, address: str) -> AbstractAsyncContextManager[PeerClient]:
        return self._reading.client(store, address)

    def calling(self, store: StoreId, address: str, *, is_long: bool) -> AbstractAsyncContextManager[PeerClient]:
        """For calls to a home. Those that take long, syncs, keep no others waiting."""
        return (self._calling_long if is_long else self._calling).client(store, address)

    async def aclose(self) -> None:
        for pool in self._pools:
            await pool.aclose()


class Holders:
    """Dispatches by store. Addresses are those `members` knows."""

    def __init__(self, members: Members, own: OwnStore, peers: Peers) -> None:
        self._members = members
        self._own = own
        self._peers = peers

    async def put_shard(
        self, store: StoreId, header: ShardHeader, ino: InodeNumber, path_hint: bytes, revision: int, hole_bytes: int = 0
    ) -> ShardSink:
        """`hole_bytes`: so many of the cells' bytes are zeros, for which no space is needed."""
        if store == self._members.own_store:
            return await self._own.put_shard(header, ino, path_hint, revision, hole_bytes)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(self._peers.putting(store, self._address(store)))
            stream = await client.put_shard(header, hole_bytes)
            return PeerSink(stream, stack.pop_all(), ino, path_hint, revision)
        raise AssertionError("the exit stack swallowed an exception")

    async def put_copies(self, store: StoreId, copies: Sequence[SmallCopy]) -> list[bytes]:
        if store == self._members.own_store:
            return await self._own.put_copies(copies)
        async with self._peers.putting(store, self._address(store)) as client:
            return await client.put_copies(copies)

    async def read_cell(self, store: StoreId, vid: Vid, index: int, stripe: int, buffer: memoryview) -> int:
        """Read one cell, unchecked, into the buffer; returns its length."""
        if store == self._members.own_store:
            return await self._own.read_cell(vid, index, stripe, buffer)
        async with self.reading(store) as client:
            return await client.read_cell(vid, index, stripe, buffer)

    @asynccontextmanager
    async def cells(self, store: StoreId, vid: Vid, index: int, first: int, count: int) -> AsyncIterator[CellRun]:
        """The shard's cells of so many stripes, for a thread to take in inside."""
        if store == self._members.own_store:
            yield self._own.cells(vid, index, first)
            return
        async with (
            self._peers.reading(store, self._address(store)) as client,
            client.read_cells(vid, index, first, count) as cells,
        ):
            await cells.begin()
            yield PeerCells(cells)

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter:
        if store == self._members.own_store:
            return await self._own.footer(vid, index)
        async with self.reading(store) as client:
            return await client.shard_footer(vid, index)

    async def read_copy(self, store: StoreId, vid: Vid) -> bytes:
        if store == self._members.own_store:
            return await self._own.read_copy(vid)
        async with self.reading(store) as client:
            return await client.read_copy(vid)

    async def verify_shard(self, store: StoreId, vid: Vid, index: int) -> VerifyResult:
        if store == self._members.own_store:
            return await self._own.verify_shard(vid, index)
        async with self.reading(store) as client:
            return await client.verify_shard(vid, index)

    async def read_segment(self, store: StoreId, vid: Vid, segment: SegmentId, offset: int, length: int) -> bytes:
        """Bytes of a segment at its home as they are now, short at its end."""
        if store == self._members.own_store:
            return await self._own.read_segment(segment, offset, length)
        async with self.reading(store) as client:
            return await client.read_segment(vid, segment, offset, length)

    async def segment_status(self, store: StoreId, segment: SegmentId) -> SegmentStatus:
        if store == self._members.own_store:
            return await self._own.segment_status(segment)
        async with self.reading(store) as client:
            return await client.segment_status(segment)

    async def segment_hashes(
        self, store: StoreId, segment: SegmentId, cell_size: int, first_cell: int, count: int
    ) -> SegmentHashes:
        """The hashes of cells of a segment, re-read from its home's drive; at most `peer_messages.HASHES_MAX`."""
        if store == self._members.own_store:
            return await self._own.segment_hashes(segment, cell_size, first_cell, count)
        async with self.reading(store) as client:
            return await client.segment_hashes(segment, cell_size, first_cell, count)

    async def call_home(self, store: StoreId, call: HomeCall, data: Buffer, *, is_long: bool = False) -> HomeAnswer:
        """Have another store's mount carry out a call of a program here. Raises `PeerUnreachable`, `PeerRefused`."""
        async with self._peers.calling(store, self._address(store), is_long=is_long) as client:
            return await client.call_home(call, data)

    def _address(self, store: StoreId) -> str:
        address = self._members.address_of(store)
        if not address:
            raise PeerUnreachable(f"the catalog has no address of store {store.hex()}")
        return address

    @asynccontextmanager
    async def reading(self, store: StoreId) -> AsyncIterator[PeerClient]:
        """A connection to another store's node. What it lacks, or has damaged, is `ShardNotFound` or `ShardDamaged` inside."""
        try:
            async with self._peers.reading(store, self._address(store)) as client:
                yield client
        except PeerRefused as refused:
            raise of_shard(refused) from None


def of_shard(refused: PeerRefused) -> ReplicationError:
    """What a holder that refuses says of its shard."""
    kinds = {RefusalReason.NOT_FOUND: ShardNotFound, RefusalReason.DAMAGED: ShardDamaged}
    return kinds[refused.reason](refused.message) if refused.reason in kinds else refused


class Keepers:
    """All nodes as keepers of segments and local copies. Dispatches by store, as `Holders`; raises `ReplicationError`."""

    def __init__(self, members: Members, own: Kept, holders: Holders) -> None:
        self._members = members
        self._own = own
        self._holders = holders

    async def mend_segment(self, store: StoreId, vid: Vid) -> Mended:
        """Have the home of a protected version make its segment right."""
        if store == self._members.own_store:
            return await self._own.mend_segment(vid)
        async with self._holders.reading(store) as client:
            return await client.mend_segment(vid)

    async def verify_kept(self, store: StoreId, vid: Vid, *, mend: bool) -> KeptCells:
        """Have a node hash its local copy of a version, and with `mend` fetch anew what is wrong."""
        if store == self._members.own_store:
            return await self._own.verify(vid, mend=mend)
        async with self._holders.reading(store) as client:
            return await client.verify_kept(vid, mend=mend)
