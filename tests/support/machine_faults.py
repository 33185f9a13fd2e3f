"""What happens to machines: a schedule that a seed decides, and how each fault is begun and taken back."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs.fs.node_processes import started_with
from machines import NOTHING_PASSES, Machines
from wrong_clock import WrongClock

EVERY_SECONDS = 1.0
"""Two faults begin that far apart, on the average."""

SKEW_SECONDS_MAX = 3000
"""Clocks have to be right to the hour, for certificates begin an hour before they were issued."""

LONG_SECONDS = (11.0, 25.0)
"""Longer than a session lasts: the node is taken for away, and comes back."""

LEFT_BYTES_MAX = 400_000
KINDS = {
    "kill mount": 3,
    "kill agent": 3,
    "kill node": 3,
    "kill supervisor": 1,
    "kill several": 1,
    "end node": 2,
    "freeze mount": 1,
    "freeze agent": 2,
    "freeze supervisor": 1,
    "freeze node": 2,
    "cut": 2,
    "cut what it sends": 2,
    "cut what it receives": 2,
    "slow": 3,
    "fill": 2,
    "flip": 3,
    "clock": 4,
    "freeze etcd": 1,
    "kill etcd": 1,
}
"""And how often, compared."""
ROLES = ("supervisor", "mount", "agent")
NO_NODE = -1


@dataclass(frozen=True)
class Fault:
    """`node` is `NO_NODE` where it is etcd's; `value` is chance for what the kind needs, 0 to 1."""

    at_seconds: float
    until_seconds: float
    kind: str
    node: int
    value: float

    def __str__(self) -> str:
        whose = "" if self.node == NO_NODE else f" on {self.node}"
        return f"{self.at_seconds:.2f} to {self.until_seconds:.2f} s: {self.kind}{whose} ({self.value:.3f})"


def schedule(chance: random.Random, seconds: float, nodes: int) -> list[Fault]:
    """Faults that begin within so many seconds, in order. Of each kind a node has one at a time."""
    drawn: list[str] = []
    found: list[Fault] = []
    bad_drive = chance.randrange(nodes)
    at = 0.2
    while at < seconds:
        if not drawn:  # as cards are: in a short run too every kind comes before one comes too often
            drawn = [kind for kind, often in KINDS.items() for _ in range(often)]
            chance.shuffle(drawn)
        kind = drawn.pop()
        node = NO_NODE if "etcd" in kind else bad_drive if kind == "flip" else chance.randrange(nodes)
        length = chance.uniform(*LONG_SECONDS) if chance.random() < 0.12 else chance.uniform(0.3, 5)
        if kind == "kill etcd":
            length = min(length, 5)
        if not any((one.kind, one.node) == (kind, node) and one.until_seconds >= at for one in found):
            found.append(Fault(at, min(at + length, seconds), kind, node, chance.random()))
        at += chance.expovariate(1 / EVERY_SECONDS)
    return found


