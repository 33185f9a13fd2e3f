"""What the three processes of a node do alike when they start: the log, limits, pid file, and dying with the supervisor."""

import contextlib
import ctypes
import errno
import logging
import logging.handlers
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from ckptfs.cache.admission import StoreRemoved
from ckptfs.cache.errors import CacheError
from ckptfs.fs.config import ConfigurationError
from ckptfs.fs.node_processes import started_at
from ckptfs.replication.errors import ReplicationError

PR_SET_PDEATHSIG = 1
FOR_GOOD_STATUS = 3
"""A child's exit status where its next life could do no better: the supervisor ends the node, with the reason it left."""
END_MOUNT_SIGNAL = signal.SIGUSR1
"""With which the supervisor asks a mount process to end. Not SIGTERM: that comes from others too (daemons that watch over memory,
an operator), who know nothing of the programs in the mount."""
LOG_SIZE_BYTES_MAX = 16 << 20
LOG_FILES_KEPT = 3
MEMORY_KILLS = Path("/proc/self/oom_score_adj")
BEGAN_VARIABLE = "CKPTFS_OOM_SCORE_ADJ"
"""What the supervisor had there when it was started; other releases of it, too."""
DESCRIPTORS_WANTED = 1 << 17
"""A tenth of what Linux allows one process by default (fs.nr_open)."""
DESCRIPTORS_FEW = 12_000


def start_log(directory: Path, role: str) -> None:
    """Log to `<directory>/<role>.log`, rotated; warnings and errors are things an operator must see.

    A drive that takes no writes is not to end a mount or agent, which go on there: those log to standard error then. Raises
    `ConfigurationError` where no log can be written.
    """
    path = directory / f"{role}.log"
    handler: logging.Handler
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_SIZE_BYTES_MAX, backupCount=LOG_FILES_KEPT)
    except OSError as error:
        if role == "supervisor" or error.errno not in (errno.EROFS, errno.EIO):
            raise _no_log(path, error) from None
        handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _no_log(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"node.log_directory: {path} can't be written: {error.strerror}; nothing was mounted")


def be_killed_by_signals() -> None:
    """Have signals from outside end this process as SIGKILL does: at once, in the middle of requests, which come again. Python's
    own way would unwind them, and so undo parts of what the next process is to find."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def death_logged(run: Path, role: str) -> Iterator[None]:
    """What ends the process goes into its log and into `<run>/<role>.failed`, which `ckptfs status` shows until `is_ready`.

    A bug of ours has its traceback in the log; what an operator can mend is one line. A node whose store was removed ends.
    """
    try:
        yield
    except Exception as error:
        cause = _single_cause(error)
        foreseen = isinstance(cause, CacheError | ReplicationError | ConfigurationError)
        reason = str(cause) if foreseen else f"{type(cause).__name__}: {cause}; {role}.log has the details"
        logging.getLogger(role).critical("process_died reason=%s", reason, exc_info=not foreseen)
        with contextlib.suppress(OSError):
            (run / f"{role}.failed").write_text(f"{reason}\n")
        raise SystemExit(FOR_GOOD_STATUS if isinstance(cause, StoreRemoved) else 1) from None


def end_for_good(run: Path, role: str, reason: str) -> NoReturn:
    """End this process at once, and with it the node. For the moments before anything depends on it."""
    logging.getLogger(role).critical("process_gave_up reason=%s", reason)
    with contextlib.suppress(OSError):
        (run / f"{role}.failed").write_text(f"{reason}\n")
    os._exit(FOR_GOOD_STATUS)


def _single_cause(error: Exception) -> Exception:
    """What a nursery, or several of them, wrapped."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def is_ready(run: Path, role: str) -> None:
    """Whatever ended this process's predecessor does not end this one."""
    failed = run / f"{role}.failed"
    with contextlib.suppress(OSError):
        try:
            failed.unlink()
        except PermissionError:  # the agent's file, in a directory of root's
            os.truncate(failed, 0)


def raise_descriptor_limit() -> int:
    """Allow as many descriptors as the system does, root up to `DESCRIPTORS_WANTED`; returns the limit. The mount process has one
    for each file that is open or not yet local: when it has no more, programs get EMFILE."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < DESCRIPTORS_WANTED:
        with contextlib.suppress(ValueError, OSError):  # not root
            resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_WANTED, DESCRIPTORS_WANTED))
            return DESCRIPTORS_WANTED
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < DESCRIPTORS_FEW:
        logging.getLogger(__name__).warning(
            "few_descriptors limit=%d: programs get EMFILE when about so many files are in use; raise the hard limit (ulimit -Hn,"
            " LimitNOFILE=)",
            hard,
        )
    return hard


def ignore_broken_leases() -> None:
    """A program that opens a file in the moment of a lease test (`segments.has_no_writer`) breaks the lease; the signal that says
    so would end this process."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def be_spared_for_memory() -> None:
    """Have the kernel choose any other process before this one, the supervisor, where memory is short and root may say so: it
    starts the others again, but the mount ends with it. Those begin from where this one began."""
    with contextlib.suppress(OSError, ValueError):
        began = int(os.environ.setdefault(BEGAN_VARIABLE, MEMORY_KILLS.read_text().strip()))
        MEMORY_KILLS.write_text(str(max(-999, began - 500)))


def be_killed_for_memory(preference: int) -> None:
    """Have the kernel choose this process rather than the supervisor where memory is short, and the one with the greater
    preference first (in thousandths of the memory there is)."""
    with contextlib.suppress(OSError, ValueError):
        began = int(os.environ.get(BEGAN_VARIABLE) or MEMORY_KILLS.read_text())
        MEMORY_KILLS.write_text(str(min(1000, began + preference)))


def kills_for_memory() -> int:
    """How many processes this machine's kernel has killed for want of memory, in whichever cgroup; 0 where it doesn't say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def write_pid_file(run: Path, role: str, uid: int | None = None) -> None:
    """`<run>/<role>.pid`: this process's pid, when it was started, and whom it runs as (None: as now); replaced atomically."""
    temporary = run / f"{role}.pid.new"
    temporary.write_text(f"{os.getpid()} {started_at(os.getpid())} {os.geteuid() if uid is None else uid}\n")
    temporary.rename(run / f"{role}.pid")


def last_user(run: Path, role: str) -> int | None:
    """Whom the process runs as, or ran as last; None where an earlier release's did, or none yet."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((run / f"{role}.pid").read_text().split()[2])
    return None


def remove_pid_file(run: Path, role: str) -> None:
    """Remove the file if it names this process."""
    path = run / f"{role}.pid"
    with contextlib.suppress(OSError, ValueError, IndexError):
        if int(path.read_text().split()[0]) == os.getpid():
            path.unlink()
