"""The command line's entry: the commands, and the one boundary where an error becomes a line and an exit code.

Exit codes: 0 yes, 1 no or not reached, 2 wrong use, 3 the node that would know does not answer, 130 interrupted.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

import typer

from ckptfs import __version__
from ckptfs.cache.errors import CacheError
from ckptfs.fs import (
    cli_archive,
    cli_ca,
    cli_cluster,
    cli_drain,
    cli_flush,
    cli_node,
    cli_nodes,
    cli_rebalance,
    cli_recover,
    cli_rollback,
    cli_status,
    cli_verify,
    cli_whatif,
)
from ckptfs.fs.cli_errors import CommandError, Interrupted, NotReached, Unreachable, WrongUse
from ckptfs.fs.cli_output import print_json
from ckptfs.fs.config import ConfigurationError
from ckptfs.fs.fuse_device import MountError
from ckptfs.fs.local_socket import NodeNotAnswering
from ckptfs.replication.errors import CertificateTrouble, CodecUnavailable

app = typer.Typer(
    name="ckptfs",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A file system for training checkpoints: local speed, erasure-coded over peer nodes.",
)
app.add_typer(cli_cluster.app, name="cluster")
app.add_typer(cli_node.app, name="node")
app.add_typer(cli_ca.ca, name="ca")
app.add_typer(cli_nodes.app, name="nodes")
app.command()(cli_node.umount)
app.command()(cli_status.status)
app.command()(cli_flush.flush)
app.command()(cli_verify.verify)
app.command()(cli_whatif.whatif)
app.command()(cli_rollback.rollback)
app.command()(cli_drain.drain)
app.command()(cli_rebalance.rebalance)
app.command()(cli_archive.export)
app.command("import")(cli_archive.import_)
app.command()(cli_recover.recover)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ckptfs {__version__}")
        raise typer.Exit(0)


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors a user can cause print one line; a bug of ours keeps its traceback."""
    try:
        result = app(args=list(arguments), prog_name="ckptfs", standalone_mode=False)
    except CommandError as error:
        return _failed(error, arguments)
    except (ConfigurationError, CodecUnavailable, CertificateTrouble) as error:
        return _failed(WrongUse(str(error)), arguments)
    except (CacheError, MountError) as error:
        return _failed(NotReached(str(error)), arguments)
    except NodeNotAnswering as error:
        return _failed(Unreachable(str(error)), arguments)
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # `ckptfs status | head`: nobody reads the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        return _failed(NotReached(f"{os.fsdecode(error.filename)}: {error.strerror}"), arguments)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(arguments)
    except Exception as error:
        format_message = getattr(error, "format_message", None)  # typer's own, which has moved between its releases
        if format_message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(format_message(), file=sys.stderr)
            return 2
        return _failed(WrongUse(f"{format_message().rstrip(chr(46))}; `ckptfs --help` shows the commands"), arguments)
    if result == Interrupted.exit_code:  # some releases of typer turn Ctrl-C into this, without a word
        return _interrupted(arguments)
    return result if isinstance(result, int) else 0


def _interrupted(arguments: Sequence[str]) -> int:
    return _failed(Interrupted("interrupted; the nodes that run go on, and the command may be given again"), arguments)


def _failed(error: CommandError, arguments: Sequence[str]) -> int:
    print(f"ckptfs: {error}", file=sys.stderr)
    if "--json" in arguments and not sys.stdout.isatty() and not error.reported:
        print_json({"error": str(error), "exit_code": error.exit_code})
    return error.exit_code


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be any bytes
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
