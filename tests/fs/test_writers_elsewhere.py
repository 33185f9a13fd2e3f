"""Programs on several nodes write one file: two nodes with their agents on one catalog, the first the home of what is written."""

import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.cache.mount_db import BOOT_FACT
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs import writers_elsewhere
from ckptfs.fs.fuse_format import Opcode, OpenFlag, SetattrField
from ckptfs.fs.home_calls import Call, pack_handles, unpack_handles
from ckptfs.fs.writers_elsewhere import LEASE_SECONDS
from ckptfs.replication import peer_messages
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall

pytestmark = pytest.mark.slow

StartNode = Callable[..., Awaitable[Any]]
StartAgent = Callable[[Any], Awaitable[Any]]

APPENDING = os.O_WRONLY | os.O_APPEND


@pytest.fixture
async def pair(start_node: StartNode, start_agent: StartAgent) -> tuple[Any, Any]:
    nodes = await start_node("a"), await start_node("b")
    for agent in [await start_agent(node) for node in nodes]:
        await agent.members.refresh(everyone=True)
    return nodes


async def _append(node: Any, fh: int, data: bytes, offset: int = 0, *, unique: int | None = None) -> int:
    """As the kernel sends it: at the end as this kernel knows it."""
    body = fuse.WRITE_IN.pack(fh, offset, len(data), 0, 0, APPENDING, 0) + data
    return int(fuse.WRITE_OUT.unpack(await node.ask(Opcode.WRITE, 0, body, unique=unique))[0])


async def _truncate(node: Any, ino: int, size: int) -> None:
    await node.ask(Opcode.SETATTR, ino, fuse.SETATTR_IN.pack(SetattrField.SIZE, 0, 0, size, *[0] * 12))


def _guests(node: Any) -> int:
    return int(node.writers.guest_count())


