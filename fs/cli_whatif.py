"""`ckptfs whatif`: what would survive the loss of nodes, where it would be read from, and where training would go on."""

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptfs.fs.checkpoints import Checkpoint, by_run, find_checkpoints
from ckptfs.fs.cli_errors import NotReached, Unreachable, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.cli_status import places_of_one_cluster
from ckptfs.fs.status import INODES_PER_REQUEST, Place, first_that_answers, place_of_path, walk_files

SHOWN_MAX = 20

Fact = dict[str, Any]


def whatif(
    path: Annotated[
        Path | None,
        typer.Argument(parser=path_of, metavar="PATH", help="A file or directory in a mount.", show_default=False),
    ] = None,
    lose: Annotated[str, typer.Option("--lose", metavar="NODE,…", help="The nodes that would be gone.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Say what would survive if these nodes died now. Exit code 1 if anything would not. Without PATH: the whole mount."""
    nodes = sorted({name for name in lose.split(",") if name})
    if not nodes:
        raise WrongUse("--lose: the nodes that would be gone, as `ckptfs status` names them, with commas between them")
    place, top = _target(path)
    files = list(walk_files(top))
    facts, is_assumed = what_if(place, [ino for ino, _, _ in files], nodes)
    document = {**describe(str(top), files, facts, nodes), "assumed": is_assumed}
    if as_json:
        print_json(document)
    else:
        _print(document)
    if document["survive"] < document["files"]:
        gone = document["files"] - document["survive"]
        raise NotReached(f"{gone} of {document['files']} files would not be there without {', '.join(nodes)}", reported=as_json)


def _target(path: Path | None) -> tuple[Place, Path]:
    if path is not None:
        return place_of_path(path), path
    place = first_that_answers(places_of_one_cluster(None, "the PATH of a mount") or [], "mount")
    if place is None:
        raise Unreachable("no node of this machine answers")
    return place, place.mountpoint


def what_if(place: Place, inodes: list[int], nodes: list[str]) -> tuple[dict[int, Fact], bool]:
    """See `what_if.WhatIf.outcomes`; and whether all others counted as up, because the agent that knows does not answer.

    Raises `WrongUse` for a node the cluster doesn't have.
    """
    facts: dict[int, Fact] = {}
    is_assumed = False
    for start in range(0, max(1, len(inodes)), INODES_PER_REQUEST):
        part = inodes[start : start + INODES_PER_REQUEST]
        answer = place.ask("mount", {"do": "what_if", "inos": part, "lose": nodes})
        if unknown := answer["unknown"]:
            raise WrongUse(f"--lose: the cluster has no node {', '.join(unknown)}; its nodes are {', '.join(answer['nodes'])}")
        facts |= {int(ino): fact for ino, fact in answer["files"].items()}
        is_assumed |= bool(answer.get("assumed"))
    return facts, is_assumed


def describe(top: str, files: list[tuple[int, str, int]], facts: dict[int, Fact], nodes: list[str]) -> dict[str, Any]:
    """The document `--json` prints."""
    known = [(ino, path, size) for ino, path, size in {file[0]: file for file in files}.values() if ino in facts]
    survive = [(path, size) for ino, path, size in known if facts[ino]["outcome"] == "survives"]
    sources: Counter[str] = Counter()
    for ino, _, size in known:
        if facts[ino]["outcome"] == "survives":
            sources[_source(facts[ino])] += size
    return {
        "path": top,
        "lose": nodes,
        "files": len(known),
        "bytes": sum(size for _, _, size in known),
        "survive": len(survive),
        "survive_bytes": sum(size for _, size in survive),
        "from": dict(sources.most_common()),
        "not": [{"path": path, "bytes": size, **facts[ino]} for ino, path, size in known if facts[ino]["outcome"] != "survives"],
        "resume": [_resume(run, found, facts) for run, found in by_run(find_checkpoints(top, files))],
    }


def _source(fact: Fact) -> str:
    """Who would give it, in words."""
    if fact["from"] == "home":
        return f"the drive of {fact['nodes'][0]}"
    return f"shards on {', '.join(fact['nodes'])}" if fact["from"] == "shards" else "the catalog"


def _resume(run: str, checkpoints: list[Checkpoint], facts: dict[int, Fact]) -> dict[str, Any]:
    """Of one run: the newest complete checkpoint there is, and the newest that would survive."""
    problems = {one.path: one.problem or _being_written(one, facts) for one in checkpoints}
    complete = [one for one in checkpoints if not problems[one.path]]
    surviving = [one for one in complete if all(facts.get(file.ino, {}).get("outcome") == "survives" for file in one.files)]
    newest, resumes = next(iter(complete), None), next(iter(surviving), None)
    lost = [] if newest is None else [file.path for file in newest.files if facts.get(file.ino, {}).get("outcome") != "survives"]
    return {
        "run": run,
        "newest": None if newest is None else os.path.basename(newest.path),
        "resumes_from": None if resumes is None else os.path.basename(resumes.path),
        "step": None if resumes is None else resumes.step,
        "incomplete": [{"path": path, "why": why} for path, why in problems.items() if why][:SHOWN_MAX],
        "newest_lacks": lost[:SHOWN_MAX],
    }


def _being_written(checkpoint: Checkpoint, facts: dict[int, Fact]) -> str:
    opened = [file.path for file in checkpoint.files if facts.get(file.ino, {}).get("open")]
    return f"{opened[0]} is being written" if opened else ""


def _print(document: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"without {', '.join(document['lose'])}: {document['survive']} of {document['files']} files survive "
        f"({human_bytes(document['survive_bytes'])} of {human_bytes(document['bytes'])})",
        soft_wrap=True,
    )
    if document["assumed"]:
        out.print("the agent that knows which nodes are up does not answer: all others count as up", soft_wrap=True)
    for source, size in document["from"].items():
        out.print(f"read from {source}: {human_bytes(size)}", soft_wrap=True)
    for fact in document["not"][:SHOWN_MAX]:
        more = f", {human_bytes(fact['bytes'])} of older content is left" if fact["outcome"] == "older" else ""
        out.print(f"{'lost' if fact['outcome'] == 'older' else fact['outcome']}: {fact['path']}{more}", soft_wrap=True)
    if len(document["not"]) > SHOWN_MAX:
        out.print(f"and {len(document['not']) - SHOWN_MAX} more")
    for run in document["resume"]:
        if run["resumes_from"] is None:
            what = "no complete checkpoint would survive" if run["newest"] else "there is no complete checkpoint"
        elif run["resumes_from"] == run["newest"]:
            what = f"training would resume from {run['newest']}, the newest complete checkpoint"
        else:
            gone = len(run["newest_lacks"])
            what = f"training would resume from {run['resumes_from']}; of {run['newest']} {gone} files would be gone"
        out.print(f"{run['run']}: {what}", soft_wrap=True)
