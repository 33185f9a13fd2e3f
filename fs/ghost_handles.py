"""Handles that only `mount.db` knows: their open was carried out, but the process was killed before the kernel had the answer.

The kernel sends such a request again and is given the same handle, unless the program was killed: then nobody ever releases it,
and its file would stay `open`, or its space in use, for ever. In the passthrough lane a lease on the segment tells the truth:
when nothing can write to it, no handle for writing is real, and when nothing has it open, none is. In the served lane a lease on
the mount's file does (`kernel_use`).
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from ckptfs.cache.ids import InodeNumber
from ckptfs.fs.kernel_use import Use, use_of
from ckptfs.fs.open_files import Handle, Lane, OpenFiles

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 3.0
"""Long enough for the kernel to have taken every answer, and opened the segment, that was under way at the start."""
LOOK_SECONDS = 10.0
LOOK_SECONDS_MAX = 600.0
"""A ghost is one from the start. It is found by the first look, unless another program has its file open."""


LOOKED_AT_ONCE = 200

AskKernel = Callable[[Sequence[InodeNumber]], Awaitable[dict[InodeNumber, Use]]]


async def close_ghosts(open_files: OpenFiles, let_go: Callable[[Handle], Awaitable[None]], ask_kernel: AskKernel) -> None:
    """Look at the handles that were taken up from an earlier process until each was released, or found to be a ghost and let go.

    Called when every request that was unanswered at the start has come again. `ask_kernel`: see `KernelUse.of`.
    """
    await trio.sleep(FIRST_LOOK_SECONDS)
    delay_seconds = LOOK_SECONDS
    while restored := open_files.restored():
        for start in range(0, len(restored), LOOKED_AT_ONCE):
            some = restored[start : start + LOOKED_AT_ONCE]
            served = sorted({handle.file.ino for handle in some if not _is_passed(handle)})
            use = await ask_kernel(served) if served else {}
            for handle in some:
                await trio.lowlevel.checkpoint()
                if open_files.handle(handle.fh) is handle and _is_ghost(handle, use.get(handle.file.ino)):
                    log.info("ghost_handle_closed inode=%d fh=%d", handle.file.ino, handle.fh)
                    await let_go(handle)
        await trio.sleep(delay_seconds)
        delay_seconds = min(2 * delay_seconds, LOOK_SECONDS_MAX)


def _is_passed(handle: Handle) -> bool:
    return handle.file.lane is Lane.PASSTHROUGH and handle.file.descriptor is not None


def _is_ghost(handle: Handle, use: Use | None) -> bool:
    if _is_passed(handle):
        assert handle.file.descriptor is not None
        use = use_of(handle.file.descriptor)
    return use is Use.NONE or (handle.writable and use is Use.READING)
