"""What a node, a cluster and a file are like now: asked of the nodes' own sockets, gathered for people and programs."""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptfs.cache.errors import StoreError
from ckptfs.cache.store import StoreDirectory
from ckptfs.fs.cli_errors import Unreachable, WrongUse
from ckptfs.fs.config import ConfigurationError, load_config
from ckptfs.fs.local_cluster import LocalCluster
from ckptfs.fs.local_socket import Message, NobodyThere, NodeNotAnswering, call
from ckptfs.fs.mount_table import Mounted, mount_of, mounts
from ckptfs.fs.node_processes import NodeProcesses

DEFAULT_CONFIG = Path("/etc/ckptfs/node.toml")
ANSWER_SECONDS = 10.0
RESTART_SECONDS = 10.0
"""How long a process is waited for that its supervisor starts again: it takes a second, more on a busy machine."""
RESTART_POLL_SECONDS = 0.05
INODES_PER_REQUEST = 1000

LADDER = ("lost", "damaged", "unreachable", "open", "local", "degraded", "protected", "tiered")
"""The states from worst to best: a directory is as good as the worst file in it."""

HOPELESS = ("lost", "damaged")
"""No waiting takes a file out of these: it has to be saved again."""


@dataclass(frozen=True)
class Place:
    """Where a node is: all that is needed to ask it."""

    id: str
    store: Path
    mountpoint: Path

    def ask(
        self, socket: str, request: Message, *, timeout_seconds: float = ANSWER_SECONDS, restart_seconds: float = RESTART_SECONDS
    ) -> Message:
        """Ask the node's `mount` or `agent`, again where it is just being started anew: every request may be asked twice.

        Raises `Unreachable`, also where the node answers that it can't.
        """
        path, deadline = self.store / "run" / f"{socket}.sock", time.monotonic() + restart_seconds
        while True:
            try:
                answer = call(path, request, timeout_seconds=timeout_seconds)
                break
            except NodeNotAnswering as error:
                is_restarting = isinstance(error, NobodyThere) and NodeProcesses(self.store).pids()["supervisor"] is not None
                if not is_restarting or time.monotonic() >= deadline:
                    raise Unreachable(
                        f"the {socket} process of {self.id} does not answer ({error}); `ckptfs status` shows its processes"
                    ) from None
            time.sleep(RESTART_POLL_SECONDS)
        if not answer.get("ok", True):
            reason = answer.get("message") or answer.get("error") or "no reason given"
            raise Unreachable(f"the {socket} process of {self.id} could not answer: {reason}")
        return answer


@dataclass(frozen=True)
class FileStanding:
    """How far one file has come up the ladder. `protected_m`: how many failure domains may go, any of them; `home`: the node that
    has, or had, its bytes; `prefix_bytes`: how much of a file that is being written is protected, from its beginning on;
    `away`: the nodes that have something of it and do not answer; `is_size_known`: not so where only such a node knows it;
    `is_rolled_back`: its newer content went with a node that was declared lost."""

    path: str
    state: str
    protected_m: int
    size_bytes: int
    home: str = ""
    prefix_bytes: int = 0
    away: tuple[str, ...] = ()
    is_size_known: bool = True
    is_rolled_back: bool = False


