"""Catalogs for the tests of this room: every engine behind one fixture, so that a further one is one more parameter."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.catalog_sqlite import SqliteCatalog

OpenCatalog = Callable[..., KeyValue]


@pytest.fixture(params=["sqlite", "memory"])
async def open_catalog(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenCatalog]:
    """A function that opens one more handle on the same catalog: `open_catalog(session=None)`."""
    handles: list[SqliteCatalog | MemoryCatalog] = []

    def open_sqlite(session: str | None = None) -> KeyValue:
        handles.append(SqliteCatalog.open(tmp_path / "catalog.db", writer_label="test", session=session))
        return handles[-1]

    def open_memory(session: str | None = None) -> KeyValue:
        first = handles[0] if handles else None
        handles.append(first.another(session) if isinstance(first, MemoryCatalog) else MemoryCatalog(session))
        return handles[-1]

    yield {"sqlite": open_sqlite, "memory": open_memory}[request.param]
    for handle in handles:
        await handle.aclose()


@pytest.fixture
async def kv(open_catalog: OpenCatalog) -> KeyValue:
    """One handle on an empty catalog."""
    return open_catalog()
