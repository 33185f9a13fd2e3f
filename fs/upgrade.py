"""A running node goes on with another release: what is handed from one to the next, and the order of it.

1. `ckptfs node upgrade`, run by the new release, writes the request into the store's `run/` and sends SIGHUP to the supervisor.
2. The supervisor starts the new release's mount process, which gets everything ready that can be, checks that it can serve this
   connection, says so, and waits for its turn. It opens the node's databases beside the old one, so opening them must change
   nothing that the old one needs. If it ends instead, or takes too long, nothing has changed.
3. The old mount process is killed, which programs don't notice (R7): the new one asks the kernel for what was not answered.
4. The agent is ended and started anew.
5. The supervisor becomes the new release's by execve(2): the same process, with the same children, descriptors and configuration.
"""

import os
import signal
import socket
from pathlib import Path

import msgspec
import trio

from ckptfs.fs.connection import Connection

REQUEST_NAME = "upgrade.json"
HANDED_OVER_VARIABLE = "CKPTFS_HANDED_OVER"
READY = b"ready"
GO = b"go"
TAKE_OVER_SECONDS = 60.0
"""How long a new release's mount process may take to get ready while the old one serves."""


class CannotTakeOver(Exception):
    """The other release can't serve this node; the message says why. The old one goes on."""


class UpgradeRequest(msgspec.Struct, frozen=True):
    """`run/upgrade.json`: `python` is the new release's interpreter. `error` is why it was not done; the file goes when it is."""

    python: str
    version: str
    error: str = ""


class HandedOver(msgspec.Struct, frozen=True):
    """What an earlier image of the supervisor hands to the next: descriptors, and the pids of the children by their role."""

    connection: Connection
    lock: int
    children: dict[str, int]


def read_request(run: Path) -> UpgradeRequest | None:
    """The request, or None if there is none that makes sense."""
    try:
        return msgspec.json.decode((run / REQUEST_NAME).read_bytes(), type=UpgradeRequest)
    except (OSError, msgspec.DecodeError):
        return None


def write_request(run: Path, request: UpgradeRequest) -> None:
    temporary = run / f"{REQUEST_NAME}.new"
    temporary.write_bytes(msgspec.json.encode(request))
    temporary.rename(run / REQUEST_NAME)


def remove_request(run: Path) -> None:
    (run / REQUEST_NAME).unlink(missing_ok=True)


async def refusal_of(mount: socket.socket) -> str:
    """In the supervisor: wait for the new mount process to say that it is ready; why not, or ""."""
    with trio.move_on_after(TAKE_OVER_SECONDS) as waiting:
        await trio.lowlevel.wait_readable(mount)
    if waiting.cancelled_caught:
        return f"its mount process was not ready after {TAKE_OVER_SECONDS:.0f} s"
    said = mount.recv(4096)
    if said == READY:
        return ""
    return said.decode(errors="replace") or "its mount process did not start; mount.log says why"


def wait_for_turn(descriptor: int, refusal: str) -> None:
    """In the new mount process: say that it is ready, or why it can't take over, and return when it may; else it ends."""
    with socket.socket(fileno=descriptor) as supervisor:
        supervisor.sendall(refusal.encode() or READY)
        if supervisor.recv(len(GO)) != GO:
            raise SystemExit(1)


def become(python: str, config: int, handed: HandedOver) -> None:
    """Turn this process into the other release's supervisor; `config` is the descriptor children are handed. Returns only by
    raising `OSError`."""
    for descriptor in (handed.connection.device, handed.lock, config):
        os.set_inheritable(descriptor, True)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the new program listens: another request must not end it
    environment = os.environ | {HANDED_OVER_VARIABLE: msgspec.json.encode(handed).decode()}
    os.execve(python, [python, "-P", "-m", "ckptfs.fs.supervisor", str(config)], environment)


def handed_over() -> HandedOver | None:
    """What an earlier image of this process left for this one."""
    text = os.environ.pop(HANDED_OVER_VARIABLE, None)
    if text is None:
        return None
    handed = msgspec.json.decode(text, type=HandedOver)
    for descriptor in (handed.connection.device, handed.lock):
        os.set_inheritable(descriptor, False)
    return handed
