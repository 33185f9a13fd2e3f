"""Files that are never closed, on a real mount: what other nodes have of them when their node is lost."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount]


def _wait(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.05)


def _fact(node: ClusterNode, path: Path) -> dict[str, Any]:
    ino = path.stat().st_ino
    fact: dict[str, Any] = call(node.store / "run" / "mount.sock", {"do": "state", "inos": [ino]})["states"][ino]
    return fact


def _protected_bytes(node: ClusterNode, path: Path) -> int:
    return int(_fact(node, path)["prefix_bytes"])


@contextmanager
def _writer(path: Path, code: str) -> Iterator[Callable[[str], None]]:
    """A program that has the file open; `step(line)` has it run a line of code and waits for it."""
    program = f"import mmap, os, sys\nfile = open({str(path)!r}, 'w+b', buffering=0)\n{code}\n"
    program += "print('ready', flush=True)\nfor line in sys.stdin:\n    exec(line)\n    print('done', flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        assert stdout.readline() == "ready\n"

        def step(line: str) -> None:
            stdin.write(line + "\n")
            stdin.flush()
            assert stdout.readline() == "done\n"

        try:
            yield step
        finally:
            process.kill()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


@pytest.mark.parametrize("passthrough", ["auto", "off"])
@pytest.mark.parametrize("size", [100, 3_000_000])
def test_a_log_is_read_elsewhere_as_far_as_it_was_synced(start_cluster: Any, passthrough: str, size: int) -> None:
    cluster: LocalCluster = start_cluster(4, settle_seconds=0.2, passthrough=passthrough)
    home, other = cluster.nodes[0], cluster.nodes[2]
    path, there = home.mountpoint / "log", other.mountpoint / "log"
    first = os.urandom(size)
    with _writer(path, "") as step:
        step(f"file.write(bytes.fromhex('{first.hex()}'))" if size < 1000 else f"first = os.urandom({size}); file.write(first)")
        first = path.read_bytes()
        step("os.fsync(file.fileno())")
        _wait(lambda: _protected_bytes(home, path) == size)
        fact = _fact(home, path)
        assert (fact["state"], fact["protected_m"], fact["bytes"]) == ("open", 0, size)
        _wait(lambda: call(home.store / "run" / "mount.sock", {"do": "status"})["unprotected_bytes"] == 0)
        step("file.write(b'not synced')")
        status = call(home.store / "run" / "mount.sock", {"do": "status"})
        assert (status["unprotected_bytes"], status["unprotected_files"]) == (10, 1)
        assert there.read_bytes() == first + b"not synced"  # its home has it
        cluster.kill(0)
        killed_at = time.monotonic()
        _wait(lambda: _read(there) == first)
        assert time.monotonic() - killed_at > 5  # nobody is given less while the home may only be restarting
        assert there.stat().st_size == size
        assert _fact(other, there)["state"] == "unreachable"
        assert _protected_bytes(other, there) == size
    cluster.revive(0, start_seconds=60.0)
    _wait(lambda: _read(there) == first + b"not synced")
    _wait(lambda: _fact(other, there)["state"] == "protected")
    assert path.read_bytes() == first + b"not synced"


@pytest.mark.parametrize("how", ["close", "rename"])
def test_what_was_closed_or_renamed_is_never_read_as_it_was_before(start_cluster: Any, how: str) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=2.0)
    home, other = cluster.nodes[0], cluster.nodes[2]
    path = home.mountpoint / "file"
    with _writer(path, "file.write(b'half'); os.fsync(file.fileno())") as step:
        _wait(lambda: _protected_bytes(home, path) == 4)
        step("file.write(b' and half')")
        if how == "close":
            step("file.close()")
        else:
            path = path.rename(home.mountpoint / "renamed")
        _wait(lambda: _protected_bytes(home, path) == 0)
        cluster.kill(0)
    there = other.mountpoint / path.name
    deadline = time.monotonic() + 15  # longer than readers wait for what was protected
    while time.monotonic() < deadline:
        assert _read(there) is None
        time.sleep(0.2)


def test_a_mapped_file_that_is_rewritten_is_read_elsewhere_as_it_was_at_one_moment(start_cluster: Any) -> None:
    """Every record has the same number at its beginning and in all of its pages; a mixture would show."""
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.05)
    home, other = cluster.nodes[0], cluster.nodes[2]
    path, there = home.mountpoint / "state", other.mountpoint / "state"
    pages = 512
    code = f"""
file.truncate({pages * mmap.PAGESIZE})
memory = mmap.mmap(file.fileno(), {pages * mmap.PAGESIZE})
def rewrite(number):
    for page in range({pages}):
        memory[page * {mmap.PAGESIZE} : page * {mmap.PAGESIZE} + 8] = number.to_bytes(8, "little")
"""
    with _writer(path, code) as step:
        number = 0
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and (number < 30 or _protected_bytes(home, path) == 0):
            number += 1
            step(f"rewrite({number}); os.fsync(file.fileno())")
            time.sleep(number % 5 / 10)
        _wait(lambda: _protected_bytes(home, path) > 0)  # now it is quiet
        step(f"rewrite({number + 1})")
        cluster.kill(0)
    _wait(lambda: _read(there) is not None)
    content = there.read_bytes()
    numbers = {int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), mmap.PAGESIZE)}
    assert len(numbers) == 1
    assert numbers <= set(range(1, number + 2))


def test_a_mount_process_that_is_killed_goes_on_protecting(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(3, settle_seconds=0.2)
    home = cluster.nodes[0]
    path = home.mountpoint / "log"
    with _writer(path, "file.write(b'first'); os.fsync(file.fileno())") as step:
        _wait(lambda: _protected_bytes(home, path) == 5)
        killed = home.processes.pids()["mount"]
        assert killed is not None
        os.kill(killed, 9)
        _wait(lambda: home.processes.pids()["mount"] not in (None, killed))
        assert _protected_bytes(home, path) == 5
        step("file.write(b' second'); os.fsync(file.fileno())")
        _wait(lambda: _protected_bytes(home, path) == 12)
        step("file.close()")
        _wait(lambda: _fact(home, path)["state"] == "protected")
    assert (cluster.nodes[2].mountpoint / "log").read_bytes() == b"first second"
