"""Names that move or go while programs have what they led to: as on a plain directory, which proves each test."""

import ctypes
import mmap
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

_libc = ctypes.CDLL(None, use_errno=True)
IN_ALL = 0x00000FFF
EVENT = struct.Struct("<iIII")
IN_ACCESS, IN_OPEN = 0x1, 0x20


class Watch:
    """The events of one directory, as inotify(7) tells them."""

    def __init__(self, directory: Path) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK)
        assert self._descriptor >= 0
        assert _libc.inotify_add_watch(self._descriptor, os.fsencode(directory), IN_ALL & ~IN_ACCESS & ~IN_OPEN) >= 0

    def take(self) -> list[tuple[int, bytes]]:
        """(mask, name) of what happened since; without accesses and opens."""
        found = []
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return []
        while data:
            _, mask, _, length = EVENT.unpack_from(data)
            found.append((mask, data[EVENT.size : EVENT.size + length].rstrip(b"\0")))
            data = data[EVENT.size + length :]
        return found

    def close(self) -> None:
        os.close(self._descriptor)


def _changes(directory: Path) -> list[Callable[[], Any]]:
    file, other, below = directory / "file", directory / "other", directory / "below"
    return [
        lambda: file.write_bytes(b"content"),
        lambda: file.chmod(0o600),
        lambda: os.link(file, other),
        lambda: os.truncate(file, 3),
        lambda: os.utime(file, ns=(5, 5)),
        lambda: os.setxattr(file, b"user.a", b"1"),
        lambda: below.mkdir(),
        lambda: file.rename(below / "file"),
        lambda: other.rename(file),
        lambda: shutil.rmtree(below),
        lambda: file.unlink(),
    ]


def test_inotify_tells_what_happens(place: Any, scratch: Path) -> None:
    watched, plain = place.here / "watched", scratch / "plain"
    for directory in (watched, plain):
        directory.mkdir()
    watches = [Watch(watched), Watch(plain)]
    try:
        for change, same in zip(_changes(watched), _changes(plain), strict=True):
            change()
            same()
            events = [watch.take() for watch in watches]
            assert events[0] == events[1]
            assert events[1]
    finally:
        for watch in watches:
            watch.close()


IN_A_REMOVED_DIRECTORY = """
import os, sys
os.chdir(sys.argv[1])
held = os.open(".", os.O_RDONLY)
os.rmdir(sys.argv[1])

def error(call):
    try:
        call()
    except OSError as error:
        return type(error).__name__

assert error(os.getcwd) == "FileNotFoundError"
for attempt in range(2):
    status = os.stat(".")
    assert (status.st_nlink, status.st_mode & 0o7777) == (0, 0o755), status
    os.fchmod(held, 0o700)
    os.utime(held, ns=(5, 6))
    assert (os.fstat(held).st_mode & 0o7777, os.fstat(held).st_mtime_ns) == (0o700, 6)
    os.fchmod(held, 0o755)
assert os.listdir(".") == []
assert error(lambda: os.mkdir("below")) == "FileNotFoundError"
assert error(lambda: open("file", "w")) == "FileNotFoundError"
assert error(lambda: os.stat("file")) == "FileNotFoundError"
assert os.stat("..").st_ino == os.stat(os.path.dirname(sys.argv[1])).st_ino
os.mkdir(sys.argv[1])
assert error(os.getcwd) == "FileNotFoundError"
"""


def test_programs_stay_in_a_directory_that_was_removed(place: Any, run_python: Any) -> None:
    (place.here / "directory").mkdir(mode=0o755)
    run_python(IN_A_REMOVED_DIRECTORY, place.here / "directory")


def test_programs_see_a_directory_that_was_moved(place: Any, run_python: Any) -> None:
    (place.here / "a" / "inner").mkdir(parents=True)
    (place.here / "b").mkdir()
    code = """if True:
        import os, sys
        os.chdir(sys.argv[1] + "/a/inner")
        os.rename(sys.argv[1] + "/a", sys.argv[1] + "/b/moved")
        assert os.getcwd() == sys.argv[1] + "/b/moved/inner"
        open("file", "w").close()
        assert os.path.exists(sys.argv[1] + "/b/moved/inner/file")
        assert os.stat(sys.argv[1]).st_nlink == 3 and os.stat("../..").st_nlink == 3
    """
    run_python(code, place.here)


