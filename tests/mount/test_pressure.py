"""A node short of descriptors, or whose drive fails: programs get errors that say so, or wait; nothing that was acknowledged is
lost, and all of it goes on when the pressure ends."""

import contextlib
import errno
import os
import random
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call
from waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.mount, pytest.mark.timeout(120)]

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(8 * MIB)


def mount_status(node: ClusterNode) -> dict[str, Any]:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


def pid_of(node: ClusterNode, role: str) -> int:
    pid = node.processes.pids()[role]
    assert pid is not None
    return pid


def protect(*paths: Path) -> None:
    behind, _, _ = wait_until(list(paths), "protected", 60.0, shown=False)
    assert not behind


def test_a_mount_short_of_descriptors_refuses_opens_and_nothing_else(start_cluster: Any) -> None:
    cluster: LocalCluster = start_cluster(2, data_shards=1, parity_shards=1, settle_seconds=0.1)
    node = cluster.nodes[0]
    home = node.mountpoint
    (home / "before").write_bytes(CONTENT)
    processes = node.processes.pids()
    resource.prlimit(pid_of(node, "mount"), resource.RLIMIT_NOFILE, (200, 200))
    numbers = []
    with contextlib.ExitStack() as opened:
        files: list[Any] = []
        while True:
            try:
                files.append(opened.enter_context(open(home / f"file-{len(files)}", "wb", buffering=0)))
            except OSError as error:
                numbers.append(error.errno)
                break
        assert numbers == [errno.ENFILE]
        assert 50 < len(files) < 200
        assert any("programs get ENFILE" in problem for problem in mount_status(node)["problems"])
        with pytest.raises(OSError, match="Too many open files in system"):
            (home / "before").read_bytes()
        for file in files:
            file.write(b"content")
            os.fsync(file.fileno())
        (home / "directory").mkdir()
        (home / f"file-{len(files) - 1}").rename(home / "directory" / "moved")
        assert (cluster.nodes[1].mountpoint / "before").read_bytes() == CONTENT
    for number in range(300):  # each waits for those before it to be sealed, where it must
        (home / f"small-{number}").write_bytes(b"%d" % number)
    assert (home / "before").read_bytes() == CONTENT
    protect(home)
    assert not any("ENFILE" in problem for problem in mount_status(node)["problems"])
    assert (cluster.nodes[1].mountpoint / "directory" / "moved").read_bytes() == b"content"
    assert (cluster.nodes[1].mountpoint / "small-299").read_bytes() == b"299"
    assert node.processes.pids() == processes


@pytest.fixture
def failing_drive(scratch: Path) -> tuple[Path, Path]:
    """A drive on which nothing can be written where nothing was, once the file that is given with it is made: it takes the room
    that the drive's image would grow into. Both go with the scratch directory."""
    backing, drive = scratch / "backing", scratch / "drive"
    backing.mkdir()
    drive.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "none", backing], check=True)
    image = backing / "image"
    image.touch()
    os.truncate(image, 256 * MIB)
    subprocess.run(
        ["mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", "-J", "size=8", image],
        check=True,
    )
    subprocess.run(["mount", "-o", "loop", image, drive], check=True)
    return drive, backing / "filler"


def test_a_drive_that_fails_is_said_to_and_takes_nothing_with_it(scratch: Path, failing_drive: tuple[Path, Path]) -> None:
    drive, filler = failing_drive
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(3, ClusterSettings(data_shards=2, parity_shards=1, settle_seconds=0.1))
    node, other = cluster.nodes[0], cluster.nodes[1]
    node.store.mkdir()
    subprocess.run(["mount", "--bind", drive, node.store], check=True)
    cluster.up(None, ClusterSettings())
    home = node.mountpoint
    (home / "safe").write_bytes(CONTENT)
    (other.mountpoint / "theirs").write_bytes(CONTENT)
    protect(home)
    mount = pid_of(node, "mount")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))

    descriptor = os.open(home / "lost", os.O_CREAT | os.O_RDWR)
    for _ in range(8):
        os.write(descriptor, CONTENT)
    with pytest.raises(OSError, match=r"No space left|Input/output"):
        os.fsync(descriptor)
    with pytest.raises(OSError, match="Input/output"):  # and not success, for the kernel has nothing left to write
        os.fsync(descriptor)
    os.close(descriptor)

    def says_so() -> bool:
        with contextlib.suppress(OSError):
            (home / "more").write_bytes(CONTENT)  # until the file system has noticed
        return any(problem.startswith("READ-ONLY") for problem in mount_status(node)["problems"])

    wait_for(says_so, "status says so")
    assert (home / "safe").read_bytes() == CONTENT
    assert (home / "theirs").read_bytes() == CONTENT
    assert (other.mountpoint / "safe").read_bytes() == CONTENT
    (other.mountpoint / "saved-elsewhere").write_bytes(CONTENT)
    assert (home / "saved-elsewhere").read_bytes() == CONTENT
    behind, _, _ = wait_until([home / "lost"], "local", 2.0, shown=False)
    assert [one.state for one in behind] == ["open"], "it is never called safe"
    assert pid_of(node, "mount") == mount

    # The remedy of docs/operations.md: stop the node, repair the file system, start again.
    cluster.kill(0)
    subprocess.run(["umount", node.store], check=True)
    image = filler.parent / "image"
    subprocess.run(["umount", drive], check=True)
    filler.unlink()
    assert subprocess.run(["fsck.ext4", "-fy", image], capture_output=True).returncode < 4
    subprocess.run(["mount", "-o", "loop", image, drive], check=True)
    subprocess.run(["mount", "--bind", drive, node.store], check=True)
    cluster.revive(0)
    assert (home / "safe").read_bytes() == CONTENT
    for name in ("lost", "more"):  # what was never synced: gone, or as it was written, and nothing else
        with contextlib.suppress(FileNotFoundError):
            assert (home / name).read_bytes() in (CONTENT * 8, CONTENT), name
    (home / "after").write_bytes(CONTENT)
    protect(home / "after")
