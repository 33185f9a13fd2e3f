"""Re-reading what holders have: every shard hashed where it lies, and (deep) every stripe decoded and compared.

The holder re-reads and hashes; that the shard it has is the one that was acknowledged is decided here, by its root. Deep
also checks what hashes of single shards can't show: that data and parity of each stripe belong together, so that any k of
them would give the content.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from ckptfs.cache.catalog_format import ShardLayout, Version
from ckptfs.cache.checksum import HASH_SIZE, cell_hash
from ckptfs.cache.ids import InodeNumber, StoreId, Vid
from ckptfs.replication.codec import Codec
from ckptfs.replication.errors import (
    NotEnoughShards,
    PeerRefused,
    RefusalReason,
    ReplicationError,
    ShardDamaged,
    ShardNotFound,
)
from ckptfs.replication.members import Members
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.shard_store import VerifyResult
from ckptfs.replication.stripe_reader import ContentUnreachable, StripedContent, StripeReader, shard_root_of
from ckptfs.replication.stripes import stripe_cells


class ShardVerifiers(Protocol):
    """How a holder is asked; the own store is one of them. All raise `ReplicationError`."""

    async def verify_shard(self, store: StoreId, vid: Vid, index: int) -> VerifyResult: ...

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter: ...

    async def read_copy(self, store: StoreId, vid: Vid) -> bytes: ...


@dataclass
class FileReport:
    """What verifying one version showed. `result`: ok, unprotected (there are no shards yet), damaged, missing, unreachable
    (nothing is known to be wrong, but not all could be asked), lost (too few shards are right), gone (no such file now),
    repaired (all is right again: see `replication.repair`). Lists hold indices of shards; those in `repaired` are in no other.
    """

    ino: InodeNumber
    result: str
    size: int = 0
    damaged: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    unreachable: list[int] = field(default_factory=list)
    repaired: list[int] = field(default_factory=list)
    message: str = ""

    def worst_of_lists(self) -> str:
        """The result that follows from the lists of what is wrong; empty if they are."""
        kinds = {"damaged": self.damaged, "missing": self.missing, "unreachable": self.unreachable}
        return next((kind for kind, indices in kinds.items() if indices), "")

    def as_message(self) -> dict[str, Any]:
        """For the node's socket."""
        return {
            "ino": self.ino,
            "result": self.result,
            "bytes": self.size,
            "damaged": self.damaged,
            "missing": self.missing,
            "unreachable": self.unreachable,
            "repaired": self.repaired,
            "message": self.message,
        }


