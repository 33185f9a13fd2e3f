"""Programs on other nodes that write files whose home is here (R5): their handles, and what they ask for, carried out once.

Such a handle is a *guest*. It counts as a writer, so nothing is sealed while it is open, and its file stays when its last name
goes. Bytes go into the segment's page cache, which the programs of this node read and write too (passthrough ends there); what
this kernel keeps of the file's attributes is taken from it while there are guests.

**Once.** A call that comes again, over whichever connection, is not carried out again (`noted_writes`). One that comes while it
is still being carried out waits for that.

**Not for ever.** A node that has not been heard of for `LEASE_SECONDS` counts as dead, and so do handles that it does not name
any more: a new mount process there goes on with its handles in a second or two.
"""

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from ckptfs.cache.errors import CacheError
from ckptfs.cache.ids import InodeNumber, StoreId
from ckptfs.cache.mount_db import GuestRow, MountDatabase
from ckptfs.fs.file_content import FileContent
from ckptfs.fs.files import FileOperations
from ckptfs.fs.fuse_errors import errno_of
from ckptfs.fs.home_calls import Call, unpack_handles
from ckptfs.fs.noted_writes import NotedWrites, WriteName
from ckptfs.fs.open_files import FileInUse, OpenFiles
from ckptfs.replication.peer_messages import HomeAnswer, HomeCall

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
LOOK_SECONDS = 5.0
OVER_MAX = 4096
"""More than come, from one node, while a process is frozen: a call is waited for half a minute at most."""
_CHANGE_BYTES = (Call.WRITE, Call.TRUNCATE, Call.ALLOCATE)


class _Name(NamedTuple):
    """A FUSE connection of another node's."""

    store: StoreId
    incarnation: int


@dataclass(slots=True)
class _Guest:
    """A handle of a program on another node. `opened_at`: trio's clock. `calls`: those under way that use it; it is let go when
    they are over, because its descriptor is theirs, and nothing is sealed before. `is_leaving`: no more of them begin."""

    file: FileInUse
    opened_at: float
    calls: set[int] = field(default_factory=set)
    is_leaving: bool = False


@dataclass(slots=True)
class _Connection:
    """What is known of one of them. `heard_at`: trio's clock. `over`: the calls whose programs have an answer, or an error."""

    heard_at: float
    guests: dict[int, _Guest] = field(default_factory=dict)
    under_way: dict[int, trio.Event] = field(default_factory=dict)
    over: deque[int] = field(default_factory=deque)


