"""What a name may show to a reader, after what its programs were told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

PAGE = 4096


class Shows:
    """What a name may show: `exactly` some bytes, or nothing at all; else what `allows` says. `over`: what the same file had
    before programs stored `content` over it."""

    def __init__(
        self, content: bytes | None, allows: Callable[[bytes | None], bool] | None = None, over: Sequence[bytes] = ()
    ) -> None:
        self.content = content
        self.over = tuple(over)
        self._allows = allows

    def allows(self, found: bytes | None) -> bool:
        return self._allows(found) if self._allows is not None else found == self.content

    def __repr__(self) -> str:
        what = "nothing" if self.content is None else f"{len(self.content)} bytes {self.content[:4].hex()}"
        return what if self._allows is None else f"part of {what}"


def part_of(content: bytes, over: Sequence[bytes] = ()) -> Shows:
    """Some of it from the beginning, with zeros where a power cut took pages, and pages of what it was stored `over`: what a
    program that died may leave. Never anything else."""
    return Shows(content, lambda found: found is None or _is_part(found, (content, *over)), over)


def grown(before: bytes, content: bytes, over: Sequence[bytes] = ()) -> Shows:
    """An append that a power cut or an error came into."""

    def allows(found: bytes | None) -> bool:
        return found is not None and found[: len(before)] == before and _is_part(found, (content,))

    return Shows(content, allows, over)


def _is_part(found: bytes, contents: Sequence[bytes]) -> bool:
    """Whether each page is that of one of the contents, which may end earlier inside it, and nothing is longer than the first."""
    return len(found) <= len(contents[0]) and all(
        any(one[at : at + PAGE].startswith(found[at : at + PAGE].rstrip(b"\0")) for one in contents)
        for at in range(0, len(found), PAGE)
    )


@dataclass
class Saved:
    """One state of a name, as its program was told. `home` has its bytes, None if it may be any machine; `is_safe`: it survives a
    power cut there; `is_protected`: also the loss of that machine. `or_else`: what else it may have shown when the next one came,
    and so may show again after it."""

    shows: Shows
    home: int | None = None
    is_safe: bool = False
    is_protected: bool = False
    or_else: tuple[Shows, ...] = ()


@dataclass
class Known:
    """What a name may show now: the last of `history`, and what is `undecided`. Older states count after a power cut, and while
    the store is lost that alone had the newest (`lost_with` its machine, `is_touched` when somebody changed the name since)."""

    history: list[Saved] = field(default_factory=lambda: [Saved(Shows(None), None, True, True)])
    undecided: list[Shows] = field(default_factory=list)
    changes: int = 0
    is_changing: bool = False
    lost_with: int | None = None
    is_touched: bool = False
    lock: trio.Lock = field(default_factory=trio.Lock)

    @property
    def newest(self) -> Saved:
        return self.history[-1]

    def settled(self, saved: Saved) -> None:
        """The name shows this now, and nothing else."""
        self.newest.or_else += tuple(one for one in self.undecided if one.content != saved.shows.content)
        self.history.append(saved)
        if saved.is_protected:
            del self.history[:-1]
        self.undecided.clear()
        self.changes += 1
        self.lost_with = None

    def doubted(self, *shows: Shows) -> None:
        """It may show these now, or what it showed before."""
        self.undecided += shows
        self.changes += 1
        self.is_touched = True

    def now_safe(self, *, protected: bool) -> None:
        self.newest.is_safe = True
        self.newest.is_protected = protected
        if protected:
            del self.history[:-1]

    def power_was_cut(self, machine: int) -> None:
        """What its home had not synced may be gone."""
        count = len(self.history)
        while len(self.history) > 1 and self.newest.home in (machine, None) and not self.newest.is_safe:
            lost = self.history.pop()
            self.undecided += [lost.shows, *lost.or_else, *([] if lost.shows.content is None else [part_of(lost.shows.content)])]
        if len(self.history) < count:
            self.undecided += self.down_to_safe()
        self.changes += 1

    def down_to_safe(self) -> list[Shows]:
        """What it may show if the newest is lost, or what replaces it. One that had not become local when it was replaced is
        freed at once (R1)."""
        found: list[Shows] = []
        for older in reversed(self.history):
            found += [older.shows, *older.or_else]
            if older.is_safe:
                break
        return found

    def may_fall_back_to(self, earlier: Sequence[Saved]) -> None:
        """What the file had `earlier` that was renamed to this name: it may show that again, or what it replaced here."""
        if len(self.history) > 1:
            self.history[-2].or_else += tuple(shows for saved in earlier for shows in (saved.shows, *saved.or_else))

    def store_lost(self, machine: int) -> None:
        """What only that machine had is gone for the others, who see what they have of what was there before, or an error."""
        if (self.newest.home in (machine, None) and not self.newest.is_protected) or self.undecided:
            self.lost_with, self.is_touched = machine, False
            self.changes += 1

    def store_returned(self, machine: int) -> None:
        """What nobody has touched since is there again."""
        if self.lost_with == machine and not self.is_touched:
            self.lost_with = None
        self.changes += 1

    @property
    def may_be_lost(self) -> bool:
        """Whether nobody but the lost store ever had any of it."""
        return self.lost_with is not None and not any(
            saved.is_protected and saved.shows.content is not None for saved in self.history
        )

    def allows(self, found: bytes | None) -> bool:
        possible = [self.newest] if self.lost_with is None else self.history
        older = [one for saved in possible[:-1] for one in saved.or_else]
        return any(shows.allows(found) for shows in (*(saved.shows for saved in possible), *older, *self.undecided))

    def __str__(self) -> str:
        return f"{self.newest.shows}, or {self.undecided}"
