"""A wall clock of one's own for the processes that are started with it: the kernel's goes on.

A time namespace has no wall clock, and setting the machine's would be everybody's; so what asks the C library is answered wrong.
"""

import os
import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The wall clock, by as many seconds wrong as the file says that the environment names. */
static volatile const long *shift;

__attribute__((constructor)) static void begin(void)
{
    int file = open(getenv("CKPTFS_TEST_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *found = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED)
        abort();
    shift = found;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) && shift)
        now->tv_sec += *shift;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


class WrongClock:
    """Start a process with `environment` and its wall clock, and those of what it starts, is wrong by what was `set` last."""

    def __init__(self, directory: Path) -> None:
        library = directory / "clock.so"
        if not library.exists():
            (directory / "clock.c").write_text(SOURCE)
            flags = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
            subprocess.run(["cc", *flags, "-o", library, directory / "clock.c"], check=True, timeout=60)
        self._shift = directory / f"clock-{len(list(directory.glob('clock-*')))}"
        self.environment = {"CKPTFS_TEST_CLOCK": str(self._shift), "LD_PRELOAD": str(library)}
        self.set(0)

    def set(self, seconds: int) -> None:
        """So far ahead of the kernel's, at once; negative: behind."""
        descriptor = os.open(self._shift, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, seconds.to_bytes(8, "little", signed=True), 0)
        finally:
            os.close(descriptor)
