"""What a call is told whose path changes while the kernel walks it: two mounts on one catalog, the replica of one held back.

The kernel walks a path twice at most: a second ESTALE in one call reaches the program.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from ckptfs.cache.catalog_format import FORMAT_VERSION, Settings, inode_key
from ckptfs.cache.catalog_kv import Compare, Operation, TransactionResult
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import InodeGone, NameMoved, NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId, new_segment_id
from ckptfs.cache.namespace import Namespace
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.barrier import behind_barrier
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Handler
from ckptfs.fs.path_walks import LOOKUPS_AGAIN_MAX
from ckptfs.fs.remote_content import ContentGone

READER, WRITER, UNKNOWN = 7, 8, 0


class Replica(MemoryCatalog):
    """Shows what its origin had at the last barrier, or at the last transaction of its own."""

    def __init__(self, origin: MemoryCatalog) -> None:
        super().__init__()
        self._origin = origin

    async def catch_up(self) -> None:
        self.barriers += 1
        self._advance()

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        result = await self._origin.transact(compares, operations)
        self._advance()
        return result

    def _advance(self) -> None:
        self._entries, self._keys = dict(self._origin._entries), list(self._origin._keys)


class Mount:
    """A mount with a replica, as far as names go, and another node's on the same catalog."""

    def __init__(self) -> None:
        origin = MemoryCatalog()
        self.replica = Replica(origin)
        self.elsewhere = Namespace(origin, StoreId(b"b" * 16), 1, lambda: 1)
        self._here = Namespace(self.replica, StoreId(b"a" * 16), 1, lambda: 1)
        handlers: dict[int, Handler] = {
            Opcode.LOOKUP: self._look_up,
            Opcode.OPEN: self._look_at,
            Opcode.GETATTR: self._look_at,
            Opcode.CREATE: self._create,
        }
        self._handlers = behind_barrier(handlers, self.replica)
        self.asks_homes = False
        """Each file is being written on the other node, which says how large it is."""

    async def _look_up(self, header: RequestHeader, body: memoryview) -> bytes:
        ino, _ = await self._here.lookup(InodeNumber(header.nodeid), bytes(body[:-1]))
        await self._ask_home(ino)
        return ino.to_bytes(8, "little").ljust(fuse.ENTRY_OUT.size, b"\0")

    async def _look_at(self, header: RequestHeader, body: memoryview) -> bytes:
        await self._here.inode(InodeNumber(header.nodeid))
        await self._ask_home(InodeNumber(header.nodeid))
        return b"found"

    async def _ask_home(self, ino: InodeNumber) -> None:
        if self.asks_homes and await self.elsewhere.kv.get(inode_key(ino)) is None:
            raise ContentGone("no such file")

    async def _create(self, header: RequestHeader, body: memoryview) -> bytes:
        await self._here.create_file(InodeNumber(header.nodeid), b"new", 0o100644, 0, 0, new_segment_id())
        return b"made"

    async def save(self, name: bytes, directory: InodeNumber = ROOT_INODE) -> InodeNumber:
        """Another node makes a file, and one that has the name is replaced."""
        created = await self.elsewhere.create_file(directory, b"tmp", 0o100644, 0, 0, new_segment_id())
        await self.elsewhere.rename(directory, b"tmp", directory, name)
        return created.ino

    async def look_up(self, name: bytes, directory: int = ROOT_INODE, thread: int = READER) -> InodeNumber:
        answer = await self._ask(Opcode.LOOKUP, directory, thread, name + b"\0")
        return InodeNumber(int.from_bytes(answer[:8], "little"))

    async def open(self, ino: int, thread: int = READER) -> bytes:
        return await self._ask(Opcode.OPEN, ino, thread)

    async def getattr(self, ino: int, thread: int = READER) -> bytes:
        return await self._ask(Opcode.GETATTR, ino, thread)

    async def create(self, directory: int, thread: int = READER) -> bytes:
        return await self._ask(Opcode.CREATE, directory, thread)

    async def _ask(self, opcode: Opcode, ino: int, thread: int, body: bytes = b"") -> bytes:
        answer = await self._handlers[opcode](RequestHeader(0, opcode, 2, ino, 0, 0, thread, 0, 0), memoryview(body))
        assert answer is not None
        return bytes(answer)


@pytest.fixture
async def mount() -> Mount:
    made = Mount()
    await made.elsewhere.format_if_empty(Settings(FORMAT_VERSION, b"c" * 16, 4, 2, 1 << 20))
    return made


async def test_a_name_that_a_file_was_renamed_from_concerns_nobody_who_opens_it_by_its_new_one(mount: Mount) -> None:
    """A program replaces a file as another opens it: the new one has been looked up by the name it had before, for the rename."""
    old = await mount.save(b"latest")
    assert await mount.look_up(b"latest") == old
    new = (await mount.elsewhere.create_file(ROOT_INODE, b"latest.tmp", 0o100644, 0, 0, new_segment_id())).ino
    assert await mount.look_up(b"latest.tmp", thread=WRITER) == new
    await mount.elsewhere.rename(ROOT_INODE, b"latest.tmp", ROOT_INODE, b"latest")
    with pytest.raises(NameMoved):
        await mount.open(old)
    assert await mount.look_up(b"latest") == new
    assert await mount.open(new) == b"found"


