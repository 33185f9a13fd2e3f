"""A drive that fails one sync, on a real mount: what it did not take stays unsafe, said as such, whatever later syncs answer."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]


def _errno(call_: Callable[[], object]) -> str:
    try:
        call_()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def test_a_failed_sync_stays_failed(recorder: Path, scratch: Path, start_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel marks the pages clean after a sync that failed: the next one would succeed, and lie."""
    failing = scratch / "failing"
    monkeypatch.setenv("LD_PRELOAD", str(recorder))
    monkeypatch.setenv("RECORDER_FAIL", str(failing))
    cluster = start_cluster(nodes=3, settle_seconds=0.1)
    monkeypatch.undo()
    node = cluster.nodes[0]
    path, closed, right = (node.mountpoint / name for name in ("written", "closed", "right"))
    failing.touch()
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    os.write(descriptor, b"bytes" * 1000)
    assert _errno(lambda: os.fsync(descriptor)) == "EIO"
    closed.write_bytes(b"never synced by the program")
    log = node.log / "mount.log"
    deadline = time.monotonic() + 30
    while "seal_failed" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    failing.unlink()
    assert _errno(lambda: os.fsync(descriptor)) == "EIO"

    before = node.processes.pids()["mount"]
    assert before is not None
    os.kill(before, signal.SIGKILL)
    os.write(descriptor, b"more")
    assert _errno(lambda: os.fsync(descriptor)) == "EIO"
    os.close(descriptor)
    assert path.read_bytes() == b"bytes" * 1000 + b"more"

    right.write_bytes(b"another file")
    behind, _, _ = wait_until([right], "protected", 60.0, shown=False)
    assert not behind
    states = call(node.store / "run" / "mount.sock", {"do": "state", "inos": [path.stat().st_ino, closed.stat().st_ino]})
    assert {fact["state"] for fact in states["states"].values()} == {"open"}

    # Safe elsewhere: written once more, under another name that takes its place.
    copy = node.mountpoint / "copy"
    copy.write_bytes(path.read_bytes())
    copy.rename(path)
    behind, _, _ = wait_until([path], "protected", 60.0, shown=False)
    assert not behind
