"""Root given up for good, in processes of their own: what the kernel says is left of it, and what it then refuses."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptfs.fs.privileges import CAP_DAC_READ_SEARCH, CAP_LEASE, CAP_SETUID, RightsKept, give_up_root, permitted

USER = 1_900_000_001
GROUP = 1_900_000_002

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has something to give up")

BEGIN = """
import ctypes, fcntl, os, signal, sys
from pathlib import Path
from ckptfs.cache.segments import has_no_writer
from ckptfs.fs.agent_user import KEPT
from ckptfs.fs.privileges import give_up_root
os.setgroups([4, 20])
ctypes.CDLL(None).prctl(8, 1)
give_up_root(1_900_000_001, 1_900_000_002, KEPT)
path = Path(sys.argv[1])
"""


def _as_agent(code: str, *arguments: object) -> str:
    command = [sys.executable, "-P", "-c", BEGIN + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_says_that_two_capabilities_and_no_groups_are_left() -> None:
    lines = [line.split() for line in _as_agent("print(Path('/proc/self/status').read_text())", "/").splitlines() if line]
    status = {name.rstrip(":"): values for name, *values in lines}
    assert status["Uid"] == [str(USER)] * 4
    assert status["Gid"] == [str(GROUP)] * 4
    assert status["Groups"] == []
    kept = 1 << CAP_DAC_READ_SEARCH | 1 << CAP_LEASE
    sets = {name: int(status[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")}
    assert sets == {"CapEff": kept, "CapPrm": kept, "CapBnd": kept, "CapInh": 0, "CapAmb": 0}
    assert status["NoNewPrivs"] == ["1"]


def test_files_of_root_are_read_and_tested_for_writers_and_never_written(tmp_path: Path) -> None:
    """The directory is one that only root may enter."""
    path = tmp_path / "0600"
    path.write_text("root's")
    path.chmod(0o600)
    tmp_path.chmod(0o700)
    code = """
descriptor = os.open(path, os.O_RDONLY)
assert os.read(descriptor, 10) == b"root's"
assert has_no_writer(descriptor)
assert os.access(path, os.R_OK) and not os.access(path, os.W_OK)
for attempt in (
    lambda: os.open(path, os.O_WRONLY),
    lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    lambda: path.unlink(),
    lambda: path.rename(path.with_name("other")),
    lambda: path.with_name("other").write_text("made"),
    lambda: path.chmod(0o666),
    lambda: os.chown(path, os.getuid(), -1),
    lambda: os.setxattr(path, "user.label", b"x"),
    lambda: os.link(path, "/var/tmp/linked"),
    lambda: os.setuid(0),
    lambda: os.setgroups([0]),
    lambda: os.kill(os.getppid(), 0),
):
    try:
        attempt()
    except PermissionError:
        continue
    raise AssertionError("was allowed")
print("refused")
"""
    assert _as_agent(code, path) == "refused\n"
    assert path.read_text() == "root's"


def test_a_program_it_starts_has_nothing() -> None:
    code = """
os.execv("/bin/cat", ["cat", "/proc/self/status"])
"""
    status = _as_agent(code, "/")
    assert "CapEff:\t0000000000000000" in status
    assert "CapPrm:\t0000000000000000" in status


def test_it_is_refused_where_another_thread_would_keep_its_rights() -> None:
    hold = threading.Event()
    thread = threading.Thread(target=hold.wait)
    thread.start()
    try:
        with pytest.raises(RightsKept, match="threads run already"):
            give_up_root(USER, GROUP, ())
    finally:
        hold.set()
        thread.join()
    assert os.geteuid() == 0
    assert CAP_SETUID in permitted()
