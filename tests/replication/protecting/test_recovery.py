"""A lost catalog, rebuilt from real stores of which some are lost too; and the nodes that go on with it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_fill import REVISIONS_SKIPPED
from ckptfs.cache.catalog_format import NO_STORE, UNKNOWN_ROOT, VersionState, version_key
from ckptfs.cache.catalog_kv import Delete
from ckptfs.cache.errors import CacheError, DamagedData, NoSuchName, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId
from ckptfs.fs.catalog import place_of
from ckptfs.fs.recover import recover_catalog, write_inventory
from ckptfs.fs.recovered_catalog import take_note_of_recovery
from ckptfs.replication.inventory import Inventory, pack_inventory, take_inventory, unpack_inventory

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 3 * CELL + 17

slow = pytest.mark.slow


def content_of(size: int = SIZE) -> bytes:
    return os.urandom(size)


async def protected(node: Any, name: str, content: bytes) -> Any:
    saved = await node.save(name, content)
    await node.protected(saved)
    return saved


async def lose_catalog(cluster: Any, *wiped: int) -> None:
    """All nodes end, the catalog goes, and these stores."""
    for node in cluster.nodes:
        await node.close()
    for path in cluster.directory.glob("catalog.db*"):
        path.unlink()
    for number in wiped:
        shutil.rmtree(cluster.directory / f"node-{number}")


async def recovered(cluster: Any, *numbers: int, **options: Any) -> Any:
    paths = [cluster.directory / f"node-{number}" for number in numbers]
    return await recover_catalog(place_of(f"sqlite:///{cluster.directory}/catalog.db"), paths, dry_run=False, **options)


async def up_again(cluster: Any, count: int = 6) -> Any:
    """Nodes on the same stores, new ones where they were wiped."""
    again = type(cluster)(cluster.directory, cluster.nursery)
    for path in (cluster.directory / f"node-{number}" / "mount.db" for number in range(count)):
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
    await again.up(count)
    cluster.nodes = again.nodes  # so that they are closed in the end
    return again


async def look_up(node: Any, path: bytes) -> tuple[InodeNumber, Any]:
    ino, inode = ROOT_INODE, None
    for name in path.strip(b"/").split(b"/"):
        ino, inode = await node.namespace.lookup(ino, name)
    return ino, inode


async def content_at(cluster: Any, number: int, path: str, size: int) -> bytes:
    node = cluster[number]
    ino, inode = await look_up(node, path.encode())
    assert inode.size == size
    data = bytearray()
    while len(data) < size:
        length = min(100_000, size - len(data))
        answer = await node.ask("fetch", ino=ino, vid=inode.cur, offset=len(data), length=length)
        assert answer["ok"], answer
        if "data" in answer:
            data += answer["data"]
        else:
            with open(answer["copy"], "rb") as file:
                file.seek(len(data))
                data += file.read(100_000)
    return bytes(data)


@slow
async def test_the_catalog_and_m_stores_are_lost(cluster: Any) -> None:
    node = cluster[0]
    kept = {"a": content_of(), "small": content_of(100)}
    for name, content in kept.items():
        await protected(node, name, content)
    gone = await protected(node, "gone", content_of())
    await node.delete(gone, "gone")
    await node.kv.transact([], [Delete(version_key(gone.vid))])  # as the collector does, after its grace
    waiting = await node.save("waiting", content_of(), wake=False)
    row = node.mount_db.file(waiting.ino)
    node.mount_db.remove_files([waiting.ino])  # the agent hears of it later
    opened = await node.open("opened", b"")
    await cluster[1].running.catalog_copy.copy()
    revision = cluster[1].running.catalog_copy.statistics.revision

    node.mount_db.put_file(row)
    node.running.replicator.wake()
    later = {"later": content_of(), "later small": content_of(77)}
    for name, content in later.items():
        await protected(node, name, content)
    await node.protected(waiting)
    again = await node._write(opened.ino, opened.vid, opened.segment, content_of(), "opened", True)
    await node.protected(again)
    await lose_catalog(cluster, 4, 5)

    report = await recovered(cluster, 0, 1, 2, 3)
    assert report.state_revision == revision
    assert report.became_protected == 2
    assert sorted(report.recovered) == [f"/.ckptfs/recovered/{revision}/{name}" for name in later]
    assert report.deleted_before == 1
    assert (report.lost, report.waiting, report.trouble) == ([], [], [])
    assert len(report.stores_not_given) == 2

    cluster = await up_again(cluster)
    node = cluster[1]
    assert await node.kv.revision() > REVISIONS_SKIPPED
    assert await catalog_problems(node.kv) == []
    everything = {**kept, "waiting": waiting.content, "opened": again.content}
    everything |= {f".ckptfs/recovered/{revision}/{name}": content for name, content in later.items()}
    for number in (0, 2, 5):
        for path, content in everything.items():
            assert await content_at(cluster, number, path, len(content)) == content, path
    with pytest.raises(NoSuchName):
        await node.namespace.lookup(ROOT_INODE, b"gone")
    with pytest.raises(NoSuchName):
        await node.namespace.lookup(ROOT_INODE, b"later")
    _, inode = await look_up(node, f".ckptfs/recovered/{revision}/later".encode())
    assert inode.mode & 0o777 == 0o600

    # Repair makes what is missing, also parity whose root nobody knew.
    inos = [(await look_up(node, path.encode()))[0] for path in everything]
    for deep in (False, True):
        answer = await node.ask("verify", inos=inos, deep=deep, repair=True)
        results = {file["ino"]: (file["result"], file["message"]) for file in answer["files"]}
        assert {result for result, _ in results.values()} <= {"ok", "repaired"}, results
    for ino in inos:
        version = await node.versions.version((await node.namespace.inode(ino)).cur)
        assert version.state is VersionState.PROTECTED
        assert not version.damaged
        assert all(shard.store != NO_STORE and shard.root != UNKNOWN_ROOT for shard in version.shards)
    answer = await node.ask("verify", inos=inos, deep=True, repair=False)
    assert {file["result"] for file in answer["files"]} == {"ok"}

    # What was deleted before goes, once all stores know the recovery.
    assert any(path.exists() for one in cluster.nodes for path in [one.shard_path(gone, index) for index in range(6)])
    for one in cluster.nodes:
        await take_note_of_recovery(one.kv, one.store)
        await one.running.sweep.sweep()
    assert not any(path.exists() for one in cluster.nodes for path in [one.shard_path(gone, index) for index in range(6)])


@slow
async def test_without_any_state_files_are_made_of_what_shards_say(cluster: Any) -> None:
    node = cluster[0]
    files = {"a/b": content_of(), "a": content_of(), "small": content_of(50)}
    for number, (name, content) in enumerate(files.items()):
        saved = await node.save(f"{number}", content, wake=False)
        row = node.mount_db.file(saved.ino)
        node.mount_db.put_file(row._replace(path_hint=name.encode()))
        node.running.replicator.wake()
        await node.protected(saved)
    for one in cluster.nodes:
        one.store.join(cluster.settings.cluster, "here")
    await lose_catalog(cluster)
    for number in range(6):
        (cluster.directory / f"node-{number}" / "agent" / "catalog.copy").unlink(missing_ok=True)
    report = await recovered(cluster, *range(6))
    assert (report.state_source, report.state_revision, report.lost) == ("", 0, [])
    cluster = await up_again(cluster)
    node = cluster[3]
    assert (await node.namespace.settings()).cluster == cluster.settings.cluster
    assert await catalog_problems(node.kv) == []
    assert sorted(report.recovered) == ["/.ckptfs/recovered/0/a", "/.ckptfs/recovered/0/a~/b", "/.ckptfs/recovered/0/small"]
    for path in report.recovered:
        wanted = files[path.removeprefix("/.ckptfs/recovered/0/").replace("~", "")]
        assert await content_at(cluster, 3, path, len(wanted)) == wanted


@slow
async def test_what_is_lost_is_named_and_what_hangs_on_other_stores_too(cluster: Any) -> None:
    node = cluster[0]
    await protected(node, "a", content_of())
    await protected(node, "small", content_of(10))
    only_here = await node.save("only on node-0", content_of(), wake=False)
    await cluster[1].running.catalog_copy.copy()
    later = await node.save("later", content_of(), wake=False)
    node.mount_db.remove_files([only_here.ino])
    node.running.replicator.wake()
    await node.protected(later)
    await lose_catalog(cluster, 3, 4, 5)
    report = await recovered(cluster, 1, 2)
    assert {trouble.path for trouble in report.waiting} >= {"/a", "/only on node-0"}
    assert [trouble.path for trouble in report.lost] == ["later"]
    assert "of 4 shards are left" in report.lost[0].reason


@slow
async def test_names_never_hide_others_and_the_newest_gets_its_own(cluster: Any) -> None:
    node = cluster[0]
    await node.running.catalog_copy.copy()
    contents = [content_of(100 + number) for number in range(3)]
    for number, content in enumerate(contents):
        saved = await node.save(f"{number}", content, wake=False)
        node.mount_db.put_file(node.mount_db.file(saved.ino)._replace(path_hint=b"run/../latest"))
        node.running.replicator.wake()
        await node.protected(saved)
    await lose_catalog(cluster)
    report = await recovered(cluster, *range(6))
    cluster = await up_again(cluster)
    directory = f"/.ckptfs/recovered/{report.state_revision}/run"
    assert report.recovered[0] == f"{directory}/latest"
    assert all(path.startswith(f"{directory}/latest~") for path in report.recovered[1:])
    for path, content in zip(report.recovered, reversed(contents), strict=True):
        assert await content_at(cluster, 1, path, len(content)) == content


@slow
async def test_a_segment_that_was_written_since_is_not_taken_for_what_it_was(cluster: Any) -> None:
    """It carries the newer version's bytes: the older one is read from its shards."""
    node = cluster[0]
    saved = await protected(node, "a", content_of())
    await node.running.catalog_copy.copy()
    newer = await node.rewrite(saved, content_of())
    await node.protected(newer)
    await lose_catalog(cluster)
    report = await recovered(cluster, *range(6))
    assert report.segments_unproved == 1
    cluster = await up_again(cluster)
    assert await content_at(cluster, 0, "a", SIZE) == saved.content
    assert await content_at(cluster, 0, report.recovered[0], SIZE) == newer.content
    ino, _ = await look_up(cluster[0], b"a")
    await cluster[0].ask("verify", inos=[ino], deep=True, repair=True)
    version = await cluster[0].versions.version(saved.vid)
    assert not version.damaged
    assert Path(cluster[0].segments.path_of(version.segment)).read_bytes() == saved.content


