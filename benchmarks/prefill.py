"""Reading a long prompt in every mode, and answering it: wall time, memory of the cache, and resident memory.

    python benchmarks/prefill.py --model qwen-coder-0.5b --prompt 30000 --rounds 1

The prompt is a chat: public text with a fact hidden in it (task "facts" of the evaluation), and the question for it;
each round has its own.
Every reading is a process of its own, and the modes take turns. Seconds are of the whole prompt, evictions included,
divided by those of the same round's stock. Cache: what kv_stats() says was allocated at the peak, hidden states apart;
for stock, what llama.cpp allocates for the same n_ctx. Resident memory is sampled every 10 ms: all of it, and without
the pages of files (the model's weights, as far as llama.cpp does not repack them).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import texts
from memory import CACHE_TYPES, MB, stock_bytes

from pycriticalkv import Llama, Stream
from pycriticalkv.evaluation import prompts
from pycriticalkv.evaluation.tasks import make_sample, score

ANSWER = 48  # tokens

MODES = {
    "stock": {"flash_attn": True},
    "stock-no-fa": {"flash_attn": False},
    "full": {"prefill": "full"},
    "exact": {"prefill": "exact"},
    "stream": {"prefill": "stream"},
}


class Resident(threading.Thread):
    """The most resident memory in MB, all and anonymous, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.all = self.anonymous = 0.0
        self.done = False

    def sample(self) -> None:
        """Read once."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        size = {key: int(lines[key].split()[0]) * 1024 / MB for key in ("VmRSS", "RssFile")}
        self.all = max(self.all, size["VmRSS"])
        self.anonymous = max(self.anonymous, size["VmRSS"] - size["RssFile"])

    def run(self) -> None:
        """Until `done`."""
        while not self.done:
            self.sample()
            time.sleep(0.01)


def measure(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One reading, in this process."""
    kind = CACHE_TYPES[args.type]
    more: dict[str, Any] = dict(MODES[mode])
    budget = not mode.startswith("stock")
    if budget:
        more.update(kv_budget=args.budget)
    if mode == "stream":
        more.update(stream=Stream(args.observe, chunk=args.chunk))
    path = str(texts.fetch.fetch(args.model))
    llm = Llama(path, n_ctx=args.n_ctx, type_k=kind, type_v=kind, n_threads=args.threads, verbose=False, **more)

    def count(piece: str) -> int:
        return len(llm.tokenize(piece.encode(), add_bos=False, special=False))

    sample = make_sample("facts", n_tokens=args.prompt, seed=args.seed + args.turn, count_tokens=count)
    tokens = prompts.build(llm, sample.context, sample.question).tokens
    llm.eval(tokens[:8])
    llm.reset()
    start = Resident()
    start.sample()
    watch = Resident()
    watch.start()
    begun = time.perf_counter()
    llm.eval(tokens)
    token = llm.sample(temp=0.0)  # waits for the graph
    row: dict[str, Any] = {"seconds": time.perf_counter() - begun, "loaded": start.anonymous}
    answer: list[int] = []
    while len(answer) < ANSWER and token != llm.token_eos():
        answer.append(token)
        llm.eval([token])
        token = llm.sample(temp=0.0)
    row["answer"] = llm.detokenize(answer).decode("utf-8", errors="replace")
    row["score"] = score(sample, row["answer"])
    watch.done = True
    watch.join()
    row.update(resident=watch.all, anonymous=watch.anonymous)
    stats = llm.kv_stats() if budget else None
    row["cache"] = (stats.bytes_allocated_peak if stats else stock_bytes(llm)) / MB
    row["hidden"] = stats.bytes_hidden_peak / MB if stats else 0.0
    row["entries"] = stats.entries_peak if stats else len(tokens)
    return row


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "qwen-coder-0.5b", "gemma3-270m"))
    parser.add_argument("--type", default="f16", choices=CACHE_TYPES, help="of the cache")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=7500)
    parser.add_argument("--n-ctx", type=int, help="default: the prompt and 512 more")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's fact; each round has its own")
    parser.add_argument("--observe", default="re-peek", help="of Stream")
    parser.add_argument("--chunk", type=int, help="of Stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.n_ctx = args.n_ctx or args.prompt + 512
    if args.one is not None:
        print(json.dumps(measure(args, args.one)))
        return
    print(f"\n## {args.model}, cache {args.type}, prompt {args.prompt}, budget {args.budget}, {args.rounds} rounds\n")
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in args.modes}
    for turn in range(args.rounds):
        for mode in args.modes if turn % 2 == 0 else args.modes[::-1]:
            command = [sys.executable, *sys.argv, "--one", mode, "--turn", str(turn)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[mode].append(json.loads(out))
            print(f"{mode}: {json.dumps(rows[mode][-1])}", file=sys.stderr, flush=True)
    print("| | s | over stock | entries per head, peak | cache, peak MB | hidden states MB |", end="")
    print(" resident MB | without file pages: loaded | peak | right answers |")
    print("| --- |" + " --- |" * 9)
    for mode, readings in rows.items():
        middle = {key: statistics.median(row[key] for row in readings) for key in readings[0] if key != "answer"}
        ratio = statistics.median(
            row["seconds"] / stock["seconds"] for row, stock in zip(readings, rows[args.modes[0]], strict=True)
        )
        print(
            f"| {mode} | {middle['seconds']:.1f} | {ratio:.2f} | {middle['entries']:.0f} | {middle['cache']:.1f} | "
            f"{middle['hidden']:.1f} | {middle['resident']:.0f} | {middle['loaded']:.0f} | {middle['anonymous']:.0f} | "
            f"{sum(row['score'] for row in readings):.0f} of {len(readings)} |"
        )


if __name__ == "__main__":
    main()
