"""What the processes of a node do alike when they start, and what they leave when they die."""

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.cache.admission import StoreRemoved
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import NodeId, StoreId
from ckptfs.fs import process_start
from ckptfs.fs.config import ConfigurationError
from ckptfs.fs.process_start import (
    FOR_GOOD_STATUS,
    death_logged,
    is_ready,
    raise_descriptor_limit,
    remove_pid_file,
    start_log,
    write_pid_file,
)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """As it was, afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_log_is_made_with_its_directory(tmp_path: Path, root_logger: logging.Logger) -> None:
    start_log(tmp_path / "log", "mount")
    root_logger.info("hello")
    assert "INFO root hello" in (tmp_path / "log" / "mount.log").read_text()


def test_a_log_that_can_not_be_written_is_a_mistake_of_the_configuration(tmp_path: Path, root_logger: logging.Logger) -> None:
    (tmp_path / "file").touch()
    before = list(root_logger.handlers)
    for role in ("supervisor", "mount"):
        with pytest.raises(ConfigurationError, match=r"node\.log_directory: .* nothing was mounted"):
            start_log(tmp_path / "file", role)
    assert root_logger.handlers == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO])
def test_on_a_drive_that_takes_no_writes_the_supervisor_refuses_and_the_others_log_to_standard_error(
    tmp_path: Path, root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigurationError):
        start_log(tmp_path / "log", "supervisor")
    for role in ("mount", "agent"):
        start_log(tmp_path / "log", role)
        assert type(root_logger.handlers[-1]) is logging.StreamHandler


def test_a_foreseen_death_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit), death_logged(tmp_path, "mount"):
        raise ExceptionGroup("a nursery", [ExceptionGroup("another", [StoreError("the drive failed")])])
    assert (tmp_path / "mount.failed").read_text() == "the drive failed\n"
    assert "process_died reason=the drive failed" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("error", [ValueError("a bug"), ExceptionGroup("two", [ValueError("a bug"), StoreError("other")])])
def test_a_bug_has_its_traceback_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    with pytest.raises(SystemExit), death_logged(tmp_path, "agent"):
        raise error
    assert (tmp_path / "agent.failed").read_text().endswith("; agent.log has the details\n")
    assert "Traceback" in caplog.text


def test_a_node_whose_store_was_removed_ends_instead_of_beginning_anew(tmp_path: Path) -> None:
    removed = StoreRemoved(StoreId(b"S" * 16), NodeId("node-1"))
    with pytest.raises(SystemExit) as ended, death_logged(tmp_path, "mount"):
        raise ExceptionGroup("in a nursery", [removed])
    assert ended.value.code == FOR_GOOD_STATUS
    assert "start this node with a new store directory" in (tmp_path / "mount.failed").read_text()


def test_who_is_ready_takes_back_what_the_last_one_left(tmp_path: Path) -> None:
    (tmp_path / "mount.failed").touch()
    is_ready(tmp_path, "mount")
    is_ready(tmp_path, "mount")
    assert list(tmp_path.iterdir()) == []


def test_nothing_stops_a_death_from_being_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit), death_logged(tmp_path / "none", "mount"):
        raise StoreError("the drive failed")
    assert "the drive failed" in caplog.text


def test_a_pid_file_is_removed_by_its_process_only(tmp_path: Path) -> None:
    write_pid_file(tmp_path, "mount")
    assert (tmp_path / "mount.pid").read_text().split()[0] == str(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["mount.pid"]
    (tmp_path / "mount.pid").write_text(f"{os.getpid() + 1}\n")
    remove_pid_file(tmp_path, "mount")
    (tmp_path / "agent.pid").write_text("nonsense")
    remove_pid_file(tmp_path, "agent")
    remove_pid_file(tmp_path, "supervisor")
    assert len(list(tmp_path.iterdir())) == 2
    write_pid_file(tmp_path, "mount")
    remove_pid_file(tmp_path, "mount")
    assert [path.name for path in tmp_path.iterdir()] == ["agent.pid"]


def test_as_many_descriptors_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        limit = raise_descriptor_limit()
        assert limit >= hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Code in a process of its own, which may end."""
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_ending_for_good_has_a_status_of_its_own_and_leaves_the_reason(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from ckptfs.fs.process_start import end_for_good\n"
    done = _run(code + "try:\n    end_for_good(Path(sys.argv[1]), 'mount', 'no way')\nfinally:\n    print('cleanup')", tmp_path)
    assert done.returncode == FOR_GOOD_STATUS
    assert done.stdout == ""
    assert (tmp_path / "mount.failed").read_text() == "no way\n"


@pytest.mark.slow
def test_a_child_dies_with_its_parent_even_if_that_was_faster() -> None:
    code = "import os, time; from ckptfs.fs.process_start import die_with_parent\n"
    assert _run(code + "die_with_parent(os.getppid() + 1)\nprint('lives')").returncode == -signal.SIGKILL
    assert _run(code + "die_with_parent(os.getppid())\nprint('lives')").stdout == "lives\n"


def test_a_broken_lease_ends_nobody() -> None:
    before = signal.getsignal(signal.SIGIO)
    try:
        process_start.ignore_broken_leases()
        os.kill(os.getpid(), signal.SIGIO)
    finally:
        signal.signal(signal.SIGIO, before)
