"""What the three processes of a node do alike when they start: the log, limits, pid file, and dying with the supervisor."""

import contextlib
import ctypes
import logging
import logging.handlers
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOG_SIZE_BYTES_MAX = 16 << 20
LOG_FILES_KEPT = 3


def start_log(directory: Path, role: str) -> None:
    """Log to `<directory>/<role>.log`, rotated; warnings and errors are things an operator must see."""
    directory.mkdir(parents=True, exist_ok=True)
    handler = logging.handlers.RotatingFileHandler(
        directory / f"{role}.log", maxBytes=LOG_SIZE_BYTES_MAX, backupCount=LOG_FILES_KEPT
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)


@contextlib.contextmanager
def death_logged(role: str) -> Iterator[None]:
    """What ends the process unexpectedly goes into its log, not only to a terminal that nobody watches."""
    try:
        yield
    except Exception:
        logging.getLogger(role).critical("process_died", exc_info=True)
        raise SystemExit(1) from None


def raise_descriptor_limit() -> int:
    """Allow as many descriptors as the system does; returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def write_pid_file(run: Path, role: str) -> None:
    """`<run>/<role>.pid`: this process's pid, replaced atomically."""
    temporary = run / f"{role}.pid.new"
    temporary.write_text(f"{os.getpid()}\n")
    temporary.rename(run / f"{role}.pid")


def remove_pid_file(run: Path, role: str) -> None:
    """Remove the file if it names this process."""
    path = run / f"{role}.pid"
    with contextlib.suppress(OSError, ValueError):
        if int(path.read_text()) == os.getpid():
            path.unlink()
