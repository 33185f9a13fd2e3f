"""The service manager's side of the supervisor: systemd keeps the FUSE connection's descriptor while the supervisor is dead.

The protocol is that of sd_notify(3) and sd_listen_fds(3): datagrams to the socket in `NOTIFY_SOCKET`, descriptors beside them;
after a restart the kept ones are 3, 4, … with their names in `LISTEN_FDNAMES`. Without a service manager nothing happens.
"""

import array
import contextlib
import logging
import os
import socket
from collections.abc import Sequence

log = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3


def notify(*assignments: str, descriptors: Sequence[int] = ()) -> bool:
    """Tell the service manager, such as `READY=1`; whether there is one that could be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        try:
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendmsg(["\n".join(assignments).encode()], rights)
        except OSError as error:
            log.warning("service_manager_not_told what=%s error=%s", assignments[0], error)
            return False
    return True


def kept_descriptors() -> dict[str, int]:
    """The descriptors the service manager kept for this process, by name; the caller's from now on. Gives them once."""
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    kept = {}
    for name, descriptor in zip(names, range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)), strict=False):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
            kept[name] = descriptor
    return kept