class WritersElsewhere:
    """The guests of one mount. `forget_attributes` has the kernel ask for an inode's attributes anew; may block."""

    def __init__(
        self,
        open_files: OpenFiles,
        database: MountDatabase,
        content: FileContent,
        files: FileOperations,
        noted: NotedWrites,
        forget_attributes: Callable[[InodeNumber], None] = lambda ino: None,
    ) -> None:
        self._open_files = open_files
        self._database = database
        self._content = content
        self._files = files
        self._noted = noted
        self._forget_attributes = forget_attributes
        self._connections: dict[_Name, _Connection] = {}

    def guest_count(self) -> int:
        return sum(len(connection.guests) for connection in self._connections.values())

    # Going on after a kill

    def restore(self) -> None:
        """Take up the handles that an earlier process gave out, of files that are still open: once, before anything is sealed."""
        for row in self._database.guests():
            file = self._open_files.get(row.ino)
            if file is None or not file.is_home:
                self._database.remove_guest(row)
                continue
            self._take_in(_Name(row.store, row.incarnation), row.fh, file)
        for (store, incarnation), over in self._noted.restore().items():
            self._connection(_Name(store, incarnation)).over.extend(sorted(over))

    def _connection(self, name: _Name) -> _Connection:
        connection = self._connections.get(name)
        if connection is None:
            connection = self._connections[name] = _Connection(trio.current_time())
        return connection

    def _take_in(self, name: _Name, fh: int, file: FileInUse) -> None:
        self._connection(name).guests[fh] = _Guest(file, trio.current_time())
        self._open_files.add_guest(file)

    # Calls

    async def call(self, store: StoreId, call: HomeCall, data: bytes) -> HomeAnswer:
        """Carry the call out, or find that it was. Raises nothing for what goes wrong with it."""
        name = _Name(store, call.incarnation)
        if any(other.store == store and other.incarnation > name.incarnation for other in self._connections):
            return HomeAnswer(errno.EIO, 0, "it comes from a mount of that node which is no more")
        connection = self._connection(name)  # from now on no call of an earlier one begins
        await self._end_earlier(name)
        connection.heard_at = trio.current_time()
        for number in call.answered:
            if (under_way := connection.under_way.get(number)) is not None:
                await under_way.wait()
            if number not in connection.over:
                self._noted.over(WriteName(*name, number))
                connection.over.append(number)
        while len(connection.over) > OVER_MAX:
            self._noted.forget_over(WriteName(*name, connection.over.popleft()))
        if call.unique in connection.over:
            # Its program got an error long ago, and has written since: this process, or an agent, was frozen meanwhile.
            return HomeAnswer(errno.EIO, 0, "the call comes too late")
        write = WriteName(*name, call.unique)
        while (under_way := connection.under_way.get(call.unique)) is not None:
            await under_way.wait()
        if call.call in _CHANGE_BYTES and (value := self._noted.outcome(write)) is not None:
            log.info("call_answered_again call=%d inode=%d", call.call, call.ino)
            return HomeAnswer(0, value, "")
        ended = connection.under_way[call.unique] = trio.Event()
        try:
            value = await self._carry_out(name, connection, call, data)
            if call.call in _CHANGE_BYTES and self._noted.outcome(write) is None:
                self._noted.done(write, value)
            return HomeAnswer(0, value, "")
        except Exception as error:
            return _failed(call, error)
        finally:
            del connection.under_way[call.unique]
            ended.set()

    async def _carry_out(self, name: _Name, connection: _Connection, call: HomeCall, data: bytes) -> int:
        match call.call:
            case Call.OPEN:
                await self._open(name, connection, call)
            case Call.JOIN:
                return await self._join(name, connection, call)
            case Call.WRITE:
                with _using(connection, call) as file:
                    return await self._write(name, file, call, data)
            case Call.TRUNCATE:
                await self._files.truncate(InodeNumber(call.ino), None, call.length)
                await self._tell_kernel(InodeNumber(call.ino))
            case Call.ALLOCATE:
                with _using(connection, call) as file:
                    await self._files.allocate(file, call.flags, call.offset, call.length)
            case Call.SYNC:
                with _using(connection, call) as file:
                    await self._files.sync_durably(file)
            case Call.CLOSE:
                await self._close(name, connection, call.fh)
            case Call.KEEP:
                await self._keep(name, connection, unpack_handles(data))
            case other:
                raise OSError(errno.EOPNOTSUPP, f"this node's release does not know the call {other}")
        return 0

    async def _open(self, name: _Name, connection: _Connection, call: HomeCall) -> None:
        if call.fh not in connection.guests:  # else it was opened, and the answer lost
            truncate = bool(call.flags & os.O_TRUNC)
            file = await self._content.for_writing(InodeNumber(call.ino), truncate=truncate)
            # Before anything waits: else it might be sealed.
            self._take_in(name, call.fh, file)
            self._database.put_guest(GuestRow(name.store, name.incarnation, call.fh, file.ino))
            if truncate:
                await self._files.voided(file)
            await self._tell_kernel(file.ino)
        if call.flags & os.O_DSYNC:
            with _using(connection, call) as file:
                await self._files.sync_durably(file)

    async def _join(self, name: _Name, connection: _Connection, call: HomeCall) -> int:
        file = self._open_files.get(InodeNumber(call.ino))
        if call.fh not in connection.guests and (file is None or not file.is_home or not file.handles):
            return 1
        await self._open(name, connection, call)
        return 0

    async def _write(self, name: _Name, file: FileInUse, call: HomeCall, data: bytes) -> int:
        descriptor = self._open_files.guest_descriptor(file)
        if call.flags & os.O_APPEND:
            written = await self._noted.append(WriteName(*name, call.unique), file.ino, descriptor, data)
        else:
            written = await trio.to_thread.run_sync(os.pwrite, descriptor, data, call.offset)
        if call.flags & os.O_DSYNC:
            await self._files.sync_durably(file)
        return written

    async def _tell_kernel(self, ino: InodeNumber) -> None:
        """Attributes that are asked for from now on may not be kept (`AttributeView`), those it has are void."""
        await trio.to_thread.run_sync(self._forget_attributes, ino, abandon_on_cancel=True)

    # The end of handles

    async def _close(self, name: _Name, connection: _Connection, fh: int) -> None:
        guest = connection.guests.get(fh)
        if guest is None:
            return
        guest.is_leaving = True
        for number in list(guest.calls):
            await connection.under_way[number].wait()
        if connection.guests.pop(fh, None) is None:
            return  # let go of by two at once
        file = guest.file
        self._database.remove_guest(GuestRow(name.store, name.incarnation, fh, file.ino))
        self._open_files.remove_guest(file)
        await self._files.after_close(file, wrote=True)

    async def _keep(self, name: _Name, connection: _Connection, handles: set[int]) -> None:
        """Those it does not name are nobody's: the program was killed while it opened, or the close was not heard."""
        before = trio.current_time() - LEASE_SECONDS
        for fh, guest in list(connection.guests.items()):
            if fh not in handles and guest.opened_at < before:
                log.info("ghost_of_another_node_closed store=%s inode=%d fh=%d", name.store.hex(), guest.file.ino, fh)
                await self._close(name, connection, fh)

    async def _end_earlier(self, name: _Name) -> None:
        """Its node has a new mount: nobody has what was open through the old one."""
        for other in [other for other in self._connections if other.store == name.store and other.incarnation < name.incarnation]:
            await self._end(other)

    async def _end(self, name: _Name) -> None:
        connection = self._connections.get(name)
        if connection is None:
            return
        if connection.guests:
            log.warning(
                "writer_away store=%s handles=%d: its node was not heard of; what it wrote is kept, its files are closed",
                name.store.hex(),
                len(connection.guests),
            )
        for fh in list(connection.guests):
            try:
                await self._close(name, connection, fh)
            except (CacheError, OSError) as error:
                log.warning("not_closed store=%s fh=%d error=%s", name.store.hex(), fh, error)
        if self._connections.pop(name, None) is not None:
            self._noted.forget(*name)

    async def run(self) -> None:
        """Let go of what nobody has any more, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Once."""
        before = trio.current_time() - LEASE_SECONDS
        for name, connection in list(self._connections.items()):
            if connection.heard_at < before and not connection.under_way:
                await self._end(name)


@contextlib.contextmanager
def _using(connection: _Connection, call: HomeCall) -> Iterator[FileInUse]:
    """The file of the call's handle, which stays open inside."""
    guest = connection.guests.get(call.fh)
    if guest is None or guest.is_leaving:
        raise OSError(
            errno.EIO,
            "the file's home lost its power, or did not hear of this node for a while, and closed the file: open it again",
        )
    guest.calls.add(call.unique)
    try:
        yield guest.file
    finally:
        guest.calls.discard(call.unique)


def _failed(call: HomeCall, error: Exception) -> HomeAnswer:
    number = errno_of(error)
    if number is None:
        log.exception("call_failed call=%d inode=%d", call.call, call.ino)
        number = errno.EIO
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return HomeAnswer(number, 0, message[:1000])
