"""Memory of the process and of the cache: before the prompt, at the peak, after the eviction, and after more tokens.

    python benchmarks/memory.py --model smollm2 --budgets 512 1024

Each row is a process of its own. Resident memory is what the system counts for the whole process, weights included:
once the model was loaded and had evaluated a few tokens, at the highest, and later. Bytes of the cache are what
kv_stats() says; for the stock cache, what llama.cpp allocates for the same n_ctx.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import texts

from pycriticalkv import Llama, llama_cpp

CACHE_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
MB = 1e6
CHARACTERS_PER_TOKEN = 6


def resident() -> dict[str, float]:
    """Resident memory of this process in MB, now and at the peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 / MB for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def stock_bytes(llm: Llama) -> int:
    """Bytes that a stock cache of a model without sliding-window layers has allocated."""
    n_embd_kv = llama_cpp.llama_model_n_head_kv(llm.model) * (
        llama_cpp.llama_model_n_embd(llm.model) // llama_cpp.llama_model_n_head(llm.model)
    )
    kind = llm.context_params.type_k
    row = n_embd_kv * {1: 2, 8: 34 / 32, 2: 18 / 32}[kind]
    return int(2 * row * llama_cpp.llama_model_n_layer(llm.model) * llm.n_ctx())


def measure(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    """One row, in this process."""
    kind = CACHE_TYPES[args.type]
    more = {"kv_budget": budget} if budget else {"flash_attn": True}
    path = str(texts.fetch.fetch(args.model))
    llm = Llama(path, n_ctx=args.n_ctx, type_k=kind, type_v=kind, n_threads=args.threads, verbose=False, **more)
    text = texts.long_text((args.prompt + args.more) * CHARACTERS_PER_TOKEN)
    tokens = llm.tokenize(text.encode())[: args.prompt + args.more]
    llm.eval(tokens[:8])
    llm.reset()

    def cache() -> float:
        return (llm.kv_stats().bytes_allocated if budget else stock_bytes(llm)) / MB

    row: dict[str, Any] = {"start": resident()["now"], "cache_before": cache()}
    llm.eval(tokens[: args.prompt])
    row["cache_peak"] = llm.kv_stats().bytes_allocated_peak / MB if budget else cache()
    row["peak"] = resident()["peak"]
    row["after"], row["cache_after"] = resident()["now"], cache()
    for token in tokens[args.prompt :]:
        llm.eval([token])
    row["later"], row["cache_later"] = resident()["now"], cache()
    return row


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "qwen-coder-0.5b"))
    parser.add_argument("--type", default="f16", choices=CACHE_TYPES, help="of the cache")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--prompt", type=int, default=6500)
    parser.add_argument("--more", type=int, default=1000, help="tokens after the eviction")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args, args.one)))
        return
    print(f"\n## {args.model}, cache {args.type}, prompt {args.prompt} tokens, n_ctx {args.n_ctx}, MB\n")
    print("| | resident: loaded | peak | after the eviction | after more tokens |", end="")
    print(" cache before | peak | after | after more |")
    print("| --- |" + " --- |" * 8)
    for budget in (0, *args.budgets):
        command = [sys.executable, *sys.argv, "--one", str(budget)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        columns = ("start", "peak", "after", "later", "cache_before", "cache_peak", "cache_after", "cache_later")
        cells = " | ".join(f"{row[column]:.1f}" for column in columns)
        print(f"| {f'budget {budget}' if budget else 'stock'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
