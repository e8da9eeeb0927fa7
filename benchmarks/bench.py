"""Decode, eviction and prefill speed against the full cache: ratios, measured in turn in one run.

make bench                                  SmolLM2 at 7,500 tokens, Qwen 0.5B at 16,000
python benchmarks/bench.py --only smollm2 --type q8_0
python benchmarks/bench.py --heads          heads of different lengths against uniform ones
python benchmarks/bench.py --growth         what a cache that grows with the prompt costs
python benchmarks/bench.py --stock-python .venv-stock/bin/python    compare with an unpatched build (make stock)
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import texts
from sides import Side, decode_in_turn, rate, ratio

CASES = {"smollm2": 7500, "qwen-coder-0.5b": 16000}
BUDGET = 1024
NEVER = 1_000_000  # a budget that is never reached
SHORT = 1024  # tokens of the stock cache that a budget is to be as fast as
CHARACTERS_PER_TOKEN = 5
CACHE_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}


def common(model: str, n_ctx: int, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that all sides share."""
    kind = CACHE_TYPES[args.type]
    return {
        "model_path": str(texts.fetch.fetch(model)), "n_ctx": n_ctx, "type_k": kind, "type_v": kind,
        "n_threads": args.threads, "n_threads_batch": args.threads,
    }  # fmt: skip


def against_the_full_cache(model: str, n: int, args: argparse.Namespace) -> None:
    """Decode after a long prompt: budget, full cache with flash attention on and off, and stock at a short context."""
    shared = common(model, n + 512, args)
    text = texts.long_text(n * CHARACTERS_PER_TOKEN)
    print(f"\n## {model}, cache {args.type}, prompt {n} tokens, budget {BUDGET}, {args.threads} threads\n", flush=True)
    # a quantized V cache needs flash attention
    attention = {"on": True, "off": False} if args.type == "f16" else {"on": True}
    sides = [
        *(Side(f"full, flash attention {name}", **shared, flash_attn=on) for name, on in attention.items()),
        *(Side(f"short, flash attention {name}", **shared, flash_attn=on) for name, on in attention.items()),
        Side("gram", **shared, kv_budget=BUDGET),
        Side("l1", **shared, kv_budget=BUDGET, kv_policy={"norm": "l1"}),
    ]
    prefills = {}
    for side in sides:
        length = SHORT if side.name.startswith("short") else n
        if side.name == "l1" and model != "smollm2":
            continue
        prefills[side.name] = side.prefill(text, length)
        print(f"prefill {length:6d} tokens, {side.name:27s} {prefills[side.name]['prefill']:8.2f} s", flush=True)
    for norm in ("gram", "l1"):
        if norm in prefills:
            got = prefills[norm]
            print(f"eviction over prefill, {norm}: {got['eviction']:.3f} s, {got['eviction'] / got['prefill']:.4f}")
    fastest = min(prefills[side.name]["prefill"] for side in sides if side.name.startswith("full"))
    print(f"prefill, budget over the best of full (one run each): {fastest / prefills['gram']['prefill']:.2f}")
    sides.pop().close()  # l1 decodes as gram does
    seconds = decode_in_turn(sides, args.rounds, args.tokens)
    print("\n| side | decode tokens/s |\n| --- | --- |")
    for side in sides:
        print(f"| {side.name} | {rate(seconds[side.name])} |")
    for kind in ("full", "short"):
        names = [name for name in seconds if name.startswith(kind)]
        best = min(names, key=lambda name: statistics.median(seconds[name]))
        print(f"budget over the best of {kind} ({best}): {ratio(seconds, best, 'gram')}", flush=True)
    for side in sides:
        side.close()


def heads_of_different_lengths(model: str, n: int, args: argparse.Namespace) -> None:
    """Decode with adaptive heads and with uniform ones, at the same total of entries; bytes of both."""
    shared = common(model, n + 512, args)
    text = texts.long_text(n * CHARACTERS_PER_TOKEN)
    print(f"\n## {model}, cache {args.type}, prompt {n} tokens, budget {BUDGET}, {args.threads} threads\n", flush=True)
    sides = [
        Side("uniform", **shared, kv_budget=BUDGET, kv_policy="criticalkv"),
        Side("uniform again", **shared, kv_budget=BUDGET, kv_policy="criticalkv"),
        Side("adaptive", **shared, kv_budget=BUDGET, kv_policy="ada-criticalkv"),
    ]
    print("| side | eviction, s | entries of a head | of all heads | MB of entries | MB allocated |")
    print("| --- | --- | --- | --- | --- | --- |")
    for side in sides:
        eviction = side.prefill(text, n)["eviction"]
        now = side.stats()
        print(f"| {side.name} | {eviction:.2f} | {now['least']} to {now['most']} | {now['entries']} | "
              f"{now['bytes'] / 1e6:.1f} | {now['allocated'] / 1e6:.1f} |", flush=True)  # fmt: skip
    seconds = decode_in_turn(sides, args.rounds, args.tokens)
    for name in ("adaptive", "uniform again"):  # the second shows what the machine's noise does
        print(f"decode, {name} over uniform: {ratio(seconds, 'uniform', name)}", flush=True)
    for side in sides:
        side.close()


