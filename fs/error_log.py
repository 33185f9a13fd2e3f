"""Every EIO that a program gets is in the log, with its reason."""

import logging
import time

from ckptfs.fs.fuse_errors import ContentUnreachable
from ckptfs.fs.fuse_format import RequestHeader

log = logging.getLogger(__name__)

AGAIN_SECONDS = 10.0
REMEMBERED_MAX = 1000


class ErrorLog:
    """Says the same of the same inode once in `AGAIN_SECONDS`: a program may ask a thousand times."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, str], float] = {}

    def note(self, header: RequestHeader, error: Exception) -> None:
        """The request is about to be answered with EIO, because of this error."""
        reason, now = str(error) or repr(error), time.monotonic()
        if now - self._said.get((header.nodeid, reason), -AGAIN_SECONDS) < AGAIN_SECONDS:
            return
        if len(self._said) >= REMEMBERED_MAX:
            self._said.clear()
        self._said[header.nodeid, reason] = now
        if isinstance(error, ContentUnreachable):  # another node is to be started, nothing here is broken
            log.warning("content_unreachable opcode=%d inode=%d message=%s", header.opcode, header.nodeid, reason)
        else:
            log.error("request_refused opcode=%d inode=%d reason=%s", header.opcode, header.nodeid, reason)
