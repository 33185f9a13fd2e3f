"""`ckptfs verify`: have every shard re-read and hashed where it lies, say what is wrong, and have it made right."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptfs.fs.cli_errors import NotReached, Unreachable
from ckptfs.fs.cli_output import JsonFlag, bytes_progress, console, human_bytes, path_of, print_json
from ckptfs.fs.format_checks import check_format
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.mount_table import mount_of
from ckptfs.fs.status import Place, first_that_answers, place_of_path, places_of_cluster, places_of_this_machine, walk_files

FILES_PER_REQUEST = 16
ANSWER_SECONDS = 3600.0
"""One request reads every shard of its files; a slow disk with large files takes long, and a dead agent breaks off at once."""

GOOD = ("ok", "unprotected", "repaired")
"""`unprotected`: there are no shards yet, and its home's segment is right."""

UNKNOWN = "unreachable"
"""Nothing is known to be wrong, but not every holder could be asked."""


def verify(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=path_of, metavar="PATH", help="Files or directories in a mount, or a cluster's directory.", show_default=False
        ),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Decode everything, hash homes' segments and local copies too, and open the formats."),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Make right what is damaged or missing, out of what is right.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Re-read and hash every shard, and what isn't protected yet. Without PATH: everything in the mounts of this machine."""
    results: list[dict[str, Any]] = []
    for place, root in _targets(paths):
        place.ask("mount", {"do": "status"})
        files = list({ino: (ino, path, size) for ino, path, size in walk_files(root)}.values())
        results += _verify_files(place, files, deep=deep, repair=repair, shown=not as_json)
    wrong = [result for result in results if result["result"] not in (*GOOD, UNKNOWN)]
    unknown = [result for result in results if result["result"] == UNKNOWN]
    if as_json:
        print_json({"ok": not wrong and not unknown, "files": results})
    else:
        _print(results)
    if wrong:
        raise NotReached(
            f"{len(wrong)} of {len(results)} files are not as they should be; {_what_to_do(wrong, repaired=repair)}",
            reported=as_json,
        )
    if unknown:
        away = ", ".join(sorted({node for result in unknown for node in result["away"]}))
        raise Unreachable(
            f"{len(unknown)} of {len(results)} files could not be looked at in full, for want of {away or 'their holders'}: "
            "nothing is known to be wrong with them; start what is down, and verify again",
            reported=as_json,
        )


def _what_to_do(wrong: list[dict[str, Any]], *, repaired: bool) -> str:
    """About each kind of fault there is, once."""
    hints = []
    if any(_can_be_repaired(result) for result in wrong):
        hints.append(
            "why they could not be repaired stands with each"
            if repaired
            else "`ckptfs verify --deep --repair` makes right what can be"
        )
    if any(result["result"] == "format" for result in wrong):
        hints.append("what has the wrong format has the bytes that were written: write it again")
    if any(result["result"] != "format" and not _can_be_repaired(result) for result in wrong):
        hints.append("what is lost, or was damaged before it was protected, has to be saved again")
    return "; ".join(hints)


def _can_be_repaired(result: dict[str, Any]) -> bool:
    return result["result"] in ("damaged", "missing") and bool(result["protected"])


def _targets(paths: list[Path] | None) -> list[tuple[Place, Path]]:
    if not paths:
        return [(place, place.mountpoint) for place in places_of_this_machine()]
    found = []
    for path in paths:
        if mount_of(path) is None and LocalCluster.is_one(path):
            place = first_that_answers(places_of_cluster(LocalCluster(path)), "mount")
            if place is None:
                raise Unreachable("no node of this cluster answers; `ckptfs cluster up` starts them")
            found.append((place, place.mountpoint))
        else:
            found.append((place_of_path(path), path))
    return found


def _verify_files(
    place: Place, files: list[tuple[int, str, int]], *, deep: bool, repair: bool, shown: bool
) -> Iterator[dict[str, Any]]:
    with bytes_progress(shown=shown) as progress:
        bar = progress.add_task("verified", total=sum(size for _, _, size in files))
        for start in range(0, len(files), FILES_PER_REQUEST):
            part = files[start : start + FILES_PER_REQUEST]
            request: dict[str, Any] = {"do": "verify", "inos": [ino for ino, _, _ in part], "deep": deep, "repair": repair}
            request["paths"] = [_path_in(place, path) for _, path, _ in part]
            place.ask("agent", {"do": "ping"})  # one that hangs would hold this up for an hour
            answer = place.ask("agent", request, timeout_seconds=ANSWER_SECONDS)
            by_inode = {fact["ino"]: fact for fact in answer["files"]}
            for ino, path, size in part:
                fact = by_inode.get(ino)
                if fact is None or fact["result"] == "gone":
                    continue  # deleted meanwhile
                if deep and fact["result"] in ("ok", "unprotected") and (wrong := check_format(Path(path))):
                    fact = {**fact, "result": "format", "message": wrong}
                yield {"path": path, **fact}
                progress.advance(bar, size)


def _path_in(place: Place, path: str) -> bytes:
    """The path from the mountpoint on, also of one that a link from outside led to."""
    return os.fsencode(os.path.relpath(os.path.realpath(path), os.path.realpath(place.mountpoint)))


def _print(results: list[dict[str, Any]]) -> None:
    out = console()
    counts: dict[str, int] = {}
    for result in results:
        counts[result["result"]] = counts.get(result["result"], 0) + 1
        if result["result"] not in ("ok", "unprotected"):
            named_once = result["result"] == UNKNOWN and result["away"]  # at the end, for all files
            said = "" if named_once else result.get("message")
            out.print(f"{result['result']}: {result['path']}: {said or _shards(result)}", soft_wrap=True)
    total = sum(int(result.get("bytes") or 0) for result in results)
    summary = ", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "no files"
    out.print(f"{summary}{f' ({human_bytes(total)})' if total else ''}")


def _shards(result: dict[str, Any]) -> str:
    parts = [f"{word} shards {result[word]}" for word in ("damaged", "missing", "unreachable", "repaired") if result.get(word)]
    return ", ".join(parts) or f"of its bytes, on {', '.join(result['away']) or 'other nodes'}"
