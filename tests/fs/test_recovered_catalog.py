"""An archive of a running catalog, a catalog made of it, and the node that meets that for the first time."""

import json
import shutil
import time
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_archive import open_archive
from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_format import RECOVERED_KEY, Recovered, Recovery, Settings, pack
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.checksum import cell_hash
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, NodeId, StoreId, new_vid
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.cli import run
from ckptfs.fs.recovered_catalog import take_note_of_recovery
from ckptfs.replication.agent_db import AgentDatabase
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_store import ShardStore

CLUSTER = b"C" * 16


def write_config(tmp_path: Path, catalog: str) -> str:
    path = tmp_path / f"{catalog}.toml"
    path.write_text(
        f'[node]\nid = "n"\nstore = "{tmp_path}/store"\nmountpoint = "{tmp_path}/mnt"\ncatalog = "sqlite:///{tmp_path}/{catalog}"\n'
    )
    return str(path)


async def make_tree(path: Path) -> None:
    kv = SqliteCatalog.open(path, writer_label="test")
    namespace = Namespace(kv, StoreId(b"S" * 16), 1, time.time_ns)
    await namespace.format_if_empty(Settings(1, CLUSTER, 4, 2, 4096))
    await namespace.make_directory(ROOT_INODE, b"dir", 0o755, 0, 0)
    await kv.aclose()


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trio.run(make_tree, tmp_path / "a.db")
    archive = tmp_path / "archive"
    assert run(["export", str(archive), "--config", write_config(tmp_path, "a.db"), "--json"]) == 0
    exported = json.loads(capsys.readouterr().out)
    assert (exported["cluster"], exported["bytes"]) == (CLUSTER.hex(), archive.stat().st_size)
    with open_archive(archive) as reader:
        assert reader.count == exported["records"]
    assert run(["import", str(archive), "--config", write_config(tmp_path, "a.db")]) == 1
    assert "not empty; nothing was changed" in capsys.readouterr().err
    assert run(["import", str(archive), "--config", write_config(tmp_path, "b.db"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["revision"] == exported["revision"]
    again = tmp_path / "again"
    assert run(["export", str(again), "--config", write_config(tmp_path, "b.db"), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (second["cluster"], second["records"]) == (exported["cluster"], exported["records"] + 1)  # c/recovered
    assert second["revision"] > 10**9


def test_what_can_not_be_exported_or_imported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "a.db")
    assert run(["export", str(tmp_path / "archive"), "--config", config]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert run(["import", str(tmp_path / "archive"), "--config", config]) == 1
    assert "archive can't be read: No such file" in capsys.readouterr().err
    (tmp_path / "archive").write_bytes(b"something else")
    assert run(["import", str(tmp_path / "archive"), "--config", config]) == 1
    assert "not a catalog archive" in capsys.readouterr().err
    assert not (tmp_path / "a.db").exists()


def a_store(tmp_path: Path, archive: Path | None) -> StoreDirectory:
    store = StoreDirectory.create_or_open(tmp_path / "node-7", NodeId("node-7"))
    store.join(CLUSTER, "here")
    if archive is not None:
        shutil.copyfile(archive, store.catalog_copy)
    return store


def put_shard(store: StoreDirectory, revision: int) -> None:
    """One of two that are needed."""
    header = ShardHeader(new_vid(), 0, 2, 1, 4096, 8192)
    index = AgentDatabase(store.agent_db)
    writer = ShardStore(store.shards, index).begin(header)
    cell = bytes(4096)
    writer.write_cell(0, cell, cell_hash(cell))
    writer.finish(ShardFooter(header, cell_hash(cell), 2 * cell_hash(cell), InodeNumber(99), b"run/model.pt", revision))
    index.close()


def test_recover_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trio.run(make_tree, tmp_path / "a.db")
    archive, inventory, target = tmp_path / "archive", tmp_path / "inventory", f"sqlite:///{tmp_path}/new.db"
    assert run(["export", str(archive), "--config", write_config(tmp_path, "a.db")]) == 0
    store = a_store(tmp_path, archive)
    put_shard(store, revision=1)
    assert run(["recover", "inventory", str(store.path), str(inventory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert (found["node"], found["shards"], found["cluster"]) == ("node-7", 1, CLUSTER.hex())
    assert run(["recover", str(inventory)]) == 2
    assert "--to CATALOG, or --config FILE" in capsys.readouterr().err
    assert run(["recover", "inventory", str(store.path)]) == 2
    assert run(["recover", "--to", "catalog.db", str(inventory)]) == 2
    assert run(["recover", "--dry-run", str(inventory), str(archive)]) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert run(["recover", "--to", target, str(tmp_path / "nothing")]) == 1
    assert "nothing can't be read" in capsys.readouterr().err
    assert not (tmp_path / "new.db").exists()

    put_shard(store, revision=10**6)  # saved after the archive was made, and one shard is left
    assert run(["recover", "--to", target, str(store.path)]) == 1
    said = capsys.readouterr()
    assert "1 files are lost:\n  run/model.pt: saved after the state, and 1 of 2 shards are left" in said.out
    assert "start all nodes" in said.out
    assert "1 files are lost" in said.err
    kv = SqliteCatalog.open(tmp_path / "new.db", writer_label="test")
    assert trio.run(catalog_problems, kv) == []
    trio.run(kv.aclose)


async def test_a_node_takes_note_of_a_recovery_once(tmp_path: Path) -> None:
    store = StoreDirectory.create_or_open(tmp_path / "store", NodeId("n"))
    store.join(CLUSTER, "here")
    database = MountDatabase(store.mount_db)
    database.set_fact(CATALOG_FACT, b"77")
    database.close()
    kv = MemoryCatalog()
    assert not await take_note_of_recovery(kv, store)
    assert store.mount_db.exists()

    first, second = Recovery(b"1" * 16, 50, 1000), Recovery(b"2" * 16, 1500, 3000)
    await kv.transact([], [Put(RECOVERED_KEY, pack(Recovered(1, [first])))])
    assert await take_note_of_recovery(kv, store)
    assert not store.mount_db.exists()
    (aside,) = [path for path in store.path.glob("mount.db.before-recovery-*") if path.suffix.endswith(first.id.hex()[:8])]
    kept = MountDatabase(aside)
    assert kept.fact(CATALOG_FACT) == b"77"
    kept.close()

    MountDatabase(store.mount_db).close()
    for known in (store, StoreDirectory.open(store.path)):
        assert not await take_note_of_recovery(kv, known)
    assert store.mount_db.exists()
    await kv.transact([], [Put(RECOVERED_KEY, pack(Recovered(1, [first, second])))])
    assert await take_note_of_recovery(kv, StoreDirectory.open(store.path))
    await kv.transact([], [Put(RECOVERED_KEY, pack(Recovered(1, [first])))])  # an older catalog, brought back
    assert not await take_note_of_recovery(kv, StoreDirectory.open(store.path))
    assert StoreDirectory.open(store.path).cluster == CLUSTER
