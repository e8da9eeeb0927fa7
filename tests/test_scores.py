"""Scores and norms of the native graphs against float64 NumPy, on tensors read back from the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from expected import (
    AGGREGATES,
    KERNELS,
    NORMS,
    QUANTIZED,
    TYPES,
    allowed,
    reference_scores,
    relative_error,
    relative_to_largest,
)
from helpers import kept, prefill_only
from reference.select import select

from pycriticalkv import PRESETS, KVPolicy, Llama

WINDOW = 16


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
        assert relative_error(value, want_value) < allowed(policy.norm)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_quantized_caches(make_tiny, load, tokens, kind, head_dim):
    if KERNELS and head_dim % 64 != 0 and kind in ("q8_0", "q5_0", "q4_0"):
        pytest.skip("rows of these heads are not multiples of 4 bytes, which devices refuse")
    path = make_tiny(head_dim=head_dim, n_head=4, n_layer=2)
    for norm in NORMS:
        policy = KVPolicy(norm=norm)
        llm = load(path, kv_budget=64, kv_policy=policy, n_ctx=512, type_k=QUANTIZED[kind], type_v=QUANTIZED[kind])
        prefill_only(llm, tokens(300))
        attn, value = llm._kv_store.scores(1, WINDOW)
        want_attn, want_value = reference_scores(llm, path, 1, policy, kind)
        assert relative_error(attn, want_attn) < 1e-5
        assert relative_error(value, want_value) < allowed(policy.norm)


# Those without projected norms; the others are in test_tiny_model.
UNPROJECTED = {
    "vatp": KVPolicy(aggregate="mean", value="vatp"),
    "vatp-max": KVPolicy(value="vatp"),
    "caote": KVPolicy(aggregate="mean", value="caote"),
    "tova": PRESETS["tova"],
    "knorm": PRESETS["knorm"],
    "keydiff": PRESETS["keydiff"],
}


@pytest.mark.parametrize("name", UNPROJECTED)
@pytest.mark.parametrize("kind", [*TYPES, *QUANTIZED])
def test_scores_without_projection(make_tiny, load, tokens, name, kind):
    policy, type_of = UNPROJECTED[name], {**TYPES, **QUANTIZED}[kind]
    path = make_tiny(head_dim=64, n_head=6, n_head_kv=3, n_layer=2)
    llm = load(path, kv_budget=64, kv_policy=policy, n_ctx=1024, type_k=type_of, type_v=type_of)
    prefill_only(llm, tokens(301))
    for il in (0, 1):
        attn, value = llm._kv_store.scores(il, policy.window)
        want_attn, want_value = reference_scores(llm, path, il, policy, kind)
        assert attn.shape == value.shape == (3, 301 - policy.window)
        assert (relative_to_largest if name == "keydiff" else relative_error)(attn, want_attn) < 1e-5
        if policy.value != "none":
            assert relative_error(value, want_value) < allowed(policy.norm)
        else:
            assert not value.any()


@pytest.mark.parametrize("name", ["caote", "keydiff"])
def test_scores_without_projection_block_by_block(make_tiny, load, tokens, name):
    """So many entries that the KV heads of a layer fall into several graphs."""
    policy, path = UNPROJECTED[name], make_tiny(head_dim=128, n_head=8, n_head_kv=4, n_layer=1)
    llm = load(path, kv_budget=64, kv_policy=policy, n_ctx=2048)
    prefill_only(llm, tokens(1500))
    attn, value = llm._kv_store.scores(0, policy.window)
    want_attn, want_value = reference_scores(llm, path, 0, policy)
    assert relative_to_largest(attn, want_attn) < 1e-5
    assert name == "keydiff" or relative_error(value, want_value) < allowed(policy.norm)


@pytest.mark.parametrize("wo_type", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("norm", NORMS)
def test_every_kind_of_output_projection(make_tiny, load, tokens, norm, wo_type):
    # Q4_0, Q4_K and, with AMX, the others too have another layout on the CPU and are unpacked by multiplying
    path = make_tiny(wo_type=wo_type)
    llm = load(path, kv_budget=64, kv_policy=KVPolicy(norm=norm), n_ctx=1024)
    prefill_only(llm, tokens(200))
    _, value = llm._kv_store.scores(1, WINDOW)
    _, want = reference_scores(llm, path, 1, KVPolicy(norm=norm))
    assert relative_error(value, want) < allowed(norm, 2e-5)


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


@pytest.mark.parametrize("n_tokens", [100, 2600])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("norm", NORMS)
def test_kv_heads_in_several_graphs(make_tiny, load, tokens, norm, kind, n_tokens):
    # attention: 3, 3 and 2 KV heads of 2 * 80 rows in a graph; with many tokens 1, and for the norms 3
    path = make_tiny(n_head=16, n_head_kv=8, head_dim=64, n_layer=1, n_ctx=4096)
    for aggregate in AGGREGATES:
        policy = KVPolicy(norm=norm, aggregate=aggregate, window=80, pool=63)
        number = {**TYPES, **QUANTIZED}[kind]
        llm = load(path, kv_budget=1024, kv_policy=policy, n_ctx=4096, type_k=number, type_v=number)
        prefill_only(llm, tokens(n_tokens))
        attn, value = llm._kv_store.scores(0, 80)
        want_attn, want_value = reference_scores(llm, path, 0, policy, kind)
        assert relative_error(attn, want_attn) < 1e-5
        assert relative_error(value, want_value) < allowed(policy.norm, 2e-5)


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
        assert relative_error(value, want_value) < allowed(policy.norm, 2e-5)


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
    if policy.value == "vatp":
        return [attn * norm]
    if policy.value == "caote":
        return [attn / (1 - attn) * norm]
    if policy.aggregate == "max":
        floored = np.maximum(attn, attn.mean())
        return [floored, floored * norm]
    return [attn, (attn + policy.eps) * norm]


def tied_within_rounding(only_want, only_got, scores):
    """Whether each entry that one selection has alone ties, within rounding, with one that the other has alone."""
    return all(any(abs(s[a] - s[b]) <= 1e-5 * abs(s[a]) for s in scores for b in only_got) for a in only_want)


def document_tokens(llm):
    text = "The keeper of the lighthouse wrote down the weather every evening. " * 60
    return llm.tokenize(text.encode())[:640]


@pytest.fixture(scope="module")
def smollm2_document(smollm2):
    """State of SmolLM2 after a document of 640 tokens, nothing evicted: read once, since that takes longest."""
    llm = Llama(smollm2, kv_budget=1024, n_ctx=1024, verbose=False)
    llm.eval(document_tokens(llm))
    state = llm.save_state()
    llm.close()
    return state


PROJECTED = [(preset, norm) for preset in ("critical-max", "criticalkv") for norm in NORMS]
OTHERS = [(preset, "gram") for preset in ("snapkv", "vatp", "caote", "tova", "knorm", "keydiff")]


@pytest.mark.parametrize("preset,norm", PROJECTED + OTHERS)
def test_smollm2_scores_and_kept_sets(smollm2, smollm2_document, load, preset, norm):
    policy = replace(PRESETS[preset], norm=norm)
    window = policy.window
    llm = load(smollm2, kv_budget=128, kv_policy=policy, n_ctx=1024)
    if window == WINDOW:
        llm.load_state(smollm2_document)
    else:  # a state has the queries of its own window
        prefill_only(llm, document_tokens(llm))
    want = {}
    for il in (0, 13, 29):
        want[il] = reference_scores(llm, smollm2, il, policy)
        attn, value = llm._kv_store.scores(il, window)
        assert (relative_to_largest if preset == "keydiff" else relative_error)(attn, want[il][0]) < 1e-5
        if policy.value != "none":
            assert relative_error(value, want[il][1]) < allowed(norm, 2e-5)
    llm._kv_store.evict(128)
    for il, (attn, value) in want.items():
        for head, got in enumerate(llm.kv_positions(il)):
            n = attn.shape[1] + window
            chosen = set(select(preset, n, 128, window, 4, attn=attn[head], norm=value[head]))
            only_want, only_got = chosen - set(got.tolist()), set(got.tolist()) - chosen
            assert len(only_want) == len(only_got) <= 2
            assert tied_within_rounding(only_want, only_got, ranking_scores(policy, attn[head], value[head]))
