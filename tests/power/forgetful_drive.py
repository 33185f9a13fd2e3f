"""A drive that forgets: what was written to it, as `recorder.c` recorded it, and what is left of that after a power cut.

What survives for sure is what was synced; the rest may or may not have got to the drive. Faults, each by chance:

- **bytes**: every page of 4096 bytes has what it had at some moment since the file was last synced, each page at a moment of its
  own. Some pages are torn: sectors of 512 bytes of two such moments.
- **sizes**: that of some moment since the last sync. A page inside whose bytes never got there is zeros.
- **attributes**: as of some moment since the last `fsync`; `fdatasync` doesn't take them along.
- **names**: making, renaming and removing them is done or not done for each alone, as long as the order of changes to each
  name is kept. They are safe when their directory was synced; a sync of the file does nothing for its name, a directory's sync
  nothing for its own name. That is less than ext4, xfs and btrfs promise. With `journal` the drive is as those are: changes of
  names are kept in their order, and every sync makes all of them safe that were made before.

Never: bytes of another file, bytes that a file had before it was cut to nothing and has not again, a rename half done, or loss of
what was synced. Must survive whatever the chances: everything that was promised.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

PAGE = 4096
SECTOR = 512
FATES = ("drop", "keep", "chance", "chance", "chance")
"""Of everything unsynced of one power cut."""


class Event(NamedTuple):
    """One line of the record; `data` are the bytes of a write."""

    word: str
    fields: tuple[str, ...]
    data: bytes = b""


def events(record: Path) -> Iterator[Event]:
    """Every event of a record, in order; a line that the recorder did not finish is left out."""
    content = record.read_bytes()
    at = 0
    while (end := content.find(b"\n", at)) >= 0:
        word, *fields = content[at:end].decode().split("\t")
        at = end + 1
        data = b""
        if word == "write":
            length = int(fields[2])
            data = content[at : at + length]
            at += length + 1
        yield Event(word, tuple(fields), data)


class _Moment(NamedTuple):
    """A page's bytes after one event; `cut`: the event made the file end before or inside it."""

    event: int
    content: bytes
    cut: bool = False


