"""Programs on the simulated nodes that save, replace, append to, rename, remove and read files, and what they were promised.

Every name is worked on by one program at a time, on whichever node, so that what it may show afterwards is known (`promises`).
Readers are free to come at any time; what one reads while nobody changes the name must be right to the byte. What an error
leaves open (a request whose answer was lost, a file half written when its node died) may be found done or not, until it is
settled by what is done next.
"""

import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import trio
from promises import Known, Saved, Shows, grown, part_of
from simulated_mappings import Mapping
from simulated_node import Cluster, Node
from virtual_machine import world

from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode

ROOT = 1
OPEN_ERRORS = (errno.EBUSY, errno.ESTALE, errno.ENOENT)
"""With these an open had no effect: another node writes the file, or the name leads elsewhere."""

CALLS = ("save", "save", "save", "replace", "replace", "append", "map", "unlink", "rename", "read", "read", "read")
AWAY = (errno.EIO, errno.ENOTCONN, errno.ENOSPC)
WAIT_SECONDS_MAX = 400.0
LOCAL_SECONDS_MAX = 1.0
"""What a write or close may take at most on a machine that is neither frozen nor restarts its mount (R13)."""


class Clients:
    """The programs. `names` are those in the root."""

    def __init__(self, cluster: Cluster, chance: Random, names: str) -> None:
        self.cluster = cluster
        self.known = {name: Known() for name in names}
        self.is_ending = False
        self._chance = chance
        self._names = sorted(names)
        self._number = 0
        self._mappings: list[Mapping] = []
        self._lost: set[int] = set()
        self.counts: dict[str, int] = {}

    async def work(self) -> None:
        """One thing after the other, until it is to end."""
        while not self.is_ending:
            await trio.sleep(self._chance.expovariate(3.0))
            await self.step()

    async def step(self) -> None:
        up = [node for node in self.cluster.nodes if node.connection]
        if not up:
            return
        node, chance = self._chance.choice(up), self._chance
        name, other = chance.sample(self._names, 2)
        what = chance.choice(CALLS)
        with trio.move_on_after(WAIT_SECONDS_MAX) as scope:
            match what:
                case "read":
                    await self.read(node, name)
                case "rename":
                    first, second = sorted((name, other))
                    async with self._changing(first), self._changing(second):
                        await self._rename(node, name, other)
                case "replace":
                    async with self._changing(name):
                        await self._replace(node, name)
                case _:
                    async with self._changing(name):
                        await self._change(what, node, name)
        if scope.cancelled_caught:
            self.cluster.problem(f"{what} {name} on {node.machine.name} has not ended after {WAIT_SECONDS_MAX:g} s")

    async def _change(self, what: str, node: Node, name: str) -> None:
        match what:
            case "save":
                await self._save(node, name)
            case "append":
                await self._append(node, name)
            case "map":
                await self._save_mapped(node, name)
            case "unlink":
                await self._unlink(node, name)

    @asynccontextmanager
    async def _changing(self, name: str) -> AsyncIterator[None]:
        known = self.known[name]
        async with known.lock:
            known.is_changing = True
            known.changes += 1
            try:
                yield
            finally:
                known.is_changing = False
                known.changes += 1

    def _note(self, node: Node, what: str) -> None:
        self.counts[what.split()[0]] = self.counts.get(what.split()[0], 0) + 1
        self.cluster.note(f"{node.machine.name} {what}")

    def _content(self) -> bytes:
        self._number += 1
        chance = Random(f"{self._number}")
        size = self._chance.choice((0, 1, 700, 1900, 5000, 9000, 20_000))
        return self._number.to_bytes(4) * (size > 4) + chance.randbytes(max(0, size - 4))

    # ---- calls

    async def lookup(self, node: Node, name: str) -> int | None:
        """The inode a name leads to."""
        try:
            answer = await node.ask(Opcode.LOOKUP, ROOT, name.encode() + b"\0")
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return int(fuse.ENTRY_OUT.unpack_from(answer)[0])

    async def _open(self, node: Node, name: str, flags: int) -> int | None:
        """A handle, None if the name does not exist; looked up again once, as the kernel does it, if it moved meanwhile."""
        for attempt in range(2):
            ino = await self.lookup(node, name)
            if ino is None:
                return None
            try:
                return int(fuse.OPEN_OUT.unpack(await node.ask(Opcode.OPEN, ino, fuse.OPEN_IN.pack(flags, 0)))[0])
            except OSError as error:
                if error.errno != errno.ESTALE or attempt:
                    raise
        return None

    async def _create_or_truncate(self, node: Node, name: str) -> tuple[int, int | None]:
        """The handle, and the file's home, if it is known: of one that was there it may be another node."""
        fh = await self._open(node, name, os.O_WRONLY | os.O_TRUNC)
        if fh is not None:
            return fh, None
        body = fuse.CREATE_IN.pack(os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o100644, 0, 0) + name.encode() + b"\0"
        answer = await node.ask(Opcode.CREATE, ROOT, body)
        return int(fuse.OPEN_OUT.unpack(answer[-fuse.OPEN_OUT.size :])[0]), node.machine.number

    async def _local(self, node: Node, opcode: int, body: bytes) -> bytes:
        """A call that must not wait for anybody (R13)."""
        mount, began, boot = node.mount, world.seconds(), node.machine.thawed
        handle = None if mount is None else mount.open_files.handle(int.from_bytes(body[:8], "little"))
        is_home = handle is not None and handle.file.is_home
        answer: bytes = await node.ask(opcode, 0, body)
        took = world.seconds() - began
        if (
            took > LOCAL_SECONDS_MAX
            and is_home
            and node.mount is mount
            and boot is None
            and not node.machine.was_frozen_since(began)
        ):
            self.cluster.problem(f"{Opcode(opcode).name} on {node.machine.name} took {took:.3f} s")
        return answer

    async def _write(self, node: Node, fh: int, data: bytes, at: int = 0) -> None:
        for offset in range(0, len(data), 6000):
            part = data[offset : offset + 6000]
            await self._local(node, Opcode.WRITE, fuse.WRITE_IN.pack(fh, at + offset, len(part), 0, 0, 0, 0) + part)
            if self._chance.random() < 0.2:
                await trio.sleep(self._chance.choice((0.01, 0.5, 2.5)))

    async def _release(self, node: Node, fh: int) -> None:
        """close(2) doesn't wait for this request, but for FLUSH before it."""
        await self._local(node, Opcode.FLUSH, fh.to_bytes(8, "little") + bytes(16))
        await node.ask(Opcode.RELEASE, 0, fuse.RELEASE_IN.pack(fh, 0, 0, 0))

    async def _write_and_close(self, node: Node, fh: int, data: bytes, at: int = 0, mapping: Mapping | None = None) -> bool:
        """Whether it was synced. Raises `OSError`; the handle is closed all the same where that can be."""
        try:
            await self._write(node, fh, data, at)
            if mapping is not None:
                mapping.begin(fh)
            synced = self._chance.random() < 0.3
            if synced:
                await node.ask(Opcode.FSYNC, 0, fuse.FSYNC_IN.pack(fh, 0, 0))
        except OSError:
            if node.connection:
                with suppress(OSError):
                    await self._release(node, fh)
            raise
        await self._release(node, fh)
        return synced

    # ---- what programs do, alone with their names

    async def _save(self, node: Node, name: str, mapping: Mapping | None = None) -> bool:
        known, content = self.known[name], self._content()
        boots = self._boots()
        try:
            fh, home = await self._create_or_truncate(node, name)
        except OSError as error:
            self._note(node, f"save {name} not opened: {errno.errorcode.get(error.errno or 0)}")
            if error.errno not in OPEN_ERRORS:
                known.doubted(Shows(b""))
            return False
        known.doubted(part_of(content))
        try:
            synced = await self._write_and_close(node, fh, content, mapping=mapping)
        except OSError as error:
            self._note(node, f"save {name} failed: {errno.errorcode.get(error.errno or 0)}")
            known.doubted(part_of(content), Shows(None))
            return False
        if self._had_power(boots, home):
            self._closed(known, Saved(Shows(content), home, synced))
        self._note(node, f"saved {name} size={len(content)} synced={synced}")
        return True

    async def _save_mapped(self, node: Node, name: str) -> None:
        """Save, and go on storing through a mapping of the file after it is closed."""
        known, mapping = self.known[name], Mapping(node)
        self._mappings.append(mapping)
        try:
            if not await self._save(node, name, mapping):
                return
            over: list[bytes] = []
            for _ in range(self._chance.randint(1, 3)):
                await trio.sleep(self._chance.choice((0.1, 1.0, 3.0)))
                await node.machine.turn()
                if not mapping.is_there:
                    return
                content, over = mapping.next_content(self._chance), [*over, mapping.content]
                known.doubted(part_of(content, over))
                mapping.store(content)
                self._note(node, f"mapped {name} {content[:4].hex()}")
            self._closed(known, Saved(Shows(content, over=over), node.machine.number))
        finally:
            mapping.close()
            self._mappings.remove(mapping)

    async def _replace(self, node: Node, name: str) -> None:
        temporary = f"{name}.tmp{self._number}"
        self.known[temporary] = Known()
        try:
            if await self._save(node, temporary):
                await self._rename(node, temporary, name)
            else:
                await node.ask(Opcode.UNLINK, ROOT, temporary.encode() + b"\0")
        except OSError:
            pass
        finally:
            del self.known[temporary]

    async def _append(self, node: Node, name: str) -> None:
        known = self.known[name]
        before, over, more = known.newest.shows.content, known.newest.shows.over, self._content()
        if known.undecided or known.lost_with is not None or not before or not more:
            return
        boots = self._boots()
        try:
            fh = await self._open(node, name, os.O_WRONLY)
        except OSError as error:
            self._note(node, f"append {name} not opened: {errno.errorcode.get(error.errno or 0)}")
            return
        if fh is None:
            self.cluster.problem(f"{name} is not there for {node.machine.name}: it should show {known}")
            return
        whole = before + more
        known.doubted(grown(before, whole, over))
        try:
            synced = await self._write_and_close(node, fh, more, len(before))
        except OSError as error:
            self._note(node, f"append {name} failed: {errno.errorcode.get(error.errno or 0)}")
            return
        if self._had_power(boots, None):
            # An append in place: what was there before is in the same file, and a power cut may take what is new.
            known.newest.shows = grown(before, whole, over)
            self._closed(known, Saved(Shows(whole, over=over), None, synced))
        self._note(node, f"appended {name} size={len(whole)} synced={synced}")

    async def _unlink(self, node: Node, name: str) -> None:
        known = self.known[name]
        try:
            await node.ask(Opcode.UNLINK, ROOT, name.encode() + b"\0")
        except OSError as error:
            self._note(node, f"unlink {name}: {errno.errorcode.get(error.errno or 0)}")
            if error.errno == errno.ENOENT:
                if not known.allows(None):
                    self.cluster.problem(f"unlink of {name} on {node.machine.name} found nothing: it should show {known}")
                known.settled(Saved(Shows(None), None, True, True))
            else:
                known.doubted(Shows(None))
            return
        known.settled(Saved(Shows(None), None, True, True))
        self._note(node, f"unlinked {name}")

    async def _rename(self, node: Node, name: str, other: str) -> None:
        known, target = self.known[name], self.known[other]
        body = fuse.RENAME2_IN.pack(ROOT, 0, 0) + name.encode() + b"\0" + other.encode() + b"\0"
        boot = node.machine.boot
        before = list(known.history)
        try:
            await node.ask(Opcode.RENAME2, ROOT, body)
        except OSError as error:
            self._note(node, f"rename {name} {other}: {errno.errorcode.get(error.errno or 0)}")
            if error.errno == errno.ENOENT:
                if not known.allows(None):
                    self.cluster.problem(f"rename of {name} on {node.machine.name} found nothing: it should show {known}")
                known.settled(Saved(Shows(None), None, True, True))
            elif error.errno not in OPEN_ERRORS:
                if known.lost_with is not None:
                    target.lost_with = known.lost_with
                    target.doubted(*(saved.shows for saved in before))
                target.doubted(before[-1].shows, *known.undecided)
                known.doubted(Shows(None))
            return
        newest, undecided, lost_with, is_touched = before[-1], list(known.undecided), known.lost_with, known.is_touched
        replaced = target.down_to_safe() if undecided else []
        target.settled(Saved(newest.shows, newest.home, newest.is_safe, newest.is_protected))
        target.may_fall_back_to(before[:-1])
        target.doubted(*undecided, *replaced)  # what is moved may turn out to be lost: then what it replaced is shown again
        target.lost_with, target.is_touched = lost_with, is_touched
        if node.machine.boot != boot:
            target.power_was_cut(node.machine.number)
        known.settled(Saved(Shows(None), None, True, True))
        self._note(node, f"renamed {name} {other}")

    # ---- readers

    async def read(self, node: Node, name: str) -> bool:
        """Read the whole file, and compare; whether it could be."""
        known = self.known[name]
        changes, was_changing = known.changes, known.is_changing
        try:
            found = await self._contents(node, name)
        except OSError as error:
            self._note(node, f"read {name}: {errno.errorcode.get(error.errno or 0)}")
            if known.changes == changes and not was_changing and error.errno not in (*AWAY, errno.ESTALE):
                self.cluster.problem(f"reading {name} on {node.machine.name}: {error}")
            return False
        what = "nothing" if found is None else f"{len(found)} bytes {found[:4].hex()}"
        self._note(node, f"read {name} {what}")
        if known.changes == changes and not was_changing and not known.allows(found):
            self.cluster.problem(f"{name} shows {what} on {node.machine.name}: it should show {known}")
        return True

    async def _contents(self, node: Node, name: str) -> bytes | None:
        fh = await self._open(node, name, os.O_RDONLY)
        if fh is None:
            return None
        found = bytearray()
        try:
            while True:
                part = await node.ask(Opcode.READ, 0, fuse.READ_IN.pack(fh, len(found), 16384, 0, 0, 0, 0))
                found += part
                if len(part) < 16384:
                    return bytes(found)
        finally:
            if node.connection:
                with trio.CancelScope(shield=True), trio.move_on_after(60.0), suppress(OSError):
                    await self._release(node, fh)

    def power_was_cut(self, machine: int) -> None:
        for mapping in self._mappings:
            if mapping.node.machine.number == machine:
                mapping.close()
        for known in self.known.values():
            known.power_was_cut(machine)

    def _boots(self) -> list[int]:
        return [node.machine.boot for node in self.cluster.nodes]

    def _had_power(self, boots: list[int], home: int | None) -> bool:
        """Whether the home had it all the time since. Else what was written before it went is gone, and close doesn't say so."""
        now = self._boots()
        return now == boots if home is None else now[home] == boots[home]

    def _closed(self, known: Known, saved: Saved) -> None:
        """Also on a node that was cut off for so long that its store was declared lost: others see it when that returns."""
        known.settled(saved)
        for machine in sorted(self._lost):
            known.store_lost(machine)

    def store_lost(self, machine: int, *, is_gone: bool) -> None:
        """`is_gone`: the machine has another one now."""
        if not is_gone:
            self._lost.add(machine)
        for known in self.known.values():
            known.store_lost(machine)

    def store_made(self, machine: int) -> None:
        self._lost.discard(machine)

    def store_returned(self, machine: int) -> None:
        self._lost.discard(machine)
        for known in self.known.values():
            known.store_returned(machine)
