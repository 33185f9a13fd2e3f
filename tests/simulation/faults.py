"""What goes wrong in a simulated cluster, and when: each seed takes some kinds of fault, and leaves the others out."""

import os
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import trio
from invariants import Invariants
from simulated_clients import Clients
from simulated_node import CATALOG, Cluster, Node
from virtual_machine import world

LOSS_SECONDS_MAX = 25.0


class Faults:
    """`run` makes one after the other until it is to end; `heal` ends all that last."""

    def __init__(
        self, cluster: Cluster, clients: Clients, invariants: Invariants, chance: Random, only: Sequence[str] = ()
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._invariants = invariants
        self._chance = chance
        kinds: list[Callable[[], Awaitable[None]]] = [
            self.kill_mount,
            self.kill_before_answer,
            self.kill_agent,
            self.kill_node,
            self.cut_power,
            self.lose_store,
            self.freeze,
            self.cut_link,
            self.isolate,
            self.etcd_away,
            self.cut_from_etcd,
            self.lose_requests,
            self.reset_connections,
            self.break_watches,
            self.delay_watches,
            self.compact,
            self.flip_bit,
            self.fill_drive,
            self.set_clock,
        ]
        self._wiped: set[int] = set()
        self.ending = trio.Event()
        """Set when nothing is to go wrong any more."""
        self.kinds = chance.sample(kinds, chance.randint(2, 6))
        if only:
            self.kinds = [kind for kind in kinds if kind.__name__ in only]

    async def run(self) -> None:
        while not self.ending.is_set():
            await trio.sleep(self._chance.uniform(0.1, 2.5))
            kind = self._chance.choice(self.kinds)
            self._cluster.note(f"FAULT {kind.__name__}")
            await kind()
        await self.heal()

    async def heal(self) -> None:
        """Everything works again, and every node is up."""
        cluster = self._cluster
        cluster.network.heal()
        cluster.network.resets_left = cluster.etcd.losses_left = cluster.etcd.breaks_left = 0
        cluster.etcd.is_away, cluster.etcd.watch_delay_seconds = False, 0.0
        cluster.etcd.cut_off.clear()
        for node in cluster.nodes:
            node.machine.thaw()
            node.machine.full = False
            node.kills_before_answer = 0
            node.machine.skew_seconds = 0.0
        cluster.network.stir()
        for node in cluster.nodes:
            if not node.is_up:
                await node.start()

    def _up(self) -> Node | None:
        up = [node for node in self._cluster.nodes if node.connection]
        return self._chance.choice(up) if up else None

    async def _while_it_lasts(self) -> None:
        with trio.move_on_after(self._chance.choice((0.05, 0.5, 2.0, 2.0, 5.0, 12.0))):
            await self.ending.wait()

    # ---- processes and machines

    async def kill_mount(self) -> None:
        if (node := self._up()) is not None:
            await node.kill_process("mount")

    async def kill_before_answer(self) -> None:
        """Of requests that were carried out."""
        if (node := self._up()) is not None:
            node.kills_before_answer += self._chance.randint(1, 3)

    async def kill_agent(self) -> None:
        if (node := self._up()) is not None:
            await node.kill_process("agent")

    async def kill_node(self) -> None:
        if (node := self._up()) is not None:
            await node.kill()
            await self._while_it_lasts()
            await node.start()

    async def cut_power(self) -> None:
        if (node := self._up()) is not None:
            await self._invariants.look()
            await node.cut_power()
            self._clients.power_was_cut(node.machine.number)
            await self._while_it_lasts()
            await node.start()

    async def lose_store(self) -> None:
        """A node is away until its store is declared lost, and often until what only it had is rolled back. Meanwhile other
        things go wrong. Before, it often is one that nothing of gets to others."""
        if (node := self._up()) is None:
            return
        if self._chance.random() < 0.7:
            self._cut_from_others(node)
            await trio.sleep(self._chance.uniform(1.0, 6.0))
        await self._invariants.look()
        if self._chance.random() < 0.5:
            await node.kill()
        else:
            await node.cut_power()
            self._clients.power_was_cut(node.machine.number)
        self._cluster.network.heal()
        if self._chance.random() < 0.3 and self._may_harm(node.machine.number):
            await self._wipe(node)
            return
        with trio.move_on_after(LOSS_SECONDS_MAX):
            while not self._invariants.catalog.is_lost(node.store.store_id) and not self.ending.is_set():
                await trio.sleep(self._chance.uniform(0.5, 1.5))
                if self._chance.random() < 0.3:
                    await self._chance.choice((self.kill_agent, self.kill_mount, self.lose_requests, self.reset_connections))()
        with trio.move_on_after(self._chance.uniform(0.1, 8.0)):
            await self.ending.wait()
        await node.start()

    async def _wipe(self, node: Node) -> None:
        """It comes back with a store made anew; the old one is never seen again (R10)."""
        self._wiped.add(node.machine.number)
        node.replace_drive()
        with trio.move_on_after(self._chance.choice((0.1, 20.0))):
            await self.ending.wait()
        await node.start()

    def _may_harm(self, number: int) -> bool:
        """Whether what this machine's drive holds may go: that of one only, so that every version keeps enough."""
        return self._invariants.damaged | self._wiped <= {number}

    def _cut_from_others(self, alone: Node) -> None:
        for node in self._cluster.nodes:
            if node is not alone:
                self._cluster.network.cut(alone.machine, node.machine)
                self._cluster.network.cut(node.machine, alone.machine)

    async def freeze(self) -> None:
        if (node := self._up()) is not None:
            node.machine.freeze()
            await self._while_it_lasts()
            node.machine.thaw()
            self._cluster.network.stir()

    # ---- the network

    async def cut_link(self) -> None:
        """One way."""
        source, target = self._chance.sample(self._cluster.nodes, 2)
        self._cluster.network.cut(source.machine, target.machine)
        await self._while_it_lasts()
        self._cluster.network.heal()

    async def isolate(self) -> None:
        alone = self._chance.choice(self._cluster.nodes)
        self._cut_from_others(alone)
        if self._chance.random() < 0.5:
            self._cluster.etcd.cut_off.add(alone.machine.number)
        await self._while_it_lasts()
        self._cluster.network.heal()
        self._cluster.etcd.cut_off.clear()

    async def reset_connections(self) -> None:
        self._cluster.network.resets_left += self._chance.randint(1, 5)

    # ---- etcd

    async def etcd_away(self) -> None:
        self._cluster.etcd.is_away = True
        self._cluster.etcd.stir()
        await self._while_it_lasts()
        self._cluster.etcd.is_away = False

    async def cut_from_etcd(self) -> None:
        node = self._chance.choice(self._cluster.nodes)
        self._cluster.etcd.cut_off.add(node.machine.number)
        self._cluster.etcd.stir()
        await self._while_it_lasts()
        self._cluster.etcd.cut_off.discard(node.machine.number)

    async def lose_requests(self) -> None:
        self._cluster.etcd.losses_left += self._chance.randint(1, 8)

    async def break_watches(self) -> None:
        self._cluster.etcd.breaks_left += self._chance.randint(1, 5)

    async def delay_watches(self) -> None:
        self._cluster.etcd.watch_delay_seconds = self._chance.choice((0.1, 1.0))
        await self._while_it_lasts()
        self._cluster.etcd.watch_delay_seconds = 0.0

    async def compact(self) -> None:
        """As R19 does it, but far nearer: the watches that have seen less begin anew."""
        etcd = self._cluster.etcd
        revision = max(etcd.compacted + 1, etcd.revision - self._chance.choice((0, 1, 2, 10)))
        node = self._up()
        if node is not None and node.mount is not None and self._chance.random() < 0.7:  # just where its watch goes on
            etcd.cut_off.add(node.machine.number)
            etcd.stir()
            await self._while_it_lasts()
            etcd.cut_off.discard(node.machine.number)
            if node.mount is not None and node.mount.replica is not None:
                revision = max(etcd.compacted + 1, min(node.mount.replica._revision + 1, etcd.revision))
        put = {"request_put": {"key": CATALOG.encode() + b"/c/compact", "value": b"%d" % revision}}
        etcd.answer("/v3/kv/txn", {"compare": [], "success": [put]})
        etcd.answer("/v3/kv/compaction", {"revision": revision})

    # ---- drives and clocks

    async def flip_bit(self) -> None:
        """In the shards of one machine only, so that every version keeps enough."""
        damaged = self._invariants.damaged
        number = next(iter(damaged | self._wiped), None)
        if number is None:
            number = self._chance.randrange(len(self._cluster.nodes))
        node = self._cluster.nodes[number]
        if not hasattr(node, "store"):
            return
        found = sorted(str(path) for path in node.store.shards.rglob("*") if path.suffix[1:].isdigit())
        if not found:
            return
        damaged.add(number)
        path = self._chance.choice(found)
        with open(path, "r+b") as file:
            at = self._chance.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._chance.randrange(8)]))
        status = os.stat(path)
        os.utime(path, ns=(status.st_atime_ns, int(world.wall_seconds() * 1e9)))

    async def fill_drive(self) -> None:
        node = self._chance.choice(self._cluster.nodes)
        node.machine.full = True
        await self._while_it_lasts()
        node.machine.full = False

    async def set_clock(self) -> None:
        node = self._chance.choice(self._cluster.nodes)
        node.drive.keeps_segments = True
        node.machine.skew_seconds = self._chance.choice((-3600.0, -2.0, 0.0, 2.0, 3600.0))
