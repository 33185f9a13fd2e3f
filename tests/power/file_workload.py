"""A node's files written, synced, renamed and removed in a random order that a seed decides; run under `recorder.c`.

`python file_workload.py SEED DIRECTORY [CANARY]`. Says a mark before each request, and one after its answer. The canary names
something in `canaries.py` that is broken on purpose.
"""

import ctypes
import importlib.util
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import trio

import canaries
from ckptfs.cache import boot, refusal_mark
from ckptfs.cache.catalog_connection import connect
from ckptfs.cache.catalog_examination import examine
from ckptfs.cache.catalog_maintenance import checkpoint
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.config import NodeConfig, NodeSection
from ckptfs.fs.fuse_format import Opcode
from ckptfs.fs.process_start import ignore_broken_leases
from ckptfs.fs.segment_sweep import SegmentSweep
from ckptfs.fs.start_checks import check_store
from ckptfs.fs.supervisor import Supervisor
from file_promises import Tree, content

STEPS = 40
NAMES = "abcd"
SIZES = (1, 600, 5000, 40_000)

_mark = getattr(ctypes.CDLL(None), "recorder_mark", None)


def bare_nodes() -> ModuleType:
    """`tests/fs/conftest.py`, where nodes without a kernel are put together."""
    path = Path(__file__).parents[1] / "fs" / "conftest.py"
    spec = importlib.util.spec_from_file_location("bare_nodes", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def start_like_the_supervisor(directory: Path, node: str = "a") -> None:
    """What the supervisor does to store and catalog before it starts the processes of a node, and the first mount process of a
    connection to its database. Raises what they raise."""
    config = NodeConfig(NodeSection(node, str(directory / node), str(directory), f"sqlite:///{directory}/catalog.db"))
    store = StoreDirectory.create_or_open(config.store, config.node_id)
    seen_revision = check_store(store)
    examine(config.catalog_path, seen_revision=None if store.cluster is None else seen_revision)
    incarnation = 1
    label = session_label(store.store_id, incarnation)
    kv = SqliteCatalog.open(config.catalog_path, writer_label=f"{node}/supervisor", session=label)
    await Supervisor(config)._join(kv, store, incarnation)
    await kv.aclose()
    with closing(MountDatabase(store.mount_db, was_set_back=SetBackMark(store.store_id, store.uses).was_set_back())) as database:
        database.forget_handles()


def sweep_of(node: Any) -> SegmentSweep:
    return SegmentSweep(
        node.namespace, node.versions, node.segments, node.open_files, node.reclaimer, node.database, node.store.store_id
    )


class Workload:
    """Random requests. The tree it keeps tells which are possible; that of the checker is made of the marks alone."""

    def __init__(self, seed: int, start: Any, directory: Path, boot_id: Path) -> None:
        self._chance = Random(seed)
        self._start = start
        self._directory = directory
        self._boot_id = boot_id
        self._tree = Tree()
        self._node: Any = None
        self._sweep: Any = None
        self._handles: dict[int, int] = {}
        self._number = seed * 1_000_000
        self._boots = 0

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def run(self) -> None:
        await self._begin()
        for _ in range(STEPS):
            await self._step()

    async def _begin(self) -> None:
        await start_like_the_supervisor(self._directory)
        self._node = await self._start(new_connection=True)
        self._sweep = sweep_of(self._node)
        await self._note_revision()

    async def _note_revision(self) -> None:
        """What the mount process does first, and again every five seconds."""
        revision = await self._node.kv.revision()
        await self._node.kv.make_durable()
        self._node.database.set_fact(CATALOG_FACT, b"%d" % revision)
        await self._sweep.sweep_rows()
        await trio.to_thread.run_sync(self._node.database.checkpoint)

    async def _step(self) -> None:
        chance, tree = self._chance, self._tree
        free = [name for name in NAMES if name not in tree.names]
        used = sorted(tree.names)
        writing = [handle for handle, (_, writes) in tree.handles.items() if writes]
        choices = ["save"] * 6 + ["replace"] * 6 + ["settle"] * 4 + ["fsyncdir", "checkpoint", "sweep", "restart", "reboot"]
        if used:
            choices += ["rewrite", "edit", "edit", "unlink", "rename", "rename", "read", "link"]
        if writing:
            choices += ["write", "write", "truncate", "fsync", "fsync", "close", "close"]
        choice = chance.choice(choices)
        if choice == "save":
            await self._save(chance.choice(free) if free else None, chance.choice(NAMES))
        elif choice == "replace":
            await self._replace(chance.choice(NAMES))
        elif choice in ("rewrite", "edit"):
            handle = await self._open("write_anew" if choice == "rewrite" else "write_on", chance.choice(used))
            await self._write_some(handle)
        elif choice == "read":
            await self._open("read", chance.choice(used))
        elif choice == "unlink":
            await self._do("unlink", name=chance.choice(used))
        elif choice == "rename":
            await self._do("rename", name=chance.choice(used), new=chance.choice(NAMES))
        elif choice == "link":
            if free:
                await self._do("link", name=chance.choice(used), new=chance.choice(free))
        elif choice in ("write", "truncate", "fsync", "close"):
            handle = chance.choice(writing)
            if choice == "write":
                await self._write(handle)
            elif choice == "truncate":
                await self._do("truncate", handle=handle, size=chance.choice([0, 100, 3000, 9000]))
            else:
                await self._do(choice, handle=handle)
        else:
            await self._do(choice)

    async def _save(self, name: str | None, other: str) -> None:
        if name is None:
            handle = await self._open("write_anew", other)
        else:
            handle = self._next()
            await self._do("create", name=name, handle=handle)
        await self._write_some(handle)

    async def _replace(self, name: str) -> None:
        """As most writers of checkpoints do it: another name, perhaps a sync, a rename."""
        if "tmp" in self._tree.names:
            await self._do("unlink", name="tmp")
        handle = self._next()
        await self._do("create", name="tmp", handle=handle)
        await self._write_some(handle)
        await self._do("rename", name="tmp", new=name)

    async def _write_some(self, handle: int) -> None:
        for _ in range(self._chance.randint(1, 3)):
            await self._write(handle)
        if self._chance.random() < 0.5:
            await self._do("fsync", handle=handle)
        if self._chance.random() < 0.8:
            await self._do("close", handle=handle)

    async def _write(self, handle: int) -> None:
        offset, size = self._chance.choice([0, 0, 512, 6000]), self._chance.choice(SIZES)
        await self._do("write", handle=handle, offset=offset, number=self._next(), size=size)

    async def _open(self, how: str, name: str) -> int:
        handle = self._next()
        await self._do(how, name=name, handle=handle)
        return handle

    async def _do(self, what: str, **values: Any) -> None:
        mark = {"do": what, **values}
        if _mark is not None:
            _mark(b"begun " + json.dumps(mark).encode())
        node_does = getattr(self, f"_do_{what}")
        await node_does(**values)
        self._tree.apply(mark)
        if _mark is not None:
            _mark(b"answered " + json.dumps(mark).encode())

    # Each of them one request, or what happens in the background

    async def _do_create(self, name: str, handle: int) -> None:
        _, self._handles[handle] = await self._node.create(name.encode())

    async def _do_open(self, flags: int, name: str, handle: int) -> None:
        ino = (await self._node.lookup(1, name.encode())).ino
        self._handles[handle] = await self._node.open(ino, flags)

    async def _do_read(self, name: str, handle: int) -> None:
        await self._do_open(os.O_RDONLY, name, handle)

    async def _do_write_on(self, name: str, handle: int) -> None:
        await self._do_open(os.O_RDWR, name, handle)

    async def _do_write_anew(self, name: str, handle: int) -> None:
        await self._do_open(os.O_RDWR | os.O_TRUNC, name, handle)

    async def _do_write(self, handle: int, offset: int, number: int, size: int) -> None:
        data = content(number, size)
        assert await self._node.write(self._handles[handle], data, offset) == size

    async def _do_truncate(self, handle: int, size: int) -> None:
        ino = self._node.open_files.handle(self._handles[handle]).file.ino
        body = fuse.SETATTR_IN.pack(fuse.SetattrField.SIZE | fuse.SetattrField.FH, 0, self._handles[handle], size, *[0] * 12)
        await self._node.ask(Opcode.SETATTR, ino, body)

    async def _do_fsync(self, handle: int) -> None:
        await self._node.fsync(self._handles[handle])

    async def _do_fsyncdir(self) -> None:
        await self._node.ask(Opcode.FSYNCDIR, 1, fuse.FSYNC_IN.pack(0, 0, 0))

    async def _do_close(self, handle: int) -> None:
        await self._node.release(self._handles.pop(handle))

    async def _do_rename(self, name: str, new: str) -> None:
        await self._node.rename(name.encode(), new.encode())

    async def _do_unlink(self, name: str) -> None:
        await self._node.unlink(name.encode())

    async def _do_link(self, name: str, new: str) -> None:
        ino = (await self._node.lookup(1, name.encode())).ino
        await self._node.ask(Opcode.LINK, 1, fuse.LINK_IN.pack(ino) + new.encode() + b"\0")

    async def _do_settle(self) -> None:
        await self._node.settle()

    async def _do_checkpoint(self) -> None:
        """What the mount process does of itself now and then."""
        if self._chance.random() < 0.5:
            await trio.to_thread.run_sync(self._checkpoint_catalog, self._chance.random() < 0.5)
        else:
            await self._note_revision()

    def _checkpoint_catalog(self, keep_file: bool) -> None:
        path = str(self._directory / "catalog.db")
        with closing(connect(path)) as connection, open(f"{path}-wal", "rb") as wal:
            checkpoint(connection, wal.fileno(), keep_file=lambda: keep_file)

    async def _do_sweep(self) -> None:
        await self._sweep.sweep_rows()
        await self._sweep.sweep_segments()
        await self._node.reclaimer.drain()

    async def _do_restart(self) -> None:
        self._node.kill()
        self._node = await self._start()
        self._sweep = sweep_of(self._node)

    async def _do_reboot(self) -> None:
        self._handles = {}
        self._node.kill()
        await self._node.kv.aclose()
        self._boots += 1
        self._node.set_back.clear()
        self._boot_id.write_text(f"boot {self._boots}\n")
        await self._begin()


async def _run(seed: int, directory: Path) -> None:
    async with bare_nodes().bare_nodes(directory) as start:
        await Workload(seed, start, directory, boot.BOOT_ID).run()


def main() -> None:
    seed, directory = int(sys.argv[1]), Path(sys.argv[2])
    ignore_broken_leases()
    if len(sys.argv) > 3:
        canaries.BROKEN[sys.argv[3]]()
    refusal_mark.RUN = directory.parent / "run"
    boot_id = directory.parent / "boot_id"
    boot_id.write_text("boot 0\n")
    boot.BOOT_ID = boot_id
    trio.run(_run, seed, directory)


if __name__ == "__main__":
    main()
