"""Reading what is elsewhere: damage, absence and lateness of holders; files that only their home has; local copies."""

import contextlib
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import ShardLayout, Version
from ckptfs.replication import restore_parts, stripe_reader
from ckptfs.replication.errors import PeerUnreachable
from ckptfs.replication.local_copies import CopyFull, LocalCopy
from ckptfs.replication.shard_format import HEADER_SIZE

pytestmark = pytest.mark.slow

CELL = 16 << 10
STRIPES = 6
SIZE = STRIPES * 4 * CELL - 100


def flip(path: Any, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def shard_path(cluster: Any, saved: Any, version: Version, index: int) -> Any:
    return cluster[cluster.number_of(version.shards[index].store)].shard_path(saved, index)


async def protected(cluster: Any, size: int = SIZE) -> tuple[Any, Version]:
    saved = await cluster[0].save("a", os.urandom(size))
    (version,) = await cluster[0].protected(saved)
    return saved, version


async def test_damaged_cells_are_decoded_and_counted(cluster: Any) -> None:
    saved, version = await protected(cluster)
    flip(shard_path(cluster, saved, version, 0), HEADER_SIZE + 2 * CELL + 7)
    flip(shard_path(cluster, saved, version, 3), HEADER_SIZE + 4 * CELL)
    reader = cluster[2]
    assert await reader.content(saved) == saved.content
    counters = reader.running.reader.counters
    assert counters.cells_decoded == 2
    assert counters.damaged_by_store == {version.shards[0].store: 1, version.shards[3].store: 1}
    status = await reader.ask("status")
    assert status["restorer"]["cells_decoded"] == 2


async def test_damaged_parity_is_noticed_before_it_decodes_anything(cluster: Any) -> None:
    saved, version = await protected(cluster)
    flip(shard_path(cluster, saved, version, 1), HEADER_SIZE + 10)
    flip(shard_path(cluster, saved, version, 4), HEADER_SIZE + 10)
    reader = cluster[cluster.number_of(version.shards[0].store)]  # one that has no parity itself, which it would prefer
    assert await reader.content(saved) == saved.content
    assert reader.running.reader.counters.damaged_by_store[version.shards[4].store] == 1


async def test_too_much_damage_is_an_error_and_never_bytes(cluster: Any) -> None:
    saved, version = await protected(cluster)
    for index in range(3):
        flip(shard_path(cluster, saved, version, index), HEADER_SIZE + 2 * CELL)
    for cell in range(8, 11):
        flip(cluster[0].segments.path_of(saved.segment), cell * CELL)
    reader = cluster[2]
    good = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=0, length=100)
    assert good["ok"]
    bad = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=2 * 4 * CELL, length=1)
    assert (bad["ok"], bad["error"]) == (False, "damaged")
    assert "stripe 2" in bad["message"]


@pytest.mark.parametrize("place", ["header", "footer", "cut", "gone", "foreign"])
async def test_shards_that_are_not_shards_are_passed_over(cluster: Any, place: str) -> None:
    saved, version = await protected(cluster)
    for index in (0, 5):
        path = shard_path(cluster, saved, version, index)
        if place == "header":
            flip(path, 20)
        elif place == "footer":
            flip(path, os.path.getsize(path) - 100)
        elif place == "cut":
            os.truncate(path, os.path.getsize(path) - 1)
        elif place == "gone":
            os.unlink(path)
        else:
            path.write_bytes(b"something else" * 1000)
    for node in cluster.nodes:
        assert await node.content(saved) == saved.content


async def test_a_damaged_copy_of_a_small_file_is_passed_over(cluster: Any) -> None:
    saved = await cluster[0].save("s", os.urandom(500))
    (version,) = await cluster[0].protected(saved)
    assert version.layout is ShardLayout.COPIES
    for shard in version.shards[:2]:
        database = sqlite3.connect(cluster[cluster.number_of(shard.store)].store.small_copies_db)
        with database:
            database.execute("UPDATE copies SET content = zeroblob(size)")
        database.close()
    for node in cluster.nodes:
        assert await node.content(saved) == saved.content


