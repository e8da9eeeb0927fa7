"""What eviction does to the next-token distribution of real text, and whether the norms agree.

    python benchmarks/kl.py kl --model smollm2
    python benchmarks/kl.py kl --model smollm2 --type q8_0 --budgets 600 1200 --windows 16 --presets snapkv critical-max
    python benchmarks/kl.py overlap --model smollm2

`kl`: the first 6,000 tokens of a play are read and evicted once by each policy; the 512 tokens of the play that follow
are then given (teacher-forced) and their next-token distributions compared with those of the full cache of the same
type: the mean of KL(full || evicted) in nats, its standard error over the tokens, and how often the most likely token
is the same. The prompt is read once per window size; every policy starts from the same saved cache.

`overlap`: the same prompt, evicted with each of the three norms; share of the kept entries that two norms have in
common, the window and the sinks left out.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import texts

from pycriticalkv import PRESETS, KVPolicy, Llama
from pycriticalkv.evaluation.continuation import decode
from pycriticalkv.evaluation.divergence import divergence

PROMPT = 6000
FORCED = 512
CHARACTERS_PER_TOKEN = 5
NORMS = ("l1", "l2", "gram")
UNUSED_BUDGET = 100_000  # of a model that is evicted by hand
POLICIES = ("random", "streamingllm", "snapkv", "criticalkv", "critical-max")
CACHE_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}


@dataclass(frozen=True)
class Setup:
    """What all arms of one table share."""

    model: str
    play: str
    cache_type: str
    threads: int

    def open(self, policy: KVPolicy) -> Llama:
        """The model, which evicts only on request."""
        kind = CACHE_TYPES[self.cache_type]
        return Llama(
            str(texts.fetch.fetch(self.model)), kv_budget=UNUSED_BUDGET, kv_policy=policy, n_ctx=PROMPT + FORCED + 64,
            type_k=kind, type_v=kind, n_threads=self.threads, n_threads_batch=self.threads, verbose=False,
        )  # fmt: skip


def arms(windows: list[int], presets: list[str]) -> list[tuple[str, KVPolicy]]:
    """Policies to compare, by name and window."""
    return [
        (f"{name}, window {window}", replace(PRESETS[name], window=window)) for window in windows for name in presets
    ]


def read_prompt(setup: Setup, window: int) -> tuple[Any, list[int]]:
    """State of the cache after the prompt, nothing evicted, and the tokens that follow."""
    llm = setup.open(KVPolicy(window=window))
    tokens = llm.tokenize(texts.play(setup.play)[: (PROMPT + FORCED) * CHARACTERS_PER_TOKEN].encode())[
        : PROMPT + FORCED
    ]
    assert len(tokens) == PROMPT + FORCED
    llm.eval(tokens[:PROMPT])
    state = llm.save_state()
    llm.close()
    return state, tokens[PROMPT:]


def measure_kl(setup: Setup, budgets: list[int], windows: list[int], presets: list[str]) -> None:
    """Print the table of divergences."""
    print(f"\n## {setup.model}, {setup.play}, cache {setup.cache_type}: KL from the full cache after {PROMPT} tokens,")
    print(f"{FORCED} teacher-forced tokens\n")
    print("| policy | " + " | ".join(f"{b}: KL (se), same first" for b in budgets) + " |")
    print("| --- |" + " --- |" * len(budgets))
    states = {window: read_prompt(setup, window) for window in windows}
    full = {}
    for name, policy in arms(windows, presets):
        state, forced = states[policy.window]
        llm = setup.open(policy)
        if policy.window not in full:
            llm.load_state(state)
            full[policy.window] = decode(llm, forced)
        cells = []
        for budget in budgets:
            llm.load_state(state)
            llm._kv_store.evict(budget)
            evicted = decode(llm, forced)
            kl = divergence(full[policy.window], evicted)
            same = np.mean(full[policy.window].argmax(axis=1) == evicted.argmax(axis=1))
            cells.append(f"{kl.mean():.4f} ({kl.std() / len(kl) ** 0.5:.4f}), {same:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        llm.close()
    equal = all(np.array_equal(full[windows[0]], other) for other in full.values())
    print(f"\nfull cache, all prefills give identical logits: {equal}")


def measure_overlap(setup: Setup) -> None:
    """Print the share of kept entries that two norms have in common: mean over layers, least layer."""
    print(f"\n## {setup.model}, {setup.play}: share of chosen entries that two norms have in common, {PROMPT} tokens\n")
    print(
        "| preset | budget | " + " | ".join(f"{a} and {b}: mean, least layer" for a, b in combinations(NORMS, 2)) + " |"
    )
    print("| --- | --- |" + " --- |" * len(list(combinations(NORMS, 2))))
    state, _ = read_prompt(setup, 16)
    for preset in ("critical-max", "criticalkv"):
        kept: dict[tuple[str, int], list[list[set[int]]]] = {}
        budgets = (PROMPT // 10, PROMPT // 5)
        for norm in NORMS:
            llm = setup.open(replace(PRESETS[preset], norm=norm))
            for budget in budgets:
                llm.load_state(state)
                llm._kv_store.evict(budget)
                kept[norm, budget] = [
                    [set(head[4:-16].tolist()) for head in llm.kv_positions(il)] for il in llm._kv_store.layers()
                ]
            llm.close()
        for budget in budgets:
            cells = []
            for a, b in combinations(NORMS, 2):
                per_layer = [
                    np.mean([len(x & y) / len(x) for x, y in zip(u, v, strict=True)])
                    for u, v in zip(kept[a, budget], kept[b, budget], strict=True)
                ]
                cells.append(f"{np.mean(per_layer):.4f}, {min(per_layer):.4f}")
            print(f"| {preset} | {budget} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kl", "overlap"))
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "qwen-coder-0.5b"))
    parser.add_argument("--play", default="tempest", choices=texts.PLAYS)
    parser.add_argument("--type", default="f16", choices=CACHE_TYPES, help="of the cache")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--windows", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--presets", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    setup = Setup(args.model, args.play, args.type, args.threads)
    if args.what == "kl":
        measure_kl(setup, args.budgets, args.windows, args.presets)
    else:
        measure_overlap(setup)


if __name__ == "__main__":
    main()
