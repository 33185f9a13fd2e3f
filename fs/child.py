"""One child process of the supervisor: started here, or before this image of the supervisor began."""

import os
import signal
import subprocess
from collections.abc import Sequence

import trio


class Child:
    """A process this one is the parent of. One task calls `reaped`; any may wait for `ended`."""

    def __init__(self, pid: int, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self.pid = pid
        self.ended = trio.Event()
        self._process = process
        self._descriptor = os.pidfd_open(pid)

    @classmethod
    def start(cls, command: Sequence[str], descriptors: Sequence[int]) -> "Child":
        """Start the command with these descriptors beside its standard output and error, out of reach of a terminal's signals.

        From the main thread, not through trio's: a child is told of its parent's death when the thread that made it ends.
        """
        process = subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True)
        return cls(process.pid, process)

    async def reaped(self) -> int:
        """The exit status, once it has one; negative: the signal. If cancelled, the process is killed."""
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
        except trio.Cancelled:
            self.kill()
            raise
        status = self._process.wait() if self._process else os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.ended.set()
        os.close(self._descriptor)
        return status

    def terminate(self, number: int = signal.SIGTERM) -> None:
        self._signal(number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self.ended.is_set():
            signal.pidfd_send_signal(self._descriptor, number)
