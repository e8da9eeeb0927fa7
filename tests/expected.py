"""Expected scores of a store's layer: the float64 reference on tensors read back from the cache and the model file."""

from __future__ import annotations

import os
from functools import cache

import gguf
import numpy as np
from reference import scores as reference

NORMS = {"gram": reference.norm_gram, "l2": reference.norm_l2, "l1": reference.norm_l1}
KEY_SCORES = {"key-norm": reference.key_norm, "keydiff": reference.keydiff}
AGGREGATES = {"mean": reference.aggregate_mean, "max": reference.aggregate_max}
TYPES = {"f32": 0, "f16": 1, "bf16": 30}
QUANTIZED = {"q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}


# All layers of the tests' models on a GPU, whose kernels for our ops count (conftest.py): they multiply queries as they
# were saved, for pools up to 33, and round values and W_O to f16 for the L1 norm.
MAX_POOL = 33
KERNELS = os.environ.get("PYCRITICALKV_TEST_GPU_LAYERS", "0") != "0"


def allowed(norm, rounding=1e-5):
    """The relative error of value norms that rounding explains."""
    return 2**-11 if KERNELS and norm == "l1" else rounding


@cache
def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@cache
def output_projection(path, il):
    """W_O of a layer as in the file: [n_embd, n_head * d], float64."""
    tensor = tensors(path)[f"blk.{il}.attn_output.weight"]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


def as_cached(q, kind, pool=1):
    """The product multiplies queries in the type of the cached keys, as attention itself does; kernels do not."""
    if KERNELS and pool <= MAX_POOL:
        return q.astype(np.float64)
    if kind == "f16":
        return q.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        bits = q.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)
    return q.astype(np.float64)


def hadamard(n):
    """Orthonormal, symmetric, its own inverse (Sylvester's construction)."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def unrotated(v, kind):
    """Values as the model made them: quantized caches rotate each 64 numbers of a head, if 64 divides it."""
    if kind not in QUANTIZED or v.shape[-1] % 64:
        return v
    return (v.reshape(*v.shape[:2], -1, 64) @ hadamard(64)).reshape(v.shape)


def sink_logits(path, il):
    """[n_head], or None for a model without attention sinks."""
    tensor = tensors(path).get(f"blk.{il}.attn_sinks.weight")
    return None if tensor is None else tensor.data.astype(np.float64)


def reference_scores(llm, path, il, policy, kind="f16", wo=None):
    """Scores, and what the values weigh, of layer il; `wo` in place of the file's output projection."""
    store = llm._kv_store
    k, v, q = (store.read(which, il).astype(np.float64) for which in "kvq")
    n, info = len(k), store.layer(il)
    q_pos = np.arange(llm.n_tokens - len(q), llm.n_tokens)
    # entries that an earlier eviction left are all visible; the tail is in the order of positions
    k_pos = np.arange(llm.n_tokens - n, llm.n_tokens)
    attention = reference.window_attention(
        as_cached(q, kind, policy.pool), k, q_pos, k_pos, info.scale, softcap=info.softcap, sinks=sink_logits(path, il)
    )
    before = n - policy.window
    if policy.score in KEY_SCORES:
        attn = KEY_SCORES[policy.score](k)[:, :before]
    else:
        attn = AGGREGATES[policy.aggregate](attention, policy.window, policy.pool, n_head_kv=info.n_head_kv)
    if policy.heads == "shared":
        attn = np.broadcast_to(attn.mean(axis=0), attn.shape)
    values = unrotated(v, kind)
    if policy.value == "vatp":
        norm = reference.value_l1(values[:before])
    elif policy.value == "caote":
        norm = reference.output_distance(attention, values)[:, :before]
    else:
        norm = NORMS[policy.norm](values[:before], output_projection(path, il) if wo is None else wo)
    return attn, norm


def relative_error(got, want):
    return float(np.max(np.abs(got - want) / np.abs(want)))


def relative_to_largest(got, want):
    """For scores of either sign, which can be near zero where larger numbers cancel."""
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
