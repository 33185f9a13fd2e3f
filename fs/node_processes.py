"""The processes of a node, found by the pid files in its store's `run/` and never by their name alone."""

import contextlib
import os
import signal
import time
from pathlib import Path

ROLES = ("supervisor", "mount", "agent")
POLL_SECONDS = 0.02
REASON_SIZE_MAX = 4096
"""The agent's file can be written by whoever took it over."""


class NodeProcesses:
    """The supervisor, mount and agent process of the node on one store."""

    def __init__(self, store: Path) -> None:
        self._run = store / "run"
        self._ending: set[int] = set()
        """They may have files open longer than their pid file is there."""

    def pids(self) -> dict[str, int | None]:
        """The pid of each role, None where that process is not there."""
        return {role: self._pid(role) for role in ROLES}

    def failures(self) -> dict[str, str]:
        """Why a role's process ended by itself, for those of which none has been ready since."""
        found = {}
        for role in ROLES:
            with contextlib.suppress(OSError), open(self._run / f"{role}.failed", "rb") as file:
                found[role] = file.read(REASON_SIZE_MAX).decode(errors="replace").strip()
        return {role: reason for role, reason in found.items() if reason}

    def living(self) -> list[int]:
        """The pids of those that live, the supervisor first."""
        return [pid for pid in self.pids().values() if pid is not None]

    def kill(self, *, wait_seconds: float = 10.0) -> list[int]:
        """SIGKILL all of them, the supervisor first so that it restarts none. Returns those that are still there at the end."""
        deadline = time.monotonic() + wait_seconds
        while living := self._still_there():
            for pid in self.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return living
            time.sleep(POLL_SECONDS)
        return []

    def ask_supervisor_to_end(self) -> bool:
        """SIGINT to the supervisor, which ends the other two and does not drain first. False if there is none."""
        self._ending.update(self.living())
        pid = self._pid("supervisor")
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        return True

    def wait_ended(self, deadline: float) -> bool:
        """Wait until none is left, nor a file that one had open, or `time.monotonic()` passed `deadline`; says which."""
        while self._still_there():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _still_there(self) -> list[int]:
        self._ending.update(self.living())
        self._ending = set(filter(has_files_open, self._ending))
        return sorted(self._ending)

    def _pid(self, role: str) -> int | None:
        try:
            number, *started = (self._run / f"{role}.pid").read_text().split()[:2]
            pid = int(number)
        except (OSError, ValueError):
            return None
        # The number of one that was killed may be that of another node's process by now.
        return pid if is_ckptfs(pid) and started in ([], [started_at(pid)]) else None


def started_with(config: Path) -> list[int]:
    """The processes that run `ckptfs node` with exactly this configuration: one that was started just now has no pid file yet."""
    end, found = b"\0".join([b"ckptfs.fs.cli", b"node", b"--config", os.fsencode(config), b""]), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and Path("/proc", name, "cmdline").read_bytes().endswith(b"\0" + end):
                found.append(int(name))
    return found


def is_ckptfs(pid: int) -> bool:
    """Whether the process lives and is one of ours: a pid in a file of a machine that restarted may be anybody's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return b"ckptfs" in command and state not in ("Z", "X")


def started_at(pid: int) -> str:
    """When the process was started, in clock ticks since the machine was; "" if it is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return ""


def has_files_open(pid: int) -> bool:
    """Whether the process may have: its other threads outlive the first one, and its descriptors its memory."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        return state not in ("Z", "X") or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False
