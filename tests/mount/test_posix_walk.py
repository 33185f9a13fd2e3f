"""The mount beside a plain ext4 directory, call by call: what four users get from random calls on names and metadata must be the
same in both, and so must everything root sees afterwards.

`CKPTFS_WALK_STEPS=20000 CKPTFS_WALK_SEED=7 scripts/test tests/mount/test_posix_walk.py -s` is a long run, each seed another one.
`CKPTFS_WALK_ALL=1` goes on after a difference, in emptied directories, and lists all of them at the end.
"""

import json
import os
import random
import stat
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import LocalCluster

STEPS = int(os.environ.get("CKPTFS_WALK_STEPS", "250"))
SEED = int(os.environ.get("CKPTFS_WALK_SEED", "1"))
COLLECT = bool(os.environ.get("CKPTFS_WALK_ALL"))
CLIENT = Path(__file__).parent / "posix_client.py"
USERS = {"root": (0, 0, ""), "alice": (20001, 20001, "30001"), "bob": (20002, 20002, "30001,30002"), "carol": (20003, 20003, "")}
CLOCK_REALTIME_COARSE = 5

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120 + STEPS // 4)]

Outcome = dict[str, Any]
Call = tuple[str, list[Any]]
Step = tuple[Any, ...]
"""User, call, arguments."""

LEAVES = [b"a", b"b", b"c", b"e"]
ODD = [
    b"n" * 255,
    b"n" * 256,
    b"\xff\xfe",
    b"\x01\n\x7f",
    "ä".encode(),
    b"a/b",
    b"a/",
    b"b/",
    b".",
    b"..",
    b"",
    b"a/..",
    b"p" * 4096,
]
DIRECTORIES = [b"d", b"sticky", b"group", b"d/e", b"link"]
PLACES = [b"", b"", b"d/", b"sticky/", b"group/", b"d/e/", b"link/"]
MODES = [0o777, 0o777, 0o666, 0o666, 0o660, 0o755, 0o644, 0o750, 0o640, 0o700, 0o600, 0o400, 0, 0o1777]
SET_ID_MODES = [0o4777, 0o2777, 0o6755, 0o2770, 0o2666]
CALLS_IN_ONE_TREE = 100
"""Then empty directories are begun with: what random calls leave is soon nobody's to change."""
OWNERS = [-1, -1, 0, 20001, 20002, 20003]
GROUPS = [-1, -1, 0, 20001, 20002, 30001, 30002]
SECONDS = [0, 1, -1, -(2**31), -(2**31) - 10, 2**31 + 5, 15032385535, 15032385540, 2**40, 1_700_000_000]
NANOSECONDS = [0, 1, 999_999_999, 0x3FFFFFFF, 0x3FFFFFFE, 10**9]
XATTRS = [
    b"user.a",
    b"user.b",
    b"user." + b"n" * 250,
    b"user." + b"n" * 251,
    b"trusted.t",
    b"security.s",
    b"user.",
    b"foo.b",
    b"system.x",
]
ACCESS_ACL, DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)


NONE = 0xFFFFFFFF


def _acl(chance: random.Random) -> bytes:
    """A POSIX ACL's attribute value, mostly a valid one."""

    def bits() -> int:
        return chance.randrange(8)

    entries = [(0x01, bits(), NONE)]
    named = [(0x02, bits(), uid) for uid in (20001, 20002) if chance.random() < 0.5]
    named_groups = [(0x08, bits(), gid) for gid in (30001, 30002) if chance.random() < 0.5]
    entries += [*named, (0x04, bits(), NONE), *named_groups]
    if named or named_groups or chance.random() < 0.2:
        entries.append((0x10, bits(), NONE))
    entries.append((0x20, bits(), NONE))
    if chance.random() < 0.1:
        entries.pop(chance.randrange(len(entries)))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


