"""The mount process killed when it has carried a request out and not answered it, for each kind of request the kernel sends: the
program has its answer, and the effect is there once.

The node runs a release of its own, as this one, whose mount process kills itself before an answer that is wished for.
"""

import contextlib
import ctypes
import fcntl
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckptfs.fs.fuse_format import Opcode
from ckptfs.fs.local_cluster import ClusterNode, ClusterSettings, LocalCluster
from ckptfs.fs.local_socket import call

pytestmark = [pytest.mark.slow, pytest.mark.mount]

LONG = "CKPTFS_SOAK_KILLS" in os.environ
TIMES = 3 if LONG else 1
"""How often it is killed before the same answer."""

DYING = """
import os as _os
import signal as _signal
from pathlib import Path as _Path

_begun, _answered = FuseSession._begin, FuseSession._answer
_opcodes: dict[int, int] = {}


def _noting(self, buffer, length):
    header = RequestHeader._make(fuse.IN_HEADER.unpack_from(buffer))
    _opcodes[header.unique] = header.opcode
    return _begun(self, buffer, length)


def _dying(self, message):
    opcode = _opcodes.pop(fuse.OUT_HEADER.unpack(message[0])[2])
    wish = _Path(_os.environ["CKPTFS_TEST_WISH"])
    if wish.exists():
        times, *wished = map(int, wish.read_text().split())
        if opcode in wished:
            if times > 1:
                wish.write_text(" ".join(map(str, [times - 1, *wished])))
            else:
                wish.unlink()
            _os.kill(_os.getpid(), _signal.SIGKILL)
    _answered(self, message)


FuseSession._begin, FuseSession._answer = _noting, _dying
"""

HOLDING = """
import trio as _trio

_worked = FuseSession._work
_is_held = True


async def _holding(self):
    global _is_held
    hold = _Path(_os.environ["CKPTFS_TEST_WISH"]).with_name("hold")
    while _is_held and hold.exists():
        hold.with_name("held").touch()
        await _trio.sleep(0.01)
    _is_held = False
    await _worked(self)


FuseSession._work = _holding
"""
"""A process that is started while there is a file of that name reads no request, though the kernel has sent all again."""


def _wait(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.01)


