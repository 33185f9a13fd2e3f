"""Programs that use a directory in a loop and check every answer: run by the soak beside this file, one process each.

Started as `python kill_soak_programs.py KIND DIRECTORY SEED`. Prints `begins` when its first turn does, runs until a line arrives
on standard input, then prints one JSON document: how many turns it took, and what is left behind, as {path: sha256}. Any answer
that is not the one a local file system gives ends it with a traceback.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import random
import shutil
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
AT_FDCWD = -100
F_OFD_SETLK, F_OFD_SETLKW = 37, 38
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("opendir", "readdir"):
    getattr(_libc, _name).restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long
_ended = threading.Event()


def _rename(old: Path, new: Path, flags: int) -> None:
    if _libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(old), None, str(new))


def _refused(expected: type[OSError], call: Callable[[], object]) -> None:
    """The call must fail, in this way."""
    try:
        call()
    except expected:
        return
    raise AssertionError(f"{call} succeeded, {expected.__name__} was due")


def _exclusive(path: Path, mode: int = 0o644) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)


def names(top: Path, chance: random.Random) -> int:
    """Everything that makes, moves and removes names; each call must do its work exactly once."""
    turns = 0
    while not _ended.is_set():
        turns += 1
        work = top / f"turn-{turns}"
        os.mkdir(work)
        _refused(FileExistsError, lambda work=work: os.mkdir(work))  # type: ignore[misc]
        content = chance.randbytes(chance.randrange(1, 5000))
        descriptor = _exclusive(work / "file")
        os.write(descriptor, content)
        os.close(descriptor)
        _refused(FileExistsError, lambda work=work: _exclusive(work / "file"))  # type: ignore[misc]
        os.symlink("file", work / "link")
        assert os.readlink(work / "link") == "file"
        os.link(work / "file", work / "second")
        assert os.stat(work / "file").st_nlink == 2
        os.mkfifo(work / "pipe")
        os.mkdir(work / "directory")
        (work / "other").write_bytes(b"other")
        _rename(work / "file", work / "other", RENAME_EXCHANGE)
        assert (work / "file").read_bytes() == b"other"
        assert (work / "other").read_bytes() == content
        _rename(work / "other", work / "directory" / "moved", RENAME_NOREPLACE)
        os.rename(work / "second", work / "file")  # one file less: the replaced one had this name only
        assert (work / "file").read_bytes() == (work / "directory" / "moved").read_bytes() == content
        os.setxattr(work / "file", "user.once", b"1", os.XATTR_CREATE)
        assert os.getxattr(work / "file", "user.once") == b"1"
        os.removexattr(work / "file", "user.once")
        os.chmod(work / "file", 0o640)
        os.utime(work / "file", ns=(10**18, 10**18 + turns))
        status = os.stat(work / "file")
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, 10**18 + turns), status
        assert sorted(os.listdir(work)) == ["directory", "file", "link", "pipe"], os.listdir(work)
        for name in ("file", "link", "pipe", "directory/moved"):
            os.unlink(work / name)
        os.rmdir(work / "directory")
        os.rmdir(work)
        _refused(FileNotFoundError, lambda work=work: os.rmdir(work))  # type: ignore[misc]
    return turns


def checkpoints(top: Path, chance: random.Random) -> int:
    """What training does: save beside, rename into place, keep the newest few, remove the rest."""
    import torch

    def state(step: int) -> dict[str, object]:
        generator = torch.Generator().manual_seed(step)
        return {"weight": torch.randn(chance_rows[step % 7], 257, generator=generator), "step": step}

    chance_rows = [chance.randrange(1, 2000) for _ in range(7)]
    turns = 0
    while not _ended.is_set():
        turns += 1
        staging = top / f"tmp-checkpoint-{turns}"
        staging.mkdir()
        for part in range(3):
            torch.save(state(turns + part), staging / f"part-{part}.pt.tmp")
            os.replace(staging / f"part-{part}.pt.tmp", staging / f"part-{part}.pt")
        os.rename(staging, top / f"checkpoint-{turns}")
        latest = top / "latest.tmp"
        latest.write_text(f"checkpoint-{turns}")
        os.replace(latest, top / "latest")
        assert (top / "latest").read_text() == f"checkpoint-{turns}"
        for kept in range(max(1, turns - 2), turns + 1):
            for part in range(3):
                loaded = torch.load(top / f"checkpoint-{kept}" / f"part-{part}.pt")
                wanted = state(kept + part)
                assert loaded["step"] == wanted["step"]
                assert torch.equal(loaded["weight"], wanted["weight"])
        if turns > 3:
            shutil.rmtree(top / f"checkpoint-{turns - 3}")
        expected = {"latest", *(f"checkpoint-{kept}" for kept in range(max(1, turns - 2), turns + 1))}
        assert set(os.listdir(top)) == expected, os.listdir(top)
    return turns


def sharded(top: Path, chance: random.Random) -> int:
    """torch.distributed.checkpoint: several files at once, then its metadata, which makes them a checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    turns = 0
    while not _ended.is_set():
        turns += 1
        directory = top / f"step-{turns}"
        state = {f"layer-{number}": torch.randn(chance.randrange(1, 300), 65) for number in range(6)}
        writer = dcp.FileSystemWriter(directory, single_file_per_rank=False, thread_count=2)
        dcp.save(state, storage_writer=writer, no_dist=True)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
        if turns > 1:
            shutil.rmtree(top / f"step-{turns - 1}")
        assert os.listdir(top) == [directory.name], os.listdir(top)
    return turns


