"""What only the agent writes becomes its user's, at each of its starts and before it gives up root.

In the store: `agent/` (its databases and the copy of the catalog), `shards/`, `copies/`; `agent/` in the log directory; and the
catalog, where that is a SQLite file. Everything else stays root's, and so do the directories these lie in: whoever takes over the
agent can put nothing in the place of what root opens.

Earlier releases had the agent's files in the store itself, and ran it as root. What is found there is moved, and a link left in
its place, so that such a release finds it; what that one made anew is a file again, newer than what lies in `agent/`, and moved
again. The owners of shards and copies are looked at one by one only if the agent ran as somebody else the last time, which its
pid file says, or a directory itself is another's, as in a copy of the store. So a kill amid this is made good by the next start.
"""

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path

from ckptfs.cache.drive_refusal import refuses_writes
from ckptfs.cache.store import AGENT_FILES, StoreDirectory, sync_directory
from ckptfs.fs.agent_user import AgentUser
from ckptfs.fs.process_start import last_user

log = logging.getLogger(__name__)

LINKED = ("agent.db", "small_copies.db")
"""Those of `AGENT_FILES` that an earlier release must find: it makes a copy of the catalog anew."""


_KEEPS_OWNERS = (
    errno.EPERM,
    errno.EROFS,
    errno.EIO,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EOVERFLOW,
    errno.EDQUOT,
)
"""With these a drive, as it is mounted, refuses to give a file to somebody else."""


class OwnersKept(Exception):
    """The drive does not let a file become the user's; the message says which, and why. As it is, only root can write it."""


def take_over(store: StoreDirectory, log_directory: Path, catalog: Path | None, user: AgentUser) -> None:
    """Have the agent's files be that user's, in this release's places. Blocks: after a change of users for some 10 µs a shard.

    `catalog` is the SQLite file, if it is one. What is on a drive that takes no writes stays as it is. Raises `OwnersKept`, and
    `OSError`.
    """
    changed = last_user(store.run, "agent") != user.uid
    failed = store.run / "agent.failed"
    os.close(os.open(failed, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    _give_one(failed, user)
    if catalog is not None and not refuses_writes(catalog.parent):
        place = os.path.realpath(catalog)
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                _give_one(Path(f"{place}{suffix}"), user)
    logs = log_directory / "agent"
    if not refuses_writes(log_directory):
        logs.mkdir(mode=0o750, exist_ok=True)
        _move_log(log_directory, logs)
        _give(logs, user, everything=True)
    if not refuses_writes(store.path):
        _move(store)
        _give(store.agent, user, everything=True)
    for directory in (store.shards, store.copies):
        _give(directory, user, everything=changed)
    with contextlib.suppress(FileNotFoundError):  # one that is made from now on is given by who makes it
        _give_one(store.mount_socket, user)


def share_socket(store: StoreDirectory) -> None:
    """Let the agent, whose the shards are, ask the mount process, which has just made its socket and goes on in any case."""
    if os.geteuid() == 0:
        try:
            owner = os.stat(store.shards, follow_symlinks=False)
            os.chown(store.mount_socket, owner.st_uid, owner.st_gid, follow_symlinks=False)
        except OSError as error:
            log.error("socket_not_shared error=%s: an agent that is not root can't ask this process", error)


def _move(store: StoreDirectory) -> None:
    moved = False
    for name in AGENT_FILES:
        old, new = store.path / name, store.agent / name
        if _is_file(old):
            Path(f"{new}-wal").unlink(missing_ok=True)  # of one that this replaces
            os.rename(old, new)
            moved = True
        if _is_file(wal := Path(f"{old}-wal")):  # also where a kill came between the two
            os.rename(wal, f"{new}-wal")
        Path(f"{old}-shm").unlink(missing_ok=True)
        if name in LINKED and not old.is_symlink():
            old.symlink_to(new.relative_to(store.path))
            moved = True
    for other in store.path.glob("small_copies.db.*"):
        if _is_file(other):  # set aside, or being made
            os.rename(other, store.agent / other.name)
    if moved:
        for directory in (store.agent, store.path):
            sync_directory(directory)


def _move_log(before: Path, now: Path) -> None:
    link = before / "agent.log"
    if _is_file(link):
        os.rename(link, now / "agent.log")
    if not link.is_symlink():
        link.symlink_to(Path(now.name, "agent.log"))


def _is_file(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _give(directory: Path, user: AgentUser, *, everything: bool) -> None:
    """The directory, and with `everything`, or where it isn't the user's, what is in it. No link is followed: the agent
    before this one may have been taken over."""
    if not _is_to_give(user):
        return
    if everything or os.lstat(directory).st_uid != user.uid:
        for _, directories, files, descriptor in os.fwalk(directory, topdown=False):
            for name in (*directories, *files):
                with contextlib.suppress(FileNotFoundError):  # a program that one left behind removes it
                    _give_one(name, user, descriptor)
    _give_one(directory, user)


def _give_one(path: str | Path, user: AgentUser, directory: int | None = None) -> None:
    if not _is_to_give(user):
        return
    status = os.stat(path, dir_fd=directory, follow_symlinks=False)
    linked_elsewhere = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
    if (status.st_uid, status.st_gid) == (user.uid, user.gid) or linked_elsewhere:
        return
    try:
        os.chown(path, user.uid, user.gid, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _KEEPS_OWNERS:
            raise
        place = path if directory is None else f"{os.readlink(f'/proc/self/fd/{directory}')}/{path}"
        raise OwnersKept(f"{place} can't be given to {user.name} ({error.strerror})") from None


def _is_to_give(user: AgentUser) -> bool:
    """Only root can give; and it needs no file to be its own, where other nodes' agents may need the catalog to stay theirs."""
    return os.geteuid() == 0 != user.uid
