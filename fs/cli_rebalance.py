"""`ckptfs rebalance`: have shards move to nodes that were added, or are emptier."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptfs.fs.cli_errors import NotReached, Unreachable
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.cli_status import places_of_one_cluster
from ckptfs.fs.status import first_that_answers, place_of_path

POLL_SECONDS = 0.5


def rebalance(
    where: Annotated[
        Path | None,
        typer.Argument(parser=path_of, metavar="WHERE", help="A cluster's directory or a mountpoint.", show_default=False),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Move shards from full nodes to empty ones, and wait for it. Exit code 1 if some could not be moved. Without WHERE: here."""
    places = places_of_one_cluster(where, "`ckptfs rebalance WHERE`")
    place = first_that_answers(places or [place_of_path(where or Path())], "agent")
    if place is None:
        raise Unreachable("no node's agent answers")
    life = place.ask("agent", {"do": "rebalance"})["life"]
    while (statistics := place.ask("agent", {"do": "status"})["rebalance"])["running"]:
        time.sleep(POLL_SECONDS)
    if as_json:
        print_json({"node": place.id, **statistics})
    else:
        _print(statistics)
    if why := not_done(life, statistics):
        raise NotReached(why, reported=as_json)


def not_done(life: str, statistics: dict[str, Any]) -> str:
    """Why not all was moved by the agent that was asked to; empty if it was."""
    if statistics["life"] != life:
        return "its agent was started anew before it was done; no shard is lost by that: run it again"
    if statistics["failed"]:
        return (
            f"{statistics['failed']} shards could not be moved, the last one because of: {statistics['last_error']}; where they "
            "are they are safe"
        )
    return ""


def _print(statistics: dict[str, Any]) -> None:
    out = console()
    out.print(f"moved {statistics['moved_shards']} shards, {human_bytes(statistics['moved_bytes'])}")
    for node, fill in sorted(statistics["before"].items()):
        out.print(f"{node}: {fill:.0%} of its room for shards used before, {statistics['after'].get(node, fill):.0%} now")
