"""Rebuilding a lost catalog: from the newest state of it that survived somewhere, and what stores hold (R20).

What the state knows stays as it says, but for what the shards prove to have happened since:

- A version that was open or local, and of which there are shards enough, became protected. It is made so.
- A version whose shards have other holders now is given those.
- A version the state doesn't know: if its shards were sent at a revision the state has passed, it was deleted before that, and is
  left alone. If later, the state can't know it: it becomes a file below `/.ckptfs/recovered/<revision of the state>/`.
- What was closed after the state and never protected is in a segment of its home, whose `mount.db` has a row of it: it becomes
  such a file too, being written there, so that its home seals and protects it.
- A segment is only believed to be what the state says of it if it has the size and the time that are written there: its file may
  have been written since. Others are marked as damaged; `verify` clears the mark of those that are right.

Everything is built in memory, by the same functions that a node changes a catalog with.
"""

import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ckptfs.cache.catalog_archive import ArchiveHeader, Record
from ckptfs.cache.catalog_fill import INODES_SKIPPED
from ckptfs.cache.catalog_format import (
    FORMAT_VERSION,
    INODE_BLOCK_KEY,
    INODE_PREFIX,
    NO_SEGMENT,
    SETTINGS_KEY,
    VERSION_PREFIX,
    DirectoryEntry,
    Inode,
    Settings,
    Shard,
    ShardLayout,
    Store,
    StoreState,
    Version,
    VersionState,
    Writer,
    entry_of_key,
    inode_key,
    inode_of_key,
    pack,
    pack_number,
    store_key,
    unpack,
    unpack_number,
    version_key,
    vid_of_key,
)
from ckptfs.cache.catalog_kv import OPERATIONS_MAX, Put
from ckptfs.cache.catalog_memory import MemoryCatalog
from ckptfs.cache.errors import NameExists, NoSuchName, StoreError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, SegmentId, StoreId, Vid
from ckptfs.cache.namespace import Created, Namespace
from ckptfs.cache.store_registry import stores
from ckptfs.cache.versions import LocalCommit, ProtectedCommit, Versions
from ckptfs.replication.found_content import FoundContent, FoundContents
from ckptfs.replication.inventory import FoundSegment, Inventory
from ckptfs.replication.recovery_report import RecoveryReport, Trouble, shown

RECOVERED_DIRECTORY = (b".ckptfs", b"recovered")
DATA_SHARDS, PARITY_SHARDS, CELL_SIZE = 4, 2, 1 << 20
"""A cluster's, where neither a state nor any shard says it."""


class State(NamedTuple):
    """A state of the catalog that survived. `source` is where, for people."""

    header: ArchiveHeader
    records: Iterable[Record]
    source: str


class Rebuilt(NamedTuple):
    """A whole catalog in memory, the state it began from, and the newest revision that anything at hand has seen."""

    catalog: MemoryCatalog
    header: ArchiveHeader
    seen_revision: int
    report: RecoveryReport


def choose_state(inventories: Sequence[Inventory], states: Sequence[State]) -> tuple[bytes, State | None]:
    """The cluster's id, and the newest state there is, in the inventories or besides them.

    Raises `StoreError` if not everything is of one cluster, or a store is there twice; `DamagedData`.
    """
    found = list(states)
    for inventory in inventories:
        state = inventory.state
        if state is not None:
            found.append(State(state.header, state.records(), f"{inventory.archive_source} of {inventory.node}"))
    clusters = {state.header.cluster: state.source for state in found}
    clusters |= {one.cluster: f"the store {one.directory} of {one.node}" for one in inventories if one.cluster is not None}
    if len(clusters) > 1:
        said = "; ".join(f"{source}: {cluster.hex()}" for cluster, source in clusters.items())
        raise StoreError(f"these belong to different clusters ({said}); name only what is of one")
    if not clusters:
        raise StoreError("nothing here says which cluster it belongs to: no catalog can be made of it")
    ids = [inventory.store for inventory in inventories]
    if twice := {one for one in ids if ids.count(one) > 1}:
        raise StoreError(f"the store {min(twice).hex()} is given twice; name each once")
    return next(iter(clusters)), max(found, key=lambda state: state.header.revision, default=None)


