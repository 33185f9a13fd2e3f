"""A node's configuration: one TOML file, checked as a whole before anything starts.

Every key is listed with its default and effect in `docs/node.toml`. Unknown keys, impossible values and contradictions
raise `ConfigurationError`, whose message names the file, the key and the way out.
"""

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec

from ckptfs.cache.catalog_format import NODE_DOMAIN
from ckptfs.cache.ids import NodeId

SQLITE_SCHEME = "sqlite:///"
ETCD_SCHEMES = {"etcd://": "http", "etcds://": "https"}
ETCD_PORT = 2379
CATALOG_NAME = r"[A-Za-z0-9_-]{1,64}"
NODE_ID_RULE = "1 to 64 printable characters, no slash"


class ConfigurationError(Exception):
    """The configuration can't be used; the operator must change it."""


class NodeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[node]`: who and where. What isn't given isn't handed on either: an earlier release may not know the key."""

    id: str
    store: str
    mountpoint: str
    catalog: str
    listen: str = "127.0.0.1:0"
    log_directory: str = ""
    labels: dict[str, str] = {}
    drain_seconds: float = 30.0
    agent_user: str = ""


class ProtectionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[protection]`: the code and its pace. The first four are settled by the first node of a cluster."""

    data_shards: int = 4
    parity_shards: int = 2
    cell_size_bytes: int = 1 << 20
    failure_domain: str = NODE_DOMAIN
    small_file_size_bytes: int = 64 << 10
    codec: Literal["auto", "isa-l", "numpy"] = "auto"
    buffer_bytes_max: int = 32 << 20
    repair_after_seconds: float = 600.0


class MountSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[mount]`: how the mount serves."""

    passthrough: Literal["auto", "on", "off"] = "auto"
    settle_seconds: float = 2.0
    attribute_timeout_seconds: float = 1.0
    allow_other: bool = True


class SpaceSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[space]`: what of the store's file system is kept free for local saves, by releasing what is safe elsewhere."""

    reserve_fraction: float = 0.05


class RepairSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[repair]`: how fast shards are moved and looked at that nobody waits for."""

    bytes_per_second_max: int = 256 << 20
    scrub_days: float = 7.0


class TlsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[tls]`: what nodes on several machines prove who they are with. Paths of PEM files."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    crl: str = ""
    token: str = ""


class EtcdSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[etcd]`: how a catalog on etcd is reached. Paths of PEM files."""

    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    wait_seconds: float = 30.0


class EtcdPlace(NamedTuple):
    """What `etcd://host:port,host:port/name` says: the members' URLs, and which of their catalogs."""

    urls: list[str]
    name: str
    is_secure: bool


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    node: NodeSection
    protection: ProtectionSection = ProtectionSection()
    mount: MountSection = MountSection()
    space: SpaceSection = SpaceSection()
    repair: RepairSection = RepairSection()
    etcd: EtcdSection = EtcdSection()
    tls: TlsSection = TlsSection()

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.node.id)

    @property
    def store(self) -> Path:
        return Path(self.node.store)

    @property
    def mountpoint(self) -> Path:
        return Path(self.node.mountpoint)

    @property
    def etcd_place(self) -> EtcdPlace | None:
        """Where the catalog is, if it is on etcd."""
        return etcd_place(self.node.catalog)

    @property
    def catalog_path(self) -> Path:
        """Where the catalog is, if it is a SQLite file."""
        return Path(self.node.catalog.removeprefix(SQLITE_SCHEME))

    @property
    def log_directory(self) -> Path:
        return Path(self.node.log_directory) if self.node.log_directory else self.store / "log"


