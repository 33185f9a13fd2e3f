"""`ckptfs node` and `ckptfs umount`: run this machine's node, and end it."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.config import load_config
from ckptfs.fs.mount_table import detach, mounts_at
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.status import DEFAULT_CONFIG

STOP_SECONDS = 30.0
USERS_SHOWN_MAX = 8


def node(
    config: Annotated[
        Path, typer.Option("--config", metavar="FILE", help="The node's configuration; docs/node.toml lists the keys.")
    ] = (DEFAULT_CONFIG),
) -> None:
    """Run this machine's node, in the foreground until SIGTERM.

    The node is three processes: supervisor, mount and agent.
    """
    loaded = load_config(config)
    from ckptfs.fs import supervisor  # only this command needs it and all that it imports

    supervisor.run(loaded)


def umount(
    mountpoint: Annotated[Path, typer.Argument(parser=path_of, metavar="MOUNTPOINT", help="A node's mountpoint.")],
    force: Annotated[bool, typer.Option("--force", help="Also when programs still use the mount; they get errors.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """End the node behind a mount and take the mount away."""
    target = Path(os.path.abspath(mountpoint))
    found = mounts_at(target) or mounts_at(Path(os.path.realpath(target)))
    if not found:
        raise WrongUse(f"{mountpoint} is no ckptfs mount")
    mounted = found[-1]
    users = [] if force else processes_using(mounted.mountpoint)
    if users:
        shown = ", ".join(f"{name} ({pid}: {path})" for pid, name, path in users[:USERS_SHOWN_MAX])
        more = f" and {len(users) - USERS_SHOWN_MAX} more" if len(users) > USERS_SHOWN_MAX else ""
        raise NotReached(f"{mounted.mountpoint} is in use by {shown}{more}; end them, or use --force")
    processes = NodeProcesses(mounted.store)
    processes.ask_supervisor_to_end()
    ended = processes.wait_ended(time.monotonic() + STOP_SECONDS)
    if not ended:
        if not force:
            raise NotReached(f"the node behind {mounted.mountpoint} did not end within {STOP_SECONDS:.0f} s; use --force")
        processes.kill()
    detach(mounted.mountpoint, abort=True)
    if as_json:
        print_json({"mountpoint": str(mounted.mountpoint), "clean": ended})
    else:
        console().print(f"{mounted.mountpoint} is unmounted", soft_wrap=True)


def processes_using(mountpoint: Path) -> list[tuple[int, str, str]]:
    """(pid, name, path) of the processes with an open file, a mapping or a working directory in the mount.

    Read from `/proc` alone, so that a mount that hangs does not hold it up.
    """
    root = os.fspath(mountpoint)
    inside = root + "/"
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) == os.getpid():
            continue
        try:
            path = next((path for path in _paths_held(directory) if path == root or path.startswith(inside)), None)
            if path is not None:
                found.append((int(directory.name), (directory / "comm").read_text().strip(), path))
        except OSError:
            continue  # it ended meanwhile
    return sorted(found)


def _paths_held(process: Path) -> list[str]:
    paths = [os.readlink(process / "cwd")]
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
