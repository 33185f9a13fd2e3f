"""Two installs at once in one clone: the second waits, instead of taking the environment from under the first."""

import fcntl
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "scripts" / "install"


@pytest.mark.slow
def test_a_second_install_waits_for_the_first(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(INSTALL, tmp_path / "scripts")
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [tmp_path / "scripts" / "install"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as second:
            assert second.stdout is not None
            try:
                assert second.stdout.readline() == "another install runs here, waiting\n"
            finally:
                os.killpg(second.pid, signal.SIGKILL)
    finally:
        os.close(lock)
    assert not (tmp_path / ".venv").exists()
