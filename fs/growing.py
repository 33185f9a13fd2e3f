"""Files that stay open: what they have so far is protected at fsync, and once a minute (R16).

A log, an event file, an HDF5 file that is held open would else not be protected before it is closed. Each time the whole
beginning of the file up to its present size is synced and hashed, and becomes a version of its own, a *prefix*, which the agent
protects like any other. The agent reads the bytes again; if they have the same hashes, all of them were there at one moment in
between. If they have not, the file was changed and not only appended to: the prefix is given up, and another one made later.

What is closed must never be hidden by older bytes. So every close for writing, truncation and rename voids the prefix, in the
catalog, before its request is answered; for a file that is still open then another one is made soon.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import trio

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.catalog_records import existing_inode
from ckptfs.cache.errors import CacheError, DamagedRecord, NoSuchName
from ckptfs.cache.ids import InodeNumber, StoreId, Vid, new_vid
from ckptfs.cache.mount_db import Exposure, FileState, MountDatabase, WaitingVersion
from ckptfs.cache.prefixes import Prefix, begin_prefix, give_up_prefix, void_prefix
from ckptfs.cache.seal import SealCandidate, Sealed, Sealer, SealFailed
from ckptfs.cache.versions import Versions
from ckptfs.fs.open_files import FileInUse, OpenFiles

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
MINUTE_SECONDS = 60.0
BUSY_BYTES = 64 << 20
"""A file that grew by more since the last look, and is being written at this moment, is left alone: it is being saved, and
closed soon."""
GROWN_SHARE = 8
"""After an fsync a prefix is made at once when the file has grown by an eighth since the last one, else within a minute: each
one sends the whole beginning again."""
AGAIN_SECONDS_MIN = 2.0
AGAIN_FACTOR = 10
PENDING_SECONDS = 5.0
"""How often it is asked whether a prefix on its way was given up."""
GIVEN_UP_SECONDS_MIN = 10.0
GIVEN_UP_SECONDS_MAX = 600.0


Hashed = Sealed | SealFailed | None


@dataclass(slots=True)
class _Growth:
    """What is known of one open file. Times are trio's but `taken_ns` (wall). `vid` is its open version; `prefix` is the one on
    its way, `is_held` whether the protected one may be shown; `size` and `mtime_ns` are the segment's when that was hashed.
    `void_count` grows with everything that voids."""

    vid: Vid
    looked_at: float
    looked_size: int
    synced: bool = False
    synced_at: float = 0.0
    not_before: float = 0.0
    given_up_count: int = 0
    void_count: int = 0
    is_held: bool = False
    to_be_voided: bool = False
    size: int = 0
    mtime_ns: int = 0
    prefix: Vid | None = None
    prefix_size: int = 0
    prefix_mtime_ns: int = 0
    started_at: float = 0.0
    asked_at: float = 0.0
    taken_ns: int = 0


class GrowingFiles:
    """The open files of this node's mount. `wake_agent` tells the agent that something waits; `run_quietly` calls a function in
    a thread of low priority. The sealer is this object's own."""

    def __init__(
        self,
        kv: KeyValue,
        store: StoreId,
        versions: Versions,
        open_files: OpenFiles,
        database: MountDatabase,
        sealer: Sealer,
        settle_seconds: float,
        now_ns: Callable[[], int],
        wake_agent: Callable[[], Awaitable[None]],
        run_quietly: Callable[[Callable[[SealCandidate], Hashed], SealCandidate], Awaitable[Hashed]],
    ) -> None:
        self._kv = kv
        self._store = store
        self._versions = versions
        self._open_files = open_files
        self._database = database
        self._sealer = sealer
        self._settle_seconds = settle_seconds
        self._now_ns = now_ns
        self._wake_agent = wake_agent
        self._run_quietly = run_quietly
        self._growths: dict[InodeNumber, _Growth] = {}
        self._stopped = False

    # What happens to files

    def synced(self, file: FileInUse) -> None:
        """A program called fsync: if the file isn't closed soon, what it has now is to be protected."""
        growth = self._growth_of(file)
        if growth is not None and not growth.synced:
            growth.synced, growth.synced_at = True, trio.current_time()

    async def voided(self, file: FileInUse) -> None:
        """A handle for writing was closed, the file was truncated or renamed: older bytes may not be shown for it any more."""
        growth = self._growths.get(file.ino)
        if growth is None or growth.vid != file.vid:
            return
        growth.void_count += 1
        if not file.writers:
            growth.looked_at = trio.current_time()  # it is sealed soon
        if growth.prefix is not None or growth.is_held:
            await self._void(file, growth)

    async def _void(self, file: FileInUse, growth: _Growth) -> None:
        growth.to_be_voided = True
        try:
            async with self._open_files.alone(file.ino):
                await void_prefix(self._kv, file.ino)
        except CacheError as error:
            log.warning("prefix_not_voided inode=%d error=%s", file.ino, error)
            return  # tried again with the next look
        self._is_void(file, growth)

    def renamed(self, ino: InodeNumber) -> None:
        """The file has another name: the catalog has voided its prefix with that."""
        file, growth = self._open_files.get(ino), self._growths.get(ino)
        if file is not None and growth is not None and growth.vid == file.vid:
            growth.void_count += 1
            if growth.prefix is not None or growth.is_held:
                self._is_void(file, growth)

    def _is_void(self, file: FileInUse, growth: _Growth) -> None:
        self._forget_prefix(file.ino, growth)
        growth.is_held = growth.to_be_voided = False
        growth.size = growth.mtime_ns = 0
        growth.synced, growth.synced_at = file.writers > 0, trio.current_time()

    def protected(self, vids: Iterable[Vid]) -> None:
        """The agent has protected these versions, prefixes among them."""
        wanted = set(vids)
        for ino, growth in self._growths.items():
            if growth.prefix is not None and growth.prefix in wanted:
                self._prefix_protected(ino, growth)

    def _prefix_protected(self, ino: InodeNumber, growth: _Growth) -> None:
        growth.is_held, growth.given_up_count = True, 0
        growth.size, growth.mtime_ns = growth.prefix_size, growth.prefix_mtime_ns
        now = trio.current_time()
        growth.not_before = now + max(AGAIN_SECONDS_MIN, AGAIN_FACTOR * (now - growth.started_at))
        self._forget_prefix(ino, growth)
        file = self._open_files.get(ino)
        if file is not None and file.vid == growth.vid:
            file.exposed_ns = growth.taken_ns
            self._database.put_file(self._open_files.row(file))
        log.info("prefix_protected inode=%d size=%d", ino, growth.size)

    def exposure(self) -> Exposure:
        """What a death of this node would lose now of the files that are open here."""
        exposed = []
        for file in self._open_files:
            if file.state is not FileState.OPEN or file.descriptor is None:
                continue
            status = os.fstat(file.descriptor)
            growth = self._growths.get(file.ino)
            covered = 0
            if growth is not None and growth.vid == file.vid and growth.is_held:
                if (status.st_size, status.st_mtime_ns) == (growth.size, growth.mtime_ns):
                    continue
                covered = growth.size if status.st_size > growth.size else 0
            exposed.append((status.st_size - covered, file.exposed_ns))
        return Exposure(len(exposed), sum(size for size, _ in exposed), min((since for _, since in exposed), default=None))

    # Going on after a kill

    async def begin(self) -> None:
        """Go on with what an earlier process had under way. Raises `CacheError`."""
        waiting = {one.ino: one for one in self._database.prefixes()}
        for file in self._open_files:
            growth = self._growth_of(file)
            if growth is not None:
                with contextlib.suppress(NoSuchName, DamagedRecord):  # an error of this file, not of the mount
                    await self._take_up(file.ino, growth, waiting)
        self._database.remove_prefixes(list(waiting))

    async def _take_up(self, ino: InodeNumber, growth: _Growth, waiting: dict[InodeNumber, WaitingVersion]) -> None:
        inode, _ = await existing_inode(self._kv, ino)
        growth.is_held = inode.prefix_holds
        if inode.prefix is not None and inode.prefix_holds:
            version = await self._versions.version(inode.prefix)
            growth.size = 0 if version is None else version.size
        if inode.prefix_next is None:
            return
        row = waiting.get(ino)
        if row is not None and row.vid == inode.prefix_next:
            del waiting[ino]
            growth.prefix, growth.prefix_size, growth.taken_ns = row.vid, row.size, row.exposed_ns
            growth.started_at = trio.current_time()
        else:
            await give_up_prefix(self._kv, ino, inode.prefix_next)

    # Looking

    def stop(self) -> None:
        """The process ends: what is being hashed is left."""
        self._stopped = True

    async def run(self) -> None:
        while not self._stopped:
            await trio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Look at all open files once, and begin what is due, one after the other."""
        for file in self._open_files:
            if not (file.writers or file.unsealable or file.ino in self._growths):
                continue  # it was closed, and is sealed soon
            growth = self._growth_of(file)
            if growth is not None:
                try:
                    await self._look(file, growth)
                except (CacheError, OSError) as error:
                    growth.not_before = trio.current_time() + MINUTE_SECONDS
                    log.warning("prefix_not_made inode=%d error=%s", file.ino, error)
        self._forget_others()

    def _growth_of(self, file: FileInUse) -> _Growth | None:
        """What is known of the file; None if it isn't being written here."""
        if file.state is not FileState.OPEN or file.descriptor is None or file.orphan is not None:
            return None
        growth = self._growths.get(file.ino)
        if growth is None or growth.vid != file.vid:
            size = os.fstat(file.descriptor).st_size
            growth = self._growths[file.ino] = _Growth(file.vid, trio.current_time(), size)
        return growth

    def _forget_others(self) -> None:
        gone = []
        for ino, growth in self._growths.items():
            file = self._open_files.get(ino)
            if file is None or file.vid != growth.vid or file.state is not FileState.OPEN or file.orphan is not None:
                gone.append(ino)
        for ino in gone:
            self._forget_prefix(ino, self._growths.pop(ino))

    def _forget_prefix(self, ino: InodeNumber, growth: _Growth) -> None:
        if growth.prefix is not None:
            growth.prefix = None
            self._database.remove_prefixes([ino])

    async def _look(self, file: FileInUse, growth: _Growth) -> None:
        """Begin a prefix if it is time and there is something new."""
        if growth.to_be_voided:
            await self._void(file, growth)
        now = trio.current_time()
        minute = now >= growth.looked_at + MINUTE_SECONDS
        synced = growth.synced and file.writers > 0 and now >= growth.synced_at + self._settle_seconds
        if growth.prefix is not None:
            if now >= growth.asked_at + PENDING_SECONDS:
                growth.asked_at = now
                await self._look_after(file, growth, growth.prefix)
            return
        if not (minute or synced) or now < growth.not_before or file.sync_failed:
            return
        assert file.descriptor is not None
        status = os.fstat(file.descriptor)
        grown, is_new = status.st_size - growth.size, (status.st_size, status.st_mtime_ns) != (growth.size, growth.mtime_ns)
        if synced and not minute and is_new and growth.is_held and 0 <= grown < growth.size / GROWN_SHARE:
            return
        busy = status.st_size - growth.looked_size > BUSY_BYTES and self._now_ns() - status.st_mtime_ns < 10**9
        growth.looked_at, growth.looked_size = now, status.st_size
        if synced:
            growth.synced = False
        if is_new and status.st_size and (synced or not busy):
            await self._make(file, growth)

    async def _look_after(self, file: FileInUse, growth: _Growth, prefix: Vid) -> None:
        """A prefix on its way: was it given up, or protected without our hearing it?"""
        version = await self._versions.version(prefix)
        if growth.prefix != prefix:
            return
        if version is None:
            self._forget_prefix(file.ino, growth)
            self._put_off(growth)
        elif version.shards:
            self._prefix_protected(file.ino, growth)

    def _put_off(self, growth: _Growth) -> None:
        growth.given_up_count += 1
        pause_seconds = min(GIVEN_UP_SECONDS_MIN * 2.0 ** min(growth.given_up_count - 1, 10), GIVEN_UP_SECONDS_MAX)
        growth.not_before = trio.current_time() + pause_seconds

    async def _make(self, file: FileInUse, growth: _Growth) -> None:
        assert file.descriptor is not None
        assert file.segment is not None
        started_at, taken_ns, void_count = trio.current_time(), self._now_ns(), growth.void_count

        def still_wanted() -> bool:
            is_there = self._open_files.get(file.ino) is file
            return is_there and growth.void_count == void_count and file.state is FileState.OPEN and not self._stopped

        try:
            inode, _ = await existing_inode(self._kv, file.ino)
        except NoSuchName:
            return  # removed on another node
        growth.is_held = inode.prefix_holds
        prefix = new_vid()
        self._open_files.pin(file)
        try:
            candidate = SealCandidate(file.ino, prefix, file.segment, file.descriptor, still_wanted)
            hashed = await self._run_quietly(self._sealer.hash_prefix, candidate)
        finally:
            self._open_files.unpin(file)
        if isinstance(hashed, SealFailed):
            file.sync_failed = True
            log.error("sync_failed inode=%d segment=%s error=%s", file.ino, file.segment.hex(), hashed.error.strerror)
            return
        if hashed is None:
            self._put_off(growth)
            return
        if file.durable_vid != growth.vid:  # else a power cut here would leave less than was protected
            await self._versions.mark_durable(growth.vid)
            file.durable_vid = growth.vid
        async with self._open_files.alone(file.ino):  # nothing is voided in between
            made = Prefix(prefix, hashed.size, hashed.root, hashed.cell_size, hashed.mtime_ns, inode)
            if not still_wanted() or not await begin_prefix(self._kv, self._store, file.ino, file.vid, made):
                return
            growth.prefix, growth.prefix_size, growth.prefix_mtime_ns = prefix, hashed.size, hashed.mtime_ns
            growth.started_at, growth.asked_at, growth.taken_ns = started_at, trio.current_time(), taken_ns
            row = WaitingVersion(file.ino, prefix, file.segment, hashed.size, taken_ns, file.path_hint, is_prefix=True)
            self._database.put_prefix(row)
        await self._wake_agent()