def load_config(path: Path) -> NodeConfig:
    """Read and check the file. Raises `ConfigurationError`."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; name the node's file with --config FILE") from None
    return parse_config(text, path)


def parse_config(text: bytes, path: Path) -> NodeConfig:
    """Check what the file `path` holds. Raises `ConfigurationError`, which names the file."""
    try:
        return checked_config(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def checked_config(text: bytes) -> NodeConfig:
    """The configuration, if it can be. Raises `ConfigurationError`, which begins with the key."""
    try:
        config = msgspec.toml.decode(text, type=NodeConfig)
    except msgspec.DecodeError as error:
        raise ConfigurationError(_with_allowed_values(str(error)) or f"{error}; docs/node.toml lists every key") from None
    _check(config)
    return config


def _with_allowed_values(said: str) -> str:
    """What the decoder said of a word that is none of those its key takes; empty if it said something else."""
    found = re.fullmatch(r"Invalid enum value ('.*') - at `\$\.(\w+)\.(\w+)`", said, re.DOTALL)
    if found is None:
        return ""
    value, section, key = found.groups()
    *others, last = get_args(get_type_hints(get_type_hints(NodeConfig)[section])[key])
    return f"{section}.{key}: {', '.join(others)} or {last}, not {value}"


def is_node_id(text: str) -> bool:
    """Whether a node can be called that: see `NODE_ID_RULE`."""
    return 0 < len(text) <= 64 and text.isprintable() and "/" not in text


def hand_config(config: NodeConfig) -> int:
    """The configuration as the supervisor has checked it, in JSON, in a descriptor for its children and for the next release: a
    file without a name, which nobody can take away before a child has read it."""
    descriptor = os.memfd_create("ckptfs-config")
    os.write(descriptor, msgspec.json.encode(config))
    return descriptor


def load_handed_config(descriptor: int) -> NodeConfig:
    """What `hand_config` was given. The descriptor is closed."""
    try:
        return msgspec.json.decode(os.pread(descriptor, os.fstat(descriptor).st_size, 0), type=NodeConfig)
    finally:
        os.close(descriptor)


def _check(config: NodeConfig) -> None:
    node, protection, mount = config.node, config.protection, config.mount
    _require(is_node_id(node.id), f"node.id: {NODE_ID_RULE}")
    _require("\0" not in node.agent_user, "node.agent_user: no name has a NUL in it")
    for key in ("store", "mountpoint", "catalog", "log_directory"):
        _require("\0" not in getattr(node, key), f"node.{key}: no path has a NUL in it")
    for key, value in (("node.store", node.store), ("node.mountpoint", node.mountpoint)):
        _require(os.path.isabs(value), f"{key}: an absolute path is needed, this is {value!r}")
    # Of the mountpoint only what is above it: it may be a mount that waits for this very node to answer.
    above, name = os.path.split(os.path.normpath(node.mountpoint))
    store, mountpoint = os.path.realpath(node.store), os.path.join(os.path.realpath(above), name)
    _require(
        os.path.commonpath([store, mountpoint]) not in (store, mountpoint),
        "node.store and node.mountpoint: neither may lie inside the other",
    )
    place = config.etcd_place
    _require(
        place is not None or node.catalog.startswith(SQLITE_SCHEME + "/"),
        f'node.catalog: must be "sqlite:////absolute/path" or "etcd://host:2379/name", this is {node.catalog!r}',
    )
    etcd = config.etcd
    _require(
        place is not None or etcd == EtcdSection(), "etcd: node.catalog is no etcd:// or etcds://: this section has no effect"
    )
    _require(
        place is None or place.is_secure or not (etcd.ca or etcd.certificate or etcd.key),
        "etcd: certificates are for etcds://; with etcd:// nothing is encrypted",
    )
    _require(bool(etcd.certificate) or not etcd.key, "etcd.key: the certificate it belongs to is missing")
    _require(bool(etcd.user) == bool(etcd.password_file), "etcd.user and etcd.password_file: both or none")
    _require(1 <= etcd.wait_seconds <= 600, "etcd.wait_seconds: 1 to 600")
    for key in ("ca", "certificate", "key", "password_file"):
        value = getattr(etcd, key)
        _require(not value or os.path.isabs(value), f"etcd.{key}: an absolute path is needed, this is {value!r}")
    on_drive = [] if place is not None else [("node.catalog", config.catalog_path)]
    for key, path in (*on_drive, ("node.log_directory", config.log_directory)):
        _require(path.is_absolute(), f"{key}: an absolute path is needed, this is {str(path)!r}")
        _require(not Path(os.path.realpath(path)).is_relative_to(mountpoint), f"{key}: it can't lie in the node's own mount")
    host, _, port = node.listen.rpartition(":")
    _require(bool(host) and port.isdecimal() and int(port) < 65536, f"node.listen: host:port is needed, this is {node.listen!r}")
    tls = config.tls
    given = [bool(tls.ca), bool(tls.certificate), bool(tls.key)]
    _require(all(given) or not any(given), "tls: ca, certificate and key belong together")
    _require(all(given) or not tls.crl, "tls.crl: without certificates it has no effect")
    for key in ("ca", "certificate", "key", "crl", "token"):
        value = getattr(tls, key)
        _require(not value or os.path.isabs(value), f"tls.{key}: an absolute path is needed, this is {value!r}")
    _require(
        all(given) or host in ("127.0.0.1", "::1", "[::1]"),
        "node.listen: only loopback addresses without [tls]; ckptfs ca init and ckptfs nodes add make certificates",
    )
    _require(
        host not in ("0.0.0.0", "[::]", "::"),
        "node.listen: the name or address that peers reach this node by, and that its certificate names",
    )
    _require(1 <= protection.data_shards <= 32, "protection.data_shards: 1 to 32")
    _require(0 <= protection.parity_shards <= 8, "protection.parity_shards: 0 to 8")
    label = protection.failure_domain
    _require(re.fullmatch("[a-z0-9_-]{1,32}", label) is not None, "protection.failure_domain: a label's name, as rack, or node")
    _require(
        label == NODE_DOMAIN or bool(node.labels.get(label)),
        f"node.labels: with protection.failure_domain = {label!r} this node's {label} is needed there",
    )
    cell = protection.cell_size_bytes
    _require(4096 <= cell <= 4 << 20 and cell % 4096 == 0, "protection.cell_size_bytes: a multiple of 4096 up to 4194304")
    _require(
        0 <= protection.small_file_size_bytes <= 1 << 20, "protection.small_file_size_bytes: 0 to 1048576 (0: no whole copies)"
    )
    _require(protection.repair_after_seconds >= 1, "protection.repair_after_seconds: at least 1")
    stripe = cell * (protection.data_shards + protection.parity_shards)
    _require(
        protection.buffer_bytes_max >= 2 * stripe,
        f"protection.buffer_bytes_max: two stripes of this code need {2 * stripe} bytes",
    )
    _require(0 <= node.drain_seconds <= 86400, "node.drain_seconds: 0 to 86400")
    _require(0 <= mount.settle_seconds <= 3600, "mount.settle_seconds: 0 to 3600")
    _require(0 <= mount.attribute_timeout_seconds <= 60, "mount.attribute_timeout_seconds: 0 to 60")
    _require(
        config.repair.bytes_per_second_max == 0 or config.repair.bytes_per_second_max >= 1 << 20,
        "repair.bytes_per_second_max: 1048576 or more, or 0 for no limit",
    )
    _require(0 <= config.repair.scrub_days <= 3650, "repair.scrub_days: 0 to 3650")
    _require(0 <= config.space.reserve_fraction < 0.9, "space.reserve_fraction: 0 to 0.9")


def etcd_place(catalog: str) -> EtcdPlace | None:
    """What a `node.catalog` says of etcd; None if it names none, or makes no sense."""
    for scheme, protocol in ETCD_SCHEMES.items():
        if catalog.startswith(scheme):
            members, slash, name = catalog.removeprefix(scheme).partition("/")
            urls = [_member_url(protocol, member) for member in members.split(",")]
            sound = all(urls) and re.fullmatch(CATALOG_NAME, name)
            return EtcdPlace(urls, name, protocol == "https") if slash and sound else None
    return None


def _member_url(protocol: str, member: str) -> str:
    try:
        parts = urlsplit(f"{protocol}://{member}")
        port = parts.port or ETCD_PORT
    except ValueError:
        return ""
    plain = parts.hostname and not (parts.username or parts.path or parts.query or parts.fragment)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{protocol}://{host}:{port}" if plain else ""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigurationError(message)
