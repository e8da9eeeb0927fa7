"""Run models on the mock CUDA device (native/tests/mock_cuda), in a process of their own.

As a program, ``mock_cuda.py LIBRARY`` loads the device, reads jobs as JSON from the standard input and prints an answer
to each; test_placement.py starts it. ``answer`` serves a process without the device as well, for comparison.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The folder of the mock's library; make test names it. Without it the newest build is taken.
FOLDER = "PYCRITICALKV_NATIVE_TESTS"

Answer = dict[str, Any]


def find_library() -> Path | None:
    """The mock's library, or None where the C++ tests were not built."""
    named = os.environ.get(FOLDER)
    folders = [ROOT / named] if named else ROOT.glob("build/cp3*/native-tests")
    found = [path for folder in folders for path in folder.glob("libmock_cuda.so")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


TRAFFIC = ("bytes_up", "bytes_down", "n_up", "n_down", "n_nodes", "n_replayed", "n_launched")


class Traffic(ctypes.Structure):
    """struct mock_cuda_traffic of mock-cuda.h."""

    _fields_ = [(name, ctypes.c_int64) for name in TRAFFIC]


class Mock:
    """The mock device of this process: what went to it and came from it."""

    def __init__(self, library: str) -> None:
        from pycriticalkv._library import LIBRARY_FOLDER  # noqa: PLC0415

        # names its types before it is loaded: ggml must be the one that llama_cpp uses
        ggml = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml.so"))
        ggml.ggml_backend_load.restype = ctypes.c_void_p
        if not ggml.ggml_backend_load(library.encode()):
            raise RuntimeError(f"{library} could not be loaded as a ggml backend")
        self.lib = ctypes.CDLL(library)
        self.lib.mock_cuda_read.restype = Traffic
        self.lib.mock_cuda_nodes.restype = ctypes.c_int64

    def reset(self) -> None:
        self.lib.mock_cuda_reset()

    def traffic(self) -> dict[str, int]:
        now = self.lib.mock_cuda_read()
        return {name: int(getattr(now, name)) for name in TRAFFIC}

    def nodes(self, op: str) -> int:
        return int(self.lib.mock_cuda_nodes(op.encode()))


@contextmanager
def watched() -> Iterator[Any]:
    """The criticalkv_placement of all graphs of evictions and scorings inside."""
    from pycriticalkv._native import ffi, lib  # noqa: PLC0415

    placement = ffi.new("struct criticalkv_placement *")
    lib.criticalkv_watch_placement(placement)
    try:
        yield placement
    finally:
        lib.criticalkv_watch_placement(ffi.NULL)


PLACEMENT = ("n_graphs", "n_nodes", "n_nodes_cpu", "n_inputs", "bytes_inputs", "n_copies")


def placement_of(placement: Any) -> Answer:
    from pycriticalkv._native import ffi  # noqa: PLC0415

    counts: Answer = {name: int(getattr(placement, name)) for name in PLACEMENT}
    return {**counts, "first": ffi.string(placement.first).decode()}


def answer(job: Answer, mock: Mock | None = None) -> Answer:
    """Load a model, do what the job says, and report what was kept, the text, and where the graphs ran.

    job: "path", "model" (arguments of Llama), "policy" (of KVPolicy), "stream" (of Stream, optional), "prompt"
    (tokens), and "n" (greedy tokens after it) or "evict" (evaluate it plainly, then evict to so many entries; only that
    is watched), "scores" (true: report them, before the eviction), "tokens" (evaluate so many one by one at the end;
    each gets a row of graphs replayed, graphs launched, evictions so far).
    """
    from helpers import greedy, kept, prefill_only  # noqa: PLC0415

    from pycriticalkv import KVPolicy, Llama, Stream  # noqa: PLC0415

    arguments = {"verbose": False, "n_threads": 1, "n_threads_batch": 2, **job["model"]}
    if "stream" in job:
        arguments["stream"] = Stream(**job["stream"])
    llm = Llama(job["path"], kv_policy=KVPolicy(**job["policy"]), **arguments)
    text: list[int] = []
    try:
        if "evict" in job:
            prefill_only(llm, job["prompt"])
        scores = all_scores(llm) if job.get("scores") else []
        if mock is not None:
            mock.reset()
        with watched() as placement:
            if "evict" in job:
                llm._kv_store.evict(job["evict"])
            else:
                text = greedy(llm, job["prompt"], job["n"])
        traffic = None if mock is None else mock.traffic()
        fused = 0 if mock is None else mock.nodes("CUSTOM")
        stats = llm.kv_stats()
        out = {"text": text, "kept": kept(llm), "evictions": stats.evictions, "mode": stats.prefill}
        out |= {"placement": placement_of(placement), "traffic": traffic, "layers": len(llm._kv_store.layers())}
        out |= {"scores": scores, "fused": fused, "bound": stats.bound, "change": stats.change}
        out["scored"] = scores_bytes(llm, len(job["prompt"]))
        if mock is not None:
            mock.reset()
            llm.eval([5])
            out["set_rows"] = mock.nodes("SET_ROWS")
            out["attended"] = mock.nodes("FLASH_ATTN_EXT")
            out["uploads"] = mock.traffic()["n_up"]
            out["tokens"] = [graphs_of_a_token(llm, mock) for _ in range(job.get("tokens", 0))]
    finally:
        llm.close()
    return out


def graphs_of_a_token(llm: Any, mock: Mock) -> tuple[int, int, int]:
    """Evaluate a token: graphs that CUDA would have replayed, graphs it would have launched, evictions so far."""
    mock.reset()
    llm.eval([5])
    now = mock.traffic()
    return now["n_replayed"], now["n_launched"], llm.kv_stats().evictions


def all_scores(llm: Any) -> list[list[float]]:
    """Attention scores, then norms, of every layer."""
    window = llm._kv_policy.window
    return [part.ravel().tolist() for il in llm._kv_store.layers() for part in llm._kv_store.scores(il, window)]


def scores_bytes(llm: Any, n: int) -> int:
    """Bytes of the attention scores and norms of n entries, all layers."""
    layers = [llm._kv_store.layer(il) for il in llm._kv_store.layers()]
    return sum(2 * 4 * layer.n_head_kv * (n - llm._kv_policy.window) for layer in layers)


def answers(library: Path, jobs: list[Answer], capability: int = 860, *, fused: bool = True) -> list[Answer]:
    """Answers to jobs from a process with the device, whose kernels for our own ops count with `fused` only."""
    environment = {**os.environ, "MOCK_CUDA_CC": str(capability), "MOCK_CUDA_FUSED": str(int(fused))}
    done = subprocess.run(
        [sys.executable, __file__, str(library)],
        input=json.dumps(jobs), capture_output=True, text=True, env=environment, timeout=1200, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise AssertionError(f"the process with the mock device ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return list(json.loads(done.stdout))


def main() -> None:
    import pycriticalkv  # noqa: F401, PLC0415  first: it makes llama_cpp load our libraries

    mock = Mock(sys.argv[1])
    print(json.dumps([answer(job, mock) for job in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
