"""Re-reading what nodes have of a version: every shard hashed where it lies, and (deep) all the rest.

The holder re-reads and hashes; that the shard it has is the one that was acknowledged is decided here, by its root. Deep also
checks what hashes of single shards can't show, that data and parity of each stripe belong together, so that any k of them would
give the content; and what isn't needed to give it, but is read: the segment at the version's home, and local copies elsewhere.
Of what isn't protected the segment is all there is, so that is always hashed.

Where shards are bad in such a number that the content may be lost, all of it is read, as a reader would, which settles it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import trio

from ckptfs.cache.catalog_format import ShardLayout, Version, VersionState
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
from ckptfs.replication.home_segment import SegmentHashers, SegmentStanding, check_segment, has_segment
from ckptfs.replication.kept_content import SegmentVersions
from ckptfs.replication.members import Members
from ckptfs.replication.peer_client import KeptCells
from ckptfs.replication.shard_format import ShardFooter
from ckptfs.replication.shard_reader import VerifyResult
from ckptfs.replication.stripe_reader import ContentUnreachable, StripeReader, geometry_of, shard_root_of
from ckptfs.replication.stripe_run import StripedContent
from ckptfs.replication.stripes import stripe_cells
from ckptfs.replication.verify_report import FileReport

OF_READING, OF_SEGMENT, OF_COPIES = 1000, 1001, 1002
"""Complaints that are about no shard, by the order in which they are said: behind those of the shards, which have their index."""


class ShardVerifiers(SegmentHashers, Protocol):
    """How a holder is asked; the own store is one of them. All raise `ReplicationError`."""

    async def verify_shard(self, store: StoreId, vid: Vid, index: int) -> VerifyResult: ...

    async def footer(self, store: StoreId, vid: Vid, index: int) -> ShardFooter: ...

    async def read_copy(self, store: StoreId, vid: Vid) -> bytes: ...


class CopyKeepers(Protocol):
    """How a node is asked about its local copy. Raises `ReplicationError`."""

    async def verify_kept(self, store: StoreId, vid: Vid, *, mend: bool) -> KeptCells: ...


@dataclass
class _Inspection:
    """One version being verified. `useless` are bad shards without a right cell; `table` is the content's, where it was read."""

    vid: Vid
    version: Version
    report: FileReport
    complaints: dict[int, str] = field(default_factory=dict)
    useless: set[int] = field(default_factory=set)
    table: bytes = b""

    @property
    def bad(self) -> set[int]:
        return {*self.report.damaged, *self.report.missing}

    @property
    def losses_max(self) -> int:
        """How many shards may be bad, whichever they are."""
        version = self.version
        return len(version.shards) - 1 if version.layout is ShardLayout.COPIES else version.parity_shards


