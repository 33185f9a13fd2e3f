"""Small copies: batches, what is refused, damage, and the next process."""

import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ckptfs.cache import checksum
from ckptfs.cache.errors import StoreError
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.replication.errors import ShardConflict, ShardDamaged, ShardNotFound, StoreFailed, StoreFull
from ckptfs.replication.small_copies import BATCH_COUNT_MAX, COPY_SIZE_MAX, MENDED_TIMES_MAX, SmallCopies, SmallCopy


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
    first, _ = copies.list()
    assert copies.delete([(first.vid, first.stored_at_ns - 1)]) == 0
    assert copies.delete([(first.vid, first.stored_at_ns)]) == 1
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


# Damaged databases


def filled(path: Path, count: int = 300) -> tuple[list[SmallCopy], bytearray]:
    """A closed database of that many copies, and the file's content."""
    batch = [copy_of(number, 2000 + number, b"%c" % (97 + number % 26)) for number in range(count)]
    copies = SmallCopies(path)
    for start in range(0, count, BATCH_COUNT_MAX):
        copies.put(batch[start : start + BATCH_COUNT_MAX])
    copies.close()
    return batch, bytearray(path.read_bytes())


def read(copies: SmallCopies, batch: list[SmallCopy]) -> int:
    """How many of the batch are there; none is wrong."""
    found = 0
    for copy in batch:
        try:
            _, content = copies.get(copy.vid)
        except (ShardNotFound, ShardDamaged):
            continue
        assert content == copy.content
        found += 1
    return found


def leaves(content: bytearray) -> list[int]:
    """Where the table's leaf pages begin; page 1 is the schema."""
    return [page for page in range(4096, len(content), 4096) if content[page] == 13]