def rewriting(top: Path, chance: random.Random) -> int:
    """Files that are appended to, rewritten in place, truncated, mapped, and removed while they are open."""
    turns = 0
    kept: dict[Path, bytes] = {}
    while not _ended.is_set():
        turns += 1
        path = top / f"file-{turns % 5}"
        content = kept.get(path, b"")
        if chance.random() < 0.3:
            content = chance.randbytes(chance.randrange(200_000))
            path.write_bytes(content)
        with open(path, "ab", buffering=0) as appended:
            for _ in range(3):
                block = chance.randbytes(chance.randrange(1, 3000))
                assert appended.write(block) == len(block)
                content += block
            if chance.random() < 0.2:
                os.fsync(appended.fileno())
        if chance.random() < 0.3:
            size = chance.randrange(len(content) + 5000)
            os.truncate(path, size)
            content = content[:size].ljust(size, b"\0")
        if content and chance.random() < 0.5:
            block = chance.randbytes(100)
            at = chance.randrange(len(content))
            with open(path, "r+b", buffering=0) as opened:
                os.pwrite(opened.fileno(), block, at)
            content = content[:at] + block + content[at + len(block) :]
        assert path.stat().st_size == len(content)
        assert path.read_bytes() == content
        kept[path] = content
        with open(top / "nameless", "x+b", buffering=0) as nameless:
            nameless.write(content)
            os.unlink(top / "nameless")
            assert os.pread(nameless.fileno(), len(content) + 1, 0) == content
            assert os.fstat(nameless.fileno()).st_nlink == 0
    return turns


