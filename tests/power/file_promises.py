"""What programs were promised about their files, told from the marks of `file_workload.py`: what may be there after a power cut.

A mark is said before each request, and one after its answer. The catalog takes requests in their order, so the names found
after a power cut are those of one moment: not before the last request that was to make them safe was answered, not after
the last one begun. What each file of that moment may show:

- closed, synced and hashed before (`local`): exactly its content;
- being written, and synced once: each sector as it was at some moment since its last sync, and a size of that time;
- being written, never synced: what it had before, or what the file had that it replaced; else it isn't there at all.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

SECTOR = 512

Mark = dict[str, Any]


def content(number: int, size: int) -> bytes:
    """Bytes that occur in no other content: a mixture is seen sector by sector."""
    return Random(number).randbytes(size)


@dataclass
class Writing:
    """A version that is being written: what it had at each moment since it was last synced."""

    moments: list[bytes]

    def may_be(self, found: bytes) -> bool:
        if len(found) not in {len(moment) for moment in self.moments}:
            return False
        for at in range(0, len(found), SECTOR):
            sector = found[at : at + SECTOR]
            if not any(moment[at : at + len(sector)].ljust(len(sector), b"\0") == sector for moment in self.moments):
                return False
        return True


@dataclass
class File:
    """`before`: what it shows when what is being written is lost; `own`: that was its own content, not a replaced file's."""

    before: bytes | None = None
    own: bool = False
    writing: Writing | None = None
    synced: bool = False
    writers: int = 0
    handles: int = 0
    links: int = 1

    def may_show(self, found: bytes | None) -> bool:
        """None: no name leads to it."""
        if self.writing is not None and self.synced:
            return found is not None and self.writing.may_be(found)
        return found == self.before

    def settled(self) -> None:
        if self.writing is not None and not self.writers:
            self.before, self.own, self.writing, self.synced = self.writing.moments[-1], True, None, False

    def sync(self) -> None:
        if self.writing is not None:
            self.synced = True
            self.writing = Writing(self.writing.moments[-1:])


@dataclass
class Tree:
    """Names and files at one moment; `handles` are those of programs."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, File] = field(default_factory=dict)
    handles: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def apply(self, mark: Mark) -> bool:
        """Carry out a request; whether its answer promises that all names so far are safe."""
        does = getattr(self, f"_{mark['do']}")
        return bool(does(**{key: value for key, value in mark.items() if key != "do"}))

    def _create(self, name: str, handle: int) -> None:
        ino = max(self.files, default=0) + 1
        self.names[name] = ino
        self.files[ino] = File(writing=Writing([b""]))
        self._opened(ino, handle, True)

    def _opened(self, ino: int, handle: int, writes: bool) -> None:
        self.handles[handle] = ino, writes
        self.files[ino].writers += writes
        self.files[ino].handles += 1

    def _read(self, name: str, handle: int) -> None:
        self._opened(self.names[name], handle, False)

    def _write_on(self, name: str, handle: int) -> bool:
        """open(2) without O_TRUNC."""
        ino = self.names[name]
        self._opened(ino, handle, True)
        return self._carry_on(self.files[ino])

    def _carry_on(self, file: File) -> bool:
        if file.writing is not None:
            return False
        assert file.before is not None
        file.writing, file.synced, file.before, file.own = Writing([file.before]), True, None, False
        return True

    def _write_anew(self, name: str, handle: int) -> bool:
        """open(2) with O_TRUNC."""
        ino = self.names[name]
        file = self.files[ino]
        safe = False
        if file.writing is not None or file.handles:
            safe = self._carry_on(file)
            assert file.writing is not None
            file.writing.moments.append(b"")
        else:
            file.writing, file.synced = Writing([b""]), False
        self._opened(ino, handle, True)
        return safe

    def _write(self, handle: int, offset: int, number: int, size: int) -> None:
        file = self.files[self.handles[handle][0]]
        if file.writing is not None:
            before = file.writing.moments[-1].ljust(offset, b"\0")
            file.writing.moments.append(before[:offset] + content(number, size) + before[offset + size :])

    def _truncate(self, handle: int, size: int) -> None:
        file = self.files[self.handles[handle][0]]
        if file.writing is not None:
            file.writing.moments.append(file.writing.moments[-1][:size].ljust(size, b"\0"))

    def _fsync(self, handle: int) -> bool:
        file = self.files[self.handles[handle][0]]
        file.sync()
        return file.links > 0

    def _fsyncdir(self) -> bool:
        return True

    def _close(self, handle: int) -> None:
        ino, writes = self.handles.pop(handle)
        self.files[ino].writers -= writes
        self.files[ino].handles -= 1

    def _link(self, name: str, new: str) -> None:
        self.names[new] = self.names[name]
        self.files[self.names[name]].links += 1

    def _unlink(self, name: str) -> None:
        self.files[self.names.pop(name)].links -= 1

    def before_rename(self, name: str, new: str) -> None:
        """What was synced gives way to nothing less."""
        file, replaced = self.files[self.names[name]], self.files.get(self.names.get(new, 0))
        if replaced is None or replaced is file or replaced.links > 1:
            return
        if replaced.writing is not None and replaced.synced and file.writing is not None and not file.synced:
            file.sync()

    def _rename(self, name: str, new: str) -> None:
        self.before_rename(name, new)
        ino = self.names[name]
        if new in self.names and self.names[new] != ino:
            file, replaced = self.files[ino], self.files[self.names[new]]
            if replaced.links == 1 and not file.own and replaced.before is not None:
                file.before = replaced.before
            replaced.links -= 1
        elif new in self.names:
            return  # two names of one file: rename(2) does nothing
        self.names[new] = self.names.pop(name)

    def _settle(self) -> None:
        for file in self.files.values():
            if file.links:
                file.settled()

    def _checkpoint(self) -> None: ...

    def _sweep(self) -> None: ...

    def _restart(self) -> None: ...

    def _reboot(self) -> None:
        """Another boot: what isn't synced is dropped, and no program has anything open."""
        self.handles = {}
        for name, ino in list(self.names.items()):
            file = self.files[ino]
            file.writers = file.handles = 0
            if file.writing is not None and not file.synced:
                file.writing = None
                file.own = file.before is not None
            if file.writing is None and file.before is None:
                del self.names[name]


