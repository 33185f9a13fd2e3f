"""What every engine of the catalog promises (`catalog_kv`): the same tests for each."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_kv import (
    COMPARES_MAX,
    OPERATIONS_MAX,
    Compare,
    Delete,
    EmptyRange,
    Entry,
    Event,
    KeyValue,
    Operation,
    Present,
    Put,
    Unchanged,
)
from ckptfs.cache.catalog_records import commit, repeated
from ckptfs.cache.errors import CatalogCompacted, SessionEnded, StoreError
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.cache.session_fence import SessionFence
from ckptfs.cache.store_registry import begin_session, session_label

OpenCatalog = Callable[..., Any]


async def test_empty_catalog(kv: KeyValue) -> None:
    assert await kv.get(b"k") is None
    assert await kv.range(b"") == []
    assert await kv.count(b"") == 0


async def test_revisions_grow_by_one_with_each_change(kv: KeyValue) -> None:
    base = await kv.revision()
    assert await kv.transact([], [Put(b"a", b"1"), Put(b"b", b"2")]) == (True, base + 1)
    assert await kv.transact([], [Put(b"a", b"3")]) == (True, base + 2)
    assert await kv.get(b"a") == Entry(b"a", b"3", base + 1, base + 2)
    assert await kv.get(b"b") == Entry(b"b", b"2", base + 1, base + 1)
    assert await kv.revision() == base + 2


async def test_what_is_refused_takes_no_revision(kv: KeyValue) -> None:
    revision = (await kv.transact([], [Put(b"a", b"1")])).revision
    assert await kv.transact([], []) == (True, revision)
    assert await kv.transact([Unchanged(b"a", revision + 6)], [Put(b"a", b"2")]) == (False, revision)
    assert await kv.revision() == revision


async def test_what_changes_nothing_is_no_event(kv: KeyValue) -> None:
    revision = (await kv.transact([], [Put(b"a", b"1")])).revision
    assert (await kv.transact([], [Delete(b"nothing")])).succeeded
    await kv.transact([], [Put(b"a", b"2")])
    with trio.fail_after(5):
        async with aclosing(kv.watch(revision)) as events:
            ((event,),) = [await anext(events)]
    assert (event.key, event.value) == (b"a", b"2")


async def test_the_same_value_again_is_a_change(kv: KeyValue) -> None:
    first = (await kv.transact([], [Put(b"a", b"1")])).revision
    await kv.transact([], [Put(b"a", b"1")])
    assert await kv.get(b"a") == Entry(b"a", b"1", first, first + 1)


async def test_a_key_that_comes_back_was_created_anew(kv: KeyValue) -> None:
    await kv.transact([], [Put(b"a", b"1")])
    await kv.transact([], [Delete(b"a")])
    last = (await kv.transact([], [Put(b"a", b"1")])).revision
    assert await kv.get(b"a") == Entry(b"a", b"1", last, last)


ITS_REVISION = 1_000_000


@pytest.mark.parametrize(
    ("compare", "holds"),
    [
        (Unchanged(b"a", ITS_REVISION), True),
        (Unchanged(b"a", 0), False),
        (Unchanged(b"a", ITS_REVISION + 1), False),
        (Unchanged(b"absent", 0), True),
        (Unchanged(b"absent", 1), False),
        (Present(b"a"), True),
        (Present(b"absent"), False),
        (EmptyRange(b"a"), False),
        (EmptyRange(b"p/"), False),
        (EmptyRange(b"p/x/"), True),
        (EmptyRange(b"q"), True),
        (EmptyRange(b"p"), False),
    ],
)
async def test_compares(kv: KeyValue, compare: Compare, holds: bool) -> None:
    revision = (await kv.transact([], [Put(b"a", b""), Put(b"p/x", b"")])).revision
    if isinstance(compare, Unchanged) and compare.mod_revision:
        compare = Unchanged(compare.key, compare.mod_revision - ITS_REVISION + revision)
    result = await kv.transact([Present(b"a"), compare], [Put(b"done", b"")])
    assert result.succeeded is holds
    assert (await kv.get(b"done") is not None) is holds


async def test_operations_apply_at_once_or_not_at_all(kv: KeyValue) -> None:
    revision = (await kv.transact([], [Put(b"a", b"1"), Put(b"b", b"1")])).revision
    refused = await kv.transact([Unchanged(b"a", revision), Unchanged(b"b", revision + 8)], [Put(b"a", b"2"), Delete(b"b")])
    assert not refused.succeeded
    assert [entry.value for entry in await kv.range(b"")] == [b"1", b"1"]
    await kv.transact([Unchanged(b"a", revision), Unchanged(b"b", revision)], [Put(b"a", b"2"), Delete(b"b")])
    assert await kv.range(b"") == [Entry(b"a", b"2", revision, revision + 1)]


async def test_ranges(kv: KeyValue) -> None:
    keys = [b"d/1/a", b"d/1/b", b"d/1/\xff", b"d/1/\xff\xff", b"d/10/a", b"d/2/a", b"e"]
    await kv.transact([], [Put(key, b"v" + key) for key in keys])
    assert [entry.key for entry in await kv.range(b"d/1/")] == keys[:4]
    assert [entry.key for entry in await kv.range(b"d/1/", after=b"d/1/a")] == keys[1:4]
    assert [entry.key for entry in await kv.range(b"d/1/", after=b"d/1/a", limit=1)] == keys[1:2]
    assert [entry.key for entry in await kv.range(b"d/1/", after=b"a")] == keys[:4]
    assert await kv.range(b"d/1/", after=b"d/1/\xff\xff") == []
    assert await kv.range(b"d/1/", after=b"z") == []
    assert [entry.key for entry in await kv.range(b"", limit=3)] == [b"d/1/a", b"d/1/b", b"d/1/\xff"]
    assert await kv.range(b"d/1/", limit=0) == []
    assert await kv.count(b"d/1/") == 4
    assert await kv.count(b"d/") == 6
    assert (await kv.range(b"e"))[0].value == b"ve"


async def test_many_at_once(kv: KeyValue) -> None:
    keys = [b"k/%d" % number for number in range(COMPARES_MAX + 2)]
    await kv.transact([], [Put(key, b"v" + key) for key in keys[:100]])
    asked = [b"absent", *keys[::-1], b"k"]
    assert await kv.get_many(asked) == [await kv.get(key) for key in asked]
    assert await kv.get_many([]) == []


async def test_a_long_range_comes_whole(kv: KeyValue) -> None:
    keys = [b"k/%05d" % number for number in range(2_500)]
    for start in range(0, len(keys), OPERATIONS_MAX):
        await kv.transact([], [Put(key, key) for key in keys[start : start + OPERATIONS_MAX]])
    assert [entry.key for entry in await kv.range(b"k/")] == keys
    for limit in (1, 999, 1000, 1001, 1002, 2_499, 2_500, 2_501):
        assert [entry.key for entry in await kv.range(b"k/", limit=limit)] == keys[:limit]


async def test_limits_of_a_transaction(kv: KeyValue) -> None:
    result = await kv.transact(
        [Unchanged(b"%d" % number, 0) for number in range(COMPARES_MAX)],
        [Put(b"%d" % number, b"") for number in range(OPERATIONS_MAX)],
    )
    assert await kv.count(b"") == OPERATIONS_MAX
    with pytest.raises(ValueError, match="too long"):
        await kv.transact([Present(b"a")] * (COMPARES_MAX + 1), [])
    with pytest.raises(ValueError, match="too long"):
        await kv.transact([], [Put(b"%d" % number, b"") for number in range(OPERATIONS_MAX + 1)])
    with pytest.raises(ValueError, match="twice"):
        await kv.transact([], [Put(b"a", b""), Delete(b"a")])
    with pytest.raises(ValueError, match="session"):
        await kv.transact([], [Put(b"a", b"", bound_to_session=True)])
    assert await kv.revision() == result.revision


async def test_binary_keys_and_values(kv: KeyValue) -> None:
    key, value = b"d/" + bytes(range(256)), bytes(range(256)) * 40
    revision = (await kv.transact([], [Put(key, value), Put(b"empty", b"")])).revision
    assert await kv.range(b"d/") == [Entry(key, value, revision, revision)]
    assert (await kv.range(b"empty"))[0].value == b""


async def test_every_handle_sees_what_returned(open_catalog: OpenCatalog) -> None:
    one, two = open_catalog(), open_catalog()
    first = (await one.transact([], [Put(b"a", b"1")])).revision
    assert await two.get(b"a") == Entry(b"a", b"1", first, first)
    assert (await two.transact([Unchanged(b"a", first)], [Put(b"a", b"2")])).succeeded
    assert not (await one.transact([Unchanged(b"a", first)], [Put(b"a", b"3")])).succeeded
    assert await one.revision() == await two.revision() == first + 1


async def test_an_ended_session_takes_its_keys(open_catalog: OpenCatalog) -> None:
    one, two = open_catalog("one"), open_catalog("two")
    await one.transact([], [Put(b"l/1", b"1", bound_to_session=True), Put(b"stays", b"")])
    await two.transact([], [Put(b"l/2", b"2", bound_to_session=True), Put(b"l/3", b"2", bound_to_session=True)])
    revision = (await two.transact([], [Put(b"l/3", b"unbound")])).revision
    assert await one.end_session("two") == 1
    assert [entry.key for entry in await one.range(b"")] == [b"l/1", b"l/3", b"stays"]
    assert await one.revision() == revision + 1
    assert await one.end_session("two") == 0
    assert await one.revision() == revision + 1


async def test_what_a_session_took_is_gone_for_every_reader(open_catalog: OpenCatalog) -> None:
    one, two = open_catalog("one"), open_catalog("two")
    await one.transact([], [Put(b"l/1", b"1", bound_to_session=True)])
    for handle in (one, two):
        assert await handle.get(b"l/1") is not None
        assert await handle.count(b"l/") == 1
    await one.end_session("one")
    for handle in (one, two):
        assert await handle.get(b"l/1") is None
        assert await handle.count(b"l/") == 0


async def test_watch_gives_every_transaction_in_order(open_catalog: OpenCatalog) -> None:
    one, two = open_catalog(), open_catalog()
    base = await one.revision()
    await one.transact([], [Put(b"a", b"1"), Put(b"b", b"1")])
    await one.transact([], [Delete(b"a"), Delete(b"nothing")])
    with trio.fail_after(5):
        async with aclosing(one.watch(base)) as events:
            assert await anext(events) == [Event(base + 1, b"a", b"1"), Event(base + 1, b"b", b"1")]
            assert await anext(events) == [Event(base + 2, b"a", None)]
            await two.transact([], [Put(b"c", b"")])
            assert await anext(events) == [Event(base + 3, b"c", b"")]
        async with aclosing(two.watch(base + 2)) as events:
            assert await anext(events) == [Event(base + 3, b"c", b"")]


async def test_watch_waits_for_a_change(open_catalog: OpenCatalog, nursery: trio.Nursery) -> None:
    one, two = open_catalog(), open_catalog()
    base = await one.revision()
    seen: list[list[Event]] = []
    arrived = trio.Event()

    async def listen() -> None:
        async with aclosing(one.watch(base)) as events:
            async for transaction in events:
                seen.append(transaction)
                arrived.set()

    nursery.start_soon(listen)
    await trio.testing.wait_all_tasks_blocked()
    await two.transact([], [Put(b"a", b"")])
    with trio.fail_after(5):
        await arrived.wait()
    assert seen == [[Event(base + 1, b"a", b"")]]
    await one.aclose()  # ends the watch, and with it the task


async def test_watch_of_the_future_is_refused(kv: KeyValue) -> None:
    base = await kv.revision()
    with pytest.raises(CatalogCompacted, match=f"before {base + 1}"):
        async with aclosing(kv.watch(base + 1)) as events:
            await anext(events)


async def test_make_durable_returns(kv: KeyValue) -> None:
    await kv.transact([], [Put(b"a", b"")])
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(kv.make_durable)


async def test_counters_by_compare_and_set_lose_nothing(open_catalog: OpenCatalog) -> None:
    handles = [open_catalog() for _ in range(4)]
    first = (await handles[0].transact([], [Put(b"c", b"0")])).revision

    async def count(kv: KeyValue) -> None:
        for _ in range(25):
            while True:
                entry = await kv.get(b"c")
                assert entry is not None
                await trio.lowlevel.checkpoint()
                changed = Put(b"c", b"%d" % (int(entry.value) + 1))
                if (await kv.transact([Unchanged(b"c", entry.mod_revision)], [changed])).succeeded:
                    break

    async with trio.open_nursery() as nursery:
        for handle in handles:
            nursery.start_soon(count, handle)
    entry = await handles[0].get(b"c")
    assert entry is not None
    assert entry.value == b"100"
    assert entry.mod_revision == first + 100


KEYS = (b"a", b"b", b"a/1", b"a/2", b"b/1", b"b/\xff")
_keys = st.sampled_from(KEYS)
_compares = st.one_of(
    st.builds(Unchanged, _keys, st.integers(0, 8)),
    st.builds(Present, _keys),
    st.builds(EmptyRange, st.sampled_from([b"a/", b"b", b"c"])),
)
_operations = st.one_of(st.builds(Put, _keys, st.binary(max_size=3), st.just(False)), st.builds(Delete, _keys))
_transactions = st.lists(
    st.tuples(st.lists(_compares, max_size=2), st.lists(_operations, max_size=4, unique_by=lambda operation: operation.key)),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "open_catalog", ["sqlite", "memory", "etcd"], indirect=True
)  # replicas run in a nursery, which ends with one example
@given(transactions=_transactions)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_history_is_what_a_mapping_says(
    open_catalog: OpenCatalog, transactions: list[tuple[list[Compare], list[Operation]]]
) -> None:
    """Engine against the simplest model; and a watch from the beginning rebuilds the same content."""
    handles = [open_catalog(), open_catalog()]
    kv = handles[0]
    await kv.transact([], [Delete(entry.key) for entry in await kv.range(b"")])
    base = await kv.revision()
    content: dict[bytes, Entry] = {}
    revision = base
    for number, (compares, operations) in enumerate(transactions):
        shifted = [
            Unchanged(c.key, c.mod_revision + base if c.mod_revision else 0) if isinstance(c, Unchanged) else c for c in compares
        ]
        holds = all(_holds(content, compare) for compare in shifted)
        result = await handles[number % 3 % 2].transact(shifted, operations)
        if holds:
            changed = _apply(content, operations, result.revision)
            # Operations that changed nothing may take a revision.
            assert result.revision in ((revision + 1,) if changed else (revision, revision + bool(operations)))
            revision = result.revision
        assert result == (holds, revision)
        for handle in handles:
            assert [await handle.get(key) for key in KEYS] == [content.get(key) for key in KEYS]
            for prefix in (b"", b"a", b"a/", b"b/"):
                assert await handle.count(prefix) == sum(key.startswith(prefix) for key in content)
        assert await kv.range(b"") == [content[key] for key in sorted(content)]
    await kv.transact([], [Put(b"end", b"")])
    replayed: dict[bytes, bytes] = {}
    async with aclosing(kv.watch(base)) as events:
        async for transaction in events:
            for event in transaction:
                if event.value is None:
                    del replayed[event.key]
                else:
                    replayed[event.key] = event.value
            if transaction[-1].key == b"end":
                break
    for handle in handles:
        if isinstance(handle, EtcdCatalog):  # whose connections are of this example's event loop
            await handle.aclose()
    assert replayed.pop(b"end") == b""
    assert replayed == {key: entry.value for key, entry in content.items()}


def _holds(content: dict[bytes, Entry], compare: Compare) -> bool:
    if isinstance(compare, EmptyRange):
        return not any(key.startswith(compare.prefix) for key in content)
    entry = content.get(compare.key)
    if isinstance(compare, Present):
        return entry is not None
    return compare.mod_revision == (entry.mod_revision if entry is not None else 0)


def _apply(content: dict[bytes, Entry], operations: list[Operation], revision: int) -> bool:
    changes = [operation for operation in operations if isinstance(operation, Put) or operation.key in content]
    for operation in changes:
        if isinstance(operation, Put):
            before = content.get(operation.key)
            created = revision if before is None else before.create_revision
            content[operation.key] = Entry(operation.key, operation.value, created, revision)
        else:
            del content[operation.key]
    return bool(changes)


# The fence (R11, I7)

ME, MY_NODE = StoreId(b"m" * 16), NodeId("me")


async def fenced(open_catalog: OpenCatalog) -> tuple[Any, SessionFence]:
    """A handle of a node whose session has begun, and its fence."""
    kv = open_catalog(session_label(ME, 1))
    await begin_session(kv, MY_NODE, ME, 1)
    return kv, await SessionFence.begin(kv, MY_NODE, ME, 1)


async def test_a_node_whose_session_ended_commits_nothing(open_catalog: OpenCatalog) -> None:
    kv, _ = await fenced(open_catalog)
    other = open_catalog("other")
    revision = (await kv.transact([], [Put(b"mine", b"1")])).revision
    await other.end_session(session_label(ME, 1))
    for operations in ([Put(b"new", b"")], [Put(b"mine", b"2")], [Delete(b"mine")]):
        with pytest.raises(SessionEnded, match="session of me"):
            await kv.transact([Unchanged(b"mine", revision)], operations)
    assert (await kv.transact([Unchanged(b"mine", revision)], [])).succeeded  # a read
    entries = {entry.key: entry.value for entry in await other.range(b"")}
    assert entries == {b"mine": b"1"}


async def test_what_ran_before_the_session_began_anew_commits_nothing(open_catalog: OpenCatalog) -> None:
    """A new session under the same label, on etcd even with the same lease: the earlier one stays ended."""
    kv, _ = await fenced(open_catalog)
    label = session_label(ME, 1)
    await open_catalog("other").end_session(label)
    again = open_catalog(label)
    await begin_session(again, MY_NODE, ME, 1)
    for _ in range(2):
        with pytest.raises(SessionEnded):
            await kv.transact([], [Put(b"k", b"")])
    assert await again.get(b"k") is None


async def test_an_operation_waits_for_the_new_session_and_reads_again(open_catalog: OpenCatalog, nursery: trio.Nursery) -> None:
    kv, fence = await fenced(open_catalog)
    label = session_label(ME, 1)
    await open_catalog("other").end_session(label)
    attempts = 0
    refused = trio.Event()

    async def attempt() -> int:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            refused.set()
        try:
            return await commit(kv, [], [Put(b"k", b"")])
        except SessionEnded:
            refused.set()
            raise

    async def begin_anew() -> None:
        await refused.wait()
        again = open_catalog(label)
        await begin_session(again, MY_NODE, ME, 1)
        await fence.run()

    nursery.start_soon(begin_anew)
    with trio.fail_after(10):
        await repeated(attempt)
    assert attempts == 2
    nursery.cancel_scope.cancel()


async def test_a_taken_identity_is_said(open_catalog: OpenCatalog) -> None:
    _, fence = await fenced(open_catalog)
    await open_catalog("third").end_session(session_label(ME, 1))
    other = open_catalog(session_label(StoreId(b"o" * 16), 2))
    await begin_session(other, MY_NODE, StoreId(b"o" * 16), 2)
    with pytest.raises(StoreError, match="another process runs as node me"), trio.fail_after(10):
        await fence.run()
