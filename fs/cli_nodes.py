"""`ckptfs nodes list`, `admit` and `remove`: the cluster's nodes, as any one of them that runs sees them."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ckptfs.cache.admission import HASH_SIZE
from ckptfs.fs.cli_ca import Node, require_node_id
from ckptfs.fs.cli_ca import nodes as app
from ckptfs.fs.cli_errors import NotReached, Unreachable, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.cli_status import places_of_one_cluster
from ckptfs.fs.local_socket import Message, NobodyThere, NodeNotAnswering, call
from ckptfs.fs.status import Place, in_order

__all__ = ["app"]

WALK_SECONDS_MAX = 600.0
SHOWN_MAX = 20

Where = Annotated[
    Path | None,
    typer.Option("--of", parser=path_of, metavar="WHERE", help="A cluster's directory or a mountpoint.", show_default=False),
]


@app.command("list")
def list_nodes(of: Where = None, as_json: JsonFlag = False) -> None:
    """Show the cluster's nodes: up, suspect, draining, lost or removed. Without --of: as this machine's node sees them."""
    answer = ask(of, {"do": "status", "look": True}, 10.0)
    document = [
        {
            "node": store["node"],
            "standing": store["standing"],
            "answers": store["live"],
            "leads": store["leads"],
            "domain": store["domain"],
            "address": store["address"],
            "store": store["store"],
            "free_bytes": store["free_bytes"] if store["live"] else None,
        }
        for store in sorted(answer["stores"], key=lambda store: in_order(store["node"]))
    ]
    if as_json:
        print_json({"nodes": document})
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "state", "answers", "domain", "free", "address", "store"):
        table.add_column(heading, overflow="fold")
    for one in document:
        state = f"{one['standing']}, leads" if one["leads"] else one["standing"]
        answers = "yes" if one["answers"] else "no"
        table.add_row(one["node"], state, answers, one["domain"], human_bytes(one["free_bytes"]), one["address"], one["store"])
    console().print(table)


@app.command("admit")
def admit_node(
    node: Node,
    token_hash: Annotated[str, typer.Argument(metavar="HASH", help="The hash of its token, as `nodes add` prints it.")],
    of: Where = None,
    as_json: JsonFlag = False,
) -> None:
    """Let one new store of a node join with the token that `nodes add` made; from then on none joins without."""
    require_node_id(node)
    try:
        digest = bytes.fromhex(token_hash)
    except ValueError:
        digest = b""
    if len(digest) != HASH_SIZE:
        raise WrongUse(f"{token_hash!r} is no hash of a token: {2 * HASH_SIZE} hex digits, as `ckptfs nodes add` prints them")
    ask(of, {"do": "admit", "node": node, "token_hash": digest}, is_change=True)
    if as_json:
        print_json({"node": node, "admitted": True})
    else:
        console().print(f"{node} may join with its token, once", soft_wrap=True)


@app.command("remove")
def remove(
    node: Node,
    of: Where = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also if files are rolled back or lost by that; they are named.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Take a node that is down out of the cluster for good: what it holds is made again elsewhere, and it can't come back.

    Of a machine that was set up anew under its old id, the store that was lost goes, and the new one stays.
    """
    answer = ask(of, {"do": "remove_node", "node": node, "force": force}, WALK_SECONDS_MAX, is_change=True)
    stays = [str(store) for store in answer.get("stays", ())]
    files = [bytes(path).decode(errors="backslashreplace") for path in answer["files"]]
    if as_json:
        print_json({"node": node, "removed": answer["removed"], "stays": stays, "files": files})
    which = f"{', '.join(files[:SHOWN_MAX])}{f' and {len(files) - SHOWN_MAX} more' if len(files) > SHOWN_MAX else ''}"
    if not answer["removed"]:
        raise NotReached(
            f"only {node} has the newest content of {len(files)} files: {which}. Nothing was changed: start it until they are"
            " protected, or give that content up with --force",
            reported=as_json,
        )
    if not as_json:
        lost = f"; given up: {which}" if files else ""
        if stays:
            console().print(
                f"the store of {node} that is down is no part of the cluster any more{lost}; {', '.join(stays)} stays in it",
                soft_wrap=True,
            )
            return
        console().print(
            f"{node} is no part of the cluster any more{lost}\n"
            f"if it had a certificate, revoke it: ckptfs ca revoke {shlex.quote(node)} --ca DIR",
            soft_wrap=True,
        )


def ask(of: Path | None, request: Message, seconds: float = 10.0, *, is_change: bool = False) -> dict[str, Any]:
    """The answer of the first of the nodes that gives one; a change is asked of none that may come after one that began with it.

    Raises `Unreachable`, `WrongUse`, `NotReached`.
    """
    places: list[Place] | None = places_of_one_cluster(of, "--of WHERE")
    if places is None:
        raise WrongUse(f"--of {of}: name a cluster's directory or a mountpoint, not what is in it")
    for place in places:
        try:
            answer = call(place.store / "run" / "agent.sock", request, timeout_seconds=seconds)
        except NodeNotAnswering as error:
            if is_change and not isinstance(error, NobodyThere):
                raise Unreachable(
                    f"{place.id} took the request and has not answered ({error}); it may still carry it out: see"
                    " `ckptfs nodes list` before you repeat it"
                ) from None
            continue
        if not answer.get("ok", True):
            raise NotReached(str(answer.get("message")))
        return answer
    raise Unreachable("no node answers that could tell")
