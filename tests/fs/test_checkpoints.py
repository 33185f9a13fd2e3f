"""Which files make a checkpoint, and which of them are complete."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.fs.checkpoints import Checkpoint, by_run, find_checkpoints, step_of
from ckptfs.fs.status import walk_files

Made = Callable[..., list[Checkpoint]]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes files by their names, each a second younger than the one before, and finds the checkpoints among them."""

    def make(*names: str) -> list[Checkpoint]:
        for number, name in enumerate(names):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
            os.utime(path, (number, number))
        return find_checkpoints(str(tmp_path), walk_files(tmp_path))

    return make


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-1000", 1000),
        ("checkpoint-500", 500),
        ("global_step100", 100),
        ("iter_0000120", 120),
        ("epoch=3-step=40.ckpt", 40),
        ("step=40-epoch=3.ckpt", 40),
        ("epoch_7", 7),
        ("ckpt_9.pt", 9),
        ("model-00001-of-00003.safetensors", None),
        ("runs", None),
    ],
)
def test_the_step_a_name_says(name: str, step: int | None) -> None:
    assert step_of(name) == step


def test_directories_and_files_of_runs_newest_first(made: Made) -> None:
    found = made(
        "a/step-10/model.pt", "a/step-9/model.pt", "a/step-9/sub/optimizer.pt", "a/notes.txt", "b/step_2.pt", "b/last.pt"
    )
    runs = {
        os.path.basename(run): [(os.path.basename(one.path), one.step, len(one.files)) for one in ones]
        for run, ones in by_run(found)
    }
    assert runs == {
        "a": [("step-10", 10, 1), ("step-9", 9, 2)],
        "b": [("step_2.pt", 2, 1), ("last.pt", None, 1)],
    }
    assert not any(one.problem for one in found)


def test_what_torch_distributed_wrote_is_complete_with_its_metadata(made: Made) -> None:
    whole, cut = made("run/x/__0_0.distcp", "run/x/.metadata", "run/step-5/__0_0.distcp", "run/step-5/__1_0.distcp")[::-1]
    assert (os.path.basename(whole.path), whole.problem) == ("x", "")
    assert "no .metadata" in cut.problem


def test_an_index_names_files_that_must_be_there(tmp_path: Path, made: Made) -> None:
    index = tmp_path / "run/checkpoint-5/model.safetensors.index.json"
    index.parent.mkdir(parents=True)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (found,) = made("run/checkpoint-5/model-1.safetensors")
    assert "model-2.safetensors" in found.problem
    (found,) = made("run/checkpoint-5/model-2.safetensors")
    assert found.problem == ""
    index.write_text("no json")
    (found,) = made("run/checkpoint-5/model-2.safetensors")
    assert found.problem == ""


def test_what_is_not_finished_says_so_in_its_name(made: Made) -> None:
    found = made("run/tmp-checkpoint-5/model.pt", "run/checkpoint-4/model.pt.tmp", "run/checkpoint-3/model.pt")
    assert [bool(one.problem) for one in found] == [True, True, False]


def test_a_file_may_be_asked_about_alone(tmp_path: Path, made: Made) -> None:
    made("step-7/model.pt")
    path = tmp_path / "step-7/model.pt"
    (found,) = find_checkpoints(str(path), walk_files(path))
    assert found.path == str(path)
