"""Which checkpoints of a run are no good any more, and how they are set aside so that training resumes from one that is (R8).

======================  ===========================================================================================
verdict                 what it is
======================  ===========================================================================================
complete                `checkpoints` finds nothing missing, and all its bytes can be had
incomplete              it never will be: a saver did not finish it, or its bytes are lost, damaged, or those of an
                        earlier save, which a file of several can't have alone
saving                  somebody writes to it, or did a short time ago: it may become complete
unknown                 a node that is away has bytes of it, and may come back
======================  ===========================================================================================

Set aside is what is incomplete: renamed, each checkpoint as a whole, and nothing is deleted. What a saver keeps beside its
checkpoints to say which is the newest follows: the file `latest` of DeepSpeed, `latest_checkpointed_iteration.txt` of Megatron,
and links. That is changed first, so that a command that is cut off leaves nothing that leads nowhere.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckptfs.fs.checkpoints import Checkpoint, by_run

QUIET_SECONDS = 600.0
"""A checkpoint that was changed less than this ago may still be being saved, by a rank that pauses between two files."""
SET_ASIDE = (".ckptfs", "set-aside")
TRACKER_SIZE_MAX = 4096

TRACKERS: dict[str, Callable[[Checkpoint], str | None]] = {
    "latest": lambda checkpoint: os.path.basename(checkpoint.path),
    "latest_checkpointed_iteration.txt": lambda checkpoint: None if checkpoint.step is None else str(checkpoint.step),
}
"""Files beside checkpoints that name the newest one, by their names: what each has in it then."""


class FileState(NamedTuple):
    """A file's place on the ladder, whether it shows older content than was saved, and the nodes that are away with its bytes."""

    state: str
    is_rolled_back: bool = False
    away: tuple[str, ...] = ()


class Judged(NamedTuple):
    """`why` it is not complete; empty if it is."""

    checkpoint: Checkpoint
    verdict: str
    why: str = ""


class Tracker(NamedTuple):
    """What names the newest checkpoint, and names one that goes. `becomes` is its text, or where it leads; None: it goes too."""

    path: str
    is_link: bool
    becomes: str | None


class RunPlan(NamedTuple):
    """What is to be done in one run. `newest` is the complete checkpoint training resumes from; `refused`: why nothing is."""

    run: str
    newest: Checkpoint | None
    aside: tuple[Judged, ...]
    left: tuple[Judged, ...]
    trackers: tuple[Tracker, ...]
    refused: str = ""


def judge(checkpoint: Checkpoint, states: Mapping[int, FileState], now_ns: int, quiet_seconds: float = QUIET_SECONDS) -> Judged:
    """The verdict, from what is known of its files by their inodes."""
    problem, unknown = checkpoint.problem, ""
    for file in checkpoint.files:
        known = states.get(file.ino)
        if known is None:
            continue  # deleted meanwhile
        if known.state == "open":
            return Judged(checkpoint, "saving", f"{file.path} is being written")
        if known.state == "lost":
            problem = problem or f"{file.path} is lost"
        elif known.state == "damaged":
            problem = problem or f"{file.path} was damaged before it was protected"
        elif known.is_rolled_back and len(checkpoint.files) > 1:
            problem = problem or f"{file.path} shows what an earlier save wrote: the newer content is lost"
        elif known.state == "unreachable":
            unknown = unknown or f"{file.path} can't be read while {', '.join(known.away) or 'nodes'} are away"
    if problem:
        age_seconds = (now_ns - checkpoint.mtime_ns) / 1e9
        if age_seconds < quiet_seconds:
            return Judged(checkpoint, "saving", f"{problem}; it was changed {max(0.0, age_seconds):.0f} s ago")
        return Judged(checkpoint, "incomplete", problem)
    return Judged(checkpoint, "unknown", unknown) if unknown else Judged(checkpoint, "complete")


def plan(judged: Iterable[Judged], *, even_the_last: bool = False) -> list[RunPlan]:
    """What is to be done, run by run; nothing where no complete checkpoint would be left, except with `even_the_last`.

    Reads trackers and links in the runs' directories.
    """
    by_path = {one.checkpoint.path: one for one in judged}
    plans = []
    for run, checkpoints in by_run([one.checkpoint for one in by_path.values()]):
        ones = [by_path[checkpoint.path] for checkpoint in checkpoints]
        newest = next((one.checkpoint for one in ones if one.verdict == "complete"), None)
        aside = tuple(one for one in ones if one.verdict == "incomplete")
        left = tuple(one for one in ones if one.verdict in ("saving", "unknown"))
        refused = ""
        if aside and newest is None and not even_the_last:
            refused = "no complete checkpoint would be left, and training would begin anew"
        trackers = () if refused else tuple(_trackers(run, [one.checkpoint for one in aside], newest))
        plans.append(RunPlan(run, newest, aside, left, trackers, refused))
    return plans


def _trackers(run: str, aside: Sequence[Checkpoint], newest: Checkpoint | None) -> Iterable[Tracker]:
    gone = {os.path.realpath(one.path) for one in aside}
    for name, text_of in TRACKERS.items():
        path = os.path.join(run, name)
        if os.path.isfile(path) and not os.path.islink(path) and aside:
            text = _text(path)
            if text is None or text in {text_of(one) for one in aside}:
                yield Tracker(path, False, None if newest is None else text_of(newest))
    for name in sorted(os.listdir(run)) if aside else ():
        path = os.path.join(run, name)
        if os.path.islink(path) and os.path.realpath(path) in gone:
            yield Tracker(path, True, None if newest is None else os.path.basename(newest.path))


def _text(path: str) -> str | None:
    """What a tracker says; None where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(TRACKER_SIZE_MAX).strip()
    except OSError:
        return None


def place_for(mountpoint: Path) -> Path:
    """A new directory for what is set aside now. Raises `OSError`."""
    directory = mountpoint.joinpath(*SET_ASIDE)
    directory.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for number in range(1000):
        with contextlib.suppress(FileExistsError):
            place = directory / (f"{stamp}-{number}" if number else stamp)
            place.mkdir()
            return place
    raise FileExistsError(f"{directory} has a thousand of this second")


def carry_out(run_plan: RunPlan, mountpoint: Path, place: Path) -> list[tuple[Judged, str]]:
    """Change what names the newest, then set aside what is incomplete; returns where each is now. Raises `OSError`.

    Given again after it was cut off it goes on with what is left.
    """
    for tracker in run_plan.trackers:
        old = _there(place, mountpoint, tracker.path)
        if tracker.becomes is None:
            os.rename(tracker.path, old)
            continue
        new = f"{tracker.path}.ckptfs-new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        if tracker.is_link:
            os.symlink(tracker.becomes, new)
        else:
            with open(new, "w", encoding="utf-8") as file:
                file.write(tracker.becomes)
                file.flush()
                os.fsync(file.fileno())
            os.link(tracker.path, old)
        os.rename(new, tracker.path)
    return [(one, _set_aside(one.checkpoint.path, mountpoint, place)) for one in run_plan.aside]


def _set_aside(path: str, mountpoint: Path, place: Path) -> str:
    there = _there(place, mountpoint, path)
    os.rename(path, there)
    return there


def _there(place: Path, mountpoint: Path, path: str) -> str:
    there = place / os.path.relpath(path, mountpoint)
    there.parent.mkdir(parents=True, exist_ok=True)
    return str(there)
