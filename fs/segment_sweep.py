"""What other nodes removed or rewrote, and what was to be unlinked when the process that knew of it was killed.

Rows of `mount.db` and files in use whose inode is gone, or moved to another home, are let go: what the catalog's log says has
changed is looked at often. What was looked at is written down, so that the next process begins there (`MountRecovery`). Now and
then all rows are looked at, because a row that tells of nothing would be counted as unprotected for ever.
Segments are looked at now and then: one goes only if no version whose home is this store names it in a walk over the catalog, no
file in use has it, and, asked again by the inode it is labelled with, the catalog still doesn't: a walk may miss a version that a
rewrite renames beside it. A segment is made after its version is committed, so a walk that begins after the listing meets it; one
that is made complete first is known to `OpenFiles` until then.

The same walk finds versions that the catalog says are being written here though no file in use has them. A transaction that began
one was carried out after etcd had not answered for so long that its program was told an error: nobody will ever close it.

A segment older than `mount.db` is never removed here: the database was lost, perhaps the catalog with it, and what an older copy
of the catalog doesn't know may be the only bytes there are.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

import trio

from ckptfs.cache.catalog_format import Version, VersionState, inode_key, unpack, version_key
from ckptfs.cache.catalog_kv import COMPARES_MAX, Entry
from ckptfs.cache.changed_inodes import changed_inodes
from ckptfs.cache.errors import CacheError, DamagedData, NoSuchName
from ckptfs.cache.id_filter import IdFilter
from ckptfs.cache.ids import ID_SIZE, SEGMENT_WINDOW_SECONDS, InodeNumber, SegmentId, StoreId, Vid, segment_made_at
from ckptfs.cache.mount_db import AGREED_FACT, MADE_FACT, FileRow, FileState, MountDatabase
from ckptfs.cache.namespace import Namespace
from ckptfs.cache.segments import Segments
from ckptfs.cache.versions import Versions
from ckptfs.fs.open_files import OpenFiles
from ckptfs.fs.reclaim import Reclaimer

log = logging.getLogger(__name__)


ROWS_SECONDS = 2.0
GIVE_WAY_SECONDS = 0.1
GIVE_WAY_SECONDS_MAX = 4.0
"""While programs ask without a pause, looking at the rows waits up to so long: those of all that they make are among them, and
it is done in the thread that answers."""
SEGMENTS_SECONDS = 60.0
PAUSE_FACTOR = 50
"""A sweep takes at most so small a part of the time, however many files there are."""

PAGE_COUNT = 500


async def _left_open(ino: InodeNumber) -> None:
    """For a sweep that ends nothing."""


class SegmentSweep:
    """`run` sweeps until it is cancelled."""

    def __init__(
        self,
        namespace: Namespace,
        versions: Versions,
        segments: Segments,
        open_files: OpenFiles,
        reclaimer: Reclaimer,
        database: MountDatabase,
        store: StoreId,
        is_busy: Callable[[], bool] = lambda: False,
        end_unheld: Callable[[InodeNumber], Awaitable[None]] = _left_open,
    ) -> None:
        """`is_busy`: whether programs are asking without a pause. `end_unheld` ends what is being written here according to the
        catalog, and to no program."""
        self._namespace = namespace
        self._versions = versions
        self._segments = segments
        self._open_files = open_files
        self._reclaimer = reclaimer
        self._database = database
        self._store = store
        self._is_busy = is_busy
        self._end_unheld = end_unheld
        agreed = database.fact(AGREED_FACT)
        self._swept = None if agreed is None else int(agreed)
        self._noted = self._swept
        self._kept: set[InodeNumber] = set()
        """Of rows that the last sweep could not let go: their files are in use, or changed just then."""
        self._without_row: dict[InodeNumber, Vid] = {}
        """Local versions that the last walk found, of files that have no row."""
        self._unheld: set[InodeNumber] = set()
        """Of open versions that the last walk found, and that no file in use had when it came by."""
        self.kept_count = 0
        """Segments nothing names that are kept all the same."""

    async def run(self) -> None:
        rows_at = segments_at = 0.0
        while True:
            started = trio.current_time()
            if started >= rows_at and started < rows_at + GIVE_WAY_SECONDS_MAX and self._is_busy():
                await trio.sleep(GIVE_WAY_SECONDS)
                continue
            if started >= rows_at:
                await self.sweep_rows()
                rows_at = trio.current_time() + ROWS_SECONDS
            started = trio.current_time()
            if started >= segments_at:
                await self.sweep_rows(all_rows=True)
                await self.sweep_segments()
                segments_at = _next(started, SEGMENTS_SECONDS)
            await trio.sleep(max(0.0, min(rows_at, segments_at) - trio.current_time()))

    async def sweep_rows(self, *, all_rows: bool = False) -> int:
        """Let go what other nodes have removed, replaced or taken over, unless programs here have it open: among `all_rows`, or
        those whose inode changed since the last sweep. Returns how many rows went."""
        count, kept = 0, set[InodeNumber]()
        try:
            revision = await self._namespace.kv.revision()
            await self._namespace.kv.catch_up()  # what the log says is gone must not be there still, for it isn't looked at again
            rows = self._database.files() if all_rows else await self._rows_to_look_at(revision)
            for start in range(0, len(rows), COMPARES_MAX):
                await trio.lowlevel.checkpoint()
                for row in await self._without_content(rows[start : start + COMPARES_MAX]):
                    if await self._let_go(row):
                        count += 1
                    else:
                        kept.add(row.ino)
            self._kept = kept
            self._note(revision)
        except CacheError as error:
            log.warning("row_sweep_put_off error=%s", error)
        return count

    async def _rows_to_look_at(self, revision: int) -> list[FileRow]:
        """Those whose inode changed since the last sweep, and those that were kept then."""
        changed = None if self._swept is None else await changed_inodes(self._namespace.kv, self._swept, revision)
        if changed is None:
            return self._database.files()
        return self._database.files_of(changed | self._kept)

    async def _without_content(self, rows: Sequence[FileRow]) -> list[FileRow]:
        """Those that tell of nothing a file has any more, which are few: asked for together, because the rows of all that was
        made here lately are among those to look at, and programs wait meanwhile.

        A version outlives its inode where another node's file replaced that, until that file is local itself; and where it was
        protected, as a tombstone. No change of the row's inode tells when it is gone at last, and nobody will protect it.
        """
        kv = self._namespace.kv
        versions = await kv.get_many([version_key(row.vid) for row in rows])
        inodes = await kv.get_many([inode_key(row.ino) for row in rows])
        return [
            row
            for row, version, inode in zip(rows, versions, inodes, strict=True)
            if version is None or inode is None or _is_dead(version)
        ]

    def _note(self, revision: int) -> None:
        """The sweep before this one is what holds after a kill: a change of its time may not have had its row written yet when
        it looked."""
        if self._swept is not None and self._swept != self._noted:
            self._database.set_fact(AGREED_FACT, b"%d" % self._swept)
            self._noted = self._swept
        self._swept = revision

    async def _let_go(self, row: FileRow) -> bool:
        async with self._open_files.alone(row.ino):  # nobody begins to write it meanwhile
            file = self._open_files.get(row.ino)
            if file is not None and (file.is_held or file.pins or file.vid != row.vid):
                return False
            if self._database.file(row.ino) != row or not await self._without_content([row]):
                return False
            if file is not None:
                self._open_files.drop(file)
            self._reclaimer.when_durable(lambda: self._database.remove_row(row))
        log.info("file_let_go inode=%d segment=%s: removed or rewritten on another node", row.ino, row.segment.hex())
        # Else it goes when no version names it any more: until then a file may fall back to it.
        if await self._versions.version(row.vid) is None and not await self._is_wanted(row.segment):
            self._reclaimer.segment(row.segment, at_once=False)
        return True

    async def sweep_segments(self) -> int:
        """Returns how many segments go."""
        there = await trio.to_thread.run_sync(self._segments.listing)
        try:
            unwanted = [segment for segment in await self._unnamed(there) if not await self._is_wanted(segment)]
        except CacheError as error:
            log.warning("segment_sweep_put_off error=%s", error)
            return 0
        gone = [segment for segment in unwanted if self._is_younger_than_database(segment)]
        kept, self.kept_count = self.kept_count, len(unwanted) - len(gone)
        if self.kept_count != kept:
            log.warning("segments_kept count=%d: older than mount.db, and the catalog doesn't know them", self.kept_count)
        self._remove(gone)
        await self._note_left()
        await self._end_left_open()
        return len(gone)

    async def _unnamed(self, listing: bytes) -> list[SegmentId]:
        """Those that no version names, or most of them: the rest is found by the next sweeps. A damaged record ends it, for
        nobody knows what that one names."""
        named = IdFilter(len(listing) // ID_SIZE)
        self._without_row.clear()
        self._unheld.clear()
        async with aclosing(self._versions.walk_local_versions(self._store, tuple(VersionState))) as versions:
            number = 0
            async for vid, version in versions:
                named.add(version.segment)
                if version.state is VersionState.LOCAL and self._database.file(version.ino) is None:
                    self._without_row[version.ino] = vid
                if version.state is VersionState.OPEN:
                    file = self._open_files.get(version.ino)
                    if file is None or file.vid != vid:
                        self._unheld.add(version.ino)
                if (number := number + 1) % PAGE_COUNT == 0:
                    await trio.lowlevel.checkpoint()
        unnamed = []
        for at in range(0, len(listing), ID_SIZE):
            if at % (ID_SIZE * PAGE_COUNT) == 0:
                await trio.lowlevel.checkpoint()
            segment = SegmentId(listing[at : at + ID_SIZE])
            if segment not in named:
                unnamed.append(segment)
        return unnamed

    async def _note_left(self) -> None:
        """Versions that only this store has, and that their files show without a row here. So it is with what was replaced by a
        file of another node's, until that loses what it never synced to a power cut: then the older one is shown again, and is
        to be protected."""
        if not self._without_row:
            return
        # Also under the number of the file that was replaced; but what waits until programs here have closed that doesn't count.
        with_row = {row.vid for row in self._database.files() if row.state is not FileState.ORPHAN}
        for ino, vid in self._without_row.items():
            if vid in with_row:
                continue
            async with self._open_files.alone(ino):
                with contextlib.suppress(NoSuchName, DamagedData):
                    inode, version = await self._namespace.inode(ino), await self._versions.version(vid)
                    if inode.cur != vid or inode.open is not None or version is None or version.state is not VersionState.LOCAL:
                        continue
                    if self._open_files.get(ino) is None and self._database.file(ino) is None:
                        now, segment = self._namespace.now_ns(), version.segment
                        self._database.put_file(FileRow(ino, vid, segment, FileState.LOCAL, version.size, now, None, b""))
                        log.info("file_shown_again inode=%d vid=%s", ino, vid.hex())

    async def _end_left_open(self) -> None:
        """What can't be ended now is found by the next walk."""
        for ino in sorted(self._unheld):
            try:
                await self._end_unheld(ino)
            except NoSuchName:
                continue
            except (CacheError, OSError) as error:
                log.warning("open_version_left inode=%d error=%s", ino, error)

    def _is_younger_than_database(self, segment: SegmentId) -> bool:
        made_ns = int(self._database.fact(MADE_FACT) or 0)
        with contextlib.suppress(FileNotFoundError):
            changed_ns = os.stat(self._segments.path_of(segment)).st_ctime_ns  # a copied store has new times, but old names
            return changed_ns > made_ns and (segment_made_at(segment) + SEGMENT_WINDOW_SECONDS) * 10**9 > made_ns
        return False

    def _remove(self, gone: Iterable[SegmentId]) -> None:
        for segment in gone:
            log.info("segment_unreferenced segment=%s", segment.hex())
            self._reclaimer.segment(segment, at_once=False)

    async def _is_wanted(self, segment: SegmentId) -> bool:
        await trio.lowlevel.checkpoint()
        if self._open_files.is_needed(segment):
            return True
        if self._reclaimer.is_still_read(segment):
            return True
        try:
            descriptor = self._segments.open_read(segment)
        except FileNotFoundError:
            return True  # gone already
        try:
            ino = self._segments.inode_of(descriptor)
        except DamagedData:
            return True  # not ours to judge
        finally:
            os.close(descriptor)
        try:
            inode = await self._namespace.inode(ino)
        except NoSuchName:
            return False
        for vid in (inode.open, inode.cur, inode.prot, inode.prev, inode.prev_local):
            version = None if vid is None else await self._versions.version(vid)
            if version is not None and version.segment == segment:
                return True
        return False


def _is_dead(entry: Entry) -> bool:
    """A damaged record says nothing."""
    try:
        return unpack(Version, entry.value).state is VersionState.DEAD
    except DamagedData:
        return False


def _next(started: float, seconds_min: float) -> float:
    now = trio.current_time()
    return now + max(seconds_min, PAUSE_FACTOR * (now - started))
