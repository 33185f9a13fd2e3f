"""Who uses a mount: the processes with something open in it.

Read from `/proc` alone, so that a mount that hangs does not hold it up.
"""

import os
from pathlib import Path
from typing import NamedTuple

USERS_SHOWN_MAX = 8
PATHS_SHOWN_MAX = 3


class MountUser(NamedTuple):
    """One process, and what it has there: open files, mappings, its working directory. A removed file's path says so."""

    pid: int
    name: str
    paths: list[str]


def users_of(mountpoint: Path) -> list[MountUser]:
    """The processes this one can see, by pid."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            paths = sorted({path for path in _paths_held(directory) if _is_inside(path, mountpoint)})
            if paths:
                found.append(MountUser(int(directory.name), (directory / "comm").read_text().strip(), paths))
        except OSError:
            continue  # it ended meanwhile
    return sorted(found)


def described(users: list[MountUser], inside: list[str]) -> str:
    """Users, and mounts inside, in words for one line."""
    parts = [f"{user.name} ({user.pid}: {_some(user.paths, PATHS_SHOWN_MAX)})" for user in users]
    parts += [f"the mount {path} inside it" for path in inside]
    return _some(parts, USERS_SHOWN_MAX) if parts else "something that is no process here: a loop device, or another namespace"


def _some(parts: list[str], count: int) -> str:
    more = f" and {len(parts) - count} more" if len(parts) > count else ""
    return ", ".join(parts[:count]) + more


def _is_inside(path: str, mountpoint: Path) -> bool:
    root = os.fspath(mountpoint)
    return path == root or path.startswith(root + "/")


def _paths_held(process: Path) -> list[str]:
    paths = [os.readlink(process / name) for name in ("cwd", "root")]
    for entry in os.scandir(process / "fd"):
        try:
            paths.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            paths.append(fields[5])
    return paths
