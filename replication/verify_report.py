"""What verifying one version showed, and which word follows from it. Pure.

======================  ===========================================================================================
result                  what is known
======================  ===========================================================================================
ok                      everything that was asked for was looked at, and is right
repaired                the same, after something was made right
unprotected             the home's segment is all there is, and is right (or still being written)
damaged                 a shard, the home's segment or a local copy is wrong
missing                 a shard is not at its holder, or the segment the catalog names is not at its home
unreachable             nothing is known to be wrong, but not all that counts could be asked
lost                    too few shards are right, and so is not the home's segment: nobody can give the content any more
gone                    no such version now: whoever asked asks again
======================  ===========================================================================================

The same facts give the same word, however they were found. The home's segment and local copies of a protected version only count
where they are wrong: a node that is away takes nothing from the version with them.
"""

from dataclasses import dataclass, field
from typing import Any

from ckptfs.cache.ids import InodeNumber
from ckptfs.replication.home_segment import SegmentStanding


@dataclass
class FileReport:
    """One version. Lists hold indices of shards; those in `repaired` are in no other. `copies` are the nodes whose local copy
    has wrong cells, `mended` what was made right besides shards. `reading` is what became of reading all of it, where that was
    tried: "damaged" or "unreachable", empty if it went well. `away` are the nodes that count and could not be asked."""

    ino: InodeNumber
    size: int = 0
    damaged: list[int] = field(default_factory=list)
    foreign_parity: list[int] = field(default_factory=list)
    """Of `damaged`: parity that is what was acknowledged, and does not belong to its data. Only a deep look shows that."""
    missing: list[int] = field(default_factory=list)
    unreachable: list[int] = field(default_factory=list)
    repaired: list[int] = field(default_factory=list)
    segment: SegmentStanding = SegmentStanding.NONE
    copies: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)
    away: set[str] = field(default_factory=set)
    reading: str = ""
    is_protected: bool = True
    is_lost: bool = False
    is_gone: bool = False
    message: str = ""
    remedy: str = ""
    """What to do about the segment, while it is wrong."""

    @property
    def result(self) -> str:
        """The word: see above."""
        if self.is_gone:
            return "gone"
        if self.is_lost:
            return "lost"
        if self.damaged or self.copies or self.segment is SegmentStanding.DAMAGED or self.reading == "damaged":
            return "damaged"
        if not self.is_protected and self.segment is SegmentStanding.MISSING:
            return "damaged"
        if self.missing or self.segment is SegmentStanding.MISSING:
            return "missing"
        away = self.segment is SegmentStanding.UNREACHABLE and not self.is_protected
        if self.unreachable or away or self.reading == "unreachable":
            return "unreachable"
        if not self.is_protected:
            return "unprotected"
        return "repaired" if self.repaired or self.mended else "ok"

    @property
    def needs_deep(self) -> bool:
        """Whether only a deep look can show that what this one found is right again. A damaged segment is marked in the catalog,
        so that every look sees it from then on."""
        return bool(self.copies or self.reading == "damaged" or not set(self.foreign_parity).isdisjoint(self.damaged))

    def add(self, note: str) -> None:
        """Append to the message."""
        self.message = f"{self.message}; {note}" if self.message else note

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
            "segment": self.segment.value,
            "copies": self.copies,
            "protected": self.is_protected,
            "away": sorted(self.away),
            "message": "; ".join(part for part in (self.message, self.remedy) if part),
        }