class Steps:
    """What happens next, as the seed says. `known` are the paths there are now: most calls are about one of them."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.known: list[bytes] = []
        self._makers: list[tuple[int, Callable[[], Call]]] = [
            (20, self._open),
            (8, lambda: ("write", [self._slot(), self._data()])),
            (2, lambda: ("pwrite", [self._slot(), self._data(), self._chance.choice([0, 1, 5000])])),
            (2, lambda: ("pread", [self._slot(), 10_000, self._chance.choice([0, 3])])),
            (3, lambda: ("close", [self._slot()])),
            (1, lambda: ("fsync", [self._slot()])),
            (2, lambda: ("ftruncate", [self._slot(), self._size()])),
            (2, lambda: ("fchmod", [self._slot(), self._one(MODES)])),
            (2, lambda: ("chmod", [self._one(DIRECTORIES), self._one([*MODES, *SET_ID_MODES])])),
            (2, lambda: ("fchown", [self._slot(), *self._owner()])),
            (3, lambda: ("link_slot", [self._slot(), self._path(0.2)])),
            (1, lambda: ("reopen", [self._slot(), self._slot(), self._one([os.O_RDONLY, os.O_RDWR, os.O_PATH])])),
            (1, lambda: ("list_slot", [self._slot()])),
            (1, lambda: ("mkdir_at", [self._slot(), self._one(LEAVES)])),
            (1, lambda: ("stat_at", [self._slot(), self._one([b".", b"..", b"a"])])),
            (2, lambda: ("truncate", [self._path(), self._size()])),
            (6, lambda: ("mkdir", [self._path(0.2), self._one(MODES)])),
            (4, lambda: ("rmdir", [self._path()])),
            (6, lambda: ("unlink", [self._path()])),
            (10, lambda: ("rename", [self._path(0.8), self._path(0.4), self._one([0, 0, 0, 0, 1, 2, 4, 3, 5, 6, 8])])),
            (5, lambda: ("link", [self._path(0.8), self._path(0.2), self._one([0, 0, 0x400, 0x100])])),
            (4, lambda: ("symlink", [self._target(), self._path(0.2)])),
            (2, lambda: ("readlink", [self._path()])),
            (4, self._mknod),
            (1, lambda: ("bind", [self._path(0.2)])),
            (1, lambda: ("connect", [self._path()])),
            (6, lambda: ("chmod", [self._path(), self._one(MODES)])),
            (6, lambda: (self._one(["chown", "chown", "lchown"]), [self._path(), *self._owner()])),
            (4, self._utimens),
            (3, lambda: ("access", [self._path(), self._chance.randrange(8)])),
            (2, lambda: ("listdir", [self._path()])),
            (2, lambda: (self._one(["stat", "lstat", "birth_is_shown"]), [self._path()])),
            (5, self._setxattr),
            (2, lambda: ("getxattr", [self._path(), self._attribute(), self._follow()])),
            (2, lambda: ("listxattr", [self._path(), self._follow()])),
            (2, lambda: ("removexattr", [self._path(), self._attribute(), self._follow()])),
            (5, lambda: ("setxattr", [self._path(), self._one([ACCESS_ACL, DEFAULT_ACL]), _acl(self._chance), 0, True])),
            (1, lambda: ("statvfs", [self._path()])),
            (2, lambda: ("content", [self._path()])),
            (2, lambda: ("umask", [self._one([0, 0o022, 0o027, 0o077])])),
        ]
        self._weights = [weight for weight, _ in self._makers]

    def next(self) -> tuple[str, Call]:
        user = self._chance.choices(list(USERS), [4, 5, 2, 1])[0]
        maker = self._chance.choices(self._makers, self._weights)[0][1]
        return user, maker()

    def _one(self, choices: list[Any]) -> Any:
        return self._chance.choice(choices)

    def _owner(self) -> list[int]:
        """Not (-1, -1), which is refused on ext4 where there are set-id bits: the kernel doesn't tell."""
        owner = self._one(OWNERS)
        return [owner, self._one([group for group in GROUPS if (owner, group) != (-1, -1)])]

    def _slot(self) -> int:
        return self._chance.randrange(3)

    def _size(self) -> int:
        return int(self._one([0, 0, 1, 10, 4096, 100_000, -1]))

    def _data(self) -> bytes:
        return bytes([self._chance.randrange(256)]) * int(self._one([0, 1, 10, 5000]))

    def _follow(self) -> bool:
        return self._chance.random() < 0.6

    def _path(self, known: float = 0.6) -> bytes:
        if self.known and self._chance.random() < known:
            return bytes(self._one(self.known))
        if self._chance.random() < 0.06:
            return bytes(self._one(DIRECTORIES))
        leaf = self._one(ODD) if self._chance.random() < 0.06 else self._one(LEAVES)
        return bytes(self._one(PLACES) + leaf)

    def _target(self) -> bytes:
        if self._chance.random() < 0.2:
            return bytes(self._one([b"t" * 4095, b"t" * 4096, b"", b"a", b"link", b"\xff"]))
        return self._path() or b"a"

    def _open(self) -> Call:
        flags = self._one([os.O_RDONLY, os.O_WRONLY, *[os.O_RDWR] * 4, os.O_PATH, os.O_RDONLY | os.O_DIRECTORY])
        if self._chance.random() < 0.15:
            flags = self._one([os.O_RDWR, os.O_WRONLY, os.O_RDONLY]) | os.O_TMPFILE | self._one([0, 0, os.O_EXCL])
            path = self._one([b".", b"d", b"sticky", b"group", b"a", b"nowhere", b"group/e"])
        else:
            path = self._path()
            if not flags & (os.O_PATH | os.O_DIRECTORY) or self._chance.random() < 0.1:
                flags |= os.O_CREAT if self._chance.random() < 0.8 else 0
            for flag, probability in (
                (os.O_EXCL, 0.1),
                (os.O_TRUNC, 0.2),
                (os.O_APPEND, 0.1),
                (os.O_NOFOLLOW, 0.1),
            ):
                flags |= flag if self._chance.random() < probability else 0
        return "open", [self._slot(), path, flags | os.O_NONBLOCK, self._one([*MODES, *SET_ID_MODES])]

    def _mknod(self) -> Call:
        kind = self._one([stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFDIR])
        device = os.makedev(*self._one([(0, 0), (1, 3), (4095, 70_000)]))
        return "mknod", [self._path(0.2), kind | self._one([*MODES, *SET_ID_MODES]), device]

    def _utimens(self) -> Call:
        def moment() -> list[int]:
            return [self._one(SECONDS), self._one(NANOSECONDS)]

        return "utimens", [self._path(), moment(), moment(), self._one([0, 0x100])]

    def _attribute(self) -> bytes:
        return bytes(self._one([*XATTRS, ACCESS_ACL, DEFAULT_ACL, b"security.capability"]))

    def _setxattr(self) -> Call:
        if self._chance.random() < 0.15:
            return "setxattr", [self._path(), b"security.capability", CAPABILITY, 0, True]
        value = bytes([self._chance.randrange(256)]) * int(self._one([0, 1, 100, 400, 70_000]))
        return "setxattr", [self._path(), self._one(XATTRS), value, self._one([0, 0, 0, 1, 2, 3, 4]), self._follow()]


