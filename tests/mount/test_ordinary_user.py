"""A cluster that an ordinary user runs, through fusermount3: everything works, in the served lane.

The user is `nobody`. Where it can't reach this interpreter (below /root) its processes may read everything; they have no other
capability, and fusermount3 gives them none.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptfs.fs import fusermount
from ckptfs.fs.fusermount import DEVICE
from ckptfs.fs.local_cluster import ClusterNode, LocalCluster

NOBODY = 65534
WALKER = Path(__file__).parent / "data_walker.py"

pytestmark = [pytest.mark.slow, pytest.mark.mount]


@pytest.fixture(autouse=True)
def device_for_all() -> Iterator[None]:
    """/dev/fuse as distributions have it: fusermount3 opens it as its caller. A container's may be root's alone."""
    mode = stat.S_IMODE(DEVICE.stat().st_mode)
    DEVICE.chmod(0o666)
    yield
    DEVICE.chmod(mode)


def _as_nobody(*command: object) -> list[str]:
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    keep = ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
    can_run = subprocess.run([*drop, "env", sys.executable, "-c", ""], check=False, capture_output=True).returncode == 0
    return [*drop, *([] if can_run else keep), *map(str, command)]


def _ckptfs(*arguments: object) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    command = _as_nobody(sys.executable, "-P", "-m", "ckptfs.fs.cli", *arguments)
    done = subprocess.run(command, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=100)
    return done.returncode, done.stdout


def _program(code: str, *arguments: object) -> str:
    done = subprocess.run(_as_nobody(sys.executable, "-c", code, *arguments), cwd="/", text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


@pytest.fixture
def cluster_of_nobody(scratch: Path) -> LocalCluster:
    for directory in (scratch, scratch / "plain"):
        directory.mkdir(exist_ok=True)
        os.chown(directory, NOBODY, NOBODY)
    code, printed = _ckptfs("cluster", "up", scratch / "cluster", "--nodes", 2)
    assert code == 0, printed
    return LocalCluster(scratch / "cluster")


def test_an_ordinary_user_runs_a_cluster(cluster_of_nobody: LocalCluster, scratch: Path) -> None:
    nodes = cluster_of_nobody.nodes
    here, there = nodes[0].mountpoint, nodes[1].mountpoint
    with pytest.raises(PermissionError):  # root is one of the others
        os.listdir(here)
    code, printed = _ckptfs("status", cluster_of_nobody.directory)
    assert code == 0
    assert "passthrough needs root" in printed
    assert ("only the user 65534" in printed) is not fusermount.may_allow_other()

    _program("import os, sys\nos.mkdir(sys.argv[1])\nos.mkdir(sys.argv[2])", here / "walk", scratch / "plain" / "walk")
    walk = _as_nobody(sys.executable, WALKER, here / "walk", scratch / "plain" / "walk", 1, 150)
    done = subprocess.run(walk, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code, printed = _ckptfs("flush", here, "--timeout", 60)
    assert code == 0, printed

    hold = "import sys\nfile = open(sys.argv[1], 'w+')\nprint(file.write('before '), flush=True)\ninput()\n"
    hold += "file.write('after')\nfile.seek(0)\nprint(file.read())"
    holder = subprocess.Popen(_as_nobody(sys.executable, "-c", hold, here / "held"), stdin=-1, stdout=-1, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "7\n"
    _kill(nodes[0], "mount")
    assert holder.communicate("\n", timeout=30)[0] == "before after\n"
    assert _program("import sys\nprint(open(sys.argv[1]).read())", there / "held") == "before after\n"
    code, printed = _ckptfs("node", "upgrade", "--config", nodes[0].config)
    assert code == 0, printed

    supervisor = nodes[0].processes.pids()["supervisor"]
    assert supervisor is not None
    os.kill(supervisor, signal.SIGKILL)
    _wait(lambda: not nodes[0].processes.living())
    code, printed = _ckptfs("cluster", "up", cluster_of_nobody.directory)
    assert code == 0, printed
    assert _program("import sys\nprint(open(sys.argv[1]).read())", here / "held") == "before after\n"
    code, printed = _ckptfs("umount", there)
    assert code == 0, printed
    code, printed = _ckptfs("cluster", "down", cluster_of_nobody.directory, "--remove")
    assert (code, (scratch / "cluster").exists()) == (0, False), printed


def _kill(node: ClusterNode, role: str) -> None:
    before = node.processes.pids()[role]
    assert before is not None
    os.kill(before, signal.SIGKILL)
    _wait(lambda: node.processes.pids()[role] not in (None, before))


def test_what_is_missing_is_named(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(scratch, NOBODY, NOBODY)
    DEVICE.chmod(0o600)
    code, printed = _ckptfs("cluster", "up", scratch / "cluster", "--nodes", 1)
    assert code != 0
    assert "/dev/fuse" in printed
    assert "chmod 666 /dev/fuse" in printed
    shutil.rmtree(scratch / "cluster")
