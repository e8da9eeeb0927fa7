"""Whether exact prefill is full prefill, bit for bit, on real models.

    python benchmarks/exact.py --models smollm2 qwen-coder-0.5b gemma3-270m --prompt 6000

Reads the beginning of a play in both modes with the same budget, and compares: the positions that every KV head of
every layer kept, 64 tokens generated greedily, and the logits before each of them. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass

import numpy as np
import texts
from numpy.typing import NDArray

from pycriticalkv import Llama, llama_cpp

GENERATED = 64  # tokens
CHARACTERS_PER_TOKEN = 5


@dataclass
class Reading:
    """What one mode kept of the prompt and generated after it."""

    kept: list[NDArray[np.int32]]  # positions, per layer and KV head
    logits: NDArray[np.float32]  # [GENERATED, n_vocab]
    tokens: list[int]
    megabytes: float  # allocated for entries at the peak, hidden states included


def last_logits(llm: Llama) -> NDArray[np.float32]:
    """Logits after the last token."""
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


def read(name: str, prefill: str, args: argparse.Namespace) -> Reading:
    """Read the prompt in one mode, and go on."""
    llm = Llama(
        str(texts.fetch.fetch(name)), kv_budget=args.budget, prefill=prefill, n_ctx=args.prompt + GENERATED,
        n_threads=args.threads, n_threads_batch=args.threads, verbose=False,
    )  # fmt: skip
    prompt = llm.tokenize(texts.long_text(CHARACTERS_PER_TOKEN * args.prompt).encode())[: args.prompt]
    llm.eval(prompt)
    kept = [positions for il in llm._kv_store.layers() for positions in llm.kv_positions(il)]
    logits, tokens = [], []
    for _ in range(GENERATED):
        logits.append(last_logits(llm))
        tokens.append(int(np.argmax(logits[-1])))
        llm.eval(tokens[-1:])
    stats = llm.kv_stats()
    assert stats.prefill == prefill and len(prompt) == args.prompt
    llm.close()
    return Reading(kept, np.stack(logits), tokens, (stats.bytes_allocated_peak + stats.bytes_hidden_peak) / 1e6)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2"], choices=list(texts.fetch.MODELS))
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    args = parser.parse_args()
    print("| model | prompt | heads x kept | positions | logits | tokens | peak MB, full | exact |")
    print("| --- |" + " --- |" * 7)
    same = True
    for name in args.models:
        full, exact = (read(name, prefill, args) for prefill in ("full", "exact"))
        equal = (
            all(np.array_equal(a, b) for a, b in zip(full.kept, exact.kept, strict=True)),
            np.array_equal(full.logits, exact.logits),
            full.tokens == exact.tokens,
        )
        same = same and all(equal)
        words = " | ".join("equal" if one else "DIFFER" for one in equal)
        kept = f"{len(full.kept)} x {len(full.kept[0])}"
        print(
            f"| {name} | {args.prompt} | {kept} | {words} | {full.megabytes:.1f} | {exact.megabytes:.1f} |", flush=True
        )
    sys.exit(not same)


if __name__ == "__main__":
    main()
