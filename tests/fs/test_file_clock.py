"""The clock that files are stamped with."""

import os
import time
from pathlib import Path

from ckptfs.fs.file_clock import FileClock


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
