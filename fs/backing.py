"""Backing files: what the kernel reads and writes directly in the passthrough lane.

A registration is made from a read-only descriptor: the kernel opens the file again with each program's own flags, and one
made from a descriptor open for writing would hold a write count for ever, so that no lease test could succeed. One id an
inode: registering a file twice gives EIO to programs while it is open. Ids live as long as the connection, so they are
recorded in `mount.db` and known to the next daemon.
"""

import contextlib
import fcntl
import struct

from ckptfs.fs.fuse_format import BACKING_MAP, FUSE_DEV_IOC_BACKING_CLOSE, FUSE_DEV_IOC_BACKING_OPEN

_BACKING_ID = struct.Struct("<I")


class BackingFiles:
    """Registers backing files with one FUSE connection. Needs CAP_SYS_ADMIN."""

    def __init__(self, device: int) -> None:
        self._device = device

    def register(self, descriptor: int) -> int:
        """The kernel's id for the file; valid until `close`, also after the descriptor is closed.

        Raises `OSError`: EPERM without the capability, EOPNOTSUPP or ENOTTY without passthrough, ELOOP when the store's file
        system is itself stacked too deep.
        """
        argument = bytearray(BACKING_MAP.pack(descriptor, 0, 0))  # mutable: only then is the ioctl's result returned
        backing_id: int = fcntl.ioctl(self._device, FUSE_DEV_IOC_BACKING_OPEN, argument, True)
        return backing_id

    def close(self, backing_id: int) -> None:
        """Give an id back; open files go on. An id the kernel doesn't know any more is no error."""
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._device, FUSE_DEV_IOC_BACKING_CLOSE, _BACKING_ID.pack(backing_id))
