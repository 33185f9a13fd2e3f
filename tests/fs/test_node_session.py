"""Who a node is, and that it is up: sessions that begin, end, are taken for another's, on both engines of the catalog."""

import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import StoreError
from ckptfs.cache.etcd_gateway import EtcdGateway
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import begin_session, register_store, session_label, sessions
from ckptfs.fs import node_session
from ckptfs.fs.node_session import NodeSession, end_left_sessions

Catalog = SqliteCatalog | EtcdCatalog
NODE = NodeId("n")


class Starts:
    """Starts of nodes: a store directory with its lock held, and a session."""

    def __init__(self, directory: Path, open_catalog: Callable[[str], Catalog]) -> None:
        self.directory = directory
        self.open_catalog = open_catalog
        self.catalogs: list[Catalog] = []
        self._count = 0

    async def start(self, store: StoreDirectory, **more: Any) -> NodeSession:
        self._count += 1
        kv = self.open_catalog(session_label(store.store_id, self._count))
        self.catalogs.append(kv)
        session = NodeSession(kv, store, self._count, **more)
        if isinstance(kv, EtcdCatalog):
            await kv.begin_session()
        await session.begin()
        await register_store(kv, store.store_id, store.node, "127.0.0.1:1", str(store.path), {})
        return session

    def store(self, name: str) -> tuple[StoreDirectory, int]:
        store = StoreDirectory.create_or_open(self.directory / name, NODE)
        return store, store.acquire()

    async def incarnations(self) -> list[int]:
        return [session.incarnation for session in (await sessions(self.catalogs[0])).values()]


@pytest.fixture(params=["sqlite", pytest.param("etcd", marks=pytest.mark.slow)])
async def starts(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Starts]:
    monkeypatch.setattr(node_session, "IDENTITY_WAIT_SECONDS", 1.0)
    catalog = f"test-{os.urandom(4).hex()}"

    def open_catalog(session: str) -> Catalog:
        if request.param == "sqlite":
            return SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session)
        return EtcdCatalog(EtcdGateway([request.getfixturevalue("etcd").url]), catalog, session=session)

    starts = Starts(tmp_path, open_catalog)
    yield starts
    for kv in starts.catalogs:
        await kv.aclose()


async def test_the_next_start_of_a_killed_node_is_the_node_at_once(starts: Starts) -> None:
    store, lock = starts.store("a")
    await starts.start(store)
    os.close(lock)  # killed: nobody ended its session
    lock = store.acquire()
    with trio.fail_after(0.9):
        await starts.start(StoreDirectory.open(store.path))
    assert await starts.incarnations() == [2]
    os.close(lock)


async def test_two_nodes_with_one_identity(starts: Starts) -> None:
    first, lock = starts.store("a")
    await starts.start(first)
    second, other_lock = starts.store("b")
    with pytest.raises(StoreError, match=r"a node n is up already.*was not started, and nothing was changed; give it an id"):
        await starts.start(second)
    assert await starts.incarnations() == [1]
    os.close(lock)
    os.close(other_lock)


async def test_a_copy_of_a_store_is_not_the_node(starts: Starts) -> None:
    """On SQLite it would have the name of the one it was copied from, and could not run beside it for its lock only."""
    store, lock = starts.store("a")
    shutil.copytree(store.path, starts.directory / "copy")
    await starts.start(store)
    if isinstance(starts.catalogs[0], EtcdCatalog):
        with pytest.raises(StoreError, match="up already"):
            await starts.start(StoreDirectory.open(starts.directory / "copy"))
        assert await starts.incarnations() == [1]
    os.close(lock)


async def test_an_ended_node_leaves_its_identity(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    store, lock = starts.store("a")
    session = await starts.start(store)
    with monkeypatch.context() as again:
        again.setattr(node_session, "write_durably", lambda *_: pytest.fail("the drive is busy enough"))
        await session.begin()  # nothing changes
    assert await starts.incarnations() == [1]
    await session.end()
    assert await starts.incarnations() == []
    os.close(lock)
    second, lock = starts.store("b")
    await starts.start(second)
    assert await starts.incarnations() == [2]
    os.close(lock)


async def test_sessions_on_sqlite_end_with_the_lock(tmp_path: Path) -> None:
    starts = Starts(tmp_path, lambda label: SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=label))
    store, lock = starts.store("a")
    await starts.start(store)
    (kv,) = starts.catalogs
    assert isinstance(kv, SqliteCatalog)
    assert await end_left_sessions(kv) == 0
    os.close(lock)
    assert await end_left_sessions(kv) == 1
    assert await starts.incarnations() == []
    await kv.aclose()


async def test_a_store_that_can_not_be_looked_at_keeps_no_other_session(tmp_path: Path) -> None:
    starts = Starts(tmp_path, lambda label: SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=label))
    store, lock = starts.store("a")
    await starts.start(store)
    (kv,) = starts.catalogs
    assert isinstance(kv, SqliteCatalog)
    other = SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session_label(StoreId(b"m" * 16), 7))
    await begin_session(other, NodeId("m"), StoreId(b"m" * 16), 7)
    (tmp_path / "file").touch()
    await register_store(kv, StoreId(b"m" * 16), NodeId("m"), "127.0.0.1:1", str(tmp_path / "file"), {})
    os.close(lock)
    assert await end_left_sessions(kv) == 1
    assert await starts.incarnations() == [7]
    await other.aclose()
    await kv.aclose()


@pytest.mark.slow
async def test_a_session_on_etcd_is_renewed_while_the_agent_does_not_hang(
    etcd: Any, tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12; when an agent hangs is told in `test_agent_watch.py`."""
    catalog = f"test-{os.urandom(4).hex()}"
    kv = EtcdCatalog(EtcdGateway([etcd.url]), catalog, session=catalog)
    renewed = 0

    async def renew() -> None:
        nonlocal renewed
        renewed += 1

    monkeypatch.setattr(kv, "renew_session", renew)
    keep = kv.keep_session
    monkeypatch.setattr(kv, "keep_session", lambda *, while_alive: keep(0.3, while_alive))
    starts = Starts(tmp_path, lambda label: kv)
    store, lock = starts.store("a")
    hangs = False
    session = await starts.start(store, agent_hangs=lambda: hangs)

    async def renewals(seconds: float) -> int:
        before = renewed
        await trio.sleep(seconds)
        return renewed - before

    nursery.start_soon(session.keep)
    with trio.fail_after(20):
        while not await renewals(0.3):
            pass
        hangs = True
        while await renewals(0.5):
            pass
        hangs = False
        while not await renewals(0.3):
            pass
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await kv.aclose()
    os.close(lock)