class Promises:
    """What was promised up to a moment: told the marks up to it."""

    def __init__(self) -> None:
        self._trees = [Tree()]
        self._safe = 0
        self._promise = False

    def begun(self, mark: Mark) -> None:
        if mark["do"] == "rename":  # what it syncs first is synced for itself
            tree = copy.deepcopy(self._trees[-1])
            tree.before_rename(mark["name"], mark["new"])
            self._trees.append(tree)
        tree = copy.deepcopy(self._trees[-1])
        self._promise = tree.apply(mark)
        self._trees.append(tree)

    def answered(self) -> None:
        if self._promise:
            self._safe = len(self._trees) - 1

    def broken_by(self, found: dict[str, bytes]) -> str:
        """Why the names and contents that were found are none of those that may be there; "" if they may."""
        reasons = []
        for number in range(self._safe, len(self._trees)):
            reason = self._differs(number, found)
            if not reason:
                return ""
            reasons.append(f"moment {number}: {reason}")
        return "; ".join(reasons[-6:])

    def _differs(self, number: int, found: dict[str, bytes]) -> str:
        tree = self._trees[number]
        for name in sorted({*tree.names, *found}):
            shown = found.get(name)
            if name not in tree.names:
                return f"{name} is there"
            if not self._may_show(number, tree.names[name], shown):
                return f"{name} is {'gone' if shown is None else f'not what it may be ({len(shown)} bytes)'}"
        return ""

    def _may_show(self, number: int, ino: int, shown: bytes | None) -> bool:
        """The names are those of one moment, the bytes of what is being written those of any moment from then on."""
        file = self._trees[number].files[ino]
        if file.writing is None or not file.synced:
            return file.may_show(shown)
        moments = list(file.writing.moments)
        for later in self._trees[number + 1 :]:
            other = later.files[ino]
            if other.writing is None:
                break
            moments += other.writing.moments
        return shown is not None and Writing(moments).may_be(shown)


def promises_of(marks: Iterable[tuple[bool, Mark]]) -> Promises:
    """Those after marks of (begun or answered, request)."""
    promises = Promises()
    for is_begin, mark in marks:
        if is_begin:
            promises.begun(mark)
        else:
            promises.answered()
    return promises
