"""A catalog into an archive, and an archive into an empty catalog."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import trio

from ckptfs.cache.catalog_archive import ArchiveHeader, open_archive, write_archive
from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_fill import fill, recovery_from
from ckptfs.cache.catalog_snapshot import of_catalog_file, of_etcd
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import ID_SIZE
from ckptfs.fs.catalog import open_catalog
from ckptfs.fs.config import NodeConfig


class Transferred(NamedTuple):
    """What was written, or read: `size_bytes` of the archive."""

    header: ArchiveHeader
    records: int
    size_bytes: int

    def as_json(self) -> dict[str, Any]:
        header = self.header
        return {
            "cluster": header.cluster.hex(),
            "revision": header.revision,
            "records": self.records,
            "bytes": self.size_bytes,
        }


async def export_catalog(config: NodeConfig, path: Path) -> Transferred:
    """Write the configured catalog into a file. Raises `ConfigurationError`, `CacheError`."""
    if config.etcd_place is None:
        return await trio.to_thread.run_sync(_export_file, config.catalog_path, path)
    catalog = open_catalog(config, "export")
    assert isinstance(catalog, EtcdCatalog)
    try:
        snapshot = await of_etcd(catalog)
    finally:
        with trio.CancelScope(shield=True):
            await catalog.aclose()
    return _written(path, snapshot.header, list(snapshot.records))


def _export_file(catalog: Path, path: Path) -> Transferred:
    with of_catalog_file(catalog) as snapshot:
        return _written(path, snapshot.header, snapshot.records)


def _written(path: Path, header: ArchiveHeader, records: Any) -> Transferred:
    try:
        size_bytes = write_archive(path, header, records)
    except OSError as error:
        kept = "; what it held is still there" if os.path.lexists(path) else ""
        raise StoreError(f"{path} can't be written: {error.strerror}{kept}") from None
    with open_archive(path) as archive:
        return Transferred(archive.header, archive.count, size_bytes)


async def import_catalog(config: NodeConfig, path: Path) -> Transferred:
    """Fill the configured catalog, which must be empty, with an archive. Raises as `fill`, and as `open_archive`."""
    with open_archive(path) as archive:
        catalog = open_catalog(config, "import", create=True)
        try:
            recovery = recovery_from(archive.header, os.urandom(ID_SIZE))
            await fill(catalog, config.node.catalog, archive.header, archive.records(), recovery)
        finally:
            with trio.CancelScope(shield=True):
                await catalog.aclose()
        return Transferred(archive.header, archive.count, path.stat().st_size)
