"""What trainers do around their files: staged directories, rotation, pointers, appends, mappings that outlive close."""

import mmap
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SIZES = [0, 1, 4095, 4096, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (4 << 20) + 1, (9 << 20) + 12345]
"""Around a page, the limit of small files, a cell and a stripe."""


def _content(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def _save_step(directory: Path, step: int) -> None:
    """As Trainer does: into a temporary directory, then one rename."""
    staged = directory / f"tmp-checkpoint-{step}"
    staged.mkdir()
    for name in ("model.safetensors", "optimizer.pt"):
        (staged / name).write_bytes(_content(300_000, step))
    (staged / "trainer_state.json").write_text(f'{{"step": {step}}}')
    staged.rename(directory / f"checkpoint-{step}")


def test_staged_directories_and_rotation(place: Any) -> None:
    for step in range(6):
        _save_step(place.here, step)
        for old in sorted(place.here.glob("checkpoint-*"))[:-2]:
            shutil.rmtree(old)
        assert sorted(os.listdir(place.there)) == [f"checkpoint-{kept}" for kept in range(max(0, step - 1), step + 1)]
        assert (place.there / f"checkpoint-{step}" / "model.safetensors").read_bytes() == _content(300_000, step)
    place.protect()
    assert (place.elsewhere / "checkpoint-5" / "optimizer.pt").read_bytes() == _content(300_000, 5)


def test_latest_as_link_and_as_file(place: Any) -> None:
    for step in range(3):
        _save_step(place.here, step)
        os.symlink(f"checkpoint-{step}", place.here / "latest.new")
        os.replace(place.here / "latest.new", place.here / "latest")
        (place.here / "latest_iteration.tmp").write_text(str(step))
        os.replace(place.here / "latest_iteration.tmp", place.here / "latest_iteration")
        assert os.readlink(place.there / "latest") == f"checkpoint-{step}"
        assert (place.there / "latest_iteration").read_text() == str(step)
        assert (place.there / "latest" / "trainer_state.json").read_text() == f'{{"step": {step}}}'


@pytest.mark.parametrize("size_bytes", SIZES)
def test_every_size_comes_back(place: Any, size_bytes: int) -> None:
    content = _content(size_bytes)
    (place.here / "file").write_bytes(content)
    assert (place.here / "file").read_bytes() == content
    assert (place.there / "file").read_bytes() == content
    place.protect()
    assert (place.elsewhere / "file").read_bytes() == content
    assert os.stat(place.elsewhere / "file").st_size == size_bytes


def test_closed_and_opened_again_for_append(place: Any) -> None:
    expected = b""
    for turn in range(4):
        part = _content(100_000, turn)
        with open(place.here / "log", "ab") as file:
            file.write(part)
        expected += part
        if turn == 1:
            place.protect()
        assert (place.there / "log").read_bytes() == expected
    place.protect()
    assert (place.elsewhere / "log").read_bytes() == expected


def test_rewritten_in_the_middle_and_truncated(place: Any) -> None:
    content = bytearray(_content(3 << 20))
    (place.here / "file").write_bytes(content)
    place.protect()
    with open(place.here / "file", "r+b") as file:
        file.seek(1 << 20)
        file.write(b"changed" * 1000)
        file.truncate(2 << 20)
    content[1 << 20 : (1 << 20) + 7000] = b"changed" * 1000
    del content[2 << 20 :]
    assert (place.there / "file").read_bytes() == content
    place.protect()
    assert (place.elsewhere / "file").read_bytes() == content


def test_a_writable_mapping_that_outlives_close(place: Any) -> None:
    path = place.here / "mapped"
    path.write_bytes(bytes(1 << 20))
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    mapping[4096:4100] = b"late"
    mapping.flush()
    assert path.read_bytes()[4096:4100] == b"late"
    mapping[0:5] = b"later"
    mapping.close()
    place.protect()
    expected = bytearray(1 << 20)
    expected[0:5], expected[4096:4100] = b"later", b"late"
    assert (place.elsewhere / "mapped").read_bytes() == expected


def test_renamed_or_deleted_while_it_is_being_protected(place: Any) -> None:
    content = _content(8 << 20)
    for number in range(6):
        (place.here / f"file-{number}").write_bytes(content)
    for number in range(3):
        os.rename(place.here / f"file-{number}", place.here / f"renamed-{number}")
    for number in range(3, 5):
        (place.here / f"file-{number}").unlink()
    (place.here / "file-5").write_bytes(content[::-1])
    place.protect()
    assert sorted(os.listdir(place.there)) == ["file-5", "renamed-0", "renamed-1", "renamed-2"]
    for number in range(3):
        assert (place.there / f"renamed-{number}").read_bytes() == content
    assert (place.there / "file-5").read_bytes() == content[::-1]


def test_hard_links_are_one_file_on_every_node(place: Any) -> None:
    (place.here / "one").write_bytes(b"content")
    os.link(place.here / "one", place.here / "two")
    assert os.stat(place.there / "two").st_nlink == 2
    assert os.path.samefile(place.there / "one", place.there / "two")
    (place.here / "one").unlink()
    assert (place.there / "two").read_bytes() == b"content"


def test_a_reader_keeps_what_it_opened_when_the_file_is_replaced(place: Any) -> None:
    old, new = _content(2 << 20, 1), _content(2 << 20, 2)
    (place.here / "file").write_bytes(old)
    place.protect()
    with open(place.here / "file", "rb") as here, open(place.there / "file", "rb") as there:
        (place.here / "file.new").write_bytes(new)
        os.replace(place.here / "file.new", place.here / "file")
        assert here.read() == old
        assert there.read() == old
    assert (place.there / "file").read_bytes() == new


def test_extended_attributes_go_along(place: Any) -> None:
    (place.here / "file").touch()
    os.setxattr(place.here / "file", "user.note", b"step 7")
    assert os.getxattr(place.there / "file", "user.note") == b"step 7"
    assert "user.note" in os.listxattr(place.there / "file")
    os.removexattr(place.here / "file", "user.note")
    assert "user.note" not in os.listxattr(place.there / "file")


def test_times_modes_and_owners_go_along(place: Any) -> None:
    path = place.here / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(1_000_000_001, 2_000_000_003))
    os.chmod(path, 0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    there = os.stat(place.there / "file")
    here = os.stat(path)
    assert there.st_mtime_ns == here.st_mtime_ns == 2_000_000_003
    assert there.st_mode == here.st_mode
    assert (there.st_uid, there.st_gid) == (here.st_uid, here.st_gid)
