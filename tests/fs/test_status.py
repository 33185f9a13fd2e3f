"""The ladder, and what a directory of files adds up to."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ckptfs.fs.cli_errors import Unreachable, WrongUse
from ckptfs.fs.cli_status import _cluster_text, _path_text, _risk_text
from ckptfs.fs.local_socket import LENGTH
from ckptfs.fs.node_processes import started_at
from ckptfs.fs.status import (
    LADDER,
    FileStanding,
    PathStanding,
    Place,
    at_risk,
    first_that_answers,
    in_order,
    local_node_of,
    node_status,
    place_of_path,
    rank,
    walk_files,
)


def test_a_directory_is_as_good_as_its_worst_file() -> None:
    files = [FileStanding("a", "protected", 2, 10), FileStanding("b", "local", 0, 5)]
    assert PathStanding("d", files).as_json() == {
        "path": "d",
        "state": "local",
        "protected_m": 0,
        "bytes": 15,
        "files": 2,
        "damaged": [],
        "lost": [],
        "rolled_back": [],
        "away": [],
        "problems": [],
    }
    assert PathStanding("d", files[:1]).as_json() == {
        "path": "d",
        "state": "protected",
        "protected_m": 2,
        "bytes": 10,
        "files": 1,
        "damaged": [],
        "lost": [],
        "rolled_back": [],
        "away": [],
        "problems": [],
    }
    files.append(FileStanding("d/c", "damaged", 0, 1))
    assert PathStanding("d", files).as_json()["state"] == "damaged"
    assert PathStanding("d", files).as_json()["damaged"] == ["d/c"]


def test_an_empty_directory_has_nothing_unprotected() -> None:
    assert PathStanding("d").as_json() == {
        "path": "d",
        "state": "protected",
        "protected_m": None,
        "bytes": 0,
        "files": 0,
        "damaged": [],
        "lost": [],
        "rolled_back": [],
        "away": [],
        "problems": [],
    }


def test_states_are_ordered_and_an_unknown_one_is_the_worst() -> None:
    assert sorted(LADDER, key=rank) == list(LADDER)
    assert rank("open") < rank("local") < rank("protected") < rank("tiered")
    assert rank("of a newer release") < min(rank(state) for state in LADDER)


def test_a_walk_gives_each_regular_file_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "deep")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert [(path, size) for _, path, size in walk_files(tmp_path)] == [(str(tmp_path / "deep" / "er" / "file"), 5)]
    assert [size for _, _, size in walk_files(tmp_path / "deep" / "er" / "file")] == [5]


def test_files_whose_attributes_nobody_gives_are_walked_over_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their home is away: stat(2) gives EIO, the directory still has name, kind and inode."""
    for name in ("away", "here"):
        (tmp_path / name).write_bytes(b"12345")
    inode = (tmp_path / "away").stat().st_ino
    real = os.stat

    def stat_unless_away(path: Any, **options: Any) -> os.stat_result:
        if os.path.basename(path) == "away":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat_unless_away)
    assert list(walk_files(tmp_path / "away")) == [(inode, str(tmp_path / "away"), 0)]
    with pytest.raises(Unreachable, match="Input/output"):
        list(walk_files(tmp_path / "none" / "away"))


def test_paths_that_lead_to_no_node_say_so(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="does not exist"):
        list(walk_files(tmp_path / "none"))
    with pytest.raises(WrongUse, match="lies in no ckptfs mount"):
        place_of_path(tmp_path)


def test_a_node_that_is_down_has_null_where_only_it_could_know(tmp_path: Path) -> None:
    status = node_status(Place("node-0", tmp_path / "store", tmp_path / "mnt"))
    assert status["alive"] is False
    assert status["processes"] == {"supervisor": None, "mount": None, "agent": None}
    assert status["unprotected_bytes"] is None
    assert status["oldest_unprotected_seconds"] is None
    assert status["damaged_files"] is None
    assert status["mountpoint"] == str(tmp_path / "mnt")


def test_a_path_of_a_cluster_node_that_is_down_is_unreachable(tmp_path: Path) -> None:
    directory = tmp_path / "node-3"
    (directory / "mnt").mkdir(parents=True)
    (directory / "node.toml").write_text(
        f'[node]\nid = "node-3"\nstore = "{directory}/store"\nmountpoint = "{directory}/mnt"\ncatalog = "sqlite:///{tmp_path}/c.db"\n'
    )
    found = local_node_of(directory / "mnt" / "file")
    assert found is not None
    assert found.id == "node-3"
    with pytest.raises(Unreachable, match="node-3 is not mounted"):
        place_of_path(directory / "mnt" / "file")


def test_mountpoints_are_listed_by_their_numbers() -> None:
    paths = [Path(f"/c/node-{number}/mnt") for number in (10, 2, 0, 1)] + [Path("/a"), Path("/7/x")]
    expected = ["/7/x", "/a", "/c/node-0/mnt", "/c/node-1/mnt", "/c/node-2/mnt", "/c/node-10/mnt"]
    assert [str(path) for path in sorted(paths, key=in_order)] == expected


