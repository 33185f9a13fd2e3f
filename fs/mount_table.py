"""The ckptfs mounts of this machine, read from the kernel's own table: asking it never waits for a mount that hangs."""

import ctypes
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE_PREFIX = "ckptfs:"
"""A mount's source is this and the path of the store behind it, so that a path in the mount leads to its node."""


MNT_FORCE = 1


@dataclass(frozen=True)
class Mounted:
    """One mount. `device` is st_dev's (major, minor); the minor names the FUSE connection. `allow_other`: not only the user who
    mounted it can use it."""

    mountpoint: Path
    store: Path
    device: tuple[int, int]
    allow_other: bool = False


def parse_mountinfo(text: str) -> list[Mounted]:
    """The ckptfs mounts of a `/proc/<pid>/mountinfo`, in the kernel's order: a later one covers an earlier one."""
    found = []
    for line in text.splitlines():
        head, separator, tail = line.partition(" - ")
        fields, after = head.split(" "), tail.split(" ")
        if not separator or len(fields) < 5 or len(after) < 2:
            continue
        source = _unescape(after[1])
        if after[0].split(".")[0] == "fuse" and source.startswith(SOURCE_PREFIX):
            major, _, minor = fields[2].partition(":")
            store = Path(source.removeprefix(SOURCE_PREFIX))
            allow_other = "allow_other" in "".join(after[2:3]).split(",")
            found.append(Mounted(Path(_unescape(fields[4])), store, (int(major), int(minor)), allow_other))
    return found


def mounts() -> list[Mounted]:
    """The ckptfs mounts this process can see."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def mount_of(path: Path) -> Mounted | None:
    """The mount a path lies in. A path that names it directly is answered without touching the file system."""
    table = mounts()
    for resolve in (os.path.abspath, os.path.realpath):  # the latter asks file systems, and a mount that hangs would not answer
        candidate = Path(resolve(path))
        inside = [mounted for mounted in table if candidate.is_relative_to(mounted.mountpoint)]
        if inside:
            deepest = max(len(mounted.mountpoint.parts) for mounted in inside)
            return [mounted for mounted in inside if len(mounted.mountpoint.parts) == deepest][-1]
    return None


def mounts_at(mountpoint: Path) -> list[Mounted]:
    """All ckptfs mounts on exactly this directory."""
    return [mounted for mounted in mounts() if mounted.mountpoint == mountpoint]


def mounts_inside(mountpoint: Path) -> list[str]:
    """The mountpoints, of any file system, below this one."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    return [path for line in lines if (path := _unescape(line.split(" ")[4])).startswith(f"{mountpoint}/")]


def abort_connection(mounted: Mounted) -> None:
    """Make the kernel answer everything that waits for this mount with an error, now and for good."""
    try:
        Path(f"/sys/fs/fuse/connections/{mounted.device[1]}/abort").write_text("1")
    except OSError:  # fusectl isn't mounted, as in many containers: an unmount by force aborts too, also where it then fails
        ctypes.CDLL(None).umount2(os.fsencode(mounted.mountpoint), MNT_FORCE)


def detach(mountpoint: Path, *, abort: bool) -> None:
    """Take every ckptfs mount off this directory, lazily: what still uses one keeps it until it lets go.

    With `abort` the processes that wait for it are set free first; without, a daemon that lives may finish its work.
    """
    for mounted in reversed(mounts_at(mountpoint)):
        if abort:
            abort_connection(mounted)
        command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, "--", os.fspath(mountpoint)], check=False, capture_output=True)


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
