"""`ckptfs rollback`: which checkpoints are set aside, and what names the newest one afterwards. In a plain directory."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.fs.checkpoints import find_checkpoints
from ckptfs.fs.rollback import FileState, RunPlan, carry_out, judge, place_for, plan
from ckptfs.fs.status import walk_files

Planned = Callable[..., list[RunPlan]]

OLD_NS = time.time_ns() - 3600 * 10**9


def make(top: Path, *names: str, age_ns: int = OLD_NS) -> None:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        os.utime(path, ns=(age_ns, age_ns))


@pytest.fixture
def planned(tmp_path: Path) -> Planned:
    """Plans for what is in the directory; files are protected, but for those in `states`, by their names."""

    def planned(states: dict[str, FileState] | None = None, *, force: bool = False) -> list[RunPlan]:
        by_inode = {os.stat(tmp_path / name).st_ino: state for name, state in (states or {}).items()}
        files = list(walk_files(tmp_path))
        known = {ino: by_inode.get(ino, FileState("protected")) for ino, _, _ in files}
        found = find_checkpoints(str(tmp_path), files)
        return plan([judge(one, known, time.time_ns()) for one in found], even_the_last=force)

    return planned


def names(top: Path, run_plan: RunPlan) -> tuple[str | None, list[str], list[str]]:
    """The newest complete one, and what is set aside and not touched."""
    newest = None if run_plan.newest is None else os.path.relpath(run_plan.newest.path, top)
    aside = [os.path.relpath(one.checkpoint.path, top) for one in run_plan.aside]
    return newest, aside, [os.path.relpath(one.checkpoint.path, top) for one in run_plan.left]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (FileState("protected"), ("run/step-2", [], [])),
        (FileState("local"), ("run/step-2", [], [])),
        (FileState("degraded"), ("run/step-2", [], [])),
        (FileState("lost"), ("run/step-1", ["run/step-2"], [])),
        (FileState("damaged"), ("run/step-1", ["run/step-2"], [])),
        (FileState("protected", is_rolled_back=True), ("run/step-1", ["run/step-2"], [])),
        (FileState("open"), ("run/step-1", [], ["run/step-2"])),
        (FileState("unreachable", away=("node-3",)), ("run/step-1", [], ["run/step-2"])),
    ],
)
def test_a_checkpoint_is_as_good_as_its_worst_file(
    tmp_path: Path, planned: Planned, state: FileState, expected: tuple[str, list[str], list[str]]
) -> None:
    make(tmp_path, "run/step-1/a", "run/step-1/b", "run/step-2/a", "run/step-2/b")
    (run_plan,) = planned({"run/step-2/b": state})
    assert names(tmp_path, run_plan) == expected


def test_a_single_file_that_shows_an_earlier_save_is_that_save(tmp_path: Path, planned: Planned) -> None:
    make(tmp_path, "run/last.pt")
    (run_plan,) = planned({"run/last.pt": FileState("protected", is_rolled_back=True)})
    assert names(tmp_path, run_plan) == ("run/last.pt", [], [])


def test_what_may_still_be_saved_is_not_touched(tmp_path: Path, planned: Planned) -> None:
    make(tmp_path, "run/checkpoint-1/a", "run/tmp-checkpoint-2/a")
    make(tmp_path, "run/tmp-checkpoint-3/a", age_ns=time.time_ns() - 60 * 10**9)
    (run_plan,) = planned({"run/tmp-checkpoint-3/a": FileState("lost")})
    assert names(tmp_path, run_plan) == ("run/checkpoint-1", ["run/tmp-checkpoint-2"], ["run/tmp-checkpoint-3"])


def test_the_last_one_stays(tmp_path: Path, planned: Planned) -> None:
    make(tmp_path, "run/step-1/a")
    (run_plan,) = planned({"run/step-1/a": FileState("lost")})
    assert run_plan.refused
    (tmp_path / "run/latest").write_text("step-1")
    (forced,) = planned({"run/step-1/a": FileState("lost")}, force=True)
    assert not forced.refused
    carry_out(forced, tmp_path, place_for(tmp_path))
    assert os.listdir(tmp_path / "run") == []


def test_what_names_the_newest_names_one_that_is_there(tmp_path: Path, planned: Planned) -> None:
    make(tmp_path, "a/global_step1/model.pt", "a/global_step20/model.pt", "b/iter_0000010/model.pt", "b/iter_0000020/model.pt")
    make(tmp_path, "c/step-1.ckpt", "c/step-2.ckpt", "d/step-1/x", "d/step-2/x")
    (tmp_path / "a/latest").write_text("global_step20")
    (tmp_path / "b/latest_checkpointed_iteration.txt").write_text("20\n")
    (tmp_path / "c/last.ckpt").symlink_to("step-2.ckpt")
    (tmp_path / "d/latest").write_text("step-1")  # as somebody chose it
    lost = ("a/global_step20/model.pt", "b/iter_0000020/model.pt", "c/step-2.ckpt", "d/step-2/x")
    plans = planned(dict.fromkeys(lost, FileState("lost")))
    place = place_for(tmp_path)
    for run_plan in plans:
        carry_out(run_plan, tmp_path, place)
    assert (tmp_path / "a/latest").read_text() == "global_step1"
    assert (tmp_path / "b/latest_checkpointed_iteration.txt").read_text() == "10"
    assert os.readlink(tmp_path / "c/last.ckpt") == "step-1.ckpt"
    assert (tmp_path / "d/latest").read_text() == "step-1"
    for name in lost:
        assert (place / name).read_bytes() == b"x"
        assert not (tmp_path / name).exists()
    assert (place / "a/latest").read_text() == "global_step20"
    assert [path for path in tmp_path.rglob("*") if path.name.endswith("ckptfs-new")] == []


def test_a_command_that_was_cut_off_is_given_again(tmp_path: Path, planned: Planned) -> None:
    make(tmp_path, "run/step-1/a", "run/step-2/a")
    (tmp_path / "run/latest").write_text("step-2")
    (tmp_path / "run/latest.ckptfs-new").write_text("st")
    (run_plan,) = planned({"run/step-2/a": FileState("lost")})
    carry_out(run_plan._replace(aside=()), tmp_path, place_for(tmp_path))  # cut off here
    assert (tmp_path / "run/latest").read_text() == "step-1"
    (run_plan,) = planned({"run/step-2/a": FileState("lost")})
    carry_out(run_plan, tmp_path, place_for(tmp_path))
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step-1"]
