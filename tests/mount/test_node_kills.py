"""The processes of a node killed without warning, while programs use its mount in every way."""

import contextlib
import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.local_cluster import ClusterNode, LocalCluster
from ckptfs.fs.local_socket import call
from ckptfs.fs.mount_table import detach, mounts_at

pytestmark = [pytest.mark.slow, pytest.mark.mount]

AWAY_SECONDS = 2.0

# What a program does on each side of a kill. It is told "go" on its standard input, once the kill has happened.
USER = """
import fcntl, mmap, os, stat, sys
mount = sys.argv[1]
os.chdir(mount + "/directory")
written = open("written", "w+b", buffering=0)
written.write(b"before ")
locked = open("locked", "w+b", buffering=0)
fcntl.flock(locked, fcntl.LOCK_EX)
fcntl.lockf(locked, fcntl.LOCK_EX, 10, 5)
mapped = open("mapped", "w+b", buffering=0)
mapped.truncate(8192)
memory = mmap.mmap(mapped.fileno(), 8192)
memory[:6] = b"before"
mapped.close()
nameless = open("nameless", "w+b", buffering=0)
nameless.write(b"nobody sees me")
os.unlink("nameless")
reading = open(mount + "/sealed", "rb", buffering=0)
head = reading.read(1000)
os.mkdir("gone")
gone = os.open("gone", os.O_RDONLY)
os.setxattr(gone, "user.a", b"1")
os.rmdir("gone")
os.mkfifo("pipe")
os.symlink("target", "link")
pipe, link = (os.open(name, os.O_PATH | os.O_NOFOLLOW) for name in ("pipe", "link"))
os.unlink("pipe")
os.unlink("link")
stream = os.scandir("many")
names = [next(stream).name for _ in range(10)]
print("ready", flush=True)
assert sys.stdin.readline() == "go\\n"
written.write(b"after")
assert os.pread(written.fileno(), 100, 0) == b"before after", "written"
assert os.fstat(written.fileno()).st_size == 12
memory[4090:4100] = b"0123456789"
memory.flush()
assert memory[:6] == b"before"
assert os.pread(nameless.fileno(), 100, 0) == b"nobody sees me", "nameless"
status = os.fstat(nameless.fileno())
assert (status.st_nlink, status.st_size) == (0, 14), status
os.truncate(nameless.fileno(), 6)
assert os.fstat(nameless.fileno()).st_size == 6
assert head + reading.read() == open(mount + "/sealed", "rb").read(), "reading"
names += [entry.name for entry in stream]
assert sorted(names) == sorted(f"{number:04d}" for number in range(1500)), len(names)
assert os.getcwd() == mount + "/directory"
assert sorted(os.listdir(".")) == ["locked", "many", "mapped", "written"], os.listdir(".")
assert os.listdir(gone) == [], os.listdir(gone)
assert os.listxattr(gone) == ["user.a"]
os.fchmod(gone, 0o700)
assert (os.fstat(gone).st_nlink, stat.S_IMODE(os.fstat(gone).st_mode)) == (0, 0o700)
assert os.stat("..", dir_fd=gone).st_ino == os.stat(".").st_ino
os.close(os.open(".", os.O_RDONLY, dir_fd=gone))
os.fchdir(gone)
os.chdir(mount + "/directory")
assert stat.S_ISFIFO(os.fstat(pipe).st_mode)
assert os.readlink("", dir_fd=link) == "target"
os.fsync(written.fileno())
print("done", flush=True)
assert sys.stdin.readline() == "go\\n"
"""

# Reads and writes one open file on and on until a line arrives; then says how long the longest pause was, and how many turns.
PAUSES = """
import os, select, sys, time
file, block, count, longest = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), os.urandom(65536), 0, 0.0
print("ready", flush=True)
before = time.monotonic()
while not select.select([0], [], [], 0)[0]:
    at = count % 256 * 65536
    assert os.pwrite(file, block, at) == 65536
    assert os.pread(file, 65536, at) == block
    now = time.monotonic()
    count, longest, before = count + 1, max(longest, now - before), now
print(longest, count)
"""

TRY_LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
wanted = fcntl.LOCK_EX | fcntl.LOCK_NB
for lock, place in ((fcntl.flock, ()), (fcntl.lockf, (1, 7))):
    try:
        lock(file, wanted, *place)
    except BlockingIOError:
        continue
    raise SystemExit("got a lock that another process holds")
