"""When a mount whose catalog is read from a replica asks the catalog itself before it answers (R6).

A replica lags by the way of an event. What a transaction compares is found out by that; a stat of a known name may be as old. But
who opens a file or a directory, and whoever would be told that something isn't there, or is there already, is answered by what
every node has committed before the question.

A lookup may be as old, too; the open that follows it names the inode only. Where the name leads elsewhere by then, that open
would be of a file that was moved away (and would empty it, with O_TRUNC): so the name is read again behind the barrier, and the
kernel told to look it up again (ESTALE, which the program doesn't see).
"""

from collections import OrderedDict

from ckptfs.cache.catalog_format import DirectoryEntry, entry_key, unpack
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import HeldElsewhere, NameMoved, NamespaceError, NoSuchAttribute
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler

ASK_FIRST = frozenset({Opcode.OPEN, Opcode.OPENDIR})
NEVER_ASK = frozenset(
    {
        Opcode.READ,
        Opcode.WRITE,
        Opcode.FLUSH,
        Opcode.RELEASE,
        Opcode.RELEASEDIR,
        Opcode.FORGET,
        Opcode.BATCH_FORGET,
        Opcode.INTERRUPT,
        Opcode.STATFS,
    }
)

REMEMBERED_MAX = 16_384


NAMES_MAX = 8
"""Of one inode; one with more that are opened at a time loses the oldest."""


class NamesLookedUp:
    """By which names each inode was looked up: of the newest `REMEMBERED_MAX`. All of its names, for an open does not say which
    of them it is of."""

    def __init__(self, kv: KeyValue) -> None:
        self._kv = kv
        self._keys: OrderedDict[InodeNumber, tuple[bytes, ...]] = OrderedDict()

    def note(self, directory: InodeNumber, name: bytes, ino: InodeNumber) -> None:
        key = entry_key(directory, name)
        known = self._keys.get(ino, ())
        self._keys[ino] = (*(other for other in known if other != key), key)[-NAMES_MAX:] if known else (key,)
        self._keys.move_to_end(ino)
        if len(self._keys) > REMEMBERED_MAX:
            self._keys.popitem(last=False)

    def names_of(self, ino: InodeNumber) -> tuple[bytes, ...]:
        """The keys of those names."""
        return self._keys.get(ino, ())

    async def require(self, ino: InodeNumber, keys: tuple[bytes, ...]) -> None:
        """Raises `NameMoved` if one of these names leads elsewhere by now. Whoever opens it by a name it still has, or without
        one (/proc/self/fd), is not told so again."""
        entries = await self._kv.get_many(keys) if keys else []
        left = {entry.key for entry in entries if entry is not None and unpack(DirectoryEntry, entry.value).ino == ino}
        if gone := set(keys) - left:
            if ino in self._keys:
                self._keys[ino] = tuple(key for key in self._keys[ino] if key not in gone)
            raise NameMoved(f"inode {ino} was moved away or replaced since its name was looked up")


def behind_barrier(handlers: dict[int, Handler], kv: KeyValue) -> dict[int, Handler]:
    """The same handlers, which catch up with the catalog where they have to. A refusal had no effect: it is asked again."""
    guarded = {opcode: _guarded(handler, kv, opcode in ASK_FIRST, opcode in NEVER_ASK) for opcode, handler in handlers.items()}
    names = NamesLookedUp(kv)
    if Opcode.LOOKUP in guarded:
        guarded[Opcode.LOOKUP] = _noting(guarded[Opcode.LOOKUP], names)
    if Opcode.OPEN in guarded:
        guarded[Opcode.OPEN] = _requiring(handlers[Opcode.OPEN], kv, names)
    return guarded


def _noting(handler: Handler, names: NamesLookedUp) -> Handler:
    """A lookup, whose answer is remembered."""

    async def noted(header: RequestHeader, body: memoryview) -> Answer | None:
        name = bytes(body[:-1])
        answer = await handler(header, body)
        if answer:
            names.note(InodeNumber(header.nodeid), name, InodeNumber(fuse.ENTRY_OUT.unpack_from(answer)[0]))
        return answer

    return noted


def _requiring(handler: Handler, kv: KeyValue, names: NamesLookedUp) -> Handler:
    """An open of what was looked up."""

    async def open_what_was_named(header: RequestHeader, body: memoryview) -> Answer | None:
        ino = InodeNumber(header.nodeid)
        keys = names.names_of(ino)  # of all the opens that wait for the barrier together, any may be by the name that moved
        await kv.catch_up()
        await names.require(ino, keys)
        return await handler(header, body)

    return open_what_was_named


def _guarded(handler: Handler, kv: KeyValue, asks_first: bool, never_asks: bool) -> Handler:
    if never_asks:
        return handler

    async def handle(header: RequestHeader, body: memoryview) -> Answer | None:
        if asks_first:
            await kv.catch_up()
            return await handler(header, body)
        try:
            return await handler(header, body)
        except (NoSuchAttribute, HeldElsewhere):
            raise
        except NamespaceError:
            await kv.catch_up()
        return await handler(header, body)

    return handle
