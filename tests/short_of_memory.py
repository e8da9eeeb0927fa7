"""What test_memory.py runs in a process of its own: growing and evicting with too little memory.

    short_of_memory.py grow|evict|recurrent MODEL OUT

writes a pickled dictionary of what was seen to OUT.
"""

from __future__ import annotations

import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
from helpers import kept, last_logits, prefill_only

from pycriticalkv import Llama

MIB = 1 << 20


def allow(more: int | None) -> None:
    """Let the process have so many bytes more than it has."""
    limit = resource.RLIM_INFINITY
    if more is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def text(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(10, 440, n).tolist()


def grow_too_far(llm: Llama) -> dict[str, Any]:
    llm.eval(text(200))
    before, allocated = (kept(llm), llm.n_tokens), llm.kv_stats().bytes_allocated
    allow(40 * MIB)
    out: dict[str, Any] = {}
    try:
        llm.eval(text(7000, seed=2))
    except MemoryError as e:
        out["error"] = str(e)
    out["same"] = before == (kept(llm), llm.n_tokens)
    out["allocated"] = allocated, llm.kv_stats().bytes_allocated
    # a caller of llama_cpp's own eval grows in the decode
    try:
        prefill_only(llm, text(7000, seed=2))
    except RuntimeError as e:
        out["decode"] = str(e)
    allow(None)
    llm.n_tokens = 200
    llm.eval(text(10, seed=3))
    out["logits"] = last_logits(llm)
    return out


def evict_without_memory(llm: Llama) -> dict[str, Any]:
    prefill_only(llm, text(4000))
    llm._kv_store.scores(0, 16)
    allow(2 * MIB)
    llm._kv_store.evict(3000)
    out: dict[str, Any] = {"allocated": llm.kv_stats().bytes_allocated}
    allow(None)
    prefill_only(llm, text(10, seed=3))
    out["kept"], out["logits"] = kept(llm), last_logits(llm)
    return out


def fail_in_a_recurrent_model(llm: Llama) -> dict[str, Any]:
    """A decode fails after the recurrent state has moved on: the cache gives nothing until it is cleared."""
    llm.eval(text(200))
    allow(40 * MIB)
    out: dict[str, Any] = {"errors": {}}
    try:
        prefill_only(llm, text(7000, seed=2))
    except RuntimeError as e:
        out["decode"] = str(e)
    allow(None)
    store = llm._kv_store
    refused = {
        "eval": lambda: llm.eval([5]),
        "save_state": llm.save_state,
        "scores": lambda: store.scores(store.layers()[0], 16),
        "evict": lambda: store.evict(64),
    }
    for name, call in refused.items():
        try:
            call()
        except RuntimeError as e:
            out["errors"][name] = str(e)
    llm.reset()
    llm.eval(text(200, seed=3))
    llm.save_state()
    store.evict(64)
    prefill_only(llm, [5])
    out["kept"], out["logits"] = kept(llm), last_logits(llm)
    return out


def main() -> None:
    """Run as a program."""
    what, path, out = sys.argv[1:]
    llm = Llama(path, kv_budget=3000, n_ctx=8192, n_threads=1, n_threads_batch=1, verbose=False)
    seen = {"grow": grow_too_far, "evict": evict_without_memory, "recurrent": fail_in_a_recurrent_model}[what](llm)
    Path(out).write_bytes(pickle.dumps(seen))


if __name__ == "__main__":
    main()
