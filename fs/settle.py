"""From the last close to `local`: a file settles, is sealed, and its version is committed.

A file waits `settle_seconds` after its last close, because checkpoint writers open again what they just closed; then it is sealed
if nothing can write to it any more. A writable mapping that outlives close keeps it `open`; it is tried again, ever
less often. A seal that fails for the disk is loud and final for the segment: no later sync may claim success.
"""

import heapq
import logging
import math
from collections.abc import Awaitable, Callable

import trio

from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber
from ckptfs.cache.mount_db import FileState, MountDatabase
from ckptfs.cache.seal import SealCandidate, Sealed, Sealer, SealFailed
from ckptfs.cache.versions import LocalCommit, Versions
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.fs.reclaim import Reclaimer

log = logging.getLogger(__name__)

BATCH_COUNT = 256
GIVE_WAY_SECONDS = 0.1
GIVE_WAY_SECONDS_MAX = 4.0
"""While programs ask without a pause, sealing waits up to so long beyond its time: it shares thread and drive with them."""
RETRY_SECONDS_MIN = 0.5
RETRY_SECONDS_MAX = 60.0


class Settler:
    """Seals closed files, oldest close first, one batch at a time. `on_local(urgent)` hears when files became local, and whether
    somebody waits for them."""

    def __init__(
        self,
        open_files: OpenFiles,
        database: MountDatabase,
        versions: Versions,
        sealer: Sealer,
        reclaimer: Reclaimer,
        settle_seconds: float,
        on_local: Callable[[bool], Awaitable[None]],
        is_busy: Callable[[], bool] = lambda: False,
        on_saved: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._open_files = open_files
        self._database = database
        self._versions = versions
        self._sealer = sealer
        self._reclaimer = reclaimer
        self._settle_seconds = settle_seconds
        self._on_local = on_local
        self._is_busy = is_busy
        self._on_saved = on_saved
        self._due: dict[InodeNumber, FileInUse] = {}
        self._order: list[tuple[float, InodeNumber]] = []
        self._delays: dict[InodeNumber, float] = {}
        self._hurry = False
        self._wake = trio.Event()
        self._wake_hurry = trio.Event()
        self._limiter = trio.CapacityLimiter(1)
        self._sealing_count = 0

    def closed(self, file: FileInUse) -> None:
        """Nobody has the file open for writing now; it becomes local unless somebody opens it again."""
        self._delays.pop(file.ino, None)
        self._schedule(file, self._settle_seconds)

    def hurry(self) -> None:
        """Settle everything now: somebody waits for it, or the node ends."""
        self._hurry = True
        self._wake.set()
        self._wake_hurry.set()

    @property
    def waiting_count(self) -> int:
        """Files that are closed but not yet local."""
        return len(self._due) + self._sealing_count

    def _schedule(self, file: FileInUse, delay_seconds: float) -> None:
        # Deadlines fall on common ticks: what was closed at about the same time is sealed in one batch, and shares the journal
        # commits that new files would otherwise wait for again and again.
        tick_seconds = max(delay_seconds / 4, 0.01)
        file.settle_at = math.ceil((trio.current_time() + delay_seconds) / tick_seconds) * tick_seconds
        self._due[file.ino] = file
        heapq.heappush(self._order, (file.settle_at, file.ino))
        if self._hurry or self._order[0] == (file.settle_at, file.ino):  # else it is waited for an earlier one
            self._wake.set()

    async def run(self) -> None:
        while True:
            wait_seconds = self._order[0][0] - trio.current_time() if self._order else float("inf")
            if wait_seconds > 0 and not (self._hurry and self._due):
                self._hurry = False
                self._wake = trio.Event()
                with trio.move_on_after(wait_seconds):
                    await self._wake.wait()
                continue
            if not self._hurry and -wait_seconds < GIVE_WAY_SECONDS_MAX and self._is_busy():
                with trio.move_on_after(GIVE_WAY_SECONDS):
                    self._wake_hurry = trio.Event()
                    await self._wake_hurry.wait()
                continue
            everything, self._hurry = self._hurry, False  # whoever is in a hurry from here on means what is closed by then
            await self.settle_due(everything=everything)

    async def settle_due(self, *, everything: bool) -> None:
        """Seal and commit what is due, or everything that is closed."""
        now = trio.current_time()
        due = []
        while self._order and (everything or self._order[0][0] <= now):
            settle_at, ino = heapq.heappop(self._order)
            file = self._due.get(ino)
            if file is not None and (everything or file.settle_at == settle_at):  # else it was closed again since
                due.append(self._due.pop(ino))
        self._sealing_count += len(due)
        for start in range(0, len(due), BATCH_COUNT):
            batch = due[start : start + BATCH_COUNT]
            await self._settle(batch, urgent=everything)
            self._sealing_count -= len(batch)

    async def _settle(self, files: list[FileInUse], *, urgent: bool) -> None:
        file_of: dict[bytes, FileInUse] = {}
        asked: list[SealCandidate] = []
        for file in files:
            if self._open_files.get(file.ino) is not file:
                continue  # removed meanwhile
            if file.writers or file.state is not FileState.OPEN or file.orphan is not None or file.sync_failed:
                continue
            assert file.segment is not None
            assert file.descriptor is not None
            file_of[file.vid] = file
            wanted = self._is_unmoved(file)
            asked.append(SealCandidate(file.ino, file.vid, file.segment, file.descriptor, wanted))
        if not asked:
            return
        sealing = list(file_of.values())
        for file in sealing:
            self._open_files.pin(file)
        try:
            results = await trio.to_thread.run_sync(self._sealer.seal, asked, limiter=self._limiter)
            if await self._commit(file_of, results):
                await self._on_local(urgent)
        except CacheError as error:
            log.warning("local_not_committed files=%d error=%s", len(asked), error)
        finally:
            for file in sealing:
                self._open_files.unpin(file)
                self._after(file)

    async def _commit(self, file_of: dict[bytes, FileInUse], results: list[Sealed | SealFailed]) -> bool:
        """Whether any of them is local now."""
        sealed = []
        for result in results:
            file = file_of[result.candidate.vid]
            if isinstance(result, SealFailed):
                self._open_files.sync_failed(file)
                log.error(
                    "seal_failed inode=%d segment=%s error=%s: the bytes are not safe on this node, copy the file elsewhere",
                    file.ino,
                    result.candidate.segment.hex(),
                    result.error.strerror,
                )
            else:
                sealed.append(result)
        # While the transaction is under way nobody begins to write: the root would stand for bytes that are not there any more.
        with self._open_files.alone_where_free(result.candidate.ino for result in sealed) as free:
            return await self._commit_sealed(
                file_of, [r for r in sealed if r.candidate.ino in free and r.candidate.still_wanted()]
            )

    async def _commit_sealed(self, file_of: dict[bytes, FileInUse], sealed: list[Sealed]) -> bool:
        if not sealed:
            return False
        commits = [
            LocalCommit(r.candidate.ino, r.candidate.vid, r.size, r.root, r.cell_size, r.mtime_ns, True, r.blocks) for r in sealed
        ]
        sizes = {commit.vid: commit.size for commit in commits}
        taken = {r.candidate.vid: min(r.size, r.blocks * 512) for r in sealed}  # of the drive: a hole takes nothing
        committed = await self._versions.commit_local(commits)
        try:  # before `mount.db` says so: what is local there isn't looked at after a crash
            await self._versions.kv.make_durable()
        except CacheError as error:
            log.error("local_not_durable files=%d error=%s", len(committed.vids), error)
        for vid in committed.vids:
            file = file_of[vid]
            if file.vid == vid and file.state is FileState.OPEN:
                file.state = FileState.LOCAL
            if file.replaced_segment is not None:
                self._reclaimer.segment(file.replaced_segment, at_once=False)
                file.replaced_segment = None
        self._on_saved(sum(taken[vid] for vid in committed.vids))
        self._database.set_states([(FileState.LOCAL, sizes[vid], file_of[vid].ino, vid) for vid in committed.vids])
        for _, version in committed.freed:
            self._reclaimer.segment(version.segment, at_once=False)
        return bool(committed.vids)

    def _after(self, file: FileInUse) -> None:
        """A file that became local and isn't open is let go; one that could not be sealed is tried again later."""
        if self._open_files.get(file.ino) is not file or file.orphan is not None:
            return
        if file.state is not FileState.OPEN:
            self._delays.pop(file.ino, None)
            if not file.is_held:
                self._open_files.let_go(file)
        elif not file.writers and not file.sync_failed and file.ino not in self._due:
            delay_seconds = min(2 * self._delays.get(file.ino, RETRY_SECONDS_MIN / 2), RETRY_SECONDS_MAX)
            self._delays[file.ino] = delay_seconds
            file.unsealable = True
            self._schedule(file, delay_seconds)

    def _is_unmoved(self, file: FileInUse) -> Callable[[], bool]:
        """Whether it is, from now on: neither opened for writing, nor changed, nor removed. For a thread too."""
        generation, files = file.generation, self._open_files
        return lambda: file.generation == generation and not file.writers and file.orphan is None and files.get(file.ino) is file
