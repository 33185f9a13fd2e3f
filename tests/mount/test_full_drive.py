"""A whole cluster on one drive, the catalog too, full to the last block: deleting, starting, reading and saving again."""

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.reserve import room_at
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.status import nodes_status, places_of_cluster
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

MIB = 1 << 20


def status_of(node: ClusterNode, process: str = "mount") -> dict[str, Any]:
    return call(node.store / "run" / f"{process}.sock", {"do": "status"})


def fill_through(mountpoint: Path, sizes: Iterable[int] = (4 * MIB, 64 << 10, 4096)) -> list[Path]:
    """Save files until none of any size fits; those that were saved whole. Every error is ENOSPC."""
    whole = []
    for size in sizes:
        failed = 0
        number = 0
        while failed < 5:
            path = mountpoint / f"fill-{size}-{number}"
            number += 1
            try:
                path.write_bytes(b"%d" % (number % 10) * size)
                whole.append(path)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                failed += 1
    return whole


def fill_behind(drive: Path) -> Path:
    """Take every block that is left past the file system, and every one that is released meanwhile."""
    filler = drive / "filler"
    deadline = time.monotonic() + 30
    with open(filler, "ab", buffering=0) as file:
        while room_at(drive).free_bytes:
            assert time.monotonic() < deadline, "the drive doesn't get full"
            for size in (MIB, 4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\1" * size)
    return filler


def protect(*paths: Path) -> None:
    behind, _, _ = wait_until(list(paths), "protected", 60.0, shown=False)
    assert not behind


@pytest.fixture
def full_cluster(make_drive: Any, scratch: Path) -> tuple[LocalCluster, Path]:
    """Three nodes and their catalog on one drive of 192 MiB; a protected file of 8 MiB is there."""
    drive = make_drive(192, at=scratch / "cluster")
    (drive / "lost+found").rmdir()
    cluster = LocalCluster(drive)
    cluster.up(3, ClusterSettings(settle_seconds=0.05))
    (cluster.nodes[0].mountpoint / "before").write_bytes(random.Random(1).randbytes(8 * MIB))
    protect(cluster.nodes[0].mountpoint / "before")
    return cluster, drive


BEFORE = random.Random(1).randbytes(8 * MIB)


def test_files_go_from_a_full_drive_and_saving_goes_on(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    home, other = cluster.nodes[0].mountpoint, cluster.nodes[1].mountpoint
    saved = fill_through(home)
    filler = fill_behind(drive)

    def refused() -> bool:
        fill_behind(drive)  # the segment of the protected file is released soon
        try:
            (home / "more").mkdir()
        except OSError as error:
            return error.errno == errno.ENOSPC
        (home / "more").rmdir()
        return False

    def shown() -> bool:
        return refused() and all(
            any(problem.startswith("FULL, programs get ENOSPC: the drive of the store") for problem in node["problems"])
            for node in nodes_status(places_of_cluster(cluster))
        )

    wait_for(shown, "every node says so")
    for path in saved:
        assert path.read_bytes() == (path.read_bytes()[:1] * path.stat().st_size)

    for number, path in enumerate(sorted(home.glob("fill-*"))):  # those that were cut short, too
        if path != saved[-1]:
            (home if number % 2 else other).joinpath(path.name).unlink()
    assert sorted(path.name for path in home.iterdir()) == ["before", saved[-1].name]
    filler.unlink()
    wait_for(lambda: not any(status_of(node)["space"]["shortage"] for node in cluster.nodes), "room again")
    assert (home / "before").read_bytes() == BEFORE
    (home / "after").write_bytes(BEFORE[:MIB])  # three shards of it, beside those of the files that are gone
    protect(home / "after", saved[-1])  # and what was saved last before there was no room
    assert (other / "after").read_bytes() == BEFORE[:MIB]


def test_a_node_starts_on_a_full_drive(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    saved = fill_through(cluster.nodes[0].mountpoint)
    filler = fill_behind(drive)
    for node in cluster.nodes:
        node.kill()
    cluster.up(None, ClusterSettings())
    home = cluster.nodes[0].mountpoint
    assert (home / "before").read_bytes() == BEFORE
    assert (cluster.nodes[1].mountpoint / "before").read_bytes() == BEFORE
    for path in saved:
        path.unlink()
    filler.unlink()
    wait_for(lambda: not status_of(cluster.nodes[0])["space"]["shortage"], "room again")
    (home / "after").write_bytes(BEFORE)
    protect(home / "after")


def test_both_processes_of_a_node_are_killed_on_a_full_drive(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    fill_through(cluster.nodes[0].mountpoint)
    fill_behind(drive)
    node = cluster.nodes[0]
    before = node.processes.pids()
    for role in ("mount", "agent"):
        os.kill(before[role] or 0, 9)
    wait_for(lambda: node.processes.pids()["mount"] not in (None, before["mount"]) and node.answers(), "a mount again")
    wait_for(lambda: node.processes.pids()["agent"] not in (None, before["agent"]) and bool(node.peers_in_reach()), "an agent")
    assert (node.mountpoint / "before").read_bytes() == BEFORE
    (node.mountpoint / "before").unlink()


def test_another_node_reads_where_its_drive_has_no_room_for_a_copy(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    home, reader = cluster.nodes[0], cluster.nodes[2]
    (home.mountpoint / "local-only").write_bytes(BEFORE)
    fill_behind(drive)
    wait_for(lambda: reader.mountpoint.joinpath("local-only").exists(), "the name")
    assert (reader.mountpoint / "local-only").read_bytes() == BEFORE
    assert (reader.mountpoint / "before").read_bytes() == BEFORE
    assert status_of(reader, "agent")["restorer"]["bytes_passed"] >= len(BEFORE)
    with pytest.raises(OSError, match="No space left"):
        open(reader.mountpoint / "before", "r+b").close()


def test_cutting_a_file_to_nothing_makes_room(make_drive: Any, scratch: Path) -> None:
    drive = make_drive(128, at=scratch / "cluster")
    (drive / "lost+found").rmdir()
    cluster = LocalCluster(drive)
    cluster.up(1, ClusterSettings(settle_seconds=0.05))
    home = cluster.nodes[0].mountpoint
    saved = fill_through(home, [4 * MIB])
    fill_behind(drive)
    open(saved[0], "wb").close()
    os.truncate(saved[1], 0)
    assert saved[0].stat().st_size == saved[1].stat().st_size == 0
    wait_for(lambda: room_at(drive).free_bytes > 6 * MIB, "room")


def test_a_full_holder_gets_nothing_and_others_get_it(scratch: Path, make_drive: Any) -> None:
    """Four nodes, 2+1: what the full one refuses goes to the fourth; what it holds is read from it."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(4, ClusterSettings(data_shards=2, parity_shards=1, settle_seconds=0.05))
    full = cluster.nodes[3]
    for node in cluster.nodes:
        node.store.mkdir()
        make_drive(96, at=node.store)
    cluster.up(None, ClusterSettings())
    home = cluster.nodes[0].mountpoint
    first = [home / f"first-{number}" for number in range(6)]
    for path in first:
        path.write_bytes(BEFORE[:MIB])
        path.with_suffix(".small").write_bytes(BEFORE[:1000])
    protect(home)
    held = status_of(full, "agent")["shards_held"]["count"]
    assert held
    fill_behind(full.store)
    for path in first:
        path.with_suffix(".again").write_bytes(BEFORE[: 2 * MIB])
        path.with_suffix(".little").write_bytes(BEFORE[:2000])
    protect(home)
    assert status_of(full, "agent")["shards_held"]["count"] == held
    assert not status_of(full, "agent")["store_failed"]
    cluster.kill(0)
    for path in first:
        assert (full.mountpoint / path.name).read_bytes() == BEFORE[:MIB]
        assert (full.mountpoint / path.name).with_suffix(".again").read_bytes() == BEFORE[: 2 * MIB]
    cluster.kill(3)
    cluster.revive(3)
    assert status_of(full, "agent")["shards_held"]["count"] == held
    (full.store / "filler").unlink()
    cluster.revive(0)
    for path in first:
        path.with_suffix(".third").write_bytes(BEFORE[: 3 * MIB])
    protect(home)
    wait_for(lambda: status_of(full, "agent")["shards_held"]["count"] > held, "shards on the node that has room again")


def test_the_oldest_protected_segments_make_room_for_the_next_save(scratch: Path, make_drive: Any) -> None:
    """Also where every shard of one rotted unseen: its segment goes only after they were made anew from it."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(3, ClusterSettings(data_shards=1, parity_shards=1, settle_seconds=0.05))
    node = cluster.nodes[0]
    make_drive(128, at=node.store)
    cluster.up(None, ClusterSettings())
    saves = []
    for number in range(12):  # three times as much as the drive holds
        content = random.Random(number).randbytes(16 * MIB)
        path = node.mountpoint / f"step-{number}"
        wait_for(lambda: room_at(node.mountpoint).free_bytes > 17 * MIB, "room for the next save")
        path.write_bytes(content)
        protect(path)
        saves.append((path, content))
        if number == 0:
            for shard in [shard for one in cluster.nodes for shard in (one.store / "shards").glob("*/*")]:
                with open(shard, "r+b") as file:
                    file.seek(9 * MIB)
                    file.write(b"rotten")
    space = status_of(node)["space"]
    assert space["segments_released_bytes"] >= 5 * 16 * MIB
    wait_for(lambda: room_at(node.store).free_bytes >= 60 * MIB, "room for half the drive, which is what such a save may get")
    for path, content in saves:
        assert path.read_bytes() == content
    with open(saves[0][0], "r+b") as file:  # written again, it is here again
        file.write(b"changed")
    protect(saves[0][0])
    assert (cluster.nodes[1].mountpoint / "step-0").read_bytes() == b"changed" + saves[0][1][7:]


def test_no_inodes_left(scratch: Path, make_drive: Any) -> None:
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1, ClusterSettings(settle_seconds=0.05))
    node = cluster.nodes[0]
    make_drive(64, inodes=400, at=node.store)
    cluster.up(None, ClusterSettings())
    saved = fill_through(node.mountpoint, [100])
    assert len(saved) > 200
    number = 0
    with contextlib.suppress(OSError):
        while True:
            (node.store / f"filler-{number}").touch()
            number += 1
    assert os.statvfs(node.store).f_favail == 0
    node.kill()
    cluster.revive(0)
    for path in saved:
        assert path.read_bytes() == path.read_bytes()[:1] * 100
        path.unlink()
    wait_for(lambda: os.statvfs(node.store).f_favail > 150, "inodes")
    wait_for(lambda: not status_of(node)["space"]["shortage"], "room again")
    (node.mountpoint / "after").write_bytes(b"after")


def test_files_go_beside_a_writer_that_takes_every_block_the_moment_it_is_free(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    home = cluster.nodes[0].mountpoint
    paths = [home / f"small-{number}" for number in range(300)]
    for path in paths:
        path.write_bytes(b"content")
    ends = threading.Event()

    def write() -> None:
        with open(home / "greedy", "wb", buffering=0) as file:
            while not ends.is_set():
                with contextlib.suppress(OSError):
                    file.write(bytes(MIB))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        wait_for(lambda: room_at(drive).free_bytes == 0, "a full drive")
        for number, path in enumerate(paths):
            cluster.nodes[number % 3].mountpoint.joinpath(path.name).unlink()
        assert sorted(path.name for path in home.iterdir()) == ["before", "greedy"]
    finally:
        ends.set()
        writer.join()
    (home / "greedy").unlink()
    wait_for(lambda: not any(status_of(node)["space"]["shortage"] for node in cluster.nodes), "room again")
    assert (home / "before").read_bytes() == BEFORE


def test_what_is_opened_on_a_full_drive_survives_the_death_of_the_mount(full_cluster: tuple[LocalCluster, Path]) -> None:
    cluster, drive = full_cluster
    reader = cluster.nodes[2]
    wait_for(lambda: status_of(reader)["space"]["catalog_reserve_lacks_bytes"] == 0, "a reserve")
    fill_behind(drive)
    with open(reader.mountpoint / "before", "rb", buffering=0) as file:
        before = reader.processes.pids()["mount"]
        os.kill(before or 0, 9)
        wait_for(lambda: reader.processes.pids()["mount"] not in (None, before) and reader.answers(), "a mount again")
        assert file.read(3 * MIB) == BEFORE[: 3 * MIB]
