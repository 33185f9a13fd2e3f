"""Which processes are a node's: its pid files say so, as long as their numbers were not given out again."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.fs.node_processes import NodeProcesses, has_files_open, started_at


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that calls itself one of ours."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "ckptfs"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def write_pid_file(store: Path, text: str) -> NodeProcesses:
    (store / "run").mkdir()
    (store / "run" / "mount.pid").write_text(text)
    return NodeProcesses(store)


@pytest.mark.parametrize("text", ["{pid} {started}\n", "{pid}\n"], ids=["written now", "written by an older release"])
def test_a_pid_file_names_a_process(tmp_path: Path, pid: int, text: str) -> None:
    assert write_pid_file(tmp_path, text.format(pid=pid, started=started_at(pid))).pids()["mount"] == pid


def test_another_process_that_got_the_number_is_let_alone(tmp_path: Path, pid: int) -> None:
    processes = write_pid_file(tmp_path, f"{pid} {int(started_at(pid)) - 1}\n")
    assert processes.pids()["mount"] is None
    assert processes.kill() == []
    assert has_files_open(pid)


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "1", "-1 5"])
def test_a_pid_file_of_something_else_names_none(tmp_path: Path, text: str) -> None:
    assert write_pid_file(tmp_path, text).pids()["mount"] is None


def test_it_is_waited_for_processes_whose_pid_file_is_gone(tmp_path: Path, pid: int) -> None:
    processes = write_pid_file(tmp_path, f"{pid} {started_at(pid)}\n")
    processes.ask_supervisor_to_end()
    (tmp_path / "run" / "mount.pid").unlink()
    assert not processes.wait_ended(time.monotonic())
    assert has_files_open(pid)
