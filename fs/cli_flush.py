"""`ckptfs flush`: wait until files have come up the ladder."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.fs.cli_durations import seconds_of
from ckptfs.fs.cli_errors import NotReached, Unreachable, WrongUse
from ckptfs.fs.cli_output import JsonFlag, bytes_progress, console, human_bytes, path_of, print_json
from ckptfs.fs.status import HOPELESS, FileStanding, Place, place_of_path, rank, standing_of_files, walk_files

POLL_SECONDS = 0.1
HURRY_SECONDS = 1.0
"""How often the nodes are told again that somebody waits: what is closed, or was being protected, meanwhile is put off anew."""
TARGETS = ("local", "protected")
SHOWN_MAX = 5


def flush(
    paths: Annotated[list[Path], typer.Argument(parser=path_of, metavar="PATH", help="Files or directories in a mount.")],
    to: Annotated[str, typer.Option("--to", help="The state to wait for: local or protected.")] = "protected",
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="S", help="Give up after that long: 30, 30s, 5m, 1h.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Wait until all files named, or in directories named, are protected. Exit code 1 if the time runs out first."""
    if to not in TARGETS:
        raise WrongUse(f"--to: {' or '.join(TARGETS)}, not {to!r}")
    seconds_max = None if timeout is None else seconds_of("--timeout", timeout)
    started = time.monotonic()
    behind, file_count, size_bytes = wait_until(paths, to, seconds_max, shown=not as_json)
    seconds = time.monotonic() - started
    if as_json:
        print_json(
            {
                "reached": not behind,
                "to": to,
                "files": file_count,
                "bytes": size_bytes,
                "seconds": round(seconds, 3),
                "behind": [{"path": file.path, "state": file.state} for file in behind],
            }
        )
    elif not behind:
        console().print(f"{to}: {human_bytes(size_bytes)} in {file_count} files, after {seconds:.1f} s")
    if behind:
        names = ", ".join(f"{file.path} ({file.state})" for file in behind[:SHOWN_MAX])
        more = f" and {len(behind) - SHOWN_MAX} more" if len(behind) > SHOWN_MAX else ""
        raise NotReached(
            f"not {to} after {seconds:.1f} s: {names}{more}; {_what_to_do(behind)}",
            reported=as_json,
        )


def _what_to_do(behind: Sequence[FileStanding]) -> str:
    states = {file.state for file in behind}
    hints = []
    if not states.isdisjoint(HOPELESS):
        hints.append("what is damaged or lost has to be saved again")
    if "open" in states:
        homes = ", ".join(sorted({file.home for file in behind if file.state == "open" and file.home}))
        hints.append(f"what is open is still being written{homes and ' on '}{homes}, or settles after it: close it there")
    if states - {"open", *HOPELESS}:
        hints.append("`ckptfs status` of the mount shows what holds it up")
    return "; ".join(hints)


def wait_until(
    paths: Sequence[Path], target: str, timeout_seconds: float | None, *, shown: bool
) -> tuple[list[FileStanding], int, int]:
    """Wait for the files there are now; those made later are not waited for, those deleted meanwhile no longer.

    Returns the files still behind (none: reached), how many files there were, and their bytes; early if none of those behind
    can ever reach it.
    """
    waiting: dict[Place, list[tuple[int, str, int]]] = {}
    for path in paths:
        place = place_of_path(path)
        place.ask("mount", {"do": "settle"})  # before the walk, which a dead mount would hold up
        waiting.setdefault(place, []).extend(walk_files(path))
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    count = sum(len({ino for ino, _, _ in files}) for files in waiting.values())
    total = sum(sum({ino: size for ino, _, size in files}.values()) for files in waiting.values())
    with bytes_progress(shown=shown) as progress:
        bar = progress.add_task(f"until {target}", total=total)
        hurry_at = 0.0
        while True:
            behind = []
            is_time = time.monotonic() >= hurry_at
            for place, files in waiting.items():
                late = [file for file in standing_of_files(place, files) if rank(file.state) < rank(target)]
                paths_late = {file.path for file in late}
                waiting[place] = [file for file in files if file[1] in paths_late]
                behind += late
                if late and is_time:
                    _hurry(place, late)
                    hurry_at = time.monotonic() + HURRY_SECONDS
            progress.update(bar, completed=total - sum(file.size_bytes for file in behind))
            if all(file.state in HOPELESS for file in behind) or (deadline is not None and time.monotonic() >= deadline):
                return behind, count, total
            time.sleep(POLL_SECONDS)


def _hurry(place: Place, files: Sequence[FileStanding]) -> None:
    """Somebody waits: what is closed need not wait to see whether it is opened again, nor what was just protected for its next
    turn; here, and on the nodes that have these files."""
    place.ask("mount", {"do": "settle"})
    with contextlib.suppress(Unreachable):  # it is being restarted, and is asked again
        place.ask("agent", {"do": "wake", "urgent": True, "nodes": sorted({file.home for file in files})})
