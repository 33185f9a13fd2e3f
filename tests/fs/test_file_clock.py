"""The clock that files are stamped with."""

import os
import time
from pathlib import Path

import pytest

from ckptfs.fs.file_clock import FileClock

KERNEL = tuple(int(number) for number in os.uname().release.split(".")[:2])


def test_it_is_in_one_order_with_files_that_are_written(tmp_path: Path) -> None:
    now_ns = FileClock()
    started = time.time_ns()
    times = []
    with open(tmp_path / "a", "wb", buffering=0) as a, open(tmp_path / "b", "wb", buffering=0) as b:
        for _ in range(200):
            a.write(b"x")
            times += [os.fstat(a.fileno()).st_mtime_ns, now_ns()]
            b.write(b"x")
            times.append(os.fstat(b.fileno()).st_mtime_ns)
    now_ns.close()
    assert times == sorted(times)
    assert abs(times[0] - started) < 60 * 10**9


@pytest.mark.skipif(
    KERNEL < (6, 13), reason="before Linux 6.13 what happens within a tick of the clock has one time, on ext4 too"
)
def test_a_change_after_a_write_has_a_later_time(tmp_path: Path) -> None:
    now_ns = FileClock()
    with open(tmp_path / "file", "wb", buffering=0) as file:
        for _ in range(2000):
            os.fstat(file.fileno())  # so that the next stamp is a fine one
            file.write(b"x")
            written_ns = os.fstat(file.fileno()).st_mtime_ns
            assert now_ns() > written_ns
    now_ns.close()
