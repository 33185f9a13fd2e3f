"""What a killed mount process left is found again; after a power cut only what was synced counts."""

import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import trio
import trio.testing

from ckptfs.cache import refusal_mark
from ckptfs.cache.catalog_format import VersionState, inode_key, version_key
from ckptfs.cache.catalog_sqlite import SqliteCatalog
from ckptfs.cache.errors import NoSuchName
from ckptfs.cache.ids import ROOT_INODE, InodeNumber, new_segment_id
from ckptfs.cache.mount_db import BOOT_FACT, FileState
from ckptfs.fs import fuse_format as fuse
from ckptfs.fs import last_use
from ckptfs.fs.fuse_format import Opcode, SetattrField
from ckptfs.fs.ghost_handles import FIRST_LOOK_SECONDS, close_ghosts
from ckptfs.fs.kernel_use import Use
from ckptfs.fs.open_files import Lane

StartNode = Callable[..., Awaitable[Any]]
ROOT = int(ROOT_INODE)


async def _killed(start_node: StartNode, node: Any, *, power_cut: bool = False) -> Any:
    """The node's next life."""
    if power_cut:
        node.database.set_fact(BOOT_FACT, b"another boot")
    node.kill()
    return await start_node()


async def not_asked(inos: Sequence[InodeNumber]) -> dict[InodeNumber, Use]:
    raise AssertionError(f"nothing of {inos} is served")


async def test_handles_files_and_bytes_are_there_again(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"before")
    node = await _killed(start_node, node)
    assert await node.read(fh) == b"before"
    assert await node.write(fh, b"after", 6) == 5
    second = await node.open(ino)
    assert second != fh
    await node.release(fh, second)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"beforeafter"


async def test_handle_numbers_are_never_used_again(start_node: StartNode) -> None:
    node = await start_node()
    given = set()
    for life in range(3):
        for number in range(3):
            _, fh = await node.create(b"%d-%d" % (life, number))
            given.add(fh)
        node = await _killed(start_node, node)
    assert len(given) == 9


