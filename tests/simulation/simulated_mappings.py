"""Writable mappings of files, as the kernel makes them in the passthrough lane: of the segment itself. They outlive close, and
nobody but the segment's lease test hears of what a program stores through them (R2).
"""

import mmap
import os
from random import Random

from simulated_node import Node

from ckptfs.cache.segments import Segments


class Mapping:
    """A program's mapping of one file on one machine. It ends with `close`, which may be called again."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._memory: mmap.mmap | None = None

    def begin(self, fh: int) -> None:
        """Map what the handle leads to; nothing happens if its home is another node, or it is empty."""
        mount = self.node.mount
        handle = None if mount is None else mount.open_files.handle(fh)
        if handle is None or handle.file.segment is None:
            return
        descriptor = os.open(Segments(self.node.store.segments).path_of(handle.file.segment), os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size:
                self._memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    @property
    def is_there(self) -> bool:
        return self._memory is not None

    @property
    def content(self) -> bytes:
        assert self._memory is not None
        return bytes(self._memory)

    def next_content(self, chance: Random) -> bytes:
        """What `store` will leave."""
        assert self._memory is not None
        content = bytearray(self._memory)
        at = chance.randrange(len(content))
        content[at : at + 100] = chance.randbytes(len(content[at : at + 100]))
        return bytes(content)

    def store(self, content: bytes) -> None:
        assert self._memory is not None
        self._memory[:] = content

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
