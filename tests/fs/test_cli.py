"""The command line's promise: exit codes, one line for an error, JSON where it was asked for."""

import json
import signal
import time
from pathlib import Path

import pytest
import trio

from ckptfs import __version__
from ckptfs.cache.admission import hash_of
from ckptfs.fs.cli import run
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.local_socket import Message, serve


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"ckptfs {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["cluster", "--help"], ["cluster", "up", "--help"], ["status", "--help"]])
def test_help_is_a_success(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    assert "Usage: ckptfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense"], 2, "No such command"),
        (["flush"], 2, "Missing argument"),
        (["verify", "--wrong"], 2, "No such option"),
        (["cluster", "kill", "{tmp}", "0"], 2, "holds no cluster"),
        (["cluster", "kill", "{tmp}", "node-1"], 2, "'node-1' is no node's number"),
        (["cluster", "revive", "{tmp}", ""], 2, "is no node's number"),
        (["cluster", "up", "{tmp}/c", "--nodes", "0"], 2, "1 to 64"),
        (["cluster", "up", "{tmp}/c", "--passthrough", "perhaps"], 2, "--passthrough: auto, on or off, not 'perhaps'"),
        (["cluster", "up", "{tmp}/c", "--data-shards", "0"], 2, "ckptfs: --data-shards: 1 to 32"),
        (["cluster", "up", "{tmp}/\udcff"], 2, "UTF-8"),
        (["cluster", "up", "/proc/none"], 1, "/proc/none: No such file or directory"),
        (["cluster", "up", "{tmp}/full"], 2, "not empty"),
        (["cluster", "up", "{tmp}/full/file"], 2, "not a directory"),
        (["flush", "{tmp}", "--to", "tiered"], 2, "local or protected"),
        (["flush", "{tmp}", "--timeout", "-1"], 2, "--timeout"),
        (["flush", "{tmp}", "--timeout", "nan"], 2, "--timeout"),
        (["flush", "{tmp}", "--timeout", "5m"], 2, "lies in no ckptfs mount"),
        (["flush", "{tmp}"], 2, "lies in no ckptfs mount"),
        (["status", "{tmp}"], 2, "lies in no ckptfs mount"),
        (["status", "{tmp}", "--json", "--watch"], 2, "exclude each other"),
        (["verify", "{tmp}"], 2, "lies in no ckptfs mount"),
        (["umount", "{tmp}"], 2, "no ckptfs mount"),
        (["rollback", "{tmp}"], 2, "lies in no ckptfs mount"),
        (["node", "--config", "{tmp}/none.toml"], 2, "none.toml"),
        (["nodes", "add", "node-0", "--host", "a", "--ca", "{tmp}/none", "--out", "{tmp}/o"], 2, "ckptfs ca init makes one"),
        (["ca", "revoke", "node-0", "--ca", "{tmp}/none"], 2, "ckptfs ca init makes one"),
        (["nodes", "add", "node-0", "--ca", "{tmp}/none", "--out", "{tmp}/o"], 2, "--host"),
        (["nodes", "add", "a/b", "--host", "a", "--ca", "{tmp}/none", "--out", "{tmp}/o"], 2, "'a/b' is no node's id"),
        (["nodes", "admit", "a/b", "00" * 32], 2, "'a/b' is no node's id"),
        (["cluster", "up", "{tmp}/c", "--catalog", "etcd://x"], 2, "ckptfs: --catalog: must be"),
        (["drain", "{tmp}", "--deadline", "5 minutes"], 2, "--deadline: a number of seconds"),
    ],
)
def test_wrong_use_is_one_line_and_its_code(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("ckptfs: ")
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_an_error_is_json_too_where_json_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(tmp_path), "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2
    assert "lies in no ckptfs mount" in document["error"]


def test_a_cluster_that_is_down_is_shown_and_unreachable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = LocalCluster(tmp_path / "c")
    cluster.prepare(3)
    assert run(["status", str(tmp_path / "c"), "--json"]) == 3
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [(node["id"], node["alive"]) for node in nodes] == [("node-0", False), ("node-1", False), ("node-2", False)]
    assert run(["status", str(tmp_path / "c" / "node-1"), "--json"]) == 3
    assert [node["id"] for node in json.loads(capsys.readouterr().out)["nodes"]] == ["node-1"]
    assert run(["cluster", "kill", str(tmp_path / "c"), "7"]) == 2
    assert "has no node 7" in capsys.readouterr().err


def test_a_nodes_mountpoint_without_its_mount_is_said_to_be_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = LocalCluster(tmp_path / "c")
    cluster.prepare(2)
    assert run(["umount", str(cluster.nodes[1].mountpoint)]) == 2
    assert "node-1 is down" in capsys.readouterr().err


def test_an_interrupted_command_says_so_in_one_line_and_by_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalCluster(tmp_path / "c").prepare(1)
    monkeypatch.setattr(time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    try:
        assert run(["status", str(tmp_path / "c"), "--watch"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    error = capsys.readouterr().err
    assert error.startswith("ckptfs: interrupted")
    assert error.count("\n") == 1


@pytest.mark.parametrize(("state", "words"), [("lost", "by itself"), ("removed", "with an empty store")])
@pytest.mark.parametrize("arguments", [["--cancel"], ["--deadline", "1s"]])
async def test_a_node_that_is_no_member_neither_drains_nor_stays(
    state: str, words: str, arguments: list[str], tmp_path: Path, nursery: trio.Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = LocalCluster(tmp_path / "c")
    cluster.prepare(1)
    node = cluster.nodes[0]
    (node.store / "run").mkdir(parents=True)

    async def answer(request: Message) -> Message:
        return {"ok": True, "state": state}

    await nursery.start(serve, node.store / "run/agent.sock", answer)
    command = ["drain", str(node.config.parent), *arguments, "--json"]
    assert await trio.to_thread.run_sync(run, command) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"node": "node-0", "state": state}
    assert words in captured.err
    nursery.cancel_scope.cancel()


def test_certificates_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, out = tmp_path / "ca", tmp_path / "node-3"
    assert run(["ca", "init", str(authority), "--name", "test"]) == 0
    assert run(["ca", "init", str(authority)]) == 2
    assert run(["nodes", "add", "node-3", "--host", "10.0.0.3", "--ca", str(authority), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert 'listen = "10.0.0.3:7070"' in shown
    assert sorted(path.name for path in out.iterdir()) == ["ca.pem", "crl.pem", "join.token", "node.key", "node.pem"]
    token = (out / "join.token").read_text().strip()
    assert token not in shown
    assert f"ckptfs nodes admit node-3 {hash_of(token).hex()}" in shown
    assert (out / "join.token").stat().st_mode & 0o777 == 0o600
    assert (out / "node.key").stat().st_mode & 0o777 == 0o600
    assert run(["ca", "revoke", "node-4", "--ca", str(authority)]) == 2
    assert run(["ca", "revoke", "node-3", "--ca", str(authority), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["revoked"] == 1
    assert run(["ca", "revoke", "node-4", "--ca", str(authority)]) == 2
    assert "no certificate was issued to 'node-4'" in capsys.readouterr().err
