"""What nodes keep of a version besides its shards, made right where verifying found it wrong: the home's segment, local copies.

Each is made right by the node that has it, out of shards; nothing is taken from whoever asks. The shards come first (`repair`),
so that there is something to take it from.
"""

import trio

from ckptfs.cache.catalog_format import Version
from ckptfs.cache.ids import Vid
from ckptfs.replication.errors import ReplicationError
from ckptfs.replication.holders import Keepers
from ckptfs.replication.home_segment import SegmentStanding
from ckptfs.replication.members import Members
from ckptfs.replication.verify_report import FileReport


class Mender:
    """Mends one version at a time."""

    def __init__(self, members: Members, keepers: Keepers) -> None:
        self._members = members
        self._keepers = keepers

    async def mend(self, vid: Vid, version: Version, report: FileReport) -> None:
        """Have made right what the report names, and put down there what became of it. Never raises for what stands in the
        way."""
        if report.is_gone:
            return
        if report.is_protected and report.segment in (SegmentStanding.DAMAGED, SegmentStanding.MISSING):
            await self._mend_segment(vid, version, report)
        if report.copies:
            await self._mend_copies(vid, report)

    async def _mend_segment(self, vid: Vid, version: Version, report: FileReport) -> None:
        home = self._members.name_of(version.home)
        try:
            mended = await self._keepers.mend_segment(version.home, vid)
        except ReplicationError as error:
            report.add(f"the segment on {home} was not repaired: {error}")
            return
        if mended.right:
            report.segment, report.remedy = SegmentStanding.REPAIRED, ""
            report.mended.append("segment")
            report.add(f"the segment on {home}: {mended.message}")
        else:
            report.add(f"the segment on {home} was not repaired: {mended.message}")

    async def _mend_copies(self, vid: Vid, report: FileReport) -> None:
        async def mend(node: str) -> None:
            store = next(one.store for one in self._members.known() if one.live and str(one.node) == node)
            try:
                kept = await self._keepers.verify_kept(store, vid, mend=True)
            except ReplicationError as error:
                report.add(f"the local copy on {node} was not repaired: {error}")
                return
            if kept.wrong:
                report.add(f"the local copy on {node} was not repaired: its log says why")
            else:
                report.copies.remove(node)
                report.mended.append(node)
                report.add(f"the local copy on {node} was fetched anew where it was wrong")

        async with trio.open_nursery() as nursery:
            for node in list(report.copies):
                nursery.start_soon(mend, node)
