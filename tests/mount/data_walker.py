"""A walker over the calls that read, write and shape files: each is made in a mount and in a plain directory beside it, and
everything a program can see of it must be the same: what it returns, its errno, the bytes, sizes and blocks.

`python data_walker.py MOUNT PLAIN SEED STEPS` makes one walk, in two empty directories. What it does is a function of the seed.
It makes no call whose difference docs/semantics.md names.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = 4096
SIZE_MAX = 64 * PAGE
SLOTS = 6
BLOCKS_DIFFER_MAX = 64
"""ext4 counts the blocks that say where a file's blocks are, knows late how many it needs, and fills small holes."""
NAMES = ("a", "b", "c")

KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO_RANGE, INSERT, UNSHARE = 1, 2, 8, 16, 32, 64
RWF_APPEND = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). Raises `OSError`."""
    if _libc.fallocate(descriptor, mode, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


Outcome = tuple[str, Any]


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """What a program sees of a call."""
    try:
        return "ok", call()
    except OSError as error:
        return "errno", errno.errorcode[error.errno or 0]


class Side:
    """The files and descriptors of one of the two places."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.slots: list[int | None] = [None] * SLOTS

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def close_all(self) -> None:
        for number, descriptor in enumerate(self.slots):
            if descriptor is not None:
                os.close(descriptor)
                self.slots[number] = None


Call = Callable[[Side], Any]
"""One call, to be made on either side; its result must not name the side."""


