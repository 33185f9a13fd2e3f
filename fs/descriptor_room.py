"""Descriptors left in the mount process: each file in use takes one, and what is done for all of them needs some too.

Without any, nothing can be synced, sealed or answered on the node's socket, and a sync that fails stays failed. So programs get
ENFILE before the last is gone: their own limit is another one (EMFILE). Files that are closed and not sealed yet hold one too:
who opens more waits for those first.
"""

import errno
import logging
import resource
import time
from collections.abc import Awaitable, Callable

import trio

from ckptfs.fs.fuse_format import Opcode, RequestHeader
from ckptfs.fs.fuse_session import Answer, Handler

log = logging.getLogger(__name__)

SPARE_COUNT = 128
"""A mount that holds no file has 30 to 40 open, with threads that sync and hash some 20 more for moments."""

WAIT_SECONDS_MAX = 5.0
LOOK_SECONDS = 0.02
"""How long a look at the limit holds, and between looks whether there is room again."""

TAKES_ONE = (Opcode.CREATE, Opcode.OPEN, Opcode.MKNOD, Opcode.TMPFILE)


def limit_now() -> int:
    """How many descriptors this process may have; an operator can change it while it runs (prlimit)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class DescriptorRoom:
    """`in_use` counts the files that hold a descriptor, `closed` those of them that let go of it when they are sealed, which
    `hurry` has done. A message in `shortage` says why opens were refused."""

    def __init__(self, in_use: Callable[[], int], closed: Callable[[], int], hurry: Callable[[], None]) -> None:
        self._in_use = in_use
        self._closed = closed
        self._hurry = hurry
        self._files_max = 0
        self._look_at = 0.0
        self.shortage = ""

    def guarded(self, handlers: dict[int, Handler], was_carried_out: Callable[[int], bool]) -> dict[int, Handler]:
        """The handlers; those that take a descriptor only while there are some, or `was_carried_out` knows the request."""
        present = [opcode for opcode in TAKES_ONE if opcode in handlers]
        return handlers | {opcode: self._guard(handlers[opcode], was_carried_out) for opcode in present}

    def _guard(self, handler: Handler, was_carried_out: Callable[[int], bool]) -> Handler:
        async def handle_when_there_is_one(header: RequestHeader, body: memoryview) -> Answer | None:
            if not was_carried_out(header.unique):
                await self.require_one()
            return await handler(header, body)

        def handle(header: RequestHeader, body: memoryview) -> Awaitable[Answer | None]:
            return handler(header, body) if self._is_there() else handle_when_there_is_one(header, body)

        return handle

    async def require_one(self) -> None:
        """Raise `OSError` (ENFILE) if no more files may be opened, also after those that are closed were sealed."""
        if self._is_there():
            return
        with trio.move_on_after(WAIT_SECONDS_MAX):
            while self._closed():
                self._hurry()
                await trio.sleep(LOOK_SECONDS)
                if self._is_there():
                    return
        if not self._note():
            raise OSError(errno.ENFILE, self.shortage)

    def problem(self) -> str:
        """The shortage, if there still is one."""
        if self.shortage:
            self._note()
        return self.shortage

    def _is_there(self) -> bool:
        now = time.monotonic()
        if now >= self._look_at:
            limit = limit_now()
            self._files_max, self._look_at = limit - min(SPARE_COUNT, limit // 2), now + LOOK_SECONDS
        return self._in_use() < self._files_max

    def _note(self) -> bool:
        """Whether another file may be opened now; puts down in `shortage` how it is."""
        count, limit = self._in_use(), limit_now()
        if self._is_there():
            if self.shortage:
                self.shortage = ""
                log.info("descriptors_left_again files=%d limit=%d", count, limit)
            return True
        if not self.shortage:
            log.warning("descriptors_used_up files=%d limit=%d: programs get ENFILE", count, limit)
        self.shortage = (
            f"programs get ENFILE when they open files: {count} are in use, and the mount process may have {limit} descriptors; "
            "raise the node's limit (LimitNOFILE= of the service, ulimit -n), or close files"
        )
        return False