class MachineFaults:
    """Begins faults on machines whose nodes were started by it, and takes them back."""

    def __init__(self, machines: Machines, etcd: Any, clocks: list[WrongClock], drives: list[Path]) -> None:
        self._machines = machines
        self._etcd = etcd
        self._clocks = clocks
        self._drives = drives
        self._down: dict[int, int] = {}
        """How many faults keep the node down."""
        self._slowed: dict[tuple[int, str], int] = {}
        self._stopped: dict[int, list[int]] = {}
        self.happened: dict[str, int] = {}

    def start(self, number: int) -> None:
        """Start the node again, unless it runs or begins to."""
        node = self._machines.nodes[number]
        if node.processes.pids()["supervisor"] is None and not started_with(node.config):
            node.kill()
            self._machines.start(number, self._clocks[number].environment)

    def run(self, faults: list[Fault], is_over: Callable[[], bool]) -> None:
        """Let them happen at their times. Returns early, with some of them under way, when it is over."""
        began = time.monotonic()
        steps = sorted(
            [(one.at_seconds, 1, at) for at, one in enumerate(faults)]
            + [(one.until_seconds, 0, at) for at, one in enumerate(faults)]
        )
        for at_seconds, begins, at in steps:
            while (left := began + at_seconds - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
                if is_over():
                    return
            fault = faults[at]
            if begins:
                self.happened[fault.kind] = self.happened.get(fault.kind, 0) + 1
            self._do(fault, begins=bool(begins))

    def heal(self) -> None:
        """Whatever is under way is taken back; nodes that are down are started in turn until all run."""
        for pids in self._stopped.values():
            _send(pids, signal.SIGCONT)
        self._etcd.process.send_signal(signal.SIGCONT)
        if self._etcd.process.poll() is not None:
            self._etcd.start()
        for number in range(len(self._machines.nodes)):
            self._machines.cut(number, off=False)
            for limit in (self._machines.limit_sent, self._machines.limit_received):
                with contextlib.suppress(Exception):
                    limit(number)
            (self._drives[number] / "filler").unlink(missing_ok=True)
            self._clocks[number].set(0)

    def _do(self, fault: Fault, *, begins: bool) -> None:
        first, _, rest = fault.kind.partition(" ")
        {
            "kill": self._kill,
            "end": self._end,
            "freeze": self._freeze,
            "cut": self._cut,
            "slow": self._slow,
            "fill": self._fill,
            "flip": self._flip,
            "clock": self._clock,
        }[first](fault, rest, begins)

    def _kill(self, fault: Fault, what: str, begins: bool) -> None:
        node = self._machines.nodes[fault.node]
        if what == "etcd":
            self._etcd.kill() if begins else self._etcd.start()
        elif what in ("node", "several"):
            count = 1 if what == "node" else 2 + int(fault.value * (len(self._machines.nodes) - 1))
            chance = random.Random(fault.value)
            numbers = [fault.node, *chance.sample([n for n in range(len(self._machines.nodes)) if n != fault.node], count - 1)]
            if begins:
                for number in numbers:
                    self._down[number] = self._down.get(number, 0) + 1
                    self._machines.nodes[number].kill()
            else:
                self._let_start(numbers)
        elif begins and (pid := node.processes.pids()[what]) is not None:
            _send([pid], signal.SIGKILL)
            if what == "supervisor":
                self._down[fault.node] = self._down.get(fault.node, 0) + 1
        elif not begins and what == "supervisor":
            self._let_start([fault.node])

    def _end(self, fault: Fault, _: str, begins: bool) -> None:
        """SIGTERM: it protects what it can first, so it may go on for long."""
        pid = self._machines.nodes[fault.node].processes.pids()["supervisor"]
        if begins and pid is not None:
            _send([pid], signal.SIGTERM)
        elif not begins:
            self._let_start([fault.node])

    def _let_start(self, numbers: list[int]) -> None:
        for number in numbers:
            self._down[number] = max(0, self._down.get(number, 0) - 1)
            if not self._down[number]:
                self.start(number)

    def _freeze(self, fault: Fault, what: str, begins: bool) -> None:
        if what == "etcd":
            self._etcd.process.send_signal(signal.SIGSTOP if begins else signal.SIGCONT)
            return
        if begins:
            pids = self._machines.nodes[fault.node].processes.pids()
            found = [pid for role in ROLES if what in (role, "node") and (pid := pids[role]) is not None]
            self._stopped[hash(fault)] = found
            _send(found, signal.SIGSTOP)
        else:
            _send(self._stopped.pop(hash(fault), []), signal.SIGCONT)

    def _cut(self, fault: Fault, what: str, begins: bool) -> None:
        if not what:
            self._machines.cut(fault.node, off=begins)
        else:
            self._limit(fault.node, what.endswith("receives"), NOTHING_PASSES if begins else ())

    def _slow(self, fault: Fault, _: str, begins: bool) -> None:
        """200 kbit/s to 20 Mbit/s."""
        rate = int(200_000 * 100**fault.value)
        for received in (False, True):
            self._limit(fault.node, received, ("rate", str(rate), "burst", "16kb", "latency", "300ms") if begins else ())

    def _limit(self, number: int, received: bool, bucket: tuple[str, ...]) -> None:
        """The last one begun holds, until the last one has ended."""
        limit = self._machines.limit_received if received else self._machines.limit_sent
        key = (number, "received" if received else "sent")
        self._slowed[key] = self._slowed.get(key, 0) + (1 if bucket else -1)
        if bucket or not self._slowed[key]:
            limit(number, *bucket)

    def _fill(self, fault: Fault, _: str, begins: bool) -> None:
        filler = self._drives[fault.node] / "filler"
        filler.unlink(missing_ok=True)
        if begins:
            space = os.statvfs(self._drives[fault.node])
            size = space.f_bavail * space.f_frsize - int(fault.value * LEFT_BYTES_MAX)
            with open(filler, "wb") as file, contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(size, 1))

    def _flip(self, fault: Fault, _: str, begins: bool) -> None:
        """In some shards one bit, somewhere."""
        if not begins:
            return
        chance = random.Random(fault.value)
        shards = list(_files(self._machines.nodes[fault.node].store / "shards"))
        for path in chance.sample(shards, min(len(shards), 1 + int(fault.value * 8))):
            with contextlib.suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
                at = chance.randrange(max(1, os.fstat(file.fileno()).st_size))
                if byte := os.pread(file.fileno(), 1, at):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << chance.randrange(8)]), at)

    def _clock(self, fault: Fault, _: str, begins: bool) -> None:
        self._clocks[fault.node].set(int((2 * fault.value - 1) * SKEW_SECONDS_MAX) if begins else 0)


def _send(pids: list[int], which: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)


def _files(directory: Path) -> Iterator[Path]:
    for at, _, names in sorted(os.walk(directory)):
        yield from (Path(at) / name for name in sorted(names))
