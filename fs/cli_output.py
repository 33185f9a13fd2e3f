"""How commands print: JSON for programs on standard output, tables for people, bars on a terminal's standard error."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def path_of(text: str) -> Path:
    """An argument's path. Typer's own conversion asks the file system, and a mount that hangs would not answer."""
    return Path(text)


def print_json(document: Any) -> None:
    """One document on standard output."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def console() -> Console:
    """Where text for people goes; plain, and not cut to a width, where that is not a terminal. Names of files are no markup."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200)


def bytes_progress(*, shown: bool = True) -> Progress:
    """A bar over bytes, drawn only on a terminal and gone when it is done."""
    error_console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=error_console,
        transient=True,
        disable=not (shown and error_console.is_terminal),
    )


def human_bytes(count: int | float | None) -> str:
    """1536 as `1.5 KiB`; None, which is unknown, as `?`."""
    if count is None:
        return "?"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_seconds(count: float | None) -> str:
    """Seconds for people; None, which is unknown, as `?`."""
    return "?" if count is None else f"{count:.1f} s"
