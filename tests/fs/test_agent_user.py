"""Whom the agent runs as, and how its files become that user's: as root, on real files."""

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptfs.cache.ids import NodeId
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs import agent_user as chosen
from ckptfs.fs.agent_files import OwnersKept, share_socket, take_over
from ckptfs.fs.agent_user import KEPT, AgentUser, stays_root
from ckptfs.fs.config import ConfigurationError
from ckptfs.fs.local_socket import bind
from ckptfs.fs.privileges import CAP_LEASE, CAP_NET_BIND_SERVICE, permitted
from ckptfs.fs.process_start import last_user, write_pid_file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose")

USER = AgentUser("somebody", 1_900_000_001, 1_900_000_002, keeps=KEPT)
OTHER = AgentUser("another", 1_900_000_003, 1_900_000_003, keeps=KEPT)


# Who


def agent_user(wanted: str, cluster: bytes = b"a cluster's id", port: int = 0) -> AgentUser:
    return chosen.agent_user(wanted, cluster, f"127.0.0.1:{port}")


def _nobody_of_that_name(monkeypatch: pytest.MonkeyPatch, present: str = "") -> None:
    monkeypatch.setattr(chosen, "DEFAULT_USER", present or "ckptfs-no-such-user")


def test_without_a_user_of_its_own_a_cluster_has_a_number_that_nobody_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _nobody_of_that_name(monkeypatch)
    user = agent_user("")
    assert user == agent_user("")
    assert user.keeps == KEPT
    assert user.uid == user.gid
    assert 1_879_048_192 <= user.uid < 2_013_265_920
    assert "has no user" in user.why
    assert len({agent_user("", os.urandom(16)).uid for _ in range(20)}) > 15


def test_a_container_with_few_users_has_a_number_too_and_one_with_none_leaves_root(monkeypatch: pytest.MonkeyPatch) -> None:
    _nobody_of_that_name(monkeypatch)
    monkeypatch.setattr(chosen, "_is_mapped", lambda number, _: number < 65536)
    assert 61_184 <= agent_user("").uid < 65_520
    monkeypatch.setattr(chosen, "_is_mapped", lambda number, _: number < 1)
    assert agent_user("") == stays_root("this container has no number free for another user: name one (node.agent_user)")
    _nobody_of_that_name(monkeypatch, "daemon")
    assert (agent_user("").uid, agent_user("").keeps) == (0, None)
    with pytest.raises(ConfigurationError, match="daemon is none of the users that this container has"):
        agent_user("daemon")


def test_the_user_ckptfs_is_taken_where_there_is_one_and_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _nobody_of_that_name(monkeypatch, "nobody")
    assert agent_user("")[:2] == ("nobody", 65534)
    assert agent_user("daemon") == ("daemon", 1, 1, "", KEPT)


def test_root_is_said_to_be_root_and_a_user_that_is_not_there_is_refused() -> None:
    user = agent_user("root")
    assert (user.uid, user.keeps) == (0, None)
    assert "node.agent_user says so" in user.why
    with pytest.raises(ConfigurationError, match="no user ckptfs-no-such-user"):
        agent_user("ckptfs-no-such-user")


def test_where_root_lacks_the_right_it_stays_root_and_says_why_unless_a_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "permitted", lambda: permitted() - {CAP_LEASE})
    user = agent_user("")
    assert (user.uid, user.keeps) == (0, None)
    assert "root lacks CAP_LEASE" in user.why
    with pytest.raises(ConfigurationError, match="root lacks CAP_LEASE here, so the agent can't become daemon"):
        agent_user("daemon")


def test_an_ordinary_user_stays_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert agent_user("")[:2] == ("nobody", 65534)
    assert agent_user("nobody")[3:] == ("", None)
    with pytest.raises(ConfigurationError, match="can't be daemon"):
        agent_user("daemon")


def test_for_a_port_of_root_it_keeps_the_right_to_take_it() -> None:
    assert agent_user("daemon", port=443).keeps == (*KEPT, CAP_NET_BIND_SERVICE)
    assert agent_user("daemon", port=60_000).keeps == KEPT