async def test_what_was_closed_settles_after_the_kill(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    await node.release(fh)
    node = await _killed(start_node, node)
    assert node.settler.waiting_count == 1
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert node.database.file(InodeNumber(ino)).state is FileState.LOCAL


async def test_a_version_that_became_local_just_before_the_kill_waits_for_protection(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    row = node.database.file(InodeNumber(ino))
    node.database.put_file(row._replace(state=FileState.OPEN, size=0))  # as before the database was told
    node = await _killed(start_node, node)
    assert node.database.file(InodeNumber(ino)) == row
    assert len(list(node.open_files)) == 0


async def test_a_reader_keeps_its_handle(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    fh = await node.open(ino)
    node = await _killed(start_node, node)
    assert await node.read(fh) == b"content"
    await node.release(fh)
    assert len(list(node.open_files)) == 0


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("how", ["unlink", "rename over"])
async def test_a_nameless_file_in_use_keeps_its_bytes_and_its_record(start_node: StartNode, how: str, sealed: bool) -> None:
    node = await start_node()
    if sealed:
        ino = await node.save(b"file", b"content")
        fh = await node.open(ino)
    else:
        ino, fh = await node.create(b"file", mode=0o100604)
        await node.write(fh, b"content")
    before = await node.getattr(ino)
    if how == "unlink":
        await node.unlink(b"file")
    else:
        other, writing = await node.create(b"other")  # not local yet: it may have to fall back to what it replaced
        await node.rename(b"other", b"file")
    node = await _killed(start_node, node)
    assert await node.read(fh) == b"content"
    after = await node.getattr(ino)
    assert (after.nlink, after.size, after.mode) == (0, 7, before.mode)
    await node.release(fh)
    if how == "rename over":
        await node.write(writing, b"new")
        await node.release(writing)
        await node.settle()
        assert await node.content(other) == b"new"
    await node.settle()
    assert node.segment_count() == (1 if how == "rename over" else 0)


async def test_a_nameless_file_s_changes_are_kept(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.unlink(b"file")
    await node.ask(Opcode.SETXATTR, ino, fuse.SETXATTR_IN.pack(1, 0, 0, 0) + b"user.x\0v")
    node = await _killed(start_node, node)
    assert await node.ask(Opcode.GETXATTR, ino, fuse.GETXATTR_IN.pack(10, 0) + b"user.x\0") == b"v"
    await node.release(fh)


async def test_a_nameless_file_whose_last_handle_was_closed_goes(start_node: StartNode) -> None:
    node = await start_node()
    _, fh = await node.create(b"file")
    await node.unlink(b"file")
    node.database.remove_handle(fh)  # the kill came before the segment was removed
    node = await _killed(start_node, node)
    await node.settle()
    assert node.segment_count() == 0
    assert node.database.files() == []


async def test_a_file_opened_again_just_before_the_kill_keeps_its_bytes(start_node: StartNode) -> None:
    """The catalog has the new version in the old segment, `mount.db` still the old version, which is gone."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=None)
    node = await _killed(start_node, node)
    await node.settle()
    assert await node.content(ino) == b"content"
    assert await node.state(ino) is VersionState.LOCAL
    assert node.segment_count() == 1


async def test_times_outlive_a_kill_in_the_middle_of_opening_the_file_again(start_node: StartNode) -> None:
    """They stand in the record only since the file is local; once it is written again, its segment's times are the file's."""
    node = await start_node()
    ino = await node.save(b"file", b"content")
    body = fuse.SETATTR_IN.pack(SetattrField.MTIME, 0, 0, 0, 0, 0, 1000, 0, 0, 5, 0, 0, 0, 0, 0, 0)
    await node.ask(Opcode.SETATTR, ino, body)
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=None)
    node = await _killed(start_node, node)
    assert (await node.getattr(ino)).mtime_ns == 1000 * 10**9 + 5
    await node.settle()
    assert (await node.getattr(ino)).mtime_ns == 1000 * 10**9 + 5


async def test_a_file_begun_anew_just_before_the_kill_shows_what_it_had(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=new_segment_id())
    node = await _killed(start_node, node)
    assert await node.content(ino) == b"content"
    assert (await node.lookup(ROOT, b"file")).size == 7


async def test_a_missing_segment_drops_the_version_and_not_the_file(start_node: StartNode) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    await node.release(fh)
    row = node.database.file(InodeNumber(ino))
    os.unlink(node.segments.path_of(row.segment))
    node = await _killed(start_node, node)
    assert await node.content(ino) == b"content"


# Power cuts


async def test_after_a_power_cut_what_was_never_synced_is_gone(start_node: StartNode) -> None:
    node = await start_node()
    _, fh = await node.create(b"new")
    await node.write(fh, b"lost")
    node = await _killed(start_node, node, power_cut=True)
    await node.settle()
    assert await node.errno(node.lookup(ROOT, b"new")) == "ENOENT"
    assert node.segment_count() == 0


@pytest.mark.parametrize("how", ["truncated", "renamed over"])
async def test_after_a_power_cut_a_name_shows_what_it_had(start_node: StartNode, how: str) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"old")
    if how == "truncated":
        fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    else:
        _, fh = await node.create(b"temporary")
    await node.write(fh, b"new content")
    if how == "renamed over":
        await node.rename(b"temporary", b"file")
    node = await _killed(start_node, node, power_cut=True)
    await node.settle()
    shown = await node.lookup(ROOT, b"file")
    assert shown.size == 3
    assert await node.content(shown.ino) == b"old"


async def test_after_a_power_cut_what_was_rewritten_and_not_synced_shows_its_older_content_which_waits_again(
    start_node: StartNode,
) -> None:
    """No program has it open: so it is the row in `mount.db` that tells of the version to be dropped."""
    node = await start_node()
    ino = await node.save(b"file", b"old")
    before = node.database.file(InodeNumber(ino))
    fh = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    await node.write(fh, b"new content")
    await node.release(fh)
    node = await _killed(start_node, node, power_cut=True)
    assert (await node.lookup(ROOT, b"file")).size == 3
    assert await node.content(ino) == b"old"
    assert await node.state(ino) is VersionState.LOCAL
    after = node.database.file(InodeNumber(ino))
    assert (after.vid, after.state, after.size) == (before.vid, FileState.LOCAL, 3)


async def test_after_a_power_cut_that_took_the_removal_of_a_name_its_file_is_sealed(start_node: StartNode) -> None:
    """`mount.db` has got to the drive further than the catalog: it says that the file has no name any more."""
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"synced")
    await node.fsync(fh)
    row = node.database.file(InodeNumber(ino))
    node.database.put_file(row._replace(state=FileState.ORPHAN))
    node.database.forget_handles()
    node = await _killed(start_node, node, power_cut=True)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"synced"
    assert node.database.file(InodeNumber(ino)).state is FileState.LOCAL


@pytest.mark.parametrize("links", [1, 2])
async def test_what_was_synced_gives_way_to_nothing_less(start_node: StartNode, links: int) -> None:
    """What is open can't be fallen back to, so what replaces it is synced; unless another name keeps it."""
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"synced")
    await node.fsync(fh)
    if links == 2:
        await node.ask(Opcode.LINK, ROOT, fuse.LINK_IN.pack(ino) + b"other\0")
    _, writing = await node.create(b"temporary")
    await node.write(writing, b"never synced")
    await node.rename(b"temporary", b"file")
    node.database.forget_handles()
    node = await _killed(start_node, node, power_cut=True)
    if links == 1:
        assert await node.content((await node.lookup(ROOT, b"file")).ino) == b"never synced"
    else:
        assert await node.errno(node.lookup(ROOT, b"file")) == "ENOENT"
        assert await node.content(ino) == b"synced"


async def test_after_a_power_cut_what_was_synced_is_there(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"synced")
    await node.fsync(fh)
    node = await _killed(start_node, node, power_cut=True)
    node.database.forget_handles()
    node.kill()
    node = await start_node()
    await node.settle()
    assert await node.content(ino) == b"synced"
    assert await node.state(ino) is VersionState.LOCAL


async def test_a_power_cut_is_one_only_once(start_node: StartNode) -> None:
    node = await start_node()
    node = await _killed(start_node, node, power_cut=True)
    _, fh = await node.create(b"file")
    await node.write(fh, b"x")
    node = await _killed(start_node, node)
    assert await node.read(fh) == b"x"


@pytest.mark.parametrize("lost", ["database", "rows"])
async def test_rows_that_are_lost_are_made_again_from_the_catalog(start_node: StartNode, lost: str) -> None:
    node = await start_node()
    local = await node.save(b"local", b"waits for protection")
    synced, fh = await node.create(b"synced")
    await node.write(fh, b"content")
    await node.fsync(fh)
    node.database.forget_handles()
    if lost == "rows":  # what a power cut may do to the newest of them
        node.database.remove_files([InodeNumber(local), InodeNumber(synced)])
        node.database.set_fact(BOOT_FACT, b"another boot")
    node.kill()
    if lost == "database":
        for path in node.store.path.glob("mount.db*"):
            path.unlink()
    node = await start_node()
    assert node.database.file(InodeNumber(local)).state is FileState.LOCAL
    await node.settle()
    assert await node.state(synced) is VersionState.LOCAL
    assert {row.ino for row in node.database.files()} == {local, synced}
    assert await node.content(local) == b"waits for protection"
    assert await node.content(synced) == b"content"


@pytest.mark.parametrize("power_cut", [False, True])
async def test_a_start_looks_at_what_was_in_flight_and_not_at_what_is_stored(
    start_node: StartNode, power_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    for number in range(200):
        _, fh = await node.create(b"%d" % number)
        await node.release(fh)
    await node.settle()
    sweep = node.sweep()
    await sweep.sweep_rows()
    ino, fh = await node.create(b"in flight")
    await node.write(fh, b"content")
    await node.fsync(fh)
    await sweep.sweep_rows()
    node.database.forget_handles()
    looked: list[bytes] = []
    get, range_ = SqliteCatalog.get, SqliteCatalog.range

    async def counted_get(self: SqliteCatalog, key: bytes) -> Any:
        looked.append(key)
        return await get(self, key)

    async def counted_range(self: SqliteCatalog, prefix: bytes, **more: Any) -> Any:
        entries = await range_(self, prefix, **more)
        looked.extend(entry.key for entry in entries)
        return entries

    monkeypatch.setattr(SqliteCatalog, "get", counted_get)
    monkeypatch.setattr(SqliteCatalog, "range", counted_range)
    node = await _killed(start_node, node, power_cut=power_cut)
    assert len(looked) < 30
    monkeypatch.undo()
    await node.settle()
    assert await node.content(ino) == b"content"
    assert await node.state(ino) is VersionState.LOCAL
    assert len(node.database.files()) == 201


async def test_rows_of_files_removed_meanwhile_go_with_their_segments(start_node: StartNode) -> None:
    node = await start_node()
    await node.save(b"file", b"content")
    await node.namespace.unlink(InodeNumber(ROOT), b"file")  # the kill came before anything else was done
    node = await _killed(start_node, node)
    await node.settle()
    assert node.segment_count() == 0
    assert node.database.files() == []


async def test_a_segment_that_was_to_be_removed_goes_after_the_kill(start_node: StartNode) -> None:
    node = await start_node()
    await node.save(b"file", b"content")
    await node.unlink(b"file")
    node = await _killed(start_node, node)
    sweep = node.sweep()
    assert await sweep.sweep_segments() == 1
    await node.settle()
    assert node.segment_count() == 0


async def test_the_sweep_leaves_what_is_open_local_or_nameless(start_node: StartNode) -> None:
    node = await start_node()
    await node.save(b"local", b"content")
    await node.settle()
    _, opened = await node.create(b"open")
    _, nameless = await node.create(b"nameless")
    await node.unlink(b"nameless")
    node = await _killed(start_node, node)
    sweep = node.sweep()
    assert await sweep.sweep_segments() == 0
    await node.release(opened, nameless)
    assert node.segment_count() == 3


async def test_an_orphan_s_record_that_was_never_written_is_made_up(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    await node.namespace.unlink(InodeNumber(ROOT), b"file")
    node = await _killed(start_node, node)
    assert await node.read(fh) == b"content"
    assert (await node.getattr(ino)).nlink == 0
    await node.release(fh)


async def test_a_handle_the_kernel_never_got_does_not_keep_its_file_open(
    start_node: StartNode, autojump_clock: trio.testing.MockClock
) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    (row,) = node.database.handles()
    node.database.put_handle(row._replace(lane=Lane.PASSTHROUGH))
    node = await _killed(start_node, node)
    with open(node.segments.path_of(node.open_files.get(InodeNumber(ino)).segment), "ab"):  # a program that does have it open
        with trio.move_on_after(FIRST_LOOK_SECONDS + 1):
            await close_ghosts(node.open_files, node.files.let_go, not_asked)
        assert len(node.open_files.restored()) == 1
    with trio.fail_after(60):
        await close_ghosts(node.open_files, node.files.let_go, not_asked)
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"content"


@pytest.mark.parametrize(("used", "removed"), [(Use.READING, False), (Use.NONE, True)])
async def test_in_the_served_lane_the_kernel_is_asked_who_has_the_file(
    start_node: StartNode, autojump_clock: trio.testing.MockClock, used: Use, removed: bool
) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    if removed:
        await node.unlink(b"file")
    node = await _killed(start_node, node)
    use: dict[InodeNumber, Use] = {}

    async def ask(inos: Sequence[InodeNumber]) -> dict[InodeNumber, Use]:
        assert inos == [ino]
        return use

    for answer in ({}, {InodeNumber(ino): Use.WRITING}):  # it can't be told; somebody can write
        use = answer
        with trio.move_on_after(FIRST_LOOK_SECONDS + 1):
            await close_ghosts(node.open_files, node.files.let_go, ask)
        assert len(node.open_files.restored()) == 1
    use = {InodeNumber(ino): used}
    with trio.fail_after(60):
        await close_ghosts(node.open_files, node.files.let_go, ask)
    await node.settle()
    assert len(node.open_files) == 0
    assert node.segment_count() == (not removed)
    if not removed:
        assert await node.state(ino) is VersionState.LOCAL


async def test_a_handle_for_reading_the_kernel_never_got_does_not_keep_a_removed_file(
    start_node: StartNode, autojump_clock: trio.testing.MockClock
) -> None:
    node = await start_node()
    ino = await node.save(b"file", b"content")
    await node.open(ino)
    (row,) = node.database.handles()
    node.database.put_handle(row._replace(lane=Lane.PASSTHROUGH))
    await node.unlink(b"file")
    node = await _killed(start_node, node)
    with open(node.segments.path_of(node.open_files.get(InodeNumber(ino)).segment), "rb"):  # another program
        with trio.move_on_after(FIRST_LOOK_SECONDS + 1):
            await close_ghosts(node.open_files, node.files.let_go, not_asked)
        assert len(node.open_files.restored()) == 1
    with trio.fail_after(60):
        await close_ghosts(node.open_files, node.files.let_go, not_asked)
    await node.settle()
    assert (node.segment_count(), node.database.files(), len(node.open_files)) == (0, [], 0)


async def test_a_sync_that_failed_stays_failed_after_a_kill(start_node: StartNode) -> None:
    """The kernel has marked the pages clean: the next process's sync would succeed, and so would the next one's seal."""
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"content")
    node.open_files.sync_failed(node.open_files.get(InodeNumber(ino)))
    assert await node.errno(node.fsync(fh)) == "EIO"
    for _ in range(2):
        node = await _killed(start_node, node)
        assert await node.errno(node.fsync(fh)) == "EIO"
    await node.release(fh)
    await node.settle()
    assert await node.state(ino) is VersionState.OPEN
    again = await node.open(ino, os.O_WRONLY | os.O_TRUNC)
    assert await node.errno(node.fsync(again)) == "EIO"


async def test_an_id_that_was_given_back_is_not_used_again(start_node: StartNode) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    row = node.database.file(InodeNumber(ino))
    node.database.put_file(row._replace(backing_id=-7))
    await node.release(fh)
    node = await _killed(start_node, node)
    assert node.open_files.get(InodeNumber(ino)).backing_id is None


async def test_a_start_looks_at_what_changed_and_not_at_what_is_stored(
    start_node: StartNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = await start_node()
    for number in range(20):
        await node.save(b"%d" % number, b"content")
    node = await _killed(start_node, node)  # the first one after a start without a database looks at all of them
    await node.sweep().sweep_rows()
    for _ in range(2):
        with caplog.at_level(logging.INFO):
            caplog.clear()
            node = await _killed(start_node, node)
            assert "recovered" not in caplog.text
    # The catalog changed and the process was killed before it could write that down.
    await node.namespace.unlink(InodeNumber(ROOT), b"3")
    ino = (await node.lookup(ROOT, b"4")).ino
    await node.versions.open_for_writing(InodeNumber(ino), truncate_to_new_segment=None)
    with caplog.at_level(logging.INFO):
        caplog.clear()
        node = await _killed(start_node, node)
    assert "recovered files=1 dropped=1 handles=0" in caplog.text
    assert len(node.database.files()) == 19
    await node.settle()
    assert await node.state(ino) is VersionState.LOCAL
    assert await node.content(ino) == b"content"
    assert node.segment_count() == 19


def _lose_database(node: Any) -> None:
    node.kill()
    for path in node.store.path.glob("mount.db*"):
        path.unlink()


async def test_a_clock_set_forwards_is_no_power_cut_when_the_database_is_lost(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that starts in 1970 and learns the time later."""
    node = await start_node()
    with monkeypatch.context() as patch:
        patch.setattr("ckptfs.cache.ids.time.time", lambda: 1e6)
        ino, fh = await node.create(b"file")
        await node.write(fh, b"in the page cache")
    _lose_database(node)
    node = await start_node()
    await node.settle()
    assert await node.content(ino) == b"in the page cache"


async def test_a_clock_set_back_does_not_hide_a_power_cut_when_the_database_is_lost(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    _lose_database(node)
    node.store.boot.write_bytes(b"another boot\n")
    monkeypatch.setattr(last_use, "booted_at_seconds", lambda: 1e6)
    node = await start_node()
    with pytest.raises(NoSuchName):
        await node.namespace.inode(InodeNumber(ino))


async def test_a_clock_set_back_does_not_make_a_new_database_older_than_segments(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog may have been restored with it: what it doesn't know may be the only bytes there are."""
    node = await start_node()
    os.close(node.segments.create(new_segment_id(), InodeNumber(77)))
    _lose_database(node)
    with monkeypatch.context() as patch:
        patch.setattr("ckptfs.cache.mount_db.time.time_ns", lambda: 10**15)
        node = await start_node()
    sweep = node.sweep()
    assert await sweep.sweep_segments() == 0
    assert sweep.kept_count == 1


async def test_where_nothing_says_which_boot_it_was_the_clock_does(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    _lose_database(node)
    node.store.boot.unlink()
    monkeypatch.setattr(last_use, "booted_at_seconds", lambda: time.time() + 100)
    node = await start_node()
    with pytest.raises(NoSuchName):
        await node.namespace.inode(InodeNumber(ino))


async def test_a_file_system_that_refused_writes_and_was_unmounted_is_as_good_as_a_power_cut(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    ino, fh = await node.create(b"file")
    await node.write(fh, b"not synced")
    mark = refusal_mark.RefusalMark(node.store.store_id, node.store.path)
    mark.set()
    node.database.forget_handles()
    node = await _killed(start_node, node)
    inode = await node.namespace.inode(InodeNumber(ino))
    assert inode.open is not None, "it is still mounted, and has them in memory"
    node.kill()
    monkeypatch.setattr(refusal_mark, "mount_id_of", lambda path: 7)
    node = await start_node()
    with pytest.raises(NoSuchName):
        await node.namespace.inode(InodeNumber(ino))
    assert mark.was_unmounted() is None


@pytest.mark.parametrize("power_cut", [False, True])
@pytest.mark.parametrize("kind", ["inode", "version"])
async def test_a_damaged_record_of_one_file_is_no_reason_not_to_start(start_node: StartNode, kind: str, power_cut: bool) -> None:
    node = await start_node()
    ino, fh = await node.create(b"hurt")
    await node.write(fh, b"bytes")
    waiting = await node.save(b"hurt too", b"bytes")
    other, other_fh = await node.create(b"other")
    await node.write(other_fh, b"content")
    for one in (fh, other_fh):
        await node.fsync(one)
    rows = [node.database.file(one) for one in (ino, waiting)]
    with closing(sqlite3.connect(node.kv.path)) as database, database:
        for row in rows:
            key = inode_key(row.ino) if kind == "inode" else version_key(row.vid)
            database.execute("UPDATE kv SET value = x'00' WHERE key = ?", (key,))
    node = await _killed(start_node, node, power_cut=power_cut)
    assert await node.read(other_fh) == b"content"
    assert await node.read(fh) == b"bytes"
    await node.release(other_fh)
    await node.release(fh)
    with trio.fail_after(60):
        while await node.state(other) is not VersionState.LOCAL:
            await node.settle()
            await trio.lowlevel.checkpoint()
    assert [node.database.file(one) is not None for one in (ino, waiting)] == [True, True]
    assert all(os.path.exists(node.segments.path_of(row.segment)) for row in rows)
