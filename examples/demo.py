"""The same question about the same long document, once with the full cache and once with a budget.

make demo
python examples/demo.py [smollm2 | qwen-coder-0.5b] [--budget 1024] [--days 180]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logbook import ANSWER, QUESTION, logbook

from pycriticalkv import Llama

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import fetch


@dataclass
class Run:
    """What one run measured; bytes are of K and V, times in seconds."""

    answer: str
    prompt_tokens: int
    prefill: float
    eviction: float
    tokens_per_second: float
    kv_bytes: int
    kv_allocated: int


def chat_prompt(llm: Llama, document: str) -> list[int]:
    """Tokens of a chat with the document and the question, in the model's own format."""
    text = (
        f"<|im_start|>system\nAnswer with one short sentence from the logbook.<|im_end|>\n<|im_start|>user\n"
        f"{document}\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    return llm.tokenize(text.encode(), add_bos=False, special=True)


def run(path: str, document: str, budget: int | None, n_decode: int) -> Run:
    """Ask once. Decoding is timed over the answer and further tokens, so that short answers can be compared."""
    threads = os.cpu_count() or 2
    arguments: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "verbose": False, "n_ctx": 8192}
    llm = Llama(path, kv_budget=budget, flash_attn=True, **arguments)
    prompt = chat_prompt(llm, document)
    if len(prompt) + n_decode > llm.n_ctx():
        raise SystemExit(f"the prompt has {len(prompt)} tokens; give fewer --days")
    start = time.perf_counter()
    llm.eval(prompt)
    token = llm.sample(temp=0.0)
    prefill = time.perf_counter() - start
    answer: list[int] = []
    ended = False
    start = time.perf_counter()
    for _ in range(n_decode):
        ended = ended or token in (llm.token_eos(), llm.tokenize(b"<|im_end|>", add_bos=False, special=True)[0])
        if not ended:
            answer.append(token)
        llm.eval([token])
        token = llm.sample(temp=0.0)
    rate = n_decode / (time.perf_counter() - start)
    if budget is None:
        # f16 keys and values of every token
        per_token = Llama(path, kv_budget=64, n_ctx=256, verbose=False)
        per_token.eval(prompt[:64])
        each = per_token.kv_stats().bytes_now // 64
        eviction, kv_bytes, allocated = 0.0, each * llm.n_tokens, each * llm.n_ctx()
        per_token.close()
    else:
        stats = llm.kv_stats()
        eviction, kv_bytes, allocated = stats.seconds_total, stats.bytes_now, stats.bytes_allocated
    text = llm.detokenize(answer).decode("utf-8", errors="replace").strip()
    llm.close()
    return Run(text, len(prompt), prefill - eviction, eviction, rate, kv_bytes, allocated)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen-coder-0.5b", choices=("smollm2", "qwen-coder-0.5b"))
    parser.add_argument("--budget", type=int, default=1024, help="entries per KV head and layer")
    parser.add_argument("--days", type=int, default=180, help="length of the document")
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode")
    args = parser.parse_args()
    path = str(fetch.fetch(args.model))
    document = logbook(args.days)
    print(f"model: {Path(path).name}\nquestion: {QUESTION}\nin the document: {ANSWER}\n", flush=True)
    full = run(path, document, None, args.decode)
    print(f"full cache ({full.prompt_tokens} tokens): {full.answer}", flush=True)
    small = run(path, document, args.budget, args.decode)
    print(f"kv_budget={args.budget}: {small.answer}\n")
    print(f"{'':25s}{'full cache':>12s}{'budget':>12s}{'ratio':>9s}")
    rows = (
        ("KV entries, MB", full.kv_bytes / 1e6, small.kv_bytes / 1e6),
        ("KV memory in the end, MB", full.kv_allocated / 1e6, small.kv_allocated / 1e6),
        ("prefill, s", full.prefill, small.prefill),
        ("eviction, s", full.eviction, small.eviction),
        ("decode, tokens/s", full.tokens_per_second, small.tokens_per_second),
    )
    for name, a, b in rows:
        relation = f"{b / a:9.2f}" if a else ""
        print(f"{name:25s}{a:12.2f}{b:12.2f}{relation}")


if __name__ == "__main__":
    main()
