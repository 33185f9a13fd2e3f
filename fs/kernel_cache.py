"""What the kernel keeps of attributes, taken from it as soon as another node has changed them.

Without this it would be kept for `mount.attribute_timeout_seconds`. Names are not taken from it: the kernel holds the directory's
lock for that, which a program has whose request waits for us, and a thread that waits for it can't even be killed: the mount
process would never end, and no other begin. Where nodes share names through a replica the kernel keeps none (`attributes`).
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import trio

from ckptfs.cache.catalog_kv import Event
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Notification

log = logging.getLogger(__name__)

OWN_REVISIONS_KEPT = 4096
GRACE_SECONDS = 0.005
"""An event may arrive before the answer to the transaction that it is of."""
WAITING_MAX = 10_000
_INODE_PREFIXES = (b"i/", b"t/")


class KernelCache:
    """`changed` is told what the catalog says; `run` tells the kernel. `own` are revisions of this mount's own transactions."""

    def __init__(self, notify: Callable[[Notification, bytes], None]) -> None:
        self._notify = notify
        self._own: deque[int] = deque(maxlen=OWN_REVISIONS_KEPT)
        self._waiting: deque[Event] = deque(maxlen=WAITING_MAX)
        self._any = trio.Event()

    def committed(self, revision: int) -> None:
        """This mount's own transaction: the kernel knows what it did."""
        self._own.append(revision)

    def changed(self, events: Sequence[Event]) -> None:
        """Transactions of any node."""
        self._waiting.extend(event for event in events if event.key.startswith(_INODE_PREFIXES))
        if self._waiting:
            self._any.set()

    async def run(self) -> None:
        """Tell the kernel, until cancelled."""
        while True:
            await self._any.wait()
            await trio.sleep(GRACE_SECONDS)
            self._any = trio.Event()
            own = set(self._own)
            foreign = [event for event in self._waiting if event.revision not in own]
            self._waiting.clear()
            if foreign:
                await trio.to_thread.run_sync(
                    self._tell, list(dict.fromkeys(event.key for event in foreign)), abandon_on_cancel=True
                )

    def _tell(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                self._notify(Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(int(key[2:], 16), -1, 0))
            except (ValueError, OSError) as error:
                log.info("kernel_not_told key=%r error=%s", key, error)