@slow
async def test_what_was_closed_after_the_state_and_never_protected_goes_on_at_its_home(cluster: Any) -> None:
    """A new file, and two that were written again in place: one had shards, the other only this segment."""
    node = cluster[0]
    safe = await protected(node, "safe", content_of())
    local = await node.save("local", content_of(), wake=False)
    node.mount_db.remove_files([local.ino])
    await node.running.catalog_copy.copy()
    await cluster.down(1, 2, 3, 4, 5)
    new = await node.save("new", content_of(), wake=False)
    again = await node.rewrite(safe, content_of(), wake=False)
    only = await node.rewrite(local, content_of(), wake=False)
    await lose_catalog(cluster)
    report = await recovered(cluster, *range(6))
    below = f"/.ckptfs/recovered/{report.state_revision}"
    assert sorted(report.closed) == [f"{below}/new", f"{below}/safe", "/local"]
    assert report.lost == []
    cluster = await up_again(cluster)
    node = cluster[0]
    assert await catalog_problems(node.kv) == []
    assert await content_at(cluster, 1, "safe", SIZE) == safe.content
    for path, saved in ((f"{below}/new", new), (f"{below}/safe", again), ("local", only)):
        ino, inode = await look_up(node, path.encode())
        version = await node.versions.version(inode.open)
        assert (version.state, version.segment, version.durable) == (VersionState.OPEN, saved.segment, True)
        assert inode.writer.store == version.home == node.store.store_id
        written = await node._write(ino, inode.open, saved.segment, saved.content, path, True)  # as its mount does at start
        await node.protected(written)
        assert await content_at(cluster, 1, path, SIZE) == saved.content


