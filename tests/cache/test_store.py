"""The store directory: made once, opened by its own node only, locked while it is used, refused when it is not understood."""

import errno
import fcntl
import json
import os
import struct
from pathlib import Path

import pytest

from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import NodeId
from ckptfs.cache.store import FS_IOC_GETFLAGS, FS_TOPDIR_FL, StoreDirectory

NODE = NodeId("node-0")


def test_a_store_keeps_its_identity(tmp_path: Path) -> None:
    made = StoreDirectory.create_or_open(tmp_path / "store", NODE)
    again = StoreDirectory.create_or_open(tmp_path / "store", NODE)
    assert made.store_id == again.store_id
    other = StoreDirectory.create_or_open(tmp_path / "other", NODE)
    assert other.store_id != made.store_id


@pytest.mark.parametrize("name", ["log", "lost+found"])
def test_what_a_new_file_system_brings_along_is_no_obstacle(tmp_path: Path, name: str) -> None:
    (tmp_path / "store" / name).mkdir(parents=True)
    StoreDirectory.create_or_open(tmp_path / "store", NODE)


def _changed(path: Path, **fields: object) -> None:
    label = path / "store.json"
    label.write_text(json.dumps(json.loads(label.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"format": 0}, "format 0"),
        ({"node": "other"}, "belongs to node 'other'"),
        ({"node": 5}, "no valid store id"),
        ({"store": "00" * 15}, "no valid store id"),
        ({"store": "zz" * 16}, "can't be read"),
    ],
)
def test_a_label_that_is_not_ours_is_refused_and_nothing_changed(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    StoreDirectory.create_or_open(tmp_path, NODE)
    _changed(tmp_path, **fields)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir())
    with pytest.raises(StoreError, match=words):
        StoreDirectory.create_or_open(tmp_path, NODE)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.iterdir()) == before


def test_a_label_cut_anywhere_is_refused(tmp_path: Path) -> None:
    StoreDirectory.create_or_open(tmp_path, NODE)
    label = tmp_path / "store.json"
    whole = label.read_bytes()
    for length in range(len(whole) - 1):  # the last byte is a newline
        label.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            StoreDirectory.create_or_open(tmp_path, NODE)


def test_a_directory_with_foreign_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(StoreError, match="not a store"):
        StoreDirectory.create_or_open(tmp_path, NODE)
    assert os.listdir(tmp_path) == ["precious"]


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="can't be used"):
        StoreDirectory.create_or_open(tmp_path / "file", NODE)


def test_a_store_in_use_is_refused_until_its_lock_is_let_go(tmp_path: Path) -> None:
    store = StoreDirectory.create_or_open(tmp_path, NODE)
    assert not store.is_in_use()
    lock = store.acquire()
    assert store.is_in_use()
    with pytest.raises(StoreError, match="already runs"):
        store.acquire()
    inherited = os.dup(lock)
    os.close(lock)
    assert store.is_in_use()
    os.close(inherited)
    assert not store.is_in_use()
    os.close(store.acquire())


def test_directories_of_segments_and_shards_are_spread_over_the_drive(tmp_path: Path) -> None:
    store = StoreDirectory.create_or_open(tmp_path / "store", NODE)
    expected = FS_TOPDIR_FL if _has_flags(tmp_path) else 0
    assert [_flags(directory) & FS_TOPDIR_FL for directory in (store.segments, store.shards)] == [expected, expected]


def _has_flags(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if path.is_relative_to(mount[1])]
    return max(inside, key=lambda mount: len(mount[1]))[2].startswith("ext")


def _flags(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return int(struct.unpack("=i", fcntl.ioctl(descriptor, FS_IOC_GETFLAGS, bytes(4)))[0])
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise
        return 0
    finally:
        os.close(descriptor)
