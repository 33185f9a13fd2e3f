"""`ckptfs node` and `ckptfs umount`: run this machine's node, and end it."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.fs import fuse_device
from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.config import load_config
from ckptfs.fs.mount_table import detach, mounts_at, mounts_inside
from ckptfs.fs.mount_users import described, users_of
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.status import DEFAULT_CONFIG

STOP_SECONDS = 30.0


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
    if not force:
        _take_away_unused(mounted.mountpoint, as_json=as_json)
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


def _take_away_unused(mountpoint: Path, *, as_json: bool) -> None:
    """Unmount unless somebody uses the mount: the kernel decides, so that nobody can begin to meanwhile. Raises `NotReached` with
    their names; the node goes on then as if nothing had been asked."""
    if fuse_device.unmount(mountpoint):
        return
    users, inside = users_of(mountpoint), mounts_inside(mountpoint)
    if as_json:
        print_json({"mountpoint": str(mountpoint), "users": [user._asdict() for user in users], "mounts_inside": inside})
    raise NotReached(
        f"{mountpoint} is in use by {described(users, inside)}; the node goes on: end them, or use --force", reported=as_json
    )
