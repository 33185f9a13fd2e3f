"""A node that dies before its files are protected, with real agents: who is told what."""

import os
from typing import Any

import pytest
import trio

from ckptfs.cache.store_registry import session_label

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cluster", [4], indirect=True)
async def test_verify_names_what_a_lost_store_took_with_it(cluster: Any) -> None:
    writer = cluster[3]
    kept = await writer.save("kept", os.urandom(100_000))
    await writer.protected(kept)
    await cluster.down(0, 1, 2)
    newer = await writer.rewrite(kept, os.urandom(90_000))
    alone = await writer.save("alone", os.urandom(1000))
    for number in range(3):
        await cluster[number].up()
        if number == 0:
            await writer.down()
    await cluster[0].kv.end_session(session_label(writer.store.store_id, writer.incarnation))
    leader = (await cluster.elect()).running
    leader.store_watch._repair_after_seconds = 0.0
    await leader.members.refresh()
    with trio.fail_after(20):
        while not leader.members.member(writer.store.store_id).settled:
            await leader.store_watch.look()
            await leader.members.refresh()
    assert (leader.store_watch.statistics.rolled_back, leader.store_watch.statistics.files_lost) == (1, 1)
    files = (await cluster[1].ask("verify", inos=[kept.ino, alone.ino]))["files"]
    assert "rolled back to older content" in files[0]["message"]
    assert newer.vid.hex() in files[0]["message"]
    assert files[1]["result"] == "lost"
    assert "declared lost: the version" in files[1]["message"]
    assert "node-3" in files[1]["message"]
    assert await cluster[1].content(kept) == kept.content
    (problem,) = [said for said in (await cluster[1].ask("status"))["problems"] if "declared lost" in said]
    assert problem.startswith("node-3: declared lost")
