"""fio writes with patterns and checksums, reads back, and compares; and once more when the files were closed."""

import configparser
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mount]

JOBS = Path(__file__).with_name("verify.fio")
SECONDS_MAX = 60.0
READS_NO_MORE = {"write-append"}
"""Of what it appended with an earlier start fio itself finds no end."""


SHORT = [
    "randwrite-libaio-direct",
    "randrw-io_uring-buffered",
    "randrw-mmap-msync",
    "write-psync-fsync",
    "write-append",
    "several-files-and-processes",
    "one-file-of-several-processes",
    "preallocated",
    "splice",
]


def _sections() -> list[str]:
    if os.environ.get("CKPTFS_SUITES") != "all":
        return SHORT
    parser = configparser.ConfigParser(comment_prefixes=(";",))
    parser.read(JOBS)
    return [name for name in parser.sections() if name != "global"]


def _run(place: Any, section: str, *options: str) -> tuple[int, int, str]:
    """fio's error of the job, how many bytes it read to compare, and what it said."""
    command = ["fio", "--output-format=json", f"--section={section}", *options, "-"]
    done = place.run(command, seconds_max=SECONDS_MAX, standard_input=JOBS.read_text())
    begins = f"\n{done.stdout}".find("\n{\n")  # after what it says to people
    try:
        report, _ = json.JSONDecoder().raw_decode(done.stdout, begins)
    except (ValueError, IndexError):
        return done.returncode or -1, 0, done.stdout[-3000:]
    (job,) = report["jobs"]
    return job["error"] or done.returncode, job["read"]["io_bytes"], done.stdout[:begins]


@pytest.mark.timeout(6 * SECONDS_MAX)
@pytest.mark.parametrize("section", _sections())
def test_what_fio_verifies_on_the_drive_it_verifies_on_the_mount(places: Any, section: str) -> None:
    runs: list[tuple[str, ...]] = [()] if section in READS_NO_MORE else [(), ("--verify_only",)]
    expected, found = ([_run(place, section, *options) for options in runs] for place in places())
    for (error, compared, _), (found_error, found_compared, said) in zip(expected, found, strict=True):
        if not error:  # else fio or this kernel can't do it
            assert compared, "fio compared nothing on the drive"
            assert not found_error, f"error {found_error}: {said}"
            assert found_compared, f"fio compared nothing: {said}"
