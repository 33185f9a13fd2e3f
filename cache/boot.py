"""Which boot of the machine this is: what was not synced in an earlier one may be lost."""

import time
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> bytes:
    """Another one after each boot."""
    return BOOT_ID.read_bytes().strip()


def booted_at_seconds() -> float:
    """When this machine was started, wall time."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
