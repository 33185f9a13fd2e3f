"""The whole path on one machine, with the real parts: save, protect, lose two nodes, read back. Run it through `scripts/demo`."""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from ckptfs.fs.cli_errors import CommandError, Interrupted, NotReached, WrongUse
from ckptfs.fs.cli_flush import wait_until
from ckptfs.fs.cli_output import human_bytes
from ckptfs.fs.local_cluster import ClusterSettings, LocalCluster
from ckptfs.fs.mount_table import mounts_at
from ckptfs.fs.status import node_status, place_of_mount

DEFAULT_DIRECTORY = Path("/var/tmp/ckptfs-demo")
"""Not /tmp, which some distributions keep in memory."""

PAIRS = 3
"""Saves into the mount and into the plain directory, in turns; the medians are compared."""

PROTECT_SECONDS_MAX = 300.0
READ_SIZE = 4 << 20
TENSOR_SIZE = 16 << 20
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Writer:
    """How a checkpoint is written, and how it is checked that it loads."""

    name: str
    suffix: str
    save: Callable[[Path], None]
    loads_equal: Callable[[Path], bool]


@dataclass
class Figures:
    """What the table shows; seconds, and bytes."""

    writer: str
    size_bytes: int
    acknowledge_seconds: float
    plain_seconds: float
    protect_seconds: float
    restore_seconds: float
    lane: str


