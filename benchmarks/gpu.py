"""Prefill, eviction, decode and memory on a GPU against the full cache, on a random model in the shape of an 8B llama.

    python benchmarks/gpu.py                      prompts of 4,096, 16,384 and 65,536 tokens, budget 1024
    python benchmarks/gpu.py --layers 2 --gpu-layers 0 --tokens 1100    a rehearsal on the CPU

Sides take turns, as in `pycriticalkv bench`; all of them are open at once and each holds the model, so the card needs
about 35 GB for the longest prompt; lengths that do not fit are left out, and said. The model is written to --folder,
once. Device memory is what the backend says is in use.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path
from typing import Any

from random_model import Sizes, write_random_model

from pycriticalkv import Llama
from pycriticalkv._library import LIBRARY_FOLDER
from pycriticalkv.evaluation import Speed, measure_speed, speed_rows
from pycriticalkv.evaluation.speed import speed_table

BUDGET = 1024
MB = 1e6


class Device:
    """Memory of the first GPU, as ggml's backend reports it."""

    def __init__(self) -> None:
        self.ggml = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml-base.so"))
        registry = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml.so"))
        registry.ggml_backend_dev_by_type.restype = ctypes.c_void_p
        self.ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
        gpu = 1  # GGML_BACKEND_DEVICE_TYPE_GPU
        self.found = registry.ggml_backend_dev_by_type(gpu)

    def name(self) -> str:
        """The card's name, or that there is none."""
        if not self.found:
            return "no GPU"
        return str(self.ggml.ggml_backend_dev_description(ctypes.c_void_p(self.found)).decode())

    def _memory(self) -> tuple[float, float]:
        if not self.found:
            return float("nan"), float("nan")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.ggml.ggml_backend_dev_memory(ctypes.c_void_p(self.found), ctypes.byref(free), ctypes.byref(total))
        return free.value / MB, total.value / MB

    def free(self) -> float:
        """MB that are free."""
        return self._memory()[0]

    def used(self) -> float:
        """MB in use."""
        free, total = self._memory()
        return total - free


def lengths_that_fit(lengths: list[int], path: Path, layers: int, device: Device) -> list[int]:
    """Those for which three models, two full caches and the scores of attention without flash have room."""
    per_token = layers * 2 * Sizes.n_head_kv * (Sizes.n_embd // Sizes.n_head) * 2  # f16
    fitting = []
    for n in lengths:
        needed = (3 * path.stat().st_size + n * (2 * per_token + Sizes.n_head * 512 * 4)) / MB
        if device.found and needed > device.free():
            print(f"{n} tokens: skipped, they need {needed:.0f} MB and {device.free():.0f} are free")
        else:
            fitting.append(n)
    return fitting


def memory_rows(path: str, tokens: int, device: Device, **arguments: Any) -> None:
    """Device memory of the stock cache and of a budget: with the model loaded and after the prompt."""
    print("\n| | device MB: before | model loaded | after the prompt | kv_stats: allocated, MB | at the peak |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, more in {"stock": {"flash_attn": True}, f"budget {BUDGET}": {"kv_budget": BUDGET}}.items():
        before = device.used()
        llm = Llama(path, n_ctx=tokens + 256, verbose=False, **arguments, **more)
        loaded = device.used()
        llm.eval([10 + i % 400 for i in range(tokens)])
        llm.sample(temp=0.0)
        after = device.used()
        stats = llm.kv_stats() if "kv_budget" in more else None
        now, peak = (stats.bytes_allocated / MB, stats.bytes_allocated_peak / MB) if stats else (float("nan"),) * 2
        print(f"| {name} | {before:.0f} | {loaded:.0f} | {after:.0f} | {now:.1f} | {peak:.1f} |", flush=True)
        llm.close()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the model is written")
    parser.add_argument("--layers", type=int, default=Sizes.n_layer)
    parser.add_argument("--gpu-layers", type=int, default=-1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    device = Device()
    if args.gpu_layers != 0 and not device.found:
        parser.error("there is no GPU, or this build has no backend for it; --gpu-layers 0 rehearses on the CPU")
    path = args.folder / f"random-8b-{args.layers}-layers.gguf"
    if not path.exists():
        scratch = path.with_suffix(".part")
        write_random_model(scratch, Sizes(n_layer=args.layers))
        scratch.rename(path)
    print(f"{device.name()}; {args.layers} layers of an 8B shape, Q4_0, f16 cache, budget {BUDGET}")
    tokens = lengths_that_fit(args.tokens, path, args.layers, device)
    if not tokens:
        return
    memory_rows(str(path), max(tokens), device, n_gpu_layers=args.gpu_layers)
    measured: list[Speed] = []
    for speed in measure_speed(str(path), tokens, [BUDGET], turns=args.turns, n_gpu_layers=args.gpu_layers):
        if measured and speed.n_tokens != measured[-1].n_tokens:  # so that a time limit leaves what is done
            print(f"\n{speed_table(speed_rows(measured))}", flush=True)
            measured = []
        measured.append(speed)
    print(f"\n{speed_table(speed_rows(measured))}")


if __name__ == "__main__":
    main()
