"""A whole cluster on one machine: real nodes, one directory each, one shared SQLite catalog, or one on etcd.

::

    DIR/cluster.json    {"format": 1}: what marks the directory as ours
    DIR/catalog.db      the catalog of all nodes, unless it is on etcd
    DIR/ca/             its certificate authority, if its nodes have certificates
    DIR/node-0/         node.toml, store/, mnt/ (its mount), log/, tls/
    DIR/node-1/ …

Nodes are detached processes: they outlive the command that started them.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptfs.cache.errors import StoreError
from ckptfs.cache.set_back_mark import SetBackMark
from ckptfs.cache.store import StoreDirectory, write_durably
from ckptfs.fs.bare_mountpoint import set_takes_files
from ckptfs.fs.cli_errors import NotReached, WrongUse
from ckptfs.fs.config import ConfigurationError, checked_config, load_config
from ckptfs.fs.local_socket import Message, NodeNotAnswering, call
from ckptfs.fs.mount_table import detach, mount_of, mounts, mounts_at
from ckptfs.fs.node_processes import NodeProcesses, started_with

MARKER = "cluster.json"
NODES_MAX = 64
START_SECONDS = 60.0
"""How long a node may take to mount. Six at once on two cores take about ten seconds."""

STOP_SECONDS = 20.0
ANSWER_SECONDS = 5.0
POLL_SECONDS = 0.1
LOG_LINES_SHOWN = 8
OPTION_KEYS = r"^(?:protection|mount|node)\.(data_shards|parity_shards|passthrough|catalog)(?=:)"
"""The keys that `ckptfs cluster up` has options for, as a message about one begins with them."""


@dataclass(frozen=True)
class ClusterSettings:
    """What a new cluster's configuration files say beyond the paths; None: the program's default."""

    data_shards: int | None = None
    parity_shards: int | None = None
    passthrough: str | None = None
    codec: str | None = None
    settle_seconds: float | None = None
    repair_after_seconds: float | None = None
    catalog: str | None = None
    tls: bool = False


def _quoted(value: object) -> str:
    """A TOML string, number or boolean; JSON's escapes for what is beyond the basic plane are none of TOML's."""
    return json.dumps(value, ensure_ascii=False)


class ClusterNode:
    """One node's directory and what can be done to its processes."""

    def __init__(self, cluster: Path, number: int) -> None:
        self.number = number
        self.id = f"node-{number}"
        self.directory = cluster / self.id
        self.config = self.directory / "node.toml"
        self.store = self.directory / "store"
        self.mountpoint = self.directory / "mnt"
        self.log = self.directory / "log"
        self.catalog = cluster / "catalog.db"
        self.processes = NodeProcesses(self.store)
        self._logs_before: dict[Path, int] = {}

    def write_config(self, settings: ClusterSettings) -> None:
        """Make the node's directories and its configuration."""
        text = self.config_text(settings)
        for directory in (self.directory, self.mountpoint, self.log):
            directory.mkdir(mode=0o755, exist_ok=True)
        if settings.tls:
            self._write_certificates()
        write_durably(self.config, text)

    def config_text(self, settings: ClusterSettings) -> str:
        """What the node's configuration holds. Raises `WrongUse` for settings that can't be."""
        lines = [
            "[node]",
            f"id = {_quoted(self.id)}",
            f"store = {_quoted(str(self.store))}",
            f"mountpoint = {_quoted(str(self.mountpoint))}",
            f"catalog = {_quoted(settings.catalog or f'sqlite:///{self.catalog}')}",
            f"log_directory = {_quoted(str(self.log))}",
        ]
        sections = {
            "protection": ("data_shards", "parity_shards", "codec", "repair_after_seconds"),
            "mount": ("passthrough", "settle_seconds"),
        }
        for section, keys in sections.items():
            values = {key: getattr(settings, key) for key in keys if getattr(settings, key) is not None}
            if values:
                lines += ["", f"[{section}]", *(f"{key} = {_quoted(value)}" for key, value in values.items())]
        if settings.tls:
            files = {"ca": "ca.pem", "certificate": "node.pem", "key": "node.key", "crl": "crl.pem"}
            lines += ["", "[tls]", *(f"{key} = {_quoted(str(self.directory / 'tls' / name))}" for key, name in files.items())]
        text = "\n".join(lines) + "\n"
        try:
            checked_config(text.encode())
        except ConfigurationError as error:
            raise WrongUse(re.sub(OPTION_KEYS, lambda key: f"--{key[1].replace('_', '-')}", str(error))) from None
        except UnicodeEncodeError:
            raise WrongUse(
                f"{self.directory!r}: a configuration names only paths that are UTF-8; use another directory"
            ) from None
        return text

    def _write_certificates(self) -> None:
        """The node's files, signed by the cluster's authority, which the first node makes."""
        from ckptfs.replication.certificates import CertificateAuthority, write_node

        place = self.directory.parent / "ca"
        authority = CertificateAuthority(place) if place.exists() else CertificateAuthority.create(place, "local cluster")
        write_node(authority, self.id, ["127.0.0.1", "localhost"], self.directory / "tls")

    def answers(self) -> bool:
        """Whether the mount is there and its daemon answers."""
        return bool(mounts_at(self.mountpoint)) and self._ask("mount") is not None

    def peers_in_reach(self) -> int | None:
        """How many stores the agent can reach, its own among them; None if the agent does not answer."""
        answer = self._ask("agent")
        return None if answer is None else sum(1 for store in answer["stores"] if store["live"])

    def _ask(self, process: str) -> Message | None:
        try:
            answer = call(self.store / "run" / f"{process}.sock", {"do": "status"}, timeout_seconds=ANSWER_SECONDS)
        except NodeNotAnswering:
            return None
        return answer if answer.get("ok", True) else None

    def start(self) -> "subprocess.Popen[bytes] | None":
        """Start the node detached, unless it runs. What is left of a dead one's mount is taken away first, and from then on the
        bare mountpoint takes no files."""
        if self.processes.pids()["supervisor"] is not None:
            return None
        self.kill()
        with contextlib.suppress(OSError):
            if not mounts_at(self.mountpoint) and not os.listdir(self.mountpoint):
                set_takes_files(self.mountpoint, False)
        self._logs_before = {path: path.stat().st_size for path in self._logs()}
        with open(self.log / "node.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "ckptfs.fs.cli", "node", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def kill(self) -> None:
        """End the node without warning, as a power cut of its machine would, and take its dead mount away."""
        known = self.processes.living()
        for pid in started_with(self.config):
            if pid not in known:  # whoever started it was interrupted
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.processes.kill()
        detach(self.mountpoint, abort=True)

    def _logs(self) -> list[Path]:
        """The agent's among them, by a link, when it has written any."""
        return [path for path in self.log.glob("*.log") if path.exists()]

    def log_tail(self) -> str:
        """The end of what it said last, or of its newest log, for a message about a node that did not start: only what came since
        `start`."""
        with contextlib.suppress(OSError):
            newest = sorted(self._logs(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
            for path in sorted(newest, key=lambda path: path.name != "node.log"):
                content, before = path.read_bytes(), self._logs_before.get(path, 0)
                new = content[before if before <= len(content) else 0 :]  # a shorter one was begun anew
                if lines := new[-8000:].decode(errors="replace").splitlines():
                    return "\n".join([f"  {path}:", *(f"    {line}" for line in lines[-LOG_LINES_SHOWN:])])
        return f"  nothing; see {self.log}"


class LocalCluster:
    """The cluster in a directory. Every method may be called again after it failed or was interrupted."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(os.path.abspath(directory))

    @staticmethod
    def is_one(directory: Path) -> bool:
        """Whether the directory holds a local cluster."""
        return (directory / MARKER).is_file()

    @classmethod
    def existing(cls, directory: Path) -> "LocalCluster":
        """The cluster in that directory. Raises `WrongUse` if there is none."""
        if not cls.is_one(directory):
            raise WrongUse(f"{directory} holds no cluster; `ckptfs cluster up {directory}` makes one")
        return cls(directory)

    @property
    def nodes(self) -> list[ClusterNode]:
        """The nodes, by number."""
        numbers = sorted(
            int(path.name.removeprefix("node-"))
            for path in self.directory.glob("node-*")
            if path.name.removeprefix("node-").isdecimal() and (path / "node.toml").is_file()
        )
        return [ClusterNode(self.directory, number) for number in numbers]

    def node(self, number: int) -> ClusterNode:
        """One node. Raises `WrongUse` if the cluster has none of that number."""
        for node in self.nodes:
            if node.number == number:
                return node
        raise WrongUse(f"{self.directory} has no node {number}; its nodes are 0 to {len(self.nodes) - 1}")

    def up(self, node_count: int | None, settings: ClusterSettings, *, start_seconds: float = START_SECONDS) -> list[ClusterNode]:
        """Start every node that is down, making the cluster first if there is none, and wait until all mounts answer
        and all nodes reach each other.

        Returns the nodes that were started. Raises `WrongUse`, or `NotReached` with the end of the log of a node that failed.
        """
        is_new = not self.is_one(self.directory)
        self.prepare(node_count, settings)
        try:
            with self._locked():
                return self._start(self.nodes, start_seconds)
        except NotReached as error:
            if not is_new:
                raise
            where = shlex.quote(str(self.directory))
            raise NotReached(
                f"{error}\nthe cluster was made and did not start: `ckptfs cluster up {where}` tries again as it is configured; "
                f"to give other options, remove it first: `ckptfs cluster down {where} --remove`"
            ) from None

    def revive(self, number: int, *, start_seconds: float = START_SECONDS) -> None:
        """Start one node again. Raises as `up`."""
        node = self.node(number)
        with self._locked():
            self._start([node], start_seconds)

    def kill(self, number: int) -> None:
        """End one node without warning."""
        node = self.node(number)
        node.kill()
        if living := node.processes.living():
            raise NotReached(f"{node.id}: processes {living} did not die")

    def down(self, *, remove: bool) -> None:
        """End every node, cleanly where it can be done, and take the mounts away; with `remove` the directory's content too."""
        with self._locked():
            nodes = self.nodes
            for node in nodes:
                node.processes.ask_supervisor_to_end()
            deadline = time.monotonic() + STOP_SECONDS
            for node in nodes:
                node.processes.wait_ended(deadline)
                node.kill()
            if remove:
                self._remove(nodes)

    def prepare(self, node_count: int | None, settings: ClusterSettings = ClusterSettings()) -> None:
        """Make the directory and the nodes' configurations, as far as they are not there; None: as many as there are, or 6.
        Nodes that are added to others are configured as those are.

        Raises `WrongUse`; or `ConfigurationError` for a node's file that was changed. Nothing is changed then.
        """
        if node_count is not None and not 1 <= node_count <= NODES_MAX:
            raise WrongUse(f"--nodes: 1 to {NODES_MAX}")
        ClusterNode(self.directory, 0).config_text(settings)
        if not self.is_one(self.directory):
            self._refuse_unfit_directory()
            self.directory.mkdir(parents=True, exist_ok=True)
            write_durably(self.directory / MARKER, json.dumps({"format": 1}) + "\n")
        with self._locked():
            present = {node.number for node in self.nodes}
            wanted = node_count if node_count is not None else (len(present) or 6)
            if wanted < len(present):
                raise WrongUse(
                    f"the cluster in {self.directory} has {len(present)} nodes; a node is not removed by --nodes {wanted}"
                )
            missing = sorted(set(range(wanted)) - present)
            if present and (missing or settings != ClusterSettings()):
                settings = self._settings_as_present(settings)
            for number in missing:
                ClusterNode(self.directory, number).write_config(settings)

    def _settings_as_present(self, asked: ClusterSettings) -> ClusterSettings:
        """What the first node is configured with: a node that is added is as those there. Raises `WrongUse` if other is asked."""
        config = self.nodes[0].config
        present = load_config(config)
        values = {
            **{
                key: getattr(present.protection, key) for key in ("data_shards", "parity_shards", "codec", "repair_after_seconds")
            },
            **{key: getattr(present.mount, key) for key in ("passthrough", "settle_seconds")},
            "catalog": present.node.catalog if present.etcd_place else None,
        }
        tls = bool(present.tls.certificate)
        if asked.tls and not tls:
            raise WrongUse(f"the cluster in {self.directory} was made without certificates; make another one with --tls")
        for key, value in values.items():
            wanted = getattr(asked, key)
            if wanted is not None and wanted != value:
                raise WrongUse(
                    f"the cluster in {self.directory} has {key} {value}, not {wanted} ({config}); nothing was started or "
                    "changed: leave the option out, or make another cluster in another directory"
                )
        return ClusterSettings(**values, tls=tls)

    def _refuse_unfit_directory(self) -> None:
        if mounted := mount_of(self.directory):
            raise WrongUse(f"{self.directory} lies in the ckptfs mount {mounted.mountpoint}; a cluster needs a directory outside")
        with contextlib.suppress(FileNotFoundError):
            try:
                if os.listdir(self.directory):
                    raise WrongUse(f"{self.directory} is not empty and holds no cluster; name a new or empty directory")
            except NotADirectoryError:
                raise WrongUse(f"{self.directory} is not a directory") from None

    def _start(self, nodes: Sequence[ClusterNode], start_seconds: float) -> list[ClusterNode]:
        started: dict[str, subprocess.Popen[bytes]] = {}
        deadline = time.monotonic() + start_seconds
        # The first node makes the catalog before the others ask for it.
        at_once = nodes[0].catalog.exists() or load_config(nodes[0].config).etcd_place is not None
        turns = [nodes] if at_once else [nodes[:1], nodes[1:]]
        try:
            for turn in turns:
                started |= {node.id: process for node in turn if (process := node.start()) is not None}
                self._wait_ready(turn, started, deadline)
        finally:
            for process in started.values():
                process.returncode = process.returncode or 0  # they outlive us: no warning about a child nobody waited for
        return [node for node in nodes if node.id in started]

    def _wait_ready(
        self, nodes: Sequence[ClusterNode], started: Mapping[str, "subprocess.Popen[bytes]"], deadline: float
    ) -> None:
        """Until every mount answers, and every agent reaches the nodes that run: else the first files would be protected less."""
        waiting = list(nodes)
        while waiting := [node for node in waiting if not self._is_ready(node)]:
            for node in waiting:
                process = started.get(node.id)
                status = process.poll() if process else None
                if status is not None:
                    raise NotReached(f"{node.id} ended with status {status}; its log says:\n{node.log_tail()}")
                if time.monotonic() > deadline:
                    what = "did not reach the other nodes" if node.answers() else "did not mount"
                    raise NotReached(f"{node.id} {what} in time; its log says:\n{node.log_tail()}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self, node: ClusterNode) -> bool:
        running = sum(1 for other in self.nodes if other.processes.pids()["supervisor"] is not None)
        reached = node.peers_in_reach() if node.answers() else None
        return reached is not None and reached >= running

    def _remove(self, nodes: Sequence[ClusterNode]) -> None:
        inside = [mounted.mountpoint for mounted in mounts() if mounted.mountpoint.is_relative_to(self.directory)]
        if inside:
            raise NotReached(f"{inside[0]} is still mounted; nothing was removed")
        for node in nodes:
            set_takes_files(node.mountpoint, True)
            with contextlib.suppress(StoreError):
                store = StoreDirectory.open(node.store)
                SetBackMark(store.store_id, store.uses).clear()
            shutil.rmtree(node.directory)
        for path in self.directory.glob("catalog.db*"):
            path.unlink()
        if (self.directory / "ca").is_dir():
            shutil.rmtree(self.directory / "ca")
        (self.directory / MARKER).unlink()
        (self.directory / "cluster.lock").unlink()
        with contextlib.suppress(OSError):  # something of somebody else's is in it: that stays
            self.directory.rmdir()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One command at a time starts or stops nodes of this cluster."""
        descriptor = os.open(self.directory / "cluster.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
