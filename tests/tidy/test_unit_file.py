"""`docs/ckptfs.service` says what the program does: its commands exist, and the descriptor the supervisor hands over is kept."""

import configparser
from pathlib import Path

import pytest

from ckptfs.fs.cli import run

UNIT = Path(__file__).resolve().parents[2] / "docs" / "ckptfs.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


@pytest.mark.parametrize("key", ["ExecStart", "ExecReload"])
def test_its_commands_exist(service: configparser.SectionProxy, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = service[key].split()
    assert program.endswith("/bin/ckptfs")
    assert run([*arguments, "--help"]) == 0
    assert "Usage: ckptfs node" in capsys.readouterr().out


def test_what_the_supervisor_says_is_heard(service: configparser.SectionProxy) -> None:
    assert service["Type"] == "notify"
    assert service["NotifyAccess"] == "main"
    assert int(service["FileDescriptorStoreMax"]) >= 1
    assert service["Restart"] == "on-failure"  # always would mount again after `ckptfs umount`
