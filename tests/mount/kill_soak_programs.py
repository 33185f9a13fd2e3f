"""Programs that use a directory in a loop and check every answer: run by the soak beside this file, one process each.

Started as `python kill_soak_programs.py KIND DIRECTORY SEED`. Runs until a line arrives on standard input, then prints one JSON
document: how many turns it took, and what is left behind, as {path: sha256}. Any answer that is not the one a local file system
gives ends it with a traceback.
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
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)
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
    """Handles, a mapping, a nameless file and a lock that are held all the time."""
    turns = 0
    content = b""
    with (
        open(top / "appended", "a+b", buffering=0) as appended,
        open(top / "mapped", "w+b", buffering=0) as mapped,
        open(top / "nameless", "w+b", buffering=0) as nameless,
    ):
        os.unlink(top / "nameless")
        fcntl.flock(appended, fcntl.LOCK_EX)
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
                assert os.pwrite(nameless.fileno(), block, 0) == len(block)
                assert os.pread(nameless.fileno(), len(block), 0) == block
                assert os.fstat(nameless.fileno()).st_nlink == 0
                time.sleep(0.01)  # it holds; the others work
    return turns


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
    program = {"names": names, "checkpoints": checkpoints, "rewriting": rewriting, "holding": holding, "racing": racing}[kind]
    turns = program(top, random.Random(int(seed)))
    print(json.dumps({"turns": turns, "left": {} if kind == "racing" else left(top)}))


if __name__ == "__main__":
    main()
