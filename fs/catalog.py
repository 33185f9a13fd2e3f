"""The catalog a node's configuration names, opened for one of its processes."""

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import StoreError
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.config import SQLITE_SCHEME, ConfigurationError, EtcdSection, NodeConfig, NodeSection, etcd_place
from ckptfs.fs.space import catalog_reserve_bytes

if TYPE_CHECKING:
    from ckptfs.cache.catalog_etcd import EtcdCatalog
    from ckptfs.cache.catalog_replica import ReplicatedCatalog


def open_on_drive(config: NodeConfig, role: str, *, session: str | None = None, create: bool = False) -> SqliteCatalog:
    """As `open_catalog`, for a SQLite file."""
    path = config.catalog_path
    return SqliteCatalog.open(
        path,
        writer_label=f"{config.node_id}/{role}",
        session=session,
        create=create,
        reserve_bytes=catalog_reserve_bytes(path),
    )


def open_replica(config: NodeConfig, store: StoreDirectory, session: str) -> "ReplicatedCatalog":
    """A catalog on etcd, read from the node's replica, which one process of a node keeps. Raises as `open_catalog`."""
    from ckptfs.cache.catalog_etcd import EtcdCatalog
    from ckptfs.cache.catalog_replica import ReplicatedCatalog

    origin = open_catalog(config, "replica", session=session)
    assert isinstance(origin, EtcdCatalog)
    return ReplicatedCatalog(origin, store.replica_db)


def open_catalog(
    config: NodeConfig, role: str, *, session: str | None = None, create: bool = False
) -> "SqliteCatalog | EtcdCatalog":
    """The catalog, for the process `role` of the node. Blocks shortly.

    `session` is the label of the node's session, `create` whether a SQLite file is made when there is none. Raises `StoreError`,
    `DamagedData`, and `ConfigurationError` for certificates that can't be read. An etcd that is away is found by the first call.
    """
    place = config.etcd_place
    if place is None:
        return open_on_drive(config, role, session=session, create=create)
    # An HTTP client takes time and memory, which a node with a SQLite file doesn't need.
    from ckptfs.cache.catalog_etcd import EtcdCatalog
    from ckptfs.cache.etcd_gateway import EtcdGateway

    etcd = config.etcd
    gateway = EtcdGateway(
        place.urls,
        trust=trust_of(etcd) if place.is_secure else None,
        user=etcd.user,
        password=_password(etcd),
        wait_seconds=etcd.wait_seconds,
    )
    return EtcdCatalog(gateway, place.name, session=session)


def trust_of(etcd: EtcdSection) -> ssl.SSLContext:
    """Who is believed to be etcd, and who the node says it is. Raises `ConfigurationError`."""
    try:
        context = ssl.create_default_context(cafile=etcd.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if etcd.certificate:
            context.load_cert_chain(etcd.certificate, etcd.key or None)
    except (OSError, ssl.SSLError) as error:
        named = ", ".join(path for path in (etcd.ca, etcd.certificate, etcd.key) if path)
        raise ConfigurationError(f"etcd: the certificates ({named}) can't be used: {error.strerror or error}") from None
    return context


def _password(etcd: EtcdSection) -> str:
    if not etcd.password_file:
        return ""
    try:
        return Path(etcd.password_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"etcd.password_file: {etcd.password_file} can't be read: {reason}") from None


def join_token(config: NodeConfig) -> str:
    """The token that a new store joins with, or "": one that has joined needs none, and its file may be gone."""
    try:
        return Path(config.tls.token).read_text().strip() if config.tls.token else ""
    except (OSError, UnicodeDecodeError):
        return ""


def place_of(catalog: str) -> NodeConfig:
    """The configuration of who only wants to open that catalog. Raises `ConfigurationError`."""
    if etcd_place(catalog) is None and not catalog.startswith(SQLITE_SCHEME + "/"):
        raise ConfigurationError(f'{catalog!r}: must be "sqlite:////absolute/path" or "etcd://host:2379/name"')
    return NodeConfig(NodeSection("none", "/nonexistent", "/nonexistent", catalog))


async def check_not_older(catalog: "EtcdCatalog", location: str, seen_revision: int) -> None:
    """Raises `StoreError` if etcd has not come as far as this node has seen (R9): it is another one, or an older copy."""
    newest = await catalog.revision()
    if newest < seen_revision:
        raise StoreError(
            f"the catalog {location} ends at revision {newest}, but {seen_revision} was there: it was made anew, or set back to"
            " an older state; no file in any store was touched. Bring the newer state back, or point the node at its own etcd"
        )
