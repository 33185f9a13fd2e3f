"""The shard store with real files: write, resume, refuse, damage, recover."""

import errno
import os
import resource
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.cache import checksum
from ckptfs.cache.ids import InodeNumber, Vid
from ckptfs.replication import shard_format
from ckptfs.replication.agent_db import AgentDatabase, HeldShard
from ckptfs.replication.errors import (
    PeerRefused,
    RefusalReason,
    ShardConflict,
    ShardDamaged,
    ShardNotFound,
    StoreFailed,
    StoreFull,
    WriterRevoked,
)
from ckptfs.replication.shard_format import ShardFooter, ShardHeader
from ckptfs.replication.shard_readers import ShardReaders
from ckptfs.replication.shard_store import ShardStore
from ckptfs.replication.shard_writer import ShardWriter

VID = Vid(bytes(range(16)))
HEADER = ShardHeader(VID, 1, 2, 1, 64, 64 * 7 + 10)
"""Shard 1 of 2+1, four cells: three of 64 bytes, and the last with the content's last 10 bytes."""


def cells_of(header: ShardHeader, salt: bytes = b"") -> list[bytes]:
    return [
        ((b"%d%b" % (stripe, salt)) * 64)[: header.cell_length(stripe)].ljust(header.cell_length(stripe), b"x")
        for stripe in range(header.cell_count)
    ]


def footer_of(header: ShardHeader, cells: list[bytes]) -> ShardFooter:
    content = b"".join(checksum.cell_hash(b"%d" % cell) for cell in range(header.content_cell_count))
    return ShardFooter(header, b"".join(map(checksum.cell_hash, cells)), content, InodeNumber(7), b"run/model.pt", 5)


def write(writer: ShardWriter, cells: list[bytes], stop: int | None = None) -> None:
    for stripe in range(writer.resume_stripe, len(cells) if stop is None else stop):
        writer.write_cell(stripe, cells[stripe], checksum.cell_hash(cells[stripe]))


def put(store: ShardStore, header: ShardHeader = HEADER, salt: bytes = b"") -> bytes:
    cells = cells_of(header, salt)
    writer = store.begin(header)
    write(writer, cells)
    return writer.finish(footer_of(header, cells))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[AgentDatabase]:
    database = AgentDatabase(tmp_path / "agent.db")
    yield database
    database.close()


@pytest.fixture
def store(tmp_path: Path, index: AgentDatabase) -> ShardStore:
    return ShardStore(tmp_path / "shards", index)


def test_what_was_written_is_read_back(store: ShardStore, tmp_path: Path) -> None:
    root = put(store)
    cells = cells_of(HEADER)
    assert root == footer_of(HEADER, cells).root
    buffer = memoryview(bytearray(64))
    with store.open(VID, 1) as reader:
        assert reader.header == HEADER
        assert reader.footer == footer_of(HEADER, cells)
        for stripe, cell in enumerate(cells):
            assert bytes(buffer[: reader.read_cell(stripe, buffer)]) == cell
        assert reader.read_cell(HEADER.cell_count, buffer) == 0
    assert store.verify(VID, 1).ok
    assert os.listdir(tmp_path / "shards/00") == [VID.hex() + ".1"]
    assert (tmp_path / "shards/00" / (VID.hex() + ".1")).stat().st_mode & 0o777 == 0o600
    (row,) = store.list()
    assert (row.vid, row.index, row.root) == (VID, 1, root)
    assert row.file_bytes == (tmp_path / "shards/00" / (VID.hex() + ".1")).stat().st_size
    assert store.statistics().promised_bytes == 0


def test_every_flipped_byte_and_every_cut_is_exact_data_or_a_named_error(store: ShardStore) -> None:
    put(store)
    cells = cells_of(HEADER)
    buffer = memoryview(bytearray(64))
    path = store.path_of(VID, 1)
    with open(path, "rb") as file:
        good = file.read()

    def read_all() -> bool:
        exact = True
        try:
            with store.open(VID, 1) as reader:
                for stripe, cell in enumerate(cells):
                    try:
                        assert bytes(buffer[: reader.read_cell(stripe, buffer)]) == cell
                    except ShardDamaged:
                        exact = False
        except ShardDamaged:
            return False
        return exact

    assert read_all()
    padding = range(shard_format.HEADER_FIELDS_SIZE + 8, shard_format.HEADER_SIZE - 8)
    with open(path, "r+b", buffering=0) as raw:
        for at in range(len(good)):
            if at in padding and at % 64:
                continue
            os.pwrite(raw.fileno(), bytes([good[at] ^ 0x04]), at)
            assert not read_all(), f"byte {at}"
            assert not store.verify(VID, 1).ok
            os.pwrite(raw.fileno(), good[at : at + 1], at)
        assert read_all()
        raw.seek(0, os.SEEK_END)
        raw.write(b"\0")
        assert not read_all()
        for length in [*range(len(good) - 1, shard_format.HEADER_SIZE, -1), 4095, 100, 64, 63, 1, 0]:
            raw.truncate(length)
            assert not read_all(), f"cut at {length}"


