"""What an export that can't be written says."""

from pathlib import Path

import pytest

from ckptfs.cache.catalog_archive import ArchiveHeader
from ckptfs.cache.errors import StoreError
from ckptfs.fs.catalog_transfer import _written


def test_only_what_was_there_is_still_there(tmp_path: Path) -> None:
    header = ArchiveHeader(bytes(16), 1)
    with pytest.raises(StoreError, match=r"none/x can't be written: No such file or directory$"):
        _written(tmp_path / "none" / "x", header, [])
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError, match="what it held is still there"):
        _written(tmp_path / "directory", header, [])
