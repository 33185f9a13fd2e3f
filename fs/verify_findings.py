"""What `verify` found wrong on this node's asking, until it is right, replaced or deleted: for status. In memory only.

Status looks at no shard itself: it says where shards should be and who answers. What is known to be otherwise stands here.
"""

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.replication.verify_report import FileReport

FINDINGS_MAX = 1000
SHOWN_MAX = 5
WRONG = ("damaged", "missing", "lost")


class Finding(NamedTuple):
    """Of one version. `path` is relative to the mountpoint, where it is known. `deep`: only a deep look can show that it is all
    right again."""

    vid: Vid
    path: str
    result: str
    message: str
    deep: bool


class VerifyFindings:
    """The newest finding of each file. `current_version` gives the version a file has now, None if there is no such file."""

    def __init__(self, current_version: Callable[[InodeNumber], Awaitable[Vid | None]]) -> None:
        self._current_version = current_version
        self._findings: OrderedDict[InodeNumber, Finding] = OrderedDict()

    def note(self, ino: InodeNumber, vid: Vid, path: bytes, report: FileReport, *, deep: bool) -> None:
        """A file was verified, and perhaps repaired: the report is as it stands then. What was never protected has a state of its
        own for its damage, and is not noted."""
        before = self._findings.get(ino)
        if report.is_protected and report.result in WRONG:
            message = str(report.as_message()["message"])
            name = path.decode(errors="replace") or f"a file (find MOUNTPOINT -inum {ino})"
            known_deep = not deep and before is not None and before.vid == vid and before.deep
            self._findings[ino] = Finding(vid, name, report.result, message, known_deep or (deep and report.needs_deep))
            self._findings.move_to_end(ino)
            if len(self._findings) > FINDINGS_MAX:
                self._findings.popitem(last=False)
        elif before is not None and (before.vid != vid or (report.result in ("ok", "repaired") and (deep or not before.deep))):
            del self._findings[ino]

    async def of(self, inos: Iterable[InodeNumber]) -> dict[InodeNumber, Finding]:
        """The findings that still are of the files' content. Raises `CacheError`."""
        found = {}
        for ino in inos:
            finding = self._findings.get(ino)
            if finding is None:
                continue
            if await self._current_version(ino) == finding.vid:
                found[ino] = finding
            else:
                self._findings.pop(ino, None)
        return found

    async def problems(self) -> list[str]:
        """For an operator: one line for all of them, or none."""
        found = list((await self.of(list(self._findings))).values())
        if not found:
            return []
        named = ", ".join(f"{finding.path} ({finding.result})" for finding in found[:SHOWN_MAX])
        more = f" and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else ""
        files = "1 file" if len(found) == 1 else f"{len(found)} files"
        return [
            f"verify found {files} not as they should be: {named}{more}: `ckptfs verify --deep --repair` of them makes "
            "right what can be, and says what cannot"
        ]
