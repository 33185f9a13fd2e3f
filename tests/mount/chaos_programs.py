"""The programs of test_chaos.py: writers, who note in a journal outside the mount what they begin and what was acknowledged;
readers, who hold every byte, name and log line they see against the journals; and the last look, when everything is at rest.

`python chaos_programs.py write|read|check MOUNT JOURNALS SEED NUMBER [rolls-back]`. They end when told so, print what they did,
and fail with what was wrong.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import select
import stat
import sys
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FAULTS_SEEN = {errno.EIO, errno.ENOTCONN, errno.ECONNABORTED}
"""What a program may get while its node, a home or etcd is away."""
KEPT_CHECKPOINTS = 2
PAUSE_SECONDS = 0.05
WRITE_BYTES = 128 << 10
SHARED_LOG = "shared/log"
LINE = re.compile(rb"<(\d+) (\d+) x*>\n")
ABSENT = 0
UNFINISHED = -1
"""Written in place and not closed: any bytes."""
State = int
"""What a path is: `ABSENT`, `UNFINISHED`, or the number of its writer's content."""


def content(writer: int, number: int) -> bytes:
    """A file as torch.save makes it, a zip file with stored members; a quarter of them are small enough to be kept as copies."""
    chance = random.Random(writer * 1_000_003 + number)
    size = chance.choice([chance.randrange(2000), *(chance.randrange(70_000, 1_500_000) for _ in range(3))])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("archive/data.pkl"), b"writer %d content %d" % (writer, number))
        archive.writestr(zipfile.ZipInfo("archive/data/0"), hashlib.shake_128(b"%d/%d" % (writer, number)).digest(size))
    return made.getvalue()


class Wrong(Exception):
    """What no fault excuses."""


class Failed(Exception):
    """A fault was seen; whether the change was made is open."""


def is_told_to_end(wait_seconds: float = 0.0) -> bool:
    return bool(select.select([sys.stdin], [], [], wait_seconds)[0])


