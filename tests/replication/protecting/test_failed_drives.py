"""A live node whose drive failed takes no shards: protection goes on with the others."""

import errno
import os
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SIZE = 8 * 4 * (16 << 10) - 5


@pytest.mark.parametrize("cluster", [6], indirect=True)
async def test_a_failed_drive_is_passed_over_like_a_full_one(cluster: Any) -> None:
    node = cluster[0]
    before = await node.save("before", os.urandom(SIZE))
    await node.protected(before)  # the members' free space is known
    cluster[5].running.shard_store.fail(OSError(errno.EIO, os.strerror(errno.EIO)), "shards/a")
    files = [await node.save(f"f{number}", os.urandom(SIZE + number)) for number in range(3)]
    await node.protected(*files)
    for saved in files:
        version = await node.version(saved)
        assert (version.data_shards, version.parity_shards) == (3, 2)
        assert cluster[5].running.store.store_id not in {shard.store for shard in version.shards}
    assert cluster[5].running.shard_store.free_bytes() == 0