def holding(top: Path, chance: random.Random) -> int:
    """Handles, a mapping, a nameless file, locks and a working directory that are held all the time."""
    turns = 0
    content = b""
    (top / "directory").mkdir()
    os.chdir(top / "directory")
    with (
        open(top / "appended", "a+b", buffering=0) as appended,
        open(top / "mapped", "w+b", buffering=0) as mapped,
        open(top / "nameless", "w+b", buffering=0) as nameless,
    ):
        os.unlink(top / "nameless")
        fcntl.flock(appended, fcntl.LOCK_EX)
        _lock_range(mapped.fileno(), F_OFD_SETLK)
        mapped.truncate(8192)
        with mmap.mmap(mapped.fileno(), 8192) as memory:
            while not _ended.is_set():
                turns += 1
                block = chance.randbytes(chance.randrange(1, 1000))
                assert appended.write(block) == len(block)
                content += block
                assert os.fstat(appended.fileno()).st_size == len(content)
                assert os.pread(appended.fileno(), len(content) + 1, 0) == content
                at = chance.randrange(8000)
                memory[at : at + 8] = turns.to_bytes(8, "little")
                assert os.pread(mapped.fileno(), 8, at) == turns.to_bytes(8, "little")
                if chance.random() < 0.1:
                    memory.flush()
                assert os.pwrite(nameless.fileno(), block, 0) == len(block)
                assert os.pread(nameless.fileno(), len(block), 0) == block
                assert os.fstat(nameless.fileno()).st_nlink == 0
                with open("../appended", "rb") as second:
                    _refused(BlockingIOError, lambda: fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB))
                with open("../mapped", "r+b") as second:
                    _refused(BlockingIOError, lambda: _lock_range(second.fileno(), F_OFD_SETLK))
                assert os.getcwd() == str(top / "directory")
                time.sleep(0.01)  # it holds; the others work
    os.chdir("/")
    return turns


def _lock_range(descriptor: int, command: int, kind: int = fcntl.F_WRLCK) -> None:
    """Lock bytes 0 to 9 for this open file (`struct flock` of fcntl(2))."""
    fcntl.fcntl(descriptor, command, struct.pack("hh4xqqi4x", kind, os.SEEK_SET, 0, 10, 0))


LOCKS: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
    "flock": (lambda fd: fcntl.flock(fd, fcntl.LOCK_EX), lambda fd: fcntl.flock(fd, fcntl.LOCK_UN)),
    "lockf": (lambda fd: fcntl.lockf(fd, fcntl.LOCK_EX), lambda fd: fcntl.lockf(fd, fcntl.LOCK_UN)),
    "ofd": (lambda fd: _lock_range(fd, F_OFD_SETLKW), lambda fd: _lock_range(fd, F_OFD_SETLK, fcntl.F_UNLCK)),
}


def counting(top: Path, chance: random.Random) -> int:
    """Several processes add one to the same numbers, each under another kind of lock: one that is lost loses an addition."""
    turns = 0
    opened = {kind: os.open(top / kind, os.O_RDWR | os.O_CREAT, 0o644) for kind in LOCKS}
    while not _ended.is_set():
        turns += 1
        for kind, (lock, unlock) in LOCKS.items():
            lock(opened[kind])
            number = int.from_bytes(os.pread(opened[kind], 8, 0), "little")
            time.sleep(chance.choice([0, 0, 0.001, 0.02]))
            assert os.pwrite(opened[kind], (number + 1).to_bytes(8, "little"), 0) == 8
            unlock(opened[kind])
            if chance.random() < 0.05:
                os.close(opened[kind])
                opened[kind] = os.open(top / kind, os.O_RDWR)
    return turns


def logging(top: Path, chance: random.Random) -> int:
    """Several processes append to one log: every line must be there once, whole, and in its writer's order."""
    turns = 0
    log = os.open(top / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    while not _ended.is_set():
        turns += 1
        line = b"%d %d %s\n" % (os.getpid(), turns, b"x" * chance.randrange(200))
        assert os.write(log, line) == len(line)
        if chance.random() < 0.05:
            os.fsync(log)
        if chance.random() < 0.05:
            os.close(log)
            log = os.open(top / "log", os.O_WRONLY | os.O_APPEND)
        time.sleep(0.005)
    os.close(log)
    return turns


class Stream:
    """A directory stream: opendir(3) and what belongs to it."""

    def __init__(self, path: Path) -> None:
        self._stream = ctypes.c_void_p(_libc.opendir(os.fsencode(path)))
        assert self._stream.value, os.strerror(ctypes.get_errno())

    def read(self) -> str | None:
        """The next name; None at the end."""
        ctypes.set_errno(0)
        entry = _libc.readdir(self._stream)
        assert entry or ctypes.get_errno() == 0, os.strerror(ctypes.get_errno())
        return os.fsdecode(ctypes.string_at(entry + 19)) if entry else None  # where d_name is in `struct dirent`

    def tell(self) -> int:
        return int(_libc.telldir(self._stream))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._stream, ctypes.c_long(position))

    def close(self) -> None:
        _libc.closedir(self._stream)