class Root:
    """The mount's root, held by a descriptor, so that nothing is ever done in the bare directory below."""

    def __init__(self, mountpoint: Path) -> None:
        self._mountpoint = mountpoint
        self._descriptor: int | None = None

    def get(self) -> int:
        """Raises `Failed` when there is no mount and the program was told to end."""
        while self._descriptor is None:
            with contextlib.suppress(OSError):
                descriptor = os.open(self._mountpoint, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    if os.fstat(descriptor).st_dev != os.stat(self._mountpoint.parent).st_dev:
                        self._descriptor, descriptor = descriptor, -1
                finally:
                    if descriptor >= 0:
                        os.close(descriptor)
            if self._descriptor is None and is_told_to_end(0.1):
                raise Failed
        return self._descriptor

    def leave(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Writer:
    """One program that saves as training does. Everything it makes is in a directory of its own, but for a log that all share."""

    def __init__(self, root: Root, journal: Path, number: int, chance: random.Random, *, shares: bool) -> None:
        self._root = root
        self._journal = open(journal, "ab", buffering=0)  # noqa: SIM115  it lives as long as this does
        self._number = number
        self._chance = chance
        self._contents = 0
        self._lines = 0
        self._logs: dict[str, int] = {}
        self._log_paths = [f"w{number}/log", *([SHARED_LOG] if shares else [])]
        self._kept: list[dict[str, State]] = []
        self.done = self.failed = self.full = 0

    def begin(self) -> None:
        for directory in ("shared", f"w{self._number}"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, dir_fd=self._root.get())

    def turn(self) -> None:
        turns = [self._save_checkpoint, self._replace, self._overwrite, self._append, self._append, self._append]
        try:
            self._chance.choice(turns)()
            self.done += 1
        except Failed:
            self.failed += 1
            self._forget_logs()
            self._root.leave()
            time.sleep(PAUSE_SECONDS)

    def end(self) -> None:
        for path in list(self._logs):
            with contextlib.suppress(Failed):
                self._close_log(path)

    @contextlib.contextmanager
    def _changing(self, after: dict[str, State], *, in_place: bool = False) -> Iterator[None]:
        """Note what is begun, and that it was acknowledged if it was."""
        self._note("begin", after, in_place)
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                self.full += 1
            elif error.errno not in FAULTS_SEEN:
                raise
            raise Failed from error
        self._note("done", after)

    def _note(self, *what: object) -> None:
        self._journal.write(json.dumps(what).encode() + b"\n")

    def _write(self, path: str) -> State:
        """Write a new file, or write an old one anew."""
        self._contents += 1
        data = memoryview(content(self._number, self._contents))
        with self._changing({path: self._contents}, in_place=True):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=self._root.get())
            try:
                while data:
                    data = data[os.write(file, data[:WRITE_BYTES]) :]
                if self._chance.random() < 0.4:
                    os.fsync(file)
            finally:
                os.close(file)
        return self._contents

    def _save_checkpoint(self) -> None:
        """Files in a directory that is renamed when it is whole; then the oldest goes."""
        root = self._root.get()
        step = self._contents + 1
        staging, final = f"w{self._number}/tmp-{step}", f"w{self._number}/checkpoint-{step}"
        with self._changing({}):
            os.mkdir(staging, dir_fd=root)
        parts = {part: self._write(f"{staging}/{part}") for part in ("part-0.pt", "part-1.pt", ".metadata")}
        here = {f"{final}/{part}": number for part, number in parts.items()}
        with self._changing({f"{staging}/{part}": ABSENT for part in parts} | here):
            os.rename(staging, final, src_dir_fd=root, dst_dir_fd=root)
        self._kept.append(here)
        while len(self._kept) > KEPT_CHECKPOINTS:
            oldest = self._kept.pop(0)
            for path in oldest:
                with self._changing({path: ABSENT}):
                    os.unlink(path, dir_fd=root)
            with self._changing({}):
                os.rmdir(os.path.dirname(next(iter(oldest))), dir_fd=root)

    def _replace(self) -> None:
        root = self._root.get()
        path = f"w{self._number}/latest-{self._chance.randrange(2)}.pt"
        staging = f"{path}.tmp-{self._contents + 1}"
        number = self._write(staging)
        with self._changing({staging: ABSENT, path: number}):
            os.rename(staging, path, src_dir_fd=root, dst_dir_fd=root)

    def _overwrite(self) -> None:
        self._write(f"w{self._number}/state-{self._chance.randrange(2)}.pt")

    def _append(self) -> None:
        path = self._chance.choice(self._log_paths)
        if path not in self._logs:
            with self._changing({}):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._logs[path] = os.open(path, flags, 0o644, dir_fd=self._root.get())
        for _ in range(self._chance.randrange(1, 5)):
            self._lines += 1
            line = b"<%d %d %s>\n" % (self._number, self._lines, b"x" * self._chance.randrange(300))
            self._note("line", path, self._lines)
            with self._changing({}):
                if os.write(self._logs[path], line) != len(line):
                    raise OSError(errno.ENOSPC, "in part")
            self._note("written", path, self._lines)
        if self._chance.random() < 0.2:
            with self._changing({}):
                os.fsync(self._logs[path])
        if self._chance.random() < 0.2:
            self._close_log(path)

    def _close_log(self, path: str) -> None:
        lines = self._lines
        with self._changing({}):
            os.close(self._logs.pop(path))
        self._note("closed", path, lines)

    def _forget_logs(self) -> None:
        for descriptor in self._logs.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._logs = {}


class Known:
    """What one writer's journal says of its files, so far, and of what they have been since `begin`."""

    def __init__(self, journal: Path) -> None:
        self.number = int(journal.name.removeprefix("writer-"))
        self._file = open(journal, "rb")  # noqa: SIM115  it lives as long as this does
        self._rest = b""
        self.now: dict[str, set[State]] = defaultdict(lambda: {ABSENT})
        self.since: dict[str, set[State]] = {}
        self.ever: dict[str, set[State]] = defaultdict(set)
        self.begun_lines: dict[str, set[int]] = defaultdict(set)
        self.written_lines: dict[str, set[int]] = defaultdict(set)
        self.closed_lines: dict[str, set[int]] = defaultdict(set)

    def begin(self) -> None:
        self.read_on()
        self.since = {path: set(states) for path, states in self.now.items()}

    def read_on(self) -> None:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self._take(*json.loads(line))

    def _take(self, what: str, *of: object) -> None:
        if what in ("begin", "done"):
            after, is_in_place = of[0], of[1:] == (True,)
            assert isinstance(after, dict)
            for path, state in after.items():
                states = {state, UNFINISHED} if is_in_place else {state}
                self.now[path] = self.now[path] | states if what == "begin" else states
                self.since.setdefault(path, {ABSENT}).update(states)
                self.ever[path] |= states
            return
        path, number = of
        assert isinstance(path, str)
        assert isinstance(number, int)
        if what == "line":
            self.begun_lines[path].add(number)
        elif what == "written":
            self.written_lines[path].add(number)
        else:
            self.closed_lines[path] = {line for line in self.written_lines[path] if line <= number}


class Reader:
    """Looks at what writers have made, from any node. `rolls_back`: nodes may be declared lost, and what only they have with
    them."""

    def __init__(self, root: Root, journals: Path, *, rolls_back: bool) -> None:
        self._root = root
        self._journals = journals
        self._known: dict[Path, Known] = {}
        self._rolls_back = rolls_back
        self.checked = self.failed = self.bytes = 0

    def known(self) -> list[Known]:
        for path in sorted(self._journals.glob("writer-*")):
            if path not in self._known:
                self._known[path] = Known(path)
        return list(self._known.values())

    def turn(self, chance: random.Random) -> None:
        everybody = self.known()
        for known in everybody:
            known.begin()
        if not everybody:
            return
        known = chance.choice(everybody)
        try:
            if chance.random() < 0.2:
                self.list(known)
            elif chance.random() < 0.3:
                self.read_log(chance.choice([f"w{known.number}/log", SHARED_LOG]), everybody)
            elif known.now:
                paths = sorted(known.now)
                self.read(
                    known, chance.choice(paths[-40:] if chance.random() < 0.3 else [p for p in paths if self._is_there(known, p)])
                )
            self.checked += 1
        except OSError as error:
            if error.errno not in FAULTS_SEEN:
                raise Wrong(f"writer {known.number}: {error!r}") from error
            self.failed += 1
            self._root.leave()
            time.sleep(PAUSE_SECONDS)
        except IndexError:
            pass  # nothing is there yet

    @staticmethod
    def _is_there(known: Known, path: str) -> bool:
        return known.now[path] != {ABSENT}

    def read(self, known: Known, path: str) -> None:
        """The file is what it may have been at some moment since `Known.begin`."""
        try:
            data: bytes | None = self._content(path)
        except FileNotFoundError:
            data = None
        known.read_on()
        states = set(known.since.get(path, {ABSENT}))
        if data is None:
            if ABSENT not in states:
                raise Wrong(f"{path} is not there; it should be {sorted(states)}")
            return
        self.bytes += len(data)
        if self._rolls_back:
            states |= known.ever[path]
        if UNFINISHED in states or any(data == content(known.number, state) for state in states if state > 0):
            return
        raise Wrong(f"{path} has {describe(data, known.number)}, should be {sorted(states)}; was ever {sorted(known.ever[path])}")

    def read_log(self, path: str, everybody: list[Known], *, at_rest: bool = False) -> None:
        """Every line is there once and in its writer's order; none that was closed before is missing, none acknowledged
        is torn."""
        needed = {known.number: set(known.written_lines[path] if at_rest else known.closed_lines[path]) for known in everybody}
        try:
            data = self._content(path)
        except FileNotFoundError:
            data = b""
        self.bytes += len(data)
        for known in everybody:
            known.read_on()
        found: dict[int, list[int]] = defaultdict(list)
        for writer, number in LINE.findall(data):
            found[int(writer)].append(int(number))
        torn = LINE.sub(b"", data)
        not_written = sum(len(known.begun_lines[path] - known.written_lines[path]) for known in everybody)
        if torn and (torn.count(b"<") > not_written or torn.strip(b"<0123456789 x")):
            raise Wrong(f"{path} has {torn[:300]!r}, of {not_written} lines that were not written as a whole")
        for known in everybody:
            mine = found.pop(known.number, [])
            if mine != sorted(set(mine)):
                raise Wrong(f"{path} has lines of writer {known.number} twice, or not in order: {mine}")
            if never := set(mine) - known.begun_lines[path]:
                raise Wrong(f"{path} has lines that writer {known.number} never wrote: {sorted(never)}")
            if (missing := needed[known.number] - set(mine)) and not (self._rolls_back and not at_rest):
                raise Wrong(f"{path} lacks lines of writer {known.number}: {sorted(missing)}, has {mine[-20:]} of {len(mine)}")
        if found:
            raise Wrong(f"{path} has lines of {sorted(found)}")

    def list(self, known: Known) -> None:
        """Every name is there that should be."""
        try:
            directory = os.open(f"w{known.number}", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root.get())
        except FileNotFoundError:
            names: set[str] = set()
        else:
            try:
                names = set(os.listdir(directory))
            finally:
                os.close(directory)
        known.read_on()
        needed = {path.split("/")[1] for path, states in known.since.items() if ABSENT not in states}
        if not needed <= names:
            raise Wrong(f"w{known.number} lacks {sorted(needed - names)}, has {sorted(names)}")

    def _content(self, path: str) -> bytes:
        file = os.open(path, os.O_RDONLY, dir_fd=self._root.get())
        try:
            blocks = []
            while block := os.read(file, 1 << 20):
                blocks.append(block)
            return b"".join(blocks)
        finally:
            os.close(file)

    def check_everything(self, *, shares: bool) -> None:
        """At rest: each path is what it was last, or what an unfinished change may have made of it, and there is nothing else."""
        everybody = self.known()
        for known in everybody:
            known.begin()
        found = set(self._files("."))
        for known in everybody:
            for path in list(known.now):
                self.read(known, path)
            self.read_log(f"w{known.number}/log", everybody, at_rest=True)
            found -= {path for path, states in known.now.items() if states != {ABSENT}} | {f"w{known.number}/log"}
        if shares:
            self.read_log(SHARED_LOG, everybody, at_rest=True)
        if strange := found - {SHARED_LOG}:
            raise Wrong(f"nobody made {sorted(strange)}")

    def _files(self, directory: str) -> Iterator[str]:
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root.get())
        try:
            names = sorted(os.listdir(opened))
        finally:
            os.close(opened)
        for name in names:
            path = os.path.normpath(f"{directory}/{name}")
            is_directory = stat.S_ISDIR(os.stat(path, dir_fd=self._root.get(), follow_symlinks=False).st_mode)
            yield from self._files(path) if is_directory else [path]


