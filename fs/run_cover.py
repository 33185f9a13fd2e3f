"""A store's `run/` on a drive that takes no writes: covered with a small file system in memory, so that processes can start.

Regular files are carried along; sockets can't be, so whoever serves one has to be started anew.
"""

import logging
import os
import subprocess
from pathlib import Path

from ckptfs.cache.drive_refusal import refuses_writes

log = logging.getLogger(__name__)

SIZE = "4m"


def cover_if_refused(run: Path) -> bool:
    """Cover the directory if its drive takes no writes; whether that was done now. Needs root; without, it is logged."""
    reason = refuses_writes(run)
    if not reason:
        return False
    log.error(
        "drive_takes_no_writes path=%s reason=%s: run/ is covered with memory; files are read, saving gets errors; copy away"
        " what is not protected, then repair or replace the drive",
        run.parent,
        reason,
    )
    files = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    command = ["mount", "-t", "tmpfs", "-o", f"mode=0700,nosuid,nodev,noexec,size={SIZE}", "ckptfs-run", os.fspath(run)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        log.error("run_not_covered path=%s error=%s", run, done.stderr.strip())
        return False
    for name, content in files.items():
        with open(run / name, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(content)
    return True


def uncover(run: Path) -> None:
    """Take the cover away, if there is one."""
    if os.path.ismount(run):
        subprocess.run(["umount", "--lazy", "--", os.fspath(run)], check=False, capture_output=True)