"""


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def _kill(node: ClusterNode, role: str) -> None:
    """Kill the process and wait until there is another."""
    killed = node.processes.pids()[role]
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    _wait(lambda: node.processes.pids()[role] not in (None, killed))


def _settle(node: ClusterNode, path: Path) -> None:
    """Wait until the file is local."""
    socket, ino = node.store / "run" / "mount.sock", path.stat().st_ino

    def is_local() -> bool:
        call(socket, {"do": "settle"})
        return bool(call(socket, {"do": "state", "inos": [ino]})["states"][ino]["state"] == "local")

    _wait(is_local)


@contextmanager
def _user(mountpoint: Path) -> Iterator[Callable[[str], None]]:
    """A program that uses the mount; `step(word)` waits until it says so, `step("go")` lets it go on."""
    command = [sys.executable, "-c", USER, str(mountpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr

        def step(word: str) -> None:
            if word == "go":
                stdin.write("go\n")
                stdin.flush()
                return
            said = stdout.readline()
            if said != f"{word}\n":
                process.kill()
                assert stderr is not None
                raise AssertionError(f"the program said {said!r}: {stderr.read()[-2000:]}")

        try:
            yield step
        finally:
            process.kill()


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_everything_a_program_holds_outlives_the_mount_process(start_cluster: Any, passthrough: str) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1, passthrough=passthrough)
    node = cluster.nodes[0]
    directory = node.mountpoint / "directory"
    (directory / "many").mkdir(parents=True)
    for number in range(1500):
        (directory / "many" / f"{number:04d}").touch()
    sealed = random.Random(1).randbytes(3_000_000)
    (node.mountpoint / "sealed").write_bytes(sealed)
    _settle(node, node.mountpoint / "sealed")
    with _user(node.mountpoint) as step:
        step("ready")
        _kill(node, "mount")
        _kill(node, "mount")
        (node.mountpoint / "another").write_bytes(b"numbers of handles are not used again")
        subprocess.run([sys.executable, "-c", TRY_LOCKS, directory / "locked"], check=True, timeout=30)
        step("go")
        step("done")
        step("go")
    assert (directory / "written").read_bytes() == b"before after"
    _settle(node, directory / "mapped")
    assert (directory / "mapped").read_bytes() == b"before".ljust(4090, b"\0") + b"0123456789" + bytes(8192 - 4100)
    assert (node.mountpoint / "sealed").read_bytes() == sealed
    assert call(node.store / "run" / "mount.sock", {"do": "status"})["unexpected_errors"] == 0


def test_passthrough_reads_and_writes_do_not_even_pause(start_cluster: Any, scratch: Path) -> None:
    """The mount process is away for `AWAY_SECONDS`, which a call that needs it sees; the files that are open don't."""
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.1)
    node = cluster.nodes[0]
    pids = node.processes.pids()
    assert pids["supervisor"] is not None
    assert pids["mount"] is not None
    waited: list[float] = []

    def make() -> None:
        started = time.monotonic()
        (node.mountpoint / "made").mkdir()
        waited.append(time.monotonic() - started)

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        programs = []
        for path in (node.mountpoint / "file", scratch / "plain"):
            command = [sys.executable, "-c", PAUSES, str(path)]
            program = stack.enter_context(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
            stack.callback(program.kill)
            assert program.stdout.readline() == "ready\n"
            programs.append(program)
        os.kill(pids["supervisor"], signal.SIGSTOP)  # nobody starts another
        try:
            os.kill(pids["mount"], signal.SIGKILL)
            caller = threading.Thread(target=make)
            caller.start()
            time.sleep(AWAY_SECONDS)
        finally:
            os.kill(pids["supervisor"], signal.SIGCONT)
        caller.join(30)
        for _ in range(3):
            _kill(node, "mount")
        _wait(node.answers)
        (in_mount, count), (in_plain, _) = [map(float, program.communicate("end\n", 30)[0].split()) for program in programs]
    print(
        f"longest pause {in_mount:.4f} s, in a plain directory {in_plain:.4f} s; {count:.0f} turns; mkdir took {waited[0]:.1f} s"
    )
    assert waited[0] >= AWAY_SECONDS
    assert in_mount < AWAY_SECONDS / 2 + in_plain  # on a machine that does much else both may wait for a processor
    assert count > 100


@pytest.mark.parametrize("passthrough", ["auto", "off"])
def test_writers_notice_nothing_while_the_mount_process_is_killed_again_and_again(start_cluster: Any, passthrough: str) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05, passthrough=passthrough)
    node = cluster.nodes[0]
    ended = threading.Event()
    errors: list[str] = []
    written: dict[str, bytes] = {}

    def write(worker: int) -> None:
        """New files, appended ones, and one that is written on and on."""
        generator = random.Random(worker)
        try:
            with open(node.mountpoint / f"long-{worker}", "wb", buffering=0) as long:
                content = b""
                for turn in range(100_000):
                    if ended.is_set():
                        break
                    block = generator.randbytes(generator.randrange(1, 50_000))
                    path = node.mountpoint / f"{worker}-{turn}"
                    path.write_bytes(block)
                    with open(path, "ab", buffering=0) as appended:
                        appended.write(b"more")
                    assert path.read_bytes() == block + b"more", path
                    written[path.name] = block + b"more"
                    if len(content) < 20_000_000:
                        long.write(block)
                        content += block
            written[f"long-{worker}"] = content
        except BaseException as error:
            errors.append(f"worker {worker}: {error!r}")

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.3)  # so that it is killed amid writes, not amid its start
        _kill(node, "mount")
    _wait(node.answers)
    ended.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert len(written) > 20
    for name, content in written.items():
        assert (node.mountpoint / name).read_bytes() == content, name
    assert sorted(os.listdir(node.mountpoint)) == sorted(written)
    call(node.store / "run" / "mount.sock", {"do": "settle"})
    _wait(lambda: call(node.store / "run" / "mount.sock", {"do": "status"})["settling_files"] == 0)
    for name, content in written.items():
        assert (node.mountpoint / name).read_bytes() == content, name
    assert "request_failed" not in (node.log / "mount.log").read_text()


