"""Many requests for one file at once, while every step of the catalog takes a while, as when another process has it locked.

What a handler found before it waited may be gone, or be something else, when it goes on.
"""

import os
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ROOT_INODE

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)
TURNS = 60

pytestmark = pytest.mark.slow


def _make_slow(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """The catalog lets others run before and after whatever it does, now and then for long."""

    async def wait() -> None:
        for _ in range(chance.choice([0, 0, 1, 2, 10])):
            await trio.lowlevel.checkpoint()

    for name in ("get", "range", "transact"):
        step = getattr(SqliteCatalog, name)

        async def slow(*arguments: Any, step: Any = step, **named: Any) -> Any:
            await wait()
            result = await step(*arguments, **named)
            await wait()
            return result

        monkeypatch.setattr(SqliteCatalog, name, slow)


class File:
    """A file of bytes that grow, as several programs of one node use it. The kernel lets one of them write at a time."""

    def __init__(self, node: Any, chance: random.Random) -> None:
        self.node = node
        self.chance = chance
        self.writing = trio.Lock()
        self.naming = trio.Lock()
        self.content = b""

    async def ino(self) -> int:
        """As the kernel does it: names are looked up while nobody changes them."""
        async with self.naming:
            return int((await self.node.lookup(ROOT, b"file")).ino)

    async def append(self) -> None:
        fh = await self._opened(os.O_WRONLY | os.O_APPEND)
        async with self.writing:
            block = self.chance.randbytes(3)
            await self.node.write(fh, block, len(self.content))
            self.content += block
        await self.node.release(fh)

    async def read(self) -> None:
        fh = await self._opened(os.O_RDONLY)
        async with self.writing:
            assert await self.node.read(fh) == self.content
        await self.node.release(fh)

    async def rewrite(self) -> None:
        async with self.writing:  # so that nobody else's bytes are cut off
            fh = await self._opened(os.O_WRONLY | os.O_TRUNC)
            self.content = b"anew"
            await self.node.write(fh, b"anew", 0)
        await self.node.release(fh)

    async def settle(self) -> None:
        await self.node.settler.settle_due(everything=True)

    async def rename_and_back(self) -> None:
        async with self.naming:
            await self.node.rename(b"file", b"other")
            await self.node.rename(b"other", b"file")

    async def _opened(self, flags: int) -> int:
        return int(await self.node.open(await self.ino(), flags))


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("seed", range(4))
async def test_requests_for_one_file_at_once(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, seed: int, programs: int
) -> None:
    chance = random.Random(seed)
    node = await start_node()
    file = File(node, chance)
    ino, fh = await node.create(b"file")
    await node.release(fh)
    _make_slow(monkeypatch, chance)

    async def run(*steps: Callable[[], Awaitable[None]]) -> None:
        for _ in range(TURNS):
            await chance.choice(steps)()
            await trio.sleep(chance.choice([0, 0.001, 0.005]))  # else nothing would ever be sealed

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(programs):
                nursery.start_soon(run, file.append, file.append, file.append, file.read, file.rewrite)
            nursery.start_soon(run, file.settle)
            nursery.start_soon(run, file.rename_and_back)
    await node.settle()
    assert await node.content(ino) == file.content
    assert await catalog_problems(node.kv) == []
    assert len(node.open_files) == 0
    assert node.segment_count() == 1
