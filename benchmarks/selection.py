"""How long choosing takes, on one core: every preset, 32 layers of 8 KV heads with 32,768 entries each, budget 1024.

    python benchmarks/selection.py
    python benchmarks/selection.py --entries 8192 --policies ada-criticalkv --rounds 5

Scores are random numbers as attention gives them (most of it on few entries). Prints the seconds of a whole eviction's
selection, the least and the most of all rounds; presets take turns.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray

from pycriticalkv import PRESETS, KVPolicy
from pycriticalkv.store import select_entries, share_budget

Rows = NDArray[np.float32]


def choose(policy: KVPolicy, budget: int, positions: NDArray[np.int32], attn: Rows, norm: Rows) -> None:
    """The selection of one layer; attn, norm: [heads, entries]."""
    budgets = [budget] * len(attn)
    if policy.heads == "adaptive":
        budgets = share_budget(policy, budget, [positions] * len(attn), attn=attn[:, : -policy.window]).tolist()
    for head, of_head in enumerate(budgets):
        select_entries(policy, of_head, positions, attn=attn[head], norm=norm[head], head=head)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--entries", type=int, default=32768)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policies", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    random = np.random.default_rng(1)
    attn = random.exponential(size=(args.heads, args.entries)).astype(np.float32) ** 4
    attn /= attn.sum(axis=1, keepdims=True)
    norm = random.lognormal(size=attn.shape).astype(np.float32)
    positions = np.arange(args.entries, dtype=np.int32)
    seconds: dict[str, list[float]] = {name: [] for name in args.policies}
    for _ in range(args.rounds):
        for name in args.policies:
            started = time.perf_counter()
            for _ in range(args.layers):
                choose(PRESETS[name], args.budget, positions, attn, norm)
            seconds[name].append(time.perf_counter() - started)
    print(f"{args.layers} layers, {args.heads} KV heads, {args.entries} entries, budget {args.budget}\n")
    print("| preset | s, least | most |\n| --- | --- | --- |")
    for name, times in seconds.items():
        print(f"| `{name}` | {min(times):.2f} | {max(times):.2f} |")


if __name__ == "__main__":
    main()
