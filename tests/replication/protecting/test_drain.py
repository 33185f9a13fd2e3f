"""A node that is to go: what only it has is protected first, in the order that matters, and then its shards leave it."""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import StoreState
from ckptfs.cache.mount_db_reader import MountDatabaseReader
from ckptfs.cache.store_registry import set_state, stores
from ckptfs.fs.cli_drain import not_ready
from ckptfs.fs.drain import Drain, NotClosed
from ckptfs.replication import replicator

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 3 * 4 * CELL


async def test_the_newest_complete_checkpoint_is_protected_first(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicator, "STRIPED_IN_PROGRESS_MAX", 1)
    node = cluster[0]
    node.codec.shut()
    under_way = await node.save("under-way", os.urandom(SIZE))
    await node.codec.reached()
    names = ["notes", "step-1.pt", "step-3.pt", "step-4.pt.tmp"]
    saved = {name: await node.save(name, os.urandom(SIZE), wake=False) for name in names}
    report: dict[str, Any] = {}

    async def drain() -> None:
        report.update(await node.ask("drain", deadline=60, leave=False))

    cluster.nursery.start_soon(drain)
    while not node.running.replicator._preferred:
        await trio.sleep(0.01)
    node.codec.open()
    await node.protected(under_way, *saved.values())
    while not report:
        await trio.sleep(0.01)
    assert [(one["path"], one["complete"], one["protected"]) for one in report["checkpoints"]] == [
        ("/step-3.pt", True, True),
        ("/step-1.pt", True, True),
        ("/notes", True, True),
        ("/under-way", True, True),
        ("/step-4.pt.tmp", False, True),
    ]
    assert (report["files"], report["bytes"], report["left_files"], report["left"]) == (5, 5 * SIZE, 0, [])
    entries = {entry.key: entry.mod_revision for entry in await node.kv.range(b"v/")}
    order = sorted(names, key=lambda name: entries[b"v/" + saved[name].vid.hex().encode()])
    assert order == ["step-3.pt", "step-1.pt", "notes", "step-4.pt.tmp"]


async def test_what_was_not_protected_in_time_is_said(cluster: Any) -> None:
    node = cluster[0]
    node.codec.shut()
    await node.save("step-1.pt", os.urandom(SIZE))
    await node.codec.reached()
    report = await node.ask("drain", deadline=0.3, leave=False)
    node.codec.open()
    assert (report["files"], report["left_files"], report["left_bytes"]) == (0, 1, SIZE)
    assert report["left"] == [{"path": "/step-1.pt", "bytes": SIZE}]
    assert [one["protected"] for one in report["checkpoints"]] == [False]


@pytest.mark.parametrize("cluster", [1], indirect=True)
async def test_a_node_alone_keeps_nobody_waiting(cluster: Any) -> None:
    await cluster[0].save("step-1.pt", os.urandom(SIZE))
    report = await cluster[0].ask("drain", deadline=1e6, leave=False)
    assert report["left_files"] == 1


@pytest.mark.parametrize("cluster", [7], indirect=True)
async def test_a_node_that_leaves_takes_no_new_shards_and_loses_those_it_has(cluster: Any) -> None:
    node = cluster[0]
    saved = [await node.save(name, os.urandom(SIZE)) for name in ("step-1.pt", "step-2.pt", "step-3.pt")]
    before = await node.protected(*saved)
    held = sum(shard.store == node.store.store_id for version in before for shard in version.shards)
    assert (await node.ask("held"))["named"] == held
    report = await node.ask("drain", deadline=60, leave=True)
    assert report["ok"], report
    assert report["left_files"] == 0
    new = await node.save("step-4.pt", os.urandom(SIZE))
    for other in cluster.nodes:
        await other.running.members.refresh(everyone=True)
        await other.running.rebuilder.look()
    assert (await node.ask("held"))["named"] == 0
    for version in await node.protected(*saved, new):
        assert node.store.store_id not in [shard.store for shard in version.shards]
    assert any("this node drains" in problem for problem in (await node.ask("status"))["problems"])
    await node.ask("join_again")
    assert (await node.ask("status"))["problems"] == []
    (member,) = [one for one in node.running.members.known() if one.store == node.store.store_id]
    assert member.state is StoreState.IN
    await node.down()
    for one in [*saved, new]:
        assert await cluster[1].content(one) == one.content