def test_an_unreachable_file_names_the_nodes_to_start() -> None:
    files = [FileStanding("d/a", "unreachable", 0, 0, "node-1", 0, ("node-1", "node-4"), False)]
    document = PathStanding("d/a", files).as_json()
    assert (document["away"], document["sizes_unknown"]) == (["node-1", "node-4"], 1)
    assert _path_text(document) == "unreachable: size unknown: start node-1, node-4: the bytes are there"
    files.append(FileStanding("d/b", "degraded", 1, 1024, "node-2", 0, ("node-5",)))
    assert "1.0 KiB and 1 of unknown size in 2 files: start node-1, node-4, node-5" in str(
        _path_text(PathStanding("d", files).as_json())
    )
    assert str(_path_text(PathStanding("d/b", files[1:]).as_json())).endswith("; away: node-5")


def standing(name: str, unprotected: int | None, *, away: int = 0) -> dict[str, Any]:
    mount = None if unprotected is None else {"unprotected_bytes": 10 * unprotected, "unprotected_files": unprotected}
    stores = [{"state": "in", "live": number >= away} for number in range(6)]
    agent = {"stores": stores, "code": "4+2"}
    return {"id": name, "mount": mount and mount | {"oldest_unprotected_seconds": 3.0}, "agent": agent}


def test_the_standing_line_is_about_the_node_whose_death_would_cost_most() -> None:
    risk = at_risk([standing("a", 1), standing("b", 4), standing("c", None)])
    assert (risk["node"], risk["files"], risk["bytes"], risk["oldest_seconds"]) == ("b", 4, 40, 3.0)
    assert risk["unknown"] == ["c"]
    assert _risk_text(risk).startswith("if b died now, 40 B in 4 files would be lost")
    assert "not known of c" in _risk_text(risk)
    assert _risk_text(at_risk([standing("a", 0)])) == "if any one of these nodes died now, no closed file would be lost"
    assert "2 nodes are away" in _risk_text(at_risk([standing("a", 0, away=2)]))
    assert at_risk([])["node"] is None
    nobody = _risk_text(at_risk([standing("a", None), standing("b", None)]))
    assert nobody.startswith("nothing is known of what is not protected: none of these nodes answers")


def _with_agent(name: str, user: str, why: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "processes": {},
        "lane": None,
        "problems": [],
        "mountpoint": "/m",
        "open_files": 0,
        "oldest_unprotected_seconds": 0.0,
    }
    node = standing(name, 0)
    node["agent"]["user"] = {"name": user, "why": why}
    return node | facts | {"alive": True, "unprotected_bytes": 0, "lane_reason": ""}


def test_status_says_of_every_agent_as_whom_it_runs() -> None:
    nodes = [_with_agent("a", "ckptfs", ""), _with_agent("b", "ckptfs", ""), _with_agent("c", "root", "the drive keeps owners")]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(_cluster_text(nodes))
    lines = captured.get().splitlines()
    assert "a, b: the agent runs as ckptfs" in lines
    assert "c: the agent runs as root: the drive keeps owners" in lines


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[Place]:
    """A node whose mount process goes with the first request it was given, and answers the second one."""
    run = tmp_path / "run"
    run.mkdir()

    def serve(listener: socket.socket) -> None:
        listener.accept()[0].close()
        with contextlib.suppress(OSError):  # the end of the test
            connection, _ = listener.accept()
            connection.recv(1000)
            answer = msgspec.msgpack.encode({"ok": True, "asked": "again"})
            connection.sendall(LENGTH.pack(len(answer)) + answer)
            connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run / "mount.sock"))
        listener.listen()
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        yield Place("node-0", tmp_path, tmp_path / "mnt")
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def test_a_process_that_is_started_again_is_asked_again(restarting: Place) -> None:
    program = [sys.executable, "-c", "import sys; sys.stdin.read()", "ckptfs"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as supervisor:
        (restarting.store / "run" / "supervisor.pid").write_text(f"{supervisor.pid} {started_at(supervisor.pid)}\n")
        assert restarting.ask("mount", {"do": "status"})["asked"] == "again"
        (restarting.store / "run" / "mount.sock").unlink()
        with pytest.raises(Unreachable, match="the mount process of node-0 does not answer"):
            restarting.ask("mount", {"do": "status"}, restart_seconds=0.2)
        supervisor.kill()


def test_a_process_that_nobody_starts_again_is_not_waited_for(restarting: Place) -> None:
    with pytest.raises(Unreachable, match="the mount process of node-0 does not answer"):
        restarting.ask("mount", {"do": "status"}, restart_seconds=1000.0)


def test_the_first_node_that_answers_is_asked(restarting: Place) -> None:
    with contextlib.suppress(Unreachable):
        restarting.ask("mount", {"do": "status"}, restart_seconds=0.0)  # it takes its first request with it
    gone = Place("node-9", restarting.store / "none", restarting.mountpoint)
    assert first_that_answers([gone, restarting], "mount") == restarting
    assert first_that_answers([gone], "agent") is None
