"""Handles that only `mount.db` knows: their open was carried out, but the process was killed before the kernel had the answer.

The kernel sends such a request again and is given the same handle, unless the program was killed: then nobody ever releases it,
and its file would stay `open` for ever. In the passthrough lane the lease tells the truth: when nothing can write to the
segment, no handle for writing is real.
"""

import logging

import trio

from ckptfs.cache.mount_db import FileState
from ckptfs.cache.segments import has_no_writer
from ckptfs.fs.open_files import Lane, OpenFiles
from ckptfs.fs.settle import Settler

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 3.0
"""Long enough for the kernel to have taken every answer, and opened the segment, that was under way at the start."""
LOOK_SECONDS = 10.0


async def close_ghosts(open_files: OpenFiles, settler: Settler) -> None:
    """Look at the handles that were taken up from an earlier process until each was released, or found to be a ghost.

    Called when every request that was unanswered at the start has come again.
    """
    await trio.sleep(FIRST_LOOK_SECONDS)
    while restored := open_files.restored_writers():
        for handle in restored:
            file = handle.file
            if file.lane is not Lane.PASSTHROUGH or file.descriptor is None or not has_no_writer(file.descriptor):
                continue
            log.info("ghost_handle_closed inode=%d fh=%d", file.ino, handle.fh)
            open_files.close_handle(handle)
            if not file.writers and file.state is FileState.OPEN:
                settler.closed(file)
        await trio.sleep(LOOK_SECONDS)
