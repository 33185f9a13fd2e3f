"""Damage of every kind done to real stores, and what `verify --repair` makes of it."""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_format import Version, VersionState
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, StoreId
from ckptfs.cache.versions import RepairedCommit
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.replication import shard_format
from ckptfs.replication.buffers import BufferBudget
from ckptfs.replication.errors import PeerUnreachable
from ckptfs.replication.quiet_threads import QuietThreads
from ckptfs.replication.repair import Repairer
from ckptfs.replication.shard_format import HEADER_SIZE, ShardFooter, ShardHeader
from ckptfs.replication.shard_reader import ShardReader
from ckptfs.replication.striped_attempt import ShardSink

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 3 * CELL + 17
STRIPES = 6


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def copy_foreign(path: Path) -> None:
    """Shard 0 of the same version is copied over it (not one that may have been damaged already)."""
    (other,) = path.parents[3].glob(f"*/shards/*/{path.stem}.0*")
    shutil.copyfile(other, path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "cell": lambda path: flip(path, HEADER_SIZE + CELL + 7),
    "last cell": lambda path: flip(path, HEADER_SIZE + 5 * CELL + 3),
    "header": lambda path: flip(path, 20),
    "behind the header": lambda path: flip(path, 1000),
    "footer": lambda path: flip(path, -100),
    "trailer": lambda path: flip(path, -3),
    "cut off": lambda path: os.truncate(path, HEADER_SIZE + 2 * CELL + 5),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "deleted": lambda path: path.unlink(),
    "foreign": copy_foreign,
}


async def shard_path(cluster: Any, version: Version, vid: Any, index: int) -> Path:
    node = cluster[cluster.number_of(version.shards[index].store)]
    return Path(node.running.shard_store.path_of(vid, index))


async def verify(node: Any, *inos: InodeNumber, **options: Any) -> list[dict[str, Any]]:
    answer = await node.ask("verify", inos=list(inos), **options)
    assert answer["ok"], answer
    files: list[dict[str, Any]] = answer["files"]
    return files


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_data_and_a_parity_shard_come_back_as_they_were(cluster: Any, damage: str) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    paths = {index: await shard_path(cluster, version, saved.vid, index) for index in (1, 5)}
    before = {index: path.read_bytes() for index, path in paths.items()}
    for path in paths.values():
        DAMAGES[damage](path)
    kind = "missing" if damage == "deleted" else "damaged"
    (found,) = await verify(cluster[2], saved.ino)
    assert (found["result"], found[kind], found["repaired"]) == (kind, [1, 5], [])
    (repaired,) = await verify(cluster[2], saved.ino, repair=True)
    assert (repaired["result"], repaired["repaired"], repaired["damaged"], repaired["missing"]) == ("repaired", [1, 5], [], [])
    assert {index: path.read_bytes() for index, path in paths.items()} == before
    (after,) = await verify(cluster[3], saved.ino, deep=True)
    assert after["result"] == "ok", after
    assert await cluster[0].version(saved) == version
    (again,) = await verify(cluster[3], saved.ino, repair=True)
    assert (again["result"], again["repaired"]) == ("ok", [])
    # The repaired shards are needed when two others are away.
    away = [cluster.number_of(version.shards[index].store) for index in (0, 3)]
    await cluster.down(*away)
    reader = next(node for node in cluster.nodes if node.number not in away and node.number != 0)
    assert await reader.content(saved) == saved.content


