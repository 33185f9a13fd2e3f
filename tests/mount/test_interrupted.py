"""Ctrl-C: one line or one JSON document, the documented code, and nothing that stays unsaid."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptfs.fs import cli_verify
from ckptfs.fs.cli import run
from ckptfs.fs.cli_errors import NotReached
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.mount_table import mounts

pytestmark = [pytest.mark.slow, pytest.mark.mount]

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


def _interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", ["flush", "verify"])
def test_a_command_that_is_interrupted(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, as_json: bool
) -> None:
    path = cluster.nodes[0].mountpoint / f"interrupted-{command}-{as_json}"
    with open(path, "wb", buffering=0) as file:
        file.write(b"still open")
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", _interrupt)
            patch.setattr(cli_verify, "walk_files", _interrupt)
            assert run([command, str(path), *(["--json"] if as_json else [])]) == 130
    captured = capsys.readouterr()
    assert captured.err.startswith("ckptfs: interrupted")
    assert captured.err.count("\n") == 1
    if as_json:
        assert json.loads(captured.out)["exit_code"] == 130
    else:
        assert captured.out == ""


def _demo(directory: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", str(DEMO), str(directory), "--size-mb", "1", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, preexec_fn=_with_every_signal)  # type: ignore[call-overload, no-any-return]


def _with_every_signal() -> None:
    """This run may have been started in the background, or by nohup: what that ignores its children would ignore too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def test_what_the_drive_refuses_a_library_is_one_line() -> None:
    """torch makes a RuntimeError of it."""
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "demo", demo)  # where its dataclasses look
        spec.loader.exec_module(demo)
        writer = demo._writer(4096)
        with pytest.raises(NotReached, match=r"saving /dev/full with torch.save failed \(.*\): the drive is full") as caught:
            demo._by(writer, "saving /dev/full", lambda: writer.save(Path("/dev/full")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "code", "keep_nothing"), [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, True), (signal.SIGHUP, 129, False)]
)
def test_the_demo_says_what_stays_of_it(scratch: Path, number: int, code: int, keep_nothing: bool) -> None:
    directory = scratch / "a demo"
    with _demo(directory, *(["--keep-nothing"] if keep_nothing else [])) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("2"):
            assert demo.poll() is None
        second = _demo(directory, "--keep-nothing")
        assert second.communicate(timeout=60)[1] == f"demo: a demo already runs in {directory}\n"
        assert second.returncode == 1
        demo.send_signal(number)
        _, error = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert error.startswith("demo: interrupted; ")
    assert error.count("\n") == 1
    if not keep_nothing:
        assert any(mounted.mountpoint.is_relative_to(directory) for mounted in mounts())
        assert f"scripts/demo '{directory}'" in error
        assert f"cluster down '{directory}' --remove" in error
        LocalCluster(directory).down(remove=True)
    assert not directory.exists()