def test_verify_names_the_bad_stripes(store: ShardStore) -> None:
    put(store)
    with open(store.path_of(VID, 1), "r+b") as file:
        for stripe in (0, 2):
            file.seek(HEADER.cell_offset(stripe) + 5)
            file.write(b"!")
    result = store.verify(VID, 1)
    assert (result.ok, result.bad_stripes, result.message) == (False, (0, 2), "2 of 4 cells fail their hash")
    with pytest.raises(ShardNotFound):
        store.verify(VID, 0)


def test_a_shard_under_a_wrong_name_is_refused(store: ShardStore) -> None:
    put(store)
    os.rename(store.path_of(VID, 1), store.path_of(VID, 2))
    with pytest.raises(ShardDamaged, match="another shard than its name says"):
        store.open(VID, 2)
    with pytest.raises(ShardNotFound):
        store.open(VID, 1)


def test_a_symbolic_link_is_not_followed(store: ShardStore, tmp_path: Path) -> None:
    put(store)
    os.rename(store.path_of(VID, 1), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store.path_of(VID, 1))
    with pytest.raises((ShardDamaged, OSError)):
        store.open(VID, 1)


@pytest.mark.parametrize("stop", range(5))
@pytest.mark.parametrize("restart", [False, True])
def test_a_suspended_put_goes_on_where_it_stopped(stop: int, restart: bool, store: ShardStore, index: AgentDatabase) -> None:
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    write(writer, cells, stop)
    writer.suspend()
    if restart:
        store = ShardStore(Path(store.path_of(VID, 1)).parent.parent, index)
        assert store.recover() == (0, 0, (), 1, 0)
    with pytest.raises(ShardNotFound):
        store.open(VID, 1)
    again = store.begin(HEADER)
    assert again.resume_stripe == stop
    write(again, cells)
    again.finish(footer_of(HEADER, cells))
    assert store.verify(VID, 1).ok


@pytest.mark.parametrize("extra", [-1, 0, 1, 63])
def test_a_torn_partial_file_goes_on_after_its_last_whole_cell(extra: int, store: ShardStore) -> None:
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    write(writer, cells, 3)
    writer.suspend()
    os.truncate(writer.partial_path, HEADER.cell_offset(2) + extra)
    again = store.begin(HEADER)
    assert again.resume_stripe == (1 if extra < 0 else 2)
    write(again, cells)
    again.finish(footer_of(HEADER, cells))
    assert store.verify(VID, 1).ok


def test_a_partial_file_with_zeros_where_cells_were_is_dropped_at_the_footer(store: ShardStore) -> None:
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    write(writer, cells, 3)
    writer.suspend()
    with open(writer.partial_path, "r+b") as file:
        file.seek(HEADER.cell_offset(1))
        file.write(bytes(64))
    again = store.begin(HEADER)
    write(again, cells)
    with pytest.raises(ShardDamaged, match="not those of the footer"):
        again.finish(footer_of(HEADER, cells))
    assert not os.path.exists(writer.partial_path)
    assert put(store) == footer_of(HEADER, cells).root