async def rebuild(inventories: Sequence[Inventory], states: Sequence[State], now_ns: Callable[[], int]) -> Rebuilt:
    """The catalog that follows from the newest state and what the stores hold. Raises `StoreError`, `DamagedData`."""
    cluster, state = choose_state(inventories, states)
    contents = FoundContents(inventories)
    header = ArchiveHeader(cluster, 0) if state is None else state.header
    catalog = MemoryCatalog()
    if state is None:
        settings = _settings_of(cluster, contents)
        await Namespace(catalog, StoreId(bytes(16)), 0, now_ns).format_if_empty(settings)
    else:
        await _load(catalog, state.records)
    report = RecoveryReport(
        cluster.hex(),
        "" if state is None else state.source,
        header.revision,
        [str(inventory.node) for inventory in inventories],
        [],
        damaged_shards=sum(inventory.damaged for inventory in inventories),
        trouble=[trouble for inventory in inventories for trouble in inventory.trouble],
    )
    recovery = _Recovery(catalog, header, inventories, contents, report, now_ns)
    await recovery.run()
    seen = max([header.revision, contents.newest_revision, *(inventory.seen_revision for inventory in inventories)])
    return Rebuilt(catalog, header, seen, report)


def _settings_of(cluster: bytes, contents: FoundContents) -> Settings:
    striped = [found for vid in contents for found in contents.of(vid) if found.layout is ShardLayout.STRIPED]
    if not striped:
        return Settings(FORMAT_VERSION, cluster, DATA_SHARDS, PARITY_SHARDS, CELL_SIZE)
    code = max((found.data_shards, found.parity_shards) for found in striped)
    return Settings(FORMAT_VERSION, cluster, *code, max(found.cell_size for found in striped))


async def _load(catalog: MemoryCatalog, records: Iterable[Record]) -> None:
    batch: list[Put] = []
    for key, value in records:
        batch.append(Put(key, value))
        if len(batch) == OPERATIONS_MAX:
            await catalog.transact([], batch)
            batch = []
    await catalog.transact([], batch)


