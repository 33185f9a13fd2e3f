"""The copy of the catalog that each agent keeps in its store."""

from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_archive import belongs, open_archive

pytestmark = pytest.mark.slow


async def test_a_copy_is_made_at_once_and_again_when_something_changed(cluster: Any) -> None:
    node = cluster[0]
    with trio.fail_after(30):
        while not node.store.catalog_copy.exists():
            await trio.sleep(0.01)
    copier = node.running.catalog_copy
    await copier.copy()
    assert not await copier.copy(), "nothing has changed"
    await node.protected(await node.save("a", b"content"))
    assert await copier.copy()
    wanted = [(entry.key, entry.value) for entry in await node.kv.range(b"") if belongs(entry.key)]
    with open_archive(node.store.catalog_copy) as archive:
        header = archive.header
        assert list(archive.records()) == wanted
    assert header.cluster == cluster.settings.cluster
    assert header.revision == await node.kv.revision()
    assert (await node.ask("status"))["catalog_copy"]["revision"] == header.revision


async def test_a_node_that_ends_in_order_leaves_a_copy_of_all(cluster: Any) -> None:
    node = cluster[0]
    await node.running.catalog_copy.copy()
    await node.protected(await node.save("last", b"content"))
    await node.running.leave()
    with open_archive(node.store.catalog_copy) as archive:
        assert archive.header.revision == await node.kv.revision()


async def test_a_copy_that_can_not_be_written_is_said_and_the_older_one_stays(cluster: Any) -> None:
    node = cluster[0]
    await node.running.catalog_copy.copy()
    before = node.store.catalog_copy.read_bytes()
    in_the_way = node.store.catalog_copy.with_name("catalog.copy.new")
    in_the_way.mkdir()
    await node.save("a", b"content")
    assert not await node.running.catalog_copy.copy()
    assert node.store.catalog_copy.read_bytes() == before
    problems = (await node.ask("status"))["problems"]
    assert any("copy of the catalog" in problem and "Is a directory" in problem for problem in problems)
    in_the_way.rmdir()
    assert await node.running.catalog_copy.copy()
    assert not any("copy of the catalog" in problem for problem in (await node.ask("status"))["problems"])