def flip(store: ShardStore, offset: int) -> None:
    with open(store.path_of(VID, 1), "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_foreign_partial_file_is_begun_anew(store: ShardStore) -> None:
    other = ShardHeader(VID, 1, 2, 1, 64, 999)
    writer = store.begin(other)
    write(writer, cells_of(other), 2)
    writer.suspend()
    assert store.begin(HEADER).resume_stripe == 0


def test_a_second_put_of_a_complete_shard_is_acknowledged_without_bytes(store: ShardStore) -> None:
    root = put(store)
    writer = store.begin(HEADER)
    assert writer.resume_stripe == HEADER.cell_count
    assert writer.finish(footer_of(HEADER, cells_of(HEADER))) == root


def test_other_bytes_under_the_same_vid_are_a_conflict(store: ShardStore) -> None:
    root = put(store)
    writer = store.begin(HEADER)
    with pytest.raises(ShardConflict):
        writer.finish(footer_of(HEADER, cells_of(HEADER, b"other")))
    with pytest.raises(ShardConflict):
        store.begin(ShardHeader(VID, 1, 2, 1, 64, 999))
    with store.open(VID, 1) as reader:
        assert reader.footer.root == root
    assert store.statistics().writing == 0


def test_a_damaged_shard_is_replaced_by_a_new_put(store: ShardStore) -> None:
    root = put(store)
    os.truncate(store.path_of(VID, 1), 5000)
    assert put(store) == root
    assert store.verify(VID, 1).ok


@pytest.mark.parametrize("stripe", range(4))
def test_a_shard_with_a_damaged_cell_is_served_until_a_new_put_replaced_it(stripe: int, store: ShardStore) -> None:
    root, cells = put(store), cells_of(HEADER)
    flip(store, HEADER.cell_offset(stripe))
    assert store.verify(VID, 1).bad_stripes == (stripe,)
    writer = store.begin(HEADER)
    assert writer.resume_stripe == 0
    write(writer, cells)
    buffer = memoryview(bytearray(64))
    with store.open(VID, 1) as reader:
        for other in {0, 1, 2, 3} - {stripe}:
            reader.read_cell(other, buffer)
    assert writer.finish(footer_of(HEADER, cells)) == root
    assert store.verify(VID, 1).ok


def test_a_damaged_cell_does_not_let_other_content_in(store: ShardStore) -> None:
    root, others = put(store), cells_of(HEADER, b"other")
    flip(store, HEADER.cell_offset(2))
    writer = store.begin(HEADER)
    write(writer, others)
    with pytest.raises(ShardConflict):
        writer.finish(footer_of(HEADER, others))
    assert not os.path.exists(writer.partial_path)
    with store.open(VID, 1) as reader:
        assert reader.footer.root == root
    assert put(store) == root
    assert store.verify(VID, 1).ok


def test_a_newer_put_takes_over_from_one_that_hangs(store: ShardStore) -> None:
    cells = cells_of(HEADER)
    first = store.begin(HEADER)
    write(first, cells, 2)
    second = store.begin(HEADER)
    assert second.resume_stripe == 2
    with pytest.raises(WriterRevoked):
        first.write_cell(2, cells[2], checksum.cell_hash(cells[2]))
    first.abandon()
    first.suspend()
    write(second, cells)
    second.finish(footer_of(HEADER, cells))
    with pytest.raises(WriterRevoked):
        first.finish(footer_of(HEADER, cells))


def test_cells_are_checked_before_they_are_written(store: ShardStore) -> None:
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    with pytest.raises(ShardDamaged):
        writer.write_cell(0, cells[0], bytes(16))
    with pytest.raises(ValueError, match="expected 0"):
        writer.write_cell(1, cells[1], checksum.cell_hash(cells[1]))
    with pytest.raises(ValueError, match="expected 0"):
        writer.write_cell(0, cells[0][:-1], checksum.cell_hash(cells[0][:-1]))
    write(writer, cells, 3)
    with pytest.raises(ValueError, match="3 of 4 cells"):
        writer.finish(footer_of(HEADER, cells))
    write_last = cells[3]
    writer.write_cell(3, write_last, checksum.cell_hash(write_last))
    assert writer.finish(footer_of(HEADER, cells)) == footer_of(HEADER, cells).root
    with pytest.raises(ValueError, match="ended"):
        writer.finish(footer_of(HEADER, cells))


def test_an_abandoned_put_leaves_nothing(store: ShardStore, tmp_path: Path) -> None:
    writer = store.begin(HEADER)
    write(writer, cells_of(HEADER), 2)
    writer.abandon()
    assert os.listdir(tmp_path / "shards/00") == []
    with pytest.raises(ValueError, match="ended"):
        writer.write_cell(2, cells_of(HEADER)[2], checksum.cell_hash(cells_of(HEADER)[2]))
    assert not store.statistics().failed


def test_space_is_promised_before_bytes_flow(tmp_path: Path, index: AgentDatabase) -> None:
    need = HEADER.file_length()
    store = ShardStore(tmp_path / "shards", index, reserve_bytes=1000, free_bytes=lambda: 2 * need + 1500)
    first = store.begin(HEADER)
    assert store.statistics().promised_bytes == need
    assert store.free_bytes() == need + 500
    second = store.begin(ShardHeader(VID, 0, 2, 1, 64, HEADER.size))
    with pytest.raises(StoreFull, match="doesn't fit"):
        store.begin(ShardHeader(VID, 2, 2, 1, 64, HEADER.size))
    assert store.statistics().writing == 2
    first.abandon()
    second.suspend()
    assert store.free_bytes() == 2 * need + 500


def test_a_write_that_finds_no_room_is_no_failure_of_the_drive(store: ShardStore) -> None:
    """A limit on the size of files stands for the full drive; without the signal it is EFBIG."""
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    write(writer, cells, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER.cell_offset(1) + 10, before[1]))
    try:
        with pytest.raises(StoreFull):
            writer.write_cell(1, cells[1], checksum.cell_hash(cells[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not store.statistics().failed
    assert store.statistics().writing == 0


def test_a_failed_sync_is_final_for_the_store(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = cells_of(HEADER)
    writer = store.begin(HEADER)
    write(writer, cells)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreFailed, match="Input/output error"):
            writer.finish(footer_of(HEADER, cells))
    with pytest.raises(StoreFailed):
        store.begin(HEADER)
    with pytest.raises(ShardNotFound):
        store.open(VID, 1)
    assert "Input/output error" in store.statistics().failed
    assert store.free_bytes() == 0


@pytest.mark.parametrize("what", ["a directory in place of the shard", "a file in place of the directory", "permission"])
def test_what_stands_in_the_way_of_a_shard_is_no_failed_drive(
    store: ShardStore, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EISDIR, ENOTDIR and EACCES: said, gone when it is gone, and no drive is condemned."""
    cells, path = cells_of(HEADER), Path(store.path_of(VID, 1))

    def attempt() -> bytes:
        writer = store.begin(HEADER)
        write(writer, cells)
        return writer.finish(footer_of(HEADER, cells))

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        if what == "permission":
            patch.setattr(os, "rename", deny)
        elif what.startswith("a directory"):
            path.mkdir(parents=True)
        else:
            path.parent.write_bytes(b"")
        with pytest.raises(StoreFailed, match=r"Is a directory|Not a directory|Permission denied"):
            attempt()
    assert not store.statistics().failed
    assert str(path) in store.statistics().obstacle
    assert "replace" not in store.statistics().obstacle
    if what.startswith("a directory"):
        path.rmdir()
    elif what.startswith("a file"):
        path.parent.unlink()
        path.parent.mkdir()
    attempt()
    assert not store.statistics().obstacle


def test_the_index_is_rebuilt_from_the_files(store: ShardStore, index: AgentDatabase, tmp_path: Path) -> None:
    headers = [ShardHeader(Vid(bytes([number]) * 16), number % 3, 2, 1, 64, 500) for number in range(10)]
    for header in headers:
        put(store, header)
    before = store.list()
    (tmp_path / "shards/00/foreign").write_bytes(b"not ours")
    (tmp_path / "shards/notes").write_bytes(b"not ours")
    damaged = store.path_of(headers[3].vid, 0)
    os.truncate(damaged, 100)
    os.unlink(store.path_of(headers[4].vid, 1))
    for suffix in ("", "-wal"):
        (tmp_path / f"agent.db{suffix}").unlink(missing_ok=True)
    anew = AgentDatabase(tmp_path / "agent.db")
    assert anew.made_anew
    rebuilt = ShardStore(tmp_path / "shards", anew)
    assert rebuilt.recover() == (8, 0, (damaged,), 0, 0)
    expected = [replace(row, stored_at_ns=0) for row in before if row.vid != headers[4].vid]
    expected[3] = HeldShard(headers[3].vid, 0, b"", 100, 0)  # for the sweep to know of
    assert [replace(row, stored_at_ns=0) for row in rebuilt.list()] == expected
    assert rebuilt.recover() == (0, 0, (damaged,), 0, 0)
    stored_at_ns = next(row.stored_at_ns for row in rebuilt.list() if (row.vid, row.index) == (headers[0].vid, 0))
    assert not rebuilt.delete(headers[0].vid, 0, stored_at_ns + 1)
    assert rebuilt.delete(headers[0].vid, 0, stored_at_ns)
    assert not rebuilt.delete(headers[0].vid, 0, stored_at_ns)
    os.unlink(rebuilt.path_of(headers[1].vid, 1))
    assert rebuilt.recover()[:2] == (0, 1)
    assert anew.held().shards == 7
    anew.close()


@pytest.mark.parametrize("damage", [b"", b"garbage, not a database, but long enough to look at" * 100, None])
def test_a_damaged_index_is_made_anew(damage: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    AgentDatabase(path).close()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff" * (len(content) // 2) if damage is None else damage)
    database = AgentDatabase(path)
    assert database.list() == []
    database.close()


def test_an_index_of_another_format_is_made_anew(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "agent.db")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    database = AgentDatabase(tmp_path / "agent.db")
    assert database.made_anew
    database.close()


def test_old_and_unusable_partial_files_are_removed(store: ShardStore) -> None:
    paths = []
    for number in range(3):
        writer = store.begin(ShardHeader(VID, number, 2, 1, 64, 500))
        writer.suspend()
        paths.append(writer.partial_path)
    os.utime(paths[0], (1, 1))
    os.truncate(paths[1], 10)
    active = store.begin(ShardHeader(VID, 0, 2, 1, 64, 700))
    os.utime(paths[0], (1, 1))
    assert store.remove_stale_partials() == 1
    assert not os.path.exists(paths[1])
    active.suspend()
    os.utime(paths[0], (1, 1))
    assert store.recover() == (0, 0, (), 1, 1)
    assert os.path.exists(paths[2])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(k=st.integers(1, 5), m=st.integers(0, 2), cell_size=st.integers(1, 50), size=st.integers(1, 400), data=st.data())
def test_any_geometry_is_stored_and_read(
    k: int, m: int, cell_size: int, size: int, data: st.DataObject, store: ShardStore
) -> None:
    vid = Vid(data.draw(st.binary(min_size=16, max_size=16)))
    header = ShardHeader(vid, data.draw(st.integers(0, k + m - 1)), k, m, cell_size, size)
    assert put(store, header) == footer_of(header, cells_of(header)).root
    assert store.verify(vid, header.index).ok
    (held,) = store.list()
    assert store.delete(vid, header.index, held.stored_at_ns)


ZEROS = ShardHeader(VID, 0, 1, 1, 64 << 10, 40 * (64 << 10) + 10)


def test_cells_of_zeros_take_no_space_and_read_as_zeros(store: ShardStore) -> None:
    """Whether they come as bytes or as a word, at the beginning, in the middle, at the end."""
    cells = [bytes(ZEROS.cell_length(stripe)) for stripe in range(ZEROS.cell_count)]
    cells[20] = os.urandom(ZEROS.cell_size)
    writer = store.begin(ZEROS)
    for stripe, cell in enumerate(cells):
        if stripe % 2 and stripe != 21:
            writer.write_zeros(stripe)
        else:
            writer.write_cell(stripe, cell, checksum.cell_hash(cell))
    writer.finish(footer_of(ZEROS, cells))
    status = os.stat(store.path_of(VID, 0))
    assert status.st_blocks * 512 < 4 * ZEROS.cell_size < status.st_size
    assert store.verify(VID, 0).ok
    buffer = memoryview(bytearray(ZEROS.cell_size))
    with store.open(VID, 0) as reader:
        for stripe, cell in enumerate(cells):
            assert buffer[: reader.read_cell(stripe, buffer)] == cell


def test_a_put_of_zeros_goes_on_where_it_stopped(store: ShardStore) -> None:
    cells = [bytes(ZEROS.cell_length(stripe)) for stripe in range(ZEROS.cell_count)]
    cells[5] = os.urandom(ZEROS.cell_size)
    writer = store.begin(ZEROS)
    write(writer, cells, stop=10)
    writer.suspend()
    writer = store.begin(ZEROS)
    assert writer.resume_stripe == 6  # the hole behind the last written cell is not in the file
    write(writer, cells)
    writer.finish(footer_of(ZEROS, cells))
    assert store.verify(VID, 0).ok
    with pytest.raises(ValueError, match="zeros"):
        store.begin(HEADER).write_zeros(3)


def test_no_space_is_needed_for_what_is_known_to_be_zeros(tmp_path: Path, index: AgentDatabase) -> None:
    store = ShardStore(tmp_path / "small", index, free_bytes=lambda: 1 << 20)
    with pytest.raises(StoreFull):
        store.begin(ZEROS)
    store.begin(ZEROS, hole_bytes=30 * ZEROS.cell_size).abandon()


def test_what_does_not_open_is_damaged_unless_the_process_is_short_of_something(
    store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller knows what to do about either; an error of the system would end it."""
    put(store)
    real = os.open

    def refusing(code: int) -> None:
        def refuse(path: str, *others: int) -> int:
            if VID.hex() in os.fspath(path):
                raise OSError(code, os.strerror(code))
            return real(path, *others)

        monkeypatch.setattr(os, "open", refuse)

    refusing(errno.EIO)
    with pytest.raises(ShardDamaged, match="can't be opened: Input/output error"):
        store.open(VID, 1)
    assert not store.verify(VID, 1).ok
    refusing(errno.EMFILE)
    with pytest.raises(PeerRefused) as caught:
        store.verify(VID, 1)
    assert (caught.value.reason, caught.value.retryable) == (RefusalReason.BUSY, True)
    monkeypatch.undo()

    def stat(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        with pytest.raises(ShardDamaged, match="Structure needs cleaning"), ShardReaders(store).borrow(VID, 1):
            pass