@pytest.mark.parametrize("damage", ["no database", "emptied", "gone", "cut", "a leaf", "the index", "the schema"])
def test_a_damaged_database_is_made_anew_with_what_can_be_read(tmp_path: Path, damage: str, caplog: Any) -> None:
    path = tmp_path / "small.db"
    batch, content = filled(path)
    index = next(page for page in range(4096, len(content), 4096) if content[page] in (2, 10))
    at_least = 0
    if damage == "no database":
        content = bytearray(os.urandom(8192))
    elif damage in ("emptied", "gone"):
        content.clear()
    elif damage == "cut":
        del content[len(content) // 8192 * 4096 :]
    elif damage == "a leaf":
        content[leaves(content)[100] : leaves(content)[100] + 64] = b"\xee" * 64
        at_least = 297
    elif damage == "the index":
        content[index : index + 64] = b"\xee" * 64
        at_least = 300
    else:
        content[100:164] = b"\xee" * 64
    path.write_bytes(content)
    if damage == "gone":
        path.unlink()
    copies = SmallCopies(path, expected=True)
    assert at_least <= read(copies, batch) < 300 + (damage == "the index")
    assert "ckptfs verify --repair" in copies.problem
    assert "small_copies_gone" in caplog.text or "small_copies_made_anew" in caplog.text
    for start in range(0, 300, BATCH_COUNT_MAX):
        copies.put(batch[start : start + BATCH_COUNT_MAX])
    assert read(copies, batch) == 300
    copies.close()
    asides = list(tmp_path.glob("small.db.damaged-*"))
    assert asides[0].read_bytes() == content
    again = SmallCopies(path, expected=True)
    assert again.problem
    for aside in asides:
        aside.unlink()
    assert not again.problem
    again.close()


@pytest.mark.slow
def test_whatever_bits_flip_no_copy_is_ever_wrong_and_a_put_brings_it_back(tmp_path: Path) -> None:
    """While it is open, so that SQLite still has the right pages in its memory; then the next start."""
    choice = random.Random(5)
    path = tmp_path / "small.db"
    batch, whole = filled(path, 60)
    found_at_once = 0
    for turn in range(60):
        for old in tmp_path.glob("small.db*"):
            old.unlink()
        path.write_bytes(whole)
        copies = SmallCopies(path)
        assert read(copies, batch) == 60
        content = bytearray(whole)
        page = choice.randrange(1, len(content) // 4096) * 4096
        for _ in range(choice.choice([1, 3, 20])):
            content[page + choice.randrange(choice.choice([16, 64, 4096]))] ^= 1 << choice.randrange(8)
        with open(path, "r+b") as file:
            file.seek(page)
            file.write(content[page : page + 4096])
        found_at_once += read(copies, batch) < 60
        if turn % 2:
            copies.close()
            copies = SmallCopies(path)
            read(copies, batch)
        copies.put(batch)
        assert read(copies, batch) == 60
        copies.close()
        copies = SmallCopies(path)
        assert read(copies, batch) == 60
        copies.close()
    assert found_at_once > 30


def test_a_damaged_log_is_said_and_what_it_held_is_missing(tmp_path: Path, caplog: Any) -> None:
    """Every batch was synced; SQLite takes the log up to the damage and says nothing."""
    batch = [copy_of(number, 3000) for number in range(30)]
    copies = SmallCopies(tmp_path / "small.db")
    for copy in batch:
        copies.put([copy])
    (tmp_path / "killed").mkdir()
    path = tmp_path / "killed" / "small.db"
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"small.db{suffix}", f"{path}{suffix}")
    copies.close()
    log = bytearray(Path(f"{path}-wal").read_bytes())
    log[len(log) // 2] ^= 1
    Path(f"{path}-wal").write_bytes(log)
    copies = SmallCopies(path, expected=True)
    assert 5 < read(copies, batch) < 25
    assert "small_copies_log_cut" in caplog.text
    assert copies.problem
    copies.put(batch)
    assert read(copies, batch) == 30
    copies.close()


@pytest.mark.parametrize("written", ["in this boot", "in an earlier one"])
def test_a_power_cut_amid_the_last_commit_is_no_damage(tmp_path: Path, written: str) -> None:
    """Its pages got to the drive out of their order; nobody was told that it is safe."""
    batch = [copy_of(number, 3000) for number in range(9)]
    copies = SmallCopies(tmp_path / "small.db")
    copies.put(batch[:1])
    before = Path(f"{tmp_path}/small.db-wal").stat().st_size
    copies.put(batch[1:])
    (tmp_path / "cut").mkdir()
    path = tmp_path / "cut" / "small.db"
    for suffix in ("", "-wal"):
        shutil.copy(tmp_path / f"small.db{suffix}", f"{path}{suffix}")
    copies.close()
    log = bytearray(Path(f"{path}-wal").read_bytes())
    log[before : before + 4120] = bytes(4120)
    Path(f"{path}-wal").write_bytes(log)
    if written == "in an earlier one":
        os.utime(f"{path}-wal", (1, 1))
    for _ in range(2):
        copies = SmallCopies(path, expected=True)
        assert read(copies, batch) == 1
        assert bool(copies.problem) == (written == "in this boot")
        copies.close()


def test_killed_just_before_a_new_database_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "small.db"
    batch, _ = filled(path, 10)
    os.rename(path, tmp_path / "small.db.new")
    copies = SmallCopies(path, expected=True)
    assert read(copies, batch) == 10
    copies.close()


def test_a_drive_that_fails_again_and_again_is_not_mended_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "small.db"
    batch, content = filled(path, 20)
    copies = SmallCopies(path)
    for _ in range(MENDED_TIMES_MAX):
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(b"\xee" * (len(content) - 4096))
        assert read(copies, batch) == 0
        copies.put(batch)
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xee" * (len(content) - 4096))
    with pytest.raises(ShardDamaged, match="can't be read"):
        copies.get(batch[0].vid)
    with pytest.raises(StoreFailed, match="replace the drive"):
        copies.put(batch)
    assert len(list(tmp_path.glob("small.db.damaged-*"))) == MENDED_TIMES_MAX
    copies.close()


def test_a_database_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection:
        connection.execute("CREATE TABLE precious(x)")
    before = (tmp_path / "small.db").read_bytes()
    with pytest.raises(StoreError, match="something else; nothing was changed"):
        SmallCopies(tmp_path / "small.db")
    with closing(sqlite3.connect(tmp_path / "small.db")) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("precious",)]
    assert (tmp_path / "small.db").read_bytes() == before


def test_a_database_of_another_format_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "small.db")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    with pytest.raises(StoreError, match="format 2"):
        SmallCopies(tmp_path / "small.db")
