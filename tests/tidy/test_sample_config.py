"""`docs/node.toml` lists every key with its default: compared with what the program reads."""

import re
import tomllib
from pathlib import Path

import msgspec

from ckptfs.fs.config import NodeConfig

SAMPLE = Path(__file__).resolve().parents[2] / "docs" / "node.toml"
NO_DEFAULT = {"node.id", "node.store", "node.mountpoint", "node.catalog"}


def _sample() -> dict[str, dict[str, object]]:
    """The sample with its commented-out keys (`# key = value`) put in force."""
    text = re.sub(r"^# ?(?=[a-z_]+ = )", "", SAMPLE.read_text(), flags=re.MULTILINE)
    return tomllib.loads(text)


def _defaults() -> dict[str, object]:
    found: dict[str, object] = {}
    for section in msgspec.structs.fields(NodeConfig):
        for key in msgspec.structs.fields(section.type):
            default = key.default if key.default is not msgspec.NODEFAULT else None
            if key.default_factory is not msgspec.NODEFAULT:
                default = key.default_factory()
            found[f"{section.name}.{key.name}"] = default
    return found


def test_sample_lists_exactly_the_keys_there_are() -> None:
    listed = {f"{section}.{key}" for section, keys in _sample().items() for key in keys}
    assert listed == set(_defaults())


def test_sample_shows_the_defaults() -> None:
    sample = _sample()
    for name, default in _defaults().items():
        section, _, key = name.partition(".")
        if name not in NO_DEFAULT:
            assert sample[section][key] == default, name


def test_sample_is_valid_as_it_stands() -> None:
    msgspec.toml.decode(SAMPLE.read_bytes(), type=NodeConfig)
