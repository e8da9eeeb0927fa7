"""Scores and norms of the native graphs against float64 NumPy, on tensors read back from the cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
from helpers import kept, prefill_only
from reference import scores as reference
from reference.select import select

from pycriticalkv import PRESETS, KVPolicy, Llama

NORMS = {"gram": reference.norm_gram, "l2": reference.norm_l2, "l1": reference.norm_l1}
AGGREGATES = {"mean": reference.aggregate_mean, "max": reference.aggregate_max}
TYPES = {"f32": 0, "f16": 1, "bf16": 30}
WINDOW = 16


@cache
def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@cache
def output_projection(path, il):
    """W_O of a layer as in the file: [n_embd, n_head * d], float64."""
    tensor = tensors(path)[f"blk.{il}.attn_output.weight"]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


def as_cached(q, kind):
    """The product multiplies queries in the type of the cached keys, as attention itself does."""
    if kind == "f16":
        return q.astype(np.float16).astype(np.float64)
    if kind == "bf16":
        bits = q.astype(np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return rounded.view(np.float32).astype(np.float64)
    return q.astype(np.float64)


def reference_scores(llm, path, il, policy, kind="f16"):
    store = llm._kv_store
    k, v, q = (store.read(which, il).astype(np.float64) for which in "kvq")
    n, info = len(k), store.layer(il)
    q_pos = np.arange(llm.n_tokens - len(q), llm.n_tokens)
    # entries that an earlier eviction left are all visible; the tail is in the order of positions
    k_pos = np.arange(llm.n_tokens - n, llm.n_tokens)
    attention = reference.window_attention(as_cached(q, kind), k, q_pos, k_pos, info.scale, softcap=info.softcap)
    attn = AGGREGATES[policy.aggregate](attention, policy.window, policy.pool, n_head_kv=info.n_head_kv)
    norm = NORMS[policy.norm](v[: n - policy.window], output_projection(path, il))
    return attn, norm


def relative_error(got, want):
    return float(np.max(np.abs(got - want) / np.abs(want)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("kind", TYPES)
def test_tiny_model(tiny, load, tokens, norm, aggregate, kind):
    policy = KVPolicy(norm=norm, aggregate=aggregate)
    llm = load(tiny, kv_budget=64, kv_policy=policy, n_ctx=1024, type_k=TYPES[kind], type_v=TYPES[kind])
    prefill_only(llm, tokens(601))
    for il in llm._kv_store.layers():
        attn, value = llm._kv_store.scores(il, WINDOW)
        want_attn, want_value = reference_scores(llm, tiny, il, policy, kind)
        assert attn.shape == value.shape == (2, 585)
        assert relative_error(attn, want_attn) < 1e-5
        assert relative_error(value, want_value) < 1e-5


@pytest.mark.parametrize("wo_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_kind_of_output_projection(make_tiny, load, tokens, norm, wo_type):
    # Q4_0 and Q4_K are kept in another layout by the CPU backend and have to be unpacked by multiplying
    path = make_tiny(wo_type=wo_type)
    llm = load(path, kv_budget=64, kv_policy=KVPolicy(norm=norm), n_ctx=1024)
    prefill_only(llm, tokens(200))
    _, value = llm._kv_store.scores(1, WINDOW)
    _, want = reference_scores(llm, path, 1, KVPolicy(norm=norm))
    factor = 1.0
    if wo_type == "Q4_0":
        # multiplied by 1 as a quantized activation, whose f16 scale is off: one factor for all entries
        factor = float(np.median(value / want))
        assert abs(factor - 1.0) < 2**-11
    assert relative_error(value / factor, want) < 2e-5


@pytest.mark.parametrize("arguments", [{"n_head_kv": 1}, {"n_head_kv": 8}, {"n_head_kv": 4, "head_dim": 64}])
def test_head_layouts(make_tiny, load, tokens, arguments):
    path = make_tiny(**arguments)
    llm = load(path, kv_budget=64, n_ctx=1024)
    prefill_only(llm, tokens(300))
    attn, value = llm._kv_store.scores(2, WINDOW)
    want_attn, want_value = reference_scores(llm, path, 2, KVPolicy())
    assert attn.shape[0] == arguments["n_head_kv"]
    assert relative_error(attn, want_attn) < 1e-5
    assert relative_error(value, want_value) < 1e-5


@pytest.mark.parametrize("window,pool", [(1, 1), (3, 3), (32, 7), (64, 63), (256, 5)])
def test_windows_and_pools(tiny, load, tokens, window, pool):
    for aggregate in AGGREGATES:
        policy = KVPolicy(window=window, pool=pool, aggregate=aggregate)
        llm = load(tiny, kv_budget=300, kv_policy=policy, n_ctx=1024)
        prefill_only(llm, tokens(357))
        attn, _ = llm._kv_store.scores(0, window)
        want, _ = reference_scores(llm, tiny, 0, policy)
        assert relative_error(attn, want) < 1e-5


@pytest.mark.parametrize("n_head,n_head_kv", [(96, 1), (160, 2)])
@pytest.mark.parametrize("norm", NORMS)
def test_many_query_heads_on_one_kv_head(make_tiny, load, tokens, norm, n_head, n_head_kv):
    path = make_tiny(n_head=n_head, n_head_kv=n_head_kv, head_dim=16, n_layer=1)
    for aggregate in AGGREGATES:
        policy = KVPolicy(norm=norm, aggregate=aggregate)
        llm = load(path, kv_budget=64, kv_policy=policy, n_ctx=512)
        prefill_only(llm, tokens(150))
        attn, value = llm._kv_store.scores(0, WINDOW)
        want_attn, want_value = reference_scores(llm, path, 0, policy)
        assert relative_error(attn, want_attn) < 1e-5
        assert relative_error(value, want_value) < 2e-5


def test_after_an_eviction_and_more_tokens(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    for token in tokens(20, seed=2):
        llm.eval([token])
    attn, value = llm._kv_store.scores(1, WINDOW)
    want_attn, want_value = reference_scores(llm, tiny, 1, KVPolicy())
    assert attn.shape == (2, 64 + 20 - WINDOW)
    assert relative_error(attn, want_attn) < 1e-5
    assert relative_error(value, want_value) < 1e-5


def test_scoring_changes_nothing(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    prefill_only(llm, tokens(100))
    before = llm._kv_store.read("k", 0), kept(llm)
    llm._kv_store.scores(0, WINDOW)
    assert np.array_equal(before[0], llm._kv_store.read("k", 0))
    assert before[1] == kept(llm)


def ranking_scores(policy, attn, norm):
    """The scores by which the policy's stages rank."""
    if policy.value == "none":
        return [attn]
    if policy.aggregate == "max":
        floored = np.maximum(attn, attn.mean())
        return [floored, floored * norm]
    return [attn, (attn + policy.eps) * norm]


