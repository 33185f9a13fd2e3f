"""A change whose answer from the catalog was lost, and whose program was told an error, leaves nothing that is open for ever."""

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from ckptfs.cache.catalog_format import VERSION_PREFIX, VersionState
from ckptfs.cache.catalog_kv import Compare, Operation
from ckptfs.cache.errors import CatalogUnavailable
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode

StartNode = Callable[..., Awaitable[Any]]


@contextmanager
def answers_lost(node: Any, monkeypatch: pytest.MonkeyPatch, amid: Callable[[], Awaitable[None]] | None = None) -> Iterator[None]:
    """The next transaction about a version is carried out, its answer lost; `amid` is awaited before the caller is told so."""

    def losing(transact: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def lose(compares: Sequence[Compare], operations: Sequence[Operation]) -> Any:
            result = await transact(compares, operations)
            if not any(operation.key.startswith(VERSION_PREFIX) for operation in operations):
                return result
            patch.undo()
            if amid is not None:
                await amid()
            raise CatalogUnavailable("etcd did not answer a transaction: it may be carried out yet, or never")

        return lose

    with monkeypatch.context() as patch:
        for engine in (node.kv, node.repeats.changes):
            patch.setattr(engine, "transact", losing(engine.transact), raising=False)
        yield


async def open_versions(node: Any) -> int:
    return len(await node.versions.local_versions(node.store.store_id, (VersionState.OPEN,)))


@pytest.mark.parametrize("beside_others", [False, True])
async def test_a_file_whose_program_was_told_that_it_could_not_be_made_goes(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, beside_others: bool
) -> None:
    node = await start_node()
    if beside_others:
        await node.save(b"other", b"content")
        _, held = await node.create(b"held")
    with answers_lost(node, monkeypatch):
        assert await node.errno(node.create(b"file")) == "EIO"
    assert await open_versions(node) == 1 + beside_others
    await node.sweep().sweep_segments()
    assert await open_versions(node) == beside_others
    assert await node.errno(node.lookup(1, b"file")) == "ENOENT"
    if beside_others:
        assert await node.write(held, b"content") == 7, "what a program has open stays"


async def test_a_file_that_is_being_made_is_left_to_who_makes_it(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is in the catalog before the answer is here."""
    node = await start_node()
    sweep = node.sweep()
    seen: list[int] = []

    async def amid() -> None:
        await sweep.sweep_segments()
        seen.append(await open_versions(node))

    with answers_lost(node, monkeypatch, amid):
        assert await node.errno(node.create(b"file")) == "EIO"
    assert seen == [1]
    await sweep.sweep_segments()
    assert await open_versions(node) == 0


@pytest.mark.parametrize("in_use", [False, True])
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
async def test_a_file_that_could_not_be_opened_for_writing_keeps_its_content_and_is_sealed_again(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, flags: int, in_use: bool
) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    handle = await node.open(ino) if in_use else None
    with answers_lost(node, monkeypatch):
        assert await node.errno(node.open(ino, flags)) == "EIO"
    await node.sweep().sweep_segments()
    await node.settle()
    if handle is not None:
        assert await node.read(handle) == b"content"
        await node.release(handle)
        await node.settle()
    assert (await node.namespace.inode(InodeNumber(ino))).open is None
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"content"
    assert node.segment_count() == 1


async def test_what_is_written_after_an_open_that_failed_is_sealed(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader kept the file in use, so that the next writer found what the lost answer began."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    reader = await node.open(ino)
    with answers_lost(node, monkeypatch):
        assert await node.errno(node.open(ino, os.O_WRONLY)) == "EIO"
    writer = await node.open(ino, os.O_WRONLY)
    await node.write(writer, b"CONTENT")
    await node.release(writer, reader)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"CONTENT"


async def test_a_nameless_file_whose_link_failed_is_sealed_when_it_is_closed(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    body = fuse.CREATE_IN.pack(os.O_RDWR | os.O_TMPFILE, 0o100644, 0, 0) + b"\0"
    answer = await node.ask(Opcode.TMPFILE, 1, body)
    ino, fh = fuse.ENTRY_OUT.unpack_from(answer)[0], fuse.OPEN_OUT.unpack(answer[-fuse.OPEN_OUT.size :])[0]
    await node.write(fh, b"content")
    with answers_lost(node, monkeypatch):
        assert await node.errno(node.ask(Opcode.LINK, 1, fuse.LINK_IN.pack(ino) + b"name\0")) == "EIO"
    await node.release(fh)
    await node.sweep().sweep_segments()
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"content"
