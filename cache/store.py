"""The store directory: its layout, its identity and its lock.

::

    store.json      {"format": 1, "store": "<32 hex>", "node": "<node id>", "cluster": "<32 hex>", "recoveries": ["<32 hex>", …]}:
                    written by temporary name and rename, without `cluster` until its node first joined one; `recoveries` of the
                    catalog are those that were taken note of here
    lock            flock held by the node's processes while any of them lives
    segments/       the log: segments/<8 hex>/<32 hex>, one plain file each
    shards/         shards held for others (and for this node's own versions)
    copies/         verified local copies of versions whose home is elsewhere
    agent/          what only the agent writes besides, and like shards/ and copies/ its user's where root runs the node
    agent/small_copies.db, agent/agent.db    what its name says; an index of the shards
    agent/catalog.copy    an archive of the catalog, some minutes old, where it is a SQLite file; may be absent
    agent.db, small_copies.db    links into agent/: where earlier releases look. A file here is such a release's, and newer
    mount.db        an index, written by the mount process
    replica.db      what the catalog says, where it is on etcd
    mount.notes                              changes that mount.db has not committed yet
    reserve         room kept for starting on a full drive; may be absent
    incarnation     which start of the node was the last, decimal: whose session in the catalog is its own; may be absent
    boot            the boot id of the machine when the node last ran, as in /proc; may be absent
    uses            how often files were opened for writing and closed, see `set_back_mark`; may be absent
    run/            sockets and pid files

A store of a newer format, of another node, or in use raises `StoreError`; nothing in it is changed then.
"""

import contextlib
import fcntl
import json
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import ID_SIZE, NodeId, StoreId, new_store_id

FORMAT_VERSION = 1

# linux/fs.h; the argument is an int, whatever the name of the request says.
FS_IOC_GETFLAGS = 0x80086601
FS_IOC_SETFLAGS = 0x40086602
FS_TOPDIR_FL = 0x00020000

AGENT_FILES = ("agent.db", "small_copies.db", "catalog.copy")

LOCK_TRIES = 10
LOCK_RETRY_SECONDS = 0.02


def sync_directory(path: Path) -> None:
    """Make the directory's entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str, mode: int = 0o644) -> None:
    """Make the file hold the text, or put it in an older one's place; it survives a power cut. Raises `OSError`."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def _make_directories(path: Path) -> None:
    """Make the directory, and those above it, unless it exists; what is made survives a power cut."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for directory in reversed(missing):
        sync_directory(directory.parent)


def _spread_subdirectories(directory: Path) -> None:
    """Have ext4 put each subdirectory into another block group, where it can be done: other file systems have no such flag, and
    no such need.

    For minutes after a delete, ext4 passes over the inodes freed in a group one by one before it gives out a new one
    (`recently_deleted`, fs/ext4/ialloc.c): after a rotation of 2,000 files a create beside them took 640 µs, elsewhere 18.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            (flags,) = struct.unpack("=i", fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(4)))
            fcntl.ioctl(descriptor, FS_IOC_SETFLAGS, struct.pack("=i", flags | FS_TOPDIR_FL))
        finally:
            os.close(descriptor)