async def test_threads_are_told_of_the_names_that_each_has_looked_up(mount: Mount) -> None:
    ino = await mount.save(b"latest")
    await mount.look_up(b"latest")
    await mount.elsewhere.rename(ROOT_INODE, b"latest", ROOT_INODE, b"previous")
    assert await mount.look_up(b"previous", thread=WRITER) == ino
    assert await mount.open(ino, thread=WRITER) == b"found"
    with pytest.raises(NameMoved):
        await mount.open(ino)
    assert await mount.open(ino) == b"found"  # by /proc/self/fd
    with pytest.raises(NameMoved):
        await mount.open(ino, thread=UNKNOWN)  # may be by any of them
    assert await mount.open(ino, thread=UNKNOWN) == b"found"


async def test_a_walk_that_begins_again_finds_the_newest_name(mount: Mount) -> None:
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    await mount.save(b"latest")
    with pytest.raises(NameMoved):
        await mount.open(old)
    newest = await mount.save(b"latest")  # of which the replica has not heard
    assert await mount.look_up(b"latest") == newest
    barriers = mount.replica.barriers
    assert await mount.open(newest) == b"found"
    assert mount.replica.barriers == barriers  # that of the lookup came after the call began
    await mount.look_up(b"latest")
    assert mount.replica.barriers == barriers  # it costs nothing any more
    await mount.open(newest)
    assert mount.replica.barriers == barriers + 1


async def test_a_file_moved_away_after_the_second_lookup_is_what_the_name_led_to(mount: Mount) -> None:
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    await mount.save(b"latest")
    with pytest.raises(NameMoved):
        await mount.open(old)
    ino = await mount.look_up(b"latest")
    await mount.elsewhere.rename(ROOT_INODE, b"latest", ROOT_INODE, b"previous")
    await mount.replica.catch_up()
    assert await mount.open(ino) == b"found"


@pytest.mark.parametrize("ask", [Mount.open, Mount.getattr])
async def test_a_file_removed_after_the_second_lookup_is_not_there(mount: Mount, ask: Any) -> None:
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    new = await mount.save(b"latest")
    await mount.replica.catch_up()
    with pytest.raises((NameMoved, InodeGone)):
        await ask(mount, old)
    assert await mount.look_up(b"latest") == new
    await mount.elsewhere.unlink(ROOT_INODE, b"latest")
    await mount.replica.catch_up()
    with pytest.raises(NoSuchName) as refused:
        await ask(mount, new)
    assert not isinstance(refused.value, InodeGone)


@pytest.mark.parametrize("ask", [Mount.look_up, Mount.create])
async def test_a_directory_that_is_removed_after_its_file_is_no_second_time_stale(mount: Mount, ask: Any) -> None:
    """A program deletes a checkpoint as another opens a file of it."""
    directory, _ = await mount.elsewhere.make_directory(ROOT_INODE, b"checkpoint", 0o40755, 0, 0)
    ino = await mount.save(b"part", directory)
    await mount.look_up(b"checkpoint")
    await mount.look_up(b"part", directory)
    await mount.elsewhere.unlink(directory, b"part")
    with pytest.raises(NameMoved):
        await mount.open(ino)
    assert await mount.look_up(b"checkpoint") == directory
    await mount.elsewhere.rmdir(ROOT_INODE, b"checkpoint")
    with pytest.raises(NoSuchName) as refused:
        await (mount.create(directory) if ask is Mount.create else mount.look_up(b"part", directory))
    assert not isinstance(refused.value, InodeGone)


async def test_a_directory_of_a_first_walk_that_is_gone_is_looked_up_again(mount: Mount) -> None:
    """The walk may have come to it by a name that led elsewhere already."""
    directory, _ = await mount.elsewhere.make_directory(ROOT_INODE, b"checkpoint", 0o40755, 0, 0)
    await mount.look_up(b"checkpoint")
    await mount.elsewhere.rmdir(ROOT_INODE, b"checkpoint")
    with pytest.raises(InodeGone):
        await mount.look_up(b"part", directory)
    with pytest.raises(InodeGone):
        await mount.create(directory, thread=WRITER)
    with pytest.raises(NoSuchName):
        await mount.look_up(b"checkpoint")


async def test_a_walk_begun_again_that_comes_to_nothing_ends(mount: Mount) -> None:
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    new = await mount.save(b"latest")
    with pytest.raises(NameMoved):
        await mount.open(old)
    for _ in range(LOOKUPS_AGAIN_MAX):
        await mount.look_up(b"latest")
    barriers = mount.replica.barriers
    await mount.look_up(b"latest")
    assert mount.replica.barriers == barriers
    await mount.open(new)
    assert mount.replica.barriers == barriers + 1


async def test_a_file_whose_home_has_it_no_more_is_looked_for_anew(mount: Mount) -> None:
    """It was replaced, or removed, and the home hears of that before the replica: no node is away."""
    mount.asks_homes = True
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    new = await mount.save(b"latest")
    assert await mount.look_up(b"latest") == new
    with pytest.raises(InodeGone):
        await mount.getattr(old)
    await mount.elsewhere.unlink(ROOT_INODE, b"latest")
    with pytest.raises(NoSuchName):
        await mount.look_up(b"latest")


async def test_a_stat_whose_file_is_replaced_is_of_the_new_one(mount: Mount) -> None:
    mount.asks_homes = True
    old = await mount.save(b"latest")
    await mount.look_up(b"latest")
    new = await mount.save(b"latest")
    with pytest.raises(InodeGone):
        await mount.getattr(old)
    assert await mount.look_up(b"latest") == new
    assert await mount.getattr(new) == b"found"
