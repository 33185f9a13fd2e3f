"""Which files belong to one checkpoint, and whether it is complete, by how the savers name things. Nothing is opened but indexes.

A checkpoint is the uppermost directory whose name says a step (`step-1000`, `checkpoint-500`, `global_step100`, `iter_0000100`),
a directory that torch.distributed.checkpoint wrote, or a single file of a kind that holds one (`.pt`, `.ckpt`, `.safetensors` …).
Those of one directory are a *run*: training resumes from the newest complete one, by its step, or by age where no name says one.

It is incomplete while its name, or that of a file in it, says so (`tmp-…`, `….tmp`), if a saver's index is missing (`.metadata`
beside `.distcp` files) or names files that are not there (`*.index.json`).
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import NamedTuple

STEP = re.compile(r"(global_?step|step|iteration|iter|checkpoint|ckpt|epoch)[-_=]?(\d+)", re.IGNORECASE)
UNFINISHED = re.compile(r"^(tmp[-_.]|\.tmp)|\.(tmp|partial|incomplete)$", re.IGNORECASE)
SINGLE_FILES = (".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".h5", ".hdf5", ".bin", ".msgpack")
INDEX_SIZE_MAX = 64 << 20


class CheckpointFile(NamedTuple):
    ino: int
    path: str
    size: int


class Checkpoint(NamedTuple):
    """`step` is None where no name says one. `problem` is why it is not complete, or empty."""

    path: str
    step: int | None
    mtime_ns: int
    files: tuple[CheckpointFile, ...]
    problem: str

    @property
    def run(self) -> str:
        """The directory it is one of the checkpoints of."""
        return os.path.dirname(self.path)


def step_of(name: str) -> int | None:
    """The step a name says; of an epoch and a step the step."""
    found = STEP.findall(name)
    if not found:
        return None
    return int(next((number for word, number in found if word.lower() != "epoch"), found[-1][1]))


def find_checkpoints(
    top: str,
    files: Iterable[tuple[int, str, int]],
    *,
    mtime_ns: Callable[[CheckpointFile], int] | None = None,
    named_by: Callable[[CheckpointFile], set[str]] | None = None,
) -> list[Checkpoint]:
    """The checkpoints among these files (inode, path, size), which all lie under `top`, or are it; newest first.

    `mtime_ns` says how old a file is, `named_by` which files an index names; both look at the files themselves if not given."""
    files = list(files)
    saved_by_torch = {os.path.dirname(path) for _, path, _ in files if path.endswith((".distcp", "/.metadata"))}
    members: defaultdict[str, list[CheckpointFile]] = defaultdict(list)
    for ino, path, size in files:
        root = _root(top, path, saved_by_torch)
        if root is not None:
            members[root].append(CheckpointFile(ino, path, size))
    found = [
        Checkpoint(
            root,
            step_of(os.path.basename(root)),
            max(map(mtime_ns or _mtime_ns, inside)),
            tuple(inside),
            _problem(root, inside, named_by or _named_by),
        )
        for root, inside in members.items()
    ]
    return sorted(found, key=lambda one: (one.run, -1 if one.step is None else one.step, one.mtime_ns), reverse=True)


def by_run(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, list[Checkpoint]]]:
    """Each run with its checkpoints, the newest first."""
    runs: defaultdict[str, list[Checkpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        runs[checkpoint.run].append(checkpoint)
    yield from sorted(runs.items())


def _root(top: str, path: str, saved_by_torch: set[str]) -> str | None:
    inside = PurePath(os.path.relpath(path, top)).parts if path != top else ()
    at = top
    candidates = [top]
    for part in inside[:-1]:
        at = os.path.join(at, part)
        candidates.append(at)
    for directory in candidates if inside else []:
        if step_of(os.path.basename(directory)) is not None or directory in saved_by_torch:
            return directory
    return path if path.endswith(SINGLE_FILES) or step_of(os.path.basename(path)) is not None else None


def _problem(root: str, files: Sequence[CheckpointFile], named_by: Callable[[CheckpointFile], set[str]]) -> str:
    names = {os.path.relpath(file.path, root) for file in files}
    if UNFINISHED.search(os.path.basename(root)):
        return "its name says that it is not finished"
    for file in files:
        if UNFINISHED.search(os.path.basename(file.path)):
            return f"{file.path} is not finished"
        if file.path.endswith(".index.json") and (missing := named_by(file) - names):
            return f"{min(missing)}, which {os.path.basename(file.path)} names, is not there"
    for directory in {os.path.dirname(file.path) for file in files if file.path.endswith(".distcp")}:
        if os.path.relpath(os.path.join(directory, ".metadata"), root) not in names:
            return f"{directory} has no .metadata"
    return ""


def _named_by(index: CheckpointFile) -> set[str]:
    """The files an index of safetensors or transformers names, relative to the checkpoint as far as it is flat."""
    if index.size > INDEX_SIZE_MAX:
        return set()
    try:
        with open(index.path, "rb") as file:
            return {str(name) for name in json.load(file)["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return set()


def _mtime_ns(file: CheckpointFile) -> int:
    try:
        return os.stat(file.path).st_mtime_ns
    except OSError:  # only a node that is away knows it
        return 0
