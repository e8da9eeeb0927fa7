"""What several test files do with a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pycriticalkv._native import lib

from pycriticalkv import Llama, llama_cpp
from pycriticalkv.prefill import Progress


def prefill_only(llm: Llama, tokens: list[int]) -> None:
    """Evaluate a prompt without the eviction that eval() adds."""
    llama_cpp.Llama.eval(llm, tokens)


def last_logits(llm: Llama) -> NDArray[np.float32]:
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def greedy(llm: Llama, prompt: list[int], n: int) -> list[int]:
    """n greedy tokens after a prompt."""
    out: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        out.append(int(token))
        if len(out) == n:
            break
    return out


def kept(llm: Llama) -> list[list[list[int]]]:
    """Kept positions: [layer][KV head][entry]."""
    return [[head.tolist() for head in llm.kv_positions(il)] for il in llm._kv_store.layers()]


def entries(llm: Llama) -> int:
    return int(llm._kv_store.stats().n_entries)


def fail_allocations(llm: Llama, other: Llama, prompt: list[int], conversation: list[int]) -> int:
    """Let the k-th allocation fail while `llm` reads a prompt after a conversation, for k from 1 to 50.

    It must then go on as `other` does: as if the prompt had not been there, or, where only shrinking failed, with it.
    Returns how many times the prompt was refused.
    """
    failed = 0
    for k in range(1, 51):
        for each in (llm, other):
            each.reset()
            if conversation:
                each.eval(conversation)
                each.eval([7])
        lib.criticalkv_fail_allocation(k)
        refused = ""
        try:
            llm.eval(prompt)
        except MemoryError as e:
            refused = str(e)
        lib.criticalkv_fail_allocation(0)
        if refused:
            assert "no memory" in refused
            failed += 1
        else:
            other.eval(prompt)
        assert (llm.n_tokens, kept(llm)) == (other.n_tokens, kept(other))
        for each in (llm, other):
            each.eval([5, 6, 8])
        assert np.array_equal(last_logits(llm), last_logits(other))
    return failed


def stop_at(report: int) -> Progress:
    """Ctrl-C, when a prompt reports its progress for that time."""
    left = iter(range(report - 1, -1, -1))

    def progress(_done: int, _total: int) -> None:
        if next(left, None) == 0:
            raise KeyboardInterrupt

    return progress
