"""CPython's own tests of files, run by the system's Python with its current and its temporary directory on the mount."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.mount]

PYTHON = "/usr/bin/python3"
"""The one whose tests the package libpython3.N-testsuite holds."""
PROGRAM = Path(__file__).with_name("cpython_outcomes.py").read_text()
SECONDS_MAX = 400

LEFT_OUT = "SignalsTest"
"""Of pipes and signals, with a machine that is not busy: no file is in them."""

SHORT = {
    "test_fcntl": "",
    "test_fileio": "",
    "test_glob": "",
    "test_io": "|Misc|Buffered|TextIO",
    "test_mmap": "",
    "test_os": "|Spawn|Fork|Exec|Pid",
    "test_pathlib": "|Windows",
    "test_posix": "|Spawn",
    "test_shutil": "|Which",
    "test_tempfile": "",
}
"""Modules, and what is left out of them beside that where not everything is run."""
LONG = [
    "test_bufio",
    "test_dbm_dumb",
    "test_dbm_ndbm",
    "test_file",
    "test_filecmp",
    "test_fileinput",
    "test_genericpath",
    "test_gzip",
    "test_import",
    "test_largefile",
    "test_linecache",
    "test_mailbox",
    "test_posixpath",
    "test_py_compile",
    "test_shelve",
    "test_stat",
    "test_tarfile",
    "test_zipfile",
    "test_zipimport",
]


def _outcomes(place: Any, module: str, left_out: str) -> dict[str, tuple[str, str]]:
    """By test: its outcome, and what there is to say about it. One that hung or killed the process is "started"."""
    command = [PYTHON, "-P", "-W", "ignore", "-c", PROGRAM, str(SECONDS_MAX), f"{LEFT_OUT}{left_out}", f"test.{module}"]
    done = place.run(command, seconds_max=SECONDS_MAX + 20)
    outcomes: dict[str, tuple[str, str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('["'):
            outcome, test, detail = json.loads(line)
            if outcome == "ended":
                return outcomes
            outcomes[test] = outcome, detail
    return {test: (outcome, done.stdout[-3000:]) for test, (outcome, _) in outcomes.items()}


def _modules() -> list[tuple[str, str]]:
    if os.environ.get("CKPTFS_SUITES") != "all":
        return list(SHORT.items())
    return [(module, "") for module in sorted([*SHORT, *LONG])]


@pytest.mark.timeout(2 * SECONDS_MAX + 60)
@pytest.mark.parametrize(("module", "left_out"), _modules(), ids=[module for module, _ in _modules()])
def test_what_passes_on_the_drive_passes_on_the_mount(places: Any, module: str, left_out: str) -> None:
    expected, found = (_outcomes(place, module, left_out) for place in places())
    passed = [test for test, (outcome, _) in expected.items() if outcome == "passed"]
    assert len(passed) > 3, f"{PYTHON} has no tests of {module}: scripts/install installs them"
    nothing = "not run", ""
    worse = [f"{test} {' '.join(found.get(test, nothing))}" for test in passed if found.get(test, nothing)[0] != "passed"]
    assert not worse, "\n".join(worse)