def _lock_soon(descriptor: int) -> None:
    """Take the lock. Raises `BlockingIOError` for a node that holds it: whoever only looks (`is_in_use`) does for a moment."""
    for _ in range(LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(LOCK_RETRY_SECONDS)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class StoreDirectory:
    """A store that exists and has this program's format. Attributes are paths; nothing is open."""

    def __init__(
        self, path: Path, store_id: StoreId, node: NodeId, cluster: bytes | None = None, recoveries: Sequence[str] = ()
    ) -> None:
        self.path = path
        self.store_id = store_id
        self.node = node
        self.cluster = cluster
        self.recoveries = tuple(recoveries)
        self.segments = path / "segments"
        self.shards = path / "shards"
        self.copies = path / "copies"
        self.reserve = path / "reserve"
        self.boot = path / "boot"
        self.uses = path / "uses"
        self.run = path / "run"
        self.mount_db = path / "mount.db"
        self.agent = path / "agent"
        self.replica_db = path / "replica.db"
        self.mount_socket = self.run / "mount.sock"
        self.agent_socket = self.run / "agent.sock"
        self.lock = path / "lock"

    @property
    def agent_db(self) -> Path:
        return self._of_agent("agent.db")

    @property
    def small_copies_db(self) -> Path:
        return self._of_agent("small_copies.db")

    @property
    def catalog_copy(self) -> Path:
        return self._of_agent("catalog.copy")

    def _of_agent(self, name: str) -> Path:
        """Where an earlier release had it last, until this one's agent has moved it."""
        before = self.path / name
        return before if before.is_file() and not before.is_symlink() else self.agent / name

    @classmethod
    def create_or_open(cls, path: Path, node: NodeId) -> "StoreDirectory":
        """Open the store, making it first if the directory is absent or empty. Raises `StoreError`."""
        try:
            _make_directories(path)
            empty = not any(entry for entry in os.listdir(path) if entry not in ("log", "lost+found", "store.json.new"))
            if empty:
                cls(path, new_store_id(), node)._write_label()
            store = cls.open(path)
        except OSError as error:
            raise StoreError(
                f"the store {path} can't be used: {error.strerror}; name a directory on a local drive that can be written to"
            ) from None
        if store.node != node:
            raise StoreError(
                f"the store {path} belongs to node {store.node!r}, this node is {node!r}; "
                "nothing was changed: point node.store elsewhere, or start the node under its own id"
            )
        for directory in (store.segments, store.shards, store.copies, store.agent, store.run):
            try:
                _make_directories(directory)
            except OSError as error:
                raise StoreError(
                    f"{directory} can't be made: {error.strerror}; the store must lie where it can be written to"
                ) from None
        for directory in (store.segments, store.shards):
            _spread_subdirectories(directory)
        return store

    @classmethod
    def open(cls, path: Path) -> "StoreDirectory":
        """Open an existing store without changing anything. Raises `StoreError`."""
        name = path / "store.json"
        try:
            fields = json.loads(name.read_bytes())
            version, store_id, node = fields["format"], bytes.fromhex(fields["store"]), fields["node"]
            cluster = bytes.fromhex(fields["cluster"]) if "cluster" in fields else None
            recoveries = [str(recovery) for recovery in fields.get("recoveries", ())]
        except FileNotFoundError:
            raise StoreError(
                f"{path} holds files but no store.json: not a store; nothing was changed: use another directory"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{name} can't be read ({error}); the segments and shards beside it are untouched: restore it from a copy"
            ) from None
        if version != FORMAT_VERSION:
            raise StoreError(
                f"the store {path} has format {version}, this program reads {FORMAT_VERSION}; nothing was changed: "
                "start it with the release that wrote it, or a newer one"
            )
        if len(store_id) != ID_SIZE or not isinstance(node, str):
            raise StoreError(f"{name} names no valid store id and node; restore it from a copy")
        return cls(path, StoreId(store_id), NodeId(node), cluster, recoveries)

    def join(self, cluster: bytes, catalog: str) -> None:
        """Belong to this cluster from now on. Raises `StoreError` if the store belongs to another: `catalog` has names for other
        bytes than those that lie here."""
        if self.cluster is None:
            self.cluster = cluster
            try:
                self._write_label()
            except OSError as error:
                raise StoreError(f"{self.path}/store.json can't be written: {error.strerror}") from None
        elif self.cluster != cluster:
            raise StoreError(
                f"the catalog {catalog} is another cluster's than that of the store {self.path}, or was made anew; nothing in the"
                " store was changed: bring the right catalog back, or start with an empty store"
            )

    def note_recoveries(self, recoveries: Sequence[str]) -> None:
        """Remember that these recoveries of the catalog, by their ids in hex, were taken note of. Raises `StoreError`."""
        self.recoveries = tuple(recoveries)
        try:
            self._write_label()
        except OSError as error:
            raise StoreError(f"{self.path}/store.json can't be written: {error.strerror}") from None

    def _write_label(self) -> None:
        fields: dict[str, object] = {"format": FORMAT_VERSION, "store": self.store_id.hex(), "node": self.node}
        if self.cluster is not None:
            fields["cluster"] = self.cluster.hex()
        if self.recoveries:
            fields["recoveries"] = self.recoveries
        write_durably(self.path / "store.json", json.dumps(fields) + "\n", 0o600)

    def acquire(self) -> int:
        """Take the store's lock and return its descriptor; held until every process that inherited it is gone.

        Raises `StoreError` when a node already runs on this store, or it can't be written to.
        """
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"the store {self.path} can't be written to: {error.strerror}; nothing in it was changed") from None
        try:
            _lock_soon(descriptor)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                message = f"a node already runs on the store {self.path}; stop it first, or use another directory"
            else:
                message = f"the store {self.path} can't be locked: {error.strerror}; it needs a local file system, ext4 or xfs"
            raise StoreError(message) from None
        return descriptor

    def is_in_use(self) -> bool:
        """Whether some process holds the store's lock."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
        return False
