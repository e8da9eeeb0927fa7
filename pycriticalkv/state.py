"""Saved states of a model with a budget: sealed when saved, checked in full before they are used."""

from __future__ import annotations

import hashlib
from copy import copy
from pathlib import Path

import llama_cpp
import numpy as np

MAGIC = b"pycriticalkv state 1\n"
DIGEST = hashlib.sha256().digest_size
SAMPLES = 64  # of a model file, spread evenly
SAMPLE_BYTES = 1 << 16


class StateError(ValueError, KeyError):
    """A state that cannot be loaded. A KeyError too, so that llama-cpp-python's caches treat it as a miss."""

    def __str__(self) -> str:
        """The message itself, where KeyError would quote it."""
        return str(self.args[0])


def model_digest(path: str) -> bytes:
    """A digest of a model file: its size, its beginning, and samples of its weights."""
    size = Path(path).stat().st_size
    h = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        for i in range(SAMPLES):
            file.seek(i * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
            h.update(file.read(SAMPLE_BYTES))
    return h.digest()


def _content_digest(state: llama_cpp.LlamaState, payload: bytes) -> bytes:
    h = hashlib.sha256()
    h.update(repr((int(state.n_tokens), int(state.seed), state.scores.shape)).encode())
    h.update(np.ascontiguousarray(state.input_ids[: state.n_tokens], dtype=np.int32).tobytes())
    h.update(np.ascontiguousarray(state.scores, dtype=np.single).tobytes())
    h.update(payload)
    return h.digest()


def seal(state: llama_cpp.LlamaState, model: bytes) -> llama_cpp.LlamaState:
    """Put the model's digest and one over the cache and its tokens before the native state."""
    state.input_ids = state.input_ids[: state.n_tokens].copy()
    state.llama_state = MAGIC + model + _content_digest(state, state.llama_state) + state.llama_state
    state.llama_state_size = len(state.llama_state)
    return state


def unseal(state: llama_cpp.LlamaState, model: bytes, *, n_ctx: int, logits_all: bool) -> llama_cpp.LlamaState:
    """Check a state in full and return a copy that llama_cpp can load.

    Raises:
        StateError: The state was not saved with a budget, is damaged, or does not fit this model.
    """
    if not isinstance(state, llama_cpp.LlamaState):
        raise TypeError(f"state={state!r}: allowed is what save_state() returned")
    blob = bytes(state.llama_state)
    if not blob.startswith(MAGIC):
        raise StateError("the state cannot be loaded: it was not saved by a pycriticalkv.Llama with kv_budget")
    blob = blob[len(MAGIC) :]
    payload = blob[2 * DIGEST :]
    n_tokens = int(state.n_tokens)
    intact = 0 <= n_tokens <= len(state.input_ids) and blob[DIGEST : 2 * DIGEST] == _content_digest(state, payload)
    if not intact:
        raise StateError("the state cannot be loaded: it is damaged (its checksum does not match)")
    if blob[:DIGEST] != model:
        raise StateError("the state cannot be loaded: it was saved by another model")
    if n_tokens > n_ctx:
        raise StateError(f"the state cannot be loaded: it holds {n_tokens} tokens, n_ctx is {n_ctx}")
    if logits_all and len(state.scores) != n_tokens:
        raise StateError("the state cannot be loaded: this model has logits_all=True, the one that saved it had not")
    opened = copy(state)
    opened.llama_state = payload
    opened.llama_state_size = len(payload)
    return opened


def refuse_sealed(state: llama_cpp.LlamaState) -> None:
    """Raise StateError for a state that only a model with a budget can load."""
    if bytes(state.llama_state[: len(MAGIC)]) == MAGIC:
        raise StateError("the state cannot be loaded: it was saved with kv_budget; give a kv_budget here too")
