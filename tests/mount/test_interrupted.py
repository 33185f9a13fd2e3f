"""Ctrl-C: one line or one JSON document, the documented code, and nothing that stays unsaid."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptfs.fs import cli_verify
from ckptfs.fs.cli import run
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


@pytest.mark.parametrize("keep_nothing", [False, True])
def test_the_demo_says_what_stays_of_it(scratch: Path, keep_nothing: bool) -> None:
    directory = scratch / "demo"
    command = [sys.executable, "-P", str(DEMO), str(directory), "--size-mb", "1", *(["--keep-nothing"] if keep_nothing else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("2"):
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        _, error = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert error.startswith("demo: interrupted; ")
    assert error.count("\n") == 1
    if not keep_nothing:
        assert any(mounted.mountpoint.is_relative_to(directory) for mounted in mounts())
        assert f"cluster down {directory} --remove" in error
        LocalCluster(directory).down(remove=True)
    assert not directory.exists()
