"""torch.save and torch.load, and torch.distributed.checkpoint from several ranks: saved here, loaded on other nodes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow]


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "weight": torch.randn(1024, 700, generator=generator),
        "half": torch.randn(300, 33, generator=generator).half(),
        "view": torch.arange(1000.0)[100:300],
        "empty": torch.empty(0),
        "step": 12345,
        "nested": {"lr": [0.1, 0.01], "name": "run"},
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "legacy"])
def test_save_is_loaded_by_every_node(place: Any, zip_format: bool) -> None:
    state = _state()
    torch.save(state, place.here / "m.pt", _use_new_zipfile_serialization=zip_format)
    assert _equal(torch.load(place.here / "m.pt"), state)
    assert _equal(torch.load(place.there / "m.pt"), state)
    place.protect()
    assert _equal(torch.load(place.elsewhere / "m.pt"), state)
    assert _equal(torch.load(place.there / "m.pt"), state)


MAPPED = """
import os, sys, torch
loaded = [torch.load(path, mmap=True) for path in sys.argv[2:]]
def matches(state): return torch.equal(state["weight"], torch.randn(1024, 700, generator=torch.Generator().manual_seed(7)))
assert all(matches(state) for state in loaded)
if sys.argv[1] == "unlink":
    os.unlink(sys.argv[2])
    assert all(matches(state) for state in loaded)
"""


def test_load_with_mmap_here_and_elsewhere(place: Any, run_python: Any) -> None:
    torch.save(_state(), place.here / "m.pt")
    run_python(MAPPED, "keep", place.here / "m.pt", place.there / "m.pt")
    place.protect()
    run_python(MAPPED, "keep", place.elsewhere / "m.pt", place.here / "m.pt")


def test_a_mapped_checkpoint_outlives_its_file(place: Any, run_python: Any) -> None:
    torch.save(_state(), place.here / "m.pt")
    place.protect()
    run_python(MAPPED, "unlink", place.here / "m.pt", place.there / "m.pt")


def test_save_through_a_file_object_with_fsync_and_replace(place: Any) -> None:
    for step in range(5):
        state = {"step": step, "weight": torch.full((256, 256), float(step))}
        with open(place.here / "last.pt.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(place.here / "last.pt.tmp", place.here / "last.pt")
        assert _equal(torch.load(place.there / "last.pt"), state)
    assert os.listdir(place.there) == ["last.pt"]


def test_save_over_an_existing_checkpoint(place: Any) -> None:
    torch.save({"weight": torch.ones(1000, 1000)}, place.here / "m.pt")
    place.protect()
    smaller = {"weight": torch.zeros(10)}
    torch.save(smaller, place.here / "m.pt")
    assert _equal(torch.load(place.here / "m.pt"), smaller)
    assert _equal(torch.load(place.there / "m.pt"), smaller)
    place.protect()
    assert _equal(torch.load(place.elsewhere / "m.pt"), smaller)


RANK = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
task, rank, ranks, meeting, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))
whole = torch.arange(400 * 300, dtype=torch.float32).reshape(400, 300)
if task == "save":
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=2))
else:
    state = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory))
    assert torch.equal(state["w"].full_tensor(), whole) and state["step"] == 7, state
dist.barrier()
dist.destroy_process_group()
"""


def _ranks(task: str, directories: list[Path], meeting: Path) -> None:
    """One process a rank, each working through a directory of its own node."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, task, str(rank), str(len(directories)), str(meeting), str(directory)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, directory in enumerate(directories)
    ]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(errors)


def test_distributed_checkpoint_from_two_nodes_is_loaded_by_three_ranks_on_others(place: Any, tmp_path: Path) -> None:
    (place.here / "step-7").mkdir()
    _ranks("save", [place.here / "step-7", place.there / "step-7"], tmp_path / "meeting-save")
    assert ".metadata" in os.listdir(place.elsewhere / "step-7")
    _ranks("load", [place.elsewhere / "step-7", place.there / "step-7", place.here / "step-7"], tmp_path / "meeting-load")
    place.protect()
    _ranks("load", [place.elsewhere / "step-7", place.here / "step-7"], tmp_path / "meeting-again")
