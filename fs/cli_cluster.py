"""`ckptfs cluster`: a whole cluster on one machine, for trying, testing and showing."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.fs.cli_errors import WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, path_of, print_json
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.status import nodes_status, places_of_cluster

app = typer.Typer(no_args_is_help=True, help="A whole cluster on one machine, in one directory.")

Directory = Annotated[Path, typer.Argument(parser=path_of, metavar="DIR", help="The cluster's directory.")]


def _number_of(text: str) -> int:
    if not text.isdecimal():
        raise WrongUse(f"{text!r} is no node's number: 0 names node-0, and so on")
    return int(text)


Number = Annotated[int, typer.Argument(parser=_number_of, metavar="N", help="The node's number, from 0.")]


@app.command()
def up(
    directory: Directory,
    nodes: Annotated[int | None, typer.Option("--nodes", help="How many nodes; 6 for a new cluster.", show_default=False)] = None,
    data_shards: Annotated[
        int | None, typer.Option("--data-shards", help="k of the code, for a new cluster; default 4.", show_default=False)
    ] = None,
    parity_shards: Annotated[
        int | None, typer.Option("--parity-shards", help="m of the code, for a new cluster; default 2.", show_default=False)
    ] = None,
    passthrough: Annotated[
        str | None, typer.Option("--passthrough", help="auto, on or off, for a new cluster.", show_default=False)
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(
            "--catalog", help="etcd://HOST:PORT/NAME, for a new cluster; default: a SQLite file in DIR.", show_default=False
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Certificates and TLS between the nodes, for a new cluster, as on several machines.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Start what is down, making the cluster first if there is none, and wait for all mounts."""
    cluster = LocalCluster(directory)
    settings = ClusterSettings(
        data_shards=data_shards, parity_shards=parity_shards, passthrough=passthrough, catalog=catalog, tls=tls
    )
    started = cluster.up(nodes, settings)
    if as_json:
        print_json({"directory": str(cluster.directory), "started": [node.id for node in started], "nodes": _nodes(cluster)})
        return
    out = console()
    already = len(cluster.nodes) - len(started)
    out.print(f"{len(started)} nodes started{f', {already} ran already' if already else ''}; their mounts:")
    for node in cluster.nodes:
        out.print(f"  {node.mountpoint}", soft_wrap=True)
    out.print(
        f"look at it: ckptfs status {_quoted(cluster)}\ntake it down: ckptfs cluster down {_quoted(cluster)}", soft_wrap=True
    )


@app.command()
def kill(directory: Directory, number: Number, as_json: JsonFlag = False) -> None:
    """End one node without warning (SIGKILL to all its processes)."""
    cluster = LocalCluster.existing(directory)
    cluster.kill(number)
    _report(cluster, f"node-{number} is dead", as_json)


@app.command()
def revive(directory: Directory, number: Number, as_json: JsonFlag = False) -> None:
    """Start a node again and wait for its mount."""
    cluster = LocalCluster.existing(directory)
    cluster.revive(number)
    _report(cluster, f"node-{number} runs", as_json)


@app.command()
def down(
    directory: Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the nodes' data too.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """End every node and take the mounts away; the data stays."""
    cluster = LocalCluster.existing(directory)
    cluster.down(remove=remove)
    if as_json:
        print_json({"directory": str(cluster.directory), "removed": remove})
    else:
        kept = f"; `ckptfs cluster down --remove {_quoted(cluster)}` removes it (rm can't: bare mountpoints take no changes)"
        text = f"the cluster in {cluster.directory} is down{'; its data is removed' if remove else kept}"
        console().print(text, soft_wrap=True)


def _quoted(cluster: LocalCluster) -> str:
    return shlex.quote(str(cluster.directory))


def _report(cluster: LocalCluster, sentence: str, as_json: bool) -> None:
    if as_json:
        print_json({"directory": str(cluster.directory), "nodes": _nodes(cluster)})
    else:
        console().print(sentence)


def _nodes(cluster: LocalCluster) -> list[dict[str, object]]:
    return nodes_status(places_of_cluster(cluster))