def tied_within_rounding(only_want, only_got, scores):
    """Whether each entry that one selection has alone ties, within rounding, with one that the other has alone."""
    return all(any(abs(s[a] - s[b]) <= 1e-5 * abs(s[a]) for s in scores for b in only_got) for a in only_want)


@pytest.fixture(scope="module")
def smollm2_document(smollm2):
    """State of SmolLM2 after a document of 640 tokens, nothing evicted: read once, since that takes longest."""
    llm = Llama(smollm2, kv_budget=1024, n_ctx=1024, verbose=False)
    text = "The keeper of the lighthouse wrote down the weather every evening. " * 60
    llm.eval(llm.tokenize(text.encode())[:640])
    state = llm.save_state()
    llm.close()
    return state


@pytest.mark.parametrize("preset", ["critical-max", "criticalkv", "snapkv"])
@pytest.mark.parametrize("norm", NORMS)
def test_smollm2_scores_and_kept_sets(smollm2, smollm2_document, load, preset, norm):
    policy = replace(PRESETS[preset], norm=norm)
    llm = load(smollm2, kv_budget=128, kv_policy=policy, n_ctx=1024)
    llm.load_state(smollm2_document)
    want = {}
    for il in (0, 13, 29):
        want[il] = reference_scores(llm, smollm2, il, policy)
        attn, value = llm._kv_store.scores(il, WINDOW)
        assert relative_error(attn, want[il][0]) < 1e-5
        if policy.value == "critical":
            assert relative_error(value, want[il][1]) < 2e-5
    llm._kv_store.evict(128)
    for il, (attn, value) in want.items():
        for head, got in enumerate(llm.kv_positions(il)):
            n = attn.shape[1] + WINDOW
            chosen = set(select(preset, n, 128, WINDOW, 4, attn=attn[head], norm=value[head]))
            only_want, only_got = chosen - set(got.tolist()), set(got.tolist()) - chosen
            assert len(only_want) == len(only_got) <= 2
            assert tied_within_rounding(only_want, only_got, ranking_scores(policy, attn[head], value[head]))