class Stopped(KeyboardInterrupt):
    """SIGTERM, or the terminal was closed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main() -> int:
    arguments = _parse()
    cluster = LocalCluster(arguments.directory)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # not under nohup
            signal.signal(number, _stop)
    try:
        with _alone_in(cluster.directory):
            return _demo(cluster, arguments)
    except CommandError as error:
        _say(str(error))
        return error.exit_code
    except OSError as error:
        _say(f"{error.filename or cluster.directory}: {error.strerror}")
        return 1
    except KeyboardInterrupt as error:  # before there was a cluster, or after all was shown
        _say("interrupted")
        return _exit_code(error)


def _stop(number: int, _: object) -> None:
    raise Stopped(number)


def _exit_code(error: KeyboardInterrupt) -> int:
    return error.exit_code if isinstance(error, Stopped) else Interrupted.exit_code


def _let_nothing_interrupt() -> None:
    """For what takes seconds, and leaves nothing half done."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One demo at a time in a directory, which is made for that and goes again if it stays empty; the lock goes with the process.

    Raises `NotReached`, `WrongUse`, `OSError`.
    """
    if directory.exists() and not directory.is_dir():
        raise WrongUse(f"{directory} is not a directory")
    descriptor, is_ours = -1, False
    try:
        while descriptor < 0:
            is_ours |= not directory.exists()
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_ours = False
                raise NotReached(f"a demo already runs in {directory}") from None
            if not directory.exists() or not os.path.samestat(os.fstat(descriptor), directory.stat()):
                os.close(descriptor)  # of a demo that removed it and ended just now
                descriptor = -1
        yield
    finally:
        if is_ours:
            with contextlib.suppress(OSError):
                directory.rmdir()
        if descriptor >= 0:
            os.close(descriptor)


def _demo(cluster: LocalCluster, arguments: argparse.Namespace) -> int:
    out = Console(highlight=False)
    try:
        figures = _run(cluster, arguments.size_mb << 20, out)
    except CommandError as error:
        return _failed(str(error), error.exit_code, cluster, arguments.keep_nothing)
    except OSError as error:
        return _failed(f"{error.filename or 'the mount'}: {error.strerror}", 1, cluster, arguments.keep_nothing)
    except KeyboardInterrupt as error:
        _let_nothing_interrupt()
        shutil.rmtree(cluster.directory / "plain", ignore_errors=True)
        return _failed("interrupted", _exit_code(error), cluster, arguments.keep_nothing)
    finally:
        if arguments.keep_nothing and LocalCluster.is_one(cluster.directory):
            _let_nothing_interrupt()
            shutil.rmtree(cluster.directory / "plain", ignore_errors=True)
            cluster.down(remove=True)
    out.print(_table(figures))
    if not arguments.keep_nothing:
        _print_how_to_go_on(cluster, out)
    return 0


def _failed(why: str, exit_code: int, cluster: LocalCluster, keep_nothing: bool) -> int:
    """One line: why, and what stays of the cluster and how it is removed."""
    stays, where = "", shlex.quote(str(cluster.directory))
    if LocalCluster.is_one(cluster.directory):
        stays = f"; the cluster in {cluster.directory} " + (
            "is taken down and removed"
            if keep_nothing
            else f"stays; go on with it: scripts/demo {where}; or remove it: {_command()} cluster down {where} --remove"
        )
    _say(f"{why}{stays}")
    return exit_code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"demo: {text}", file=sys.stderr)


def _command() -> str:
    return shlex.quote(str(Path(sys.executable).parent / "ckptfs"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY, help=f"default: {DEFAULT_DIRECTORY}")
    parser.add_argument("--size-mb", type=int, default=400, help="size of the checkpoint (default: 400)")
    parser.add_argument("--keep-nothing", action="store_true", help="take the cluster down and remove it at the end")
    arguments = parser.parse_args()
    if arguments.size_mb < 1:
        parser.error("--size-mb: at least 1")
    return arguments


def _run(cluster: LocalCluster, size_bytes: int, out: Console) -> Figures:
    out.print(f"[bold]1[/] a six-node cluster (4+2) in {cluster.directory}", soft_wrap=True)
    _check_space(cluster.directory, size_bytes)
    cluster.up(None if LocalCluster.is_one(cluster.directory) else 6, ClusterSettings())
    first, second, third = cluster.nodes[:3]
    lane = node_status(place_of_mount(mounts_at(first.mountpoint)[-1]))["lane"]

    writer = _writer(size_bytes)
    plain = cluster.directory / "plain"
    plain.mkdir(exist_ok=True)
    folder = first.mountpoint / "demo"
    folder.mkdir(exist_ok=True)
    name = f"step-{time.time_ns() // 10**9}{writer.suffix}"
    out.print(
        f"[bold]2[/] {writer.name} into {folder / name}, and {PAIRS} times in turns into the plain directory beside it",
        soft_wrap=True,
    )
    acknowledge, beside = _save_in_turns(writer, folder / name, plain / name)

    out.print("[bold]3[/] its way to protected")
    started = time.monotonic()
    behind, _, _ = wait_until([folder / name], "protected", PROTECT_SECONDS_MAX, shown=True)
    protect = time.monotonic() - started
    if behind:
        raise NotReached(f"{behind[0].path} is still {behind[0].state} after {protect:.0f} s; look at {first.log}")

    out.print(f"[bold]4[/] {first.id}, which wrote it, and {second.id} are killed without warning")
    cluster.kill(first.number)
    cluster.kill(second.number)

    copy = third.mountpoint / "demo" / name
    out.print(f"[bold]5[/] read back through {copy}", soft_wrap=True)
    started = time.monotonic()
    size_read = _read(copy)
    restore = time.monotonic() - started
    if (
        size_read != (plain / name).stat().st_size
        or _sha256(copy) != _sha256(plain / name)
        or not _by(writer, f"reading {copy}", lambda: writer.loads_equal(copy))
    ):
        raise NotReached(f"{copy} differs from {plain / name}: this is a bug; both files and the logs are kept")
    out.print("  the hashes agree, and it loads")
    shutil.rmtree(plain)
    cluster.up(None, ClusterSettings())
    return Figures(writer.name, size_read, acknowledge, beside, protect, restore, str(lane))


def _check_space(directory: Path, size_bytes: int) -> None:
    """Six stores' shards (1.5 times the bytes), the local copies of two nodes, and three plain copies."""
    parent = next(parent for parent in (directory, *directory.parents) if parent.exists())
    needed, free = 8 * size_bytes + (1 << 30), shutil.disk_usage(parent).free
    if free < needed:
        raise NotReached(
            f"{parent} has {human_bytes(free)} free, this takes {human_bytes(needed)}; name another directory or --size-mb"
        )


