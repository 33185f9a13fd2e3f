"""Requests that the kernel sends again after a kill: one effect, one answer (R7 of docs/protocol.md).

A process may be killed between a change and its answer. The next one is sent the request again, under the same number, and must
not make the change a second time: the name it makes would exist, the name it removes would not. So such a change carries a note
of its request into the catalog, in its own transaction: `o/<node>/<number>`. A later change of this process removes the note once
the kernel has the answer; what a process finds of them at its start was carried out, and perhaps never answered.

Requests whose handlers are not wrapped by `once` may be carried out twice: they read, or write what they say while the kernel
keeps others off the file, or leave a handle that bears the number of its request (`OpenFiles.opened_before`). An answer that is
an error is found again by carrying the request out: nothing was changed.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar

from ckptfs.cache.catalog_format import FORMAT_VERSION, CarriedOut, answer_key, answer_prefix, pack, unique_of_key, unpack
from ckptfs.cache.catalog_kv import Compare, Delete, KeyValue, Operation, Put, TransactionResult
from ckptfs.cache.ids import NodeId
from ckptfs.cache.mount_db import FileRow, FileState
from ckptfs.fs.fuse_format import RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler

log = logging.getLogger(__name__)

REMOVED_AT_ONCE = 8
"""Notes that one change removes: it adds one, so few are ever left, and the transaction stays short."""
REMOVED_AT_START = 100

Transact = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[TransactionResult]]

_request: ContextVar[int | None] = ContextVar("request", default=None)
"""The number of the request whose change is to be noted; each worker of the session has its own."""


class Repeats:
    """The notes of one node's mount. `incarnation` names the FUSE connection: numbers of another one mean nothing on it."""

    def __init__(self, kv: KeyValue, node: NodeId, incarnation: int, transact: Transact | None = None) -> None:
        """`transact`: that of the engine, or what takes its place for changes that are not noted."""
        self._kv = kv
        self._transact = transact or kv.transact
        self._node = node
        self._incarnation = incarnation
        self._value = pack(CarriedOut(FORMAT_VERSION, incarnation))
        self._earlier: set[int] = set()
        self._unanswered: set[int] = set()
        self._answered: list[int] = []
        self.changes = NotingCatalog(kv, self)
        """The engine for changes that are asked for: what `once` handles is noted in them."""

    async def load(self, files: Iterable[FileRow] = ()) -> None:
        """Find what earlier processes noted, also in these rows. Called once, before the first request."""
        self._earlier.update(row.size for row in files if row.state is FileState.ORPHAN and row.size)
        stale = []
        for entry in await self._kv.range(answer_prefix(self._node)):
            if unpack(CarriedOut, entry.value).incarnation == self._incarnation:
                self._earlier.add(unique_of_key(entry.key))
            else:
                stale.append(entry.key)
        for start in range(0, len(stale), REMOVED_AT_START):
            await self._kv.transact([], [Delete(key) for key in stale[start : start + REMOVED_AT_START]])

    def noted_elsewhere(self, numbers: Iterable[int]) -> None:
        """These requests were carried out too."""
        self._earlier.update(numbers)

    def once(self, handler: Handler, again: Handler) -> Handler:
        """The handler for requests that must not be carried out twice. `again` answers one that was carried out before as the
        handler would have then, and may itself be asked repeatedly."""

        async def carry_out(header: RequestHeader, body: memoryview) -> Answer | None:
            if header.unique in self._earlier:
                self._earlier.remove(header.unique)
                self._unanswered.add(header.unique)
                log.info("answered_again opcode=%d inode=%d", header.opcode, header.nodeid)
                return await again(header, body)
            token = _request.set(header.unique)
            try:
                return await handler(header, body)
            finally:
                _request.reset(token)

        return carry_out

    def was_carried_out(self, unique: int) -> bool:
        """Whether an earlier process noted this request, which comes again now."""
        return unique in self._earlier

    def answered(self, unique: int) -> None:
        """The kernel has the answer to this request: it never sends it again."""
        if unique in self._unanswered:
            self._unanswered.remove(unique)
            self._answered.append(unique)

    def all_repeated(self) -> None:
        """Every request that was unanswered at the start has come again: the other notes are of answered ones, or of ones whose
        programs were killed."""
        self._answered += self._earlier
        self._earlier.clear()

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        """`KeyValue.transact`, with a note of the request it is for."""
        unique = _request.get()
        if unique is None:
            return await self._transact(compares, operations)
        removed, self._answered = self._answered[:REMOVED_AT_ONCE], self._answered[REMOVED_AT_ONCE:]
        note = Put(answer_key(self._node, unique), self._value)
        succeeded = False
        try:
            result = await self._kv.transact(
                compares, [*operations, note, *(Delete(answer_key(self._node, number)) for number in removed)]
            )
            succeeded = result.succeeded
        finally:
            if succeeded:
                self._unanswered.add(unique)
            else:
                self._answered += removed
        return result


async def done(header: RequestHeader, body: memoryview) -> bytes:
    """The answer of a request that says no more than that it was carried out."""
    return b""


class NotingCatalog:
    """The catalog's engine as changes that are asked for see it."""

    def __init__(self, kv: KeyValue, repeats: Repeats) -> None:
        self.get = kv.get
        self.catch_up = kv.catch_up
        self.get_many = kv.get_many
        self.range = kv.range
        self.count = kv.count
        self.transact = repeats.transact
        self.make_durable = kv.make_durable
        self.revision = kv.revision
        self.is_short_of_room = kv.is_short_of_room
        self.fence_with = kv.fence_with
        self.watch = kv.watch
        self.aclose = kv.aclose
