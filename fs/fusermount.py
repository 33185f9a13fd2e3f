"""Mounting and unmounting for users who are not root, through fusermount3(1): it is set-user-id root, mounts for its caller, and
hands the connection's descriptor over on a socket.

Others than the mount's owner, root among them, can use such a mount only if the machine's administrator allows it: with a line
`user_allow_other` in /etc/fuse.conf.
"""

import fcntl
import os
import socket
import subprocess
from pathlib import Path

PROGRAM = "fusermount3"
DEVICE = Path("/dev/fuse")
CONFIGURATION = Path("/etc/fuse.conf")


class FusermountFailed(Exception):
    """What fusermount3 says, or that it isn't there."""


def may_allow_other() -> bool:
    """Whether ordinary users may let others use their mounts on this machine."""
    try:
        lines = CONFIGURATION.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.partition("#")[0].strip() == "user_allow_other" for line in lines)


def mount(mountpoint: Path, source: str, subtype: str, *, allow_other: bool) -> int:
    """Mount, and return the connection's descriptor, which is the caller's. Raises `FusermountFailed`."""
    escaped = source.replace("\\", "\\\\").replace(",", "\\,")
    options = f"fsname={escaped},subtype={subtype},default_permissions,nosuid,nodev,noatime"
    if allow_other:
        options += ",allow_other"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            environment = os.environ | {"_FUSE_COMMFD": str(theirs.fileno())}
            _run(["-o", options, "--", os.fspath(mountpoint)], environment, (theirs.fileno(),))
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise FusermountFailed(f"{PROGRAM} mounted, but handed no descriptor over")
    os.set_inheritable(descriptors[0], False)
    fcntl.fcntl(descriptors[0], fcntl.F_SETFL, fcntl.fcntl(descriptors[0], fcntl.F_GETFL) | os.O_NONBLOCK)
    return descriptors[0]


def unmount(mountpoint: Path, *, lazily: bool) -> None:
    """Raises `FusermountFailed`."""
    _run(["-u", *(["-z"] if lazily else []), "--", os.fspath(mountpoint)])


def _run(arguments: list[str], environment: dict[str, str] | None = None, descriptors: tuple[int, ...] = ()) -> None:
    command = [PROGRAM, *arguments]
    try:
        done = subprocess.run(
            command, env=environment, pass_fds=descriptors, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise FusermountFailed(
            f"{PROGRAM}, with which ordinary users mount, can't be run ({error.strerror}): install fuse3, or run as root"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or f"{PROGRAM} failed with status {done.returncode}"
        closed = os.path.exists(DEVICE) and not os.access(DEVICE, os.R_OK | os.W_OK)
        raise FusermountFailed(said + (f"; all users need it to mount: chmod 666 {DEVICE}, or run as root" if closed else ""))
