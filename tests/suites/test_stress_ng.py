"""stress-ng's stressors of file systems, each with its own checks (--verify), six at a time."""

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mount]

SECONDS = 5 if os.environ.get("CKPTFS_SUITES") == "all" else 1
AT_ONCE = 6
SECONDS_MAX = 60.0
"""Some look at the clock only after all of a turn."""

STRESSORS = shlex.split(
    "access acl aio aiol chattr chdir chmod chown copy-file dentry dir dirdeep dirmany dnotify dup fallocate fanotify fcntl"
    " fiemap file-ioctl filename flock fpunch fsize fstat getdent handle hdd inode-flags inotify io-uring iomix ioprio lease"
    " link locka lockf lockmix lockofd metamix mknod mmap mmapmany msync msyncmany open readahead rename revio seek sendfile"
    " splice stackmmap symlink sync-file touch unlink utime verity xattr"
)
"""Not `io`, which syncs the whole machine, nor `bind-mount`, `binderfs` and `procfs`, which are other file systems."""

NOT_TO_BE_HAD = {
    "fiemap": "the kernel's FUSE has no FIEMAP; where holes are SEEK_DATA and SEEK_HOLE say",
}
"""As docs/semantics.md says."""

SIZES = shlex.split(
    "--copy-file-bytes 128M --dirdeep-inodes 300 --fallocate-bytes 4M --hdd-bytes 16M --iomix-bytes 16M --mmap-bytes 4M"
    " --mmap-file --msync-bytes 4M --readahead-bytes 16M --seek-size 4M --sendfile-size 1M --sync-file-bytes 4M"
)
"""Instead of a gigabyte each."""


def _run(place: Any, stressor: str) -> tuple[int, str]:
    """The status, 0 where it passed or found nothing to do, and what it said."""
    command = ["stress-ng", "--verify", "--oomable", "--temp-path", ".", *SIZES, f"--{stressor}", "1", "--timeout", f"{SECONDS}s"]
    done = place.run(command, seconds_max=SECONDS_MAX)
    return done.returncode, done.stdout[-1500:]


def _run_all(place: Any) -> dict[str, tuple[int, str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(STRESSORS, pool.map(lambda stressor: _run(place, stressor), STRESSORS), strict=True))


@pytest.mark.timeout(900)
def test_what_passes_on_the_drive_passes_on_the_mount(places: Any) -> None:
    expected, found = (_run_all(place) for place in places())
    judging = [one for one, (status, _) in expected.items() if status == 0 and one not in NOT_TO_BE_HAD]
    assert len(judging) > len(STRESSORS) // 2, f"stress-ng does not run here: {expected}"
    worse = [f"{one}: status {found[one][0]}\n{found[one][1]}" for one in judging if found[one][0] != 0]
    assert not worse, "\n".join(worse)