def growth_of_the_cache(model: str, args: argparse.Namespace) -> None:
    """Prefill into a cache that grows, against one that was made for n_ctx at once."""
    n = 4096
    shared = common(model, n + 256, args)
    text = texts.long_text(n * CHARACTERS_PER_TOKEN)
    print(f"\n## {model}, cache {args.type}: prefill of {n} tokens\n", flush=True)
    sides = [
        Side("fixed", **shared, flash_attn=True),
        Side("fixed again", **shared, flash_attn=True),
        Side("grows at once", **shared, kv_budget=NEVER),
        Side("grows by steps", **shared, kv_budget=NEVER, by_steps=True),
    ]
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(args.rounds + 1):
        for side in sides if turn % 2 else sides[::-1]:
            measured = side.prefill(text, n)["prefill"]
            if turn:
                seconds[side.name].append(measured)
    for side in sides:
        print(f"prefill, {side.name} over fixed: {ratio(seconds, 'fixed', side.name)}", flush=True)
        side.close()


def against_an_unpatched_build(model: str, args: argparse.Namespace) -> None:
    """Without a budget: the same logits as an unpatched build, and its speed."""
    shared = common(model, 4096, args)
    text = texts.long_text(4096 * CHARACTERS_PER_TOKEN)
    print(f"\n## {model}, no budget, against an unpatched build, prompt 2048 tokens\n", flush=True)
    for flash_attn in (True, False):
        sides = [
            Side("unpatched", python=args.stock_python, stock=True, **shared, flash_attn=flash_attn),
            Side("patched", **shared, flash_attn=flash_attn),
            Side("unpatched again", python=args.stock_python, stock=True, **shared, flash_attn=flash_attn),
        ]
        prefill: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(args.rounds + 1):
            for side in sides if turn % 2 else sides[::-1]:
                measured = side.prefill(text, 2048)["prefill"]
                if turn:
                    prefill[side.name].append(measured)
        same = sides[0].logits() == sides[1].logits()
        tokens = [side.decode(32)["tokens"] for side in sides]
        same_after = sides[0].logits() == sides[1].logits() and tokens[0] == tokens[1]
        seconds = decode_in_turn(sides, args.rounds * 3, args.tokens)
        print(
            f"flash attention {'on' if flash_attn else 'off'}: logits identical after the prompt: {same}, "
            f"after 32 tokens: {same_after}"
        )
        for name in ("patched", "unpatched again"):  # the second shows what the machine's noise does
            print(f"  prefill, {name} over unpatched: {ratio(prefill, 'unpatched', name)}")
            print(f"  decode, {name} over unpatched:  {ratio(seconds, 'unpatched', name)}", flush=True)
        for side in sides:
            side.close()


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one model only")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--rounds", type=int, default=9, help="turns that count")
    parser.add_argument("--tokens", type=int, default=24, help="tokens decoded per turn")
    parser.add_argument("--type", default="f16", choices=CACHE_TYPES, help="of the cache")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (default: 7,500 and 16,000)")
    parser.add_argument("--heads", action="store_true", help="compare adaptive heads with uniform ones instead")
    parser.add_argument("--growth", action="store_true", help="measure the growth of the cache instead")
    parser.add_argument("--stock-python", help="python of an environment with an unpatched llama-cpp-python")
    args = parser.parse_args()
    if args.stock_python and not Path(args.stock_python).exists():
        parser.error(f"--stock-python: {args.stock_python} is not there; make stock builds it")
    print(f"{platform.machine()}, {os.cpu_count()} cores. Other programs on the machine spoil these figures.")
    for model, n in CASES.items():
        if args.only in (None, model):
            if args.growth:
                growth_of_the_cache(model, args)
            elif args.heads:
                heads_of_different_lengths(model, args.prompt or n, args)
            elif args.stock_python:
                against_an_unpatched_build(model, args)
            else:
                against_the_full_cache(model, args.prompt or n, args)


if __name__ == "__main__":
    main()
