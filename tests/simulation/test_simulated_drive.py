"""What the simulated drives leave after a power cut, and what the simulation lets a name show then."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from promises import Known, Saved, Shows, grown, part_of
from simulated_drive import PAGE, Drive
from virtual_machine import Machine


def _survivors(directory: Path, after_sync: Callable[[Drive, Path], None], synced: bytes) -> set[bytes]:
    """What 50 power cuts leave of a file that was `synced` with its name and changed since."""
    found = set()
    for chance in range(50):
        root = directory / str(chance)
        drive = Drive(Machine(0, root))
        for area in ("segments/of", "shards", "copies"):
            (root / area).mkdir(parents=True)
        path = root / "segments/of/one"
        path.write_bytes(synced)
        for inside in (path, path.parent, path.parent.parent):
            descriptor = os.open(inside, os.O_RDONLY)
            drive.sync(descriptor)
            os.close(descriptor)
        after_sync(drive, path)
        drive.cut_power(Random(chance))
        found.add(path.read_bytes())
    return found


def test_a_drive_that_was_taken_out_still_has_what_was_synced_to_it(tmp_path: Path) -> None:
    machine = Machine(0, tmp_path / "first")
    drive = Drive(machine)
    path = machine.directory / "shards" / "one"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"kept")
    for inside in (path, path.parent, path.parent.parent):
        descriptor = os.open(inside, os.O_RDONLY)
        drive.sync(descriptor)
        os.close(descriptor)
    machine.directory = tmp_path / "second"
    assert drive.synced_content(path.stat().st_ino) == b"kept"
    assert drive.is_name_safe(os.fspath(path))


def test_what_a_truncation_cut_off_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    old, new = b"o" * 20_000, b"n" * 10_900

    def write_anew(drive: Drive, path: Path) -> None:
        drive.truncating(os.fspath(path), 0)
        path.write_bytes(new)

    found = _survivors(tmp_path, write_anew, old)
    assert {old, new} < found
    assert all(one == old or part_of(new).allows(one) for one in found), sorted(len(one) for one in found)


def test_no_file_gets_longer_than_it_was_by_a_power_cut(tmp_path: Path) -> None:
    old, new = b"o" * 1_900, b"o" * 1_900 + b"n" * 9_000

    def append(_: Drive, path: Path) -> None:
        path.write_bytes(new)

    found = _survivors(tmp_path, append, old)
    assert {old, new} < found
    assert {len(one) for one in found} == {len(old), len(new)}
    assert all(grown(old, new).allows(one) for one in found)


def test_part_of_a_content_is_nothing_else() -> None:
    content, stored = b"a" * PAGE + b"b" * 900, b"c" * (PAGE + 900)
    shows = part_of(content)
    assert all(
        shows.allows(one) for one in (None, b"", content, content[:700], bytes(PAGE) + b"b" * 900, content[:-400] + bytes(400))
    )
    assert not any(shows.allows(one) for one in (stored, stored[:700], content + b"b", content[:PAGE] + stored[PAGE:]))
    assert part_of(content, [stored]).allows(content[:PAGE] + stored[PAGE:])


def test_what_a_name_may_have_shown_before_it_was_saved_is_shown_again_after_a_power_cut() -> None:
    known, first, second = Known(), b"first" * 100, b"second" * 100
    known.settled(Saved(Shows(first), 0))
    known.power_was_cut(0)  # it may have got to the drive all the same, and is local since
    known.doubted(part_of(second))
    known.settled(Saved(Shows(second), 0))
    assert not known.allows(first)
    known.power_was_cut(0)
    assert known.allows(first)
    assert known.allows(None)
    known.settled(Saved(Shows(second), 0, True))
    known.power_was_cut(0)
    assert not known.allows(first)


def test_a_renamed_file_may_show_what_it_replaced_or_what_it_had_itself_after_a_power_cut() -> None:
    known, here, moved, earlier = Known(), b"here" * 100, b"moved" * 100, b"earlier" * 100
    known.settled(Saved(Shows(here), 1, True))
    known.settled(Saved(Shows(moved), 0))
    known.may_fall_back_to([Saved(Shows(None)), Saved(Shows(earlier), 0, True)])
    assert not known.allows(here)
    known.power_was_cut(0)
    assert all(known.allows(one) for one in (here, moved, earlier, None))
    assert not known.allows(b"else")
