"""Every configuration that can't work is refused at the start, by one line that names the file and the key."""

import os
from pathlib import Path

import pytest

from ckptfs.fs.config import ConfigurationError, etcd_place, hand_config, load_config, load_handed_config

GOOD = """\
[node]
id = "node-0"
store = "/stores/a"
mountpoint = "/mnt/a"
catalog = "sqlite:////stores/catalog.db"
"""


def _load(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    load_config(path)


def test_the_least_there_must_be_is_enough(tmp_path: Path) -> None:
    _load(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("[node]", "[nodes]"), "nodes"),
        (('id = "node-0"', 'id = "node-0"\nidd = "x"'), "idd"),
        (('id = "node-0"', ""), "id"),
        (('id = "node-0"', 'id = ""'), "node.id"),
        (('id = "node-0"', 'id = "a/b"'), "node.id"),
        (('id = "node-0"', f'id = "{"x" * 65}"'), "node.id"),
        (('id = "node-0"', "id = 7"), "id"),
        (('"/stores/a"', '"stores/a"'), "node.store"),
        (('"/mnt/a"', '"mnt/a"'), "node.mountpoint"),
        (('"/mnt/a"', '"/stores/a"'), "neither may lie inside the other"),
        (('"/mnt/a"', '"/stores/a/mnt"'), "neither may lie inside the other"),
        (('"/stores/a"', '"/mnt/a/store"'), "neither may lie inside the other"),
        (('"sqlite:////stores/catalog.db"', '"sqlite:///catalog.db"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"postgres://x"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"etcd://host"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"etcd://host/a/b"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"etcd://host,/name"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"etcd://user:secret@host/name"'), "node.catalog"),
        (('"sqlite:////stores/catalog.db"', '"etcd://host:99999/name"'), "node.catalog"),
        (("[node]", '[node]\nlisten = "0.0.0.0:0"'), "node.listen"),
        (("[node]", '[node]\nlisten = "127.0.0.1"'), "node.listen"),
        (("[node]", '[node]\nlisten = "127.0.0.1:70000"'), "node.listen"),
        (("[node]", "[node"), "node.toml"),
    ],
)
def test_a_wrong_node_section_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        _load(tmp_path, GOOD.replace(*change))
    assert str(tmp_path / "node.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("[protection]\ndata_shards = 0", "data_shards"),
        ("[protection]\ndata_shards = 33", "data_shards"),
        ("[protection]\nparity_shards = -1", "parity_shards"),
        ("[protection]\nparity_shards = 9", "parity_shards"),
        ("[protection]\ncell_size_bytes = 5000", "cell_size_bytes"),
        ("[protection]\ncell_size_bytes = 0", "cell_size_bytes"),
        ("[protection]\nsmall_file_size_bytes = 2000000", "small_file_size_bytes"),
        ("[protection]\nbuffer_bytes_max = 1048576", "buffer_bytes_max"),
        ('[protection]\ncodec = "magic"', "protection.codec: auto, isa-l or numpy, not 'magic'"),
        ('[mount]\npassthrough = "maybe"', "mount.passthrough: auto, on or off, not 'maybe'"),
        ("[mount]\nsettle_seconds = -1", "settle_seconds"),
        ("[mount]\nattribute_timeout_seconds = 100", "attribute_timeout_seconds"),
        ("[space]\nreserve_fraction = 1.0", "reserve_fraction"),
        ("[space]\nreserve = 1.0", "reserve"),
        ("[other]\nkey = 1", "other"),
        ('[etcd]\nca = "/ca.pem"', "this section has no effect"),
    ],
)
def test_impossible_values_and_unknown_keys_are_refused(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        _load(tmp_path, f"{GOOD}\n{lines}\n")


def test_links_do_not_hide_that_the_mount_would_lie_in_the_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    text = GOOD.replace("/stores/a", str(tmp_path / "store")).replace("/mnt/a", str(tmp_path / "link" / "mnt"))
    with pytest.raises(ConfigurationError, match="neither may lie inside"):
        _load(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--config"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match=r"binary\.toml"):
        load_config(tmp_path / "binary.toml")


ON_ETCD = GOOD.replace("sqlite:////stores/catalog.db", "etcds://a:1,b.example,[::1]:3/jobs")


def test_a_catalog_on_etcd(tmp_path: Path) -> None:
    _load(tmp_path, ON_ETCD)
    assert etcd_place("etcds://a:1,b.example,[::1]:3/jobs") == (
        ["https://a:1", "https://b.example:2379", "https://[::1]:3"],
        "jobs",
        True,
    )
    assert etcd_place("etcd://a/jobs") == (["http://a:2379"], "jobs", False)
    assert etcd_place("sqlite:////a") is None


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('key = "/key.pem"', "etcd.key"),
        ('user = "me"', "both or none"),
        ('ca = "ca.pem"', "etcd.ca"),
        ("wait_seconds = 0", "etcd.wait_seconds"),
    ],
)
def test_an_impossible_etcd_section_is_refused(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        _load(tmp_path, f"{ON_ETCD}\n[etcd]\n{lines}\n")
    with pytest.raises(ConfigurationError, match="nothing is encrypted"):
        _load(tmp_path, f'{ON_ETCD.replace("etcds:", "etcd:")}\n[etcd]\nca = "/ca.pem"\n')


ALL = 'ca = "/ca.pem"\ncertificate = "/node.pem"\nkey = "/node.key"'


def test_with_certificates_peers_are_anywhere(tmp_path: Path) -> None:
    text = GOOD.replace("[node]", '[node]\nlisten = "node-3.example:7070"')
    _load(tmp_path, f"{text}\n[tls]\n{ALL}\n")
    with pytest.raises(ConfigurationError, match="only loopback addresses without"):
        _load(tmp_path, text)


@pytest.mark.parametrize(
    ("listen", "lines", "words"),
    [
        ("a:1", 'ca = "/ca.pem"', "belong together"),
        ("127.0.0.1:0", 'crl = "/crl.pem"', "without certificates"),
        ("a:1", ALL.replace("/ca", "ca"), "tls.ca"),
        ("0.0.0.0:7070", ALL, "that its certificate names"),
        ("[::]:7070", ALL, "that its certificate names"),
    ],
)
def test_an_impossible_tls_section_is_refused(tmp_path: Path, listen: str, lines: str, words: str) -> None:
    text = GOOD.replace("[node]", f'[node]\nlisten = "{listen}"')
    with pytest.raises(ConfigurationError, match=words):
        _load(tmp_path, f"{text}\n[tls]\n{lines}\n")


def test_a_configuration_is_handed_whole_to_several_processes(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(GOOD)
    config = load_config(tmp_path / "node.toml")
    descriptor = hand_config(config)
    for _ in range(2):
        assert load_handed_config(os.dup(descriptor)) == config
    os.close(descriptor)
