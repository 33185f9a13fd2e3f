"""The rules about the code itself that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("fs", "replication", "cache")
LINES_MAX = 800
CODE = sorted(path for folder in (*ROOMS, "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_no_room_is_imported_under_its_global_name(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        wrong = [name for name in names if name.split(".")[0] in ROOMS]
        assert not wrong, f"{_name(path)}:{node.lineno} imports {wrong}: import ckptfs.{wrong[0]}"


def test_no_room_is_loaded_under_its_global_name() -> None:
    assert [name for name in sys.modules if name.split(".")[0] in ROOMS] == []


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_modules_stay_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LINES_MAX, f"{_name(path)} has {lines} lines: split it by job"


@pytest.mark.parametrize("path", CODE, ids=_name)
def test_modules_say_what_they_are_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{_name(path)} begins without a docstring"


def test_rooms_hold_only_a_docstring_at_the_top() -> None:
    for room in ROOMS:
        body = ast.parse((ROOT / room / "__init__.py").read_text()).body
        assert [type(statement) for statement in body] == [ast.Expr], f"{room}/__init__.py holds more than its docstring"


def test_test_directories_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_tests_do_not_import_tests() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) tests\b", path.read_text(), re.MULTILINE), _name(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_documents_name_only_what_exists(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (path.parent / target).exists(), f"{_name(path)} links to {target}"
    for name in re.findall(r"`((?:fs|cache|replication|tests|scripts|docs|src|\.ci)/[\w./*-]*\w)`", text):
        assert list(ROOT.glob(name)), f"{_name(path)} names {name}"
    for module in re.findall(r"`(ckptfs\.(?:fs|cache|replication)(?:\.\w+)?)`", text):
        file = ROOT / module.removeprefix("ckptfs.").replace(".", "/")
        assert file.is_dir() or file.with_suffix(".py").is_file(), f"{_name(path)} names {module}"


def test_links_of_the_import_package_are_relative() -> None:
    for room in ROOMS:
        assert (ROOT / "src" / "ckptfs" / room).readlink() == Path("..", "..", room)


def test_scripts_and_docs_name_no_registry() -> None:
    """Where packages come from is the machine's own setting."""
    hosts = re.compile(r"\b(?:pypi|files\.pythonhosted|deb\.debian|archive\.ubuntu|download\.pytorch)\.\w+")
    files = [*DOCUMENTS, ROOT / "pyproject.toml", *(path for path in (ROOT / "scripts").iterdir() if path.is_file())]
    assert [(_name(path), found[0]) for path in files if (found := hosts.search(path.read_text()))] == []


@pytest.mark.slow
def test_no_ignored_file_is_tracked() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-ci", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout == ""
