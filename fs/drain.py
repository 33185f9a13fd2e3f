"""A node that is to go protects what only it has: the newest complete checkpoints first, then what else is newest.

What is closed is sealed at once. It ends when nothing waits any more, or at its deadline; the report says what made it and what
did not. Files that programs still write to can't make it as a whole, and are counted.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import trio

from ckptfs.cache.catalog_format import DirectoryEntry, Inode, entry_of_key, entry_prefix, inode_key, unpack
from ckptfs.cache.catalog_kv import COMPARES_MAX, KeyValue
from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import ROOT_INODE, InodeNumber
from ckptfs.cache.inode_paths import paths_of
from ckptfs.cache.mount_db import WaitingVersion
from ckptfs.fs.checkpoints import Checkpoint, CheckpointFile, find_checkpoints
from ckptfs.replication.replicator import LocalVersions, Replicator

log = logging.getLogger(__name__)

LISTED_MAX = 20_000
NEIGHBOURS_MAX = 10_000
POLL_SECONDS = 0.1
SHOWN_MAX = 100


class NotClosed(NamedTuple):
    """What the mount has that is not local: files that are closed and on their way, and files being written."""

    settling: int
    open: int


class _Piece(NamedTuple):
    """Files that are protected together: a checkpoint's, or one by itself."""

    path: str
    why_incomplete: str
    waiting: tuple[WaitingVersion, ...]

    @property
    def newest_ns(self) -> int:
        return max(one.exposed_ns for one in self.waiting)


