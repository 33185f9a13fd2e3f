"""When a mount whose catalog is read from a replica asks the catalog itself before it answers (R6).

A replica lags by the way of an event. What a transaction compares is found out by that; a stat of a known name may be as old. But
who opens a file or a directory, and whoever would be told that something isn't there, or is there already, is answered by what
every node has committed before the question.

A lookup may be as old, too; the open that follows it names the inode only. Where the name leads elsewhere by then, that open
would be of a file that was moved away (and would empty it, with O_TRUNC): so the name is read again behind the barrier, and the
kernel told to look it up again (ESTALE, which the program doesn't see).

It does that once. So from then on each lookup of that thread is behind a barrier, and the open that follows is of what it led to,
also where the name leads elsewhere meanwhile: during the call it did lead there, which is all that a drive promises. What is gone
by then, with its name or its directory, is answered with ENOENT. A file that is replaced, and replaced again in the moment
between the second lookup and the open, is all that a program can still see ESTALE of.

The home of a file that is written is asked what the file looks like, and hears of its removal before the replica. That it has
none is a refusal like others: the replica catches up, and shows what there is instead.
"""

from collections import OrderedDict

from ckptfs.cache.catalog_format import DirectoryEntry, entry_key, unpack
from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import HeldElsewhere, InodeGone, NameMoved, NamespaceError, NoSuchAttribute, NoSuchName
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler
from ckptfs.fs.path_walks import PathWalks, Walk
from ckptfs.fs.remote_content import ContentGone

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

ASKED_BEFORE_OPEN = frozenset({Opcode.GETATTR, Opcode.STATX})
"""To see whether the caller may open it, where its attributes are not kept."""

SHOWS_ATTRIBUTES = ASKED_BEFORE_OPEN | {Opcode.LOOKUP}
REPLACED_TRIES = 4
"""How often a file that was replaced is looked for anew before the program gets EIO."""

IN_DIRECTORIES = frozenset(
    {
        Opcode.CREATE,
        Opcode.MKNOD,
        Opcode.MKDIR,
        Opcode.SYMLINK,
        Opcode.LINK,
        Opcode.UNLINK,
        Opcode.RMDIR,
        Opcode.RENAME,
        Opcode.RENAME2,
    }
)
"""What changes names, in a directory that the call's walk has come to."""

REMEMBERED_MAX = 16_384


NAMES_MAX = 8
"""Of one inode; one with more that are opened at a time loses the oldest."""


class NamesLookedUp:
    """By which names each inode was looked up: of the newest `REMEMBERED_MAX`. All of its names, for an open whose thread is not
    known to have looked one up does not say which of them it is of."""

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

    async def require(self, ino: InodeNumber, keys: tuple[bytes, ...], *, told_once: bool) -> None:
        """Raises `NameMoved` if one of these names leads elsewhere by now; with `told_once`, for one who may open it by a name it
        still has, or without one (/proc/self/fd), not again."""
        entries = await self._kv.get_many(keys) if keys else []
        left = {entry.key for entry in entries if entry is not None and unpack(DirectoryEntry, entry.value).ino == ino}
        if gone := set(keys) - left:
            if told_once and ino in self._keys:
                self._keys[ino] = tuple(key for key in self._keys[ino] if key not in gone)
            raise NameMoved(f"inode {ino} was moved away or replaced since its name was looked up")


def behind_barrier(handlers: dict[int, Handler], kv: KeyValue) -> dict[int, Handler]:
    """The same handlers, which catch up with the catalog where they have to. A refusal had no effect: it is asked again."""
    looking = {opcode: _looking(handlers[opcode], kv) for opcode in SHOWS_ATTRIBUTES & handlers.keys()}
    handlers = handlers | looking
    guarded = {opcode: _guarded(handler, kv, opcode in ASK_FIRST, opcode in NEVER_ASK) for opcode, handler in handlers.items()}
    names, walks = NamesLookedUp(kv), PathWalks()
    if Opcode.LOOKUP in guarded:
        guarded[Opcode.LOOKUP] = _walking(guarded[Opcode.LOOKUP], kv, names, walks)
    if Opcode.OPEN in guarded:
        guarded[Opcode.OPEN] = _requiring(handlers[Opcode.OPEN], kv, names, walks)
    for opcode in ASKED_BEFORE_OPEN & guarded.keys():
        guarded[opcode] = _asking(guarded[opcode], kv, walks)
    for opcode in IN_DIRECTORIES & guarded.keys():
        guarded[opcode] = _in_directory(guarded[opcode], walks)
    return guarded


