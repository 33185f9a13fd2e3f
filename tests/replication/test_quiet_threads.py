"""Low-priority threads, and waiting for them."""

import os
import threading

import pytest
import trio

from ckptfs.replication.quiet_threads import QuietThreads


async def test_results_and_exceptions_come_back() -> None:
    with QuietThreads(1) as threads:
        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await threads.run(divmod, 7, 0)


async def test_they_are_nice_and_nobody_else_becomes_so() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with QuietThreads(1) as threads:
        assert await threads.run(niceness) == 19
    assert niceness() == before
    assert await trio.to_thread.run_sync(niceness) == before


async def test_a_cancelled_caller_waits_for_the_thread() -> None:
    """Its buffer is in use until then."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(10)
        ended.set()

    with QuietThreads(1) as threads:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threads.run, work)
            assert await trio.to_thread.run_sync(begun.wait, 10)
            nursery.cancel_scope.cancel()
            trio.lowlevel.spawn_system_task(trio.to_thread.run_sync, go_on.set)
        assert ended.is_set()
