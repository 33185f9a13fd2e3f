"""Threads for work nobody waits for: reading segments, hashing and encoding them.

They run at nice 19 and with idle I/O priority, and not under SCHED_IDLE: such a thread may not run at all while the
machine is busy, and if it holds the interpreter's lock then, every thread of the process waits for it, those that serve
readers included. At nice 19 it still gets its (small) share and gives the lock back. Priority belongs to the thread, so
these threads are kept apart from trio's own, which are shared and serve at normal priority.
"""

import concurrent.futures
import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import trio

Result = TypeVar("Result")

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_IDLE = 3 << 13


def _be_quiet() -> None:
    """Lower the calling thread's priorities. Where the system refuses, the work is done at normal priority."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, 19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_IDLE)


class QuietThreads:
    """A fixed number of low-priority threads; use as a context manager."""

    def __init__(self, count: int = 2) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(count, "ckptfs-quiet", initializer=_be_quiet)

    def __enter__(self) -> "QuietThreads":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call the function in one of the threads and return its result or raise its exception.

        The call itself can't be cancelled: a cancelled caller waits for it, so that no thread uses a buffer or a
        descriptor that its owner has given away.
        """
        token = trio.lowlevel.current_trio_token()
        future = self._pool.submit(function, *arguments)
        finished = trio.Event()

        def tell(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(finished.set)

        future.add_done_callback(tell)
        with trio.CancelScope(shield=True):
            await finished.wait()
        return future.result()
