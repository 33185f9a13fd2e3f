"""Copies on disk: nothing of them is believed, and they make room."""

import os
import time
from pathlib import Path

import pytest

from ckptfs.cache.checksum import cell_table, content_root
from ckptfs.cache.ids import Vid
from ckptfs.replication.local_copies import TABLE_SUFFIX, CopyFailed, LocalCopies, LocalCopy

VID = Vid(b"v" * 16)
CELL = 4096
CONTENT = bytes(range(256)) * 16 * 3 + b"tail"
TABLE = cell_table(CONTENT, CELL)
ROOT = content_root(VID, len(CONTENT), CELL, TABLE)


def opened(copies: LocalCopies, vid: Vid = VID) -> LocalCopy:
    return copies.open(vid, len(CONTENT), CELL, TABLE)


def found(copy: LocalCopy) -> list[int]:
    return copy.check(0, len(copy.present), memoryview(bytearray(CELL)))


def test_a_new_copy_holds_nothing(tmp_path: Path) -> None:
    copy = opened(LocalCopies(tmp_path / "copies"))
    assert not copy.may_hold_cells
    assert found(copy) == []
    assert list(copy.present) == [0, 0, 0, 0]
    assert [copy.cell_length(cell) for cell in range(4)] == [CELL, CELL, CELL, 4]
    copy.close()


def test_what_was_written_is_found_again_and_what_is_wrong_is_not(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies")
    copy = opened(copies)
    copy.write(0, memoryview(CONTENT))
    copy.sync()
    copy.close()
    with open(copy.path, "r+b") as file:
        file.seek(CELL + 1)
        file.write(b"\xff")
    copy = opened(copies)
    assert copy.may_hold_cells
    assert found(copy) == [0, 2, 3]
    copy.close()


def test_the_table_beside_it_proves_itself(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies")
    assert copies.table_of(VID, len(CONTENT), CELL, ROOT) is None
    opened(copies).close()
    assert copies.table_of(VID, len(CONTENT), CELL, ROOT) == TABLE
    assert copies.table_of(VID, len(CONTENT), CELL, b"x" * 16) is None
    path = copies.path_of(VID)
    name = path.with_name(path.name + TABLE_SUFFIX)
    for damaged in (TABLE[:-1], b"", b"\0" * len(TABLE)):
        name.write_bytes(damaged)
        assert copies.table_of(VID, len(CONTENT), CELL, ROOT) is None
    opened(copies).close()
    assert copies.table_of(VID, len(CONTENT), CELL, ROOT) == TABLE


def test_removing(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies")
    copy = opened(copies)
    assert copy.exists()
    assert copies.vids() == [VID]
    copies.remove(VID)
    copies.remove(VID)
    assert not copy.exists()
    assert copies.vids() == []
    copy.write(0, memoryview(CONTENT))  # who has it open keeps it
    copy.close()
    copy.close()


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies", reserve_bytes=1000, free_bytes=lambda: 10_000)
    assert copies.has_room(9_000)
    assert not copies.has_room(9_001)
    vids = [Vid(bytes([number]) * 16) for number in range(4)]
    for vid in vids:
        copy = opened(copies, vid)
        copy.write(0, memoryview(CONTENT)[:CELL])
        copy.close()
    now = time.monotonic()
    used = {vids[0]: now - 100, vids[2]: now - 200, vids[3]: now}
    assert copies.evictable(used) == [vids[1], vids[2], vids[0]], "what is in use stays"
    for vid, time_ns in ((vids[0], 0), (vids[1], 2**61), (vids[2], 2**62)):  # as a clock stamps them that was wrong, or is now
        os.utime(copies.path_of(vid), ns=(time_ns, time_ns))
    assert copies.evictable(used) == [vids[1], vids[2], vids[0]]
    assert copies.evictable({}) == [vids[0], vids[3], vids[1], vids[2]]
    assert copies.missing_bytes(vids[1], 10 * CELL) == 9 * CELL
    copies.evict(vids[1])
    assert copies.missing_bytes(vids[1], 10 * CELL) == 10 * CELL
    assert copies.statistics().evicted == 1
    assert copies.statistics().copies == 3


def test_only_ids_become_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        LocalCopies(tmp_path / "copies").path_of(Vid(b"../../etc"))


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies")
    path = copies.path_of(VID)
    path.parent.mkdir()
    os.symlink("/etc/passwd", path)
    with pytest.raises(CopyFailed):
        opened(copies)