# Its files


@pytest.fixture
def store(tmp_path: Path) -> StoreDirectory:
    (tmp_path / "log").mkdir()
    return StoreDirectory.create_or_open(tmp_path / "store", NodeId("node-0"))


def _take_over(store: StoreDirectory, user: AgentUser = USER) -> None:
    """As the agent does it at its start."""
    take_over(store, store.path.parent / "log", store.path.parent / "catalog.db", user)
    write_pid_file(store.run, "agent", user.uid)


def _owner(path: Path) -> int:
    return os.lstat(path).st_uid


def _as_earlier_release(store: StoreDirectory, text: str) -> list[sqlite3.Connection]:
    """A release that knows nothing of this runs on the store as root, and is killed: what is not checkpointed is in the logs."""
    open_still = []
    for name in ("agent.db", "small_copies.db"):
        database = sqlite3.connect(store.path / name, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA wal_autocheckpoint=0")
        database.execute("CREATE TABLE IF NOT EXISTS texts(text)")
        database.execute("INSERT INTO texts VALUES(?)", (text,))
        open_still.append(database)
    copy = store.path / "catalog.copy.new"
    copy.write_text(text)
    copy.rename(store.path / "catalog.copy")
    with open(store.path.parent / "log" / "agent.log", "a") as log:
        log.write(f"{text}\n")
    for place in (store.shards / "00", store.copies / "ff"):
        place.mkdir(exist_ok=True)
        (place / text).write_text(text)
    (store.run / "agent.pid").write_text("12345 67890\n")
    return open_still


def _killed(databases: list[sqlite3.Connection], store: StoreDirectory) -> None:
    """The files as they were before the databases were closed, which empties their logs."""
    places = [Path(os.path.realpath(store.path / name)) for name in ("agent.db", "small_copies.db")]
    files = [Path(f"{place}{suffix}") for place in places for suffix in ("", "-wal", "-shm")]
    contents = {path: path.read_bytes() for path in files}
    for database in databases:
        database.close()
    for path, content in contents.items():
        path.write_bytes(content)


def _check(store: StoreDirectory, texts: list[str]) -> None:
    assert [store.agent_db, store.small_copies_db] == [store.agent / "agent.db", store.agent / "small_copies.db"]
    for path in (store.agent_db, store.small_copies_db):
        assert Path(os.path.realpath(store.path / path.name)) == path
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT text FROM texts").fetchall() == [(text,) for text in texts]
    assert store.catalog_copy.read_text() == texts[-1]
    assert sorted(path.name for path in store.path.glob("*.db*")) == ["agent.db", "small_copies.db"]
    for directory in (store.agent, store.shards, store.copies, store.path.parent / "log" / "agent"):
        for path in (directory, *directory.rglob("*")):
            assert _owner(path) == USER.uid, path
    for path in (store.path, store.segments, store.run, store.path / "store.json", store.path.parent / "log"):
        assert _owner(path) == 0, path
    assert (store.path.parent / "log" / "agent.log").read_text().splitlines()[-1] == texts[-1]


def test_a_store_of_an_earlier_release_is_taken_over_and_goes_back_and_forth(store: StoreDirectory) -> None:
    _killed(_as_earlier_release(store, "first"), store)
    _take_over(store)
    _check(store, ["first"])
    _killed(_as_earlier_release(store, "second"), store)
    _take_over(store)
    _check(store, ["first", "second"])


def test_what_an_earlier_release_made_anew_is_the_newer(store: StoreDirectory) -> None:
    _killed(_as_earlier_release(store, "first"), store)
    _take_over(store)
    for name in ("agent.db", "small_copies.db"):
        (store.path / name).unlink()
    _killed(_as_earlier_release(store, "anew"), store)
    assert store.agent_db == store.path / "agent.db"
    _take_over(store)
    _check(store, ["anew"])


@pytest.mark.parametrize("call", ["rename", "symlink", "chown", "unlink"])
def test_a_kill_amid_it_is_made_good_by_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real: Callable[..., object] = getattr(os, call)
    calls = 0
    for number in range(100):
        directory = tmp_path / str(number)
        (directory / "log").mkdir(parents=True)
        store = StoreDirectory.create_or_open(directory / "store", NodeId("node-0"))
        _killed(_as_earlier_release(store, "first"), store)
        left = number

        def cut_off(*arguments: object, **options: object) -> object:
            nonlocal left, calls
            if not left:
                raise KeyboardInterrupt
            left -= 1
            calls += 1
            return real(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, cut_off)
            try:
                _take_over(store)
            except KeyboardInterrupt:
                pass
            else:
                break
        _take_over(store)
        _check(store, ["first"])
    assert calls


@pytest.fixture
def refusing(scratch: Path) -> Iterator[StoreDirectory]:
    """A store of root's whose drive gives one of its shards to nobody."""
    (scratch / "log").mkdir()
    store = StoreDirectory.create_or_open(scratch / "store", NodeId("node-0"))
    (store.shards / "00").mkdir()
    shard = store.shards / "00" / "shard"
    shard.touch()
    subprocess.run(["chattr", "+i", shard], check=True)
    yield store
    subprocess.run(["chattr", "-i", shard], check=True)


def test_a_drive_that_keeps_owners_is_named_and_serves_root(refusing: StoreDirectory) -> None:
    with pytest.raises(OwnersKept, match=r"shards/00/shard can't be given to somebody \(Operation not permitted\)"):
        _take_over(refusing)
    assert last_user(refusing.run, "agent") is None
    _take_over(refusing, stays_root(""))
    assert last_user(refusing.run, "agent") == 0


def test_an_agent_that_is_root_leaves_the_catalog_to_those_that_are_not(store: StoreDirectory, tmp_path: Path) -> None:
    (tmp_path / "catalog.db").touch()
    _take_over(store)
    _take_over(store, stays_root(""))
    assert _owner(tmp_path / "catalog.db") == USER.uid


def test_owners_are_looked_at_one_by_one_only_after_another_user(store: StoreDirectory) -> None:
    _killed(_as_earlier_release(store, "first"), store)
    _take_over(store)
    shard = store.shards / "00" / "first"
    os.chown(shard, 0, 0)
    _take_over(store)
    assert _owner(shard) == 0
    database = store.agent / "agent.db"
    os.chown(database, 0, 0)
    _take_over(store)
    assert _owner(database) == USER.uid
    _take_over(store, OTHER)
    assert _owner(shard) == OTHER.uid
    assert last_user(store.run, "agent") == OTHER.uid
    _take_over(store)
    assert _owner(shard) == USER.uid


def test_an_agent_that_was_taken_over_is_not_given_what_its_links_lead_to(store: StoreDirectory, tmp_path: Path) -> None:
    _take_over(store)
    target = tmp_path / "root's"
    target.write_text("root's")
    for place in (store.shards / "link", store.copies / "link", store.agent / "agent.db-wal", store.agent / "agent.db"):
        place.unlink(missing_ok=True)
        place.symlink_to(target)
    (store.shards / "away").symlink_to(tmp_path)
    os.link(target, store.shards / "hard")
    _take_over(store, OTHER)
    assert _owner(target) == 0
    assert _owner(tmp_path) == 0
    assert target.read_text() == "root's"


def test_the_catalog_becomes_writable_for_it_and_the_mount_can_be_asked(store: StoreDirectory, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "real.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE texts(text)")
        (tmp_path / "catalog.db").symlink_to("real.db")
        with bind(store.mount_socket):
            _take_over(store)
            assert _owner(store.mount_socket) == USER.uid
        assert [_owner(tmp_path / name) for name in ("real.db", "real.db-wal", "real.db-shm")] == [USER.uid] * 3
    with closing(sqlite3.connect(tmp_path / "real.db")) as database:  # root's, as that of a mount process
        database.execute("INSERT INTO texts VALUES('x')")
        assert [_owner(tmp_path / name) for name in ("real.db-wal", "real.db-shm")] == [USER.uid] * 2
    with bind(store.mount_socket):
        assert _owner(store.mount_socket) == 0
        share_socket(store)
        assert _owner(store.mount_socket) == USER.uid
