"""What a request says of who makes it, and what only /proc does."""

from pathlib import Path

from ckptfs.fs.fuse_format import RequestHeader


def is_member(caller: RequestHeader, gid: int) -> bool:
    """Whether the caller, who waits for the answer, is in the group. One whose groups can't be seen counts as in it: a process of
    another PID namespace, or one that was killed meanwhile."""
    if caller.gid == gid:
        return True
    try:
        lines = Path(f"/proc/{caller.pid}/status").read_text().splitlines()
    except OSError:
        return True
    groups = next((line for line in lines if line.startswith("Groups:")), "").split()[1:]
    return str(gid) in groups
