"""The kernel's mount table, parsed."""

import os
from pathlib import Path

from ckptfs.fs.mount_table import Mounted, mount_of, parse_mountinfo

MOUNTINFO = (
    "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
    "40 22 0:45 / /mnt/a rw,nosuid - fuse ckptfs:/stores/a rw,user_id=0\n"
    "41 22 0:46 / /mnt/with\\040space rw,nosuid shared:2 master:1 - fuse.ckptfs ckptfs:/stores/b\\134c rw\n"
    "42 22 0:47 / /mnt/other rw - fuse.sshfs host:/ rw\n"
    "43 22 0:48 / /mnt/a rw,nosuid - fuse ckptfs:/stores/newer rw,user_id=0\n"
    "nonsense\n"
)


def test_only_ckptfs_mounts_are_found_with_their_stores() -> None:
    assert parse_mountinfo(MOUNTINFO) == [
        Mounted(Path("/mnt/a"), Path("/stores/a"), (0, 45)),
        Mounted(Path("/mnt/with space"), Path("/stores/b\\c"), (0, 46)),
        Mounted(Path("/mnt/a"), Path("/stores/newer"), (0, 48)),
    ]


def test_an_empty_or_cut_table_has_no_mounts() -> None:
    assert parse_mountinfo("") == []
    for length in range(len(MOUNTINFO)):
        parse_mountinfo(MOUNTINFO[:length])


def test_a_path_outside_is_in_no_mount() -> None:
    assert mount_of(Path(os.path.dirname(__file__))) is None
