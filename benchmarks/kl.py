"""What eviction does to the next-token distribution of real text, and whether the norms agree.

    python benchmarks/kl.py kl --model smollm2
    python benchmarks/kl.py overlap --model smollm2

`kl`: the first 6,000 tokens of a play are read and evicted once by each policy; the 512 tokens of the play that follow
are then given (teacher-forced) and their next-token distributions compared with those of the full cache: the mean of
KL(full || evicted) in nats, its standard error over the tokens, and how often the most likely token is the same. The
prompt is read once per window size; every policy starts from the same saved cache.

`overlap`: the same prompt, evicted with each of the three norms; share of the kept entries that two norms have in
common, the window and the sinks left out.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import texts
from numpy.typing import NDArray

from pycriticalkv import PRESETS, KVPolicy, Llama, llama_cpp

PROMPT = 6000
FORCED = 512
CHARACTERS_PER_TOKEN = 5
NORMS = ("l1", "l2", "gram")
UNUSED_BUDGET = 100_000  # of a model that is evicted by hand


def arms() -> list[tuple[str, KVPolicy]]:
    """Policies to compare, by name and window."""
    return [
        (f"{name}, window {window}", replace(PRESETS[name], window=window))
        for window in (16, 32)
        for name in ("random", "streamingllm", "snapkv", "criticalkv", "critical-max")
    ]


def open_model(model: str, policy: KVPolicy, threads: int) -> Llama:
    """A model that evicts only on request."""
    path = str(texts.fetch.fetch(model))
    return Llama(
        path, kv_budget=UNUSED_BUDGET, kv_policy=policy, n_ctx=PROMPT + FORCED + 64,
        n_threads=threads, n_threads_batch=threads, verbose=False,
    )  # fmt: skip


def decode(llm: Llama, tokens: list[int], all_logits: bool) -> NDArray[np.float32] | None:
    """Evaluate tokens; with all_logits return the logits of each."""
    rows = []
    for i in range(0, len(tokens), llm.n_batch):
        batch = tokens[i : i + llm.n_batch]
        llm._batch.set_batch(batch=batch, n_past=llm.n_tokens, logits_all=all_logits)
        llm._ctx.decode(llm._batch)
        llm.input_ids[llm.n_tokens : llm.n_tokens + len(batch)] = batch
        llm.n_tokens += len(batch)
        if all_logits:
            pointer = llama_cpp.llama_get_logits(llm.ctx)
            rows.append(np.ctypeslib.as_array(pointer, shape=(len(batch), llm.n_vocab())).copy())
    return np.concatenate(rows) if rows else None


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Row by row, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def divergence(full: NDArray[np.float32], evicted: NDArray[np.float32]) -> tuple[NDArray[np.float64], float]:
    """KL(full || evicted) of each token in nats, and the share of equal first choices."""
    rows = []
    for i in range(0, len(full), 64):  # 64 rows at a time: a vocabulary of 150,000 in float64 is large
        p, q = log_softmax(full[i : i + 64]), log_softmax(evicted[i : i + 64])
        rows.append((np.exp(p) * (p - q)).sum(axis=1))
    return np.concatenate(rows), float(np.mean(full.argmax(axis=1) == evicted.argmax(axis=1)))


def read_prompt(model: str, window: int, play: str, threads: int) -> tuple[Any, list[int]]:
    """State of the cache after the prompt, nothing evicted, and the tokens that follow."""
    llm = open_model(model, KVPolicy(window=window), threads)
    tokens = llm.tokenize(texts.play(play)[: (PROMPT + FORCED) * CHARACTERS_PER_TOKEN].encode())[: PROMPT + FORCED]
    assert len(tokens) == PROMPT + FORCED
    decode(llm, tokens[:PROMPT], all_logits=False)
    state = llm.save_state()
    llm.close()
    return state, tokens[PROMPT:]


def measure_kl(model: str, play: str, budgets: list[int], threads: int) -> None:
    """Print the table of divergences."""
    print(f"\n## {model}, {play}: KL from the full cache after {PROMPT} tokens, {FORCED} teacher-forced tokens\n")
    print("| policy | " + " | ".join(f"{b}: KL (se), same first" for b in budgets) + " |")
    print("| --- |" + " --- |" * len(budgets))
    states = {window: read_prompt(model, window, play, threads) for window in (16, 32)}
    full = {}
    for name, policy in arms():
        state, forced = states[policy.window]
        llm = open_model(model, policy, threads)
        if policy.window not in full:
            llm.load_state(state)
            full[policy.window] = decode(llm, forced, all_logits=True)
        cells = []
        for budget in budgets:
            llm.load_state(state)
            llm._kv_store.evict(budget)
            evicted = decode(llm, forced, all_logits=True)
            kl, same = divergence(full[policy.window], evicted)  # type: ignore[arg-type]
            cells.append(f"{kl.mean():.4f} ({kl.std() / len(kl) ** 0.5:.4f}), {same:.3f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        llm.close()
    equal = np.array_equal(full[16], full[32])
    print(f"\nfull cache, the two prefills give identical logits: {equal}")


def measure_overlap(model: str, play: str, threads: int) -> None:
    """Print the share of kept entries that two norms have in common: mean over layers, least layer."""
    print(f"\n## {model}, {play}: share of chosen entries that two norms have in common, {PROMPT} tokens\n")
    print(
        "| preset | budget | " + " | ".join(f"{a} and {b}: mean, least layer" for a, b in combinations(NORMS, 2)) + " |"
    )
    print("| --- | --- |" + " --- |" * len(list(combinations(NORMS, 2))))
    state, _ = read_prompt(model, 16, play, threads)
    for preset in ("critical-max", "criticalkv"):
        kept: dict[tuple[str, int], list[list[set[int]]]] = {}
        budgets = (PROMPT // 10, PROMPT // 5)
        for norm in NORMS:
            llm = open_model(model, replace(PRESETS[preset], norm=norm), threads)
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
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    if args.what == "kl":
        measure_kl(args.model, args.play, args.budgets, args.threads)
    else:
        measure_overlap(args.model, args.play, args.threads)


if __name__ == "__main__":
    main()