async def test_whole_stripes_are_repaired_in_runs(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    paths = [await shard_path(cluster, version, saved.vid, index) for index in (2, 4)]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    (found,) = await verify(cluster[1], saved.ino)
    assert found["missing"] == [2, 4]
    holders, read = cluster[1].running.holders, set[int]()
    real = holders.read_cell

    async def read_cell(store: Any, vid: Any, index: int, stripe: int, buffer: memoryview) -> int:
        read.add(stripe)
        return int(await real(store, vid, index, stripe, buffer))

    monkeypatch.setattr(holders, "read_cell", read_cell)
    (repaired,) = await verify(cluster[1], saved.ino, repair=True)
    assert repaired["repaired"] == [2, 4]
    assert read == {STRIPES - 1}  # the last one, which isn't whole
    assert [path.read_bytes() for path in paths] == before


async def test_what_verify_found_shows_in_status_until_it_is_repaired(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    for index in range(6):
        flip(await shard_path(cluster, version, saved.vid, index), HEADER_SIZE + index * CELL)
    requests = AgentRequests(cluster[2].running)
    request: dict[str, Any] = {"do": "verify", "inos": [saved.ino], "paths": [b"run/model.pt"]}
    await requests.answer(request)
    (problem,) = (await requests.answer({"do": "status"}))["problems"]
    assert "run/model.pt (damaged)" in problem
    (said,) = (await requests.answer({"do": "findings", "inos": [saved.ino]}))["findings"].values()
    assert said.startswith("damaged: shard 0 on ")
    await requests.answer(request | {"repair": True})
    assert (await requests.answer({"do": "status"}))["problems"] == []


@pytest.mark.parametrize("looks", [(True,), (False, True), (True, False)])
async def test_what_a_deep_look_found_is_right_after_a_repair_that_was_none(cluster: Any, looks: tuple[bool, ...]) -> None:
    """The repair looked at all that was found wrong, though not as deep."""
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    DAMAGES["empty"](await shard_path(cluster, version, saved.vid, 1))
    DAMAGES["foreign"](await shard_path(cluster, version, saved.vid, 4))
    requests = AgentRequests(cluster[2].running)
    request: dict[str, Any] = {"do": "verify", "inos": [saved.ino], "paths": [b"run/model.pt"]}
    for deep in looks:
        await requests.answer(request | {"deep": deep})
        assert "run/model.pt (damaged)" in (await requests.answer({"do": "status"}))["problems"][0]
    (repaired,) = (await requests.answer(request | {"repair": True}))["files"]
    assert (repaired["result"], repaired["repaired"]) == ("repaired", [1, 4])
    assert (await requests.answer({"do": "status"}))["problems"] == []
    assert (await requests.answer({"do": "findings", "inos": [saved.ino]}))["findings"] == {}
    (after,) = (await requests.answer(request | {"deep": True}))["files"]
    assert after["result"] == "ok"


async def test_cells_damaged_here_and_there_in_all_shards(cluster: Any) -> None:
    """More shards are damaged than can be lost, but no stripe has more than two wrong cells."""
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    paths = [await shard_path(cluster, version, saved.vid, index) for index in range(6)]
    before = [path.read_bytes() for path in paths]
    for index, path in enumerate(paths):
        for stripe in (index, (index + 1) % STRIPES):
            flip(path, HEADER_SIZE + stripe * CELL + index)
    os.unlink(cluster[0].segments.path_of(saved.segment))
    for deep in (False, True):
        (report,) = await verify(cluster[1], saved.ino, deep=deep)
        assert (report["result"], report["damaged"]) == ("damaged", [0, 1, 2, 3, 4, 5])
    (report,) = await verify(cluster[1], saved.ino, repair=True)
    assert (report["result"], report["repaired"]) == ("repaired", [0, 1, 2, 3, 4, 5])
    assert [path.read_bytes() for path in paths] == before


async def test_what_too_few_shards_are_left_of_is_lost_and_left_alone(cluster: Any) -> None:
    saved, other = await cluster[0].save("a", os.urandom(SIZE)), await cluster[0].save("b", os.urandom(SIZE))
    version, other_version = await cluster[0].protected(saved, other)
    for index in (0, 2, 4):
        (await shard_path(cluster, version, saved.vid, index)).unlink()
    os.unlink(cluster[0].segments.path_of(saved.segment))
    (await shard_path(cluster, other_version, other.vid, 0)).unlink()
    lost, repaired = await verify(cluster[1], saved.ino, other.ino, repair=True)
    assert (lost["result"], lost["missing"], lost["repaired"]) == ("lost", [0, 2, 4], [])
    assert "shard 0 was not repaired" in lost["message"]
    assert repaired["result"] == "repaired"
    for index in (0, 2, 4):
        assert not (await shard_path(cluster, version, saved.vid, index)).exists()


async def test_files_shorter_than_a_stripe(cluster: Any) -> None:
    """Some data shards have a short cell or none at all."""
    for size in (9 << 10, 8192 + 4096 * 2, CELL * 2 + 1):
        saved = await cluster[0].save(f"of-{size}", os.urandom(size))
        (version,) = await cluster[0].protected(saved)
        paths = [await shard_path(cluster, version, saved.vid, index) for index in range(6)]
        before = [path.read_bytes() for path in paths]
        for first, second in ((0, 3), (2, 4), (1, 5)):
            paths[first].unlink()
            flip(paths[second], -50)
            (report,) = await verify(cluster[1], saved.ino, repair=True)
            assert (report["result"], report["repaired"]) == ("repaired", [first, second]), report
            assert [path.read_bytes() for path in paths] == before


# ---- whole copies


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE copies SET content = zeroblob(size)",
        "UPDATE copies SET content = x'00'",
        "UPDATE copies SET root = zeroblob(16)",
        "DELETE FROM copies",
    ],
)
async def test_small_copies_come_back(cluster: Any, statement: str) -> None:
    saved = await cluster[0].save("config.json", os.urandom(1000))
    (version,) = await cluster[0].protected(saved)
    holders = [cluster[cluster.number_of(shard.store)] for shard in version.shards]
    assert len(holders) == 3
    for holder in holders[:2]:
        with contextlib.closing(sqlite3.connect(holder.store.small_copies_db)) as database, database:
            database.execute(statement)
    kind = "missing" if statement.startswith("DELETE") else "damaged"
    (found,) = await verify(cluster[1], saved.ino)
    assert (found["result"], found[kind]) == (kind, [0, 1])
    (repaired,) = await verify(cluster[1], saved.ino, repair=True, paths=[b"run/config.json"])
    assert (repaired["result"], repaired["repaired"]) == ("repaired", [0, 1]), repaired
    assert (await verify(cluster[1], saved.ino))[0]["result"] == "ok"
    for holder in holders:
        held, content = holder.running.small_copies.get(saved.vid)
        assert content == saved.content
        assert (held.ino, held.root) == (saved.ino, version.root)
    assert holders[0].running.small_copies.get(saved.vid)[0].path_hint == b"run/config.json"
    away = {cluster.number_of(holders[2].store.store_id), cluster.number_of(holders[1].store.store_id)}
    await cluster.down(*away)
    reader = next(node for node in cluster.nodes if node.number not in away)
    assert await reader.content(saved) == saved.content