def _start(node: ClusterNode) -> "subprocess.Popen[bytes]":
    """As an operator does, without what a local cluster does before."""
    with open(node.log / "node.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def test_a_killed_supervisor_takes_all_with_it_and_the_next_start_cleans_up(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=30.0)
    node = cluster.nodes[0]
    (node.mountpoint / "closed").write_bytes(b"c" * 100_000)
    held = open(node.mountpoint / "held", "wb", buffering=0)  # noqa: SIM115 (closed amid the test)
    held.write(b"h" * 100_000)
    os.fsync(held.fileno())
    supervisor = node.processes.pids()["supervisor"]
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    _wait(lambda: node.processes.living() == [])
    assert mounts_at(node.mountpoint)  # still there, and dead
    with pytest.raises(OSError, match=r"not connected|connection abort") as caught:
        os.stat(node.mountpoint)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with contextlib.suppress(OSError):
        held.close()

    process = _start(node)
    try:
        _wait(node.answers)
        assert len(mounts_at(node.mountpoint)) == 1
        assert f"stale_mount_removed mountpoint={node.mountpoint}" in (node.log / "supervisor.log").read_text()
        assert (node.mountpoint / "closed").read_bytes() == b"c" * 100_000
        assert (node.mountpoint / "held").read_bytes() == b"h" * 100_000
        _settle(node, node.mountpoint / "held")
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert mounts_at(node.mountpoint) == []
    assert os.listdir(node.mountpoint) == []


def test_an_agent_killed_again_and_again_leaves_files_alone(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    for turn in range(3):
        _kill(node, "agent")
        path = node.mountpoint / f"file-{turn}"
        path.write_bytes(b"%d" % turn * 1000)
        assert path.read_bytes() == b"%d" % turn * 1000
        _settle(node, path)
    assert node.answers()


@pytest.mark.parametrize("role", ["mount", "agent"])
def test_a_program_that_breaks_a_lease_ends_nothing(start_cluster: Any, role: str) -> None:
    """Opening a file for writing in the moment in which it is asked whether anybody writes it has the kernel send SIGIO."""
    cluster: LocalCluster = start_cluster(1)
    node = cluster.nodes[0]
    before = node.processes.pids()
    asked = before[role]
    assert asked is not None
    os.kill(asked, signal.SIGIO)
    (node.mountpoint / "file").write_bytes(b"content")
    _settle(node, node.mountpoint / "file")
    assert node.processes.pids() == before


def test_a_damaged_record_is_an_error_of_its_file_and_the_mount_lives(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    link = node.mountpoint / "link"
    link.symlink_to("target")
    (node.mountpoint / "other").write_bytes(b"content")
    with sqlite3.connect(node.catalog, timeout=10) as connection:
        key = b"i/%016x" % link.lstat().st_ino
        assert connection.execute("UPDATE kv SET value = ? WHERE key = ?", (b"nonsense", key)).rowcount == 1
    connection.close()
    with pytest.raises(OSError, match="Input/output") as caught:
        os.readlink(link)
    assert caught.value.errno == errno.EIO
    assert sorted(os.listdir(node.mountpoint)) == ["link", "other"]
    assert {entry.name for entry in os.scandir(node.mountpoint) if entry.is_file(follow_symlinks=False)} == {"other"}
    assert (node.mountpoint / "other").read_bytes() == b"content"
    (node.mountpoint / "new").write_bytes(b"new")
    status = call(node.store / "run" / "mount.sock", {"do": "status"})
    assert status["unexpected_errors"] == 0
    (problem,) = status["problems"]
    assert "fails its checksum" in problem
    log = (node.log / "mount.log").read_text()
    assert "request_refused opcode=" in log
    assert "Traceback" not in log
    assert node.processes.pids()["mount"] is not None


def test_a_mount_taken_away_from_outside_ends_the_node(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(1, settle_seconds=0.05)
    node = cluster.nodes[0]
    (node.mountpoint / "file").write_bytes(b"content")
    subprocess.run(["umount", node.mountpoint], check=True)
    _wait(lambda: node.processes.living() == [])
    assert "unmounted_from_outside" in (node.log / "supervisor.log").read_text()
    detach(node.mountpoint, abort=True)
    cluster.revive(0)
    assert (node.mountpoint / "file").read_bytes() == b"content"
