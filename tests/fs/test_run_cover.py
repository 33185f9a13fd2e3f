"""`run/` on a drive that takes no writes. The cover itself is tried in `tests/mount/test_read_only_drive.py`."""

import os
import subprocess
from pathlib import Path

import pytest

from ckptfs.fs import run_cover
from ckptfs.fs.run_cover import cover_if_refused, uncover


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have been run, all of which fail, as where somebody isn't root."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        ran.append(command)
        return subprocess.CompletedProcess(command, 32, "", "mount: must be superuser")

    monkeypatch.setattr(subprocess, "run", run)
    return ran


def test_a_drive_that_takes_writes_needs_no_cover(tmp_path: Path, commands: list[list[str]]) -> None:
    assert not cover_if_refused(tmp_path)
    uncover(tmp_path)
    assert commands == []


def test_a_cover_that_can_not_be_mounted_is_logged_and_leaves_the_directory_alone(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_cover, "refuses_writes", lambda _: "Read-only file system")
    (tmp_path / "mount.pid").write_text("7\n")
    assert not cover_if_refused(tmp_path)
    assert [command[0] for command in commands] == ["mount"]
    assert commands[0][-1] == os.fspath(tmp_path)
    assert "drive_takes_no_writes" in caplog.text
    assert "Read-only file system" in caplog.text
    assert "run_not_covered" in caplog.text
    assert "must be superuser" in caplog.text
    assert (tmp_path / "mount.pid").read_text() == "7\n"


def test_what_is_on_the_drive_is_carried_into_the_cover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The mount is played: an empty directory appears in place of what was there."""
    monkeypatch.setattr(run_cover, "refuses_writes", lambda _: "Input/output error")
    run = tmp_path / "run"
    (run / "directory").mkdir(parents=True)
    (run / "mount.pid").write_text("7\n")
    (run / "config.json").write_bytes(b"\x00\xff")

    def mount(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        run.rename(tmp_path / "covered")
        run.mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", mount)
    assert cover_if_refused(run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == {"mount.pid": b"7\n", "config.json": b"\x00\xff"}
    assert {path.stat().st_mode & 0o777 for path in run.iterdir()} == {0o600}
    assert "drive_takes_no_writes" in caplog.text