def describe(data: bytes, writer: int) -> str:
    """What bytes nobody expected look like."""
    said = data[:200].partition(b"archive/data.pkl")[2].partition(b"PK")[0].decode(errors="replace")
    text = f"{len(data)} bytes that begin with {said or data[:80]!r}"
    number = said.rpartition(" ")[2]
    if number.isdecimal():
        expected = content(writer, int(number))
        same = next(
            (at for at, pair in enumerate(zip(data, expected, strict=False)) if pair[0] != pair[1]), min(len(data), len(expected))
        )
        text += f", like it up to byte {same} of {len(expected)}; {data.count(0)} zeros"
    return text


def main() -> None:
    kind, mountpoint, journals, seed, number, *options = sys.argv[1:]
    chance = random.Random(f"{seed}/{kind}/{number}")
    root = Root(Path(mountpoint))
    rolls_back = "rolls-back" in options
    if kind == "write":
        writer = Writer(root, Path(journals) / f"writer-{number}", int(number), chance, shares=not rolls_back)
        writer.begin()
        print("begins", flush=True)
        while not is_told_to_end(chance.uniform(0, 2 * PAUSE_SECONDS)):
            writer.turn()
        writer.end()
        print(json.dumps({"done": writer.done, "failed": writer.failed, "full": writer.full}))
        return
    reader = Reader(root, Path(journals), rolls_back=rolls_back and kind == "read")
    if kind == "check":
        reader.check_everything(shares=not rolls_back)
    else:
        print("begins", flush=True)
        while not is_told_to_end(chance.uniform(0, PAUSE_SECONDS)):
            with contextlib.suppress(Failed):
                reader.turn(chance)
    print(json.dumps({"checked": reader.checked, "failed": reader.failed, "bytes": reader.bytes}))


if __name__ == "__main__":
    main()