async def test_three_nodes_away_is_an_error_and_comes_back_with_them(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    small = await cluster[0].save("s", b"small")
    (copies,) = await cluster[0].protected(small)
    others = [node for node in cluster.nodes if node.store.store_id not in {shard.store for shard in copies.shards}]
    reader = next(node for node in others if node.number != 0)
    away = {0, *(cluster.number_of(shard.store) for shard in copies.shards)}
    await cluster.down(*away)
    for one in (saved, small):
        answer = await reader.ask("fetch", ino=one.ino, vid=one.vid, offset=0, length=5)
        assert (answer["ok"], answer["error"]) == (False, "unreachable")
        assert "node-" in answer["message"]
    for number in away:
        await cluster[number].up()
    assert await reader.content(saved) == saved.content
    assert await reader.content(small) == small.content


def cells_asked_for(node: Any) -> list[tuple[int, int, int]]:
    """What its runs ask for from now on: shard, first stripe, how many."""
    holders, asked = node.running.holders, list[tuple[int, int, int]]()
    real = holders.cells

    @asynccontextmanager
    async def cells(store: Any, vid: Any, index: int, first: int, count: int) -> AsyncIterator[Any]:
        asked.append((index, first, count))
        async with real(store, vid, index, first, count) as taken:
            yield taken

    holders.cells = cells
    return asked


async def test_who_reads_forward_is_fetched_for_in_runs(cluster: Any) -> None:
    stripes = 3 * restore_parts.RUN_STRIPES
    saved, _ = await protected(cluster, stripes * 4 * CELL)
    asked = cells_asked_for(cluster[2])
    assert await cluster[2].content(saved) == saved.content
    of_first = sorted(run for run in asked if run[0] == 0)
    assert [stripe for _, first, count in of_first for stripe in range(first, first + count)] == [*range(stripes)]
    assert len(of_first) <= 5
    reader = cluster[3]  # and a read somewhere gets what it asked for
    asked = cells_asked_for(reader)
    answer = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=6 * 4 * CELL + 5, length=10)
    assert answer["ok"]
    assert sorted(asked) == [(index, 6, 1) for index in range(4)]


async def test_a_run_that_meets_a_missing_shard_goes_on_without_it(cluster: Any) -> None:
    stripes = 3 * restore_parts.RUN_STRIPES
    saved, version = await protected(cluster, stripes * 4 * CELL)
    shard_path(cluster, saved, version, 1).unlink()
    asked = cells_asked_for(cluster[2])
    assert await cluster[2].content(saved) == saved.content
    assert 1 <= len([run for run in asked if run[0] == 1]) <= 3
    assert cluster[2].running.reader.counters.cells_decoded == stripes


async def test_a_holder_that_hangs_is_gone_round(cluster: Any) -> None:
    saved, version = await protected(cluster)
    reader = next(node for node in cluster.nodes if node.store.store_id != version.shards[0].store)
    holders = reader.running.holders
    real, real_cells = holders.read_cell, holders.cells
    asked = 0

    async def hang(store: Any) -> None:
        nonlocal asked
        if store == version.shards[0].store:
            asked += 1
            await trio.sleep_forever()

    async def read_cell(store: Any, *arguments: Any) -> int:
        await hang(store)
        return int(await real(store, *arguments))

    @asynccontextmanager
    async def cells(store: Any, *arguments: Any) -> AsyncIterator[Any]:
        await hang(store)
        async with real_cells(store, *arguments) as taken:
            yield taken

    holders.read_cell, holders.cells = read_cell, cells
    with trio.fail_after(10):
        assert await reader.content(saved) == saved.content
    assert 1 <= asked <= STRIPES, "a late holder is asked last, not again and again"
    assert reader.running.reader.counters.cells_decoded == STRIPES


