"""`ckptfs rollback`: set incomplete checkpoints aside, so that training resumes from one that is complete."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptfs.fs.checkpoints import find_checkpoints
from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.rollback import QUIET_SECONDS, SET_ASIDE, FileState, Judged, RunPlan, carry_out, judge, place_for, plan
from ckptfs.fs.status import Place, place_of_path, standing_of_files, walk_files


def rollback(
    directory: Annotated[
        Path, typer.Argument(parser=path_of, metavar="DIR", help="A directory of checkpoints in a mount.", show_default=False)
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Also what was changed in the last ten minutes: nobody is saving any more.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where no complete checkpoint is left.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Set incomplete checkpoints aside, into /.ckptfs/set-aside of the mount. Nothing is deleted.

    Incomplete are those that a saver did not finish, and those with files that are lost, damaged or were rolled back. Exit code 1
    if some could not be decided about, or a run has no complete one.
    """
    place = place_of_path(directory)
    top, mountpoint = Path(os.path.realpath(directory)), Path(os.path.realpath(place.mountpoint))
    plans = plan(_judged(place, top, mountpoint, 0.0 if now else QUIET_SECONDS), even_the_last=force)
    moved: dict[str, str] = {}
    if not dry_run and any(one.aside and not one.refused for one in plans):
        aside = place_for(mountpoint)
        for one in plans:
            if not one.refused:
                moved |= {judged.checkpoint.path: there for judged, there in carry_out(one, mountpoint, aside)}
    document = {"path": str(top), "dry_run": dry_run, "runs": [_described(one, moved) for one in plans]}
    if as_json:
        print_json(document)
    else:
        _print(document)
    refused = [one.run for one in plans if one.refused]
    if refused:
        raise NotReached(
            f"{', '.join(refused)}: no complete checkpoint would be left, and training would begin anew; nothing was changed "
            "there, --force does it all the same",
            reported=as_json,
        )
    if left := sum(len(one.left) for one in plans):
        raise NotReached(
            f"{left} checkpoints were not touched, for they may become complete: end what saves to them, and give --now; for "
            "bytes of nodes that are away wait until those are back, or are declared lost",
            reported=as_json,
        )


def _judged(place: Place, top: Path, mountpoint: Path, quiet_seconds: float) -> list[Judged]:
    own = mountpoint / SET_ASIDE[0]
    if not top.is_dir():
        raise WrongUse(f"{top} is no directory")
    if top.is_relative_to(own):
        raise WrongUse(f"{top} is where ckptfs keeps what it set aside; name a directory of checkpoints")
    files = [file for file in walk_files(top) if not Path(file[1]).is_relative_to(own)]
    checkpoints = find_checkpoints(str(top), files)
    if any(one.path == str(top) for one in checkpoints):
        raise WrongUse(f"{top} is one checkpoint; name the directory it is in, {top.parent}")
    inode_of = {path: ino for ino, path, _ in files}
    inodes_of_checkpoints = {file.ino for one in checkpoints for file in one.files}
    states = {
        inode_of[standing.path]: FileState(standing.state, standing.is_rolled_back, standing.away)
        for standing in standing_of_files(place, [file for file in files if file[0] in inodes_of_checkpoints])
    }
    return [judge(one, states, time.time_ns(), quiet_seconds) for one in checkpoints]


def _described(one: RunPlan, moved: dict[str, str]) -> dict[str, Any]:
    return {
        "run": one.run,
        "resumes_from": None if one.newest is None else os.path.basename(one.newest.path),
        "step": None if one.newest is None else one.newest.step,
        "set_aside": [
            {"path": judged.checkpoint.path, "why": judged.why, "to": moved.get(judged.checkpoint.path)} for judged in one.aside
        ],
        "not_touched": [{"path": judged.checkpoint.path, "verdict": judged.verdict, "why": judged.why} for judged in one.left],
        "changed": [{"path": tracker.path, "to": tracker.becomes} for tracker in one.trackers],
        "refused": one.refused,
    }


def _print(document: dict[str, Any]) -> None:
    out = console()
    for run in document["runs"]:
        for judged in run["set_aside"]:
            word = "would be set aside" if document["dry_run"] or run["refused"] else f"set aside as {judged['to']}"
            out.print(f"{judged['path']}: {judged['why']}; {word}", soft_wrap=True)
        for judged in run["not_touched"]:
            out.print(f"{judged['path']}: {judged['why']}; not touched", soft_wrap=True)
        for tracker in run["changed"]:
            said = "goes with it" if tracker["to"] is None else f"names {tracker['to']}"
            out.print(f"{tracker['path']} {'would be changed: it ' if document['dry_run'] else ''}{said}", soft_wrap=True)
        resumes = run["resumes_from"]
        what = f"training resumes from {resumes}" if resumes else "there is no complete checkpoint"
        out.print(f"{run['run']}: {what}", soft_wrap=True)
    if not document["runs"]:
        out.print(f"{document['path']}: no checkpoints", soft_wrap=True)
