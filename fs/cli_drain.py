"""`ckptfs drain`: make a node ready to be switched off."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptfs.fs.cli_durations import seconds_of
from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.cli_status import places_for
from ckptfs.fs.status import Place

POLL_SECONDS = 0.5
AS_IT_IS = {
    "lost": "{node} was declared lost while it was away: nothing was changed. Its mount process brings back what only it had, "
    "and then it is by itself what it was before (`ckptfs nodes list` says `up` or `draining`): repeat this then. If it stays "
    "`lost`, {node}'s mount.log says why",
    "removed": "{node} was removed from the cluster (ckptfs nodes remove) and can't join it again with this store: nothing was "
    "changed. Save elsewhere what only its mount shows, end it (ckptfs umount {mountpoint}), and start it with an empty store",
}
"""What is true of a node that is no member, and what to do."""


def drain(
    where: Annotated[
        Path | None,
        typer.Argument(parser=path_of, metavar="WHERE", help="The node's mountpoint or directory.", show_default=False),
    ] = None,
    deadline: Annotated[str, typer.Option("--deadline", metavar="S", help="How long it may take: 30, 30s, 5m, 1h.")] = "30s",
    cancel: Annotated[bool, typer.Option("--cancel", help="The node stays after all: it takes shards again.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Protect what only this node has, newest complete checkpoints first, and have its shards made again on other nodes.

    It takes no new shards from then on, also after a restart, until --cancel. Exit code 1 if something was not protected in time.
    """
    seconds = seconds_of("--deadline", deadline)
    places = places_for(where)
    if places is None or len(places) != 1:
        which = "" if where is not None or places is None else f" (here are {', '.join(str(one.mountpoint) for one in places)})"
        raise WrongUse(f"drain: one node, by its mountpoint or its directory{which}")
    (place,) = places
    if cancel:
        state = place.ask("agent", {"do": "join_again"}).get("state", "in")
        _require_member(place, state, as_json)
        _say(as_json, {"node": place.id, "state": state}, f"{place.id} takes shards again")
        return
    until = time.monotonic() + seconds
    report = place.ask("agent", {"do": "drain", "deadline": seconds, "leave": True}, timeout_seconds=seconds + 30)
    _require_member(place, report.pop("state", "draining"), as_json)
    held = _held(place, until)
    document = {key: value for key, value in report.items() if key != "ok"} | {
        "node": place.id,
        "state": "draining",
        "held": held,
    }
    if as_json:
        print_json(document)
    else:
        _print(document)
    if why := not_ready(document):
        raise NotReached(why, reported=as_json)


def not_ready(document: dict[str, Any]) -> str:
    """What is lost if the node is switched off now and does not come back; empty if nothing."""
    node = document["node"]
    if document["unknown"]:
        return (
            f"whether all that only {node} has is protected is not known: {document['unknown']}. It is lost if {node} does not "
            "come back: try again before it is switched off"
        )
    if document["left_files"] or document["open_files"]:
        return (
            f"{document['left_files']} files ({human_bytes(document['left_bytes'])}) are not protected yet, and "
            f"{document['open_files']} are being written: they are lost if {node} does not come back. It goes on with them while "
            "it runs"
        )
    return ""


def _require_member(place: Place, state: str, as_json: bool) -> None:
    """Raises `NotReached` for a node that is in the cluster no more: it neither drains nor can be made to stay by this."""
    if state not in AS_IT_IS:
        return
    if as_json:
        print_json({"node": place.id, "state": state})
    raise NotReached(AS_IT_IS[state].format(node=place.id, mountpoint=place.mountpoint), reported=as_json)


def _held(place: Place, until: float) -> int:
    """How many shards of files are still at this node, when there are none or the time is up."""
    while True:
        held = int(place.ask("agent", {"do": "held"}, timeout_seconds=60.0)["named"])
        if not held or time.monotonic() >= until:
            return held
        time.sleep(min(POLL_SECONDS, max(0.0, until - time.monotonic())))


def _print(document: dict[str, Any]) -> None:
    out = console()
    for one in document["checkpoints"]:
        word = "protected" if one["protected"] else "NOT protected"
        note = "" if one["complete"] else f"; incomplete: {one['why']}"
        out.print(f"{word}: {one['path']} ({human_bytes(one['bytes'])} in {one['files']} files{note})", soft_wrap=True)
    out.print(f"{document['node']} drains: {human_bytes(document['bytes'])} in {document['files']} files were protected")
    is_ready = not not_ready(document)
    if held := document["held"]:
        said = f"{held} shards are still here; the cluster makes them again on other nodes, if it has enough of them"
        if is_ready:
            said += ". Switched off now, nothing is lost by that: their files survive one loss fewer until then"
        out.print(said, soft_wrap=True)
    else:
        out.print("no shards are left here" + (": it can be switched off" if is_ready else ""), soft_wrap=True)


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:
    if as_json:
        print_json(document)
    else:
        console().print(text)