class Walker:
    """Makes random calls on both sides. Raises `AssertionError` with the calls so far at the first difference."""

    def __init__(self, mount: Path, plain: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.sides = (Side(mount), Side(plain))
        self.trace: list[str] = []
        self._counter = 0

    def walk(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.step()
            self.compare_files()
        finally:
            for side in self.sides:
                side.close_all()

    def step(self) -> None:
        what, call = self._choose()
        self.trace.append(what)
        mounted, plain = (outcome_of(lambda side=side: call(side)) for side in self.sides)  # type: ignore[misc]
        self._require(mounted, plain)
        self.trace[-1] += f" -> {str(plain)[:80]}"
        for number in range(SLOTS):
            if self.sides[1].slots[number] is not None:
                self._compare_slot(number)
        if self.random.random() < 0.1:
            self.compare_files()

    def _compare_slot(self, number: int) -> None:
        status, plain = (os.fstat(_of(side, number)) for side in self.sides)
        offsets = [os.lseek(_of(side, number), 0, os.SEEK_CUR) for side in self.sides]
        self._require(*(("ok", (s.st_size, s.st_nlink, at)) for s, at in zip((status, plain), offsets, strict=True)))

    def compare_files(self) -> None:
        """The names, and each file's bytes, size, blocks, and where its data is."""
        self._require(*(("ok", sorted(os.listdir(side.directory))) for side in self.sides))
        for name in sorted(os.listdir(self.sides[1].directory)):
            self._require(*(("ok", content(side.path(name))) for side in self.sides))
            blocks = [_blocks(side.path(name)) for side in self.sides]
            if abs(blocks[0] - blocks[1]) > BLOCKS_DIFFER_MAX:
                self._require(*(("blocks", count) for count in blocks))

    def _require(self, mounted: Outcome, plain: Outcome) -> None:
        if mounted != plain:
            shown = "\n  ".join(self.trace[-40:])
            raise AssertionError(f"seed {self.seed}, after {len(self.trace)} calls\n  {shown}\n{_difference(mounted, plain)}")

    # ---- choosing

    def _choose(self) -> tuple[str, Call]:
        used = [number for number in range(SLOTS) if self.sides[1].slots[number] is not None]
        if not used or (len(used) < SLOTS and self.random.random() < 0.2):
            return self._open(next(number for number in range(SLOTS) if number not in used))
        number = self.random.choice(used)
        kinds: list[tuple[int, Callable[[int], tuple[str, Call]]]] = [
            (6, self._close),
            (12, self._write),
            (12, self._pwrite),
            (4, self._pwritev2),
            (6, self._read),
            (6, self._pread),
            (6, self._seek),
            (6, self._ftruncate),
            (3, self._truncate),
            (8, self._fallocate),
            (5, self._copy),
            (3, self._sendfile),
            (4, self._splice),
            (6, self._map),
            (3, self._sync),
            (3, self._advise),
            (3, self._set_append),
            (3, self._rename),
            (2, self._unlink),
            (2, self._link),
        ]
        chosen = self.random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        return chosen(number)

    def _offset(self) -> int:
        offset = self.random.randrange(SIZE_MAX)
        return offset if self.random.random() < 0.5 else offset & -PAGE

    def _length(self) -> int:
        length = self.random.choice((0, 1, 7, 511, 512, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 17 * PAGE + 5))
        return length if self.random.random() < 0.7 else self.random.randrange(1, 9) * PAGE

    def _data(self, length: int) -> bytes:
        self._counter += 1
        if self.random.random() < 0.1:
            return bytes(length)
        return (b"%08d" % self._counter * (length // 8 + 1))[:length]

    def _open(self, number: int) -> tuple[str, Call]:
        name = self.random.choice(NAMES)
        flags = self.random.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR))
        for flag, chance in ((os.O_CREAT, 0.8), (os.O_EXCL, 0.1), (os.O_TRUNC, 0.15), (os.O_APPEND, 0.25), (os.O_DSYNC, 0.1)):
            if self.random.random() < chance:
                flags |= flag

        def call(side: Side) -> None:
            side.slots[number] = os.open(side.path(name), flags | os.O_CLOEXEC, 0o640)

        return f"slot {number} = open({name}, {flags:#o})", call

    def _close(self, number: int) -> tuple[str, Call]:
        def call(side: Side) -> None:
            descriptor, side.slots[number] = _of(side, number), None
            os.close(descriptor)

        return f"close({number})", call

    def _write(self, number: int) -> tuple[str, Call]:
        data = self._data(self._length())
        return f"write({number}, {len(data)})", lambda side: os.write(_of(side, number), data)

    def _pwrite(self, number: int) -> tuple[str, Call]:
        data, offset = self._data(self._length()), self._offset()
        return f"pwrite({number}, {len(data)}, {offset})", lambda side: os.pwrite(_of(side, number), data, offset)

    def _pwritev2(self, number: int) -> tuple[str, Call]:
        data, offset = self._data(self._length()), self._offset()
        flags = self.random.choice((0, os.RWF_DSYNC, os.RWF_SYNC, RWF_APPEND))
        return (
            f"pwritev2({number}, 2 * {len(data)}, {offset}, {flags:#x})",
            lambda side: os.pwritev(_of(side, number), [data, data], offset, flags),
        )

    def _read(self, number: int) -> tuple[str, Call]:
        length = self._length()
        return f"read({number}, {length})", lambda side: os.read(_of(side, number), length)

    def _pread(self, number: int) -> tuple[str, Call]:
        length, offset = self._length(), self._offset()
        return f"pread({number}, {length}, {offset})", lambda side: os.pread(_of(side, number), length, offset)

    def _seek(self, number: int) -> tuple[str, Call]:
        whence = self.random.choice((os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE, 9))
        offset = self._offset() * self.random.choice((1, 1, 1, -1))

        def call(side: Side) -> int:
            descriptor = _of(side, number)
            if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
                return os.lseek(descriptor, offset, whence)
            found = next_byte(descriptor, offset, whence)
            os.lseek(descriptor, found, os.SEEK_SET)
            return found

        return f"lseek({number}, {offset}, {whence})", call

    def _ftruncate(self, number: int) -> tuple[str, Call]:
        size = self._offset()
        return f"ftruncate({number}, {size})", lambda side: os.ftruncate(_of(side, number), size)

    def _truncate(self, number: int) -> tuple[str, Call]:
        name, size = self.random.choice(NAMES), self.random.choice((0, self._offset()))
        return f"truncate({name}, {size})", lambda side: os.truncate(side.path(name), size)

    def _fallocate(self, number: int) -> tuple[str, Call]:
        mode = self.random.choice((0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE, 0x4000))
        offset, length = self._offset(), self._length()
        return f"fallocate({number}, {mode:#x}, {offset}, {length})", lambda side: fallocate(
            _of(side, number), mode, offset, length
        )

    def _copy(self, number: int) -> tuple[str, Call]:
        other = self.random.choice([slot for slot in range(SLOTS) if self.sides[1].slots[slot] is not None])
        count = self._length()
        offsets = (self._offset(), self._offset()) if self.random.random() < 0.6 else (None, None)
        return (
            f"copy_file_range({other}, {number}, {count}, {offsets})",
            lambda side: os.copy_file_range(_of(side, other), _of(side, number), count, *offsets),
        )

    def _sendfile(self, number: int) -> tuple[str, Call]:
        """From another file: within one, bytes may be sent on that were sent just before, or not, where both ranges overlap."""
        plain = self.sides[1]
        opened = [slot for slot in range(SLOTS) if plain.slots[slot] is not None]
        others = [slot for slot in opened if not os.path.sameopenfile(_of(plain, slot), _of(plain, number))]
        if not others:
            return self._sync(number)
        other = self.random.choice(others)
        count, offset = self._length(), self.random.choice((None, self._offset()))
        return (
            f"sendfile({number}, {other}, {offset}, {count})",
            lambda side: os.sendfile(_of(side, number), _of(side, other), offset, count),
        )

    def _splice(self, number: int) -> tuple[str, Call]:
        data, offset = self._data(self._length()), self.random.choice((None, self._offset()))

        def call(side: Side) -> tuple[int, bytes]:
            with _pipe() as (reader, writer):
                os.write(writer, data[:60000])
                count = os.splice(reader, _of(side, number), len(data), offset_dst=offset) if data else 0
            with _pipe() as (reader, writer):
                fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
                moved = os.splice(_of(side, number), writer, PAGE, offset_src=offset)
                return count, os.read(reader, PAGE) if moved else b""

        return f"splice({number}, {len(data)}, {offset})", call

    def _map(self, number: int) -> tuple[str, Call]:
        data, at = self._data(self._length()), self._offset()
        shorten = self.random.random() < 0.2

        def call(side: Side) -> bytes:
            descriptor = _of(side, number)
            size = os.fstat(descriptor).st_size
            if not size:
                return b""
            with mmap.mmap(descriptor, 0) as mapping:
                start = at % size
                part = data[: size - start]
                if shorten:  # the page that has the new end stays, with zeros behind it
                    os.ftruncate(descriptor, start + 1)
                    return mapping[start : (start | PAGE - 1) + 1][:size]
                mapping[start : start + len(part)] = part
                mapping.flush()
                return mapping[: size // 2]

        return f"mmap({number}, {at}, {len(data)}, shorten={shorten})", call

    def _sync(self, number: int) -> tuple[str, Call]:
        call = self.random.choice((os.fsync, os.fdatasync))
        return f"{call.__name__}({number})", lambda side: call(_of(side, number))

    def _advise(self, number: int) -> tuple[str, Call]:
        advice = self.random.choice((os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED, os.POSIX_FADV_SEQUENTIAL, 77))
        return f"fadvise({number}, {advice})", lambda side: os.posix_fadvise(_of(side, number), 0, 0, advice)

    def _set_append(self, number: int) -> tuple[str, Call]:
        flag = os.O_APPEND  # never cleared

        def call(side: Side) -> int:
            fcntl.fcntl(_of(side, number), fcntl.F_SETFL, flag)
            return fcntl.fcntl(_of(side, number), fcntl.F_GETFL) & (os.O_APPEND | os.O_ACCMODE)

        return f"fcntl({number}, F_SETFL, {flag:#o})", call

    def _rename(self, number: int) -> tuple[str, Call]:
        old, new = self.random.choice(NAMES), self.random.choice(NAMES)
        return f"rename({old}, {new})", lambda side: os.rename(side.path(old), side.path(new))

    def _unlink(self, number: int) -> tuple[str, Call]:
        name = self.random.choice(NAMES)
        return f"unlink({name})", lambda side: os.unlink(side.path(name))

    def _link(self, number: int) -> tuple[str, Call]:
        old, new = self.random.choice(NAMES), self.random.choice(NAMES)
        return f"link({old}, {new})", lambda side: os.link(side.path(old), side.path(new))


def _blocks(path: str) -> int:
    os.chmod(path, 0o640)  # what the kernel has cached may be a second old
    return os.stat(path).st_blocks


def _of(side: Side, number: int) -> int:
    descriptor = side.slots[number]
    assert descriptor is not None
    return descriptor


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def content(path: str) -> tuple[int, bytes, list[int]]:
    """A file's kind, its bytes as they are read, and where those are that aren't zero: looked for where data is said to be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        found, at = [], 0
        with contextlib.suppress(OSError):
            while True:
                at = os.lseek(descriptor, at, os.SEEK_DATA)
                end = os.lseek(descriptor, at, os.SEEK_HOLE)
                found += [at + index for index, byte in enumerate(os.pread(descriptor, end - at, at)) if byte]
                at = end
        return stat.S_IFMT(status.st_mode), os.pread(descriptor, status.st_size + 1, 0), found
    finally:
        os.close(descriptor)


def next_byte(descriptor: int, offset: int, whence: int) -> int:
    """As lseek(2) with SEEK_DATA or SEEK_HOLE, to where nothing but the file's bytes decides: when ext4 makes a hole of zeros
    data is its own affair. Raises `OSError`."""
    size = os.fstat(descriptor).st_size
    try:
        found = os.lseek(descriptor, offset, whence)
    except OSError as error:
        if error.errno == errno.ENXIO and 0 <= offset < size:
            return size
        raise
    if whence == os.SEEK_HOLE:
        return size
    with contextlib.suppress(OSError):  # it is open for writing only
        rest = os.pread(descriptor, size - found, found)
        return size - len(rest.lstrip(b"\0"))
    return size


def _difference(mounted: Outcome, plain: Outcome) -> str:
    if isinstance(mounted[1], tuple) and isinstance(plain[1], tuple):
        for ours, theirs in zip(mounted[1], plain[1], strict=True):
            if isinstance(ours, bytes) and isinstance(theirs, bytes) and ours != theirs:
                length = min(len(ours), len(theirs))
                first = next((at for at in range(length) if ours[at] != theirs[at]), length)
                part = slice(first, first + 40)
                return f"from byte {first} on: {ours[part]!r} in the mount, {theirs[part]!r} in the plain directory"
    return f"mount: {str(mounted)[:400]}\nplain: {str(plain)[:400]}"


if __name__ == "__main__":
    Walker(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])).walk(int(sys.argv[4]))