class Program:
    """A running `posix_client.py`."""

    def __init__(self, user: str, directories: list[Path]) -> None:
        uid, gid, groups = USERS[user]
        self._process = subprocess.Popen(
            [sys.executable, CLIENT, str(uid), str(gid), groups, *map(str, directories)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, name: str, *arguments: Any) -> list[Outcome]:
        """The outcomes in the two directories."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        plain = [item.decode("latin-1") if isinstance(item, bytes) else item for item in arguments]
        self._process.stdin.write(json.dumps([name, *plain]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended in {name} {arguments}"
        outcomes: list[Outcome] = json.loads(line)
        return outcomes

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


TIMES = ("atime", "mtime", "ctime")


class Comparison:
    """Whether two trees look the same, given how they looked before: times by what changed, inode numbers by what shares them."""

    def __init__(self) -> None:
        self._before: list[dict[int, Outcome]] = [{}, {}]

    def differences(self, views: list[list[tuple[str, Outcome]]]) -> list[str]:
        """`views` are lists of names and what stat says of them. Call it once for each step."""
        there, here = (dict(view) for view in views)
        found = [f"only one has {name!r}" for name in there.keys() ^ here.keys()]
        now: list[dict[int, Outcome]] = [{}, {}]
        numbers: dict[int, int] = {}
        for name in there.keys() & here.keys():
            one, other = there[name], here[name]
            if numbers.setdefault(one["ino"], other["ino"]) != other["ino"]:
                found.append(f"{name!r} is another inode's name")
            for field in one.keys() - {"ino", *TIMES}:
                if one[field] != other[field]:
                    found.append(f"{name!r} {field}: {_shown(field, one[field])}, not {_shown(field, other[field])}")
            changed = [self._changed(tree, entry) for tree, entry in enumerate((one, other))]
            found += [f"{name!r} {time_}: {what}" for time_, what in self._times(one, other, *changed)]
            for tree, entry in enumerate((one, other)):
                now[tree][entry["ino"]] = entry
        self._before = now
        return sorted(found)

    def _changed(self, tree: int, entry: Outcome) -> dict[str, bool]:
        before = self._before[tree].get(entry["ino"])
        return {} if before is None else {time_: entry[time_] != before[time_] for time_ in TIMES}

    @staticmethod
    def _times(
        one: Outcome, other: Outcome, changed: dict[str, bool], other_changed: dict[str, bool]
    ) -> Iterator[tuple[str, str]]:
        now = time.time_ns()
        for time_ in TIMES:
            is_recent = [abs(entry[time_] - now) < 600 * 10**9 for entry in (one, other)]
            if is_recent[0] != is_recent[1] or (not is_recent[0] and one[time_] != other[time_]):
                yield time_, f"{one[time_]}, not {other[time_]}"
            elif changed.keys() == other_changed.keys() and changed.get(time_) != other_changed.get(time_):
                yield time_, "changed" if changed[time_] else "not changed"


def _shown(field: str, value: Any) -> str:
    return oct(value) if field == "mode" else repr(value)


def wait_for_tick() -> None:
    """Until the clock that files are stamped with has moved on: what happens afterwards has another time."""
    before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) == before:
        pass


class Walk:
    """Two directories, the programs of four users in them, and the comparison of what they get and leave."""

    def __init__(self, directories: list[Path], programs: dict[str, Program]) -> None:
        self._directories = directories
        self._programs = programs
        self.carried_out: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.outcome: Outcome = {}
        """That of the last step, in the plain directory."""
        self.paths: list[bytes] = []
        """What there is after it."""
        self.begin()

    def begin(self) -> None:
        """Empty directories with a few places in them."""
        for program in self._programs.values():
            program.call("umask", 0o022)
            for slot in range(3):
                program.call("close", slot)
        for directory in self._directories:
            for path in directory.iterdir():
                subprocess.run(["rm", "-rf", path], check=True)
            subprocess.run(["setfacl", "-b", directory], check=True)
            os.chown(directory, 0, 0)
            directory.chmod(0o777)
            for name, mode in (("d", 0o777), ("sticky", 0o1777), ("group", 0o2777), ("d/e", 0o777)):
                (directory / name).mkdir()
                os.chown(directory / name, 0, 30001 if name == "group" else 0)
                (directory / name).chmod(mode)
            os.symlink("d/e", directory / "link")
        self._comparison = Comparison()
        self._compare()

    def step(self, user: str, call: Call) -> list[str]:
        """Make the call; what differs then."""
        wait_for_tick()
        name, arguments = call
        outcomes = self._programs[user].call(name, *arguments)
        self.outcome = outcomes[1]
        found = []
        if name in ("stat", "lstat", "fstat", "stat_at"):
            outcomes = [_without_relations(one) for one in outcomes]
        self.carried_out[name] += "value" in outcomes[1]
        self.refused[f"{name} {outcomes[1].get('error', '')}"] += "error" in outcomes[1]
        if outcomes[0] != outcomes[1]:
            found = [f"{outcomes[0]}, not {outcomes[1]}"]
        # A rename with WHITEOUT that ext4 refuses changes its directories' times there nevertheless. What is written to a pipe
        # changes the times of its inode on ext4; the kernel doesn't do that for FUSE, nor tell.
        times_differ = name == "rename" and arguments[2] & 4 and "error" in outcomes[1]
        times_differ = times_differ or (name == "write" and self._is_pipe(user, arguments[0]))
        return found + [what for what in self._compare() if not (times_differ and "time: " in what)]

    def _is_pipe(self, user: str, slot: int) -> bool:
        outcome = self._programs[user].call("fstat", slot)[1]
        return "value" in outcome and stat.S_ISFIFO(outcome["value"]["mode"])

    def _compare(self) -> list[str]:
        views: list[list[tuple[str, Outcome]]] = [[], []]
        outcomes = self._programs["root"].call("tree")
        for view, outcome in zip(views, outcomes, strict=True):
            if "error" in outcome:
                return [f"the tree can't be read: {outcomes}"]
            view += outcome["value"].items()
        self.paths = sorted(name.removeprefix("./").encode("latin-1") for name, _ in views[1] if name != ".")
        for user, program in self._programs.items():
            outcomes = program.call("open_stats")
            for view, outcome in zip(views, outcomes, strict=True):
                if "error" in outcome:
                    return [f"{user}'s descriptors have no status: {outcomes}"]
                view += [(f"{user}:{slot}", entry) for slot, entry in outcome["value"]]
        return self._comparison.differences(views)


def _without_relations(outcome: Outcome) -> Outcome:
    if "error" in outcome:
        return outcome
    return {key: value for key, value in outcome["value"].items() if key not in ("ino", *TIMES)}


@contextmanager
def _walk(mount: Path, plain: Path) -> Iterator[Walk]:
    directories = [mount / "walk" / "top", plain / "walk" / "top"]
    for directory in directories:
        directory.mkdir(parents=True)
    programs = {user: Program(user, directories) for user in USERS}
    try:
        yield Walk(directories, programs)
    finally:
        for program in programs.values():
            program.end()


CREATE = os.O_CREAT | os.O_RDWR
LIST = struct.pack("<IHHIHHIHHIHHIHHI", 2, 1, 7, NONE, 2, 6, 20002, 4, 5, NONE, 16, 7, NONE, 32, 0, NONE)
"""user::rwx, user:bob:rw-, group::r-x, mask::rwx, other::---"""


def _privileges(given: Step) -> list[Step]:
    """What takes them away again, and what doesn't, each time after they were given to a file that is opened then."""
    changes: list[Step] = [
        ("alice", "write", 0, b"x"),
        ("bob", "write", 0, b"x"),
        ("root", "write", 0, b"x"),
        ("bob", "write", 0, b""),
        ("bob", "pwrite", 0, b"x", 100_000),
        ("alice", "truncate", b"a", 5),
        ("root", "truncate", b"a", 6),
        ("alice", "ftruncate", 0, 6),
        ("bob", "open", 1, b"a", os.O_RDONLY | os.O_TRUNC, 0),
        ("root", "open", 1, b"a", os.O_WRONLY | os.O_TRUNC, 0),
        ("alice", "chown", b"a", -1, -1),
        ("root", "chown", b"a", -1, -1),
        ("root", "chown", b"a", 20001, -1),
        ("alice", "chown", b"a", -1, 30001),
        ("carol", "write", 0, b"x"),
        ("carol", "truncate", b"a", 5),
        ("carol", "open", 1, b"a", os.O_WRONLY | os.O_TRUNC, 0),
        ("bob", "content", b"a"),
        ("alice", "utimens", b"a", [5, 5], [5, 5], 0),
    ]
    script: list[Step] = [
        ("alice", "open", 0, b"a", CREATE, 0o777),
        ("alice", "close", 0),
        ("root", "chown", b"a", 20001, 30001),
    ]
    for change in changes:
        user = change[0]
        script += [("alice", "chmod", b"a", 0o777), given, (user, "open", 0, b"a", os.O_RDWR, 0), change, (user, "close", 0)]
    return script


SCRIPTS: dict[str, list[Step]] = {
    "set-id bits go with writes of ordinary users": _privileges(("alice", "chmod", b"a", 0o6777)),
    "set-group-id without execution goes with writes of who is not in the group": _privileges(("alice", "chmod", b"a", 0o2666)),
    "capabilities go with writes": _privileges(("root", "setxattr", b"a", b"security.capability", CAPABILITY, 0, True)),
    "a directory's group goes to what is made in it": [
        ("alice", "open", 0, b"group/a", CREATE, 0o2777),
        ("carol", "open", 0, b"group/b", CREATE, 0o2777),
        ("carol", "mkdir", b"group/d", 0o700),
        ("carol", "mkdir", b"group/d/d", 0o777),
        ("carol", "mknod", b"group/d/p", stat.S_IFIFO | 0o2755, 0),
        ("carol", "symlink", b"a", b"group/d/l"),
        ("carol", "open", 1, b"group", os.O_TMPFILE | os.O_RDWR, 0o2755),
        ("carol", "chmod", b"group/d", 0o2777),
        ("alice", "chown", b"group/a", -1, 20001),
        ("alice", "chown", b"group/a", -1, 30002),
        ("alice", "chown", b"group/a", 20002, -1),
        ("bob", "chown", b"group/a", -1, 30001),
        ("alice", "chmod", b"group/a", 0o2755),
    ],
    "in a sticky directory only owners remove": [
        ("alice", "open", 0, b"sticky/a", CREATE, 0o666),
        ("bob", "unlink", b"sticky/a"),
        ("bob", "rename", b"sticky/a", b"sticky/b", 0),
        ("bob", "rename", b"sticky/a", b"d/b", 0),
        ("bob", "open", 0, b"sticky/a", os.O_CREAT | os.O_WRONLY, 0o666),
        ("bob", "link", b"sticky/a", b"d/a", 0),
        ("bob", "open", 1, b"sticky/c", CREATE, 0o600),
        ("bob", "rename", b"sticky/c", b"sticky/a", 0),
        ("bob", "rename", b"sticky/c", b"sticky/a", 2),
        ("alice", "rename", b"sticky/a", b"sticky/b", 0),
        ("bob", "mkdir", b"sticky/d", 0o777),
        ("alice", "rmdir", b"sticky/d"),
        ("bob", "rmdir", b"sticky/d"),
    ],
    "files without a name": [
        ("alice", "open", 0, b"d", os.O_TMPFILE | os.O_RDWR, 0o640),
        ("alice", "write", 0, b"content"),
        ("alice", "fsync", 0),
        ("alice", "list_slot", 0),
        ("alice", "link_slot", 0, b"d/a"),
        ("alice", "link_slot", 0, b"d/a"),
        ("alice", "link_slot", 0, b"b"),
        ("alice", "write", 0, b"more"),
        ("alice", "close", 0),
        ("alice", "content", b"b"),
        ("alice", "unlink", b"d/a"),
        ("bob", "open", 0, b"d", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o640),
        ("bob", "link_slot", 0, b"c"),
        ("bob", "open", 1, b"d", os.O_TMPFILE | os.O_RDONLY, 0o640),
        ("bob", "open", 1, b"d", os.O_TMPFILE | os.O_WRONLY, 0),
        ("bob", "link_slot", 1, b"c"),
        ("bob", "open", 2, b"c", os.O_RDONLY, 0),
        ("bob", "fchmod", 1, 0o4711),
        ("bob", "unlink", b"c"),
        ("bob", "link_slot", 1, b"c"),
        ("carol", "open", 0, b"c", os.O_TMPFILE | os.O_RDWR, 0o640),
    ],
    "access control lists": [
        ("alice", "mkdir", b"l", 0o700),
        ("bob", "access", b"l", os.R_OK | os.X_OK),
        ("alice", "setxattr", b"l", ACCESS_ACL, LIST, 0, True),
        ("bob", "access", b"l", os.R_OK | os.W_OK),
        ("bob", "access", b"l", os.X_OK),
        ("bob", "setxattr", b"l", ACCESS_ACL, LIST, 0, True),
        ("alice", "chmod", b"l", 0o720),
        ("bob", "access", b"l", os.R_OK),
        ("alice", "setxattr", b"l", DEFAULT_ACL, LIST, 0, True),
        ("alice", "umask", 0o077),
        ("alice", "open", 0, b"l/a", CREATE, 0o664),
        ("alice", "mkdir", b"l/d", 0o777),
        ("alice", "mkdir", b"l/d/e", 0o700),
        ("alice", "mknod", b"l/p", stat.S_IFIFO | 0o666, 0),
        ("alice", "mknod", b"l/r", stat.S_IFREG | 0o666, 0),
        ("alice", "symlink", b"a", b"l/s"),
        ("alice", "open", 1, b"l", os.O_TMPFILE | os.O_RDWR, 0o666),
        ("alice", "link_slot", 1, b"l/t"),
        ("alice", "chmod", b"l/a", 0o600),
        ("alice", "chmod", b"l/a", 0o660),
        ("alice", "setxattr", b"l/a", DEFAULT_ACL, LIST, 0, True),
        ("alice", "setxattr", b"l/a", ACCESS_ACL, b"", 0, True),
        ("alice", "setxattr", b"l/a", ACCESS_ACL, LIST[:-2], 0, True),
        ("alice", "setxattr", b"l/a", ACCESS_ACL, LIST[:4], 0, True),
        ("alice", "setxattr", b"l/a", ACCESS_ACL, LIST[:12] + LIST[20:28] + LIST[36:], 0, True),
        ("alice", "removexattr", b"l/a", ACCESS_ACL, True),
        ("alice", "removexattr", b"l/a", ACCESS_ACL, True),
        ("alice", "getxattr", b"l/a", ACCESS_ACL, True),
        ("alice", "listxattr", b"l/d", True),
        ("alice", "removexattr", b"l", DEFAULT_ACL, True),
        ("alice", "open", 0, b"l/b", CREATE, 0o666),
        ("root", "chown", b"l/d", 20001, 30002),
        ("alice", "chmod", b"l/d", 0o2770),
        ("alice", "setxattr", b"l/d", ACCESS_ACL, LIST, 0, True),
        ("bob", "rename", b"l/d", b"moved", 0),
    ],
    "renames with flags": [
        ("alice", "open", 0, b"a", CREATE, 0o600),
        ("alice", "mkdir", b"e", 0o755),
        ("alice", "open", 1, b"e/b", CREATE, 0o600),
        ("alice", "rename", b"a", b"e/b", 1),
        ("alice", "rename", b"a", b"e/b", 2),
        ("alice", "rename", b"a", b"e", 2),
        ("alice", "rename", b"e", b"a/b", 2),
        ("alice", "rename", b"e", b"a/b", 0),
        ("alice", "rename", b"a", b"a/x", 2),
        ("alice", "rename", b"e", b"c", 4),
        ("alice", "unlink", b"e"),
        ("bob", "rename", b"d", b"e", 4),
        ("root", "rename", b"c", b"e", 5),
        ("root", "rename", b"c", b"e", 4),
        ("root", "rename", b"e", b"e", 4),
        ("root", "rename", b"e", b"x", 6),
        ("root", "rename", b"e", b"x", 3),
        ("root", "rename", b"e", b"x", 8),
        ("root", "rename", b"nowhere", b"x", 4),
        ("root", "mkdir", b"full", 0o755),
        ("root", "mkdir", b"full/one", 0o755),
        ("root", "mkdir", b"other", 0o755),
        ("root", "rename", b"other", b"full", 0),
        ("root", "rename", b"full/one", b"full", 0),
        ("root", "rename", b"full", b"full/one", 0),
        ("root", "rename", b"full/one", b"other", 0),
    ],
    "inodes without a name": [
        ("alice", "mkdir", b"e", 0o755),
        ("alice", "open", 0, b"e", os.O_RDONLY | os.O_DIRECTORY, 0),
        ("alice", "rmdir", b"e"),
        ("alice", "fchmod", 0, 0o700),
        ("alice", "list_slot", 0),
        ("alice", "mkdir_at", 0, b"a"),
        ("alice", "stat_at", 0, b"."),
        ("alice", "stat_at", 0, b".."),
        ("alice", "mknod", b"p", stat.S_IFIFO | 0o600, 0),
        ("alice", "open", 1, b"p", os.O_RDWR | os.O_NONBLOCK, 0),
        ("alice", "link", b"p", b"q", 0),
        ("alice", "unlink", b"p"),
        ("alice", "unlink", b"q"),
        ("alice", "fchmod", 1, 0o640),
        ("alice", "open", 2, b"f", CREATE, 0o600),
        ("alice", "write", 2, b"content"),
        ("alice", "unlink", b"f"),
        ("alice", "ftruncate", 2, 3),
        ("alice", "fchmod", 2, 0o4755),
        ("alice", "reopen", 2, 0, os.O_RDONLY),
        ("alice", "pread", 0, 10, 0),
        ("alice", "link_slot", 2, b"back"),
    ],
    "extended attributes": [
        ("alice", "open", 0, b"a", CREATE, 0o644),
        *(("root", "setxattr", b"a", name, b"value", 0, True) for name in XATTRS),
        *(("root", "getxattr", b"a", name, True) for name in XATTRS),
        *(("bob", "getxattr", b"a", name, True) for name in XATTRS),
        ("bob", "setxattr", b"a", b"user.b", b"", 0, True),
        ("bob", "listxattr", b"a", True),
        ("alice", "setxattr", b"a", b"user.a", b"value", 0, True),
        ("alice", "setxattr", b"a", b"user.a", b"value", 1, True),
        ("alice", "setxattr", b"a", b"user.c", b"value", 2, True),
        ("alice", "setxattr", b"a", b"user.c", bytes(65537), 0, True),
        *(("root", "removexattr", b"a", name, True) for name in XATTRS),
        ("alice", "symlink", b"a", b"s"),
        ("alice", "setxattr", b"s", b"user.a", b"1", 0, False),
        ("root", "setxattr", b"s", b"trusted.a", b"1", 0, False),
        ("alice", "mknod", b"p", stat.S_IFIFO | 0o600, 0),
        ("alice", "setxattr", b"p", b"user.a", b"1", 0, True),
        ("alice", "getxattr", b"p", b"user.a", True),
    ],
}


@pytest.fixture(params=["auto", "off"])
def passthrough(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def walk(passthrough: str, start_cluster: Callable[..., LocalCluster], make_drive: Callable[..., Path]) -> Iterator[Walk]:
    cluster = start_cluster(nodes=1, settle_seconds=0.1, passthrough=passthrough)
    plain = make_drive(1024)  # sparse; of this size on, with blocks of 4096 bytes
    subprocess.run(["mount", "-o", "remount,noatime,nosuid,nodev", plain], check=True)
    with _walk(cluster.nodes[0].mountpoint, plain) as walk:
        yield walk
    print((cluster.nodes[0].log / "mount.log").read_text()[-5000:])  # shown where a test fails


def test_what_is_told_of_users_lists_and_names(walk: Walk) -> None:
    reports = []
    for title, script in SCRIPTS.items():
        walk.begin()
        for number, (user, name, *arguments) in enumerate(script):
            if found := walk.step(user, (name, arguments)):
                reports.append("\n".join([f"{title}, step {number}: {user} {name} {str(arguments)[:150]}", *found[:12]]))
                break
    assert not reports, "\n\n".join(reports)


def test_calls_give_what_they_give_on_ext4(walk: Walk, passthrough: str) -> None:
    steps = Steps(SEED)
    made: list[str] = []
    all_found: dict[str, str] = {}
    for number in range(STEPS):
        if number % CALLS_IN_ONE_TREE == 0:
            walk.begin()
            made.clear()
        steps.known = walk.paths
        user, call = steps.next()
        found = walk.step(user, call)
        made.append(f"{number} {user} {call[0]} {str(call[1])[:150]} {str(walk.outcome)[:100]}")
        if not found:
            continue
        report = f"CKPTFS_WALK_SEED={SEED}, {passthrough}\n" + "\n".join([*made, *found[:12]])
        if not COLLECT:
            pytest.fail(report)
        all_found.setdefault(f"{call[0]} {found[0][:60]}", report)
        walk.begin()
        made.clear()
    for name, count in sorted((walk.carried_out + walk.refused).items()):
        print(f"{count:5} {name}")
    for report in all_found.values():
        print(report, end="\n\n")
    assert not all_found
