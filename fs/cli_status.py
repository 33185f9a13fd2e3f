"""`ckptfs status`: a cluster, a node, or how far a file has come up the ladder."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from ckptfs.fs.cli_errors import Unreachable, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, human_seconds, path_of, print_json
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.mount_table import mount_of
from ckptfs.fs.status import (
    Place,
    at_risk,
    by_cluster,
    local_node_of,
    nodes_status,
    path_standing,
    place_of_mount,
    places_of_cluster,
    places_of_this_machine,
)

WATCH_SECONDS = 1.0
SHOWN_ID_DIGITS = 8


def status(
    where: Annotated[
        Path | None,
        typer.Argument(
            parser=path_of,
            metavar="WHERE",
            help="A cluster's directory, a mountpoint, or a file or directory in a mount.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until interrupted.")] = False,
) -> None:
    """Show nodes, or how far a file has come: open, local, protected. Without WHERE: this machine's node."""
    if watch and as_json:
        raise WrongUse("--watch and --json exclude each other")
    places = places_for(where)
    if where is not None and places is None:
        target = where
        _show(lambda: path_standing(target).as_json(), _path_text, as_json, watch)
        return
    places = places or []
    clusters = by_cluster(places) if where is None else [places]
    document = _show(lambda: _nodes_document(clusters), _nodes_text, as_json, watch)
    if not any(node["alive"] for node in document["nodes"]):
        message = "no node answers" if len(places) != 1 else f"{places[0].id} does not answer"
        raise Unreachable(message, reported=as_json)


def places_for(where: Path | None) -> list[Place] | None:
    """The nodes WHERE names as a whole; None where it is a path inside a mount. Raises `WrongUse`."""
    if where is None:
        return places_of_this_machine()
    mounted = mount_of(where)
    if mounted is not None:
        names_mount = mounted.mountpoint == Path(os.path.abspath(where)) or (
            not Path(os.path.abspath(where)).is_relative_to(mounted.mountpoint)
            and mounted.mountpoint == Path(os.path.realpath(where))
        )
        return [place_of_mount(mounted)] if names_mount else None
    if LocalCluster.is_one(where):
        return places_of_cluster(LocalCluster(where))
    place = local_node_of(where)
    if place is not None and Path(os.path.abspath(where)) in (place.mountpoint, place.mountpoint.parent):
        return [place]
    return None


def places_of_one_cluster(where: Path | None, how: str) -> list[Place] | None:
    """As `places_for`, for what concerns one cluster and asks any node of it: where none was named there must be only one here.

    `how`: how the command names one. Raises `WrongUse`.
    """
    places = places_for(where)
    clusters = by_cluster(places or ()) if where is None else []
    if len(clusters) > 1:
        mounts = " and ".join(_described(cluster) for cluster in clusters)
        raise WrongUse(
            f"nodes of {len(clusters)} clusters are on this machine, mounted at {mounts}: say which is meant, with {how}"
        )
    return places


def _described(cluster: list[Place]) -> str:
    more = f" ({len(cluster)} nodes)" if len(cluster) > 1 else ""
    return f"{cluster[0].mountpoint}{more}"


def _show(
    read: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any]], RenderableType], as_json: bool, watch: bool
) -> dict[str, Any]:
    document = read()
    out = console()
    if as_json:
        print_json(document)
    elif not watch:
        out.print(render(document))
    elif not out.is_terminal:  # each one as it comes, so that a reader who has gone is noticed
        while True:
            out.print(render(document))
            out.file.flush()
            time.sleep(WATCH_SECONDS)
            document = read()
    else:
        with Live(render(document), console=out, auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_SECONDS)
                document = read()
                live.update(render(document), refresh=True)
    return document


def _nodes_document(clusters: Sequence[list[Place]]) -> dict[str, Any]:
    """What a death would cost is said of each cluster: `at_risk` of the whole is null where there is more than one."""
    nodes = {node["store"]: node for node in nodes_status([place for places in clusters for place in places])}
    described = []
    for places in clusters:
        of_it = [nodes[str(place.store)] for place in places]
        name = next((node["cluster"] for node in of_it if node["cluster"]), None)
        described.append({"cluster": name, "stores": [node["store"] for node in of_it], "at_risk": at_risk(of_it)})
    whole = described[0]["at_risk"] if len(described) == 1 else None
    return {"nodes": list(nodes.values()), "clusters": described, "at_risk": whole}


