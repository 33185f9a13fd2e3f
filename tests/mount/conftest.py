"""Where the writers of checkpoints write: a plain directory, which proves the test, and the mounts of two nodes."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckptfs
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.local_cluster import LocalCluster


@dataclass(frozen=True)
class Place:
    """One directory, as the node that writes sees it and as two others do."""

    here: Path
    there: Path
    elsewhere: Path
    is_mount: bool

    def protect(self) -> None:
        """Wait until all of it is protected, so that the others read it from shards; nothing to do in a plain directory."""
        if self.is_mount:
            behind, _, _ = wait_until([self.here], "protected", 60.0, shown=False)
            assert not behind


@pytest.fixture(params=["plain", pytest.param("mount", marks=pytest.mark.mount)])
def place(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Place]:
    """A fresh directory to write into; every test that uses it runs in a plain one too."""
    if request.param == "plain":
        yield Place(scratch, scratch, scratch, is_mount=False)
        return
    cluster: LocalCluster = request.getfixturevalue("cluster")
    name = "".join(character if character.isalnum() else "-" for character in request.node.name)[:60]
    directory = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cluster.nodes[0].mountpoint))
    others = [cluster.nodes[number].mountpoint / directory.name for number in (3, 5)]
    yield Place(directory, others[0], others[1], is_mount=True)
    shutil.rmtree(directory)


@pytest.fixture
def run_python() -> Callable[..., None]:
    """`run_python(code, *arguments)` runs code in a process of its own and fails with what it printed.

    What reads a mapped file runs there: a page that can't be read is a SIGBUS, which no test survives.
    """

    def run(code: str, *arguments: object) -> None:
        command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-3000:]}"

    return run


def _release(directory: Path, version: str, changed: Mapping[str, str] | None = None) -> Path:
    package = directory / "lib" / "ckptfs"
    shutil.copytree(Path(ckptfs.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace(f'"{ckptfs.__version__}"', f'"{version}"'))
    for module, more in (changed or {}).items():
        with open(package / f"{module}.py", "a") as file:
            file.write(more)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory / "venv"], check=True, timeout=60)
    (site_packages,) = (directory / "venv" / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    (site_packages / "release.pth").write_text("\n".join([str(package.parent), *here]) + "\n")
    return directory / "venv" / "bin" / "python"


@pytest.fixture(scope="session")
def make_release() -> Callable[..., Path]:
    """`make_release(directory, version, {"fs/config": "more = 1"})`: an installation of its own, as this one but for its version
    and the text added to some modules; returns its interpreter."""
    return _release