class Verifier:
    """Verifies one version at a time; its k+m holders work at the same time."""

    def __init__(
        self,
        reader: StripeReader,
        members: Members,
        holders: ShardVerifiers,
        codec: Codec,
        take_buffer: Callable[[int], Any],
    ) -> None:
        """`take_buffer(size)` is an async context manager that gives a buffer, as `BufferBudget.take`."""
        self._reader = reader
        self._members = members
        self._holders = holders
        self._codec = codec
        self._take_buffer = take_buffer
        self._limiter = trio.CapacityLimiter(1)

    async def verify(self, ino: InodeNumber, vid: Vid, version: Version, *, deep: bool = False) -> FileReport:
        """Never raises for what is wrong with shards or holders: that is the report."""
        report = FileReport(ino, "ok", version.size)
        if version.size == 0:
            return report
        if not version.shards:
            report.result = "unprotected"
            return report
        complaints: dict[int, str] = {}
        check = self._check_copy if version.layout is ShardLayout.COPIES else self._check_shard
        async with trio.open_nursery() as nursery:
            for index in range(len(version.shards)):
                nursery.start_soon(self._check_one, check, vid, version, index, report, complaints)
        if deep and version.layout is ShardLayout.STRIPED:
            await self._check_deep(vid, version, report, complaints)
        return self._conclude(version, report, complaints)

    async def _check_one(
        self,
        check: Callable[[Vid, Version, int], Awaitable[str]],
        vid: Vid,
        version: Version,
        index: int,
        report: FileReport,
        complaints: dict[int, str],
    ) -> None:
        store = version.shards[index].store
        try:
            problem = await check(vid, version, index)
            where = report.damaged if problem else None
        except ShardNotFound as error:
            problem, where = str(error), report.missing
        except ShardDamaged as error:
            problem, where = str(error), report.damaged
        except PeerRefused as error:
            problem = str(error)
            kinds = {RefusalReason.NOT_FOUND: report.missing, RefusalReason.DAMAGED: report.damaged}
            where = kinds.get(error.reason, report.unreachable)
        except ReplicationError as error:
            problem, where = str(error), report.unreachable
        if where is not None:
            where.append(index)
            member = self._members.member(store)
            complaints[index] = f"shard {index} on {member.node if member else store.hex()}: {problem}"

    async def _check_shard(self, vid: Vid, version: Version, index: int) -> str:
        """What is wrong with the shard, or nothing."""
        shard = version.shards[index]
        result = await self._holders.verify_shard(shard.store, vid, index)
        if not result.ok:
            return result.message or f"stripes {list(result.bad_stripes)} fail their hash"
        footer = await self._holders.footer(shard.store, vid, index)
        content = StripedContent(vid, version, b"")
        if shard_root_of(content, index, footer.cell_hashes) != shard.root or footer.content_root != version.root:
            return "it is not the shard that was acknowledged"
        return ""

    async def _check_copy(self, vid: Vid, version: Version, index: int) -> str:
        content = await self._holders.read_copy(version.shards[index].store, vid)
        return "" if self._reader.is_content(vid, version, content) else "it is not the content that was acknowledged"

    async def _check_deep(self, vid: Vid, version: Version, report: FileReport, complaints: dict[int, str]) -> None:
        """Decode each stripe, encode it again, and compare the parity's hashes with those the shards have."""
        try:
            content = await self._reader.content(vid, version)
            geometry = content.geometry
            tables: dict[int, bytes] = {}
            for index in range(geometry.data_shards, geometry.shard_count):
                if index not in (*report.damaged, *report.missing, *report.unreachable):
                    tables[index] = await self._reader.own_table(content, index)
            async with self._take_buffer(geometry.shard_count * geometry.cell_size) as buffer:
                for stripe in range(geometry.stripe_count):
                    await self._reader.read_stripe(content, stripe, buffer)
                    wrong = await trio.to_thread.run_sync(
                        self._wrong_parity, content, stripe, buffer, tables, limiter=self._limiter
                    )
                    for index in wrong:
                        tables.pop(index)
                        report.damaged.append(index)
                        complaints[index] = f"shard {index}: parity of stripe {stripe} does not belong to its data"
        except NotEnoughShards as error:
            report.result = "unreachable" if isinstance(error, ContentUnreachable) else "lost"
            complaints[-1] = str(error)
        except ReplicationError as error:
            complaints[-1] = str(error)

    def _wrong_parity(self, content: StripedContent, stripe: int, buffer: memoryview, tables: dict[int, bytes]) -> list[int]:
        """Which parity cells are not those of this stripe's content; runs in a thread."""
        geometry = content.geometry
        k, length = geometry.data_shards, geometry.code_length(stripe)
        data = stripe_cells(geometry, stripe, buffer)
        parity = [buffer[(k + row) * geometry.cell_size :][:length] for row in range(geometry.parity_shards)]
        self._codec.encode(data, parity)
        place = slice(stripe * HASH_SIZE, (stripe + 1) * HASH_SIZE)
        return [index for index, table in tables.items() if cell_hash(parity[index - k]) != table[place]]

    @staticmethod
    def _conclude(version: Version, report: FileReport, complaints: dict[int, str]) -> FileReport:
        bad = {*report.damaged, *report.missing}
        needed = 1 if version.layout is ShardLayout.COPIES else version.data_shards
        if report.result == "ok":
            report.result = "lost" if len(version.shards) - len(bad) < needed else report.worst_of_lists() or "ok"
        for indices in (report.damaged, report.missing, report.unreachable):
            indices.sort()
        report.message = "; ".join(complaints[index] for index in sorted(complaints))
        return report
