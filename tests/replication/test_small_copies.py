"""Small copies: batches, what is refused, damage, and the next process."""

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.cache import checksum
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.replication.errors import ShardConflict, ShardDamaged, ShardNotFound, StoreFull
from ckptfs.replication.small_copies import BATCH_COUNT_MAX, COPY_SIZE_MAX, SmallCopies, SmallCopy


def copy_of(number: int, size: int = 100, byte: bytes = b"x") -> SmallCopy:
    return SmallCopy(Vid(number.to_bytes(16, "big")), InodeNumber(number), size, b"run/%d" % number, 3, byte * size)


@pytest.fixture
def copies(tmp_path: Path) -> Iterator[SmallCopies]:
    opened = SmallCopies(tmp_path / "small_copies.db")
    yield opened
    opened.close()


def test_a_batch_is_stored_and_read_by_the_next_process(copies: SmallCopies, tmp_path: Path) -> None:
    batch = [copy_of(number, number + 1) for number in range(BATCH_COUNT_MAX)]
    roots = copies.put(batch)
    for copy, root in zip(batch, roots, strict=True):
        assert root == checksum.content_root(copy.vid, copy.size, copy.size, checksum.cell_hash(copy.content))
    again = SmallCopies(tmp_path / "small_copies.db")
    for copy, root in zip(batch, roots, strict=True):
        held, content = again.get(copy.vid)
        assert content == copy.content
        assert (held.ino, held.path_hint, held.revision, held.root) == (copy.ino, copy.path_hint, 3, root)
    assert again.count() == (256, sum(range(257)))
    assert [row.vid for row in again.list(limit=2)] == [batch[0].vid, batch[1].vid]
    again.close()


def test_a_repeated_batch_has_the_same_answer(copies: SmallCopies) -> None:
    batch = [copy_of(1), copy_of(2)]
    assert copies.put(batch) == copies.put(batch)
    assert copies.count() == (2, 200)


def test_other_content_under_a_vid_stores_nothing_of_the_batch(copies: SmallCopies) -> None:
    copies.put([copy_of(1)])
    with pytest.raises(ShardConflict):
        copies.put([copy_of(2), copy_of(1, byte=b"y")])
    assert copies.count() == (1, 100)
    assert copies.get(copy_of(1).vid)[1] == b"x" * 100


@pytest.mark.parametrize(
    "bad",
    [
        copy_of(1, 0),
        copy_of(1, COPY_SIZE_MAX + 1),
        copy_of(1)._replace(size=99),
        copy_of(1)._replace(vid=Vid(b"short")),
        copy_of(1)._replace(path_hint=b"x" * 4097),
    ],
)
def test_impossible_copies_are_refused(bad: SmallCopy, copies: SmallCopies) -> None:
    with pytest.raises(ValueError, match=r"a copy of|a path of"):
        copies.put([copy_of(2), bad])
    with pytest.raises(ValueError, match="a batch of 257"):
        copies.put([copy_of(number) for number in range(257)])
    assert copies.count() == (0, 0)


def test_a_flipped_byte_of_the_content_is_found_and_a_new_put_repairs_it(copies: SmallCopies, tmp_path: Path) -> None:
    copies.put([copy_of(1)])
    other = sqlite3.connect(tmp_path / "small_copies.db")
    with other:
        other.execute("UPDATE copies SET content = ?", (b"x" * 99 + b"y",))
    other.close()
    with pytest.raises(ShardDamaged, match="fails its hash"):
        copies.get(copy_of(1).vid)
    copies.put([copy_of(1)])
    assert copies.get(copy_of(1).vid)[1] == b"x" * 100


def test_a_damaged_root_is_no_conflict(copies: SmallCopies, tmp_path: Path) -> None:
    copies.put([copy_of(1)])
    other = sqlite3.connect(tmp_path / "small_copies.db")
    with other:
        other.execute("UPDATE copies SET root = ?", (b"r" * 16,))
    other.close()
    with pytest.raises(ShardDamaged):
        copies.get(copy_of(1).vid)
    copies.put([copy_of(1)])
    assert copies.get(copy_of(1).vid)[1] == b"x" * 100


def test_missing_and_deleted_copies(copies: SmallCopies) -> None:
    copies.put([copy_of(1), copy_of(2)])
    copies.delete([copy_of(1).vid])
    with pytest.raises(ShardNotFound):
        copies.get(copy_of(1).vid)
    assert copies.get(copy_of(2).vid)[1] == b"x" * 100


def test_a_full_store_takes_no_copies(tmp_path: Path) -> None:
    copies = SmallCopies(tmp_path / "small.db", free_bytes=lambda: 150)
    copies.put([copy_of(1)])
    with pytest.raises(StoreFull):
        copies.put([copy_of(2), copy_of(3)])
    assert copies.count() == (1, 100)
    copies.close()


def test_a_damaged_database_is_an_error_and_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "small.db"
    path.write_bytes(os.urandom(8192))
    content = path.read_bytes()
    with pytest.raises(StoreError, match="move it aside"):
        SmallCopies(path)
    assert path.read_bytes() == content


def test_a_database_of_another_format_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "small.db")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    with pytest.raises(StoreError, match="format 2"):
        SmallCopies(tmp_path / "small.db")
