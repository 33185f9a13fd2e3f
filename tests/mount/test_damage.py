"""Bytes changed behind the file system's back, in real stores under real mounts, and what the commands and programs make of
it."""

import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.mount]

SIZE = (9 << 20) + 4097
CONTENT = random.Random(7).randbytes(SIZE)


def _ckptfs(*arguments: object, timeout: float = 90) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    command = [sys.executable, "-P", "-m", "ckptfs.fs.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/")
    return done.returncode, done.stdout, done.stderr


def _json(*arguments: object, code: int = 0) -> Any:
    found, out, error = _ckptfs(*arguments, "--json")
    assert found == code, (out, error)
    return json.loads(out)


def _wait(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


def _segment(node: ClusterNode, content: bytes = CONTENT) -> Path:
    """The node's segment of a file with this content."""
    found = [path for path in (node.store / "segments").rglob("*") if path.is_file() and path.stat().st_size == len(content)]
    (segment,) = [path for path in found if path.read_bytes()[:100] == content[:100]]
    return segment


def _damage(path: Path, offset: int = SIZE // 2) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def _errno_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_a_protected_file_damaged_on_its_home_is_found_and_mended(start_cluster: Any, passthrough: str) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1, passthrough=passthrough)
    home, other = cluster.nodes[0], cluster.nodes[3]
    for name in ("file", "held"):
        (home.mountpoint / name).write_bytes(CONTENT[::-1] if name == "held" else CONTENT)
    assert _json("flush", home.mountpoint, "--timeout", 60)["reached"]
    segments = {"file": _segment(home), "held": _segment(home, CONTENT[::-1])}
    with open(home.mountpoint / "held", "rb", buffering=0) as held:
        for segment in segments.values():
            _damage(segment)
        assert _ckptfs("verify", home.mountpoint)[0] == 0, "plain verify looks at shards"
        found = _json("verify", other.mountpoint, "--deep", code=1)
        assert {Path(file["path"]).name: file["result"] for file in found["files"]} == {"file": "damaged", "held": "damaged"}
        assert all(file["segment"] == "damaged" for file in found["files"])
        # Known to be damaged: read from shards from now on, or not at all while a program has the damaged bytes open.
        assert (home.mountpoint / "file").read_bytes() == CONTENT
        assert _errno_of((home.mountpoint / "held").read_bytes) == errno.EIO
        assert (other.mountpoint / "held").read_bytes() == CONTENT[::-1]
        assert _json("verify", other.mountpoint, code=1)["ok"] is False

        mended = _json("verify", other.mountpoint, "--deep", "--repair")
        assert {file["result"] for file in mended["files"]} == {"repaired"}
        assert held.read(100) == CONTENT[::-1][:100]
        held.seek(SIZE // 2)
        assert held.read(1) == bytes([CONTENT[::-1][SIZE // 2] ^ 1]), "the damaged bytes it has open, and nothing mixed"
        assert _errno_of((home.mountpoint / "held").read_bytes) == errno.EIO
    assert (home.mountpoint / "held").read_bytes() == CONTENT[::-1]
    assert (home.mountpoint / "file").read_bytes() == CONTENT
    assert _segment(home).read_bytes() == CONTENT
    assert _segment(home) != segments["file"]
    assert _json("verify", home.mountpoint, "--deep")["ok"]
    with open(home.mountpoint / "file", "ab") as file:
        file.write(b"and on")
    assert (home.mountpoint / "file").read_bytes() == CONTENT + b"and on"


def test_a_file_damaged_before_it_is_protected_is_said_to_be(start_cluster: Any) -> None:
    """One node: nothing is ever protected, so only verify can find out."""
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    (node.mountpoint / "run").mkdir()
    for name in ("good", "bad"):
        (node.mountpoint / "run" / name).write_bytes(CONTENT if name == "bad" else b"good")
    assert _json("flush", node.mountpoint, "--to", "local", "--timeout", 60)["reached"]
    assert _json("verify", node.mountpoint)["ok"]
    _damage(_segment(node))
    bad = node.mountpoint / "run" / "bad"
    for options in ((), ("--deep",), ("--repair",), ("--deep", "--repair")):
        found = _json("verify", node.mountpoint, *options, code=1)
        assert {Path(file["path"]).name: file["result"] for file in found["files"]} == {"good": "unprotected", "bad": "damaged"}
    _says_so(node, bad)
    assert _errno_of(bad.read_bytes) == errno.EIO
    assert _errno_of(lambda: os.open(bad, os.O_WRONLY | os.O_APPEND)) == errno.EIO
    bad.write_bytes(CONTENT)
    assert bad.read_bytes() == CONTENT
    assert _json("flush", node.mountpoint, "--to", "local", "--timeout", 60)["reached"]
    assert _json("verify", node.mountpoint, "--deep")["ok"]


def _says_so(node: ClusterNode, bad: Path) -> None:
    """status, of the node and of the file, and flush."""
    (status,) = _json("status", node.mountpoint)["nodes"]
    assert status["damaged_files"] == 1
    assert "1 files were damaged" in _ckptfs("status", node.mountpoint)[1]
    assert _json("status", bad)["state"] == "damaged"
    assert _json("status", bad.parent)["damaged"] == [str(bad)]
    assert str(bad) in _ckptfs("status", bad.parent)[1]
    code, out, error = _ckptfs("flush", bad, "--json")  # without --timeout: there is nothing to wait for
    assert code == 1
    assert json.loads(out)["behind"] == [{"path": str(bad), "state": "damaged"}]
    assert "saved again" in error


def test_what_the_replicator_finds_damaged_is_shown_without_verify(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.1)
    node, bad = cluster.nodes[0], cluster.nodes[0].mountpoint / "run" / "bad"
    for number in (1, 2):
        cluster.kill(number)
    bad.parent.mkdir()
    (bad.parent / "good").write_bytes(b"good")
    bad.write_bytes(CONTENT)
    assert _json("flush", node.mountpoint, "--to", "local", "--timeout", 60)["reached"]
    _damage(_segment(node))
    for number in (1, 2):
        cluster.revive(number)
    _wait(lambda: _json("status", bad)["state"] == "damaged")
    _says_so(node, bad)
    for asked in (node, cluster.nodes[2]):
        found = _json("verify", asked.mountpoint / "run" / "bad", code=1)
        assert [file["result"] for file in found["files"]] == ["damaged"]
        assert _errno_of((asked.mountpoint / "run" / "bad").read_bytes) == errno.EIO


def test_too_few_shards_and_a_home_that_has_the_bytes(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(6, settle_seconds=0.1)
    home, reader = cluster.nodes[0], cluster.nodes[5]
    (home.mountpoint / "file").write_bytes(CONTENT)
    assert _json("flush", home.mountpoint, "--timeout", 60)["reached"]
    for number in (1, 2, 3, 4):
        (shard,) = [path for path in (cluster.nodes[number].store / "shards").rglob("*") if path.is_file()]
        shard.write_bytes(shard.read_bytes()[: SIZE // 8] + b"cut")
    for options in ((), ("--deep",)):
        (found,) = _json("verify", reader.mountpoint, *options, code=1)["files"]
        assert (found["result"], len(found["damaged"]), found["segment"]) == ("damaged", 4, "ok")
    # Who reads it has it repaired.
    assert (reader.mountpoint / "file").read_bytes() == CONTENT
    _wait(lambda: _ckptfs("verify", reader.mountpoint)[0] == 0)
    for number in (0, 5):
        cluster.kill(number)
    assert (cluster.nodes[1].mountpoint / "file").read_bytes() == CONTENT


def test_plain_and_deep_verify_agree_on_what_is_away(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=30.0)
    home, other = cluster.nodes[0], cluster.nodes[1]
    (home.mountpoint / "protected").write_bytes(CONTENT)
    assert _json("flush", home.mountpoint, "--timeout", 60)["reached"]
    with open(home.mountpoint / "written", "wb", buffering=0) as file:
        file.write(b"only its home has this")
        os.fsync(file.fileno())
    cluster.kill(0)
    for options in ((), ("--deep",)):
        found = _json("verify", other.mountpoint / "written", *options, code=3)
        assert [one["result"] for one in found["files"]] == ["unreachable"]
        found = _json("verify", other.mountpoint / "protected", *options, code=3)
        assert [(one["result"], len(one["unreachable"])) for one in found["files"]] == [("unreachable", 1)]