def test_another_root(place: Any) -> None:
    """chroot(2) into a directory that is removed then."""
    (place.here / "root").mkdir()
    code = """if True:
        import os, sys
        os.chroot(sys.argv[1])
        os.chdir("/")
        os.mkdir("/inside")
        assert os.listdir("/") == ["inside"] and os.path.samefile("/..", "/")
        os.symlink("/inside", "/link")
        assert os.path.samefile("/link", "/inside")
    """
    done = subprocess.run([sys.executable, "-I", "-c", code, place.here / "root"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(place.here / "root")) == ["inside", "link"]


@pytest.mark.parametrize("how", ["unlink", "rename over", "rmtree", "exchange"])
def test_what_is_mapped_and_open_goes_on(place: Any, how: str) -> None:
    content = os.urandom(300_000)
    directory = place.here / "directory"
    directory.mkdir()
    path = directory / "file"
    path.write_bytes(content)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        if how == "unlink":
            path.unlink()
        elif how == "rmtree":
            shutil.rmtree(directory)
        else:
            (place.here / "other").write_bytes(b"other")
            number = {"rename over": 0, "exchange": 2}[how]
            assert _libc.renameat2(-100, os.fsencode(place.here / "other"), -100, os.fsencode(path), number) == 0
            assert path.read_bytes() == b"other"
        assert mapped[:] == content
        mapped[:5] = b"12345"
        mapped.flush()
        file.write(b"67890")
        file.flush()
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), 10, 0) == b"67890" + content[5:10]
        assert os.fstat(file.fileno()).st_nlink == (1 if how == "exchange" else 0)
    if how == "exchange":
        assert (place.here / "other").read_bytes() == b"67890" + content[5:]


def test_everything_is_removed_under_its_readers(place: Any) -> None:
    """Readers that are in the middle of a file when it is removed read on to its end."""
    contents = [os.urandom(200_000) for _ in range(8)]
    for number, content in enumerate(contents):
        (place.here / f"file-{number}").write_bytes(content)
    halves_read, removed = threading.Barrier(len(contents) + 1), threading.Event()
    found: dict[int, bytes] = {}

    def read(number: int) -> None:
        with open(place.here / f"file-{number}", "rb", buffering=0) as file:
            half = file.read(100_000)
            halves_read.wait(60)
            assert removed.wait(60)
            found[number] = half + file.read()

    readers = [threading.Thread(target=read, args=[number]) for number in range(len(contents))]
    for reader in readers:
        reader.start()
    halves_read.wait(60)
    for path in place.here.iterdir():
        path.unlink()
    removed.set()
    for reader in readers:
        reader.join(60)
    assert [found[number] for number in range(len(contents))] == contents


def test_reading_changes_no_time_where_the_mount_says_so(place: Any) -> None:
    """The mount is `noatime`, and tells; times that are set are kept."""
    path = place.here / "file"
    path.write_bytes(b"content")
    os.utime(path, ns=(5, 6))
    before = os.stat(path).st_atime_ns
    path.read_bytes()
    os.listdir(place.here)
    is_noatime = bool(os.statvfs(path).f_flag & os.ST_NOATIME)
    assert is_noatime or not place.is_mount
    assert (os.stat(path).st_atime_ns == before) is is_noatime


def test_times_are_in_the_order_of_what_happened(place: Any) -> None:
    """Also within one tick of the clock, and between what is stamped by writing and what isn't: make(1) depends on it."""
    directory = place.here
    (directory / "written").write_bytes(b"")
    (directory / "touched").write_bytes(b"")
    times = []
    for step in range(30):
        (directory / "written").write_bytes(b"%d" % step)
        times.append((directory / "written").stat().st_mtime_ns)
        os.utime(directory / "touched")
        times.append((directory / "touched").stat().st_mtime_ns)
        (directory / f"made-{step}").mkdir()
        times.append((directory / f"made-{step}").stat().st_mtime_ns)
        with open(directory / "log", "ab") as log:
            log.write(b"line\n")
        times.append((directory / "log").stat().st_mtime_ns)
        (directory / "written").chmod(0o600 + step)
        times.append((directory / "written").stat().st_ctime_ns)
    assert times == sorted(times)


def test_links_to_links_end(place: Any) -> None:
    for number in range(40):
        os.symlink("file" if number == 0 else f"link-{number - 1}", place.here / f"link-{number}")
    (place.here / "link-39").write_bytes(b"content")
    assert (place.here / "file").read_bytes() == b"content"
    os.symlink("link-39", place.here / "link-40")
    with pytest.raises(OSError, match="Too many levels"):
        (place.here / "link-40").read_bytes()
    target = "t" * 4095
    os.symlink(target, place.here / "long")
    assert os.readlink(place.here / "long") == target
    assert os.lstat(place.here / "long").st_size == 4095


def test_paths_of_4095_bytes(place: Any) -> None:
    """The longest that the kernel takes, made of the longest names; longer ones step by step."""
    os.chdir(place.here)
    try:
        name, depth = "n" * 255, 0
        while (depth + 1) * 256 + 1 <= 4095:
            os.mkdir("/".join([name] * (depth + 1)))
            depth += 1
        deepest = "/".join([name] * depth)
        longest = deepest + "/" + "f" * (4095 - len(deepest) - 1)
        Path(longest).write_bytes(b"content")
        with pytest.raises(OSError, match="name too long"):
            Path(longest + "f").write_bytes(b"")
        os.chdir(deepest)
        os.mkdir(name)
        os.chdir(name)
        Path("file").write_bytes(b"deeper")
        assert os.stat("../..").st_nlink == 3
        os.chdir(place.here)
        shutil.rmtree(name)
        assert os.listdir(place.here) == []
    finally:
        os.chdir("/")
