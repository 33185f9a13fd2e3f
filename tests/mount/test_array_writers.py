"""safetensors, numpy and h5py, unmodified: saved here, loaded on other nodes, mapped and not."""

import os
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

pytestmark = [pytest.mark.slow]


def _arrays() -> dict[str, Any]:
    random = np.random.default_rng(3)
    return {"weight": random.standard_normal((700, 513)), "index": np.arange(77, dtype=np.int64), "scalar": np.array(1.5)}


def _equal(one: Any, other: Any) -> bool:
    return set(one) == set(other) and all(np.array_equal(np.asarray(one[key]), np.asarray(other[key])) for key in one)


ARRAYS = """
import sys, numpy as np
random = np.random.default_rng(3)
arrays = {"weight": random.standard_normal((700, 513)), "index": np.arange(77, dtype=np.int64), "scalar": np.array(1.5)}
path = sys.argv[1]
"""

LOAD_SAFETENSORS = """
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
for load in (load_file, load_torch_file):
    loaded = load(path)
    assert set(loaded) == set(arrays) and all(np.array_equal(np.asarray(loaded[key]), arrays[key]) for key in arrays), load
with safe_open(path, framework="pt") as file:
    assert np.array_equal(file.get_slice("weight")[10:20, 5:].numpy(), arrays["weight"][10:20, 5:])
"""


def test_safetensors_saved_from_numpy_is_mapped_on_every_node(place: Any, run_python: Any) -> None:
    save_file(_arrays(), place.here / "m.safetensors")
    run_python(ARRAYS + LOAD_SAFETENSORS, place.here / "m.safetensors")
    place.protect()
    run_python(ARRAYS + LOAD_SAFETENSORS, place.there / "m.safetensors")


def test_safetensors_saved_from_torch_is_mapped_on_every_node(place: Any, run_python: Any) -> None:
    state = {key: torch.from_numpy(value) for key, value in _arrays().items()}
    save_torch_file(state, place.here / "m.safetensors", metadata={"format": "pt"})
    run_python(ARRAYS + LOAD_SAFETENSORS, place.there / "m.safetensors")
    place.protect()
    run_python(ARRAYS + LOAD_SAFETENSORS, place.elsewhere / "m.safetensors")


def test_numpy_save_load_and_mapped(place: Any, run_python: Any) -> None:
    arrays = _arrays()
    np.save(place.here / "w.npy", arrays["weight"])
    np.savez(place.here / "all.npz", **arrays)
    np.savez_compressed(place.here / "small.npz", **arrays)
    mapped = "assert np.array_equal(np.load(path, mmap_mode='r')[100:110], arrays['weight'][100:110])"
    run_python(ARRAYS + mapped, place.here / "w.npy")
    place.protect()
    for view in (place.here, place.there):
        run_python(ARRAYS + mapped, view / "w.npy")
        assert np.array_equal(np.load(view / "w.npy"), arrays["weight"])
        for name in ("all.npz", "small.npz"):
            with np.load(view / name) as loaded:
                assert _equal(loaded, arrays)


def test_numpy_memmap_written_in_place(place: Any) -> None:
    path = place.here / "state.bin"
    mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=(512, 1024))
    mapped[:] = 1
    mapped.flush()
    del mapped
    again = np.memmap(path, dtype=np.float32, mode="r+", shape=(512, 1024))
    again[17] = 2
    again.flush()
    del again
    expected = np.ones((512, 1024), dtype=np.float32)
    expected[17] = 2
    assert np.array_equal(np.fromfile(path, dtype=np.float32).reshape(512, 1024), expected)
    place.protect()
    assert np.array_equal(np.fromfile(place.there / "state.bin", dtype=np.float32).reshape(512, 1024), expected)


def test_numpy_tofile_appended(place: Any) -> None:
    expected = np.concatenate([np.full(1000, step, dtype=np.int32) for step in range(5)])
    for step in range(5):
        with open(place.here / "log.bin", "ab") as file:
            np.full(1000, step, dtype=np.int32).tofile(file)
    assert np.array_equal(np.fromfile(place.there / "log.bin", dtype=np.int32), expected)
    place.protect()
    assert np.array_equal(np.fromfile(place.elsewhere / "log.bin", dtype=np.int32), expected)


def test_h5py_created_extended_and_read_elsewhere(place: Any) -> None:
    path = place.here / "m.h5"
    arrays = _arrays()
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key] = value
        file.create_dataset("history", shape=(0, 8), dtype="f4", maxshape=(None, 8), chunks=(64, 8), compression="gzip")
        file.attrs["step"] = 1
    for step in range(3):
        with h5py.File(path, "a") as file:
            history = file["history"]
            history.resize(history.shape[0] + 100, axis=0)
            history[-100:] = step
            file.attrs["step"] = step
    place.protect()
    for view in (place.here, place.there):
        with h5py.File(view / "m.h5", "r") as file:
            assert _equal({key: file[key][()] for key in arrays}, arrays)
            assert np.array_equal(file["history"][:, 0], np.repeat([0.0, 1.0, 2.0], 100))
            assert file.attrs["step"] == 2
    assert os.path.getsize(place.there / "m.h5") == os.path.getsize(path)
