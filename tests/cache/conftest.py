"""Catalogs for the tests of this room: every engine behind one fixture, so that a further one is one more parameter."""

import contextlib
import os
import urllib.error
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio

from ckptfs.cache.catalog_etcd import EtcdCatalog, lease_of
from ckptfs.cache.catalog_kv import Entry, KeyValue
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_replica import ReplicatedCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.etcd_gateway import EtcdGateway

OpenCatalog = Callable[..., KeyValue]


class CaughtUp(ReplicatedCatalog):
    """A replica whose every read comes behind a barrier: then it promises what the others do."""

    async def get(self, key: bytes) -> Entry | None:
        await self.catch_up()
        return await super().get(key)

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        await self.catch_up()
        return await super().range(prefix, after=after, limit=limit)

    async def count(self, prefix: bytes) -> int:
        await self.catch_up()
        return await super().count(prefix)

    async def end_session(self, session: str) -> int:
        return await self._origin.end_session(session)


@pytest.fixture(
    params=["sqlite", "memory", pytest.param("etcd", marks=pytest.mark.slow), pytest.param("replica", marks=pytest.mark.slow)]
)
async def open_catalog(request: pytest.FixtureRequest, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[OpenCatalog]:
    """A function that opens one more handle on the same catalog: `open_catalog(session=None)`."""
    handles: list[SqliteCatalog | MemoryCatalog | EtcdCatalog | ReplicatedCatalog] = []
    catalog = f"test-{os.urandom(4).hex()}"

    def open_sqlite(session: str | None = None) -> KeyValue:
        handles.append(SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session))
        return handles[-1]

    def open_memory(session: str | None = None) -> KeyValue:
        first = handles[0] if handles else None
        handles.append(first.another(session) if isinstance(first, MemoryCatalog) else MemoryCatalog(session))
        return handles[-1]

    def open_etcd(session: str | None = None) -> KeyValue:
        server = request.getfixturevalue("etcd")  # started by the first test that needs it
        if session is not None:
            with contextlib.suppress(urllib.error.HTTPError):  # it has begun
                server.post("/v3/lease/grant", {"ID": lease_of(session), "TTL": 60})
        handles.append(EtcdCatalog(EtcdGateway([server.url]), catalog, session=session))
        return handles[-1]

    def open_replica(session: str | None = None) -> KeyValue:
        origin = open_etcd(session)
        assert isinstance(origin, EtcdCatalog)
        replica = CaughtUp(origin, tmp_path / f"replica-{len(handles)}.db")
        handles[-1] = replica  # which closes its origin
        nursery.start_soon(replica.run)
        return replica

    yield {"sqlite": open_sqlite, "memory": open_memory, "etcd": open_etcd, "replica": open_replica}[request.param]
    for handle in handles:
        await handle.aclose()


@pytest.fixture
async def kv(open_catalog: OpenCatalog) -> KeyValue:
    """One handle on an empty catalog."""
    return open_catalog()
