"""When a mount whose catalog is read from a replica asks the catalog itself before it answers (R6).

A replica lags by the way of an event. What a transaction compares is found out by that; a stat of a known name may be as old. But
who opens a file or a directory, and whoever would be told that something isn't there, or is there already, is answered by what
every node has committed before the question.
"""

from ckptfs.cache.catalog_kv import KeyValue
from ckptfs.cache.errors import HeldElsewhere, NamespaceError, NoSuchAttribute
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


def behind_barrier(handlers: dict[int, Handler], kv: KeyValue) -> dict[int, Handler]:
    """The same handlers, which catch up with the catalog where they have to. A refusal had no effect: it is asked again."""
    return {opcode: _guarded(handler, kv, opcode in ASK_FIRST, opcode in NEVER_ASK) for opcode, handler in handlers.items()}


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
