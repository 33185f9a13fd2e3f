"""Who has a file of the mount open, as the kernel knows it: asked with a lease on the file itself, through the mount.

In the served lane no lease on the segment tells, because the mount process does all that is done there. But the kernel counts who
has the mount's own inodes open, before it asks for an OPEN and until after it sends RELEASE, and grants leases by it. The file is
opened by a child process, since a process that answers for a mount must not wait for it, and by a name that only this child can
look up, since the file may have none any more.
"""

import contextlib
import enum
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio

from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber
from ckptfs.cache.segments import has_no_other_user, has_no_writer
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler

ANSWER_SECONDS_MAX = 60.0
NAME_BEGINS = ".ckptfs-inode-"


class Use(enum.IntEnum):
    """What programs have a file open for, at most."""

    NONE = 0
    READING = 1
    WRITING = 2


class KernelUse:
    """Asks for one mount. `entry` answers a LOOKUP of an inode, also of a nameless one."""

    def __init__(self, mountpoint: Path, entry: Callable[[InodeNumber], Awaitable[bytes]]) -> None:
        self._mountpoint = mountpoint
        self._entry = entry
        self._child: int | None = None

    def answering(self, handlers: dict[int, Handler]) -> dict[int, Handler]:
        """The handlers; the child gets the inodes that it looks up."""
        lookup = handlers[Opcode.LOOKUP]

        async def look_up(header: RequestHeader, body: memoryview) -> Answer | None:
            if header.pid == self._child and header.nodeid == ROOT_INODE:
                name = bytes(body[:-1]).decode(errors="replace")
                if name.startswith(NAME_BEGINS):
                    return await self._entry(InodeNumber(int(name.removeprefix(NAME_BEGINS))))
                raise NoSuchName(name)
            return await lookup(header, body)

        return handlers | {Opcode.LOOKUP: look_up}

    async def of(self, inos: Sequence[InodeNumber]) -> dict[InodeNumber, Use]:
        """By inode, as far as it can be told. The mount must answer meanwhile; one call at a time."""
        command = [sys.executable, "-P", "-m", "ckptfs.fs.kernel_use", os.fspath(self._mountpoint), *map(str, inos)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd="/", text=True)
        self._child = child.pid
        output = ""
        try:
            with trio.move_on_after(ANSWER_SECONDS_MAX):
                output, _ = await trio.to_thread.run_sync(child.communicate, abandon_on_cancel=True)
        finally:
            self._child = None
            child.kill()  # if it waits for this mount, it can't be waited for
        lines = (line.split() for line in output.splitlines())
        return {InodeNumber(int(ino)): Use(int(use)) for ino, use in lines}


def use_of(descriptor: int) -> Use:
    """What others have the file open, or mapped, for. `descriptor` is read-only, the only one of ours. Raises `OSError`."""
    if has_no_other_user(descriptor):
        return Use.NONE
    return Use.READING if has_no_writer(descriptor) else Use.WRITING


def main() -> None:
    """The child: a line with the inode and the number of its use for each that can be told."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # of leases that somebody waits for
    mountpoint, *inos = sys.argv[1:]
    for ino in inos:
        with contextlib.suppress(OSError):  # it is gone or may not be opened, or there are no leases for this user
            descriptor = os.open(f"{mountpoint}/{NAME_BEGINS}{ino}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                print(ino, use_of(descriptor).value)
            finally:
                os.close(descriptor)


if __name__ == "__main__":
    main()
