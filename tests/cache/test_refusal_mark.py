"""The mark that a drive refused writes: it tells whether the file system was unmounted since."""

import os
from pathlib import Path

import pytest

from ckptfs.cache import refusal_mark
from ckptfs.cache.ids import StoreId
from ckptfs.cache.refusal_mark import RefusalMark, mount_id_of


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RefusalMark:
    monkeypatch.setattr(refusal_mark, "RUN", tmp_path / "run")
    return RefusalMark(StoreId(bytes(16)), tmp_path)


def test_it_tells_another_mount_from_the_same(mark: RefusalMark, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mark.was_unmounted() is None
    mark.set()
    assert mark.was_unmounted() is False
    monkeypatch.setattr(refusal_mark, "mount_id_of", lambda path: 7)
    assert mark.was_unmounted() is True
    mark.set()
    assert mark.was_unmounted() is True, "the first time counts"
    mark.clear()
    mark.clear()
    assert mark.was_unmounted() is None


def test_a_place_that_takes_no_mark_is_passed_over(mark: RefusalMark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_mark, "RUN", Path("/proc/nowhere"))
    mark = RefusalMark(StoreId(bytes(16)), Path("/"))
    mark.set()
    mark.clear()
    assert mark.was_unmounted() is None


def test_a_mount_has_one_id(tmp_path: Path) -> None:
    assert mount_id_of(tmp_path) == mount_id_of(tmp_path / ".")
    assert mount_id_of(tmp_path / "nothing") is None
    if os.uname().release.split(".") >= ["6", "8"]:
        assert mount_id_of("/proc") != mount_id_of(tmp_path)
