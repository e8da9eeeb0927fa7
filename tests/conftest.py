"""Models and small helpers that the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fetch
import mock_cuda
import numpy as np
import pytest
from tiny import write_tiny

from pycriticalkv import Llama, llama_cpp

# How many layers of a model tests put on a GPU, for a run on one (benchmarks/gpu_check.sh). "mock" as the device makes
# the mock CUDA device the only one.
GPU_LAYERS = int(os.environ.get("PYCRITICALKV_TEST_GPU_LAYERS", "0"))
DEVICE = os.environ.get("PYCRITICALKV_TEST_DEVICE", "")


def pytest_configure() -> None:
    """Load the mock device where it is asked for; it then takes the place of a GPU in all tests."""
    if DEVICE == "mock":
        library = mock_cuda.find_library()
        if library is None:
            raise pytest.UsageError("the mock device is not there: it is built with the C++ tests (make install)")
        mock_cuda.Mock(str(library))
    elif DEVICE:
        raise pytest.UsageError(f"PYCRITICALKV_TEST_DEVICE is {DEVICE!r}, and can only be 'mock'")
    if GPU_LAYERS != 0 and not llama_cpp.llama_supports_gpu_offload():
        raise pytest.UsageError("PYCRITICALKV_TEST_GPU_LAYERS is set, and llama.cpp has no GPU")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random llama with F32 weights, 8 query heads on 2 KV heads."""
    folder = tmp_path_factory.mktemp("models")
    return str(write_tiny(folder / "tiny.gguf", wo_type="F32", weight_type="F32"))


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes a tiny model with the arguments of write_tiny and returns its path."""
    folder = tmp_path_factory.mktemp("variants")

    def make(**arguments: Any) -> str:
        name = "-".join(f"{key}_{value}" for key, value in sorted(arguments.items()))
        path: Path = folder / f"{name}.gguf"
        return str(path if path.exists() else write_tiny(path, **arguments))

    return make


@pytest.fixture(scope="session")
def smollm2() -> str:
    try:
        return str(fetch.fetch("smollm2"))
    except fetch.FetchError as e:
        if GPU_LAYERS == 0:
            raise
        pytest.skip(f"machines with a GPU may have no network: {e}")


@pytest.fixture
def load() -> Iterator[Callable[..., Llama]]:
    """Loads a model quietly, on one thread; everything is closed after the test."""
    loaded: list[Llama] = []

    def make(path: str, **arguments: Any) -> Llama:
        defaults: dict[str, Any] = {"verbose": False, "n_threads": 1, "n_threads_batch": 2, "n_gpu_layers": GPU_LAYERS}
        loaded.append(Llama(path, **{**defaults, **arguments}))
        return loaded[-1]

    yield make
    for llm in loaded:
        llm.close()


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """Random tokens of the tiny model: letters and pieces, no special ones."""

    def make(n: int, seed: int = 1) -> list[int]:
        return np.random.default_rng(seed).integers(10, 440, n).tolist()

    return make


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens given to llama_cpp's eval."""
    counts: list[int] = []
    plain = llama_cpp.Llama.eval

    def counting(self: Llama, tokens: list[int]) -> None:
        counts.append(len(tokens))
        plain(self, tokens)

    monkeypatch.setattr(llama_cpp.Llama, "eval", counting)
    return counts