# ---- other holders


@pytest.mark.parametrize("cluster", [7], indirect=True)
async def test_the_shard_of_a_holder_that_is_away_goes_to_a_spare_domain(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    small = await cluster[0].save("config.json", os.urandom(1000))
    version, small_version = await cluster[0].protected(saved, small)
    (spare,) = {node.store.store_id for node in cluster.nodes} - {shard.store for shard in version.shards}
    common = {shard.store for shard in version.shards} & {shard.store for shard in small_version.shards}
    away = next(number for number in range(6, -1, -1) if cluster[number].store.store_id in common)
    index = [shard.store for shard in version.shards].index(cluster[away].store.store_id)
    await cluster.down(away)
    asked = next(node for node in cluster.nodes if node.number != away)
    (found,) = await verify(asked, saved.ino)
    assert (found["result"], found["unreachable"]) == ("unreachable", [index])
    reports = await verify(asked, saved.ino, small.ino, repair=True)
    assert [report["result"] for report in reports] == ["repaired", "repaired"], reports
    assert reports[0]["repaired"] == [index]
    assert f"in place of node-{away}" in reports[0]["message"]
    after = await asked.version(saved)
    assert [shard.root for shard in after.shards] == [shard.root for shard in version.shards]
    expected = [spare if number == index else shard.store for number, shard in enumerate(version.shards)]
    assert [shard.store for shard in after.shards] == expected
    small_after = await asked.version(small)
    assert len({shard.store for shard in small_after.shards} - {cluster[away].store.store_id}) == 3
    # Any two of the six may be away now, beside the one that is.
    others = [cluster.number_of(store) for number, store in enumerate(expected) if number not in (index, (index + 1) % 6)]
    await cluster.down(*others[:2])
    reader = next(node for node in cluster.nodes if node.agent is not None)
    assert await reader.content(saved) == saved.content
    assert await reader.content(small) == small.content


async def test_without_a_spare_domain_a_shard_waits_for_its_holder(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    index = 3
    away = cluster.number_of(version.shards[index].store)
    (await shard_path(cluster, version, saved.vid, 1)).unlink()
    await cluster.down(away)
    asked = next(node for node in cluster.nodes if node.number != away)
    (report,) = await verify(asked, saved.ino, repair=True)
    assert (report["result"], report["repaired"], report["unreachable"]) == ("unreachable", [1], [index]), report
    assert "shard 3 was not repaired: its holder is away" in report["message"]
    assert await asked.version(saved) == version
    await cluster[away].up()
    assert (await verify(asked, saved.ino, deep=True))[0]["result"] == "ok"


def put_other_shard_in_place(path: Path) -> None:
    """A valid shard with the same header and other bytes, as no honest program can make one."""
    vid, index = bytes.fromhex(path.stem), int(path.suffix[1:])
    with ShardReader(str(path), vid, index) as reader:  # type: ignore[arg-type]
        header, footer = reader.header, reader.footer
    cells = [os.urandom(header.cell_length(stripe)) for stripe in range(header.cell_count)]
    other = ShardFooter(header, b"".join(map(cell_hash, cells)), footer.content_hashes, footer.ino, footer.path_hint)
    path.write_bytes(
        shard_format.pack_header(header).ljust(HEADER_SIZE, b"\0") + b"".join(cells) + shard_format.pack_footer(other)
    )


@pytest.mark.parametrize("cluster", [6, 7], indirect=True)
async def test_a_valid_shard_with_another_root_is_not_overwritten(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    path = await shard_path(cluster, version, saved.vid, 4)
    put_other_shard_in_place(path)
    wrong = path.read_bytes()
    (report,) = await verify(cluster[1], saved.ino, repair=True)
    assert path.read_bytes() == wrong
    if len(cluster.nodes) == 6:
        assert (report["result"], report["damaged"], report["repaired"]) == ("damaged", [4], [])
        assert "conflict" in report["message"]
    else:
        assert (report["result"], report["repaired"]) == ("repaired", [4]), report
        assert (await cluster[1].version(saved)).shards[4].root == version.shards[4].root
        assert (await verify(cluster[1], saved.ino, deep=True))[0]["result"] == "ok"


# ---- things that happen meanwhile


class Interrupted:
    """A node's holders and versions with something that happens once, at a chosen point of a repair."""

    def __init__(self, node: Any, happens: Callable[[], Any], *, at_stripe: int | None = None) -> None:
        self._node = node
        self._happens: Callable[[], Any] | None = happens
        self._at_stripe = at_stripe
        self.puts: list[tuple[StoreId, int, int]] = []
        self.commits: list[bool] = []

    async def version(self, vid: Any) -> Version | None:
        return await self._node.versions.version(vid)  # type: ignore[no-any-return]

    async def commit_repaired(self, repaired: RepairedCommit) -> bool:
        if self._at_stripe is None:
            await self.happen()
        self.commits.append(await self._node.versions.commit_repaired(repaired))
        return self.commits[-1]

    async def put_shard(self, store: StoreId, header: ShardHeader, *hints: Any) -> ShardSink:
        sink: ShardSink = await self._node.running.holders.put_shard(store, header, *hints)
        self.puts.append((store, header.index, sink.resume_stripe))
        return InterruptedSink(sink, self, self._at_stripe)

    async def happen(self) -> None:
        happens, self._happens = self._happens, None
        if happens is not None:
            await happens()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node.running.holders, name)


class InterruptedSink:
    def __init__(self, sink: ShardSink, interrupted: Interrupted, at_stripe: int | None) -> None:
        self.resume_stripe = sink.resume_stripe
        self._sink = sink
        self._interrupted = interrupted
        self._at_stripe = at_stripe

    async def send_cell(self, stripe: int, cell: memoryview, digest: bytes) -> None:
        if stripe == self._at_stripe:
            await self._interrupted.happen()
        await self._sink.send_cell(stripe, cell, digest)

    def send_cell_in_thread(self, stripe: int, cell: memoryview, digest: bytes) -> bool:
        if stripe == self._at_stripe:
            trio.from_thread.run(self._interrupted.happen)
        return self._sink.send_cell_in_thread(stripe, cell, digest)

    async def send_zeros(self, stripe: int, count: int) -> None:
        raise AssertionError("a repair sends what it has decoded")

    async def finish(self, own_table: bytes, content_table: bytes) -> bytes:
        return await self._sink.finish(own_table, content_table)

    async def aclose(self) -> None:
        await self._sink.aclose()


@contextlib.asynccontextmanager
async def repairer_of(node: Any, interrupted: Interrupted) -> AsyncIterator[tuple[Repairer, BufferBudget]]:
    budget = BufferBudget(1 << 20)
    agent = node.running
    with QuietThreads() as threads:
        yield Repairer(node.kv, interrupted, agent.members, interrupted, agent.codec, threads, budget.take), budget


@pytest.mark.parametrize("index", [1, 5])
async def test_a_repair_that_is_cut_off_goes_on_where_it_stopped(cluster: Any, index: int) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    path = await shard_path(cluster, version, saved.vid, index)
    before = path.read_bytes()
    path.unlink()
    node = cluster[2]

    async def breaks() -> None:
        raise PeerUnreachable("cut off")

    interrupted = Interrupted(node, breaks, at_stripe=3)
    async with repairer_of(node, interrupted) as (repairer, budget):
        await node.running.members.refresh()
        report = await node.running.verifier.verify(saved.ino, saved.vid, version)
        report = await repairer.repair(saved.ino, saved.vid, version, report)
    assert report.result == "repaired"
    assert [(where, resume) for _, where, resume in interrupted.puts] == [(index, 0), (index, 3)]
    assert path.read_bytes() == before
    assert (budget.current_bytes, budget.peak_bytes) == (0, 6 * CELL)  # one stripe, however long the file


@pytest.mark.parametrize("cluster", [7], indirect=True)
@pytest.mark.parametrize("at_stripe", [None, 2])
async def test_a_version_replaced_meanwhile_gets_no_new_holder(cluster: Any, at_stripe: int | None) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    away = next(number for number in range(6, 0, -1) if cluster[number].store.store_id in [s.store for s in version.shards])
    await cluster.down(away)
    node = cluster[0]
    new: list[Any] = []

    async def replaced() -> None:
        new.append(await node.rewrite(saved, os.urandom(SIZE)))
        await node.protected(new[0])

    interrupted = Interrupted(node, replaced, at_stripe=at_stripe)
    async with repairer_of(node, interrupted) as (repairer, _):
        await node.running.members.refresh()
        report = await node.running.verifier.verify(saved.ino, saved.vid, version)
        assert report.result == "unreachable"
        report = await repairer.repair(saved.ino, saved.vid, version, report)
    assert (report.result, report.repaired) == ("gone", [])
    assert interrupted.commits == ([False] if at_stripe is None else [])
    dead = await node.versions.version(saved.vid)
    assert dead is None or (dead.state is VersionState.DEAD and dead.shards == version.shards)
    assert await node.content(new[0]) == new[0].content
    (report_now,) = await verify(node, saved.ino, repair=True)
    assert report_now["result"] == "ok"


async def test_what_is_not_protected_needs_no_repair(cluster: Any) -> None:
    saved = await cluster[0].save("empty", b"")
    await cluster[0].protected(saved)
    created = await cluster[0].namespace.create_file(ROOT_INODE, b"open", 0o100644, 0, 0, saved.segment)
    reports = await verify(cluster[1], saved.ino, created.ino, ROOT_INODE, InodeNumber(999), repair=True)
    assert [(report["ino"], report["result"]) for report in reports] == [(saved.ino, "ok"), (created.ino, "unprotected")]