@pytest.mark.parametrize("size", [500, SIZE])
async def test_the_only_holder_that_is_left_is_waited_for(cluster: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Those that are known to be dead come behind it, and are no reason for haste."""
    monkeypatch.setattr(stripe_reader, "IMPATIENT_SECONDS", 0.05)
    saved, version = await protected(cluster, size)
    os.unlink(cluster[0].segments.path_of(saved.segment))
    await cluster[0].versions.release_segment(saved.vid, version.shards)
    holders = [cluster.number_of(shard.store) for shard in version.shards]
    reader = next((node for node in cluster.nodes if node.number not in holders), cluster[holders[0]])
    slow = holders[-1]
    real_copy, real_footer = reader.running.holders.read_copy, reader.running.holders.footer

    async def read_copy(store: Any, vid: Any) -> bytes:
        if cluster.number_of(store) != slow:
            raise PeerUnreachable("down")
        await trio.sleep(0.3)
        return bytes(await real_copy(store, vid))

    async def footer(store: Any, vid: Any, index: int) -> Any:
        if cluster.number_of(store) != slow:
            raise PeerUnreachable("down")
        await trio.sleep(0.3)
        return await real_footer(store, vid, index)

    for number in holders:
        if number not in (slow, reader.number):
            reader.running.members.note_failure(version.shards[holders.index(number)].store, PeerUnreachable("down"))
    reader.running.holders.read_copy, reader.running.holders.footer = read_copy, footer
    assert await reader.content(saved) == saved.content


async def test_stripes_are_fetched_once_however_many_ask(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(reader.content, saved)
    assert reader.running.restorer.bytes_fetched == SIZE


async def test_a_random_read_fetches_little(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    answer = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=4 * 4 * CELL + 5, length=10)
    assert answer["ok"]
    assert reader.running.restorer.bytes_fetched == 4 * CELL


async def test_a_sequential_read_is_fetched_ahead(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    assert (await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=0, length=10))["ok"]
    with trio.fail_after(10):
        while reader.running.restorer.bytes_fetched < 5 * 4 * CELL:
            await trio.sleep(0.01)


async def test_local_copies_are_checked_again_after_a_restart(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    assert await reader.content(saved) == saved.content
    path = reader.running.copies.path_of(saved.vid)
    await reader.down()
    flip(path, 3 * 4 * CELL + 1)
    await reader.up()
    assert await reader.content(saved) == saved.content
    assert reader.running.restorer.bytes_fetched == 4 * CELL, "only the stripe with the flipped bit"


@pytest.mark.parametrize("cut", [False, True])
async def test_a_local_copy_that_is_damaged_is_mended_before_it_is_read(cluster: Any, cut: bool) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    assert await reader.content(saved) == saved.content
    path = reader.running.copies.path_of(saved.vid)
    if cut:
        os.truncate(path, SIZE // 2)
    else:
        flip(path, 3 * 4 * CELL + 1)
    assert await reader.content(saved) == saved.content
    assert path.read_bytes() == saved.content


async def test_a_removed_local_copy_is_made_again(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    assert await reader.content(saved) == saved.content
    reader.drop_copies()
    assert await reader.content(saved) == saved.content
    assert reader.running.restorer.bytes_fetched == 2 * SIZE


async def test_copies_of_versions_that_are_gone_are_removed(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[3]
    await reader.content(saved)
    assert await reader.running.remove_unwanted_copies() == 0
    await cluster[0].delete(saved, "a")
    assert await reader.running.remove_unwanted_copies() == 1
    assert not reader.running.copies.path_of(saved.vid).exists()


# ---- what only its home has


async def test_a_local_file_is_read_through_its_home(cluster: Any) -> None:
    home, reader = cluster[0], cluster[1]
    home.codec.shut()
    saved = await home.save("a", os.urandom(SIZE))
    answer = await reader.ask("attributes", ino=saved.ino)
    assert (answer["ok"], answer["size"]) == (True, SIZE)
    answer = await reader.ask("read", ino=saved.ino, offset=SIZE - 10, length=100)
    assert (answer["ok"], answer["data"]) == (True, saved.content[-10:])
    assert await reader.content(saved) == saved.content


async def test_a_file_being_written_is_read_as_it_is_now(cluster: Any) -> None:
    home, reader = cluster[0], cluster[1]
    saved, _ = await protected(cluster)
    opened = await home.versions.open_for_writing(saved.ino, truncate_to_new_segment=None)
    home.mount_db.remove_files([saved.ino])
    with open(home.segments.path_of(opened.segment), "r+b") as file:
        file.write(b"new bytes")
        file.truncate(2000)
    answer = await reader.ask("attributes", ino=saved.ino)
    assert (answer["size"], answer["mtime_ns"]) == (2000, os.stat(home.segments.path_of(opened.segment)).st_mtime_ns)
    answer = await reader.ask("read", ino=saved.ino, offset=0, length=9)
    assert answer["data"] == b"new bytes"
    await home.down()
    answer = await reader.ask("read", ino=saved.ino, offset=0, length=9)
    assert (answer["ok"], answer["error"]) == (False, "unreachable"), "never the older, protected version"
    assert "node-0" in answer["message"]
    answer = await reader.ask("fetch_whole", ino=saved.ino)
    assert answer["error"] == "unreachable"


async def test_a_home_that_comes_back_elsewhere_is_found(cluster: Any) -> None:
    home, reader = cluster[0], cluster[1]
    home.codec.shut()
    saved = await home.save("a", os.urandom(SIZE), wake=False)
    await home.down()
    blocker = await trio.open_tcp_listeners(
        int(reader.running.members.address_of(home.store.store_id).split(":")[1]), host="127.0.0.1"
    )
    await home.up()
    answer = await reader.ask("read", ino=saved.ino, offset=0, length=9)
    assert answer.get("data") == saved.content[:9], answer
    for listener in blocker:
        await listener.aclose()


async def test_a_local_file_that_is_wrong_at_its_home_is_not_copied(cluster: Any) -> None:
    home, reader = cluster[0], cluster[1]
    saved = await home.save("a", os.urandom(SIZE), wake=False)
    await home.down()
    await home.up()
    home.codec.shut()
    flip(home.segments.path_of(saved.segment), 5000)
    answer = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=0, length=10)
    assert (answer["ok"], answer["error"]) == (False, "damaged")
    assert not reader.running.copies.path_of(saved.vid).exists()


async def test_a_whole_copy_is_complete_and_right(cluster: Any) -> None:
    saved, _ = await protected(cluster)
    small = await cluster[0].save("s", b"small")
    empty = await cluster[0].save("e", b"")
    await cluster[0].protected(small, empty)
    await cluster.down(0, 5)
    for one in (saved, small, empty):
        answer = await cluster[1].ask("fetch_whole", ino=one.ino)
        assert answer["ok"], answer
        with open(answer["copy"], "rb") as file:
            assert file.read() == one.content


async def test_requests_without_sense_are_answered(cluster: Any) -> None:
    node = cluster[0]
    assert (await node.ask("dance"))["error"] == "unknown"
    assert (await node.ask("fetch"))["error"] == "unknown"
    assert (await node.ask("fetch", vid=b"short", offset=0, length=1))["error"] == "unknown"
    assert (await node.ask("fetch", vid=bytes(16), offset=0, length=1))["error"] == "gone"
    assert (await node.ask("read", ino=999, offset=0, length=1))["error"] == "gone"
    assert (await node.ask("read", ino=999, offset=-1, length=1))["error"] == "unknown"
    assert (await node.ask("attributes", ino=999))["error"] == "gone"
    assert (await node.ask("verify", inos=[999])) == {"ok": True, "files": []}


# ---- verify


async def verify(node: Any, saved: Any, **options: Any) -> dict[str, Any]:
    answer = await node.ask("verify", inos=[saved.ino], **options)
    assert answer["ok"], answer
    (report,) = answer["files"]
    return dict(report)


@pytest.mark.parametrize("deep", [False, True])
async def test_verify_finds_nothing_wrong(cluster: Any, deep: bool) -> None:
    saved, _ = await protected(cluster)
    small = await cluster[0].save("s", b"small")
    empty = await cluster[0].save("e", b"")
    await cluster[0].protected(small, empty)
    for one in (saved, small, empty):
        report = await verify(cluster[2], one, deep=deep)
        assert (report["result"], report["bytes"], report["message"]) == ("ok", len(one.content), "")


async def test_verify_says_which_shards(cluster: Any) -> None:
    saved, version = await protected(cluster)
    flip(shard_path(cluster, saved, version, 1), HEADER_SIZE + 3 * CELL)
    report = await verify(cluster[2], saved)
    assert (report["result"], report["damaged"]) == ("damaged", [1])
    os.unlink(shard_path(cluster, saved, version, 4))
    report = await verify(cluster[2], saved, deep=True)
    assert (report["result"], report["damaged"], report["missing"]) == ("damaged", [1], [4])
    flip(shard_path(cluster, saved, version, 0), HEADER_SIZE + 3 * CELL)
    for cell in (12, 13):
        flip(cluster[0].segments.path_of(saved.segment), cell * CELL)
    report = await verify(cluster[2], saved, deep=True)
    assert report["result"] == "lost"


async def test_verify_says_who_could_not_be_asked(cluster: Any) -> None:
    saved, version = await protected(cluster)
    await cluster.down(cluster.number_of(version.shards[2].store))
    reader = next(node for node in cluster.nodes if node.agent is not None)
    report = await verify(reader, saved, deep=True)
    assert (report["result"], report["unreachable"]) == ("unreachable", [2])


async def test_verify_of_what_waits(cluster: Any) -> None:
    cluster[0].codec.shut()
    saved = await cluster[0].save("a", os.urandom(SIZE))
    assert (await verify(cluster[1], saved))["result"] == "unprotected"


async def test_verify_finds_a_shard_of_another_content(cluster: Any) -> None:
    """Whole and valid in itself, but not what was acknowledged."""
    saved, version = await protected(cluster)
    other = await cluster[0].save("b", os.urandom(SIZE))
    (other_version,) = await cluster[0].protected(other)
    path = shard_path(cluster, saved, version, 2)
    data = bytearray(shard_path(cluster, other, other_version, 2).read_bytes())
    path.write_bytes(data)
    report = await verify(cluster[1], saved)
    assert (report["result"], report["damaged"]) == ("damaged", [2])
    assert await cluster[1].content(saved) == saved.content


async def test_without_room_for_a_copy_content_passes_through_memory(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, _ = await protected(cluster)
    small = await cluster[0].save("small", os.urandom(3000))
    local = await cluster[0].save("local", os.urandom(5 * CELL + 11), wake=False)
    await cluster[0].protected(small)
    reader = cluster[2]
    monkeypatch.setattr(reader.running.copies, "has_room", lambda needed_bytes: False)
    for one in (saved, small, local):
        assert await reader.content(one) == one.content
    answer = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=SIZE - 50, length=1000)
    assert answer["data"] == saved.content[-50:]
    assert not reader.running.copies.vids()
    assert reader.running.restorer.bytes_passed == sum(len(one.content) for one in (saved, small, local)) + 50
    assert reader.running.restorer.bytes_fetched == 0


async def test_many_readers_of_what_passes_all_get_right_bytes(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.replication.passing_copies.PARTS_KEPT_MIN", 2)
    saved, _ = await protected(cluster)
    reader = cluster[2]
    reader.running.restorer._passing._bytes_max = 0
    monkeypatch.setattr(reader.running.copies, "has_room", lambda needed_bytes: False)

    async def read(offset: int) -> None:
        answer = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=offset, length=4 * CELL)
        assert answer["ok"], answer
        assert answer["data"] == saved.content[offset : offset + 4 * CELL]

    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(read, number * 7919 % SIZE)


async def test_a_drive_that_runs_full_under_a_copy_ends_it_and_not_the_reading(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, _ = await protected(cluster)
    reader = cluster[2]
    good = await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=0, length=100)
    assert "copy" in good

    def full(self: LocalCopy, offset: int, data: memoryview) -> None:
        raise CopyFull("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(LocalCopy, "write", full)
        assert (await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=SIZE - 9, length=9))["data"] == saved.content[-9:]
        assert await reader.content(saved) == saved.content
        whole = await reader.ask("fetch_whole", ino=saved.ino)
        assert (whole["ok"], whole["error"]) == (False, "full")
    assert await reader.content(saved) == saved.content
    assert (await reader.ask("fetch_whole", ino=saved.ino))["ok"]


async def test_copies_used_longest_ago_make_room_and_those_in_use_stay(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [await cluster[0].save(f"f{number}", os.urandom(SIZE)) for number in range(3)]
    await cluster[0].protected(*files)
    reader = cluster[2]
    restorer, copies = reader.running.restorer, reader.running.copies
    for one in files:
        assert await reader.content(one) == one.content
    now = time.monotonic()
    restorer._last_used_at.update({files[0].vid: now - 100, files[1].vid: now - 200, files[2].vid: now})
    monkeypatch.setattr(copies, "has_room", lambda needed_bytes: len(copies.vids()) < 3)
    assert await restorer.make_room()
    assert set(copies.vids()) == {files[0].vid, files[2].vid}
    monkeypatch.setattr(copies, "has_room", lambda needed_bytes: False)
    assert not await restorer.make_room()
    assert copies.vids() == [files[2].vid], "what was read just now stays"
    assert not any(str(copies.path_of(one.vid)) in link for one in files[:2] for link in open_files())


def open_files() -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links
