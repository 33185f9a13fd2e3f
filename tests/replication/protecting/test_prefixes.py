"""Prefixes of files that are being written: protected while programs write on, and read elsewhere when their home is away."""

import mmap
import os
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import VersionState
from ckptfs.cache.prefixes import void_prefix
from ckptfs.fs import agent_requests

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 8 * 4 * CELL - 5
SIZES = (100, SIZE)
"""Whole copies, and stripes."""


async def until(condition: Any) -> None:
    with trio.fail_after(60):
        while not condition():
            await trio.sleep(0.01)


def append(node: Any, opened: Any, content: bytes) -> None:
    with open(node.segments.path_of(opened.segment), "ab") as file:
        file.write(content)


def held_shards(cluster: Any, vid: bytes) -> int:
    agents = [node.running for node in cluster.nodes]
    shards = sum(row.vid == vid for agent in agents for row in agent.shard_store.list())
    return int(shards + sum(copy.vid == vid for agent in agents for copy in agent.small_copies.list()))


async def read(node: Any, opened: Any) -> bytes | None:
    """What the node's mount gives for the file now; None for EIO."""
    attributes = await node.ask("attributes", ino=opened.ino)
    if not attributes["ok"]:
        return None
    data = b""
    while len(data) < attributes["size"]:
        answer = await node.ask("read", ino=opened.ino, offset=len(data), length=100_000)
        assert answer["ok"], answer
        data += answer["data"]
    assert (await node.ask("read", ino=opened.ino, offset=len(data), length=10))["data"] == b""
    return data


@pytest.mark.parametrize("size", SIZES)
async def test_it_is_protected_while_a_program_has_the_file_open(cluster: Any, size: int) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(size))
    with open(node.segments.path_of(opened.segment), "ab", buffering=0) as writer:
        prefix = await node.prefix(opened)
        (version,) = await node.protected(prefix)
        writer.write(b"more")
    assert len(version.shards) == (3 if size == 100 else 6)
    inode = await node.namespace.inode(opened.ino)
    assert (inode.open, inode.prefix, inode.prefix_holds) == (opened.vid, prefix.vid, True)
    assert await cluster[3].content(prefix) == opened.content
    await until(lambda: node.told == [prefix.vid])
    assert node.mount_db.prefixes() == []


@pytest.mark.parametrize("size", SIZES)
async def test_what_is_appended_meanwhile_changes_nothing(cluster: Any, size: int) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(size))
    prefix = await node.prefix(opened, wake=False)
    append(node, opened, os.urandom(3 * CELL))
    node.running.replicator.wake()
    await node.protected(prefix)
    assert await cluster[3].content(prefix) == opened.content


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["in place", "cut"])
async def test_what_changed_after_it_was_hashed_is_given_up(cluster: Any, size: int, how: str) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(size))
    prefix = await node.prefix(opened, wake=False)
    path = node.segments.path_of(opened.segment)
    if how == "cut":
        os.truncate(path, size - 1)
    else:
        with open(path, "r+b") as file:
            file.seek(size - 1)
            file.write(bytes([opened.content[-1] ^ 1]))
    node.running.replicator.wake()
    with trio.fail_after(60):
        while await node.versions.version(prefix.vid) is not None:
            await trio.sleep(0.01)
    statistics = node.running.replicator.statistics()
    assert (statistics.segments_damaged, statistics.attempts_failed) == (0, 0)  # nothing is wrong with the drive
    assert held_shards(cluster, prefix.vid) == 0
    assert (await node.namespace.inode(opened.ino)).prefix is None
    node.mount_db.remove_prefixes([opened.ino])
    again = await node.prefix(opened)
    await node.protected(again)
    assert await cluster[3].content(again) == again.content


async def test_a_store_through_a_mapping_in_the_middle_never_becomes_part_of_it(cluster: Any) -> None:
    node = cluster[0]
    opened = await node.open("state", os.urandom(SIZE))
    node.codec.shut(before_stripe=5)
    with open(node.segments.path_of(opened.segment), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    prefix = await node.prefix(opened)
    await node.codec.reached()
    mapping[-1] ^= 1
    mapping[0] ^= 1  # that stripe was sent before
    node.codec.open()
    with trio.fail_after(60):
        while await node.versions.version(prefix.vid) is not None:
            await trio.sleep(0.01)
    assert held_shards(cluster, prefix.vid) == 0
    mapping.close()


async def test_one_that_is_voided_meanwhile_is_not_protected(cluster: Any) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(SIZE))
    first = await node.prefix(opened)
    await node.protected(first)
    append(node, opened, b"more")
    node.codec.shut(before_stripe=5)
    second = await node.prefix(opened)
    await node.codec.reached()
    await void_prefix(node.kv, opened.ino)
    node.mount_db.remove_prefixes([opened.ino])
    node.codec.open()
    await until(lambda: node.running.replicator.statistics().in_progress == 0)
    assert await node.versions.version(second.vid) is None
    inode = await node.namespace.inode(opened.ino)
    assert (inode.prefix, inode.prefix_holds) == (first.vid, False)


async def test_the_agent_restarts_in_the_middle(cluster: Any) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(SIZE))
    node.codec.shut(before_stripe=5)
    prefix = await node.prefix(opened)
    await node.codec.reached()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.down)
        await trio.sleep(0.05)
        node.codec.open()  # a thread can't be cancelled: the end waits for it
    append(node, opened, b"more")
    await node.up()
    await node.protected(prefix)
    assert await cluster[3].content(prefix) == opened.content


async def test_what_is_closed_neither_waits_for_it_nor_after_it(cluster: Any) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(SIZE))
    prefix = await node.prefix(opened, wake=False)
    files = [await node.save(f"f{number}", os.urandom(SIZE), wake=False) for number in range(6)]
    node.running.replicator.wake()
    await node.protected(*files)
    await node.protected(prefix)
    assert node.running.replicator.statistics().waiting_count == 0
    append(node, opened, b"more")
    later = await node.prefix(opened)
    await node.protected(later)  # the rule for what is protected again is the mount's to keep, for prefixes
    assert await node.versions.version(prefix.vid) is None


@pytest.mark.parametrize("size", SIZES)
async def test_it_is_read_when_the_home_is_away_for_long(cluster: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    node, reader = cluster[0], cluster[3]
    opened = await node.open("log", os.urandom(size))
    prefix = await node.prefix(opened)
    await node.protected(prefix)
    append(node, opened, b"more")
    assert await read(reader, opened) == opened.content + b"more"
    await cluster.down(0, 1)
    assert await read(reader, opened) is None  # it may be restarting
    monkeypatch.setattr(agent_requests, "AWAY_SECONDS", 0.5)
    with trio.fail_after(60):
        while (found := await read(reader, opened)) is None:
            await trio.sleep(0.05)
    assert found == opened.content
    await void_prefix(node.kv, opened.ino)
    assert await read(reader, opened) is None
    await node.up()
    await cluster[1].up()
    with trio.fail_after(60):
        while (found := await read(reader, opened)) is None:
            await trio.sleep(0.05)
    assert found == opened.content + b"more"


async def test_one_that_was_superseded_is_swept(cluster: Any) -> None:
    node = cluster[0]
    opened = await node.open("log", os.urandom(SIZE))
    first = await node.prefix(opened)
    await node.protected(first)
    append(node, opened, b"more")
    second = await node.prefix(opened)
    await node.protected(second)
    for one in cluster.nodes:
        await one.running.sweep.sweep()
    assert held_shards(cluster, first.vid) == 0
    assert held_shards(cluster, second.vid) == 6
    assert (await node.versions.version(second.vid)).state is VersionState.PROTECTED