class _Recovery:
    """One run, over a catalog in memory."""

    def __init__(
        self,
        catalog: MemoryCatalog,
        header: ArchiveHeader,
        inventories: Sequence[Inventory],
        contents: FoundContents,
        report: RecoveryReport,
        now_ns: Callable[[], int],
    ) -> None:
        self._catalog = catalog
        self._header = header
        self._inventories = inventories
        self._contents = contents
        self._report = report
        self._now_ns = now_ns
        self._given = {inventory.store for inventory in inventories}
        self._segments: dict[tuple[StoreId, bytes], FoundSegment] = {
            (inventory.store, found.segment): found for inventory in inventories for found in inventory.segments
        }
        self._places: dict[InodeNumber, tuple[InodeNumber, bytes]] = {}
        self._contents_used: set[Vid] = set()

    async def run(self) -> None:
        await self._skip_inodes()
        await self._register_stores()
        settings = unpack(Settings, (await self._entry(SETTINGS_KEY)).value)
        self._copies_wanted = settings.parity_shards + 1
        for entry in await self._catalog.range(b"d/"):
            self._places[unpack(DirectoryEntry, entry.value).ino] = entry_of_key(entry.key)
        versions = {vid_of_key(entry.key): unpack(Version, entry.value) for entry in await self._catalog.range(VERSION_PREFIX)}
        # What is local first: an open version of the same file takes its place.
        for state in (VersionState.LOCAL, VersionState.OPEN):
            for vid, version in versions.items():
                if version.state is state and await self._became_protected(vid, version):
                    self._report.became_protected += 1
        await self._recover_unknown(versions.keys())
        await self._recover_closed({*versions, *self._contents_used}, versions)
        await self._check_known()

    async def _entry(self, key: bytes) -> Any:
        entry = await self._catalog.get(key)
        if entry is None:
            raise StoreError(f"the state of the catalog lacks {key!r}: it is none")
        return entry

    async def _skip_inodes(self) -> None:
        """Numbers given out since the state was taken are on segments, perhaps."""
        first = unpack_number((await self._entry(INODE_BLOCK_KEY)).value)
        beyond = max(first, self._contents.highest_ino + 1) + INODES_SKIPPED
        await self._catalog.transact([], [Put(INODE_BLOCK_KEY, pack_number(beyond))])

    async def _register_stores(self) -> None:
        """Those that joined since. Each says where it is when its node starts."""
        known = await stores(self._catalog)
        for inventory in self._inventories:
            if inventory.store not in known:
                record = Store(FORMAT_VERSION, inventory.node, StoreState.IN, "", inventory.directory)
                await self._catalog.transact([], [Put(store_key(inventory.store), pack(record))])
        self._report.stores_not_given = sorted(
            f"{record.node} ({store.hex()}, {record.state.name.lower()})"
            for store, (record, _) in known.items()
            if store not in self._given and not record.state.is_gone
        )

    # ---- what the state knows

    async def _became_protected(self, vid: Vid, version: Version) -> bool:
        for found in self._contents.of(vid):
            if not found.is_enough or (version.state is VersionState.LOCAL and not found.is_content_of(version)):
                continue
            as_home = Versions(self._catalog, version.home, 0, self._now_ns)
            if version.state is VersionState.OPEN and not await self._made_local(as_home, version.ino, found):
                return False
            return await self._made_protected(as_home, version.ino, found)
        return False

    async def _made_local(self, versions: Versions, ino: InodeNumber, found: FoundContent) -> bool:
        local = LocalCommit(ino, found.vid, found.size, found.root, found.cell_size, found.stored_at_ns, True)
        return found.vid in (await versions.commit_local([local])).vids

    async def _made_protected(self, versions: Versions, ino: InodeNumber, found: FoundContent) -> bool:
        shards = found.shards(self._copies_wanted)
        parity_shards = len(shards) - found.data_shards
        revisions = {}
        for shard in shards:
            entry = await self._catalog.get(store_key(shard.store))
            revisions[shard.store] = 0 if entry is None else entry.mod_revision
        commit = ProtectedCommit(
            ino, found.vid, found.layout, found.data_shards, parity_shards, found.cell_size, shards, revisions
        )
        return found.vid in await versions.commit_protected([commit])

    async def _check_known(self) -> None:
        """Of every file: whether its segment is proved, its shards are where the catalog says, and whether it can be read."""
        inodes = {inode_of_key(entry.key): unpack(Inode, entry.value) for entry in await self._catalog.range(INODE_PREFIX)}
        regular = {ino: inode for ino, inode in inodes.items() if inode.is_regular}
        self._report.files = len(regular)
        self._report.bytes = sum(inode.size for inode in regular.values())
        for entry in await self._catalog.range(VERSION_PREFIX):
            vid, version = vid_of_key(entry.key), unpack(Version, entry.value)
            if version.state is VersionState.DEAD:
                continue
            checked = self._with_holders(vid, self._with_proved_segment(vid, version, inodes.get(version.ino)))
            if checked != version:
                await self._catalog.transact([], [Put(version_key(vid), pack(checked))])
            inode = inodes.get(version.ino)
            if inode is not None and vid in (inode.open, inode.cur) and not (vid == inode.cur and inode.open is not None):
                self._judge(vid, checked)

    def _with_proved_segment(self, vid: Vid, version: Version, inode: Inode | None) -> Version:
        if version.state is VersionState.OPEN or version.segment == NO_SEGMENT:
            return version
        found = self._segments.get((version.home, version.segment))
        if found is None and version.home in self._given and version.state is VersionState.PROTECTED:
            return msgspec.structs.replace(version, segment=NO_SEGMENT, damaged=False)
        there = None if found is None else (vid, found.size, found.mtime_ns)
        if there is not None and inode is not None and there == (inode.cur, version.size, inode.mtime_ns):
            return version
        self._report.segments_unproved += 1
        return msgspec.structs.replace(version, damaged=True)

    def _with_holders(self, vid: Vid, version: Version) -> Version:
        """Where shards were moved since, or the code was raised, what was found takes the place of what the state says."""
        if version.state is not VersionState.PROTECTED or not version.shards:
            return version
        found = self._found_of(vid, version)
        if found is not None and version.layout is ShardLayout.STRIPED:
            shards = [self._holder(index, shard, found) for index, shard in enumerate(version.shards)]
            changed = msgspec.structs.replace(version, shards=shards)
            if self._useful(changed, found) >= found.needed:
                self._report.holders_changed += changed != version
                return changed
        for other in self._contents.of(vid):
            if other.is_enough and other.is_content_of(version) and not self._is_readable(version, found):
                shards = other.shards(self._copies_wanted)
                self._report.holders_changed += 1
                return msgspec.structs.replace(
                    version,
                    layout=other.layout,
                    data_shards=other.data_shards,
                    parity_shards=len(shards) - other.data_shards,
                    cell_size=other.cell_size,
                    shards=shards,
                )
        return version

    def _found_of(self, vid: Vid, version: Version) -> FoundContent | None:
        fitting = (one for one in self._contents.of(vid) if one.is_content_of(version) and one.has_code_of(version))
        return next(fitting, None)

    def _holder(self, index: int, shard: Shard, found: FoundContent) -> Shard:
        """As the state says, unless that store is here and hasn't got it, and another has."""
        there = found.holders.get(index)
        is_there = (index, shard) in found.everywhere
        if is_there or shard.store not in self._given or there is None or there.root != shard.root:
            return shard
        return there

    def _useful(self, version: Version, found: FoundContent) -> int:
        """How many of the shards with cells are where the version says."""
        right = [index for index, shard in enumerate(version.shards) if (index, shard) in found.everywhere]
        return found.useful(right)

    def _is_readable(self, version: Version, found: FoundContent | None) -> bool:
        if found is None:
            return False
        if version.layout is ShardLayout.COPIES:
            holders = {shard.store for shard in found.holders.values()}
            return any(shard.store in holders for shard in version.shards)
        return self._useful(version, found) >= found.needed

    def _judge(self, vid: Vid, version: Version) -> None:
        """Whether the file can be read when the stores that are here are up."""
        has_home = version.home in self._given
        has_segment = (version.home, version.segment) in self._segments and not version.damaged
        if version.state is not VersionState.PROTECTED:
            if has_home and (version.home, version.segment) not in self._segments:
                gone = "its newest bytes were in one segment only, and that is gone; it may have been deleted since"
                self._say(self._report.lost, version.ino, gone)
            elif not has_home:
                self._say(self._report.waiting, version.ino, f"its bytes are only in the store {version.home.hex()}, not given")
            return
        found = self._found_of(vid, version)
        if not version.shards or has_segment or self._is_readable(version, found):
            return
        away = sum(shard.store not in self._given for shard in version.shards)
        there = 0 if found is None else self._useful(version, found)
        needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
        if there + away >= needed:
            self._say(self._report.waiting, version.ino, f"{there} of {needed} shards are here; {away} are in stores not given")
        else:
            self._say(self._report.lost, version.ino, f"{there} of {needed} shards are left; it may have been deleted since")

    def _say(self, where: list[Trouble], ino: InodeNumber, reason: str) -> None:
        where.append(Trouble(shown(self._path_of(ino)), reason))

    def _path_of(self, ino: InodeNumber) -> bytes:
        parts: list[bytes] = []
        while ino != ROOT_INODE and ino in self._places and len(parts) < 4096:
            ino, name = self._places[ino]
            parts.append(name)
        return b"/" + b"/".join(reversed(parts))

    # ---- what the state does not know

    async def _recover_unknown(self, known: Iterable[Vid]) -> None:
        known = set(known)
        later: list[FoundContent] = []
        at_home = {
            closed.vid
            for inventory in self._inventories
            for closed in inventory.closed
            if (inventory.store, closed.segment) in self._segments
        }
        for vid in self._contents:
            if vid in known:
                continue
            best = self._contents.of(vid)[0]
            if max(found.revision for found in self._contents.of(vid)) <= self._header.revision:
                self._report.deleted_before += 1
            elif best.is_enough:
                later.append(best)
            elif vid not in at_home:
                reason = f"saved after the state, and {best.useful(best.holders)} of {best.needed} shards are left"
                reason += "; a segment of its home may have it, which is kept"
                self._report.lost.append(Trouble(shown(best.path_hint), reason))
        for found in later:  # of a file the state knows, it knows the path
            if found.ino in self._places:
                found.path_hint = self._path_of(found.ino)
        # The newest of those with one name gets it.
        for found in sorted(later, key=lambda found: (found.path_hint, -found.revision, found.vid)):
            holder = next(iter(found.holders.values())).store
            namespace = Namespace(self._catalog, holder, 0, self._now_ns, make_vid=partial(Vid, found.vid))
            hint = found.path_hint or b"unnamed-%d" % found.ino
            created, path = await self._make_file(namespace, hint, found.revision, NO_SEGMENT)
            versions = Versions(self._catalog, holder, 0, self._now_ns)
            await self._made_local(versions, created.ino, found)
            await self._made_protected(versions, created.ino, found)
            self._contents_used.add(found.vid)
            self._report.recovered.append(shown(path))
            self._report.recovered_bytes += found.size

    async def _recover_closed(self, done: set[Vid], versions: dict[Vid, Version]) -> None:
        named = {(version.home, version.segment): (vid, version) for vid, version in versions.items()}
        for inventory in self._inventories:
            for closed in inventory.closed:
                place = (inventory.store, closed.segment)
                if closed.vid in done or place not in self._segments:
                    continue
                vid, version = named.get(place, (None, None))
                if vid is not None and version is not None:  # it was written in place
                    now = await Versions(self._catalog, inventory.store, 0, self._now_ns).version(vid)
                    if now is None or now.state is not VersionState.PROTECTED:
                        await self._go_on_writing(inventory.store, version.ino, vid)
                        continue
                    released = msgspec.structs.replace(now, segment=NO_SEGMENT, damaged=False)
                    await self._catalog.transact([], [Put(version_key(vid), pack(released))])
                namespace = Namespace(self._catalog, inventory.store, 0, self._now_ns)
                hint = self._path_of(closed.ino) if closed.ino in self._places else closed.path_hint
                created, path = await self._make_file(
                    namespace, hint or b"unnamed-%d" % closed.ino, self._header.revision, closed.segment
                )
                record = unpack(Version, (await self._entry(version_key(created.vid))).value)
                durable = msgspec.structs.replace(record, durable=True)
                await self._catalog.transact([], [Put(version_key(created.vid), pack(durable))])
                self._report.closed.append(shown(path))

    async def _go_on_writing(self, home: StoreId, ino: InodeNumber, vid: Vid) -> None:
        """The state's local version is no more: the file goes on with what its segment holds now."""
        inode = unpack(Inode, (await self._entry(inode_key(ino))).value)
        if inode.cur == vid and inode.open is None and inode.writer in (None, Writer(home, 0)):
            await Versions(self._catalog, home, 0, self._now_ns).open_for_writing(ino, truncate_to_new_segment=None)
            self._report.closed.append(shown(self._path_of(ino)))

    async def _make_file(
        self, namespace: Namespace, path_hint: bytes, revision: int, segment: SegmentId
    ) -> tuple[Created, bytes]:
        """A file of that path below the directory of what was recovered, being written; and the path it got."""
        root = await namespace.inode(ROOT_INODE)
        names = [*RECOVERED_DIRECTORY, b"%d" % self._header.revision, *names_of(path_hint)]
        parent, path = ROOT_INODE, b""
        for name in names[:-1]:
            parent, name = await self._directory(namespace, parent, name, root)
            path += b"/" + name
        tries = (names[-1], *(with_suffix(names[-1], b"~%d" % (revision + more)) for more in range(1000)))
        for name in tries:
            try:
                created = await namespace.create_file(parent, name, stat.S_IFREG | 0o600, root.uid, root.gid, segment)
            except NameExists:
                continue
            self._places[created.ino] = (parent, name)
            return created, path + b"/" + name
        raise StoreError(f"{shown(path)} has a thousand files called {shown(names[-1])}")

    async def _directory(self, namespace: Namespace, parent: InodeNumber, name: bytes, root: Inode) -> tuple[InodeNumber, bytes]:
        """The directory of that name, made unless it exists; another name, where something else has that."""
        while True:
            try:
                ino, inode = await namespace.lookup(parent, name)
            except NoSuchName:
                ino, _ = await namespace.make_directory(parent, name, 0o700, root.uid, root.gid)
                self._places[ino] = (parent, name)
                return ino, name
            if inode.is_directory:
                return ino, name
            name = with_suffix(name, b"~")


def names_of(path_hint: bytes) -> list[bytes]:
    """The names a path hint has, fit to be made: the last one is the file's."""
    names = [name.replace(b"\0", b"?")[:200] for name in path_hint.split(b"/") if name not in (b"", b".", b"..")]
    return names or [b"unnamed"]


def with_suffix(name: bytes, suffix: bytes) -> bytes:
    """Another name that is short enough."""
    return name[: 255 - len(suffix)] + suffix