@dataclass(frozen=True)
class PathStanding:
    """A file's standing, or that of all regular files under a directory: the worst of each."""

    path: str
    files: list[FileStanding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        return min((file.state for file in self.files), key=rank, default="protected")

    @property
    def protected_m(self) -> int | None:
        """None where there is no file."""
        return min((file.protected_m for file in self.files), default=None)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def prefix_bytes(self) -> int:
        return sum(file.prefix_bytes for file in self.files)

    def as_json(self) -> dict[str, Any]:
        more: dict[str, Any] = {"protected_prefix_bytes": self.prefix_bytes} if self.prefix_bytes else {}
        if unknown := sum(not file.is_size_known for file in self.files):
            more["sizes_unknown"] = unknown
        return {
            "path": self.path,
            "state": self.state,
            "protected_m": self.protected_m,
            "bytes": self.size_bytes,
            "files": len(self.files),
            "damaged": [file.path for file in self.files if file.state == "damaged"],
            "lost": [file.path for file in self.files if file.state == "lost"],
            "rolled_back": [file.path for file in self.files if file.is_rolled_back],
            "away": sorted({node for file in self.files for node in file.away}),
            "problems": self.problems,
            **more,
        }


def rank(state: str) -> int:
    """The state's place on the ladder; a word from a newer release counts as the worst."""
    return LADDER.index(state) if state in LADDER else -1


def place_of_mount(mounted: Mounted) -> Place:
    """The node behind a mount."""
    return Place(_node_id(mounted.store), mounted.store, mounted.mountpoint)


def place_of_path(path: Path) -> Place:
    """The node in whose mount the path lies, its links followed, also those that lead out of a mount or into another.

    Raises `WrongUse` if it lies in none, `Unreachable` if that node is down or its mount does not answer.
    """
    mounted = mount_of(path)
    if mounted is not None:
        place = place_of_mount(mounted)
        place.ask("mount", {"do": "status"})  # before links are read in it, which a dead mount would hold up
        real = Path(os.path.realpath(path))
        return place if mount_of(real) == mounted else place_of_path(real)
    if LocalCluster.is_one(path):
        raise WrongUse(f"{path} is a cluster's directory and lies in no ckptfs mount; name the mount of one of its nodes")
    if node := local_node_of(path) or local_node_of(Path(os.path.realpath(path))):
        if any(mounted.store == node.store for mounted in mounts()):
            raise WrongUse(f"{path} lies in the directory of {node.id} and not in its mount, which is {node.mountpoint}")
        raise Unreachable(f"{path}: {node.id} is not mounted; `ckptfs cluster up` or `ckptfs node` starts it")
    raise WrongUse(f"{path} lies in no ckptfs mount and is no cluster's directory")


def first_that_answers(places: Iterable[Place], socket: str) -> Place | None:
    """The first of them whose `mount` or `agent` answers, if any does."""
    for place in places:
        with contextlib.suppress(Unreachable):
            place.ask(socket, {"do": "status"})
            return place
    return None


def places_of_cluster(cluster: LocalCluster) -> list[Place]:
    return [Place(node.id, node.store, node.mountpoint) for node in cluster.nodes]


def places_of_this_machine() -> list[Place]:
    """The configured node of this machine, otherwise every node with a mount here. Raises `Unreachable` if there is none."""
    if DEFAULT_CONFIG.exists():
        try:
            config = load_config(DEFAULT_CONFIG)
        except ConfigurationError as error:
            raise WrongUse(str(error)) from None
        return [Place(str(config.node_id), config.store, config.mountpoint)]
    found = {mounted.store: place_of_mount(mounted) for mounted in mounts()}
    if not found:
        raise Unreachable(f"no node runs on this machine: there is neither a ckptfs mount nor {DEFAULT_CONFIG}")
    return sorted(found.values(), key=lambda place: in_order(place.mountpoint))


def by_cluster(places: Iterable[Place]) -> list[list[Place]]:
    """The nodes of each cluster, told apart by the labels of their stores; those whose label can't be read count as one more."""
    found: dict[bytes | None, list[Place]] = {}
    for place in places:
        found.setdefault(cluster_of(place.store), []).append(place)
    return list(found.values())


def cluster_of(store: Path) -> bytes | None:
    """The id of the cluster the store belongs to; None before it joined one, and where its label can't be read."""
    try:
        return StoreDirectory.open(store).cluster
    except (StoreError, OSError):
        return None


def in_order(path: Path | str) -> list[tuple[int, str]]:
    """A key that sorts node-2 before node-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split("([0-9]+)", str(path))]


def node_status(place: Place) -> dict[str, Any]:
    """One node as `ckptfs status --json` shows it. A node that is down has null where only it could know."""
    processes = NodeProcesses(place.store)
    mount = _answer_or_none(place, "mount")
    agent = _answer_or_none(place, "agent")
    known = mount or {}
    problems = [f"the {role} process ended: {reason}" for role, reason in processes.failures().items()]
    if mount is not None and agent is None and processes.pids()["agent"] is not None:
        problems.append(
            f"the agent process ({processes.pids()['agent']}) doesn't answer: nothing is protected, and what other nodes have "
            "can't be read here; if that lasts, end it (kill -9): it is started anew"
        )
    for answer in (mount, agent):
        problems += (answer or {}).get("problems", [])
    damaged = None if agent is None else agent.get("damaged_count")
    if damaged:
        problems.append(
            f"{damaged} files were damaged on its drive before they were protected: `ckptfs verify {place.mountpoint}` names "
            "them; save them again, and look at the drive"
        )
    cluster = cluster_of(place.store)
    return {
        "id": place.id,
        "cluster": None if cluster is None else cluster.hex(),
        "alive": mount is not None,
        "lane": known.get("lane"),
        "lane_reason": known.get("lane_reason"),
        "mountpoint": str(place.mountpoint),
        "store": str(place.store),
        "processes": processes.pids(),
        "problems": problems,
        "unprotected_bytes": known.get("unprotected_bytes"),
        "oldest_unprotected_seconds": known.get("oldest_unprotected_seconds"),
        "damaged_files": damaged,
        "open_files": known.get("open_files"),
        "mount": mount,
        "agent": agent,
    }


def at_risk(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the death of any one of these nodes would lose now, at most: that of `node`, None where none would lose anything.

    Of each node what is not protected yet; `known` are
    those that answer, `unknown` those that don't. `away` is how many nodes of the whole cluster
    don't: with `parity_shards` or more of them, protected files may not survive one more.
    """
    known = [node for node in nodes if node["mount"] is not None]
    worst = max(known, key=lambda node: (node["mount"]["unprotected_bytes"], node["mount"]["unprotected_files"]), default=None)
    files = 0 if worst is None else worst["mount"]["unprotected_files"]
    agents = [node["agent"] for node in nodes if node["agent"] is not None]
    stores = [store for agent in agents[:1] for store in agent["stores"] if store["state"] in ("in", "draining")]
    return {
        "node": worst["id"] if worst is not None and files else None,
        "files": files,
        "bytes": worst["mount"]["unprotected_bytes"] if worst is not None and files else 0,
        "oldest_seconds": worst["mount"]["oldest_unprotected_seconds"] if worst is not None and files else None,
        "known": [node["id"] for node in known],
        "unknown": [node["id"] for node in nodes if node["mount"] is None],
        "away": sum(not store["live"] for store in stores),
        "parity_shards": int(agents[0]["code"].split("+")[1]) if agents else 0,
    }


def nodes_status(places: Sequence[Place]) -> list[dict[str, Any]]:
    """All of them, asked at the same time. Raises `Unreachable` for who may not ask."""
    if not places:
        return []
    for place in places:
        _require_access(place)
    with ThreadPoolExecutor(max_workers=min(32, len(places))) as pool:
        return list(pool.map(node_status, places))


def _require_access(place: Place) -> None:
    """Who can't look into a store would take its node for dead."""
    try:
        os.listdir(place.store / "run")
    except PermissionError:
        raise Unreachable(f"only the owner of the store {place.store} may ask {place.id}: run this as root") from None
    except OSError:
        return  # it was never started


def path_standing(path: Path) -> PathStanding:
    """How the file, or everything under the directory, stands. Raises `WrongUse` or `Unreachable`."""
    place = place_of_path(path)  # its mount answers: a dead one would hold up the walk
    files = list(walk_files(path))
    return PathStanding(str(path), standing_of_files(place, files), _found_wrong(place, files))


def _found_wrong(place: Place, files: Sequence[tuple[int, str, int]]) -> list[str]:
    """What the agent knows from verifying; nothing where it doesn't answer, which `ckptfs status` of the mount says."""
    paths = {ino: path for ino, path, _ in files}
    inodes, found = list(paths), []
    with contextlib.suppress(Unreachable):
        for start in range(0, len(inodes), INODES_PER_REQUEST):
            answer = place.ask("agent", {"do": "findings", "inos": inodes[start : start + INODES_PER_REQUEST]})
            found += [f"verify found {paths[int(ino)]} {said}" for ino, said in answer["findings"].items()]
    return found


def walk_files(path: Path) -> Iterator[tuple[int, str, int]]:
    """(inode, path, size) of the file, or of every regular file under the directory that is not deleted meanwhile.

    A file whose attributes only a node that is away has counts too, with size 0: what is to be known of it is asked by its inode.
    Raises `WrongUse` if there is no such path, `Unreachable` if nothing can be asked.
    """
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        raise WrongUse(f"{path} does not exist") from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise WrongUse(f"{path}: {error.strerror}") from None
        yield _found_by_name(path, error)
        return
    if not stat.S_ISDIR(facts.st_mode):
        if stat.S_ISREG(facts.st_mode):
            yield facts.st_ino, str(path), facts.st_size
        return
    pending = [os.fspath(path)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        try:
                            size = entry.stat(follow_symlinks=False).st_size
                        except FileNotFoundError:
                            continue
                        except OSError:
                            size = 0
                        yield entry.inode(), entry.path, size
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Unreachable(f"{error.filename}: {error.strerror}") from None


def _found_by_name(path: Path, why: OSError) -> tuple[int, str, int]:
    """A regular file that can't be asked for its attributes. Raises `Unreachable`."""
    try:
        with os.scandir(path.absolute().parent) as entries:
            for entry in entries:
                if entry.name == path.name and entry.is_file(follow_symlinks=False):
                    return entry.inode(), str(path), 0
    except OSError:
        pass  # what is said of the file itself says more
    raise Unreachable(f"{path}: {why.strerror}")


def standing_of_files(place: Place, files: Iterable[tuple[int, str, int]]) -> list[FileStanding]:
    """The standing of each file that still exists, in the order given; several names of one file count once."""
    paths: dict[int, tuple[str, int]] = {}
    for ino, path, size in files:
        paths.setdefault(ino, (path, size))
    inodes = list(paths)
    found = []
    for start in range(0, len(inodes), INODES_PER_REQUEST):
        part = inodes[start : start + INODES_PER_REQUEST]
        states = place.ask("mount", {"do": "state", "inos": part})["states"]
        for ino in part:
            fact = states.get(ino) or states.get(str(ino))
            if fact is not None:
                path, size = paths[ino]
                survives, home = fact.get("protected_m") or 0, fact.get("home", "")
                prefix_bytes = fact.get("prefix_bytes", 0)
                away, last = tuple(fact.get("away", ())), fact.get("bytes", size)
                known = last is not None or size > 0 or fact["state"] != "unreachable"
                last = size if last is None else last
                rolled_back = bool(fact.get("rolled_back"))
                found.append(FileStanding(path, fact["state"], survives, last, home, prefix_bytes, away, known, rolled_back))
    return found


def _answer_or_none(place: Place, socket: str) -> Message | None:
    try:
        answer = place.ask(socket, {"do": "status", "look": True}, timeout_seconds=5.0, restart_seconds=0.0)
    except Unreachable:
        return None
    return {key: value for key, value in answer.items() if key != "ok"}


def _node_id(store: Path) -> str:
    """The id in the store's label; the directory's name where it can't be read."""
    try:
        return StoreDirectory.open(store).node
    except (StoreError, OSError):
        return store.parent.name


def local_node_of(path: Path) -> Place | None:
    """The node of a local cluster in whose directory the path lies, whether or not it runs."""
    path = Path(os.path.abspath(path))
    for directory in (path, *path.parents):
        if (directory / "node.toml").is_file():
            try:
                config = load_config(directory / "node.toml")
            except ConfigurationError as error:
                raise WrongUse(str(error)) from None
            return Place(str(config.node_id), config.store, config.mountpoint)
    return None
