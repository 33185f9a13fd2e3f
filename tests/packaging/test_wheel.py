"""The wheel, built and used from an empty directory: it holds every module, and imports without the clone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what the clone tracks, so that nothing lands in the clone."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "src", "fs", "cache", "replication"):
        subprocess.run(["cp", "-a", ROOT / name, source / name], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", directory, source], check=True, cwd=directory)
    (built,) = directory.glob("ckptfs-*.whl")
    return built


def test_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        f"ckptfs/{path.relative_to(ROOT)}" for room in ("fs", "cache", "replication") for path in (ROOT / room).rglob("*.py")
    }
    assert modules <= names
    assert "ckptfs/py.typed" in names
    assert not [name for name in names if name.split("/")[0] in ("fs", "cache", "replication", "tests", "scripts")]


def test_wheel_imports_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import importlib, pathlib, sys; sys.path.insert(0, sys.argv[1]); root = pathlib.Path(sys.argv[1]);"
        "names = ['.'.join(p.relative_to(root).with_suffix('').parts) for p in root.glob('ckptfs/*/*.py')];"
        "[importlib.import_module(name) for name in names];"
        "assert sys.modules['ckptfs'].__file__.startswith(sys.argv[1]), sys.modules['ckptfs'].__file__;"
        "assert not {'fs', 'cache', 'replication'} & set(sys.modules)"
    )
    (tmp_path / "empty").mkdir()
    subprocess.run([sys.executable, "-P", "-c", script, tmp_path / "site"], check=True, cwd=tmp_path / "empty")