def listing(top: Path, chance: random.Random) -> int:
    """Directory streams, one of them held all the time, that are read bit by bit, with steps back, while other names come and go:
    the names that stay are seen once each."""
    staying = _staying()
    turns = 0
    with contextlib.closing(Stream(top)) as held:
        beginning = held.tell()
        while not _ended.is_set():
            turns += 1
            held.seek(beginning)
            assert sorted(_staying_names(held, top, chance)) == staying
            with contextlib.closing(Stream(top)) as stream:
                assert sorted(_staying_names(stream, top, chance)) == staying
    return turns


def _staying() -> list[str]:
    return [f"stays-{number:04}" for number in range(1000)]


def _make_staying(top: Path) -> None:
    for name in _staying():
        (top / name).touch()


def _staying_names(stream: Stream, top: Path, chance: random.Random) -> list[str]:
    seen: list[str] = []
    marked: tuple[int, int] | None = None
    while (name := stream.read()) is not None:
        if name.startswith("stays"):
            seen.append(name)
        if chance.random() < 0.003:
            marked = stream.tell(), len(seen)
        if chance.random() < 0.003:
            passing = top / f"passing-{chance.randrange(5)}"
            passing.symlink_to("x") if not passing.is_symlink() else passing.unlink()
            time.sleep(0.02)
        if marked is not None and chance.random() < 0.003:
            position, count = marked
            stream.seek(position)
            again = [name for _ in range(20) if (name := stream.read()) and name.startswith("stays")]
            known = seen[count:]
            assert all(before == now for before, now in zip(known, again, strict=False)), (known[:20], again)
            stream.seek(position)
            seen, marked = seen[:count], None
    return seen


def racing(top: Path, chance: random.Random) -> int:
    """Several processes want the same names: every name has one winner, who says so in a file that is read at the end."""
    turns = 0
    mine = top / "wins" / f"{os.getpid()}"
    mine.parent.mkdir(exist_ok=True)
    with open(mine, "xb", buffering=0) as wins:
        while not _ended.is_set():
            turns += 1
            os.makedirs(top / "shared" / f"{turns // 50}", exist_ok=True)
            path = top / "shared" / f"{turns // 50}" / f"{turns}"
            with contextlib.suppress(FileExistsError):
                os.close(_exclusive(path))
                wins.write(b"%d\n" % turns)
    return turns


PROGRAMS = {
    program.__name__: program for program in (names, checkpoints, sharded, rewriting, holding, listing, racing, counting, logging)
}
SHARING = ("racing", "counting", "logging")
"""Several of these have one directory, so that none of them knows what is left there."""


def left(top: Path) -> dict[str, str]:
    """What is under the directory, by content."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(top.rglob("*")) if path.is_file()}


def _listen() -> None:
    sys.stdin.readline()
    _ended.set()


def main() -> None:
    kind, directory, seed = sys.argv[1:]
    threading.Thread(target=_listen, daemon=True).start()
    top = Path(directory)
    top.mkdir(exist_ok=True)
    if kind == "listing":
        _make_staying(top)
    print("begins", flush=True)
    turns = PROGRAMS[kind](top, random.Random(int(seed)))
    print(json.dumps({"pid": os.getpid(), "turns": turns, "left": {} if kind in SHARING else left(top)}))


if __name__ == "__main__":
    main()
