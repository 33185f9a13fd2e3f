"""The memory that processes have had at most."""

import contextlib
from pathlib import Path


def peak_resident_mb(pid: int) -> float:
    """What the kernel keeps as `VmHWM` (proc(5)); 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0