class Wish:
    """What the mount process is to die of."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kills = 0

    @contextmanager
    def dies(self, *opcodes: int, times: int = TIMES) -> Iterator[None]:
        """Inside it is killed before it answers one of these, so many times; on leaving, it was."""
        new = self.path.with_suffix(".new")
        new.write_text(" ".join(map(str, [times, *map(int, opcodes)])))
        new.rename(self.path)
        yield
        _wait(lambda: not self.path.exists())
        self.kills += times

    def dies_asked(self, *opcodes: int) -> contextlib.AbstractContextManager[None]:
        """As `dies`, for a request that changes nothing: in the long run only."""
        return self.dies(*opcodes) if LONG else contextlib.nullcontext()


def _rename(old: Path, new: Path, flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).renameat2(-100, os.fsencode(old), -100, os.fsencode(new), ctypes.c_uint(flags)):
        raise OSError(ctypes.get_errno(), "renameat2")


def names(at: Path, wish: Wish) -> None:
    """What makes, moves and removes names."""
    with wish.dies(Opcode.MKDIR):
        (at / "directory").mkdir()
    with wish.dies(Opcode.MKNOD):
        os.mkfifo(at / "pipe")
    with wish.dies(Opcode.MKNOD):
        os.mknod(at / "node", 0o640 | stat.S_IFREG)
    assert (at / "node").stat().st_size == 0
    with wish.dies(Opcode.SYMLINK):
        (at / "link").symlink_to("file")
    with wish.dies_asked(Opcode.READLINK):
        assert os.readlink(at / "link") == "file"
    (at / "file").write_bytes(b"content")
    with wish.dies(Opcode.LINK):
        os.link(at / "file", at / "second")
    assert (at / "file").stat().st_nlink == 2
    with wish.dies(Opcode.RENAME, Opcode.RENAME2):
        os.rename(at / "second", at / "directory" / "moved")
    with wish.dies(Opcode.RENAME, Opcode.RENAME2):
        os.rename(at / "node", at / "pipe")  # over what is there
    with wish.dies(Opcode.RENAME2):
        _rename(at / "file", at / "pipe", 2)  # an exchange; twice would be none
    assert (at / "file").read_bytes() == b""
    assert (at / "pipe").read_bytes() == b"content"
    with wish.dies_asked(Opcode.LOOKUP):
        assert (at / "directory" / "moved").stat().st_size == 7
    with wish.dies_asked(Opcode.READDIR, Opcode.READDIRPLUS):
        assert sorted(os.listdir(at)) == ["directory", "file", "link", "pipe"]
    with wish.dies_asked(Opcode.OPENDIR):
        assert os.listdir(at / "directory") == ["moved"]
    with wish.dies_asked(Opcode.RELEASEDIR):
        os.listdir(at)
    with wish.dies(Opcode.UNLINK):
        (at / "directory" / "moved").unlink()
    assert (at / "pipe").stat().st_nlink == 1
    with wish.dies(Opcode.RMDIR):
        (at / "directory").rmdir()
    assert sorted(os.listdir(at)) == ["file", "link", "pipe"]


def records(at: Path, wish: Wish) -> None:
    """What changes an inode's record, of a file with a name and of one without."""
    with open(at / "nameless", "w+b", buffering=0) as nameless:
        nameless.write(b"content")
        (at / "nameless").unlink()
        (at / "file").write_bytes(b"content")
        for target in (at / "file", nameless.fileno()):
            with wish.dies(Opcode.SETATTR):
                os.chmod(target, 0o600)
            with wish.dies(Opcode.SETATTR):
                os.utime(target, ns=(5, 7))
            with wish.dies(Opcode.SETXATTR):
                os.setxattr(target, "user.once", b"1", os.XATTR_CREATE)
            with wish.dies_asked(Opcode.GETXATTR):
                assert os.getxattr(target, "user.once") == b"1"
            with wish.dies_asked(Opcode.LISTXATTR):
                assert os.listxattr(target) == ["user.once"]
            with wish.dies(Opcode.REMOVEXATTR):
                os.removexattr(target, "user.once")
            with wish.dies_asked(Opcode.GETATTR):
                status = os.stat(target)
            assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_size) == (0o600, 7, 7)
            with wish.dies(Opcode.SETATTR):
                os.truncate(target, 3)
            assert os.stat(target).st_size == 3
    with wish.dies(Opcode.SETATTR):
        os.truncate(at / "file", 0)
    assert (at / "file").read_bytes() == b""
    with wish.dies_asked(Opcode.STATFS):
        assert os.statvfs(at).f_blocks > 0


