"""The invariants of docs/protocol.md that can be stated of a simulated cluster, checked at the moment they could break.

At each commit: I2 (what readers get was synced and hashed at its home), I4 (protected only when every holder has exactly its
root, synced), I3 (what is kept of a dead version goes only after its grace, when all that was saved before it is protected), I7
(an ended session commits nothing, an inode has one writer in one epoch). At each removal of a shard: I5. Now and then, and at the
end: I12 (a replica at R is the catalog at R), I13 (the tree, and how inodes name versions), I1 and I6 (each protected version's
shards, wherever they were ever stored under its id, agree with its root). At rest: I15 (stores and catalog agree, and no node
says that anything waits for protection).
I8, I9, I10, I11 and I16 are what the clients check: see `simulated_clients`.
"""

import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from simulated_clients import Clients
from simulated_etcd import Change, Record, SimulatedEtcd
from simulated_node import CATALOG, GRACE_SECONDS, Cluster, Node
from virtual_machine import world

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_etcd import lease_of
from ckptfs.cache.catalog_format import (
    DirectoryEntry,
    Inode,
    ShardLayout,
    Store,
    StoreState,
    Version,
    VersionState,
    inode_key,
    store_key,
    store_of_key,
    unpack,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import Entry
from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.cache.segments import Segments
from ckptfs.cache.store import StoreDirectory
from ckptfs.cache.store_registry import session_label
from ckptfs.replication.errors import ShardDamaged, ShardNotFound
from ckptfs.replication.shard_reader import ShardReader

PREFIX = CATALOG.encode() + b"/"
_SHARD = re.compile(r"/shards/[0-9a-f]{2}/([0-9a-f]{32})\.(\d+)$")


class CatalogView:
    """The catalog as it is at this moment, for those who read a `KeyValue`."""

    def __init__(self, etcd: SimulatedEtcd) -> None:
        self._etcd = etcd

    async def range(self, prefix: bytes, *, after: bytes = b"", limit: int | None = None) -> list[Entry]:
        return self.entries(prefix)

    def entries(self, prefix: bytes) -> list[Entry]:
        whole = PREFIX + prefix
        records = self._etcd.records
        return [
            Entry(key[len(PREFIX) :], records[key].value, records[key].create_revision, records[key].mod_revision)
            for key in sorted(key for key in records if key.startswith(whole))
        ]

    def version(self, vid: Vid) -> Version | None:
        record = self._etcd.records.get(PREFIX + version_key(vid))
        return None if record is None else unpack(Version, record.value)

    def versions(self) -> dict[Vid, Version]:
        return {vid_of_key(entry.key): unpack(Version, entry.value) for entry in self.entries(b"v/")}

    def store(self, store: bytes) -> Store | None:
        record = self._etcd.records.get(PREFIX + store_key(StoreId(store)))
        return None if record is None else unpack(Store, record.value)

    def is_lost(self, store: bytes) -> bool:
        record = self.store(store)
        return record is not None and record.state is StoreState.LOST

    def inode(self, ino: InodeNumber) -> Inode | None:
        record = self._etcd.records.get(PREFIX + inode_key(ino))
        return None if record is None else unpack(Inode, record.value)


class Invariants:
    """Watches one cluster; what is wrong becomes a problem of it."""

    def __init__(self, cluster: Cluster, clients: Clients) -> None:
        self.catalog = CatalogView(cluster.etcd)
        self.damaged: set[int] = set()
        """Machines whose shards were damaged: what they should hold may be missing, what is damaged and unneeded is kept."""
        self._cluster = cluster
        self._clients = clients
        self._died_at: dict[bytes, float] = {}
        self._roots: dict[Vid, bytes] = {}
        cluster.etcd.on_commit = self._committed
        for node in cluster.nodes:
            node.drive.on_unlink = self._unlinking(node)

    def _node_of(self, store: bytes) -> Node:
        record = self.catalog.store(store)
        assert record is not None
        return self._cluster.nodes[int(record.node[1:])]

    def _is_gone(self, store: bytes) -> bool:
        return self.catalog.is_lost(store) or self._node_of(store).store.store_id != store

    # ---- at each commit

    def _committed(self, revision: int, changes: Sequence[Change], before: dict[bytes, Record | None]) -> None:
        for change in changes:
            if not change.key.startswith(PREFIX):
                continue
            key = change.key[len(PREFIX) :]
            was, now = before[change.key], change.record
            if key.startswith(b"v/"):
                self._version_changed(
                    vid_of_key(key),
                    None if was is None else unpack(Version, was.value),
                    None if now is None else unpack(Version, now.value),
                    was,
                )
            elif key.startswith(b"i/") and now is not None:
                self._inode_changed(
                    InodeNumber(int(key[2:], 16)),
                    None if was is None else unpack(Inode, was.value),
                    unpack(Inode, now.value),
                )
            elif key.startswith(b"s/") and now is not None:
                store = store_of_key(key)
                self._store_changed(store, None if was is None else unpack(Store, was.value), unpack(Store, now.value))

    def _store_changed(self, store: StoreId, was: Store | None, now: Store) -> None:
        machine = int(now.node[1:])
        if was is None:
            self._clients.store_made(machine)
        elif was.state is not now.state:
            self._cluster.note(f"store of n{machine} is {now.state.name}")
            if now.state is StoreState.LOST:
                self._clients.store_lost(machine, is_gone=self._cluster.nodes[machine].store.store_id != store)
            elif was.state is StoreState.LOST:
                self._clients.store_returned(machine)

    def _version_changed(self, vid: Vid, was: Version | None, now: Version | None, record: Record | None) -> None:
        if now is not None and now.state is VersionState.PROTECTED and (was is None or was.shards != now.shards):
            self._require_shards(vid, was, now)
        if now is not None and now.state is VersionState.DEAD:
            self._died_at.setdefault(vid, world.seconds())
        if now is None and was is not None and was.state is VersionState.DEAD and record is not None:
            self._require_reclaimable(vid, record)
        if now is not None and now.root and self._roots.setdefault(vid, now.root) != now.root:
            self._cluster.problem(f"I6: version {vid.hex()} has another root than it ever had")

    def _require_reclaimable(self, vid: Vid, record: Record) -> None:
        age = world.seconds() - self._died_at.get(vid, -1e9)
        skewed = max(abs(node.machine.skew_seconds) for node in self._cluster.nodes)
        full = any(node.machine.full for node in self._cluster.nodes)
        if age < GRACE_SECONDS - 0.5 and not skewed:
            self._cluster.problem(f"I3: {vid.hex()} is reclaimed {age:.1f} s after its death")
        for entry in self.catalog.entries(b"v/"):
            version = unpack(Version, entry.value)
            waits = version.state is VersionState.LOCAL and not self.catalog.is_lost(version.home)
            if waits and entry.create_revision < record.mod_revision and not full:
                self._cluster.problem(f"I3: {vid.hex()} is reclaimed while {vid_of_key(entry.key).hex()} is not protected")

    def _require_shards(self, vid: Vid, was: Version | None, now: Version) -> None:
        before = [] if was is None else was.shards
        for index, shard in enumerate(now.shards):
            if index < len(before) and before[index] == shard:
                continue
            if self.catalog.is_lost(shard.store):
                self._cluster.problem(f"I4: {vid.hex()} gets shard {index} on a store that was declared lost")
            problem = self._shard_problem(vid, index, now, shard.store, shard.root)
            if problem:
                self._cluster.problem(f"I4: {vid.hex()} is protected, but shard {index}: {problem}")

    def _shard_problem(self, vid: Vid, index: int, version: Version, store: bytes, root: bytes) -> str:
        """Why that store hasn't that shard, safely. One whose drive was taken out between its answer and the commit counts with
        what was on it: that is a store lost after the commit, to everybody who sees the one and the other."""
        node = self._node_of(store)
        if node.machine.number in self.damaged:
            return ""
        directory, drive = node.had(store)
        if version.layout is ShardLayout.COPIES:
            found = self._copy_root(directory, vid)
            return "" if found == root else f"{node.machine.name} has no such copy"
        name = vid.hex()
        path = f"{directory.shards}/{name[:2]}/{name}.{index}"
        try:
            with ShardReader(path, vid, index) as reader:
                if reader.footer.root != root:
                    return f"{node.machine.name} has another root"
                if not reader.verify().ok:
                    return f"{node.machine.name} has it damaged"
        except (ShardNotFound, ShardDamaged) as error:
            return f"{node.machine.name}: {error}"
        inode = os.stat(path).st_ino
        with open(path, "rb") as file:
            if drive.synced_content(inode) != file.read() or not drive.is_name_safe(path):
                return f"{node.machine.name} has not synced it"
        return ""

    def _copy_root(self, directory: StoreDirectory, vid: Vid) -> bytes | None:
        with closing(sqlite3.connect(directory.small_copies_db)) as database:
            row = database.execute("SELECT root FROM copies WHERE vid=?", (vid,)).fetchone()
        return None if row is None else bytes(row[0])

    def _inode_changed(self, ino: InodeNumber, was: Inode | None, now: Inode) -> None:
        if now.cur is not None and (was is None or was.cur != now.cur):
            self._require_local(ino, now.cur)
        if was is not None and was.writer is not None and now.writer not in (None, was.writer) and now.epoch <= was.epoch:
            self._cluster.problem(f"I7: inode {ino} has another writer in the same epoch")
        if now.writer is not None and (was is None or was.writer != now.writer):
            label = session_label(now.writer.store, now.writer.incarnation)
            if not self._cluster.etcd.has_lease(lease_of(label)):
                self._cluster.problem(f"I7: inode {ino} got a writer whose session has ended")

    def _require_local(self, ino: InodeNumber, vid: Vid) -> None:
        version = self.catalog.version(vid)
        if version is None or version.state is not VersionState.LOCAL:
            return
        directory, drive = self._node_of(version.home).had(version.home)
        path = Segments(directory.segments).path_of(version.segment)
        try:
            with open(path, "rb") as file:
                content = file.read()
                inode = os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            self._cluster.problem(f"I2: readers get {vid.hex()} of inode {ino}, whose segment is not there")
            return
        if content_root(vid, len(content), version.cell_size, cell_table(content, version.cell_size)) != version.root:
            self._cluster.problem(f"I2: readers get {vid.hex()} of inode {ino}, whose segment has other bytes than were hashed")
        elif drive.synced_content(inode) != content or not drive.is_name_safe(path):
            self._cluster.problem(f"I2: readers get {vid.hex()} of inode {ino}, which is not synced")

    # ---- at each removal

    def _unlinking(self, node: Node) -> Callable[[str], None]:
        def unlinking(path: str) -> None:
            found = _SHARD.search(path)
            if found is None:
                return
            vid, index = Vid(bytes.fromhex(found[1])), int(found[2])
            version = self.catalog.version(vid)
            if version is None:
                return
            named = (
                version.layout is ShardLayout.STRIPED
                and index < len(version.shards)
                and version.shards[index].store == node.store.store_id
            )
            if named or version.state is VersionState.LOCAL:
                self._cluster.problem(f"I5: {node.machine.name} removes shard {index} of {vid.hex()}, {version.state.name}")

        return unlinking

    # ---- now and then

    async def look(self) -> None:
        """What is true at every moment."""
        for problem in await catalog_problems(self.catalog):  # type: ignore[arg-type]
            self._cluster.problem(f"I13: {problem}")
        for node in self._cluster.nodes:
            if node.mount is not None and node.mount.replica is not None:
                self._compare(node, node.mount.replica)
        self._note_what_is_safe()

    def _compare(self, node: Node, replica: Any) -> None:
        revision = replica._revision
        rows = {row[0]: (bytes(row[1]), row[3]) for row in replica._connection.execute("SELECT * FROM kv")}
        state = self._cluster.etcd.state_at(revision)
        there = {
            key[len(PREFIX) :]: (record.value, record.mod_revision) for key, record in state.items() if key.startswith(PREFIX)
        }
        if rows != there:
            wrong = sorted(key for key in rows.keys() | there.keys() if rows.get(key) != there.get(key))
            self._cluster.problem(f"I12: the replica of {node.machine.name} at {revision} differs in {wrong[:3]}")

    def _note_what_is_safe(self) -> None:
        """Names whose newest content has become local or protected: a power cut must not take it any more."""
        for name, known in self._clients.known.items():
            if known.is_changing or known.undecided or known.newest.shows.content is None:
                continue
            record = self._cluster.etcd.records.get(PREFIX + b"d/%016x/%b" % (1, name.encode()))
            if record is None:
                continue
            inode = self.catalog.inode(_inode_of(record.value))
            if inode is None or inode.cur is None or inode.open is not None:
                continue
            version, content = self.catalog.version(inode.cur), known.newest.shows.content
            if version is None or version.size != len(content) or version.cell_size < 1:
                continue
            if content_root(inode.cur, version.size, version.cell_size, cell_table(content, version.cell_size)) == version.root:
                known.now_safe(protected=version.state is VersionState.PROTECTED)

    # ---- at rest

    def unrest(self, *, wholly: bool) -> str:
        """What isn't protected yet, and, `wholly`, why stores and catalog don't agree (I15); or nothing."""
        versions = self.catalog.versions()
        unfinished = [
            f"{vid.hex()} of {version.ino} at {self._node_of(version.home).machine.name} {version.state.name}"
            for vid, version in versions.items()
            if version.state is not VersionState.PROTECTED
            and (wholly or version.state is not VersionState.DEAD)
            and not self.catalog.is_lost(version.home)
        ]
        if unfinished:
            holds = [entry.key for entry in self.catalog.entries(b"h/")]
            return f"{len(unfinished)} versions are not protected: {unfinished}; held are {holds}"
        for vid, version in versions.items():
            if version.state is VersionState.PROTECTED and any(self._is_gone(shard.store) for shard in version.shards):
                return f"{vid.hex()} has shards on a store that is gone"
        for node in self._cluster.nodes:
            if reason := self._exposure_of(node) or (wholly and self._unrest_of(node, versions)):
                return f"{node.machine.name} {reason}"
        held = self.catalog.entries(b"h/")
        return f"{len(held)} segments are held" if held and wholly else ""

    def _exposure_of(self, node: Node) -> str:
        """What its status would say that its death would lose now: nothing, for all is protected."""
        if node.mount is None or node.agent is None:
            return "has no mount or no agent"
        closed, opened = node.mount.database.exposure(), node.mount.growing.exposure()
        listed = node.agent.agent.replicator.statistics()
        if closed.files or opened.files or listed.waiting_count:
            rows = [(row.ino, row.state.name, row.vid.hex()) for row in node.mount.database.files()]
            return f"counts {closed} and {opened}, its agent {listed.waiting_count} as unprotected: {rows}"
        return ""

    def _unrest_of(self, node: Node, versions: dict[Vid, Version]) -> str:
        store, damaged = node.store, node.machine.number in self.damaged
        wanted = {
            (vid.hex(), index)
            for vid, version in versions.items()
            for index, shard in enumerate(version.shards)
            if shard.store == store.store_id and version.layout is ShardLayout.STRIPED
        }
        there = set()
        for fan in os.scandir(store.shards):
            for name in os.listdir(fan.path):
                vid, index, *partial = name.split(".")
                if not partial:
                    there.add((vid, int(index)))
                elif Vid(bytes.fromhex(vid)) not in versions:  # else it goes by its age, after a day
                    return f"has {name}"
        if (there - wanted or wanted - there) and not damaged:
            return f"has shards {sorted(there - wanted)} too many, {sorted(wanted - there)} too few"
        copies = {
            vid for vid, version in versions.items() for shard in version.shards
            if shard.store == store.store_id and version.layout is ShardLayout.COPIES
        }  # fmt: skip
        with closing(sqlite3.connect(store.small_copies_db)) as database:
            found = {bytes(row[0]) for row in database.execute("SELECT vid FROM copies")}
        if (found - copies or copies - found) and not damaged:
            return f"has {len(found - copies)} copies too many, {len(copies - found)} too few"
        named = {version.segment for version in versions.values() if version.home == store.store_id and any(version.segment)}
        segments = set(Segments(store.segments).all())
        if (segments - named and not node.drive.keeps_segments) or named - segments:
            return f"has {len(segments - named)} segments too many, {len(named - segments)} too few"
        return ""

    def check_shards(self) -> None:
        """Every shard of every protected version is where the catalog says, and right (I1, I6)."""
        for vid, version in self.catalog.versions().items():
            if version.state is VersionState.PROTECTED:
                for index, shard in enumerate(version.shards):
                    if problem := self._shard_problem(vid, index, version, shard.store, shard.root):
                        self._cluster.problem(f"I1: shard {index} of {vid.hex()}: {problem}")


def _inode_of(value: bytes) -> InodeNumber:
    return unpack(DirectoryEntry, value).ino