def _looking(handler: Handler, kv: KeyValue) -> Handler:
    """What may ask a file's home."""

    async def look(header: RequestHeader, body: memoryview) -> Answer | None:
        for _ in range(REPLACED_TRIES - 1):
            try:
                return await handler(header, body)
            except ContentGone:
                await kv.catch_up()
        return await handler(header, body)

    return look


def _walking(handler: Handler, kv: KeyValue, names: NamesLookedUp, walks: PathWalks) -> Handler:
    """A lookup, whose answer is remembered."""

    async def look_up(header: RequestHeader, body: memoryview) -> Answer | None:
        walk, parent, name = walks.of(header.pid), InodeNumber(header.nodeid), bytes(body[:-1])
        if is_again := walk.looks_up():
            await kv.catch_up()
        try:
            answer = await handler(header, body)
        except NamespaceError as error:
            walk.opens_again = False  # no open follows
            if not isinstance(error, InodeGone):
                raise
            if is_again:  # this call has found the directory, which was removed since
                raise NoSuchName(str(error)) from None
            walk.begins_again(opens=False)
            raise
        if answer:
            ino = InodeNumber(fuse.ENTRY_OUT.unpack_from(answer)[0])
            names.note(parent, name, ino)
            walk.came_to(entry_key(parent, name), ino, is_current=is_again)
        return answer

    return look_up


def _requiring(handler: Handler, kv: KeyValue, names: NamesLookedUp, walks: PathWalks) -> Handler:
    """An open of what was looked up."""

    async def open_what_was_named(header: RequestHeader, body: memoryview) -> Answer | None:
        ino, walk = InodeNumber(header.nodeid), walks.of(header.pid)
        is_named = walk.ino == ino
        keys: tuple[bytes, ...] = ()  # by none, or by one that did lead there during this call
        if is_named and not walk.is_current:
            keys = (walk.key,)
        elif not is_named and not walk.opens_again:
            keys = names.names_of(ino)  # of all the opens that wait for the barrier together, any may be by the name that moved
        try:
            if not (is_named and walk.is_current and walk.opens_again):  # else the barrier of that lookup is this call's
                await kv.catch_up()
            await names.require(ino, keys, told_once=not is_named)
            answer = await handler(header, body)
        except (InodeGone, NameMoved) as gone:
            raise await _said_once(gone, kv, walk, ino, opens=True) from None
        walk.ends()
        return answer

    return open_what_was_named


def _asking(handler: Handler, kv: KeyValue, walks: PathWalks) -> Handler:
    """What the kernel asks about an inode amid a walk."""

    async def ask(header: RequestHeader, body: memoryview) -> Answer | None:
        try:
            return await handler(header, body)
        except InodeGone as gone:
            raise await _said_once(gone, kv, walks.of(header.pid), InodeNumber(header.nodeid), opens=False) from None

    return ask


def _in_directory(handler: Handler, walks: PathWalks) -> Handler:
    """A change of names."""

    async def change(header: RequestHeader, body: memoryview) -> Answer | None:
        try:
            return await handler(header, body)
        except InodeGone as gone:
            walk = walks.of(header.pid)
            if walk.lookups_again:  # as for a lookup
                raise NoSuchName(str(gone)) from None
            walk.begins_again(opens=False)
            raise

    return change


async def _said_once(gone: NamespaceError, kv: KeyValue, walk: Walk, ino: InodeNumber, *, opens: bool) -> NamespaceError:
    """What the kernel is told of an inode that is gone, or not what the name leads to: ESTALE; and ENOENT to the walk that was
    begun again for that, if the name is gone too."""
    if walk.ino == ino and walk.is_current and await kv.get(walk.key) is None:
        return NoSuchName(str(gone))
    walk.begins_again(opens=opens)
    return gone


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
