"""When the sweep looks; what it does stands with those it does it to (`test_mount_recovery`, `test_files_elsewhere`)."""

from itertools import pairwise
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ckptfs.fs.segment_sweep import GIVE_WAY_SECONDS, GIVE_WAY_SECONDS_MAX, ROWS_SECONDS, SegmentSweep


async def test_looking_at_the_rows_gives_way_to_programs_and_not_for_ever(
    node: Any, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    is_busy = False

    async def sweep_rows(self: SegmentSweep) -> int:
        looks.append(trio.current_time())
        return 0

    async def sweep_segments(self: SegmentSweep) -> int:
        return 0

    monkeypatch.setattr(SegmentSweep, "sweep_rows", sweep_rows)
    monkeypatch.setattr(SegmentSweep, "sweep_segments", sweep_segments)
    sweep = SegmentSweep(
        node.namespace,
        node.versions,
        node.segments,
        node.open_files,
        node.reclaimer,
        node.database,
        node.store.store_id,
        lambda: is_busy,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sweep.run)
        await trio.sleep(5 * ROWS_SECONDS + 0.5)
        assert len(looks) == 6
        is_busy = True
        began = trio.current_time()
        looks.clear()
        await trio.sleep(30)
        pauses = [later - earlier for earlier, later in pairwise(looks)]
        longest = ROWS_SECONDS + GIVE_WAY_SECONDS_MAX
        assert len(pauses) >= 3
        assert all(longest <= pause <= longest + 2 * GIVE_WAY_SECONDS for pause in pauses)
        assert looks[0] - began <= longest + 2 * GIVE_WAY_SECONDS
        is_busy = False
        looks.clear()
        await trio.sleep(ROWS_SECONDS + 2 * GIVE_WAY_SECONDS)
        assert looks
        nursery.cancel_scope.cancel()
