"""What is looked at before a node mounts anything: what its processes would else only find while programs wait in the mount."""

import logging
import os
import re
import socket
from contextlib import closing

from ckptfs.cache.errors import DamagedData, StoreError
from ckptfs.cache.mount_db import CATALOG_FACT, MountDatabase
from ckptfs.cache.segments import Segments
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.sqlite_files import set_aside
from ckptfs.cache.store import StoreDirectory, sync_directory
from ckptfs.fs.agent_user import agent_user
from ckptfs.fs.config import ConfigurationError, NodeConfig
from ckptfs.fs.process_start import write_pid_file
from ckptfs.replication import small_copies

log = logging.getLogger(__name__)

PASSTHROUGH_SINCE = (6, 9)
"""The first Linux whose FUSE passes reads and writes through."""


def check_machine(config: NodeConfig) -> None:
    """What the configuration asks of this machine, without touching anything. Raises `ConfigurationError`,
    `CodecUnavailable`, `CertificateTrouble`."""
    if config.mount.passthrough == "on":
        if os.geteuid() != 0:
            raise ConfigurationError('mount.passthrough: "on" needs root; with "auto" the node serves more slowly without it')
        if (running := _kernel()) < PASSTHROUGH_SINCE:
            raise ConfigurationError(
                f'mount.passthrough: "on" needs Linux 6.9, this is {".".join(map(str, running))};'
                ' with "auto" the node serves more slowly without it'
            )
    if config.protection.codec == "isa-l":
        from ckptfs.replication.codec import choose_codec  # it brings numpy along, which this process never needs again

        choose_codec("isa-l")
    if config.tls.certificate:
        from ckptfs.fs.peer_transport import transport_of  # TLS takes memory that this process never needs again

        transport_of(config)
    _check_address(config.node.listen)
    agent_user(config.node.agent_user, b"", config.node.listen)  # before anything is mounted


def check_store(store: StoreDirectory) -> int:
    """Raises `StoreError` unless the node's processes can use the store, which is locked. A damaged `mount.db` is set aside.

    Returns a revision that the catalog has had, 0 if none is known.
    """
    try:
        for directory in (store.path, store.shards):  # made, perhaps, by a process that was killed before it synced them
            sync_directory(directory)
        write_pid_file(store.run, "supervisor")
    except OSError as error:
        raise StoreError(f"the store {store.path} can't be written to: {error.strerror}; nothing was mounted") from None
    small_copies.check_format(store.small_copies_db)
    Segments(store.segments).check_usable()
    try:
        set_back = SetBackMark(store.store_id, store.uses).was_set_back()
        with closing(MountDatabase(store.mount_db, was_set_back=set_back)) as database:
            return int(database.fact(CATALOG_FACT) or 0)
    except DamagedData as damage:
        log.error("mount_db_set_aside as=%s: %s", set_aside(store.mount_db), damage)
        return 0


def _check_address(listen: str) -> None:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ConfigurationError(
                f"node.listen: {listen} can't be used: {error.strerror}; port 0 takes any that is free"
            ) from None


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