def handles(at: Path, wish: Wish) -> None:
    """What opens, uses and closes files. What the passthrough lane does not ask for is left out there."""
    is_served = at.name == "off"
    with wish.dies(Opcode.CREATE):
        file = os.open(at / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with wish.dies(Opcode.WRITE) if is_served else contextlib.nullcontext():
        assert os.write(file, b"content" * 1000) == 7000
    with wish.dies(Opcode.FALLOCATE):
        os.posix_fallocate(file, 0, 7007)
    with wish.dies(Opcode.FSYNC):
        os.fsync(file)
    with wish.dies_asked(Opcode.LSEEK):
        assert os.lseek(file, 0, os.SEEK_DATA) == 0
    with wish.dies(Opcode.FLUSH) if is_served else contextlib.nullcontext():
        os.close(file)
    with wish.dies(Opcode.OPEN):
        file = os.open(at / "file", os.O_WRONLY | os.O_APPEND)
    with wish.dies(Opcode.WRITE) if is_served else contextlib.nullcontext():
        assert os.write(file, b"more") == 4
    with wish.dies(Opcode.RELEASE):
        os.close(file)
    with open(at / "file", "rb", buffering=0) as opened:
        with wish.dies(Opcode.READ) if is_served else contextlib.nullcontext():
            assert opened.read() == b"content" * 1000 + bytes(7) + b"more"
        fcntl.flock(opened, fcntl.LOCK_EX)
    with wish.dies(Opcode.OPEN):
        file = os.open(at / "file", os.O_WRONLY | os.O_TRUNC)
    os.write(file, b"anew")
    os.close(file)
    with open(at / "file", "r+b", buffering=0) as opened:
        with wish.dies(Opcode.UNLINK):
            (at / "file").unlink()
        assert opened.read() == b"anew"
        with wish.dies(Opcode.RELEASE):
            opened.close()
    directory = os.open(at, os.O_RDONLY)
    with wish.dies_asked(Opcode.FSYNCDIR):
        os.fsync(directory)
    os.close(directory)
    assert os.listdir(at) == []


@contextmanager
def _dying_node(scratch: Path, make_release: Any, passthrough: str, **changed: str) -> Iterator[tuple[ClusterNode, Wish]]:
    """A node of a release with that text added to modules of `fs/`, which is up."""
    cluster = LocalCluster(scratch / "cluster")
    cluster.prepare(1, ClusterSettings(settle_seconds=0.2, passthrough=passthrough))
    node = cluster.nodes[0]
    with open(node.config, "a") as config:  # the last section is [mount]
        config.write("attribute_timeout_seconds = 0\n")  # the kernel asks each time
    wish = Wish(scratch / "wish")
    python = make_release(scratch / "release", "99.1", {f"fs/{module}": text for module, text in changed.items()})
    with open(node.log / "node.log", "ab") as log:
        process = subprocess.Popen(
            [python, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(node.config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"CKPTFS_TEST_WISH": str(wish.path)},
            start_new_session=True,
            cwd="/",
        )
    try:
        _wait(node.answers)
        yield node, wish
    finally:
        process.terminate()
        process.wait(30)


def _status(node: ClusterNode) -> dict[str, Any]:
    return call(node.store / "run" / "mount.sock", {"do": "status"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("passthrough", "kind"), [("auto", names), ("auto", records), ("auto", handles), ("off", handles)])
def test_every_request_is_answered_as_if_nobody_had_been_killed(
    scratch: Path, make_release: Any, passthrough: str, kind: Callable[[Path, Wish], None]
) -> None:
    with _dying_node(scratch, make_release, passthrough, fuse_session=DYING) as (node, wish):
        directory = node.mountpoint / passthrough
        directory.mkdir()
        kind(directory, wish)
        assert _status(node)["unexpected_errors"] == 0
        call(node.store / "run" / "mount.sock", {"do": "settle"})
        _wait(lambda: _status(node)["open_files"] == 0)
        log_text = (node.log / "mount.log").read_text()
        assert log_text.count("mount_ready") == wish.kills + 1
        assert "Traceback" not in log_text


def test_a_program_killed_with_the_mount_process_as_it_opens_files_leaves_none_open(scratch: Path, make_release: Any) -> None:
    """In the served lane; killed when the kernel has sent the request again and the next process hasn't read it. Of three files
    one keeps its name, one loses it, and one a living program has open too."""
    changed = {"fuse_session": DYING + HOLDING, "ghost_handles": "FIRST_LOOK_SECONDS = LOOK_SECONDS = 0.5"}
    with _dying_node(scratch, make_release, "off", **changed) as (node, wish), contextlib.ExitStack() as programs:
        hold, held = wish.path.with_name("hold"), wish.path.with_name("held")
        paths = [node.mountpoint / name for name in ("named", "removed", "used")]
        for path in paths:
            path.write_bytes(b"content")
        used = programs.enter_context(open(paths[2], "ab"))
        for path in paths:
            hold.touch()
            with wish.dies(Opcode.OPEN, times=1):
                program = subprocess.Popen(["/bin/sh", "-c", 'exec 3<>"$0"; exec sleep 1000', path])
            _wait(held.exists)
            program.kill()
            program.wait(30)
            hold.unlink()
            path.stat()  # all of it works now
            held.unlink()
        paths[1].unlink()
        _wait(lambda: _status(node)["open_files"] == 2, seconds=60)  # the last ghost has company
        assert used.write(b"more") == 4
        used.close()
        _wait(lambda: _status(node)["open_files"] == 0, seconds=60)
        assert (node.log / "mount.log").read_text().count("ghost_handle_closed") == 3
        assert os.listdir(node.mountpoint) == ["named", "used"]
        assert (node.mountpoint / "used").read_bytes() == b"contentmore"
