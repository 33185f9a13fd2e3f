"""`ckptfs export` and `ckptfs import`: a whole catalog in one file, and a catalog made of it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ckptfs.fs.cli_node import ConfigFile
from ckptfs.fs.cli_output import JsonFlag, console, human_bytes, path_of, print_json
from ckptfs.fs.config import load_config
from ckptfs.fs.status import DEFAULT_CONFIG

ArchiveFile = Annotated[Path, typer.Argument(parser=path_of, metavar="FILE", help="The archive.")]


def export(file: ArchiveFile, config: ConfigFile = DEFAULT_CONFIG, as_json: JsonFlag = False) -> None:
    """Write all that the catalog says into one file, as of one revision; nodes may run meanwhile."""
    loaded = load_config(config)
    import trio

    from ckptfs.fs.catalog_transfer import export_catalog  # with an HTTP client, which other commands don't need

    exported = trio.run(export_catalog, loaded, file)
    if as_json:
        print_json({"file": os.fspath(file), **exported.as_json()})
    else:
        console().print(
            f"{file}: the catalog of cluster {exported.header.cluster.hex()} at revision {exported.header.revision}, "
            f"{exported.records} records, {human_bytes(exported.size_bytes)}; it has all names, keep it as you keep the files",
            soft_wrap=True,
        )


def import_(file: ArchiveFile, config: ConfigFile = DEFAULT_CONFIG, as_json: JsonFlag = False) -> None:
    """Fill an empty catalog with what an archive says. No node may run before it has ended; if it is cut off, run it again."""
    loaded = load_config(config)
    import trio

    from ckptfs.fs.catalog_transfer import import_catalog

    imported = trio.run(import_catalog, loaded, file)
    if as_json:
        print_json({"file": os.fspath(file), "catalog": loaded.node.catalog, **imported.as_json()})
    else:
        console().print(
            f"{loaded.node.catalog} is the catalog of cluster {imported.header.cluster.hex()} as of revision "
            f"{imported.header.revision} now, with {imported.records} records; start the nodes, then `ckptfs verify --repair`",
            soft_wrap=True,
        )