@slow
async def test_holders_are_those_that_have_the_shards_now(cluster: Any) -> None:
    """One shard was moved since the state was taken, of another its old holder still has a copy."""
    node = cluster[0]
    saved = await protected(node, "a", content_of())
    await node.running.catalog_copy.copy()
    (version,) = await node.protected(saved)
    await lose_catalog(cluster)

    def path_in(number: int, index: int) -> Path:
        vid: str = saved.vid.hex()
        return Path(cluster.directory, f"node-{number}", "shards", vid[:2], f"{vid}.{index}")

    where = [next(number for number in range(6) if path_in(number, index).exists()) for index in range(6)]
    moved, doubled = path_in(where[1], 0), path_in(min(where[3], where[2]), max(2, 3) if where[3] > where[2] else 2)
    os.rename(path_in(where[0], 0), moved)
    other = 2 if where[3] < where[2] else 3
    shutil.copyfile(path_in(where[other], other), doubled.with_name(f"{saved.vid.hex()}.{other}"))
    report = await recovered(cluster, *range(6))
    assert (report.holders_changed, report.lost) == (1, [])
    cluster = await up_again(cluster)
    now = await cluster[0].versions.version(saved.vid)
    assert now.shards[0].store == version.shards[1].store
    assert now.shards[1:] == version.shards[1:]
    assert await content_at(cluster, 2, "a", SIZE) == saved.content


