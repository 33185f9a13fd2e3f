"""A network in memory between machines, through which the real frames go: a `Transport` and what can go wrong with it.

Bytes arrive in order, late by chance. A link may be cut one way: what was sent waits, as TCP repeats it, until the link is back
or the receiver's patience ends. A connection may be reset, with whatever was under way: so a request's answer may be lost though
it was carried out. A dead process resets its connections, a frozen machine neither takes nor sends anything.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from random import Random

import trio
from virtual_machine import Machine, Process, in_turn, process, wait_in_thread, world

from ckptfs.cache.checksum import Buffer
from ckptfs.replication.errors import PeerUnreachable

STALL_SECONDS = 5.0
CONNECT_SECONDS = 2.0


class Network:
    """The links. `resets_left` connections are reset when something is sent next, by chance."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.listeners: dict[str, SimulatedListener] = {}
        self.resets_left = 0
        self._cuts: set[tuple[int, int]] = set()
        self._live: dict[SimulatedConnection, None] = {}
        self._resets_before = math.inf

    def cut(self, source: Machine, target: Machine) -> None:
        """Nothing gets from the one to the other any more."""
        self._cuts.add((source.number, target.number))

    def heal(self) -> None:
        """All links are whole again."""
        self._cuts.clear()
        self.stir()

    def stir(self) -> None:
        """Have those who wait look again."""
        for connection in list(self._live):
            connection.changed()

    def is_open(self, source: Machine, target: Machine) -> bool:
        return (source.number, target.number) not in self._cuts

    def latency(self) -> float:
        return 0.0 if self.chance.random() < 0.9 else self.chance.choice((0.001, 0.01, 0.05, 0.4))

    def add(self, connection: "SimulatedConnection") -> None:
        self._live[connection] = None

    def remove(self, connection: "SimulatedConnection") -> None:
        self._live.pop(connection, None)

    def kill(self, dead: Process) -> None:
        """The kernel of a dead process's machine resets its connections and gives its addresses back."""
        for connection in [one for one in self._live if one.owner is dead]:
            connection.close()
        for address in [address for address, listener in self.listeners.items() if listener.owner is dead]:
            self.listeners[address].close()


