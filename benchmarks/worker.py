"""One side of a comparison: a process with one model that does what the lines on its standard input say.

Each side has a process of its own, so that the sides can take turns without loading anything again, and so that one of
them can run an unpatched llama-cpp-python from another environment. Commands are JSON lists, answers JSON objects.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def load(arguments: dict[str, Any]) -> Any:
    """A Llama: pycriticalkv's, or with "stock" llama_cpp's own."""
    arguments = dict(arguments, verbose=False)
    by_steps = arguments.pop("by_steps", False)
    if arguments.pop("stock", False):
        from llama_cpp import Llama  # noqa: PLC0415
    else:
        from pycriticalkv import KVPolicy, Llama  # noqa: PLC0415

        if isinstance(arguments.get("kv_policy"), dict):
            arguments["kv_policy"] = KVPolicy(**arguments["kv_policy"])
    llm = Llama(**arguments)
    if by_steps:  # as for callers of the C API who reserve nothing
        llm._kv_store.reserve = lambda n: None
    return llm


def prefill(llm: Any, text: str, n: int) -> dict[str, Any]:
    """Evaluate the first n tokens of a text in an empty cache; evictions are counted apart."""
    tokens = llm.tokenize(text.encode())
    if len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, needed are {n}")
    llm.reset()
    start = time.perf_counter()
    llm.eval(tokens[:n])
    llm.sample(temp=0.0)  # waits for the graph
    total = time.perf_counter() - start
    eviction = llm.kv_stats().seconds_total if getattr(llm, "_kv_budget", None) else 0.0
    return {"prefill": total - eviction, "eviction": eviction}


def decode(llm: Any, n: int) -> dict[str, Any]:
    """Generate n greedy tokens one by one."""
    token = llm.sample(temp=0.0)
    start = time.perf_counter()
    out = []
    for _ in range(n):
        llm.eval([token])
        token = llm.sample(temp=0.0)
        out.append(int(token))
    return {"decode": (time.perf_counter() - start) / n, "tokens": out}


def logits(llm: Any) -> dict[str, Any]:
    """A digest of the logits of the last token."""
    import ctypes  # noqa: PLC0415
    import hashlib  # noqa: PLC0415

    import llama_cpp  # noqa: PLC0415

    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return {"logits": hashlib.sha256(ctypes.string_at(pointer, 4 * llm.n_vocab())).hexdigest()}


def stats(llm: Any) -> dict[str, Any]:
    """Entries and bytes of the cache."""
    now = llm.kv_stats()
    entries = [n for layer in now.entries for n in layer]
    return {
        "least": min(entries), "most": max(entries), "entries": sum(entries), "bytes": now.bytes_now,
        "allocated": now.bytes_allocated,
    }  # fmt: skip


COMMANDS = {"prefill": prefill, "decode": decode, "stats": stats, "logits": logits}


def main() -> None:
    """Load the model that the first line describes, then serve commands."""
    llm = load(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(COMMANDS[name](llm, *arguments)), flush=True)


if __name__ == "__main__":
    main()