async def test_two_nodes_write_disjoint_ranges(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    far = await there.open(ino, os.O_RDWR)
    for number in range(10):
        assert await (here, there)[number % 2].write((own, far)[number % 2], b"%d" % number * 1000, number * 1000) == 1000
    whole = b"".join(b"%d" % number * 1000 for number in range(10))
    assert await there.read(far) == await here.read(own) == whole
    assert (await there.getattr(ino)).size == (await here.getattr(ino)).size == len(whole)
    await there.fsync(far)
    version = await here.versions.version((await here.namespace.inode(InodeNumber(ino))).open)
    assert version.durable
    await here.release(own)
    await here.settle()
    assert await here.state(ino) is VersionState.OPEN  # it is open there
    await there.release(far)
    await here.settle()
    assert await here.state(ino) is VersionState.LOCAL
    assert await there.content(ino) == whole
    assert _guests(here) == 0
    assert here.database.guests() == []


async def test_appends_of_two_nodes_are_all_there(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"log", flags=APPENDING)
    far = await there.open(ino, APPENDING)
    for number in range(20):  # neither kernel has seen what the other node has appended
        await _append(here, own, b"own %d\n" % number)
        await _append(there, far, b"far %d\n" % number)
    await here.release(own)
    await there.release(far)
    lines = (await there.content(ino)).splitlines()
    assert sorted(lines) == sorted(b"%s %d" % (name, number) for name in (b"own", b"far") for number in range(20))


async def test_a_kernel_keeps_nothing_of_a_file_that_others_write(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    answer = await there.ask(Opcode.OPEN, ino, fuse.OPEN_IN.pack(os.O_RDWR, 0))
    far, flags, _ = fuse.OPEN_OUT.unpack(answer)
    assert OpenFlag(flags) & OpenFlag.DIRECT_IO
    for node in pair:
        shown = await node.ask(Opcode.GETATTR, ino, fuse.GETATTR_IN.pack(0, 0, 0))
        assert fuse.ATTR_OUT.unpack_from(shown)[:2] == (0, 0)
    await here.release(own)
    await there.release(far)


@pytest.mark.parametrize("where", [0, 1])
async def test_truncation_by_opening_on_another_node(pair: tuple[Any, Any], where: int) -> None:
    """Writers and readers that have it open see it, on both nodes."""
    here, there = pair
    ino, own = await here.create(b"file")
    await here.write(own, b"first content")
    readers = [(node, await node.open(ino)) for node in pair]
    far = await there.open(ino, os.O_WRONLY | os.O_TRUNC)
    assert [await node.read(fh) for node, fh in readers] == [b"", b""]
    await pair[where].write((own, far)[where], b"second")
    assert [await node.read(fh) for node, fh in readers] == [b"second", b"second"]
    await _truncate(there, ino, 3)
    assert [await node.read(fh) for node, fh in readers] == [b"sec", b"sec"]
    await there.ask(Opcode.FALLOCATE, ino, fuse.FALLOCATE_IN.pack(far, 0, 10, 0, 0))
    assert [(await node.getattr(ino)).size for node in pair] == [10, 10]
    await here.release(own)
    await there.release(far)
    for node, fh in readers:
        await node.release(fh)


@pytest.mark.parametrize("how", ["open", "open and truncate", "truncate"])
async def test_a_node_whose_programs_have_a_file_open_stays_its_home(pair: tuple[Any, Any], how: str) -> None:
    """Nobody writes it; they see what the other node does to it, and it can be opened there anew."""
    here, there = pair
    ino = await here.save(b"file", b"content")
    reader = await here.open(ino)
    if how == "truncate":
        await _truncate(there, ino, 4)
    else:
        far = await there.open(ino, os.O_WRONLY | (os.O_TRUNC if how == "open and truncate" else 0))
        await there.write(far, b"CONT")
        await there.release(far)
    expected = {"open": b"CONTent", "open and truncate": b"CONT", "truncate": b"cont"}[how]
    assert await here.read(reader) == await here.content(ino) == await there.content(ino) == expected
    assert _guests(here) == 0
    await here.settle()
    assert await here.state(ino) is VersionState.LOCAL
    await here.release(reader)
    far = await there.open(ino, os.O_WRONLY | os.O_TRUNC)
    assert there.open_files.get(ino).is_home  # nobody has it open
    await there.release(far)


async def test_a_home_that_is_away_is_not_waited_for(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    await here.open(ino)
    here.kill()
    with trio.fail_after(2):
        far = await there.open(ino, os.O_WRONLY | os.O_TRUNC)
    assert there.open_files.get(ino).is_home
    await there.release(far)


async def test_truncation_by_a_program_that_only_reads(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    await here.write(own, b"content")
    fh = await there.open(ino, os.O_RDONLY | os.O_TRUNC)
    assert await there.read(fh) == b""
    assert _guests(here) == 0
    await here.release(own)


async def test_a_file_that_is_removed_while_another_node_writes_it(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    far = await there.open(ino, os.O_RDWR)
    await here.unlink(b"file")
    await here.release(own)
    await here.settle()
    assert await there.write(far, b"still") == 5
    assert await there.read(far) == b"still"
    assert (await there.getattr(ino)).nlink == 0
    assert here.segment_count() == 1
    await there.release(far)
    for node in reversed(pair):
        await node.settle()
    assert here.segment_count() == 0


async def test_a_file_that_was_sealed_meanwhile_is_opened_at_its_home_again(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the record and the call."""
    here, there = pair
    ino, own = await here.create(b"file")
    await here.write(own, b"content")
    opened = there.writing.open

    async def seal_first(*arguments: Any) -> None:
        await here.release(own)
        await here.settle()
        await opened(*arguments)

    monkeypatch.setattr(there.writing, "open", seal_first)
    far = await there.open(ino, os.O_RDWR)
    assert await there.read(far) == b"content"
    await there.write(far, b"C")
    assert await here.content(ino) == b"Content"
    await there.release(far)


async def test_a_home_that_moved_is_found(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was sealed, and this very node has become its home, before the call arrived."""
    here, there = pair
    ino, own = await here.create(b"file")
    opened = there.writing.open

    async def move_first(*arguments: Any) -> None:
        monkeypatch.undo()
        await here.release(own)
        await here.settle()
        await there.release(await there.open(ino, os.O_WRONLY | os.O_TRUNC))
        await opened(*arguments)

    monkeypatch.setattr(there.writing, "open", move_first)
    far = await there.open(ino, os.O_WRONLY)
    await there.write(far, b"content")
    assert there.open_files.get(ino).is_home
    assert await here.content(ino) == b"content"
    await there.release(far)


# Repeats


async def test_a_call_that_comes_again_is_carried_out_once(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    await _append(there, far, b"first\n", unique=1001)
    assert await _append(there, far, b"first\n", unique=1001) == 6
    await _append(there, far, b"second\n", unique=1003)
    there.tell(1001)
    await there.write(far, b"F", 0)  # says that the first is answered
    values = {row.number: row.value for row in here.database.calls()}
    assert values[1003] == 7
    assert values[1001] < 0
    assert await here.read(own) == b"First\nsecond\n"
    await here.release(own)
    await there.release(far)


async def test_the_same_call_at_the_same_time_is_carried_out_once(pair: tuple[Any, Any], nursery: trio.Nursery) -> None:
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    async with trio.open_nursery() as both:
        for _ in range(2):
            both.start_soon(_append, there, far, b"line\n")
            call = HomeCall(Call.WRITE, 1, 4001, ino, far, flags=os.O_APPEND)
            both.start_soon(here.writers.call, there.store.store_id, call, b"same\n")
    assert sorted((await here.read(own)).splitlines()) == [b"line", b"line", b"same"]


async def test_a_call_that_was_given_up_is_not_carried_out_late(start_node: StartNode) -> None:
    """It was under way to a frozen process; its program got EIO, and wrote again."""
    here, there = await start_node("a"), await start_node("b")
    ino, own = await here.create(b"file")
    store = there.store.store_id
    await here.writers.call(store, HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=os.O_WRONLY), b"")
    second = HomeCall(Call.WRITE, 1, 1005, ino, 1001, answered=[1003])
    assert (await here.writers.call(store, second, b"second")).errno == 0
    late = HomeCall(Call.WRITE, 1, 1003, ino, 1001)
    assert (await here.writers.call(store, late, b"first!")).errno == errno.EIO
    truncating = HomeCall(Call.OPEN, 1, 1003, ino, 1003, flags=os.O_WRONLY | os.O_TRUNC)
    assert (await here.writers.call(store, truncating, b"")).errno == errno.EIO
    assert await here.read(own) == b"second"


@pytest.mark.parametrize("first_was_made", [True, False])
async def test_a_copy_of_a_call_that_comes_after_its_answer_and_a_kill_of_the_home(
    start_node: StartNode, first_was_made: bool
) -> None:
    """One copy was under way to a frozen process, another got the answer, or its program an error."""
    here, there = await start_node("a"), await start_node("b")
    ino, own = await here.create(b"log")
    store = there.store.store_id
    opening = HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=APPENDING | os.O_TRUNC)
    first = HomeCall(Call.WRITE, 1, 1003, ino, 1001, flags=os.O_APPEND)
    second = HomeCall(Call.WRITE, 1, 1005, ino, 1001, flags=os.O_APPEND, answered=[1001, 1003])
    await here.writers.call(store, opening, b"")
    if first_was_made:
        assert (await here.writers.call(store, first, b"first\n")).value == 6
    assert (await here.writers.call(store, second, b"second\n")).value == 7
    before = await here.read(own)
    here.kill()
    here = await start_node("a")
    for late, data in ((first, b"first\n"), (opening, b"")):
        assert (await here.writers.call(store, late, data)).errno == errno.EIO
    assert (await here.writers.call(store, second, b"second\n")).value == 7  # its answer was lost
    assert await here.read(own) == before
    assert before == (b"first\nsecond\n" if first_was_made else b"second\n")


async def test_what_is_over_is_not_remembered_for_ever(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers_elsewhere, "OVER_MAX", 3)
    here, there = await start_node("a"), await start_node("b")
    ino, _ = await here.create(b"log")
    store = there.store.store_id
    await here.writers.call(store, HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=APPENDING), b"")
    for number in range(1003, 1043, 2):
        call = HomeCall(Call.WRITE, 1, number, ino, 1001, flags=os.O_APPEND, answered=[number - 2])
        assert (await here.writers.call(store, call, b"line\n")).errno == 0
    assert sorted(row.number for row in here.database.calls()) == [1035, 1037, 1039, 1041]


@pytest.mark.parametrize("who", ["home", "writer", "both"])
async def test_handles_live_on_when_a_mount_process_is_killed(pair: tuple[Any, Any], start_node: StartNode, who: str) -> None:
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    await _append(there, far, b"first\n", unique=1001)
    if who != "writer":
        here.kill()
        here = await start_node("a")
    if who != "home":
        there.kill()
        there = await start_node("b")
    assert await _append(there, far, b"first\n", unique=1001) == 6  # its kernel never had the answer
    assert await _append(there, far, b"second\n", unique=1003) == 7
    await here.settle()
    assert await here.state(ino) is VersionState.OPEN
    assert await here.read(own) == b"first\nsecond\n"
    await here.release(own)
    await there.release(far)
    await here.settle()
    assert await here.state(ino) is VersionState.LOCAL


@pytest.mark.parametrize("made", [False, True])
async def test_a_home_that_is_killed_in_the_middle_of_an_append(
    pair: tuple[Any, Any], start_node: StartNode, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the bytes are there, or after it and before their number is noted; and a program there appends meanwhile."""
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    await _append(there, far, b"first\n")
    append = os.pwritev

    def killed(*arguments: Any) -> int:
        if made:
            append(*arguments)
        raise OSError(errno.EINTR, "killed")

    monkeypatch.setattr(os, "pwritev", killed)
    assert await there.errno(_append(there, far, b"second\n", unique=1001)) == "EINTR"
    monkeypatch.undo()
    await here.write(own, b"other\n", (await here.getattr(ino)).size)
    here.kill()
    here = await start_node("a")
    assert await _append(there, far, b"second\n", unique=1001) == 7
    assert sorted((await here.read(own)).splitlines()) == [b"first", b"other", b"second"]
    await here.release(own)
    await there.release(far)


@pytest.mark.parametrize(("made", "pieces"), [(4096 * 3, 1), (4096 * 3 - 5, 2), (5, 2)])
async def test_an_append_that_was_cut_off_between_pages_is_gone_on_with(
    pair: tuple[Any, Any], start_node: StartNode, made: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else lies there is another program's, though it begins like this one's."""
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    record = os.urandom(20_000)
    append = os.pwritev

    def killed(descriptor: int, buffers: Any, offset: int, flags: int) -> int:
        append(descriptor, [bytes(buffers[0])[:made]], offset, flags)
        raise OSError(errno.EINTR, "killed")

    monkeypatch.setattr(os, "pwritev", killed)
    assert await there.errno(_append(there, far, record, unique=1001)) == "EINTR"
    monkeypatch.undo()
    here.kill()
    here = await start_node("a")
    assert await _append(there, far, record, unique=1001) == len(record)
    assert (await here.getattr(ino)).size == len(record) + (made if pieces == 2 else 0)
    assert (await here.read(own)).endswith(record)
    await here.release(own)
    await there.release(far)


async def test_an_open_that_comes_again_truncates_once(pair: tuple[Any, Any], start_node: StartNode) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    await here.write(own, b"content")
    call = HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=os.O_WRONLY | os.O_TRUNC)
    assert (await here.writers.call(there.store.store_id, call, b"")).errno == 0
    await here.write(own, b"new")
    here.kill()
    here = await start_node("a")
    assert (await here.writers.call(there.store.store_id, call, b"")).errno == 0
    assert await here.read(own) == b"new"
    assert _guests(here) == 1


# Nodes that die


async def test_nobody_writes_on_after_a_power_cut_of_the_home_as_if_nothing_were_missing(
    pair: tuple[Any, Any], start_node: StartNode
) -> None:
    here, there = pair
    ino, _ = await here.create(b"file")
    far = await there.open(ino, os.O_RDWR)
    await there.write(far, b"content")
    await there.fsync(far)
    here.database.set_fact(BOOT_FACT, b"an earlier one")
    here.database.forget_handles()
    here.kill()
    here = await start_node("a")
    assert await there.errno(there.write(far, b"more", 7)) == "EIO"
    assert _guests(here) == 0
    await there.release(far)
    far = await there.open(ino, os.O_RDWR)
    assert await there.read(far) == b"content"
    await there.write(far, b"more", 7)
    await there.release(far)
    assert await here.content(ino) == b"contentmore"


async def test_a_writer_that_is_not_heard_of_is_let_go(start_node: StartNode, autojump_clock: MockClock) -> None:
    here, there = await start_node("a"), await start_node("b")
    ino, own = await here.create(b"file")
    store = there.store.store_id
    for fh in (1001, 1003):
        assert (await here.writers.call(store, HomeCall(Call.OPEN, 1, fh, ino, fh, flags=os.O_WRONLY), b"")).errno == 0
    await here.writers.call(store, HomeCall(Call.WRITE, 1, 1005, ino, 1001), b"content")
    await here.release(own)
    await trio.sleep(LEASE_SECONDS - 10)
    keep = HomeCall(Call.KEEP, 1, 0)
    await here.writers.call(store, keep, pack_handles([1001]))
    await trio.sleep(20)
    await here.writers.call(store, keep, pack_handles([1001]))  # the other one is nobody's
    assert _guests(here) == 1
    await trio.sleep(LEASE_SECONDS - 10)
    await here.writers.look()
    assert _guests(here) == 1
    await trio.sleep(20)
    await here.writers.look()
    assert _guests(here) == 0
    assert here.database.calls() == here.database.guests() == []
    await here.settle()
    assert await here.state(ino) is VersionState.LOCAL
    assert await here.content(ino) == b"content"
    late = await here.writers.call(store, HomeCall(Call.WRITE, 1, 1007, ino, 1001), b"late")
    assert late.errno == errno.EIO
    assert "open it again" in late.message


async def test_what_an_earlier_mount_of_a_node_had_open_is_let_go(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    ino, _ = await here.create(b"file")
    store = there.store.store_id
    await here.writers.call(store, HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=os.O_WRONLY), b"")
    await here.writers.call(store, HomeCall(Call.KEEP, 2, 0), b"")
    assert _guests(here) == 0
    assert (await here.writers.call(store, HomeCall(Call.TRUNCATE, 1, 1003, ino), b"")).errno == errno.EIO


@pytest.mark.parametrize("end", ["a new mount", "close", "not named"])
async def test_a_handle_is_let_go_when_nothing_is_written_through_it_any_more(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The drive holds a write up meanwhile. Its descriptor's number must not be another file's when it goes on."""
    here, there = await start_node("a"), await start_node("b")
    ino, _ = await here.create(b"file")
    store = there.store.store_id
    await here.writers.call(store, HomeCall(Call.OPEN, 1, 1001, ino, 1001, flags=APPENDING), b"")
    goes_on, append = trio.Event(), here.writers._noted.append

    async def append_late(*arguments: Any) -> int:
        await goes_on.wait()
        return int(await append(*arguments))

    monkeypatch.setattr(here.writers._noted, "append", append_late)
    monkeypatch.setattr("ckptfs.fs.writers_elsewhere.LEASE_SECONDS", -1.0)
    ends = {
        "a new mount": (HomeCall(Call.KEEP, 2, 0), b""),
        "close": (HomeCall(Call.CLOSE, 1, 1005, ino, 1001), b""),
        "not named": (HomeCall(Call.KEEP, 1, 0), pack_handles([])),
    }
    async with trio.open_nursery() as both:
        both.start_soon(here.writers.call, store, HomeCall(Call.WRITE, 1, 1003, ino, 1001, flags=os.O_APPEND), b"line\n")
        await trio.testing.wait_all_tasks_blocked()
        both.start_soon(here.writers.call, store, *ends[end])
        await trio.testing.wait_all_tasks_blocked()
        assert _guests(here) == 1
        late = await here.writers.call(store, HomeCall(Call.WRITE, 1, 1007, ino, 1001), b"late")
        assert late.errno == errno.EIO
        goes_on.set()
    assert await here.content(ino) == b"line\n"
    assert here.database.guests() == []


async def test_an_append_of_the_homes_own_program_that_comes_again(pair: tuple[Any, Any], start_node: StartNode) -> None:
    """In the served lane; while another node appends."""
    here, there = pair
    ino, own = await here.create(b"log")
    far = await there.open(ino, APPENDING)
    await _append(here, own, b"own\n", unique=1001)
    await _append(there, far, b"far\n")
    here.kill()
    here = await start_node("a")
    assert await _append(here, own, b"own\n", unique=1001) == 4
    here.tell(1001)
    assert await here.read(own) == b"own\nfar\n"
    await there.release(far)
    assert all(row.store != here.store.store_id for row in here.database.calls())


async def test_the_homes_are_told_what_is_open(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    far = await there.open(ino, os.O_WRONLY)
    (connection,) = here.writers._connections.values()
    connection.heard_at = 0.0
    await there.writing.keep()
    assert connection.heard_at > 0
    await here.release(own)
    await there.release(far)


async def test_a_home_that_hangs_takes_nobody_elses_turn(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a file whose home is not known any more."""
    here, there = pair
    first, own = await here.create(b"first")
    far = [await there.open(first, os.O_WRONLY)]
    second, _ = await here.create(b"second")
    far.append(await there.open(second, os.O_WRONLY))
    hanging, gone = StoreId(bytes(16)), there.open_files.get(InodeNumber(second))
    monkeypatch.setattr(gone, "remote", None)
    there.writing._answered[hanging].append(1)
    asked: list[StoreId] = []
    call_home = there.writing._content.call_home

    async def hang(home: StoreId, *arguments: Any) -> Any:
        asked.append(home)
        return await (trio.sleep_forever() if home == hanging else call_home(home, *arguments))

    monkeypatch.setattr(there.writing._content, "call_home", hang)
    monkeypatch.setattr("ckptfs.fs.remote_writing.KEEP_SECONDS", 0.05)
    with trio.fail_after(30):
        await there.writing.keep()
    assert sorted(asked) == sorted([hanging, here.store.store_id])
    assert there.writing._answered[hanging] == [1]
    monkeypatch.undo()
    for fh in (own, *far):
        await (here if fh == own else there).release(fh)


async def test_a_home_that_is_away_is_an_error_of_the_program(pair: tuple[Any, Any], start_node: StartNode) -> None:
    here, there = pair
    ino, own = await here.create(b"file")
    far = await there.open(ino, os.O_WRONLY)
    here.kill()
    assert await there.errno(there.write(far, b"content")) == "EIO"
    assert await there.errno(there.fsync(far)) == "EIO"
    assert await there.errno(there.open(ino, os.O_WRONLY)) == "EIO"
    here = await start_node("a")
    assert await there.write(far, b"content") == 7
    assert await here.read(own) == b"content"


async def test_a_home_of_an_older_release_is_busy(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    monkeypatch.setattr(peer_messages, "PROTOCOL_VERSION_MAX", 1)
    ino, _ = await here.create(b"file")
    assert await there.errno(there.open(ino, os.O_WRONLY)) == "EBUSY"


async def test_an_error_of_the_home_is_the_programs(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = pair
    ino, _ = await here.create(b"file")
    far = await there.open(ino, os.O_WRONLY)

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert await there.errno(there.write(far, b"content")) == "ENOSPC"
    assert await there.write(far, b"content") == 7


async def test_a_call_that_makes_no_sense(start_node: StartNode) -> None:
    here, there = await start_node("a"), await start_node("b")
    ino, _ = await here.create(b"file")
    store = there.store.store_id
    for call, data, number in (
        (HomeCall(99, 1, 3, ino), b"", errno.EOPNOTSUPP),
        (HomeCall(Call.OPEN, 1, 3, 999, 3), b"", errno.ESTALE),
        (HomeCall(Call.OPEN, 1, 3, 1, 3), b"", errno.EPERM),
        (HomeCall(Call.WRITE, 1, 3, ino, 999), b"x", errno.EIO),
        (HomeCall(Call.KEEP, 1, 0), b"odd", errno.EINVAL),
    ):
        answer: HomeAnswer = await here.writers.call(store, call, data)
        assert answer.errno == number, call


def test_handles_are_packed_and_unpacked() -> None:
    assert pack_handles([1, 1 << 62]) == b"\1" + bytes(7) + bytes(7) + b"\x40"
    assert unpack_handles(pack_handles([1, 1 << 62])) == {1, 1 << 62}


async def test_a_new_file_of_many_nodes_at_once(start_node: StartNode, start_agent: StartAgent) -> None:
    """Each of them makes it unless it is there, as ranks do that write one shared file."""
    nodes = [await start_node(name) for name in "abcd"]
    for agent in [await start_agent(node) for node in nodes]:
        await agent.members.refresh(everyone=True)

    async def save(rank: int) -> None:
        node = nodes[rank % 4]
        _, fh = await node.create(b"shared", flags=os.O_WRONLY)
        for part in range(5):
            at = (part * 8 + rank) * 1001
            assert await node.write(fh, bytes([rank]) * 1001, at) == 1001
        await node.fsync(fh)
        await node.release(fh)

    with trio.fail_after(60):
        async with trio.open_nursery() as ranks:
            for rank in range(8):
                ranks.start_soon(save, rank)
    ino = (await nodes[0].lookup(1, b"shared")).ino
    for node in nodes:
        await node.settle()
    expected = b"".join(bytes([rank]) * 1001 for _ in range(5) for rank in range(8))
    for node in nodes:
        assert await node.content(ino) == expected
