"""Segments that their own drive damaged, and local copies: found, named, never read, made right out of shards; and the other way
round, shards made right out of a segment."""

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState, Version, VersionState
from ckptfs.cache.ids import new_segment_id
from ckptfs.cache.store_registry import set_state
from ckptfs.replication.errors import NotEnoughShards
from ckptfs.replication.shard_format import HEADER_SIZE

pytestmark = pytest.mark.slow

CELL = 16 << 10
STRIPES = 6
SIZE = STRIPES * 4 * CELL - 100
SMALL_SIZE = 1000


def flip(path: Any, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def cut(path: Any, offset: int) -> None:
    os.truncate(path, offset)


def lengthen(path: Any, offset: int) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


DAMAGES = {"flipped": flip, "cut off": cut, "longer": lengthen}


async def saved_and_protected(cluster: Any, size: int = SIZE, home: int = 0) -> tuple[Any, Version]:
    saved = await cluster[home].save(f"of-{size}", os.urandom(size))
    (version,) = await cluster[home].protected(saved)
    await cluster[home].settled()
    return saved, version


async def local(cluster: Any, size: int = SIZE) -> Any:
    """A file of node 0 that isn't protected: its agent is down, so that it can't be."""
    await cluster.down(0)
    return await cluster[0].save(f"of-{size}", os.urandom(size))


def damage_or_remove(damage: str, path: Path, offset: int) -> None:
    if damage == "gone":
        path.unlink()
    else:
        DAMAGES[damage](path, offset)


async def verify(node: Any, saved: Any, **options: Any) -> dict[str, Any]:
    answer = await node.ask("verify", inos=[saved.ino], **options)
    assert answer["ok"], answer
    (report,) = answer["files"]
    return dict(report)


def segment_path(cluster: Any, saved: Any, segment: Any = None) -> Path:
    return Path(cluster[0].segments.path_of(segment or saved.segment))


def shard_path(cluster: Any, saved: Any, version: Version, index: int) -> Path:
    return Path(cluster[cluster.number_of(version.shards[index].store)].shard_path(saved, index))


def spoil_copy(node: Any) -> None:
    """Damage every whole copy of a small file that the node holds."""
    with closing(sqlite3.connect(node.store.small_copies_db)) as database, database:
        database.execute("UPDATE copies SET content = zeroblob(size)")


# ---- a protected version, damaged at its home


@pytest.mark.parametrize("size", [SIZE, SMALL_SIZE])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("asked", [0, 3])
async def test_a_damaged_segment_is_found_and_made_anew(cluster: Any, size: int, damage: str, asked: int) -> None:
    saved, version = await saved_and_protected(cluster, size)
    DAMAGES[damage](segment_path(cluster, saved), size // 2)
    found = await verify(cluster[asked], saved, deep=True)
    assert (found["result"], found["segment"]) == ("damaged", "damaged"), found
    assert saved.segment.hex() in found["message"]
    assert "node-0" in found["message"]
    assert (await cluster[0].version(saved)).damaged
    # From now on it is known, also to those who don't look.
    assert (await verify(cluster[asked], saved))["result"] == "damaged"
    repaired = await verify(cluster[asked], saved, deep=True, repair=True)
    assert (repaired["result"], repaired["segment"], repaired["repaired"]) == ("repaired", "repaired", []), repaired
    after = await cluster[0].version(saved)
    assert (after.damaged, after.shards, after.root) == (False, version.shards, version.root)
    assert after.segment != saved.segment
    assert segment_path(cluster, saved, after.segment).read_bytes() == saved.content
    assert not segment_path(cluster, saved).exists()
    for deep in (False, True):
        assert (await verify(cluster[asked], saved, deep=deep))["result"] == "ok"
    assert cluster[0].running.copies.vids() == []


@pytest.mark.parametrize("asked", [0, 3])
async def test_a_segment_that_is_gone_is_missing_and_made_anew(cluster: Any, asked: int) -> None:
    """The bytes are safe in shards, but the catalog names a file that its drive no longer has."""
    saved, version = await saved_and_protected(cluster)
    segment_path(cluster, saved).unlink()
    found = await verify(cluster[asked], saved, deep=True)
    assert (found["result"], found["segment"], found["protected"]) == ("missing", "missing", True), found
    assert "makes the segment anew" in found["message"]
    assert (await verify(cluster[asked], saved))["result"] == "missing", "it is known now"
    repaired = await verify(cluster[asked], saved, deep=True, repair=True)
    assert (repaired["result"], repaired["segment"]) == ("repaired", "repaired"), repaired
    assert "--repair" not in repaired["message"], "what is done needs no advice"
    after = await cluster[0].version(saved)
    assert (after.damaged, after.shards) == (False, version.shards)
    assert segment_path(cluster, saved, after.segment).read_bytes() == saved.content
    assert (await verify(cluster[asked], saved, deep=True))["result"] == "ok"


async def test_the_cells_that_are_wrong_are_named(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster)
    for cell in (3, 17):
        flip(segment_path(cluster, saved), cell * CELL + 5)
    message = (await verify(cluster[2], saved, deep=True))["message"]
    assert "cells 3, 17 of 24 are not what was hashed" in message


async def test_plain_verify_looks_at_shards_only(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster)
    flip(segment_path(cluster, saved), 5)
    assert (await verify(cluster[2], saved))["result"] == "ok"


async def test_an_empty_file_that_got_bytes_is_found_and_made_anew(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster, 0)
    lengthen(segment_path(cluster, saved), 0)
    assert (await verify(cluster[2], saved, deep=True))["result"] == "damaged"
    assert (await verify(cluster[2], saved, deep=True, repair=True))["result"] == "repaired"
    assert (await verify(cluster[2], saved, deep=True))["result"] == "ok"
    assert segment_path(cluster, saved, (await cluster[0].version(saved)).segment).read_bytes() == b""


async def test_a_segment_that_is_right_again_counts_again(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster)
    flip(segment_path(cluster, saved), 5)
    await verify(cluster[2], saved, deep=True)
    flip(segment_path(cluster, saved), 5)
    assert (await verify(cluster[2], saved))["result"] == "ok"
    after = await cluster[0].version(saved)
    assert (after.damaged, after.segment) == (False, saved.segment)


async def test_a_home_that_finds_its_segment_right_changes_nothing(cluster: Any) -> None:
    """Whoever asks it to mend it: a peer's word isn't believed."""
    saved, version = await saved_and_protected(cluster)
    async with cluster[1].running.holders.reading(cluster[0].store.store_id) as client:
        mended = await client.mend_segment(saved.vid)
    assert (mended.right, mended.message) == (True, "it was hashed again, and is right")
    assert await cluster[0].version(saved) == version


async def test_a_version_opened_for_writing_meanwhile_is_not_called_damaged(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster)
    home = cluster[0]
    real = home.running.holders.segment_hashes

    async def hash_as_it_is_rewritten(*arguments: Any) -> Any:
        opened = await home.versions.open_for_writing(saved.ino, truncate_to_new_segment=None)
        flip(home.segments.path_of(opened.segment), 5)
        return await real(*arguments)

    home.running.holders.segment_hashes = hash_as_it_is_rewritten
    report = await verify(home, saved, deep=True)
    assert (report["result"], report["segment"]) == ("ok", ""), report


async def test_a_home_that_is_away_takes_nothing_from_a_protected_version(cluster: Any) -> None:
    saved, version = await saved_and_protected(cluster)
    await cluster.down(0)
    plain, deep = [await verify(cluster[2], saved, deep=deep) for deep in (False, True)]
    own = [index for index, shard in enumerate(version.shards) if shard.store == cluster[0].store.store_id]
    assert (plain["result"], plain["unreachable"]) == ("unreachable", own)
    assert (deep["result"], deep["unreachable"]) == ("unreachable", own)


async def test_damaged_shards_and_a_damaged_segment_make_each_other_right(cluster: Any) -> None:
    """Three shards of six are gone, and the segment has two wrong cells: no source is enough alone."""
    saved, version = await saved_and_protected(cluster)
    gone = [0, 1, 4]
    before = {index: shard_path(cluster, saved, version, index).read_bytes() for index in gone}
    for index in gone:
        shard_path(cluster, saved, version, index).unlink()
    for cell in (2, 4 * 5 + 3):  # of shards that are there
        flip(segment_path(cluster, saved), cell * CELL)
    for deep in (False, True):
        found = await verify(cluster[2], saved, deep=deep)
        assert (found["result"], found["missing"], found["segment"]) == ("damaged", gone, "damaged"), found
    repaired = await verify(cluster[2], saved, repair=True)
    assert (repaired["result"], repaired["repaired"], repaired["segment"]) == ("repaired", gone, "repaired"), repaired
    assert {index: shard_path(cluster, saved, version, index).read_bytes() for index in gone} == before
    assert (await verify(cluster[2], saved, deep=True))["result"] == "ok"


async def test_what_can_be_made_anew_from_nothing_is_lost_and_left_alone(cluster: Any) -> None:
    saved, version = await saved_and_protected(cluster)
    for index in (0, 1, 4):
        shard_path(cluster, saved, version, index).unlink()
    for cell in (0, 1):  # of the shards that are gone; with one of them right, all would be
        flip(segment_path(cluster, saved), cell * CELL + 5)
    wrong = segment_path(cluster, saved).read_bytes()
    for deep in (False, True):
        for repair in (False, True):
            report = await verify(cluster[2], saved, deep=deep, repair=repair)
            assert (report["result"], report["missing"], report["segment"]) == ("lost", [0, 1, 4], "damaged"), report
    assert segment_path(cluster, saved).read_bytes() == wrong
    assert (await cluster[0].version(saved)).segment == saved.segment


# ---- a version that waits


@pytest.mark.parametrize("size", [SIZE, SMALL_SIZE])
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
async def test_damage_before_protection_is_said_and_nothing_repairs_it(cluster: Any, size: int, damage: str) -> None:
    saved = await local(cluster, size)
    damage_or_remove(damage, segment_path(cluster, saved), size // 2)
    cluster[0].codec.shut()
    await cluster[0].up()
    for node in (cluster[3], cluster[0]):
        for options in ({}, {"deep": True}, {"repair": True}, {"deep": True, "repair": True}):
            report = await verify(node, saved, **options)
            assert report["result"] == "damaged", report
            assert "not protected, so nothing can repair it" in report["message"]
    version = await cluster[0].version(saved)
    assert (version.state, version.damaged, version.segment) == (VersionState.LOCAL, True, saved.segment)
    cluster[0].codec.open()
    await cluster.down(0)
    for deep in (False, True):
        assert (await verify(cluster[3], saved, deep=deep))["result"] == "damaged"


@pytest.mark.parametrize("size", [SIZE, SMALL_SIZE])
@pytest.mark.parametrize("damage", [*DAMAGES, "gone"])
async def test_what_the_replicator_finds_damaged_is_known_to_all(cluster: Any, size: int, damage: str) -> None:
    node = cluster[0]
    saved = await local(cluster, size)
    path = segment_path(cluster, saved)
    right = path.read_bytes()
    damage_or_remove(damage, path, size // 2)
    await node.up()
    with trio.fail_after(30):
        while not (await node.version(saved)).damaged:
            await trio.sleep(0.01)
    with trio.fail_after(30):  # what can't be protected holds up nothing else
        while not node.running.replicator.is_idle():
            await trio.sleep(0.01)
    status = await node.ask("status")
    assert (status["damaged_count"], status["waiting_count"]) == (1, 1)
    assert (await verify(cluster[4], saved))["result"] == "damaged"
    if damage != "gone":  # somebody puts the bytes back
        path.write_bytes(right)
        assert (await verify(cluster[4], saved))["result"] == "unprotected"
        assert not (await node.version(saved)).damaged
        await node.down()
        await node.up()
        await node.protected(saved)
        assert (await node.ask("status"))["damaged_count"] == 0


async def test_what_waits_and_is_right_is_unprotected(cluster: Any) -> None:
    saved = await local(cluster)
    cluster[0].codec.shut()
    await cluster[0].up()
    for deep in (False, True):
        report = await verify(cluster[1], saved, deep=deep)
        assert (report["result"], report["segment"], report["message"]) == ("unprotected", "ok", "")


@pytest.mark.parametrize("deep", [False, True])
async def test_what_waits_on_a_home_that_is_away_is_unreachable(cluster: Any, deep: bool) -> None:
    saved = await local(cluster)
    created = await cluster[0].namespace.create_file(1, b"being-written", 0o100644, 0, 0, new_segment_id())
    report = await verify(cluster[1], saved, deep=deep)
    assert report["result"] == "unreachable"
    assert "only node-0 has its bytes" in report["message"]
    answer = await cluster[1].ask("verify", inos=[created.ino], deep=deep)
    assert answer["files"][0]["result"] == "unreachable"


@pytest.mark.parametrize("deep", [False, True])
async def test_what_waits_on_a_home_that_is_lost_is_lost(cluster: Any, deep: bool) -> None:
    saved = await local(cluster)
    await set_state(cluster[1].kv, cluster[0].store.store_id, StoreState.LOST)
    assert (await verify(cluster[1], saved, deep=deep))["result"] == "lost"


# ---- local copies


@pytest.mark.parametrize("size", [SIZE, SMALL_SIZE])
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_damaged_local_copy_is_named_and_fetched_anew(cluster: Any, size: int, restarted: bool) -> None:
    saved, _ = await saved_and_protected(cluster, size)
    reader = cluster[3]
    assert await reader.content(saved) == saved.content
    path = reader.running.copies.path_of(saved.vid)
    if restarted:
        await reader.down()
    flip(path, size // 2)
    if restarted:
        await reader.up()
        await cluster[2].running.members.refresh(everyone=True)  # what was away a moment ago
    assert (await verify(cluster[2], saved))["result"] == "ok"
    for _ in range(2):
        found = await verify(cluster[2], saved, deep=True)
        assert (found["result"], found["copies"]) == ("damaged", ["node-3"]), found
        assert "the local copy on node-3" in found["message"]
    repaired = await verify(cluster[2], saved, deep=True, repair=True)
    assert (repaired["result"], repaired["copies"]) == ("repaired", []), repaired
    assert path.read_bytes() == saved.content
    assert (await verify(cluster[2], saved, deep=True))["result"] == "ok"


async def test_what_a_copy_never_got_is_not_damage(cluster: Any) -> None:
    saved, _ = await saved_and_protected(cluster)
    reader = cluster[3]
    assert (await reader.ask("fetch", ino=saved.ino, vid=saved.vid, offset=4 * 4 * CELL, length=10))["ok"]
    path = reader.running.copies.path_of(saved.vid)
    await reader.down()
    with open(path, "r+b") as file:  # the beginning of a cell: its fetching was cut off
        file.write(b"x" * 4096)
    await reader.up()
    await cluster[2].running.members.refresh(everyone=True)
    assert (await verify(cluster[2], saved, deep=True))["result"] == "ok"


# ---- too few good shards


@pytest.mark.parametrize("size", [SIZE, 9 << 10, SMALL_SIZE])
@pytest.mark.parametrize("how", ["damaged", "deleted", "away"])
async def test_a_reader_elsewhere_gets_the_bytes_from_the_home(cluster: Any, size: int, how: str) -> None:
    home = 0
    saved, version = await saved_and_protected(cluster, size)
    small = len(version.shards) == 3
    holders = [cluster.number_of(shard.store) for shard in version.shards]
    spoilt = [index for index in range(len(holders)) if small or index in (0, 2, 3, 5)]
    for index in spoilt:
        if how == "away" and holders[index] != home:
            await cluster.down(holders[index])
        elif small:
            spoil_copy(cluster[holders[index]])
        elif how == "damaged":
            path = shard_path(cluster, saved, version, index)
            for stripe in range(STRIPES):
                if path.stat().st_size > HEADER_SIZE + stripe * CELL + 100:
                    flip(path, HEADER_SIZE + stripe * CELL)
        else:
            shard_path(cluster, saved, version, index).unlink()
    reader = next(node for node in reversed(cluster.nodes) if node.agent is not None and node.number != home)
    assert await reader.content(saved) == saved.content
    assert reader.running.reader.counters.cells_from_home > 0
    assert (await reader.ask("status"))["restorer"]["cells_from_home"] > 0


async def test_without_any_footer_the_home_gives_the_table_too(cluster: Any) -> None:
    saved, version = await saved_and_protected(cluster)
    for index in range(6):
        shard_path(cluster, saved, version, index).unlink()
    assert await cluster[3].content(saved) == saved.content


async def test_wrong_bytes_of_the_home_are_never_read(cluster: Any) -> None:
    saved, version = await saved_and_protected(cluster)
    for index in range(3):
        shard_path(cluster, saved, version, index).unlink()
    for cell in (8, 9, 10):  # of stripe 2 and shards 0 to 2
        flip(segment_path(cluster, saved), cell * CELL + 1)
    good = await cluster[3].ask("fetch", ino=saved.ino, vid=saved.vid, offset=0, length=100)
    assert good["ok"]
    bad = await cluster[3].ask("fetch", ino=saved.ino, vid=saved.vid, offset=4 * 2 * CELL, length=100)
    assert (bad["ok"], bad["error"]) == (False, "damaged")
    assert "of the home's segment is not what was hashed" in bad["message"]


async def test_a_rewritten_segment_gives_no_old_bytes(cluster: Any) -> None:
    """The version's record names no segment any more, and a reader that has an older record finds other bytes."""
    saved, version = await saved_and_protected(cluster)
    for index in range(3):
        shard_path(cluster, saved, version, index).unlink()
    old = await cluster[3].version(saved)
    await cluster[0].rewrite(saved, os.urandom(SIZE), wake=False)
    with pytest.raises(NotEnoughShards, match="stripe 0 has 3 of the 4 cells"):
        await cluster[3].running.restorer.fetch(saved.vid, old, 0, 100)


async def test_holders_that_hang_are_gone_round_by_the_home(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfs.replication.stripe_reader.HOME_AFTER_SECONDS", 0.2)
    saved, version = await saved_and_protected(cluster)
    hanging = {shard.store for shard in version.shards[1:4]}
    reader = next(node for node in cluster.nodes if node.number and node.store.store_id not in hanging)
    holders = reader.running.holders
    real, real_cells = holders.read_cell, holders.cells

    async def read_cell(store: Any, *arguments: Any) -> int:
        if store in hanging:
            await trio.sleep_forever()
        return int(await real(store, *arguments))

    @asynccontextmanager
    async def cells(store: Any, *arguments: Any) -> AsyncIterator[Any]:
        if store in hanging:
            await trio.sleep_forever()
        async with real_cells(store, *arguments) as taken:
            yield taken

    holders.read_cell, holders.cells = read_cell, cells
    with trio.fail_after(20):
        assert await reader.content(saved) == saved.content
    assert reader.running.reader.counters.cells_from_home > 0


@pytest.mark.parametrize("size", [SIZE, 9 << 10, SMALL_SIZE])
async def test_shards_are_made_anew_from_the_home(cluster: Any, size: int) -> None:
    saved, version = await saved_and_protected(cluster, size)
    gone = list(range(len(version.shards)))
    for index in gone:
        if len(gone) == 3:
            spoil_copy(cluster[cluster.number_of(version.shards[index].store)])
        else:
            shard_path(cluster, saved, version, index).unlink()
    kind = "damaged" if len(gone) == 3 else "missing"
    for deep in (False, True):
        found = await verify(cluster[2], saved, deep=deep)
        assert (found["result"], found[kind]) == (kind, gone), found
    repaired = await verify(cluster[2], saved, repair=True, paths=[b"run/model.pt"])
    assert (repaired["result"], repaired["repaired"]) == ("repaired", gone), repaired
    assert (await verify(cluster[2], saved, deep=True))["result"] == "ok"
    assert await cluster[0].version(saved) == version
    segment_path(cluster, saved).unlink()
    await cluster.down(0)
    assert await cluster[3].content(saved) == saved.content


# ---- the words: plain and deep say the same


@pytest.mark.parametrize(
    ("damaged", "away", "home", "word"),
    [
        ([], [], "right", "ok"),
        ([], [2], "right", "unreachable"),
        ([], [1, 2, 3], "right", "unreachable"),
        ([1], [2], "right", "damaged"),
        ([1, 3], [2], "right", "damaged"),
        ([1, 3], [2], "damaged", "damaged"),
        ([1, 3, 4], [], "right", "damaged"),
        ([1, 3, 4], [], "damaged", "lost"),
        ([1, 3, 4], [], "gone", "lost"),
        ([1, 3, 4], [2], "damaged", "lost"),
        ([1, 3, 4], [], "away", "damaged"),
    ],
)
async def test_plain_and_deep_agree(cluster: Any, damaged: list[int], away: list[int], home: str, word: str) -> None:
    saved, version = await saved_and_protected(cluster)
    # The home holds a shard too; these are numbers of others.
    others = [index for index, shard in enumerate(version.shards) if shard.store != cluster[0].store.store_id]
    of_home = next(index for index, shard in enumerate(version.shards) if shard.store == cluster[0].store.store_id)
    for number in damaged:
        path = shard_path(cluster, saved, version, others[number % 5])
        path.write_bytes(b"something else" * 100)
    if home == "damaged":
        with open(segment_path(cluster, saved), "r+b") as file:
            file.write(bytes(SIZE))
    elif home == "gone":
        segment_path(cluster, saved).unlink()
    elif home == "away":
        await cluster.down(0)
    for number in away:
        await cluster.down(cluster.number_of(version.shards[others[number]].store))
    asked = [node for node in cluster.nodes if node.agent is not None][-1]
    plain, deep = [await verify(asked, saved, deep=deep) for deep in (False, True)]
    assert (plain["result"], deep["result"]) == (word, word), (plain, deep, of_home)
    for kind in ("damaged", "missing", "unreachable"):
        assert plain[kind] == deep[kind]
