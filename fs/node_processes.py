"""The processes of a node, found by the pid files in its store's `run/` and never by their name alone."""

import contextlib
import os
import signal
import time
from pathlib import Path

ROLES = ("supervisor", "mount", "agent")
POLL_SECONDS = 0.02


class NodeProcesses:
    """The supervisor, mount and agent process of the node on one store."""

    def __init__(self, store: Path) -> None:
        self._run = store / "run"

    def pids(self) -> dict[str, int | None]:
        """The pid of each role, None where that process is not there."""
        return {role: self._pid(role) for role in ROLES}

    def failures(self) -> dict[str, str]:
        """Why a role's process ended by itself, for those of which none has been ready since."""
        found = {}
        for role in ROLES:
            with contextlib.suppress(OSError):
                found[role] = (self._run / f"{role}.failed").read_text(errors="replace").strip()
        return found

    def living(self) -> list[int]:
        """The pids of those that live, the supervisor first."""
        return [pid for pid in self.pids().values() if pid is not None]

    def kill(self, *, wait_seconds: float = 10.0) -> list[int]:
        """SIGKILL all of them, the supervisor first so that it restarts none. Returns those that are still there at the end."""
        deadline = time.monotonic() + wait_seconds
        while living := self.living():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return living
            time.sleep(POLL_SECONDS)
        return []

    def ask_supervisor_to_end(self) -> bool:
        """SIGTERM to the supervisor, which ends the other two. False if there is none."""
        pid = self._pid("supervisor")
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return True

    def wait_ended(self, deadline: float) -> bool:
        """Wait until none is left or `time.monotonic()` passed `deadline`; says which."""
        while self.living():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _pid(self, role: str) -> int | None:
        try:
            pid = int((self._run / f"{role}.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return pid if is_ckptfs(pid) else None


def is_ckptfs(pid: int) -> bool:
    """Whether the process lives and is one of ours: a pid in a file of a machine that restarted may be anybody's by now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return b"ckptfs" in command and state not in ("Z", "X")
