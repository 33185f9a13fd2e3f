"""`ckptfs recover`: a lost catalog, rebuilt from what stores hold."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.config import load_config

if TYPE_CHECKING:
    from ckptfs.replication.recovery_report import RecoveryReport, Trouble

SHOWN_MAX = 20


def recover(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=path_of,
            metavar="SOURCE…",
            help="Stores of nodes that are down, inventories of stores, exported catalogs. Or: inventory STORE FILE.",
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="CATALOG", help="sqlite:////PATH or etcd://HOST:PORT/NAME; empty.")] = "",
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A node's configuration that names the catalog, as --to.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would come of it, and change nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Rebuild a lost catalog from what the stores hold; all nodes are down. docs/operations.md, When the catalog is lost.

    `ckptfs recover inventory STORE FILE` writes what a store holds into a file, to be carried to where the catalog is rebuilt.
    """
    if str(sources[0]) == "inventory":
        _inventory(sources[1:], as_json=as_json)
        return
    if bool(to) + (config is not None) + dry_run == 0 or (to and config is not None):
        raise WrongUse("where is the catalog to be made? --to CATALOG, or --config FILE; or --dry-run")
    import trio

    from ckptfs.fs.catalog import place_of
    from ckptfs.fs.recover import recover_catalog

    target = load_config(config) if config is not None else place_of(to or "sqlite:////nonexistent")
    report = trio.run(lambda: recover_catalog(target, sources, dry_run=dry_run))
    where = "" if dry_run else target.node.catalog
    if as_json:
        print_json({"catalog": where, **msgspec.to_builtins(report)})
    else:
        _print(report, where)
    if report.lost:
        raise NotReached(f"{len(report.lost)} files are lost, as far as these stores show", reported=as_json)


def _inventory(arguments: list[Path], *, as_json: bool) -> None:
    if len(arguments) != 2:
        raise WrongUse("recover inventory STORE FILE: the store of a node that is down, and the file to write")
    from ckptfs.fs.recover import write_inventory
    from ckptfs.replication.inventory import state_header

    store, file = arguments
    inventory = write_inventory(store, file)
    state = state_header(inventory)
    found = {
        "file": str(file),
        "store": inventory.store.hex(),
        "node": str(inventory.node),
        "cluster": None if inventory.cluster is None else inventory.cluster.hex(),
        "state_revision": None if state is None else state.revision,
        "seen_revision": inventory.seen_revision,
        "shards": len(inventory.shards),
        "damaged_shards": inventory.damaged,
        "copies": len(inventory.copies),
        "segments": len(inventory.segments),
        "trouble": inventory.trouble,
    }
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(f"{file}: what the store {store} of {inventory.node} holds", soft_wrap=True)
    state_said = "no state of the catalog" if state is None else f"the catalog as of revision {state.revision}"
    out.print(f"  {state_said}, {len(inventory.shards)} shards, {len(inventory.copies)} copies of small files", soft_wrap=True)
    for trouble in inventory.trouble:
        out.print(f"  {trouble}", soft_wrap=True)


def _print(report: "RecoveryReport", where: str) -> None:
    out = console()

    def line(text: str) -> None:
        out.print(text, soft_wrap=True)

    line(f"cluster {report.cluster}, stores of {', '.join(report.stores) or 'no node'}")
    if report.stores_not_given:
        line(f"not given: {', '.join(report.stores_not_given)}; what only they hold is missing here")
    if report.state_source:
        line(f"the newest state of the catalog is of revision {report.state_revision}: {report.state_source}")
    else:
        line("no state of the catalog is left: names are what shards remember")
    line(
        f"{report.files} files, {human_bytes(report.bytes)}; {report.became_protected} became protected after the state was taken"
    )
    if report.recovered:
        line(
            f"{len(report.recovered)} files, {human_bytes(report.recovered_bytes)}, were saved after it, and are below"
            f" /.ckptfs/recovered/{report.state_revision}:"
        )
        _some(report.recovered, line)
    if report.closed:
        line(f"{len(report.closed)} files were closed after it, and are protected when their homes are up:")
        _some(report.closed, line)
    if report.holders_changed:
        line(f"{report.holders_changed} files have shards elsewhere than the state says; that is put right")
    if report.segments_unproved:
        line(f"{report.segments_unproved} segments may have been written since, and are not read before ckptfs verify has")
    if report.damaged_shards:
        line(f"{report.damaged_shards} shards can't be read, and count for nothing")
    for trouble in report.trouble:
        line(trouble)
    _troubles("can be read only when stores that were not given are back", report.waiting, line)
    _troubles("are lost", report.lost, line)
    if where:
        line(f"{where} is filled. Now: start all nodes, then `ckptfs verify --repair` on a mount; copy what you need out of")
        line("/.ckptfs/recovered. Before any node is started, this can be done again with more stores, into an empty catalog.")
    else:
        line("nothing was changed; without --dry-run the catalog is made so")


def _troubles(what: str, troubles: list["Trouble"], line: Callable[[str], None]) -> None:
    if troubles:
        line(f"{len(troubles)} files {what}:")
        _some([f"{trouble.path or '(no name)'}: {trouble.reason}" for trouble in troubles], line)


def _some(lines: list[str], line: Callable[[str], None]) -> None:
    for text in lines[:SHOWN_MAX]:
        line(f"  {text}")
    if len(lines) > SHOWN_MAX:
        line(f"  and {len(lines) - SHOWN_MAX} more; --json names all")
