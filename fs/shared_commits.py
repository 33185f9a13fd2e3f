"""Changes of the catalog that are asked for at the same time share one commit.

A commit of SQLite writes whole pages, and takes as long as the changes in it. So a change waits until the session has read all
that was asked, and is then committed with those that came meanwhile: each with its own compares, revision and row of the log, so
that one that fails is no matter to the others. None is answered before the commit. Only handlers that the session runs without
trio can wait like that: what anybody else changes is committed at once.
"""

from collections.abc import Sequence

import trio

from ckptfs.cache.catalog_kv import Compare, Operation, TransactionResult, check_transaction
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import SessionEnded
from ckptfs.fs.fuse_session import Lull


class _Change:
    """One that waits; `result` is set when it is over, and stays None where it is to be made alone."""

    def __init__(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> None:
        self.transaction = compares, operations
        self.result: TransactionResult | SessionEnded | None = None


class SharedCommits:
    """The catalog as handlers of one session change it."""

    def __init__(self, catalog: SqliteCatalog, lull: Lull) -> None:
        self._catalog = catalog
        self._lull = lull
        self._waiting: list[_Change] = []

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> TransactionResult:
        """As `KeyValue.transact`."""
        if not self._lull.is_ahead:
            return await self._catalog.transact(compares, operations)
        check_transaction(compares, operations, self._catalog.session)
        change = _Change(compares, operations)
        self._waiting.append(change)
        await self._lull
        if change in self._waiting:  # the first that is gone on with commits for all
            self._commit()
        result = change.result
        if result is None:
            return await self._catalog.transact(compares, operations)
        if isinstance(result, SessionEnded):
            raise result
        if not result.succeeded:  # as the catalog does
            await trio.lowlevel.cancel_shielded_checkpoint()
        return result

    def _commit(self) -> None:
        changes, self._waiting = self._waiting, []
        results = self._catalog.transact_together([change.transaction for change in changes])
        if results is not None:
            for change, result in zip(changes, results, strict=True):
                change.result = result
