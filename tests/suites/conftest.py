"""Where suites that others wrote run: a plain directory, which is the measure, and a mount in each lane on the same drive.

What passes in the plain directory has to pass in the mount, in the same run: so a suite that needs something this machine lacks,
or that is wrong itself, judges nothing. With CKPTFS_SUITES=all everything runs, as both users in both lanes (an hour); without
it what says most in three minutes.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfs.fs.local_cluster import LocalCluster

EVERYTHING = os.environ.get("CKPTFS_SUITES") == "all"
LESS = [("passthrough", "root"), ("served", "nobody")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if EVERYTHING:
        return
    left_out = [item for item in items if item.path.parent == Path(__file__).parent and _lane_and_user(item) not in LESS]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _lane_and_user(item: pytest.Item) -> tuple[object, object]:
    assert isinstance(item, pytest.Function)
    return item.callspec.params["lane_cluster"], item.callspec.params["user"]


@dataclass(frozen=True)
class Workplace:
    """A fresh directory that belongs to the user, and commands run in it as that user."""

    directory: Path
    user: pwd.struct_passwd

    def run(self, command: list[str], *, seconds_max: float, standard_input: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a program here, with its temporary files here; the output is both of its streams. It and what it started are killed
        when the time is over: then its status is -9."""
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env={
                "PATH": os.environ["PATH"],
                "LANG": "C.UTF-8",
                "HOME": str(self.directory),
                "TMPDIR": str(self.directory),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            extra_groups=[],
            umask=0o022,
            process_group=0,
        )
        try:
            output, _ = process.communicate(standard_input, timeout=seconds_max)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, output, "")


@pytest.fixture(params=["root", "nobody"])
def user(request: pytest.FixtureRequest) -> pwd.struct_passwd:
    return pwd.getpwnam(request.param)


Places = Callable[[], Iterator[Workplace]]


@pytest.fixture
def places(lane_cluster: LocalCluster, user: pwd.struct_passwd, scratch: Path) -> Places:
    """`for place in places()`: first the plain directory, then the mount. Each is gone when the next turn begins, with everything
    in it."""

    def each() -> Iterator[Workplace]:
        for reachable in (scratch, lane_cluster.directory.parent):
            reachable.chmod(0o755)
        for base in (scratch, lane_cluster.node(0).mountpoint):
            directory = Path(tempfile.mkdtemp(prefix=f"{user.pw_name}-", dir=base))
            os.chown(directory, user.pw_uid, user.pw_gid)
            yield Workplace(directory, user)
            shutil.rmtree(directory)

    return each