class Mount:
    """What a drain asks its mount; None: no answer. The last answer is given again and again."""

    def __init__(self, *answers: NotClosed | None) -> None:
        self.answers = list(answers)
        self.settles = trio.Event()
        self.settles.set()

    async def settle(self) -> None:
        await self.settles.wait()

    async def not_closed(self) -> NotClosed | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def drained(node: Any, mount: Mount, deadline_seconds: float = 60.0, mount_db: Path | None = None) -> dict[str, Any]:
    with closing(MountDatabaseReader(mount_db or node.store.mount_db)) as waiting:
        drain = Drain(node.kv, node.running.replicator, waiting, mount.settle, mount.not_closed, lambda: True)
        return {"node": "node-0", **await drain.protect(deadline_seconds)}


async def test_a_mount_that_does_not_answer_is_asked_until_it_does(cluster: Any) -> None:
    mount = Mount(None, None, NotClosed(1, 0), None, NotClosed(0, 0))
    report = await drained(cluster[0], mount)
    assert (report["unknown"], not_ready(report), len(mount.answers)) == ("", "", 1)


async def test_what_nobody_could_ask_in_time_is_not_called_done(cluster: Any) -> None:
    """Files that are closed and not sealed are known to the mount only."""
    report = await drained(cluster[0], Mount(None), 0.3)
    assert (report["left_files"], report["unknown"]) == (0, "its mount process does not answer")
    hanging = Mount(NotClosed(0, 0))
    hanging.settles = trio.Event()
    report = await drained(cluster[0], hanging, 0.3)
    assert report["unknown"]
    assert "node-0 has is protected is not known" in not_ready(report)
    assert not not_ready(await drained(cluster[0], Mount(NotClosed(0, 0))))
    assert "1 are being written" in not_ready(await drained(cluster[0], Mount(NotClosed(0, 1))))


async def test_a_list_of_what_waits_that_can_not_be_read_is_not_an_empty_one(cluster: Any, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mount.db")) as database:
        database.execute("CREATE TABLE file(ino)")
    report = await drained(cluster[0], Mount(NotClosed(0, 0)), 0.3, tmp_path / "mount.db")
    assert "can't be read now" in report["unknown"]


async def test_what_is_sealed_while_it_asks_is_not_missed(cluster: Any) -> None:
    node = cluster[0]

    class Sealing(Mount):
        saved: Sequence[Any] = ()

        async def not_closed(self) -> NotClosed | None:
            if not self.saved:
                self.saved = [await node.save("step-1.pt", os.urandom(SIZE))]
            return NotClosed(0, 0)

    mount = Sealing(NotClosed(0, 0))
    report = await drained(node, mount)
    assert (report["files"], not_ready(report)) == (1, "")
    assert [version.state.name for version in await node.protected(*mount.saved)] == ["PROTECTED"]


@pytest.mark.parametrize("cluster", [3], indirect=True)
@pytest.mark.parametrize("state", [StoreState.LOST, StoreState.REMOVED])
async def test_who_is_no_member_any_more_neither_drains_nor_stays(cluster: Any, state: StoreState) -> None:
    """A lost store's files come back before it is in again, a removed one never is; whoever asks is told."""
    node = cluster[0]
    assert (await node.ask("drain", deadline=60, leave=True))["state"] == "draining"
    await set_state(node.running.kv, node.store.store_id, state)
    for request in ({"do": "join_again"}, {"do": "drain", "deadline": 60, "leave": True}):
        answer = await node.ask(**request)
        assert answer == {"ok": True, "state": state.name.lower()}
        record, _ = (await stores(node.running.kv))[node.store.store_id]
        assert record.state is state
