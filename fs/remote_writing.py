"""What programs here write into files whose home is another node: each request goes there as a call, and returns when the home
has it (R5).

Nothing is kept here. The kernel has no pages of what is written so (`FOPEN_DIRECT_IO`), and a call that got no answer is made
again under the number of its request: the home carries it out once. When the home does not answer in time the program gets EIO.
The home lets go of handles it has not heard of for a while, so it is told of those that are open now and then.
"""

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import trio

from ckptfs.cache.errors import HeldElsewhere
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.home_calls import JOIN_SECONDS_MAX, Call, as_message, pack_handles, seconds_max
from ckptfs.fs.open_files import FileInUse, Handle, OpenFiles
from ckptfs.fs.remote_content import AGENT_SECONDS_MAX, RemoteContent
from ckptfs.replication.peer_messages import ANSWERED_MAX, HomeCall

log = logging.getLogger(__name__)

KEEP_SECONDS = 10.0
"""A sixth of the time after which a home lets go."""


class RemoteWriting:
    """One mount's calls. All methods raise `ContentUnreachable` where the home does not answer, `HeldElsewhere` where it is the
    home no longer, and the `OSError` that the home had."""

    def __init__(self, open_files: OpenFiles, content: RemoteContent, incarnation: int) -> None:
        self._open_files = open_files
        self._content = content
        self._incarnation = incarnation
        self._called: dict[int, StoreId] = {}
        self._answered: defaultdict[StoreId, list[int]] = defaultdict(list)

    async def open(self, home: StoreId, ino: InodeNumber, unique: int, flags: int) -> None:
        """Have a handle at the home, which has the number of the request and is the program's from now on."""
        await self._call(home, HomeCall(Call.OPEN, self._incarnation, unique, ino, unique, flags=flags & 0xFFFFFFFF))

    async def join(self, home: StoreId, ino: InodeNumber, unique: int, flags: int) -> bool:
        """As `open`, if programs of the node that has the bytes have the file open; whether they have. A node that is away, hangs
        or can't open it is none of whose programs count."""
        call = HomeCall(Call.JOIN, self._incarnation, unique, ino, unique, flags=flags & 0xFFFFFFFF)
        with trio.move_on_after(JOIN_SECONDS_MAX):
            try:
                return await self._call(home, call, wait_seconds=0.0) == 0
            except (ContentUnreachable, HeldElsewhere, OSError) as error:
                log.info("home_not_asked inode=%d: %s", ino, error)
        return False

    async def write(self, handle: Handle, unique: int, data: memoryview, offset: int, flags: int) -> int:
        """Bytes written, at the offset or, where the flags say O_APPEND, at the end."""
        flags &= os.O_APPEND | os.O_DSYNC
        call = self._of(handle, Call.WRITE, unique, offset=offset, flags=flags)
        return await self._call(self._home(handle.file), call, data)

    async def truncate(self, home: StoreId, ino: InodeNumber, unique: int, size: int) -> None:
        await self._call(home, HomeCall(Call.TRUNCATE, self._incarnation, unique, ino, length=size))

    async def allocate(self, handle: Handle, unique: int, mode: int, offset: int, length: int) -> None:
        call = self._of(handle, Call.ALLOCATE, unique, offset=offset, length=length, flags=mode)
        await self._call(self._home(handle.file), call)

    async def sync(self, handle: Handle, unique: int) -> None:
        """What fsync promises."""
        await self._call(self._home(handle.file), self._of(handle, Call.SYNC, unique))

    async def close(self, home: StoreId, ino: InodeNumber, fh: int, unique: int) -> None:
        """The handle is let go. A home that does not hear it does so later, by itself."""
        try:
            await self._call(home, HomeCall(Call.CLOSE, self._incarnation, unique, ino, fh))
        except (ContentUnreachable, HeldElsewhere, OSError) as error:
            log.info("home_not_told inode=%d fh=%d: it lets go by itself: %s", ino, fh, error)

    def answered(self, unique: int) -> None:
        """The kernel has the answer to this request: its home may forget it."""
        home = self._called.pop(unique, None)
        if home is not None:
            self._answered[home].append(unique)

    async def run(self) -> None:
        """Tell the homes what is open, until cancelled."""
        while True:
            await trio.sleep(KEEP_SECONDS)
            await self.keep()

    async def keep(self) -> None:
        """Once."""
        handles: defaultdict[StoreId, list[int]] = defaultdict(list)
        for handle in self._open_files.handles_elsewhere():
            if handle.file.remote is not None:  # else it was found gone after a restart
                handles[handle.file.remote.home].append(handle.fh)
        homes = set(handles) | {home for home, answered in self._answered.items() if answered}
        async with trio.open_nursery() as nursery:
            for home in homes:
                nursery.start_soon(self._keep_at, home, handles[home])

    async def _keep_at(self, home: StoreId, handles: Iterable[int]) -> None:
        """One that hangs is given up soon, for the sake of the others: they let go of what they aren't told of."""
        try:
            with trio.move_on_after(KEEP_SECONDS):
                await self._call(home, HomeCall(Call.KEEP, self._incarnation, 0), pack_handles(handles))
        except (ContentUnreachable, HeldElsewhere, OSError) as error:
            log.info("home_not_told store=%s: %s", home.hex(), error)

    def _of(self, handle: Handle, call: Call, unique: int, *, offset: int = 0, length: int = 0, flags: int = 0) -> HomeCall:
        return HomeCall(call, self._incarnation, unique, handle.file.ino, handle.fh, offset, length, flags)

    @staticmethod
    def _home(file: FileInUse) -> StoreId:
        if file.remote is None:
            raise ContentUnreachable(f"the home of inode {file.ino} is not known any more: open the file again")
        return file.remote.home

    async def _call(
        self, home: StoreId, call: HomeCall, data: memoryview | bytes = b"", wait_seconds: float | None = None
    ) -> int:
        """Make the call, again and again until it is answered or the time is over; the answer's value."""
        if call.unique:
            self._called[call.unique] = home
        answered, self._answered[home] = self._answered[home][:ANSWERED_MAX], self._answered[home][ANSWERED_MAX:]
        call = msgspec.structs.replace(call, answered=answered)
        try:
            limit_seconds = max(AGENT_SECONDS_MAX, seconds_max(call.call) + 10)
            message = as_message(call, data)
            answer = await self._content.call_home(home, InodeNumber(call.ino), message, limit_seconds, wait_seconds)
        except BaseException:
            self._answered[home] += answered
            raise
        if answer.errno == errno.EBUSY:
            raise HeldElsewhere(answer.message)
        if answer.errno:
            raise OSError(answer.errno, answer.message)
        return answer.value