def _nodes_text(document: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    for cluster in document["clusters"]:
        nodes = [node for node in document["nodes"] if node["store"] in cluster["stores"]]
        if len(document["clusters"]) > 1:
            name = "of unknown id" if cluster["cluster"] is None else cluster["cluster"][:SHOWN_ID_DIGITS]
            parts += [""] if parts else []
            parts.append(f"cluster {name}, mounted in {os.path.commonpath([node['mountpoint'] for node in nodes])}")
        parts += [_cluster_text(nodes), _risk_text(cluster["at_risk"])]
    return Group(*parts)


def _cluster_text(nodes: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "processes", "lane", "unprotected", "oldest", "open", "mountpoint"):
        table.add_column(heading, overflow="fold")
    reasons: dict[str, list[str]] = {}
    for node in nodes:
        processes = node["processes"]
        missing = [role for role, pid in processes.items() if pid is None]
        state = "all run" if not missing else ("down" if len(missing) == len(processes) else f"no {', no '.join(missing)}")
        if node["alive"]:
            table.add_row(
                node["id"],
                state,
                node["lane"],
                human_bytes(node["unprotected_bytes"]),
                human_seconds(node["oldest_unprotected_seconds"]) if node["unprotected_bytes"] else "-",
                str(node["open_files"] if node["open_files"] is not None else "?"),
                node["mountpoint"],
            )
        else:
            table.add_row(node["id"], state, "-", "?", "?", "-", node["mountpoint"])
        if node["lane"] not in (None, "passthrough") and node["lane_reason"]:
            reasons.setdefault(f"{node['lane']}: {node['lane_reason']}", []).append(node["id"])
        if user := (node["agent"] or {}).get("user"):
            why = f": {user['why']}" if user["why"] else ""
            reasons.setdefault(f"the agent runs as {user['name']}{why}", []).append(node["id"])
        for problem in node["problems"]:
            reasons.setdefault(problem, []).append(node["id"])
    lines = [f"{', '.join(ids)}: {reason}" for reason, ids in reasons.items()]
    return Group(table, *lines)


def _risk_text(risk: dict[str, Any]) -> str:
    """The standing line: what the death of any one machine would cost now."""
    if not risk["known"]:
        text = "nothing is known of what is not protected: none of these nodes answers"
    elif risk["node"] is None and not risk["files"]:
        text = "if any one of these nodes died now, no closed file would be lost"
    else:
        text = (
            f"if {risk['node']} died now, {human_bytes(risk['bytes'])} in {risk['files']} files would be lost, the oldest "
            f"unprotected for {human_seconds(risk['oldest_seconds'])}; the death of no other of these nodes would cost more"
        )
    if risk["known"] and risk["unknown"]:
        text += f"; not known of {', '.join(risk['unknown'])}"
    if risk["away"] and risk["away"] >= risk["parity_shards"]:
        text += f"; {risk['away']} nodes are away: what has shards on all of them may not survive one more (`ckptfs whatif`)"
    return text


_RISKS = {
    "open": ", not safe if its node is lost",
    "local": ", not safe if its node is lost",
    "degraded": ", not safe if one more of its holders is lost",
    "protected": ", not safe if one of its holders is lost",
    "damaged": ": its drive changed its bytes before it was protected, and nothing can repair it: save it again",
    "lost": ": the node that had it was declared lost: it reads as an error until that node returns; else save it again",
}
SHOWN_MAX = 20


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN_MAX} more" if len(paths) > SHOWN_MAX else ""
    return f"{', '.join(paths[:SHOWN_MAX])}{more}"


def _path_text(document: dict[str, Any]) -> RenderableType:
    files = "" if document["files"] == 1 else f" in {document['files']} files"
    survives = document["protected_m"]
    prefix = document.get("protected_prefix_bytes")
    tail = f", survives the loss of any {survives} failure domains" if survives else _RISKS.get(document["state"], "")
    if not document["files"]:
        tail = ""
    if prefix:
        which = f"the first {human_bytes(prefix)} of what is being written"
        tail += f"; {which} can be read meanwhile" if document["state"] == "unreachable" else f"; {which} are"
    if document["files"] > 1 and document["damaged"]:
        tail += f"\ndamaged: {_some(document['damaged'])}"
    if document["files"] > 1 and document["lost"]:
        tail += f"\nlost: {_some(document['lost'])}"
    if document["rolled_back"]:
        which = "rolled back to older content, the newer went with a node that was declared lost"
        tail += f"\n{which}: {_some(document['rolled_back'])}"
    if document["state"] == "unreachable":
        away = ", ".join(document["away"])
        tail = f": start {away}: the bytes are there{tail}" if away else f": the nodes that had its bytes left the cluster{tail}"
    elif document["away"]:
        tail += f"; away: {', '.join(document['away'])}"
    size, unknown = human_bytes(document["bytes"]), document.get("sizes_unknown", 0)
    if unknown:
        size = "size unknown" if document["files"] == 1 else f"{size} and {unknown} of unknown size"
    if problems := document["problems"]:
        more = f"\nand {len(problems) - SHOWN_MAX} more" if len(problems) > SHOWN_MAX else ""
        tail += "".join(f"\n{problem}" for problem in problems[:SHOWN_MAX]) + more + "\n`ckptfs verify --deep --repair` is needed"
    return f"{document['state']}: {size}{files}{tail}"