@dataclass
class _File:
    """The first of each list is what is safe, the others came since."""

    sizes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])
    pages: dict[int, list[_Moment]] = field(default_factory=dict)
    attributes: list[dict[str, bytes]] = field(default_factory=lambda: [{}])

    def write(self, event: int, offset: int, data: bytes) -> None:
        size = self.sizes[-1][1]
        for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
            begin = page * PAGE
            before = self.pages.setdefault(page, [_Moment(0, b"")])[-1].content
            first, last = max(offset - begin, 0), min(offset + len(data) - begin, PAGE)
            part = data[begin + first - offset : begin + last - offset]
            self.pages[page].append(_Moment(event, before[:first].ljust(first, b"\0") + part + before[last:]))
        if offset + len(data) > size:
            self.sizes.append((event, offset + len(data)))

    def resize(self, event: int, size: int) -> None:
        if size < self.sizes[-1][1]:
            for page, moments in self.pages.items():
                if (page + 1) * PAGE > size:
                    moments.append(_Moment(event, moments[-1].content[: max(0, size - page * PAGE)], True))
        self.sizes.append((event, size))

    def set_attribute(self, name: str, value: bytes | None) -> None:
        changed = dict(self.attributes[-1])
        changed.pop(name, None)
        if value is not None:
            changed[name] = value
        self.attributes.append(changed)

    def sync(self, *, attributes: bool) -> None:
        self.sizes = self.sizes[-1:]
        self.pages = {page: [moments[-1]] for page, moments in self.pages.items()}
        if attributes:
            self.attributes = self.attributes[-1:]

    def survivor(self, chance: Random, fate: str) -> tuple[bytes, dict[str, bytes]]:
        """Content and attributes after the power cut."""
        at = {"drop": 0, "keep": len(self.sizes) - 1}.get(fate)
        event, size = self.sizes[chance.randrange(len(self.sizes)) if at is None else at]
        content = bytearray(size)
        for page, moments in self.pages.items():
            if page * PAGE >= size:
                continue
            # Pages that were cut off have nothing that they had before, nor anything new before the cut is there.
            before = [number for number, moment in enumerate(moments) if moment.cut and moment.event <= event]
            after = [number for number, moment in enumerate(moments) if moment.cut and moment.event > event]
            possible = moments[before[-1] if before else 0 : after[0] if after else len(moments)]
            if fate == "drop":
                kept = possible[0].content
            elif fate == "keep":
                kept = possible[-1].content
            else:
                kept = chance.choice(possible).content
                if len(possible) > 1 and chance.random() < 0.2:
                    torn = SECTOR * chance.randrange(1, PAGE // SECTOR)
                    other = chance.choice(possible).content
                    kept = kept[:torn].ljust(torn, b"\0") + other[torn:]
            content[page * PAGE : page * PAGE + len(kept)] = kept
        del content[size:]
        kept_attributes = {"drop": self.attributes[0], "keep": self.attributes[-1]}.get(fate) or chance.choice(self.attributes)
        return bytes(content), kept_attributes


Name = tuple[int, str]
"""The directory's object, and the name."""


class _NameChange(NamedTuple):
    """`names` are those it touches: the last one leads to `object` from then on (None: to nothing), the others to nothing."""

    names: tuple[Name, ...]
    object: int | None

    def apply(self, entries: dict[Name, int]) -> None:
        for name in self.names:
            entries.pop(name, None)
        if self.object is not None:
            entries[self.names[-1]] = self.object


class ForgetfulDrive:
    """`apply` events one after another; `cut` makes the directory that a power cut at this moment could leave."""

    def __init__(self, *, journal: bool) -> None:
        self._journal = journal
        self._event = 0
        self._files: dict[int, _File] = {}
        self._directories = {0}
        self._safe: dict[Name, int] = {}
        self._now: dict[Name, int] = {}
        self._changes: list[_NameChange] = []

    def apply(self, event: Event) -> None:
        self._event += 1
        word, fields = event.word, event.fields
        if word in ("file", "dir"):
            made = int(fields[0])
            if word == "dir":
                self._directories.add(made)
            else:
                self._files[made] = _File()
            self._change((_name(fields[1], fields[2]),), made)
        elif word == "link":
            self._change((_name(fields[1], fields[2]),), int(fields[0]))
        elif word == "unlink":
            self._change((_name(fields[0], fields[1]),), None)
        elif word == "rename":
            old, new = _name(fields[0], fields[1]), _name(fields[2], fields[3])
            self._change((old, new), self._now[old])
        elif word == "write":
            self._files[int(fields[0])].write(self._event, int(fields[1]), event.data)
        elif word == "size":
            self._files[int(fields[0])].resize(self._event, int(fields[1]))
        elif word == "attr":
            value = None if fields[2] == "-" else bytes.fromhex(fields[2])
            if int(fields[0]) in self._files:
                self._files[int(fields[0])].set_attribute(bytes.fromhex(fields[1]).decode(), value)
        elif word in ("sync", "datasync"):
            self._sync(int(fields[0]), attributes=word == "sync")

    def _change(self, names: tuple[Name, ...], made: int | None) -> None:
        change = _NameChange(names, made)
        change.apply(self._now)
        self._changes.append(change)

    def _sync(self, synced: int, *, attributes: bool) -> None:
        if synced in self._files:
            self._files[synced].sync(attributes=attributes)
        if self._journal:
            self._safe = dict(self._now)
            self._changes = []
        elif synced in self._directories:
            safe: list[_NameChange] = []
            needed: set[Name] = set()
            for change in reversed(self._changes):
                if any(directory == synced for directory, _ in change.names) or not needed.isdisjoint(change.names):
                    safe.append(change)
                    needed.update(change.names)
            for change in reversed(safe):
                change.apply(self._safe)
            self._changes = [change for change in self._changes if not any(change is other for other in safe)]

    def cut(self, chance: Random, target: Path) -> None:
        """Make the directory, which must not exist, as it is found when the power is back."""
        fate = chance.choice(FATES)
        entries = dict(self._safe)
        lost: set[Name] = set()
        kept_count = {"drop": 0, "keep": len(self._changes)}.get(fate, chance.randint(0, len(self._changes)))
        for number, change in enumerate(self._changes):
            kept = number < kept_count if self._journal or fate != "chance" else chance.random() < 0.5
            if kept and lost.isdisjoint(change.names):
                change.apply(entries)
            else:
                lost.update(change.names)
        inside: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), leads_to in sorted(entries.items()):
            inside.setdefault(directory, []).append((name, leads_to))
        self._make(chance, fate, inside, 0, target, {})

    def _make(
        self, chance: Random, fate: str, inside: dict[int, list[tuple[str, int]]], made: int, path: Path, linked: dict[int, Path]
    ) -> None:
        if made in self._directories:
            path.mkdir(0o700)
            for name, leads_to in inside.get(made, []):
                self._make(chance, fate, inside, leads_to, path / name, linked)
        elif made in linked:
            os.link(linked[made], path)
        else:
            content, attributes = self._files[made].survivor(chance, fate)
            path.write_bytes(content)
            path.chmod(0o600)
            for name, value in attributes.items():
                os.setxattr(path, name, value)
            linked[made] = path


def _name(directory: str, name: str) -> Name:
    return int(directory), bytes.fromhex(name).decode()
