"""Catalogs for the tests of this room: every engine behind one fixture, so that a further one is one more parameter."""

import contextlib
import os
import urllib.error
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ckptfs.cache.catalog_etcd import EtcdCatalog, lease_of
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.etcd_gateway import EtcdGateway

OpenCatalog = Callable[..., KeyValue]


@pytest.fixture(params=["sqlite", "memory", pytest.param("etcd", marks=pytest.mark.slow)])
async def open_catalog(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenCatalog]:
    """A function that opens one more handle on the same catalog: `open_catalog(session=None)`."""
    handles: list[SqliteCatalog | MemoryCatalog | EtcdCatalog] = []
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

    yield {"sqlite": open_sqlite, "memory": open_memory, "etcd": open_etcd}[request.param]
    for handle in handles:
        await handle.aclose()


@pytest.fixture
async def kv(open_catalog: OpenCatalog) -> KeyValue:
    """One handle on an empty catalog."""
    return open_catalog()
