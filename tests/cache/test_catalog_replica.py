"""What only a replica can meet: a lag, a history that was cut, a file that was damaged or is another catalog's."""

import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from ckptfs.cache.catalog_etcd import EtcdCatalog
from ckptfs.cache.catalog_kv import Delete, Event, Put
from ckptfs.cache.catalog_replica import ReplicatedCatalog
from ckptfs.cache.errors import DamagedData
from ckptfs.cache.etcd_gateway import EtcdGateway

pytestmark = pytest.mark.slow


@asynccontextmanager
async def running(url: str, name: str, path: Path) -> AsyncIterator[ReplicatedCatalog]:
    async with trio.open_nursery() as nursery:
        replica = ReplicatedCatalog(EtcdCatalog(EtcdGateway([url]), name), path)
        await nursery.start(replica.run)
        try:
            yield replica
        finally:
            with trio.CancelScope(shield=True):
                await replica.aclose()


def origin_of(url: str, name: str) -> Any:
    return aclosing(EtcdCatalog(EtcdGateway([url]), name))


@pytest.fixture
def name() -> str:
    return f"test-{os.urandom(4).hex()}"


async def test_it_goes_on_where_it_was(etcd: Any, name: str, tmp_path: Path) -> None:
    async with origin_of(etcd.url, name) as origin:
        await origin.transact([], [Put(b"a", b"1"), Put(b"b", b"1")])
        async with running(etcd.url, name, tmp_path / "replica.db") as replica:
            before = await replica.range(b"")
            assert before == await origin.range(b"")
        await origin.transact([], [Put(b"a", b"2"), Delete(b"b"), Put(b"c", b"1")])
        async with running(etcd.url, name, tmp_path / "replica.db") as replica:
            assert await replica.range(b"") == await origin.range(b"")
            assert (await replica.range(b""))[0].create_revision == before[0].create_revision


async def test_a_history_that_was_cut_is_loaded_anew(make_etcd: Callable[[], Any], name: str, tmp_path: Path) -> None:
    server = make_etcd()
    async with origin_of(server.url, name) as origin:
        await origin.transact([], [Put(b"a", b"1"), Put(b"b", b"1")])
        async with running(server.url, name, tmp_path / "replica.db"):
            pass
        await origin.transact([], [Delete(b"b")])
        last = await origin.transact([], [Put(b"c", b"1")])
        await origin.compact(last.revision)
        async with running(server.url, name, tmp_path / "replica.db") as replica:
            assert await replica.get(b"b") is None
            assert await replica.range(b"") == await origin.range(b"")


