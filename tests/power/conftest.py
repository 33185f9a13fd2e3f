"""What a power cut leaves is made from a record of what real processes wrote: see `forgetful_drive.py` and `recorder.c`."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")
"""Syncs cost nothing there, and it is the record that says what they are worth."""

Record = Callable[..., Path]


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload."""
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    flags = ["-O1", "-Wall", "-Wextra", "-shared", "-fPIC"]
    command = ["cc", *flags, "-o", str(library), str(HERE / "recorder.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory in memory, where it has extended attributes, else where pytest has its own."""
    directory = Path(tempfile.mkdtemp(prefix="ckptfs-power-", dir=MEMORY if _has_attributes(MEMORY) else None))
    yield directory
    shutil.rmtree(directory)


def _has_attributes(directory: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.setxattr(file.name, "user.ckptfs", b"")
    except OSError:
        return False
    return True


@pytest.fixture
def record(recorder: Path, place: Path) -> Record:
    """`record("file_workload.py", seed)`: the record of what the program wrote. More arguments are its own."""

    def run(program: str, seed: int, *more: str) -> Path:
        directory = place / f"{program}-{seed}"
        (directory / "root").mkdir(parents=True)
        environment = {
            **os.environ,
            "LD_PRELOAD": str(recorder),
            "RECORDER_ROOT": str(directory / "root"),
            "RECORDER_LOG": str(directory / "log"),
            "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
        }
        command = [sys.executable, str(HERE / program), str(seed), str(directory / "root"), *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{program} {seed}: {done.stderr[-3000:]}"
        return directory / "log"

    return run