@slow
async def test_inventories_serve_for_stores_of_other_machines(cluster: Any, tmp_path: Path) -> None:
    node = cluster[0]
    files = {"a": content_of(), "small": content_of(9)}
    for name, content in files.items():
        await protected(node, name, content)
    await node.running.catalog_copy.copy()
    later = await protected(node, "later", content_of())
    with pytest.raises(StoreError, match="not a store"):
        write_inventory(tmp_path / "node-0" / "shards", tmp_path / "x")
    await lose_catalog(cluster, 5)
    paths = []
    for number in range(5):
        path = cluster.directory / f"inventory-{number}"
        write_inventory(cluster.directory / f"node-{number}", path)
        paths.append(path)
    target = place_of(f"sqlite:///{cluster.directory}/catalog.db")
    dry = await recover_catalog(target, paths, dry_run=True)
    assert not (cluster.directory / "catalog.db").exists()
    with pytest.raises(StoreError, match="given twice"):
        await recover_catalog(target, [*paths, cluster.directory / "node-0"], dry_run=True)
    report = await recover_catalog(target, paths, dry_run=False)
    assert report.recovered == dry.recovered != []
    with pytest.raises(StoreError, match="not empty"):
        await recover_catalog(target, paths, dry_run=False)
    cluster = await up_again(cluster)
    for name, content in files.items():
        assert await content_at(cluster, 5, name, len(content)) == content
    assert await content_at(cluster, 5, report.recovered[0], SIZE) == later.content


def an_inventory() -> Inventory:
    return Inventory(
        format=1,
        store=StoreId(b"S" * 16),
        node=NodeId("n"),
        directory="/d",
        cluster=b"C" * 16,
        seen_revision=3,
        shards=[],
        copies=[],
        segments=[],
        closed=[],
        damaged=0,
        archive=b"",
        archive_source="",
        trouble=["x"],
    )


def test_an_inventory_is_read_back_or_refused() -> None:
    data = pack_inventory(an_inventory())
    assert unpack_inventory(data) == an_inventory()
    for at in range(len(data)):
        for changed in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(DamagedData):
                unpack_inventory(changed)


@given(st.binary(max_size=200))
def test_nothing_else_is_an_inventory(data: bytes) -> None:
    with pytest.raises(CacheError):
        unpack_inventory(data)


@slow
async def test_a_store_in_use_and_one_of_another_cluster_are_refused(cluster: Any) -> None:
    with pytest.raises(StoreError, match="end all nodes"):
        take_inventory(cluster[0].store.path)
    cluster[0].store.join(b"1" * 16, "here")
    cluster[1].store.join(b"2" * 16, "here")
    await lose_catalog(cluster)
    with pytest.raises(StoreError, match="different clusters"):
        await recovered(cluster, 0, 1)
    await trio.lowlevel.checkpoint()
