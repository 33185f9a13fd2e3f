"""`ckptfs node`, `ckptfs node upgrade` and `ckptfs umount`: run this machine's node, go on with another release, end it."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from ckptfs import __version__
from ckptfs.fs import fuse_device
from ckptfs.fs.cli_errors import NotReached, Unreachable, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.config import load_config
from ckptfs.fs.local_socket import NodeNotAnswering, call
from ckptfs.fs.mount_table import detach, mounts_at, mounts_inside
from ckptfs.fs.mount_users import described, users_of
from ckptfs.fs.node_processes import NodeProcesses
from ckptfs.fs.status import DEFAULT_CONFIG, local_node_of

STOP_SECONDS = 30.0
UPGRADE_SECONDS = 120.0
POLL_SECONDS = 0.05


app = typer.Typer(invoke_without_command=True)
ConfigFile = Annotated[
    Path, typer.Option("--config", metavar="FILE", help="The node's configuration; docs/node.toml lists the keys.")
]


@app.callback()
def node(context: typer.Context, config: ConfigFile = DEFAULT_CONFIG) -> None:
    """Run this machine's node, in the foreground until SIGTERM.

    The node is three processes: supervisor, mount and agent.
    """
    if context.invoked_subcommand is not None:
        return
    loaded = load_config(config)
    from ckptfs.fs import supervisor  # only this command needs it and all that it imports

    supervisor.run(loaded)


@app.command("upgrade")
def upgrade_node(config: ConfigFile = DEFAULT_CONFIG, as_json: JsonFlag = False) -> None:
    """Have the node that runs on this machine go on with this release, while programs use its mount."""
    loaded = load_config(config)
    from ckptfs.fs import agent_process, mount_process, supervisor, upgrade  # noqa: F401 (a release that can't even be imported)

    processes, run = NodeProcesses(loaded.store), loaded.store / "run"
    before = processes.pids()
    if before["supervisor"] is None:
        raise Unreachable(f"the node {loaded.node_id} does not run; `ckptfs node --config {config}` starts it")
    upgrade.write_request(run, upgrade.UpgradeRequest(sys.executable, __version__))
    os.kill(before["supervisor"], signal.SIGHUP)
    deadline = time.monotonic() + UPGRADE_SECONDS
    while (request := upgrade.read_request(run)) is not None:
        if request.error:
            upgrade.remove_request(run)
            raise NotReached(f"the node goes on with its old release: {request.error}")
        if time.monotonic() > deadline:
            raise NotReached(f"the node was not upgraded within {UPGRADE_SECONDS:.0f} s; supervisor.log says how far it is")
        time.sleep(POLL_SECONDS)
    runs = _release_that_serves(run / "mount.sock", deadline)
    if runs != __version__:
        raise NotReached(f"the node runs release {runs} now: another upgrade was under way")
    if as_json:
        print_json({"node": str(loaded.node_id), "version": __version__, "processes": processes.pids()})
    else:
        console().print(f"{loaded.node_id} runs ckptfs {__version__} now", soft_wrap=True)


def _release_that_serves(mount: Path, deadline: float) -> str:
    while True:
        try:
            return str(call(mount, {"do": "status"}).get("version"))
        except NodeNotAnswering:  # it begins
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def umount(
    mountpoint: Annotated[Path, typer.Argument(parser=path_of, metavar="MOUNTPOINT", help="A node's mountpoint.")],
    force: Annotated[bool, typer.Option("--force", help="Also when programs still use the mount; they get errors.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """End the node behind a mount and take the mount away."""
    target = Path(os.path.abspath(mountpoint))
    found = mounts_at(target) or mounts_at(Path(os.path.realpath(target)))
    if not found:
        raise _not_mounted(target)
    mounted = found[-1]
    if not force:
        _take_away_unused(mounted.mountpoint, as_json=as_json)
    processes = NodeProcesses(mounted.store)
    processes.ask_supervisor_to_end()
    ended = processes.wait_ended(time.monotonic() + STOP_SECONDS)
    if not ended:
        if not force:
            raise NotReached(f"{mounted.mountpoint} is unmounted; its node still syncs after {STOP_SECONDS:.0f} s, then it ends")
        processes.kill()
    detach(mounted.mountpoint, abort=True)
    if as_json:
        print_json({"mountpoint": str(mounted.mountpoint), "clean": ended})
    else:
        console().print(f"{mounted.mountpoint} is unmounted", soft_wrap=True)


def _not_mounted(target: Path) -> WrongUse:
    """Why there is nothing to unmount: it is the mountpoint of a node that is down, or of none."""
    for path in (target, Path(os.path.realpath(target))):
        if (place := local_node_of(path)) and place.mountpoint == path:
            if living := NodeProcesses(place.store).living():
                return WrongUse(f"{target} is not mounted, but processes {living} of {place.id} run: is it being started?")
            return WrongUse(f"{target} is not mounted: {place.id} is down; there is nothing to unmount")
    return WrongUse(f"{target} is no ckptfs mount")


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
