"""The node's FUSE connection: made with the mount, or taken over from an earlier supervisor that could not end it.

A connection lives as long as somebody holds its descriptor: the mount process, the supervisor, and where there is one the service
manager, for whom the descriptor has a name. The name says which mount and which incarnation it belongs to.
"""

import logging
import os
import re
import select
from pathlib import Path
from typing import NamedTuple

from ckptfs.fs import fuse_device, fusermount, service_manager
from ckptfs.fs.config import NodeConfig
from ckptfs.fs.fusermount import CONFIGURATION
from ckptfs.fs.mount_table import abort_connection, mounts_at

log = logging.getLogger(__name__)

READ_AHEAD_BYTES = 8 << 20
"""Two stripes of 4+2 cells of 1 MiB: while one is read, the next is fetched."""
_NAME = re.compile(r"fuse-(\d+)-(\d+)")


class Connection(NamedTuple):
    """`device` is the descriptor. `incarnation` is the supervisor's that made the mount: handles and requests belong to it.
    `name` is what a service manager knows the descriptor by."""

    device: int
    incarnation: int
    name: str


def new_connection(config: NodeConfig, incarnation: int) -> Connection:
    """Mount. Raises `MountError`."""
    device = fuse_device.mount(config.mountpoint, config.store, allow_other=_lets_others_in(config))
    fuse_device.set_read_ahead(config.mountpoint, READ_AHEAD_BYTES)
    name = f"fuse-{mounts_at(config.mountpoint)[-1].device[1]}-{incarnation}"
    if service_manager.notify("FDSTORE=1", f"FDNAME={name}", descriptors=[device]):
        log.info("connection_kept_by_service_manager name=%s", name)
    return Connection(device, incarnation, name)


def _lets_others_in(config: NodeConfig) -> bool:
    if config.mount.allow_other and os.geteuid() != 0 and not fusermount.may_allow_other():
        log.warning("mount_for_its_user_only mountpoint=%s: %s has no line user_allow_other", config.mountpoint, CONFIGURATION)
        return False
    return config.mount.allow_other


def kept_connection(mountpoint: Path, store: Path) -> Connection | None:
    """The connection an earlier supervisor of this store had when it was killed, if the service manager kept it and it lives."""
    found = None
    mounted = mounts_at(mountpoint)
    for name, device in service_manager.kept_descriptors().items():
        match = _NAME.fullmatch(name)
        belongs = match and mounted and mounted[-1].store == store and mounted[-1].device[1] == int(match[1])
        if match and belongs and _is_alive(device) and found is None:
            found = Connection(device, int(match[2]), name)
            continue
        os.close(device)
        service_manager.notify("FDSTOREREMOVE=1", f"FDNAME={name}")
    return found


def forget_connection(connection: Connection) -> None:
    """The mount ends with this process: nobody is to take it over."""
    service_manager.notify("FDSTOREREMOVE=1", f"FDNAME={connection.name}")


def clean_stale_mount(mountpoint: Path, store: Path) -> None:
    """Take away a mount that an earlier supervisor left when it was killed: its connection is dead, programs get ENOTCONN."""
    for mounted in reversed(mounts_at(mountpoint)):
        if mounted.store == store:
            log.warning(
                "stale_mount_removed mountpoint=%s: the supervisor was killed; programs that had files open there got errors,"
                " what they had closed or synced is safe",
                mounted.mountpoint,
            )
            abort_connection(mounted)
            fuse_device.unmount(mounted.mountpoint, lazily=True)


def _is_alive(device: int) -> bool:
    poll = select.poll()
    poll.register(device, 0)
    return not poll.poll(0)  # an ended connection polls as an error
