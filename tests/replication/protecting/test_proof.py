"""`prove`: whether the shards of a version can be relied on before the last bytes besides them go."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache.catalog_format import Version
from ckptfs.fs.agent_requests import AgentRequests
from ckptfs.replication.shard_format import HEADER_SIZE

pytestmark = pytest.mark.slow

CELL = 16 << 10
SIZE = 5 * 4 * CELL + 17


def shard_path(cluster: Any, version: Version, vid: Any, index: int) -> Path:
    node = cluster[cluster.number_of(version.shards[index].store)]
    return Path(node.running.shard_store.path_of(vid, index))


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


async def prove(node: Any, saved: Any) -> tuple[bool, str]:
    answer = await node.ask("prove", vid=saved.vid)
    assert answer["ok"], answer
    return answer["right"], answer["message"]


@pytest.mark.parametrize("size", [SIZE, 1000, 0])
async def test_what_is_right_is_proved(cluster: Any, size: int) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(size))
    await cluster[0].protected(saved)
    assert await prove(cluster[0], saved) == (True, "")


async def test_more_shards_rotted_than_may_be_lost_and_are_made_anew_from_the_segment(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    for index in range(3):
        flip(shard_path(cluster, version, saved.vid, index), HEADER_SIZE + CELL)
    right, message = await prove(cluster[0], saved)
    assert right
    assert "shard 2" in message
    os.unlink(cluster[0].segments.path_of(saved.segment))
    assert await cluster[1].content(saved) == saved.content


async def test_what_rotted_for_good_is_not_proved_and_shows_in_status(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    for path in [shard_path(cluster, version, saved.vid, index) for index in range(3)]:
        flip(path, HEADER_SIZE + CELL)
    for cell in (4, 5, 6):  # the same cells as in the shards
        flip(Path(cluster[0].segments.path_of(saved.segment)), cell * CELL)
    requests = AgentRequests(cluster[0].running)
    answer = await requests.answer({"do": "prove", "vid": saved.vid})
    assert (answer["ok"], answer["right"]) == (True, False)
    (problem,) = (await requests.answer({"do": "status"}))["problems"]
    assert f"-inum {saved.ino})" in problem


async def test_a_holder_that_is_away_proves_nothing(cluster: Any) -> None:
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    (version,) = await cluster[0].protected(saved)
    away = next(number for shard in version.shards if (number := cluster.number_of(shard.store)))
    await cluster.down(away)
    right, message = await prove(cluster[0], saved)
    assert not right
    assert f"node-{away}" in message


async def test_there_is_nothing_to_prove_of_what_is_not_protected_or_gone(cluster: Any) -> None:
    await cluster.down(1, 2, 3, 4, 5)
    saved = await cluster[0].save("model.pt", os.urandom(SIZE))
    for vid in (saved.vid, bytes(16)):
        answer = await cluster[0].ask("prove", vid=vid)
        assert (answer["ok"], answer["error"]) == (False, "gone")