class Verifier:
    """Verifies one version at a time; its k+m holders work at the same time."""

    def __init__(
        self,
        reader: StripeReader,
        members: Members,
        holders: ShardVerifiers,
        keepers: CopyKeepers,
        versions: SegmentVersions,
        codec: Codec,
        take_buffer: Callable[[int], Any],
    ) -> None:
        """`take_buffer(size)` is an async context manager that gives a buffer, as `BufferBudget.take`."""
        self._reader = reader
        self._members = members
        self._holders = holders
        self._keepers = keepers
        self._versions = versions
        self._codec = codec
        self._take_buffer = take_buffer
        self._limiter = trio.CapacityLimiter(1)

    async def verify(self, ino: InodeNumber, vid: Vid, version: Version, *, deep: bool = False) -> FileReport:
        """Never raises for what is wrong with shards, segments or nodes: that is the report. Raises `CacheError`."""
        report = FileReport(ino, version.size, is_protected=version.state is VersionState.PROTECTED)
        inspection = _Inspection(vid, version, report)
        if version.state is VersionState.OPEN:
            return report
        if version.shards:
            async with trio.open_nursery() as nursery:
                for index in range(len(version.shards)):
                    nursery.start_soon(self._check_one, inspection, index)
        too_few = bool(version.shards) and len(inspection.bad) > inspection.losses_max
        if too_few or (deep and version.shards and version.layout is ShardLayout.STRIPED):
            await self._read_all(inspection, deep=deep)
        if deep or too_few or version.damaged or not report.is_protected:
            await self._check_segment(inspection)
        if deep and version.size:
            await self._check_copies(inspection)
        self._conclude(inspection, too_few=too_few)
        return report

    # ---- shards

    async def _check_one(self, inspection: _Inspection, index: int) -> None:
        report, version = inspection.report, inspection.version
        check = self._check_copy if version.layout is ShardLayout.COPIES else self._check_shard
        store = version.shards[index].store
        useless = True
        where: list[int] | None
        try:
            if self._is_lost(store):
                raise ShardNotFound("the node was lost, or removed from the cluster")
            problem, useless = await check(inspection, index)
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
        if where is None:
            return
        where.append(index)
        if where is report.unreachable:
            report.away.add(self._members.name_of(store))
        if useless and where is not report.unreachable:
            inspection.useless.add(index)
        inspection.complaints[index] = f"shard {index} on {self._members.name_of(store)}: {problem}"

    async def _check_shard(self, inspection: _Inspection, index: int) -> tuple[str, bool]:
        """What is wrong with the shard, or nothing; and if something is, whether no cell of it can be used."""
        vid, version = inspection.vid, inspection.version
        shard = version.shards[index]
        result = await self._holders.verify_shard(shard.store, vid, index)
        problem = "" if result.ok else result.message or f"stripes {list(result.bad_stripes)} fail their hash"
        if problem and not result.bad_stripes:
            return problem, True
        footer = await self._holders.footer(shard.store, vid, index)
        content = StripedContent(vid, version, b"")
        if shard_root_of(content, index, footer.cell_hashes) != shard.root or footer.content_root != version.root:
            return "it is not the shard that was acknowledged", True
        return problem, len(result.bad_stripes) >= geometry_of(version).shard_cell_count(index)

    async def _check_copy(self, inspection: _Inspection, index: int) -> tuple[str, bool]:
        content = await self._holders.read_copy(inspection.version.shards[index].store, inspection.vid)
        if self._reader.is_content(inspection.vid, inspection.version, content):
            return "", False
        return "it is not the content that was acknowledged", True

    # ---- all of the content

    async def _read_all(self, inspection: _Inspection, *, deep: bool) -> None:
        """Read everything as a reader would. Deep: encode it again, and compare the parity's hashes with those the shards
        have."""
        try:
            if inspection.version.layout is ShardLayout.COPIES:
                await self._reader.read_copy(inspection.vid, inspection.version)
            else:
                await self._read_stripes(inspection, deep=deep)
        except NotEnoughShards as error:
            inspection.report.reading = "unreachable" if isinstance(error, ContentUnreachable) else "damaged"
            inspection.complaints[OF_READING] = f"it can't be read: {error}"
        except ReplicationError as error:
            inspection.report.reading = "unreachable"
            inspection.complaints[OF_READING] = str(error)

    async def _read_stripes(self, inspection: _Inspection, *, deep: bool) -> None:
        report = inspection.report
        content = await self._reader.content(inspection.vid, inspection.version)
        inspection.table = content.table
        geometry = content.geometry
        tables: dict[int, bytes] = {}
        for index in range(geometry.data_shards, geometry.shard_count):
            if deep and index not in (*report.damaged, *report.missing, *report.unreachable):
                tables[index] = await self._reader.own_table(content, index)
        async with self._take_buffer(geometry.shard_count * geometry.cell_size) as buffer:
            for stripe in range(geometry.stripe_count):
                await self._reader.read_stripe(content, stripe, buffer)
                if not tables:
                    continue
                wrong = await trio.to_thread.run_sync(self._wrong_parity, content, stripe, buffer, tables, limiter=self._limiter)
                for index in wrong:
                    tables.pop(index)
                    report.damaged.append(index)
                    report.foreign_parity.append(index)
                    inspection.complaints[index] = f"shard {index}: parity of stripe {stripe} does not belong to its data"

    def _wrong_parity(self, content: StripedContent, stripe: int, buffer: memoryview, tables: dict[int, bytes]) -> list[int]:
        """Which parity cells are not those of this stripe's content; runs in a thread."""
        geometry = content.geometry
        k, length = geometry.data_shards, geometry.code_length(stripe)
        data = stripe_cells(geometry, stripe, buffer)
        parity = [buffer[(k + row) * geometry.cell_size :][:length] for row in range(geometry.parity_shards)]
        self._codec.encode(data, parity)
        place = slice(stripe * HASH_SIZE, (stripe + 1) * HASH_SIZE)
        return [index for index, table in tables.items() if cell_hash(parity[index - k]) != table[place]]

    # ---- besides shards

    async def _check_segment(self, inspection: _Inspection) -> None:
        """Have the home hash its segment, and put down what that showed, so that nobody reads a damaged one."""
        vid, version, report = inspection.vid, inspection.version, inspection.report
        if not has_segment(version):
            return
        if self._is_lost(version.home):
            report.is_lost = not report.is_protected
            return
        check = await check_segment(self._holders, vid, version, inspection.table)
        if version.damaged and check.standing is SegmentStanding.UNREACHABLE and not report.is_protected:
            check = check._replace(standing=SegmentStanding.DAMAGED, message="it was found damaged before its home went away")
        report.segment = check.standing
        home = self._members.name_of(version.home)
        wrong = check.standing is SegmentStanding.DAMAGED
        gone = check.standing is SegmentStanding.MISSING
        is_news = wrong or gone or (version.damaged and check.standing is SegmentStanding.RIGHT)
        if is_news and not await self._versions.mark_damaged(vid, version.segment, wrong or gone):
            # Opened for writing meanwhile, replaced or deleted: what was hashed is another content's, or none's.
            report.segment = SegmentStanding.NONE
            report.is_gone = not report.is_protected
            return
        if wrong or gone:
            said = f"the segment {version.segment.hex()} on {home}, its home: {check.message}"
            if report.is_protected:
                report.remedy = (
                    f"who opens the file on {home} from now on reads the shards; `verify --deep --repair` makes the segment anew"
                )
            else:
                said += "; it is not protected, so nothing can repair it: programs get EIO until the file is saved again"
            inspection.complaints[OF_SEGMENT] = said
        elif check.standing is SegmentStanding.UNREACHABLE and not report.is_protected:
            report.away.add(home)
            inspection.complaints[OF_SEGMENT] = f"only {home} has its bytes, and it is away: {check.message}"

    async def _check_copies(self, inspection: _Inspection) -> None:
        """Have every node that answers hash its local copy. One that is away hashes it before the next read."""
        wrong: dict[str, int] = {}

        async def check(store: StoreId) -> None:
            try:
                kept = await self._keepers.verify_kept(store, inspection.vid, mend=False)
            except ReplicationError:
                return
            if kept.wrong:
                wrong[self._members.name_of(store)] = len(kept.wrong)

        async with trio.open_nursery() as nursery:
            for member in self._members.known():
                if member.live:
                    nursery.start_soon(check, member.store)
        if wrong:
            inspection.report.copies = sorted(wrong)
            said = ", ".join(f"{node} (cells wrong: {wrong[node]})" for node in sorted(wrong))
            inspection.complaints[OF_COPIES] = f"the local copy on {said} is damaged; its readers get right bytes, fetched anew"

    def _is_lost(self, store: StoreId) -> bool:
        member = self._members.member(store)
        return member is not None and member.state.is_gone

    # ---- the end

    def _conclude(self, inspection: _Inspection, *, too_few: bool) -> None:
        report, version = inspection.report, inspection.version
        if too_few:
            of_no_use = {index for index in inspection.useless if not self._is_empty(version, index)}
            segment_is_no_help = report.segment not in (SegmentStanding.RIGHT, SegmentStanding.UNREACHABLE)
            certain = len(of_no_use) > inspection.losses_max and segment_is_no_help
            report.is_lost = bool(report.reading) and (report.reading == "damaged" or certain)
        for indices in (report.damaged, report.missing, report.unreachable):
            indices.sort()
        report.message = "; ".join(inspection.complaints[number] for number in sorted(inspection.complaints))

    @staticmethod
    def _is_empty(version: Version, index: int) -> bool:
        """Whether the shard has no cells: of a file shorter than a stripe."""
        return version.layout is ShardLayout.STRIPED and not geometry_of(version).shard_cell_count(index)
