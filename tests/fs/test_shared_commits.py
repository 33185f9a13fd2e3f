"""Creates that are asked for at the same time and share a commit: what each of them is told, and what is written."""

import errno
import os
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import trio

from ckptfs.cache.catalog_check import catalog_problems
from ckptfs.cache.catalog_kv import Put
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import SessionEnded
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.store_registry import begin_session, session_label
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs.fuse_format import Opcode

StartNode = Callable[..., Awaitable[Any]]
Request = tuple[int, int, bytes]


def _create(name: bytes, flags: int = os.O_RDWR | os.O_EXCL) -> Request:
    return Opcode.CREATE, 1, fuse.CREATE_IN.pack(flags | os.O_CREAT, 0o100644, 0, 0) + name + b"\0"


def _commits(kv: SqliteCatalog) -> list[str]:
    """Will have each commit to the catalog from now on."""
    statements: list[str] = []
    kv._connection.set_trace_callback(lambda statement: statements.append(statement) if statement == "COMMIT" else None)
    return statements


async def test_they_have_one_commit_and_each_its_own_revision(node: Any) -> None:
    await node.create(b"first")  # takes a block of inode numbers
    commits, before = _commits(node.kv), await node.kv.revision()
    answers: dict[int, tuple[int, bytes]] = {}
    await node.ask_at_once({100 + number: _create(b"%d" % number) for number in range(5)}, answers)
    assert list(answers) == [100, 101, 102, 103, 104]
    assert {error for error, _ in answers.values()} == {0}
    assert len(commits) == 1
    assert await node.kv.revision() == before + 5
    events = [event async for event in _changes(node.kv, before)]
    assert events == [before + number for number in range(1, 6)]
    names = {entry.name for entry in await node.readdir(1, await node.opendir(1), 0)}
    assert names == {b".", b"..", b"first", *(b"%d" % number for number in range(5))}
    assert await catalog_problems(node.kv) == []


async def _changes(kv: SqliteCatalog, after: int) -> Any:
    watch = kv.watch(after)
    try:
        for _ in range(5):
            (revision,) = {event.revision for event in await anext(watch)}
            yield revision
    finally:
        await watch.aclose()


async def test_one_that_fails_is_no_matter_to_the_others(node: Any) -> None:
    await node.create(b"there")
    commits = _commits(node.kv)
    answers: dict[int, tuple[int, bytes]] = {}
    requests = {100: _create(b"a"), 101: _create(b"there"), 102: _create(b"b"), 103: _create(b"a"), 104: _create(b"." * 300)}
    await node.ask_at_once(requests, answers)
    assert {unique: error for unique, (error, _) in answers.items()} == {
        100: 0,
        101: errno.EEXIST,
        102: 0,
        103: errno.EEXIST,  # made by another of them, in the same commit
        104: errno.ENAMETOOLONG,
    }
    assert len(commits) == 1
    assert await catalog_problems(node.kv) == []


async def test_where_the_catalog_is_locked_each_waits_for_it_and_other_requests_do_not(node: Any) -> None:
    await node.create(b"there")
    answers: dict[int, tuple[int, bytes]] = {}
    with closing(sqlite3.connect(node.catalog, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        requests = {100: _create(b"a"), 101: _create(b"b"), 102: (Opcode.LOOKUP, 1, b"there\0")}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.ask_at_once, requests, answers)
            with trio.fail_after(60):
                while node.kv._writer_limit.borrowed_tokens == 0 or node.kv._writer_limit.statistics().tasks_waiting == 0:
                    await trio.sleep(0.001)
            other.execute("ROLLBACK")
    assert {unique: error for unique, (error, _) in answers.items()} == {100: 0, 101: 0, 102: 0}
    assert next(iter(answers)) == 102
    assert await catalog_problems(node.kv) == []


async def test_none_is_committed_for_a_node_whose_session_has_ended(tmp_path: Path) -> None:
    node, store = NodeId("me"), StoreId(b"m" * 16)
    session = session_label(store, 1)
    kv = SqliteCatalog.open(tmp_path / "c.db", writer_label="mine", session=session)
    await begin_session(kv, node, store, 1)
    await SessionFence.begin(kv, node, store, 1)
    other = SqliteCatalog.open(tmp_path / "c.db", writer_label="other")
    await other.end_session(session)
    results = kv.transact_together([([], [Put(b"x/1", b"")]), ([], [Put(b"x/2", b"")])])
    assert results is not None
    assert [type(result) for result in results] == [SessionEnded, SessionEnded]
    assert await other.get_many([b"x/1", b"x/2"]) == [None, None]
    await kv.aclose()
    await other.aclose()