def _writer(size_bytes: int) -> Writer:
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    tensors = {
        f"layers.{index}.weight": random.standard_normal(min(TENSOR_SIZE, size_bytes - start) // 4, dtype=np.float32)
        for index, start in enumerate(range(0, size_bytes, TENSOR_SIZE))
    }
    try:
        import torch
    except ImportError:
        from safetensors.numpy import load_file, save_file

        return Writer(
            "safetensors",
            ".safetensors",
            lambda path: save_file(tensors, path),
            lambda path: all(np.array_equal(value, tensors[key]) for key, value in load_file(path).items()),
        )
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}

    def loads_equal(path: Path) -> bool:
        loaded = torch.load(path, mmap=True, weights_only=True)
        return loaded.keys() == state.keys() and all(bool(torch.equal(value, state[key])) for key, value in loaded.items())

    return Writer("torch.save", ".pt", lambda path: torch.save(state, path), loads_equal)


def _save_in_turns(writer: Writer, in_mount: Path, plain: Path) -> tuple[float, float]:
    """Median seconds of a save into the mount and of one into the plain directory."""
    seconds: dict[Path, list[float]] = {in_mount: [], plain: []}
    for turn in range(PAIRS):
        for path in (plain, in_mount) if turn % 2 else (in_mount, plain):
            path.unlink(missing_ok=True)
            started = time.monotonic()
            _by(writer, f"saving {path}", partial(writer.save, path))
            seconds[path].append(time.monotonic() - started)
    # The writer gives every save the same bytes but for the archive's name, which is the file's: so the files are equal.
    return statistics.median(seconds[in_mount]), statistics.median(seconds[plain])


def _by(writer: Writer, what: str, call: Callable[[], Result]) -> Result:
    """What the writer's library does: of what a drive or a mount refuses some make errors of their own. Raises `NotReached`."""
    try:
        return call()
    except OSError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise NotReached(
            f"{what} with {writer.name} failed ({said}): the drive is full, or the node ended, and its log says why; what was "
            "saved before is safe. Make room or name a smaller --size-mb, and run it again"
        ) from error


def _read(path: Path) -> int:
    size_bytes = 0
    buffer = bytearray(READ_SIZE)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size_bytes += count
    return size_bytes


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table(figures: Figures) -> Table:
    size_bytes = figures.size_bytes
    table = Table(title=f"{figures.writer}, {human_bytes(size_bytes)}, {figures.lane} lane", box=None, show_header=False)
    rate = size_bytes / 1e9
    table.add_row("time to acknowledge", f"{figures.acknowledge_seconds:.2f} s", f"{rate / figures.acknowledge_seconds:.2f} GB/s")
    table.add_row("the same in the plain directory", f"{figures.plain_seconds:.2f} s", f"{rate / figures.plain_seconds:.2f} GB/s")
    table.add_row("ratio", f"{figures.acknowledge_seconds / figures.plain_seconds:.2f}", "1.00 is the plain directory's time")
    table.add_row(
        "time to protect", f"{figures.protect_seconds:.2f} s", f"{rate / figures.protect_seconds:.2f} GB/s, from the last save"
    )
    table.add_row(
        "time to restore", f"{figures.restore_seconds:.2f} s", f"{rate / figures.restore_seconds:.2f} GB/s, two nodes dead"
    )
    return table


def _print_how_to_go_on(cluster: LocalCluster, out: Console) -> None:
    command, where = _command(), shlex.quote(str(cluster.directory))
    mountpoint = shlex.quote(str(cluster.nodes[0].mountpoint))
    for line in (
        "the two nodes run again; the cluster stays up:",
        f"  look at it:       {command} status {where}",
        f"  save into it:     any program, into {mountpoint} (or another node's mnt)",
        f"  wait for safety:  {command} flush {mountpoint}",
        f"  take it down:     {command} cluster down {where} --remove",
    ):
        out.print(line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
