"""Scrubbing finds what is wrong or missing, makes it again, and goes on after a restart; readers have repaired what they meet."""

import contextlib
import errno
import os
import sqlite3
from typing import Any

import pytest
import trio

from ckptfs.fs import agent
from ckptfs.replication import scrub
from ckptfs.replication.scrub import FACT

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 17


def damage(path: Any) -> None:
    with open(path, "r+b") as file:
        file.seek(4096 + CELL + 5)
        file.write(b"wrong")


async def held_by(cluster: Any, saved: Any) -> list[tuple[Any, int]]:
    version = await cluster[0].version(saved)
    return [(cluster[cluster.number_of(shard.store)], index) for index, shard in enumerate(version.shards)]


async def test_wrong_and_missing_shards_are_made_again(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    small = await cluster[0].save("small", os.urandom(1000))
    await cluster[0].protected(saved, small)
    holders = await held_by(cluster, saved)
    paths = [node.shard_path(saved, index) for node, index in holders]
    before = [path.read_bytes() for path in paths]
    damage(paths[1])
    paths[4].unlink()
    with open(paths[5], "r+b") as file:
        file.truncate(100)
    copy_holder = (await held_by(cluster, small))[0][0]
    with contextlib.closing(sqlite3.connect(copy_holder.store.small_copies_db)) as database, database:
        database.execute("UPDATE copies SET content = zeroblob(size)")
    for node in cluster.nodes:
        await node.running.scrub.pass_over()
    assert [path.read_bytes() for path in paths] == before
    states = [node.running.scrub.statistics().state for node in cluster.nodes]
    assert sum(state.last.checked for state in states) == 6 + 3
    assert sum(state.last.wrong for state in states) == 3
    assert sum(state.last.missing for state in states) == 1
    assert sum(state.last.made_again for state in states) == 4
    assert {state.last.not_made_again for state in states} == {0}
    answer = await cluster[2].ask("verify", inos=[saved.ino, small.ino], deep=True)
    assert {file["result"] for file in answer["files"]} == {"ok"}
    for node in cluster.nodes:
        await node.running.scrub.pass_over()
        assert node.running.scrub.statistics().state.last.wrong == 0


async def test_a_shard_the_drive_does_not_open_is_like_a_damaged_one(cluster: Any) -> None:
    """Its inode may be what the drive can't give. A link that leads to itself is refused in the same place, with ELOOP."""
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    await cluster[0].protected(saved)
    holders = await held_by(cluster, saved)
    path, node = holders[1][0].shard_path(saved, 1), holders[1][0]
    before = path.read_bytes()

    def spoil() -> None:
        path.unlink()
        path.symlink_to(path)

    spoil()
    for reader in (node, next(other for other in cluster.nodes if other is not node)):
        reader.drop_copies()
        assert await reader.content(saved) == saved.content
        answer = await reader.ask("verify", inos=[saved.ino])
        assert [file["damaged"] for file in answer["files"]] == [[1]]
    await node.running.scrub.pass_over()
    assert path.read_bytes() == before
    spoil()
    answer = await cluster[0].ask("verify", inos=[saved.ino], repair=True)
    assert path.read_bytes() == before


async def test_a_shard_that_can_not_be_looked_at_now_keeps_no_other_waiting(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [await cluster[0].save(f"step-{number}", os.urandom(SIZE)) for number in range(2)]
    await cluster[0].protected(*saved)
    node = cluster[0]
    first, last = sorted(saved, key=lambda one: one.vid)
    [index] = [index for holder, index in await held_by(cluster, last) if holder is node]
    damage(node.shard_path(last, index))
    real = os.open

    def full(path: Any, *others: Any, **named: Any) -> int:
        if first.vid.hex() in os.fspath(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *others, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        await node.running.scrub.pass_over()
    last_pass = node.running.scrub.statistics().state.last
    assert (last_pass.checked, last_pass.wrong, last_pass.made_again, last_pass.not_looked_at) == (2, 1, 1, 1)
    assert "could not look at 1 shards here" in "".join((await node.ask("status"))["problems"])
    await node.running.scrub.pass_over()
    assert "could not look at" not in "".join((await node.ask("status"))["problems"])


async def test_a_stripe_that_is_larger_than_all_buffers_is_read_and_made_again(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code of 16+4 has stripes of 20 MiB."""
    monkeypatch.setattr(agent, "VERIFY_BUFFER_BYTES", CELL)
    cluster.buffer_bytes_max = CELL
    for node in cluster.nodes:
        await node.down()
        await node.up()
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    await cluster[0].protected(saved)
    holder, index = (await held_by(cluster, saved))[1]
    path = holder.shard_path(saved, index)
    before = path.read_bytes()
    damage(path)
    reader = next(node for node in cluster.nodes if node is not holder)
    assert await reader.content(saved) == saved.content
    answer = await reader.ask("verify", inos=[saved.ino], deep=True)
    assert [file["damaged"] for file in answer["files"]] == [[index]]
    await holder.running.scrub.pass_over()
    assert path.read_bytes() == before


async def test_a_restart_goes_on_where_it_was(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [await cluster[0].save(f"step-{number}", os.urandom(SIZE)) for number in range(6)]
    await cluster[0].protected(*saved)
    first, last = min(saved, key=lambda one: one.vid), max(saved, key=lambda one: one.vid)
    node = cluster[0]
    await node.down()
    await node.up()
    monkeypatch.setattr(scrub, "NOTED_SECONDS", 0.0)
    index = next(index for holder, index in await held_by(cluster, first) if holder is node)
    looked: list[Any] = []
    under_way = node.running.scrub._is_right

    async def cut_off(vid: Any, *others: Any) -> bool:
        if len(looked) == 3:
            raise OSError("the power went")
        looked.append(vid)
        return bool(await under_way(vid, *others))

    monkeypatch.setattr(node.running.scrub, "_is_right", cut_off)
    with pytest.raises(OSError, match="the power went"):
        await node.running.scrub.pass_over()
    assert looked == sorted(one.vid for one in saved)[:3]
    progress = node.running.scrub.statistics().progress
    assert progress is not None
    assert progress < 1
    damage(node.shard_path(first, index))  # behind the place where it is
    await node.down()
    await node.up()
    await node.running.scrub.pass_over()
    state = node.running.scrub.statistics().state
    assert (state.last.checked, state.last.wrong) == (6 + 0, 0), (
        "the one that was cut off is looked at again, those before it not"
    )
    assert node.running.index.fact(FACT) is not None
    assert node.running.scrub._wait_seconds() <= 7 * 86400
    await node.running.scrub.pass_over()
    assert node.running.scrub.statistics().state.last.made_again == 1
    assert last.vid > first.vid


async def test_what_can_not_be_made_again_is_said(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    await cluster[0].protected(saved)
    holders = await held_by(cluster, saved)
    os.unlink(cluster[0].segments.path_of(saved.segment))
    for node, index in holders[:3]:
        node.shard_path(saved, index).unlink()
    scrubbed = holders[0][0]
    await scrubbed.running.scrub.pass_over()
    answer = await scrubbed.ask("status")
    assert answer["scrub"]["last"]["not_made_again"] == 1
    assert "could not be made again" in "".join(answer["problems"])


async def test_what_a_reader_finds_wrong_is_repaired(cluster: Any) -> None:
    cluster.repairs_reads = True
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    small = await cluster[0].save("small", os.urandom(1000))
    await cluster[0].protected(saved, small)
    holders = await held_by(cluster, saved)
    path = holders[1][0].shard_path(saved, 1)
    before = path.read_bytes()
    damage(path)
    reader = cluster[3]
    await reader.down()
    await reader.up()
    assert await reader.content(saved) == saved.content
    with trio.fail_after(30):
        while path.read_bytes() != before:
            await trio.sleep(0.01)
    for node, _ in await held_by(cluster, small):
        if node is not reader:
            node.running.small_copies.delete(
                [(copy.vid, copy.stored_at_ns) for copy in node.running.small_copies.list() if copy.vid == small.vid]
            )
            break
    assert await reader.content(small) == small.content
