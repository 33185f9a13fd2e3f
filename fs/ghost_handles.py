"""Handles that only `mount.db` knows: their open was carried out, but the process was killed before the kernel had the answer.

The kernel sends such a request again and is given the same handle, unless the program was killed: then nobody ever releases it,
and its file would stay `open`, or its space in use, for ever. In the passthrough lane the lease tells the truth: when nothing
can write to the segment, no handle for writing is real, and when nothing has it open, none is. In the served lane nothing tells:
such a file stays as it is until the node is started again.
"""

import logging
from collections.abc import Awaitable, Callable

import trio

from ckptfs.cache.segments import has_no_other_user, has_no_writer
from ckptfs.fs.open_files import Handle, Lane, OpenFiles

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 3.0
"""Long enough for the kernel to have taken every answer, and opened the segment, that was under way at the start."""
LOOK_SECONDS = 10.0
LOOK_SECONDS_MAX = 600.0
"""A ghost is one from the start. It is found by the first look, unless another program has its file open."""


async def close_ghosts(open_files: OpenFiles, let_go: Callable[[Handle], Awaitable[None]]) -> None:
    """Look at the handles that were taken up from an earlier process until each was released, or found to be a ghost and let go.

    Called when every request that was unanswered at the start has come again.
    """
    await trio.sleep(FIRST_LOOK_SECONDS)
    delay_seconds = LOOK_SECONDS
    while restored := open_files.restored():
        for handle in restored:
            await trio.lowlevel.checkpoint()
            if open_files.handle(handle.fh) is handle and _is_ghost(handle):
                log.info("ghost_handle_closed inode=%d fh=%d", handle.file.ino, handle.fh)
                await let_go(handle)
        await trio.sleep(delay_seconds)
        delay_seconds = min(2 * delay_seconds, LOOK_SECONDS_MAX)


def _is_ghost(handle: Handle) -> bool:
    file = handle.file
    if file.lane is not Lane.PASSTHROUGH or file.descriptor is None:
        return False
    return has_no_other_user(file.descriptor) or (handle.writable and has_no_writer(file.descriptor))