class SimulatedTransport:
    """A `Transport` of one machine."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def connect(self, address: str) -> "SimulatedConnection":
        owner = _this_process()
        network = self._network
        deadline = trio.current_time() + CONNECT_SECONDS
        await _sleep(network.latency())
        while True:
            await owner.machine.turn()
            owner.check()
            listener = network.listeners.get(address)
            if listener is None:
                raise PeerUnreachable(f"{address} can't be reached: Connection refused")
            there = listener.owner.machine
            if there.thawed is None and network.is_open(owner.machine, there) and network.is_open(there, owner.machine):
                break
            if trio.current_time() >= deadline:
                raise PeerUnreachable(f"{address} doesn't take connections within {CONNECT_SECONDS:g} s")
            await trio.sleep(0.25)
        mine, theirs = SimulatedConnection(network, owner), SimulatedConnection(network, listener.owner)
        mine.other, theirs.other = theirs, mine
        network.add(mine)
        network.add(theirs)
        listener.take(theirs)
        return mine

    def listen(self, address: str) -> "SimulatedListener":
        owner = _this_process()
        owner.check()
        if address in self._network.listeners:
            raise OSError(98, "Address already in use")
        return SimulatedListener(self._network, owner, address)


class SimulatedListener:
    """A `Listener`."""

    def __init__(self, network: Network, owner: Process, address: str) -> None:
        self.owner = owner
        self.address = address
        self._network = network
        self._send, self._receive = trio.open_memory_channel[SimulatedConnection](math.inf)
        network.listeners[address] = self

    def take(self, connection: "SimulatedConnection") -> None:
        self._send.send_nowait(connection)

    async def accept(self) -> "SimulatedConnection":
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise trio.ClosedResourceError from None

    def close(self) -> None:
        if self._network.listeners.get(self.address) is self:
            del self._network.listeners[self.address]
        self._send.close()


class SimulatedConnection:
    """A `Connection`."""

    def __init__(self, network: Network, owner: Process) -> None:
        self.peer_node: str | None = None
        self.owner = owner
        self.other: SimulatedConnection | None = None
        self._network = network
        self._arriving: deque[tuple[float, memoryview]] = deque()
        self._ends_at = math.inf
        self._broken = self._closed = False
        self._changed = trio.Event()

    async def send(self, head: Buffer, payload: Buffer | None = None) -> None:
        await trio.lowlevel.checkpoint()
        await self.owner.machine.turn()
        self._send(head, payload)

    def send_in_thread(self, head: Buffer, payload: Buffer | None = None) -> None:
        in_turn(lambda: self._send(head, payload))

    def _send(self, head: Buffer, payload: Buffer | None) -> None:
        self.owner.check()
        network, other = self._network, self.other
        if network.resets_left and network.chance.random() < 0.1:
            network.resets_left -= 1
            late = network.chance.random() < 0.5  # the other side has it all the same, and its answer gets nowhere
            if late and other is not None and not self._closed:
                other.arrive(bytes(head) + (b"" if payload is None else bytes(payload)))
            else:
                self.reset()
        if self._broken or self._closed or other is None or other._closed:
            raise PeerUnreachable("the peer went away: Connection reset by peer")
        other.arrive(bytes(head) + (b"" if payload is None else bytes(memoryview(payload).cast("B"))))

    def arrive(self, data: bytes) -> None:
        newest = self._arriving[-1][0] if self._arriving else 0.0
        self._arriving.append((max(newest, world.seconds() + self._network.latency()), memoryview(data)))
        self.changed()

    async def receive(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        await trio.lowlevel.checkpoint()
        limit = STALL_SECONDS if seconds is None else seconds
        deadline = trio.current_time() + limit
        done = 0
        while True:
            await self.owner.machine.turn()
            self.owner.check()
            for part in self._taken(len(buffer) - done):
                if not done:
                    limit, deadline = STALL_SECONDS, trio.current_time() + STALL_SECONDS
                buffer[done : done + len(part)] = part
                done += len(part)
            if done == len(buffer):
                return True
            now = trio.current_time()
            if self._broken or self._closed:
                raise PeerUnreachable("the peer went away: Connection reset by peer")
            if not self._arriving and self._ends_at <= now and self._is_open():
                if done:
                    raise PeerUnreachable("the peer closed the connection in the middle")
                return False
            if now >= deadline:
                raise PeerUnreachable(f"the peer hangs: it sent nothing whole for {limit:g} s")
            await self._wait(min(deadline, self._next_at()))

    def send_file_in_thread(self, head: Buffer, descriptor: int, offset: int, length: int) -> None:
        self.send_in_thread(head, os.pread(descriptor, length, offset).ljust(length, b"\0"))

    def receive_in_thread(self, buffer: memoryview, *, seconds: float | None = None) -> bool:
        return bool(wait_in_thread(lambda: self.receive(buffer, seconds=seconds)))

    def _taken(self, wanted: int) -> Iterator[memoryview]:
        while wanted and self._arriving and self._arriving[0][0] <= world.seconds() and self._is_open():
            at, data = self._arriving.popleft()
            if len(data) > wanted:
                self._arriving.appendleft((at, data[wanted:]))
            part = data[:wanted]
            wanted -= len(part)
            yield part

    def _is_open(self) -> bool:
        assert self.other is not None
        there = self.other.owner.machine
        return there.thawed is None and self._network.is_open(there, self.owner.machine)

    def _next_at(self) -> float:
        if not self._is_open():
            return math.inf
        return self._arriving[0][0] if self._arriving else self._ends_at

    async def _wait(self, until: float) -> None:
        changed = self._changed
        with trio.CancelScope(deadline=until):
            await changed.wait()

    def changed(self) -> None:
        if self._changed.statistics().tasks_waiting:
            self._changed.set()
            self._changed = trio.Event()

    def has_input(self) -> bool:
        now = world.seconds()
        return self._broken or self._closed or self._ends_at <= now or bool(self._arriving and self._arriving[0][0] <= now)

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint()
        self.close()

    def reset(self) -> None:
        """Both ends lose what is under way."""
        for end in (self, self.other):
            if end is not None:
                end._broken = True
                end._arriving.clear()
                end.changed()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._network.remove(self)
        self.changed()
        if self.other is not None:
            newest = self.other._arriving[-1][0] if self.other._arriving else world.seconds()
            self.other._ends_at = newest
            self.other.changed()


async def _sleep(seconds: float) -> None:
    if seconds:
        await trio.sleep(seconds)
    else:
        await trio.lowlevel.checkpoint()


def _this_process() -> Process:
    now = process.get()
    assert now is not None
    return now


class LocalSocket:
    """A `LocalClient` to a process of the same machine, found by `find` when it is asked."""

    def __init__(self, find: Callable[[], "LocalServer | None"]) -> None:
        self._find = find

    async def call(self, request: dict[str, object], *, timeout_seconds: float = 10.0) -> dict[str, object]:
        from ckptfs.fs.local_socket import NodeNotAnswering

        with trio.move_on_after(timeout_seconds):
            server = self._find()
            if server is None:
                raise NodeNotAnswering("nobody listens")
            return await server.ask(request)
        raise NodeNotAnswering(f"no answer for {timeout_seconds:g} s")

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


class LocalServer:
    """The socket of one process, whose tasks answer."""

    def __init__(self, owner: Process, nursery: trio.Nursery, answer: Callable[[dict[str, object]], "object"]) -> None:
        self._owner = owner
        self._nursery = nursery
        self._answer = answer

    async def ask(self, request: dict[str, object]) -> dict[str, object]:
        import msgspec

        from ckptfs.fs.local_socket import NodeNotAnswering

        await self._owner.machine.turn()
        if not self._owner.alive or self._nursery.cancel_scope.cancel_called:
            raise NodeNotAnswering("it ends")
        asked = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
        answers: list[dict[str, object]] = []
        done = trio.Event()

        async def work() -> None:
            process.set(self._owner)
            try:
                answers.append(await self._answer(asked))  # type: ignore[misc]
            finally:
                done.set()

        self._nursery.start_soon(work)
        await done.wait()
        if not answers or not self._owner.alive:
            raise NodeNotAnswering("it broke off in the middle of an answer")
        return msgspec.msgpack.decode(msgspec.msgpack.encode(answers[0]))  # type: ignore[no-any-return]