class Drain:
    """`protect` may be called again and again. `settle` has the mount seal what is closed; `not_closed` asks it what is left,
    None where it doesn't answer."""

    def __init__(
        self,
        kv: KeyValue,
        replicator: Replicator,
        local_versions: LocalVersions,
        settle: Callable[[], Awaitable[None]],
        not_closed: Callable[[], Awaitable[NotClosed | None]],
        is_possible: Callable[[], bool],
    ) -> None:
        """`is_possible`: whether there is anywhere to protect to; where not, nobody is kept waiting."""
        self._is_possible = is_possible
        self._kv = kv
        self._replicator = replicator
        self._local_versions = local_versions
        self._settle = settle
        self._not_closed = not_closed

    async def protect(self, deadline_seconds: float) -> dict[str, Any]:
        """`checkpoints`: those that had something to protect, in their order: `path`, `complete`, `files`, `bytes`, `protected`;
        `files`, `bytes` of all that became protected; `left`: what did not, `left_files`, `left_bytes` in all; `open_files`;
        `possible`: there is another node to protect to; `unknown`: why what is left is not known, empty if it is."""
        pieces: dict[str, _Piece] = {}
        left: dict[InodeNumber, WaitingVersion] = {}
        still = NotClosed(0, 0)
        unknown = "there was no time to ask"
        try:
            with trio.move_on_after(deadline_seconds):
                while True:
                    await self._settle()
                    try:
                        # In this order: what is sealed in between is in the second, and never in neither.
                        answer = await self._not_closed()
                        waiting = await trio.to_thread.run_sync(self._local_versions.waiting, LISTED_MAX)
                        left = {one.ino: one for one in waiting if not one.is_prefix}
                        still, unknown = (still, "its mount process does not answer") if answer is None else (answer, "")
                        listed = {one.ino for piece in pieces.values() for one in piece.waiting}
                        if not left.keys() <= listed:
                            pieces = _merged(pieces, await self._pieces(list(left.values())))
                            self._replicator.prefer([one.ino for piece in _ordered(pieces.values()) for one in piece.waiting])
                    except CacheError as error:
                        log.warning("drain_held_up error=%s", error)
                        unknown = str(error)
                    self._replicator.wake(urgent=True)
                    is_done = not left or not self._is_possible()
                    if is_done and not still.settling and not unknown:
                        break
                    await trio.sleep(POLL_SECONDS)
        finally:
            self._replicator.prefer([])
        return self._report(_ordered(pieces.values()), left, still, unknown)

    def _report(
        self, pieces: Sequence[_Piece], left: dict[InodeNumber, WaitingVersion], still: NotClosed, unknown: str
    ) -> dict[str, Any]:
        everything = [one for piece in pieces for one in piece.waiting]
        done = [one for one in everything if one.ino not in left]
        named = {one.ino: piece.path for piece in pieces for one in piece.waiting}
        report = {
            "checkpoints": [
                {
                    "path": piece.path,
                    "complete": not piece.why_incomplete,
                    "why": piece.why_incomplete,
                    "files": len(piece.waiting),
                    "bytes": sum(one.size for one in piece.waiting),
                    "protected": all(one.ino not in left for one in piece.waiting),
                }
                for piece in pieces[:SHOWN_MAX]
            ],
            "files": len(done),
            "bytes": sum(one.size for one in done),
            "left": [
                {"path": named.get(one.ino) or one.path_hint.decode(errors="replace"), "bytes": one.size} for one in left.values()
            ][:SHOWN_MAX],
            "left_files": len(left) + still.settling,
            "left_bytes": sum(one.size for one in left.values()),
            "open_files": still.open,
            "possible": self._is_possible(),
            "unknown": unknown,
        }
        log.warning(
            "drained files=%d bytes=%d left_files=%d left_bytes=%d open_files=%d unknown=%r",
            report["files"], report["bytes"], report["left_files"], report["left_bytes"], report["open_files"], unknown,
        )  # fmt: skip
        return report

    # ---- what belongs together

    async def _pieces(self, waiting: Sequence[WaitingVersion]) -> dict[str, _Piece]:
        paths = await paths_of(self._kv, [one.ino for one in waiting])
        by_ino = {one.ino: one for one in waiting}
        neighbours = await self._neighbours(paths)
        checkpoints = find_checkpoints(
            "/",
            neighbours,
            mtime_ns=lambda file: by_ino[InodeNumber(file.ino)].exposed_ns if file.ino in by_ino else 0,
            named_by=lambda file: set(),
        )
        pieces: dict[str, _Piece] = {}
        opened = await self._being_written([file for checkpoint in checkpoints for file in checkpoint.files])
        for checkpoint in checkpoints:
            inside = tuple(by_ino[InodeNumber(file.ino)] for file in checkpoint.files if file.ino in by_ino)
            if inside:
                pieces[checkpoint.path] = _Piece(checkpoint.path, _why_incomplete(checkpoint, opened), inside)
        grouped = {one.ino for piece in pieces.values() for one in piece.waiting}
        for one in waiting:
            if one.ino not in grouped:
                name = f"/{paths.get(one.ino, one.path_hint).decode(errors='replace')}"
                pieces[name] = _Piece(name, "", (one,)) if name not in pieces else pieces[name]
        return pieces

    async def _neighbours(self, paths: dict[InodeNumber, bytes]) -> list[tuple[int, str, int]]:
        """The files, and all others in their directories, by which a checkpoint is known to be complete."""
        directories: dict[InodeNumber, bytes] = {}
        found: dict[int, str] = {ino: f"/{path.decode(errors='surrogateescape')}" for ino, path in paths.items()}
        for path in {path.rpartition(b"/")[0] for path in paths.values()}:
            directory = await self._directory(path)
            if directory is not None:
                directories[directory] = path
        for directory, path in directories.items():
            for entry in await self._kv.range(entry_prefix(directory), limit=NEIGHBOURS_MAX):
                name = entry_of_key(entry.key)[1]
                ino = _entry_ino(entry.value)
                found.setdefault(ino, f"/{(path + b'/' + name if path else name).decode(errors='surrogateescape')}")
        return [(ino, path, 0) for ino, path in found.items()]

    async def _directory(self, path: bytes) -> InodeNumber | None:
        at = InodeNumber(ROOT_INODE)
        for name in filter(None, path.split(b"/")):
            entry = await self._kv.get(entry_prefix(at) + name)
            if entry is None:
                return None
            at = _entry_ino(entry.value)
        return at

    async def _being_written(self, files: Sequence[CheckpointFile]) -> dict[int, str]:
        opened = {}
        for start in range(0, len(files), COMPARES_MAX):
            part = files[start : start + COMPARES_MAX]
            entries = await self._kv.get_many([inode_key(InodeNumber(file.ino)) for file in part])
            for file, entry in zip(part, entries, strict=True):
                if entry is not None:
                    inode = unpack(Inode, entry.value)
                    if inode.writer is not None and inode.open is not None:
                        opened[file.ino] = file.path
        return opened


def _entry_ino(value: bytes) -> InodeNumber:
    return unpack(DirectoryEntry, value).ino


def _why_incomplete(checkpoint: Checkpoint, opened: dict[int, str]) -> str:
    written = [opened[file.ino] for file in checkpoint.files if file.ino in opened]
    return checkpoint.problem or (f"{written[0]} is being written" if written else "")


def _merged(before: dict[str, _Piece], found: dict[str, _Piece]) -> dict[str, _Piece]:
    """What was found later, with what was protected meanwhile."""
    merged = dict(before)
    for path, piece in found.items():
        old = before.get(path)
        known = {one.ino for one in piece.waiting}
        gone = tuple(one for one in old.waiting if one.ino not in known) if old is not None else ()
        merged[path] = piece._replace(waiting=piece.waiting + gone)
    return merged


def _ordered(pieces: Iterable[_Piece]) -> list[_Piece]:
    return sorted(pieces, key=lambda piece: (bool(piece.why_incomplete), -piece.newest_ns))
