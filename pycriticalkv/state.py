"""Saved states of a model with a budget: sealed when saved, checked in full before they are used."""

from __future__ import annotations

import hashlib
from copy import copy

import llama_cpp
import numpy as np

MAGIC = b"pycriticalkv state 1\n"
DIGEST_SIZE = hashlib.sha256().digest_size


def _digest(state: llama_cpp.LlamaState, payload: bytes) -> bytes:
    h = hashlib.sha256()
    h.update(int(state.n_tokens).to_bytes(8, "little"))
    h.update(np.ascontiguousarray(state.input_ids[: state.n_tokens], dtype=np.int32).tobytes())
    h.update(payload)
    return h.digest()


def seal(state: llama_cpp.LlamaState) -> llama_cpp.LlamaState:
    """Put a digest over the cache and its tokens before the native state."""
    state.input_ids = state.input_ids[: state.n_tokens].copy()
    state.llama_state = MAGIC + _digest(state, state.llama_state) + state.llama_state
    state.llama_state_size = len(state.llama_state)
    return state


def unseal(state: llama_cpp.LlamaState, *, n_ctx: int, n_vocab: int) -> llama_cpp.LlamaState:
    """Check a state in full and return a copy that llama_cpp can load.

    Raises:
        ValueError: The state was not saved with a budget, is damaged, or does not fit ``n_ctx``.
    """
    blob = bytes(state.llama_state)
    if not blob.startswith(MAGIC):
        raise ValueError("the state cannot be loaded: it was not saved by a pycriticalkv.Llama with kv_budget")
    digest = blob[len(MAGIC) : len(MAGIC) + DIGEST_SIZE]
    payload = blob[len(MAGIC) + DIGEST_SIZE :]
    n_tokens = state.n_tokens
    if not 0 <= n_tokens <= len(state.input_ids) or digest != _digest(state, payload):
        raise ValueError("the state cannot be loaded: it is damaged (its checksum does not match)")
    if n_tokens > n_ctx:
        raise ValueError(f"the state cannot be loaded: it holds {n_tokens} tokens, n_ctx is {n_ctx}")
    ids = state.input_ids[:n_tokens]
    if n_tokens and not (int(ids.min()) >= 0 and int(ids.max()) < n_vocab):
        raise ValueError("the state cannot be loaded: its tokens are not in the vocabulary of this model")
    opened = copy(state)
    opened.llama_state = payload
    opened.llama_state_size = len(payload)
    return opened


def refuse_sealed(state: llama_cpp.LlamaState) -> None:
    """Raise ValueError for a state that only a model with a budget can load."""
    if bytes(state.llama_state[: len(MAGIC)]) == MAGIC:
        raise ValueError("the state cannot be loaded: it was saved with kv_budget; give the same kv_budget here")
