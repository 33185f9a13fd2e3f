"""Room on the node's drives: what is left for new data, and what is kept back for deleting and starting on a full drive.

Two things are kept back: a reserve file in the store, given up when a process of the node starts on a full drive, and the room
the catalog's files hold. While either is not whole, or next to nothing is free, new names are refused with ENOSPC; everything
else goes on. What deleting frees makes the reserve whole first.
"""

import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import trio

from ckptfs.cache.drive_refusal import refuses_writes
from ckptfs.cache.refusal_mark import RefusalMark
from ckptfs.cache.reserve import Reserve, Room, room_at, share_of
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler

log = logging.getLogger(__name__)

MIB = 1 << 20
FLOOR_BYTES = MIB
"""With less than this new names are refused: between the look and the commit, writers in the passthrough lane go on."""

FLOOR_INODES = 16
LOOK_SECONDS = 0.01
"""How long a look at the drives holds. Looking takes some microseconds, making a file some hundred."""

MEND_SECONDS = 1.0
MAKES_NAMES = (Opcode.CREATE, Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK, Opcode.SETXATTR, Opcode.TMPFILE)


def store_reserve(store: StoreDirectory) -> Reserve:
    """The store's reserve: pid files, sockets and databases of three processes take less than 1 MiB."""
    return Reserve(store.reserve, share_of(store.path, 1 / 64, MIB, 8 * MIB))


def catalog_reserve_bytes(catalog: Path) -> int:
    """How much the catalog's log is to hold: removing a name takes some 30 KiB of it until the log begins anew."""
    return share_of(catalog.parent, 1 / 32, MIB, 32 * MIB) if catalog.parent.is_dir() else 0


def make_room_to_start(reserve: Reserve) -> None:
    """Before a process of the node starts: give the reserve up on a full drive, make it on any other."""
    try:
        room = room_at(reserve.path.parent)
        if room.free_bytes >= reserve.size_bytes and room.free_inodes >= FLOOR_INODES:
            reserve.make()
        elif reserve.lacking_bytes() < reserve.size_bytes:
            reserve.give_up()
            log.warning(
                "reserve_given_up free=%d free_inodes=%d: the drive is full, the node starts in its reserve; delete files",
                room.free_bytes,
                room.free_inodes,
            )
    except OSError as error:
        log.warning("reserve_not_made path=%s error=%s", reserve.path, error)


class CatalogRoom(Protocol):
    """What a catalog on one of this machine's drives says of its file, and does to have room for a full drive."""

    @property
    def path(self) -> str: ...

    def hold_room(self) -> int:
        """Returns the bytes that lack."""
        ...


class Space:
    """The mount's view of its drives. `run` mends what was given up; a message in `shortage` says why new names are refused.

    `all_started`: whether all of the node's processes have started. Until then what was given up is theirs."""

    def __init__(
        self,
        store: Path,
        reserve: Reserve,
        catalog: CatalogRoom | None,
        all_started: Callable[[], Awaitable[bool]],
        mark: RefusalMark,
    ) -> None:
        """`catalog` is None where it doesn't lie on this machine."""
        self._store = store
        self._reserve = reserve
        self._catalog = catalog
        self._all_started = all_started
        self._mark = mark
        self._catalog_directory = None if catalog is None else os.path.dirname(os.path.abspath(catalog.path))
        self._catalog_lacks = 0
        self._look_at = 0.0
        self._room = room_at(store)
        self._said = ""
        self.shortage = ""
        self.refusal = ""
        """Why the store's drive takes no writes any more: a word of the system, or nothing."""

    def guarded(self, handlers: dict[int, Handler], was_carried_out: Callable[[int], bool]) -> dict[int, Handler]:
        """The handlers, those that make new names only while there is room, or `was_carried_out` knows the request's number."""
        return handlers | {opcode: self._guard(handlers[opcode], was_carried_out) for opcode in MAKES_NAMES}

    def _guard(self, handler: Handler, was_carried_out: Callable[[int], bool]) -> Handler:
        def handle(header: RequestHeader, body: memoryview) -> Awaitable[Answer | None]:
            if (self.shortage or time.monotonic() >= self._look_at) and not was_carried_out(header.unique):
                self.require_room()
            return handler(header, body)

        return handle

    def require_room(self) -> None:
        """Raise `OSError` (ENOSPC) if nothing new may be made."""
        if time.monotonic() >= self._look_at:
            self.look()
        if self.shortage:
            raise OSError(errno.ENOSPC, self.shortage)

    def look(self) -> None:
        """Look at the drives now."""
        self._room = room_at(self._store)
        before, self.shortage = self.shortage, self._shortage()
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self.shortage and not before:
            log.warning("drive_full %s", self.shortage)
        elif before and not self.shortage:
            log.info("drive_has_room_again")

    def withheld_bytes(self) -> int:
        """What of the store's free space is not for new data: the reserve comes first."""
        return self._reserve.lacking_bytes()

    def _shortage(self) -> str:
        looked_at: list[tuple[str | Path, Room, int, str]] = [
            (self._store, self._room, self._reserve.lacking_bytes(), "the store")
        ]
        if (directory := self._catalog_directory) is not None:
            looked_at.append((directory, room_at(directory), self._catalog_lacks, "the catalog"))
        for path, room, lacks, what in looked_at:
            if room.free_bytes - lacks < FLOOR_BYTES:
                in_use = f"and the reserve lacks {lacks >> 10} KiB" if lacks else "and the reserve is whole"
                return f"the drive of {what} ({path}) is full: {room.free_bytes >> 10} KiB free, {in_use}; delete files"
            if room.free_inodes < FLOOR_INODES:
                return f"the drive of {what} ({path}) has {room.free_inodes} inodes left; delete files"
        return ""

    async def run(self) -> None:
        """Make whole what was given up, as soon as there is room, until cancelled."""
        while True:
            await self.keep()
            await trio.sleep(MEND_SECONDS)

    async def keep(self) -> None:
        """Once: look at the drives, and make whole what was given up, unless a process that starts may need it. Where the
        reserve is whole none does: then the catalog has its room before programs can take the last blocks."""
        refusal = await trio.to_thread.run_sync(refuses_writes, self._store)
        if refusal and not self.refusal:
            log.error("store_takes_no_writes path=%s reason=%s", self._store, refusal)
        self.refusal = refusal
        if refusal:
            self._mark.set()
        elif self._mark.was_unmounted() is False:
            self._mark.clear()
        try:
            if not refusal and (not self._reserve.lacking_bytes() or await self._all_started()):
                await trio.to_thread.run_sync(self.mend)
            self.look()
        except OSError as error:
            if self._said != str(error):
                self._said = str(error)
                log.warning("reserve_not_made error=%s", error)

    def mend(self) -> None:
        """Blocks shortly. Raises `OSError` for a drive that is broken rather than full."""
        self._reserve.make()
        if self._catalog is not None:
            self._catalog_lacks = self._catalog.hold_room()

    def status(self) -> dict[str, Any]:
        """What `ckptfs status` shows, as of the last look. Sizes in bytes."""
        room = self._room
        return {
            "free_bytes": room.free_bytes,
            "total_bytes": room.total_bytes,
            "free_inodes": room.free_inodes,
            "reserve_bytes": self._reserve.size_bytes,
            "reserve_lacks_bytes": self._reserve.lacking_bytes(),
            "catalog_reserve_lacks_bytes": self._catalog_lacks,
            "shortage": self.shortage,
        }
