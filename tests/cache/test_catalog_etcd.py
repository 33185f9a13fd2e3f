"""What only the etcd engine can meet: answers that are lost, members that die, sessions that end, an etcd that is another one."""

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_etcd import EtcdCatalog, lease_of
from ckptfs.cache.catalog_kv import Put, Unchanged, prefix_end
from ckptfs.cache.errors import CatalogCompacted, CatalogReplaced, CatalogUnavailable, SessionEnded
from ckptfs.cache.etcd_gateway import EtcdGateway, EtcdRefused

pytestmark = pytest.mark.slow


def catalog_of(url: str, name: str = "", *, session: str | None = None, **options: Any) -> EtcdCatalog:
    return EtcdCatalog(EtcdGateway([url], **options), name or f"test-{os.urandom(4).hex()}", session=session)


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"a", b"b"), (b"a/", b"a0"), (b"a\xff", b"b"), (b"", b"\xff" * 300), (b"a\xfe", b"a\xff")]
)
def test_prefix_end(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end


def test_lease_ids_are_positive_63_bit_numbers() -> None:
    assert all(0 < lease_of(f"s{number}") < 1 << 63 for number in range(1000))
    assert lease_of("s1") != lease_of("s2")


class Proxy:
    """Between a client and etcd; with `loss`, that share of connections is cut at a moment of chance: the request is lost on the
    way there, or its answer on the way back."""

    def __init__(self, target: tuple[str, int], rng: random.Random) -> None:
        self.target = target
        self.rng = rng
        self.loss = 0.0
        self.stalled = False
        self.cut = 0
        self.url = ""

    async def serve(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(
                lambda task_status: trio.serve_tcp(self._pass, 0, host="127.0.0.1", task_status=task_status)
            )
            self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            task_status.started()

    async def _pass(self, client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream(*self.target)
        async with server, trio.open_nursery() as nursery:

            async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
                try:
                    while data := await source.receive_some():
                        while self.stalled:
                            await trio.sleep(0.02)
                        if self.rng.random() < self.loss:
                            self.cut += 1
                            break
                        await sink.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(pump, client, server)
            nursery.start_soon(pump, server, client)


@asynccontextmanager
async def proxied(etcd: Any, seed: int = 0) -> AsyncIterator[Proxy]:
    host, port = etcd.url.removeprefix("http://").split(":")
    proxy = Proxy((host, int(port)), random.Random(seed))
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        yield proxy
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(3))
async def test_lost_requests_and_answers_change_nothing_twice(etcd: Any, seed: int) -> None:
    """Counters are raised without reading why a compare failed: one lost or doubled effect would show in the sum."""
    name = f"test-{os.urandom(4).hex()}"
    clients, rounds = 3, 30
    async with AsyncExitStack() as stack, proxied(etcd, seed) as proxy:
        handles = [
            await stack.enter_async_context(aclosing(catalog_of(proxy.url, name, wait_seconds=20))) for _ in range(clients)
        ]
        proxy.loss = 0.15

        async def raise_own(number: int, kv: EtcdCatalog) -> None:
            """Only this task writes the key: if every answer is true, no compare ever fails."""
            key, revision = b"own/%d" % number, 0
            for count in range(rounds):
                result = await kv.transact([Unchanged(key, revision)], [Put(key, b"%d" % count)])
                assert result.succeeded, (number, count)
                revision = result.revision

        async def raise_shared(kv: EtcdCatalog) -> None:
            for _ in range(rounds):
                while True:
                    entry = await kv.get(b"shared")
                    value, revision = (0, 0) if entry is None else (int(entry.value), entry.mod_revision)
                    if (await kv.transact([Unchanged(b"shared", revision)], [Put(b"shared", b"%d" % (value + 1))])).succeeded:
                        break

        async with trio.open_nursery() as nursery:
            for number, kv in enumerate(handles):
                nursery.start_soon(raise_own, number, kv)
                nursery.start_soon(raise_shared, kv)
        proxy.loss = 0.0
        shared = await handles[0].get(b"shared")
        assert shared is not None
        assert int(shared.value) == clients * rounds
        assert proxy.cut > 20


async def test_a_watch_goes_on_over_broken_connections(etcd: Any) -> None:
    name = f"test-{os.urandom(4).hex()}"
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(aclosing(catalog_of(etcd.url, name)))
        proxy = await stack.enter_async_context(proxied(etcd, 7))
        reader = await stack.enter_async_context(aclosing(catalog_of(proxy.url, name)))
        base = await writer.revision()
        seen: list[bytes] = []
        proxy.loss = 0.2

        async def write() -> None:
            for number in range(60):
                await writer.transact([], [Put(b"k", b"%d" % number)])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            with trio.fail_after(60):
                async with aclosing(reader.watch(base)) as events:
                    async for transaction in events:
                        seen += [event.value or b"" for event in transaction]
                        if len(seen) == 60:
                            break
        assert seen == [b"%d" % number for number in range(60)]


async def test_no_answer_is_an_error_in_bounded_time(etcd: Any) -> None:
    async with proxied(etcd) as proxy, aclosing(catalog_of(proxy.url, wait_seconds=1)) as kv:
        await kv.transact([], [Put(b"a", b"1")])
        proxy.stalled = True
        for call in (lambda: kv.get(b"a"), lambda: kv.transact([], [Put(b"a", b"2")]), kv.revision):
            with pytest.raises(CatalogUnavailable, match="the operation can be repeated"), trio.fail_after(10):
                await call()
        proxy.stalled = False
        await kv.transact([], [Put(b"a", b"3")])
        entry = await kv.get(b"a")
        assert entry is not None
        assert entry.value in (b"2", b"3")


async def test_nobody_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    async with aclosing(catalog_of("http://127.0.0.1:1", wait_seconds=0.3)) as kv:
        with pytest.raises(CatalogUnavailable, match=r"etcd \(http://127.0.0.1:1\) did not answer for 0.3 s"):
            await kv.get(b"a")


async def test_what_answers_is_no_etcd() -> None:
    async def nonsense(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n<html></>")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(
            lambda task_status: trio.serve_tcp(nonsense, 0, host="127.0.0.1", task_status=task_status)
        )
        async with aclosing(catalog_of(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", wait_seconds=1)) as kv:
            with pytest.raises(CatalogUnavailable, match="is this an etcd gateway"):
                await kv.get(b"a")
        nursery.cancel_scope.cancel()


async def test_a_member_that_is_killed_and_comes_back(make_etcd: Callable[[], Any]) -> None:
    server = make_etcd()
    async with aclosing(catalog_of(server.url, wait_seconds=20)) as kv, trio.open_nursery() as nursery:
        first = await kv.transact([], [Put(b"a", b"1")])
        server.kill()

        async def back() -> None:
            await trio.to_thread.run_sync(server.start)

        nursery.start_soon(back)
        with trio.fail_after(40):
            second = await kv.transact([Unchanged(b"a", first.revision)], [Put(b"a", b"2")])
        assert second.succeeded
        entry = await kv.get(b"a")
        assert entry is not None
        assert entry.value == b"2"


async def test_another_etcd_or_an_older_state_is_refused(make_etcd: Callable[[], Any]) -> None:
    """R9: nothing may be decided by a catalog that isn't the one the node knew."""
    one, other = make_etcd(), make_etcd()
    async with proxied(one) as proxy, aclosing(catalog_of(proxy.url)) as kv:
        for number in range(20):
            await kv.transact([], [Put(b"a", b"%d" % number)])
        async with aclosing(catalog_of(other.url)) as elsewhere:
            await elsewhere.transact([], [Put(b"a", b"")])
        host, port = other.url.removeprefix("http://").split(":")
        proxy.target = (host, int(port))
        proxy.loss = 1.0
        with pytest.raises(CatalogUnavailable), trio.fail_after(10):
            async with aclosing(catalog_of(proxy.url, wait_seconds=0.5)) as cut:
                await cut.get(b"a")
        proxy.loss = 0.0
        async with aclosing(catalog_of(proxy.url)) as fresh:
            await fresh.get(b"a")
        # The handle's kept connections end, as those of a member that goes do.
        while kv._gateway._idle:
            await kv._gateway._idle.pop()[1].aclose()
        for call in (lambda: kv.get(b"a"), lambda: kv.transact([], [Put(b"a", b"")]), kv.revision):
            with pytest.raises(CatalogReplaced, match="Nothing is changed by it"):
                await call()


async def test_an_ended_session_commits_nothing(etcd: Any) -> None:
    label = f"session-{os.urandom(4).hex()}"
    async with aclosing(catalog_of(etcd.url, session=label)) as kv:
        await kv.begin_session(60)
        await kv.begin_session(60)  # by another process of the node
        await kv.transact([], [Put(b"l/me", b"", bound_to_session=True)])
        await kv.renew_session()
        assert await kv.end_session(label) == 1
        assert await kv.get(b"l/me") is None
        with pytest.raises(SessionEnded, match="has ended"):
            await kv.renew_session()
        with pytest.raises(SessionEnded):
            await kv.transact([], [Put(b"l/me", b"", bound_to_session=True)])
        with pytest.raises(SessionEnded):
            await kv.transact([], [Put(b"unbound", b"")])
        assert await kv.range(b"") == []


async def test_a_session_that_is_not_renewed_ends_by_itself(etcd: Any) -> None:
    label = f"session-{os.urandom(4).hex()}"
    async with aclosing(catalog_of(etcd.url, session=label)) as kv:
        await kv.begin_session(1)
        base = (await kv.transact([], [Put(b"l/me", b"", bound_to_session=True)])).revision
        with trio.fail_after(30):
            async with aclosing(kv.watch(base)) as events:
                ((event,),) = [await anext(events)]
        assert (event.key, event.value) == (b"l/me", None)


async def test_a_kept_session_stays(etcd: Any) -> None:
    label = f"session-{os.urandom(4).hex()}"
    alive = True
    async with aclosing(catalog_of(etcd.url, session=label)) as kv, trio.open_nursery() as nursery:
        await kv.begin_session(1)
        base = (await kv.transact([], [Put(b"l/me", b"", bound_to_session=True)])).revision
        nursery.start_soon(kv.keep_session, 1, lambda: alive)
        with trio.move_on_after(4):
            async with aclosing(kv.watch(base)) as events:
                pytest.fail(f"{await anext(events)}: the session ended")
        alive = False
        with trio.fail_after(30):
            async with aclosing(kv.watch(base)) as events:
                await anext(events)
        nursery.cancel_scope.cancel()


async def test_a_history_that_was_cut_is_said(make_etcd: Callable[[], Any]) -> None:
    """Also where the watch begins at the very revision the history was cut at, where etcd 3.4.23 loses a deletion."""
    server = make_etcd()
    async with aclosing(catalog_of(server.url)) as kv:
        revisions = [(await kv.transact([], [Put(b"a", b"%d" % number)])).revision for number in range(10)]
        await kv.compact(revisions[5])
        await kv.compact(revisions[5])
        for after in (revisions[0], revisions[4]):
            with pytest.raises(CatalogCompacted):
                async with aclosing(kv.watch(after)) as events:
                    await anext(events)
        async with aclosing(kv.watch(revisions[5])) as events:
            assert (await anext(events))[0].value == b"6"
        with pytest.raises(CatalogCompacted):
            await kv._range({"key": b"a", "revision": revisions[1]})


async def test_user_and_password(make_etcd: Callable[[], Any]) -> None:
    server = make_etcd()
    for path, body in (
        ("user/add", {"name": "root", "password": "secret"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        server.post(f"/v3/auth/{path}", body)
    async with aclosing(catalog_of(server.url, user="root", password="secret")) as kv:
        base = (await kv.transact([], [Put(b"a", b"1")])).revision
        async with aclosing(kv.watch(base - 1)) as events:
            assert (await anext(events))[0].value == b"1"
        kv._gateway._token = "expired.1"
        assert await kv.get(b"a") is not None
    async with aclosing(catalog_of(server.url, user="root", password="wrong")) as kv:
        with pytest.raises(EtcdRefused, match="authentication failed"):
            await kv.get(b"a")
    async with aclosing(catalog_of(server.url)) as kv:
        with pytest.raises(EtcdRefused, match="user name is empty"):
            await kv.get(b"a")
