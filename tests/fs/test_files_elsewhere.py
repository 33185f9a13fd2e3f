"""Files whose bytes are on another node, as programs meet them: two nodes with their agents on one catalog."""

import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, SetattrField

pytestmark = pytest.mark.slow

StartNode = Callable[..., Awaitable[Any]]
StartAgent = Callable[[Any], Awaitable[Any]]


@pytest.fixture
async def pair(start_node: StartNode, start_agent: StartAgent) -> tuple[Any, Any]:
    """Two nodes; the first is the home of what the tests save."""
    nodes = await start_node("a"), await start_node("b")
    for node in nodes:
        await start_agent(node)
    return nodes


async def test_a_home_moves_with_what_was_written_while_it_was_copied(pair: tuple[Any, Any]) -> None:
    """Another node rewrites and closes the file between the copy and the transaction: nothing of it may be lost."""
    here, there = pair
    ino = await here.save(b"file", b"first")
    copied = []
    copy = there.segments.create_from

    async def rewrite() -> None:
        fh = await here.open(ino, os.O_WRONLY | os.O_TRUNC)
        await here.write(fh, b"second")
        await here.release(fh)
        await here.settle()

    def copy_and_lose(segment: Any, number: Any, source: str) -> int:
        copied.append(source)
        descriptor = copy(segment, number, source)
        if len(copied) == 1:
            trio.from_thread.run(rewrite)
        return int(descriptor)

    there.segments.create_from = copy_and_lose
    fh = await there.open(ino, os.O_RDWR)
    assert len(copied) == 2
    assert await there.read(fh) == b"second"
    await there.write(fh, b"S")
    await there.release(fh)
    await there.settle()
    assert await here.content(ino) == b"Second"


async def test_a_home_that_moves_keeps_the_files_times(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino = await here.save(b"file", b"content")
    before = await here.getattr(ino)
    await there.release(await there.open(ino, os.O_RDWR))
    await there.settle()
    after = await there.getattr(ino)
    assert (after.mtime_ns, after.size) == (before.mtime_ns, 7)


async def test_times_set_on_another_node_than_the_writers_are_kept(pair: tuple[Any, Any]) -> None:
    here, there = pair
    ino, fh = await here.create(b"file")
    await here.write(fh, b"content")
    await here.release(fh)
    body = fuse.SETATTR_IN.pack(SetattrField.MTIME, 0, 0, 0, 0, 0, 1000, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    await there.ask(Opcode.SETATTR, ino, body)
    for _ in range(2):
        assert [(await node.getattr(ino)).mtime_ns for node in pair] == [1000 * 10**9 + 5] * 2
        await here.settle()
    fh = await here.open(ino, os.O_WRONLY)
    await there.ask(Opcode.SETATTR, ino, body)
    newer_ns = time.time_ns() + 10**9
    os.utime(here.segments.path_of(here.open_files.get(ino).segment), ns=(newer_ns, newer_ns))  # a write, some time later
    await here.release(fh)
    await here.settle()
    assert [(await node.getattr(ino)).mtime_ns for node in pair] == [newer_ns] * 2
