"""Connections to every peer, kept open between uses."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass

import trio

from ckptfs.cache.ids import StoreId
from ckptfs.replication.conversation import PeerIdentity
from ckptfs.replication.peer_client import PeerClient
from ckptfs.replication.transport import Transport


@dataclass(frozen=True, slots=True)
class PeerPoolStatistics:
    """`connections_current` counts those in use and idle; the rest are counters since the start."""

    connections_current: int
    connections_idle: int
    sent_bytes: int
    received_bytes: int


class PeerPool:
    """Clients for every peer, kept open between uses. At most `connections_per_peer_max` to one peer at once: more wait, so
    who holds one must not wait for another of the same peer."""

    def __init__(
        self,
        transport: Transport,
        identity: PeerIdentity,
        *,
        connections_per_peer_max: int = 8,
        idle_per_peer_max: int = 4,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._idle_per_peer_max = idle_per_peer_max
        self._limiters: dict[tuple[StoreId, str], trio.Semaphore] = defaultdict(
            lambda: trio.Semaphore(connections_per_peer_max, max_value=connections_per_peer_max)
        )
        self._idle: dict[tuple[StoreId, str], list[PeerClient]] = defaultdict(list)
        self._in_use = 0
        self._sent_bytes = self._received_bytes = 0
        self._closed = False

    @contextlib.asynccontextmanager
    async def client(self, store: StoreId, address: str) -> AsyncIterator[PeerClient]:
        """A client of that store, for one task, in the `async with` block. It connects with the first request."""
        key = (store, address)
        async with self._limiters[key]:
            idle = self._idle[key]
            client = idle.pop() if idle else PeerClient(self._transport, address, self._identity, expected_store=store)
            self._in_use += 1
            try:
                yield client
            finally:
                self._in_use -= 1
                self._give_back(key, client)

    def forget(self, store: StoreId) -> None:
        """Close the idle connections to a store that is away."""
        for key in [key for key in self._idle if key[0] == store]:
            for client in self._idle.pop(key):
                client.close()

    def statistics(self) -> PeerPoolStatistics:
        idle = [client for clients in self._idle.values() for client in clients]
        return PeerPoolStatistics(self._in_use + len(idle), len(idle), self._sent_bytes, self._received_bytes)

    async def aclose(self) -> None:
        """Close what is idle, and what is given back from now on."""
        self._closed = True
        for clients in self._idle.values():
            for client in clients:
                client.close()
        self._idle.clear()
        await trio.lowlevel.checkpoint()

    def _give_back(self, key: tuple[StoreId, str], client: PeerClient) -> None:
        if client.under_way is not None:
            client.close()
        stream = client.stream
        if stream is not None:
            client.sent_bytes += stream.sent_bytes
            client.received_bytes += stream.received_bytes
            stream.sent_bytes = stream.received_bytes = 0
        self._sent_bytes += client.sent_bytes
        self._received_bytes += client.received_bytes
        client.sent_bytes = client.received_bytes = 0
        idle = self._idle[key]
        if client.connected and not self._closed and len(idle) < self._idle_per_peer_max:
            idle.append(client)
        else:
            client.close()
