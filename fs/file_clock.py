"""The clock that files are stamped with."""

import os
import time


class FileClock:
    """Wall time in nanoseconds, in one order with the stamps of all files that are written on this machine, and later than those
    that were.

    Since Linux 6.13 the kernel stamps a file with its coarse clock unless somebody has looked at the last stamp: then with a fine
    one, and no later stamp of any file is earlier. A clock that is read beside that is behind it: what was touched after a file
    was written would look older. So the kernel is asked to stamp a file of ours. Its first stamp may be that of what was written
    just now, so that a change after it would not show; one that is later than the clock beside was before is no such one. Else a
    second one is asked for: once the first was looked at, it is later. Each takes 2 µs. On older kernels both are the coarse
    clock's.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("clock", os.MFD_CLOEXEC)

    def __call__(self) -> int:
        before = time.time_ns()
        stamp = self._stamp()
        return stamp if stamp > before else self._stamp()

    def _stamp(self) -> int:
        os.utime(self._file)
        return os.fstat(self._file).st_ctime_ns

    def close(self) -> None:
        os.close(self._file)
