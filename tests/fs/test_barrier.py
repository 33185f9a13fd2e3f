"""Where a mount with a replica asks the catalog itself."""

import errno
from typing import Any

import pytest
import trio
import trio.testing

from ckptfs.cache.catalog_format import FORMAT_VERSION, DirectoryEntry, entry_key, pack
from ckptfs.cache.catalog_kv import Delete, Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import HeldElsewhere, NameExists, NameMoved, NoSuchAttribute, NoSuchName
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.barrier import behind_barrier
from ckptfs.fs.fuse_format import Opcode, RequestHeader


class Lagging(MemoryCatalog):
    """Counts its barriers."""

    caught_up = 0
    open_gate: trio.Event | None = None

    async def catch_up(self) -> None:
        self.caught_up += 1
        if self.open_gate is not None:
            await self.open_gate.wait()


def answering(kv: Lagging, until: int, error: Exception) -> Any:
    """A handler that is refused until the catalog has caught up so often."""

    async def handle(header: Any, body: Any) -> bytes:
        if kv.caught_up < until:
            raise error
        return (b"%d" % kv.caught_up).ljust(fuse.ENTRY_OUT.size, b"\0")

    return handle


def header(opcode: Opcode, nodeid: int = 1) -> RequestHeader:
    return RequestHeader(0, opcode, 2, nodeid, 0, 0, 1, 0, 0)


async def ask(opcode: Opcode, until: int, error: Exception) -> tuple[bytes, int]:
    kv = Lagging()
    handlers = behind_barrier({opcode: answering(kv, until, error)}, kv)
    try:
        answer = await handlers[opcode](header(opcode), memoryview(b"name\0"))
    except type(error):
        return b"refused", kv.caught_up
    assert answer is not None
    return bytes(answer).rstrip(b"\0"), kv.caught_up


@pytest.mark.parametrize("opcode", [Opcode.OPEN, Opcode.OPENDIR])
async def test_opens_ask_first(opcode: Opcode) -> None:
    assert await ask(opcode, 0, NoSuchName()) == (b"1", 1)
    assert await ask(opcode, 2, NoSuchName()) == (b"refused", 1)


@pytest.mark.parametrize("opcode", [Opcode.LOOKUP, Opcode.MKDIR, Opcode.UNLINK, Opcode.GETATTR, Opcode.CREATE, Opcode.RENAME2])
@pytest.mark.parametrize("error", [NoSuchName(), NameExists()])
async def test_a_refusal_is_believed_after_a_barrier_only(opcode: Opcode, error: Exception) -> None:
    assert await ask(opcode, 0, error) == (b"0", 0)
    assert await ask(opcode, 1, error) == (b"1", 1)
    assert await ask(opcode, 2, error) == (b"refused", 1)


@pytest.mark.parametrize("error", [NoSuchAttribute(), HeldElsewhere(), OSError(errno.EIO, "")])
async def test_other_answers_need_none(error: Exception) -> None:
    assert await ask(Opcode.GETXATTR, 1, error) == (b"refused", 0)


@pytest.mark.parametrize("opcode", [Opcode.READ, Opcode.WRITE, Opcode.FLUSH, Opcode.RELEASE])
async def test_bytes_never_wait_for_the_catalog(opcode: Opcode) -> None:
    assert await ask(opcode, 1, NoSuchName()) == (b"refused", 0)


async def test_an_open_is_of_what_the_name_leads_to_behind_the_barrier() -> None:
    """The name was looked up in a replica that lagged, when another node had moved the file away already: with O_TRUNC the open
    would have emptied it under its new name."""
    kv = Lagging()
    before, after, ino = entry_key(InodeNumber(1), b"latest"), entry_key(InodeNumber(1), b"previous"), InodeNumber(5)
    entry = pack(DirectoryEntry(FORMAT_VERSION, ino, 0o100000))
    await kv.transact([], [Put(before, entry)])

    async def look_up(header: RequestHeader, body: memoryview) -> bytes:
        return ino.to_bytes(8, "little").ljust(fuse.ENTRY_OUT.size, b"\0")

    async def open_(header: RequestHeader, body: memoryview) -> bytes:
        return b"opened"

    handlers = behind_barrier({Opcode.LOOKUP: look_up, Opcode.OPEN: open_}, kv)
    await handlers[Opcode.LOOKUP](header(Opcode.LOOKUP), memoryview(b"latest\0"))
    assert await handlers[Opcode.OPEN](header(Opcode.OPEN, ino), memoryview(b"")) == b"opened"
    await kv.transact([], [Delete(before), Put(after, entry)])
    with pytest.raises(NameMoved):
        await handlers[Opcode.OPEN](header(Opcode.OPEN, ino), memoryview(b""))
    assert await handlers[Opcode.OPEN](header(Opcode.OPEN, ino), memoryview(b"")) == b"opened"  # by /proc/self/fd
    await handlers[Opcode.LOOKUP](header(Opcode.LOOKUP), memoryview(b"previous\0"))
    assert await handlers[Opcode.OPEN](header(Opcode.OPEN, ino), memoryview(b"")) == b"opened"


async def test_nobody_opens_a_moved_file_by_the_name_it_had_because_another_knows_its_new_one() -> None:
    """An open names the inode alone: of those that wait for the barrier together each may be by the name that moved."""
    kv = Lagging()
    before, after, ino = entry_key(InodeNumber(1), b"latest"), entry_key(InodeNumber(1), b"previous"), InodeNumber(5)
    entry = pack(DirectoryEntry(FORMAT_VERSION, ino, 0o100000))

    async def look_up(header: RequestHeader, body: memoryview) -> bytes:
        return ino.to_bytes(8, "little").ljust(fuse.ENTRY_OUT.size, b"\0")

    async def open_(header: RequestHeader, body: memoryview) -> bytes:
        return b"opened"

    handlers = behind_barrier({Opcode.LOOKUP: look_up, Opcode.OPEN: open_}, kv)
    outcomes: list[str] = []

    async def open_once() -> None:
        try:
            await handlers[Opcode.OPEN](header(Opcode.OPEN, ino), memoryview(b""))
            outcomes.append("opened")
        except NameMoved:
            outcomes.append("moved")

    await kv.transact([], [Put(after, entry)])
    for name in (b"latest", b"previous"):
        await handlers[Opcode.LOOKUP](header(Opcode.LOOKUP), memoryview(name + b"\0"))
    kv.open_gate = trio.Event()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(open_once)
        await trio.testing.wait_all_tasks_blocked()
        kv.open_gate.set()
    assert outcomes == ["moved"] * 3
    assert await kv.get(before) is None
    await open_once()
    assert outcomes[-1] == "opened"