@pytest.mark.parametrize("damage", ["record", "bytes", "gone", "another catalog's", "another layout"])
async def test_a_file_that_can_not_be_used_is_made_anew(etcd: Any, name: str, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "replica.db"
    async with origin_of(etcd.url, name) as origin:
        await origin.transact([], [Put(b"a", b"1"), Put(b"b", b"1")])
        async with running(etcd.url, name, path):
            pass
        match damage:
            case "record":
                with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                    connection.execute("UPDATE kv SET value=x'00' WHERE key=?", (b"a",))
            case "bytes":
                path.write_bytes(os.urandom(path.stat().st_size))
            case "gone":
                path.unlink()
            case "another layout":
                with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                    connection.execute("PRAGMA user_version=7")
            case _:
                async with running(etcd.url, f"{name}-2", path) as other:
                    assert await other.range(b"") == []
        async with running(etcd.url, name, path) as replica:
            if damage == "record":  # found by who reads it
                with pytest.raises(DamagedData, match="it is made anew from the catalog"):
                    await replica.get(b"a")
                with trio.fail_after(10):
                    while (entry := await _or_none(replica, b"a")) is None:
                        await trio.sleep(0.01)
                assert entry.value == b"1"
            assert await replica.range(b"") == await origin.range(b"")


async def test_a_damaged_record_is_not_found_again_by_the_next_process(
    etcd: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ends because of it, before anything could be loaded anew."""
    path = tmp_path / "replica.db"
    async with origin_of(etcd.url, name) as origin:
        await origin.transact([], [Put(b"a", b"1")])
        async with running(etcd.url, name, path):
            pass
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("UPDATE kv SET value=x'00' WHERE key=?", (b"a",))
        with monkeypatch.context() as never_loaded:
            never_loaded.setattr(ReplicatedCatalog, "_load", lambda self: trio.sleep_forever())
            async with running(etcd.url, name, path) as replica:
                with pytest.raises(DamagedData):
                    await replica.get(b"a")
        async with running(etcd.url, name, path) as replica:
            assert await replica.range(b"") == await origin.range(b"")


async def test_nothing_is_missing_while_it_is_loaded_anew(
    etcd: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, keys = tmp_path / "replica.db", [b"%04d" % number for number in range(1000)]
    async with origin_of(etcd.url, name) as origin:
        for start in range(0, len(keys), 100):
            await origin.transact([], [Put(key, b"1") for key in keys[start : start + 100]])
        async with running(etcd.url, name, path) as replica:
            has_deleted, goes_on = threading.Event(), threading.Event()

            class Halfway(sqlite3.Connection):
                def executemany(self, *arguments: Any) -> Any:
                    has_deleted.set()
                    assert goes_on.wait(60)
                    return super().executemany(*arguments)

            connect = sqlite3.connect
            monkeypatch.setattr(sqlite3, "connect", lambda *args, **more: connect(*args, factory=Halfway, **more))
            with closing(connect(path, isolation_level=None)) as connection:
                connection.execute("UPDATE kv SET value=x'00' WHERE key=?", (keys[0],))
            with pytest.raises(DamagedData):
                await replica.get(keys[0])
            try:
                with trio.fail_after(30):
                    await trio.to_thread.run_sync(has_deleted.wait, abandon_on_cancel=True)
                assert [entry and entry.value for entry in await replica.get_many(keys[1:])] == [b"1"] * 999
            finally:
                goes_on.set()
            with trio.fail_after(30):
                while await _or_none(replica, keys[0]) is None:
                    await trio.sleep(0.01)
            assert await replica.range(b"") == await origin.range(b"")


async def test_damaged_pages_end_the_process_once(etcd: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "replica.db"
    async with origin_of(etcd.url, name) as origin:
        for start in range(10):
            await origin.transact([], [Put(b"%d-%d" % (start, number), os.urandom(500)) for number in range(100)])
        async with running(etcd.url, name, path):
            pass
        content, leaf = bytearray(path.read_bytes()), b"\x0a"
        for page in range(0, len(content), 4096):
            if content[page : page + 1] == leaf and b"9-9" in content[page : page + 4096]:
                content[page : page + 16] = b"\xff" * 16
        path.write_bytes(content)

        async def runs_until_it_ends() -> None:
            async with running(etcd.url, name, path) as replica:
                with pytest.raises(DamagedData):
                    await replica.range(b"")
                await trio.sleep_forever()

        with trio.fail_after(30), pytest.raises(ExceptionGroup) as ended:
            await runs_until_it_ends()
        assert ended.group_contains(sqlite3.DatabaseError)
        async with running(etcd.url, name, path) as replica:
            assert await replica.range(b"") == await origin.range(b"")


@pytest.mark.mount
async def test_it_goes_on_in_memory_on_a_full_drive_and_in_its_file_when_there_is_room(
    etcd: Any, name: str, make_drive: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptfs.cache.catalog_replica.FILE_RETRY_SECONDS", 0.05)
    drive = make_drive(64)
    path, filler = drive / "replica.db", drive / "filler"
    heard: list[Event] = []
    async with origin_of(etcd.url, name) as origin, running(etcd.url, name, path) as replica:
        replica.on_events = heard.extend
        with open(filler, "wb") as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                file.flush()
        puts = [Put(b"%04d" % number, os.urandom(5000)) for number in range(300)]
        for put in puts:  # more than what its log has room for
            await replica.transact([], [put])
        assert await replica.range(b"") == await origin.range(b"")
        assert [event.key for event in heard] == [put.key for put in puts], "nobody missed any of it"
        async with running(etcd.url, name, drive / "new.db") as started:
            assert await started.range(b"") == await origin.range(b"")
        async with running(etcd.url, name, path) as started:
            assert await started.range(b"") == await origin.range(b"")
        filler.unlink()
        with trio.fail_after(30):
            while len(_keys_in(path)) < 300:
                await trio.sleep(0.01)
        await replica.transact([], [Delete(puts[0].key)])
        assert _keys_in(path) == [entry.key for entry in await origin.range(b"")]
        assert len(heard) == 301


def _keys_in(path: Path) -> list[bytes]:
    with closing(sqlite3.connect(path)) as database:
        return [key for (key,) in database.execute("SELECT key FROM kv ORDER BY key")]


async def _or_none(replica: ReplicatedCatalog, key: bytes) -> Any:
    try:
        return await replica.get(key)
    except DamagedData:
        return None


async def test_one_barrier_serves_all_who_asked_before_it_was_sent(etcd: Any, name: str, tmp_path: Path) -> None:
    async with running(etcd.url, name, tmp_path / "replica.db") as replica:
        asked = 0
        revision = replica._origin.revision

        async def counted() -> int:
            nonlocal asked
            asked += 1
            return await revision()

        replica._origin.revision = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(replica.catch_up)
        assert asked <= 2


async def test_who_listens_hears_of_others_and_of_own_commits(etcd: Any, name: str, tmp_path: Path) -> None:
    async with origin_of(etcd.url, name) as origin, running(etcd.url, name, tmp_path / "replica.db") as replica:
        heard: list[tuple[bytes, int]] = []
        own: list[int] = []
        replica.on_events = lambda events: heard.extend((event.key, event.revision) for event in events)
        replica.on_commit = own.append
        foreign = await origin.transact([], [Put(b"theirs", b"")])
        mine = await replica.transact([], [Put(b"mine", b"")])
        await replica.catch_up()
        assert heard == [(b"theirs", foreign.revision), (b"mine", mine.revision)]
        assert own == [mine.revision]
