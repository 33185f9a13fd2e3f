"""Segments of protected versions are released, the oldest first, and only what would survive without them."""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import NO_SEGMENT, Shard, ShardLayout
from ckptfs.cache.ids import InodeNumber, NodeId, StoreId, Vid
from ckptfs.cache.reserve import Room
from ckptfs.cache.store_registry import register_store
from ckptfs.cache.versions import ProtectedCommit, RepairedCommit
from ckptfs.fs import segment_release as module
from ckptfs.fs.segment_release import SaveSize, SegmentRelease

MIB = 1 << 20
HOLDERS = [StoreId(bytes([number]) * 16) for number in range(1, 4)]


class Drive:
    """A drive of 1000 MiB on which each segment takes 100."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.others_mib = 0

    def room_at(self, path: Any) -> Room:
        return Room((1000 - self.others_mib - 100 * self._node.segment_count()) * MIB, 1000 * MIB, 1 << 20)


async def protect(node: Any, ino: int) -> None:
    inode = await node.namespace.inode(InodeNumber(ino))
    version = await node.versions.version(inode.cur)
    revisions = {}
    for number, store in enumerate(HOLDERS):
        revisions[store] = await register_store(node.kv, store, NodeId(f"n{number}"), "127.0.0.1:1", "/", {})
    shards = [Shard(store, version.root) for store in HOLDERS]
    commit = ProtectedCommit(InodeNumber(ino), inode.cur, ShardLayout.COPIES, 1, 2, version.cell_size, shards, revisions)
    assert await node.versions.commit_protected([commit]) == {inode.cur}


class Releasing:
    """A node with files, and what releases their segments. `states` overrides how they stand, `wrong` what is found of shards."""

    def __init__(self, node: Any, drive: Drive, reserve_fraction: float) -> None:
        self.states: dict[int, dict[str, Any]] = {}
        self.wrong: dict[Vid, str] = {}
        self.proved: list[Vid] = []
        self.now = 0.0
        self.while_proving: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.save_size = SaveSize(lambda: 0.0)
        self.release = SegmentRelease(
            node.versions,
            node.segments,
            node.open_files,
            node.reclaimer,
            node.store.store_id,
            node.store.path,
            reserve_fraction,
            self.save_size,
            self._standing,
            self._keep_free,
            self._prove,
            lambda: self.now,
        )
        self.told: list[int] = []
        self._node = node
        self.drive = drive

    async def _standing(self, inos: list[InodeNumber]) -> dict[int, dict[str, Any]]:
        return {ino: self.states.get(ino, {"state": "protected", "protected_m": 2}) for ino in inos}

    async def _prove(self, vid: Vid) -> str:
        self.proved.append(vid)
        await self.while_proving()
        return self.wrong.get(vid, "")

    async def _keep_free(self, size_bytes: int) -> None:
        self.told.append(size_bytes)

    async def has_segment(self, ino: int) -> bool:
        inode = await self._node.namespace.inode(InodeNumber(ino))
        version = await self._node.versions.version(inode.cur)
        there = version.segment != NO_SEGMENT
        assert there == (version.segment in self._node.segments.all())
        return bool(there)


@pytest.fixture
def releasing(node: Any, monkeypatch: pytest.MonkeyPatch) -> Releasing:
    drive = Drive(node)
    monkeypatch.setattr(module, "room_at", drive.room_at)
    return Releasing(node, drive, 0.25)


async def vid_of(node: Any, ino: int) -> Vid:
    vid = (await node.namespace.inode(InodeNumber(ino))).cur
    assert vid is not None
    return Vid(vid)


async def saved(node: Any, count: int) -> list[int]:
    inos = []
    for number in range(count):
        ino = await node.save(b"f%d" % number, b"content %d" % number)
        segment = (await node.versions.version((await node.namespace.inode(InodeNumber(ino))).cur)).segment
        os.utime(node.segments.path_of(segment), ns=(0, 10**9 * (100 - number)))  # the last one is the oldest
        inos.append(ino)
    return inos


async def test_the_oldest_go_until_the_reserve_is_free(node: Any, releasing: Releasing) -> None:
    inos = await saved(node, 5)
    for ino in inos:
        await protect(node, ino)
    assert await releasing.release.release() == 0, "500 of 1000 are free"
    releasing.drive.others_mib = 400
    assert await releasing.release.release() == 2
    assert [await releasing.has_segment(ino) for ino in inos] == [True, True, True, False, False]
    assert releasing.release.wanted_bytes() <= 0


async def test_what_is_not_safe_elsewhere_or_in_use_stays(node: Any, releasing: Releasing) -> None:
    inos = await saved(node, 5)
    for ino in inos[1:]:
        await protect(node, ino)
    releasing.states[inos[1]] = {"state": "degraded", "protected_m": 1}
    releasing.states[inos[2]] = {"state": "protected", "protected_m": 0}
    fh = await node.open(inos[3])
    releasing.drive.others_mib = 900
    assert await releasing.release.release() == 1
    assert releasing.proved == [await vid_of(node, inos[4])], "nothing is read for what can't go"
    assert [await releasing.has_segment(ino) for ino in inos] == [True, True, True, True, False]
    assert await node.read(fh) == b"content 3"
    await node.release(fh)
    assert await releasing.release.release() == 1
    assert [await releasing.has_segment(ino) for ino in inos] == [True, True, True, False, False]
    assert await node.errno(node.content(inos[3])) == "EIO", "its shards are asked for, and no agent runs here"
    assert await node.content(inos[0]) == b"content 0"


async def test_a_segment_stays_while_its_shards_are_not_all_right(
    node: Any, releasing: Releasing, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = await saved(node, 2)
    for ino in (first, second):
        await protect(node, ino)
    vid = await vid_of(node, second)
    releasing.wrong[vid] = "shard 1 on n1: it is not the content"
    releasing.drive.others_mib = 900
    assert await releasing.release.release() == 1
    assert [await releasing.has_segment(ino) for ino in (first, second)] == [False, True]
    assert await node.content(second) == b"content 1"
    assert "shard 1 on n1" in caplog.text
    count = len(releasing.proved)
    assert await releasing.release.release() == 0
    assert len(releasing.proved) == count, "its shards are not read again and again"
    releasing.wrong.clear()
    releasing.now = module.PROVE_AGAIN_SECONDS
    assert await releasing.release.release() == 1
    assert not await releasing.has_segment(second)


async def test_a_segment_stays_when_its_version_got_other_shards_than_were_proved(node: Any, releasing: Releasing) -> None:
    (ino,) = await saved(node, 1)
    await protect(node, ino)
    vid = await vid_of(node, ino)

    async def repair() -> None:
        version = await node.versions.version(vid)
        other = StoreId(bytes([9]) * 16)
        revision = await register_store(node.kv, other, NodeId("n9"), "127.0.0.1:1", "/", {})
        assert await node.versions.commit_repaired(
            RepairedCommit(vid, version.shards, {0: Shard(other, version.root)}, {other: revision})
        )

    releasing.while_proving = repair
    releasing.drive.others_mib = 900
    assert await releasing.release.release() == 0
    assert await releasing.has_segment(ino)
    releasing.while_proving = trio.lowlevel.checkpoint
    assert await releasing.release.release() == 1


async def test_a_released_file_is_begun_anew_deleted_and_survives_a_restart(
    node: Any, start_node: Any, releasing: Releasing
) -> None:
    first, second, third = await saved(node, 3)
    for ino in (first, second, third):
        await protect(node, ino)
    releasing.drive.others_mib = 900
    assert await releasing.release.release() == 3
    await node.release(await node.open(first, os.O_WRONLY | os.O_TRUNC))
    await node.settle()
    assert await node.content(first) == b""
    await node.unlink(b"f1")
    await node.settle()
    node.kill()
    node = await start_node()
    assert await node.content(first) == b""
    assert await node.errno(node.content(third)) == "EIO"
    assert node.segment_count() == 1


async def test_room_for_the_next_save_is_made_or_warned_of(node: Any, releasing: Releasing) -> None:
    inos = await saved(node, 5)
    await protect(node, inos[4])
    releasing.drive.others_mib = 200
    releasing.save_size.add(400 * MIB)
    assert releasing.release.wanted_bytes() == 100 * MIB
    assert await releasing.release.release() == 1
    releasing.release._warn()
    assert releasing.release.warning == ""
    releasing.save_size.add(50 * MIB)
    assert await releasing.release.release() == 0
    releasing.release._warn()
    assert "400 MiB are free, 450 MiB are wanted" in releasing.release.warning


async def test_the_agent_is_told_what_is_to_stay_free(releasing: Releasing) -> None:
    for _ in range(2):
        await releasing.release.release_copies()
    assert releasing.told == [250 * MIB]
    releasing.drive.others_mib = 800
    for _ in range(2):
        await releasing.release.release_copies()
    assert releasing.told == [250 * MIB] * 3, "again as long as it isn't"
    releasing.drive.others_mib = 0
    releasing.save_size.add(700 * MIB)
    await releasing.release.release_copies()
    assert releasing.told[-1] == 500 * MIB, "half the drive at most"


def test_a_save_ends_with_a_pause() -> None:
    now = 0.0
    size = SaveSize(lambda: now)
    assert size.bytes == 0
    for at, bytes_, expected in ((0, 5, 5), (29, 5, 10), (60, 3, 10), (61, 4, 10), (100, 1, 7), (200, 2, 2)):
        now = float(at)
        size.add(bytes_)
        assert size.bytes == expected
    for _ in range(100):
        now += 10.0
        size.add(1)
    assert size.bytes <= 62, "writing without a pause is not one save"
