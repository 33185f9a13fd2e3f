"""What the kernel is told to forget."""

from typing import Any

import trio
import trio.testing

from ckptfs.cache.catalog_format import entry_key, inode_key, times_key
from ckptfs.cache.catalog_kv import Event
from ckptfs.cache.ids import InodeNumber
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Notification
from ckptfs.fs.kernel_cache import KernelCache

ONE, TWO = InodeNumber(1), InodeNumber(0x22)


async def told(*transactions: list[Event], own: tuple[int, ...] = ()) -> list[tuple[Notification, bytes]]:
    heard: list[tuple[Notification, bytes]] = []
    cache = KernelCache(lambda code, body: heard.append((code, body)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.run)
        await trio.testing.wait_all_tasks_blocked()
        for events in transactions:
            cache.changed(events)
        for revision in own:
            cache.committed(revision)  # the answer may come after the event
        with trio.move_on_after(5):
            while not heard:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    return heard


async def test_attributes_that_others_changed_and_no_names() -> None:
    name: Any = entry_key(ONE, b"a\xffb")
    events = [Event(7, name, b""), Event(7, inode_key(TWO), None), Event(7, b"v/x", b""), Event(7, times_key(ONE), b"")]
    assert await told(events, events) == [
        (Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(0x22, -1, 0)),
        (Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(1, -1, 0)),
    ]


async def test_own_changes_are_known_to_the_kernel() -> None:
    assert await told([Event(7, inode_key(TWO), b"")], [Event(8, inode_key(ONE), b"")], own=(7,)) == [
        (Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(1, -1, 0))
    ]


async def test_what_makes_no_sense_is_passed_over() -> None:
    assert await told([Event(7, b"i/zz", b""), Event(7, b"d/1", b""), Event(7, inode_key(ONE), b"")]) == [
        (Notification.INVAL_INODE, fuse.INVAL_INODE_OUT.pack(1, -1, 0))
    ]
