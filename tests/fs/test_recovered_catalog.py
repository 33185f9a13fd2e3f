"""An archive of a running catalog, a catalog made of it, and the node that meets that for the first time."""

import json
import time
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_archive import open_archive
from ckptfs.cache.catalog_format import RECOVERED_KEY, Recovered, Recovery, Settings, pack
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.ids import ROOT_INODE, NodeId, StoreId
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.cli import run
from ckptfs.fs.recovered_catalog import take_note_of_recovery

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
