"""What several test files do with a model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pycriticalkv import Llama, llama_cpp


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
