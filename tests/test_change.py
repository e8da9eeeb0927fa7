"""What evictions measure, the bound and the change, against float64 NumPy on tensors read back before the eviction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from expected import (
    KERNELS,
    MAX_POOL,
    NORMS,
    QUANTIZED,
    TYPES,
    allowed,
    as_cached,
    output_projection,
    sink_logits,
    tensors,
    unrotated,
)
from helpers import kept, prefill_only
from pycriticalkv._native import ffi, lib
from reference import change as reference
from reference.scores import window_attention
from tiny import write_tiny_lora

from pycriticalkv import PRESETS, KVPolicy, Stream, llama_cpp

BUDGET = 64
KINDS = {**TYPES, **QUANTIZED}
# f32 sums on the CPU come within 2e-7; a GPU may multiply in TF32.
ROUNDING = 2e-3 if KERNELS else 5e-6


@dataclass
class Before:
    """A layer before an eviction."""

    attention: np.ndarray  # [n_head, m, n]
    v: np.ndarray
    positions: list[np.ndarray]  # [KV head]

    def kept_by(self, llm, il):
        after = llm.kv_positions(il)
        return np.array([np.isin(old, new) for old, new in zip(self.positions, after, strict=True)])


def layers_before(llm, path, kind="f16"):
    store, out = llm._kv_store, {}
    for il in store.layers():
        k, v, q = (store.read(which, il).astype(np.float64) for which in "kvq")
        held, info = int(store.stats().n_tokens), store.layer(il)
        attention = window_attention(
            as_cached(q, kind, MAX_POOL + 1), k, np.arange(held - len(q), held), np.arange(held - len(k), held),
            info.scale, softcap=info.softcap, sinks=sink_logits(path, il),
        )  # fmt: skip
        out[il] = Before(attention, unrotated(v, kind), llm.kv_positions(il))
    return out


def check_layer(llm, il, before, wo, norm, rounding=ROUNDING):
    """Compare one layer; returns its bound and change."""
    bound, change = llm._kv_store.change(il)
    keep = before.kept_by(llm, il)
    weights = reference.mean_attention(before.attention, before.v.shape[1])
    want, size = reference.bound(weights, NORMS[norm](before.v, wo), keep)
    assert change == pytest.approx(reference.change(before.attention, before.v, wo, keep), rel=rounding)
    assert bound == pytest.approx(want / size, rel=max(rounding, allowed(norm)))
    most = reference.mean_change(weights, before.v, wo, keep, 1 if norm == "l1" else 2)
    assert 0 < most <= bound * size * (1 + allowed(norm))
    return bound, change


def evict_and_check(llm, path, policy, kind="f16", budget=BUDGET, wo_of=output_projection):
    before = layers_before(llm, path, kind)
    llm._kv_store.evict(budget)
    found = [check_layer(llm, il, of_layer, wo_of(path, il), policy.norm) for il, of_layer in before.items()]
    stats = llm.kv_stats()
    assert (stats.bound, stats.change) == tuple(zip(*found, strict=True))
    assert 0 < stats.seconds_measure <= stats.seconds_total
    return found


@pytest.mark.parametrize("preset", [*PRESETS])
def test_presets(tiny, load, tokens, preset):
    policy = replace(PRESETS[preset], measure=True)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024)
    prefill_only(llm, tokens(601))
    evict_and_check(llm, tiny, policy)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_cache_types(make_tiny, load, tokens, kind, norm):
    policy, path = KVPolicy(norm=norm, measure=True), make_tiny(head_dim=64, n_head=6, n_head_kv=3, n_layer=2)
    llm = load(path, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024, type_k=KINDS[kind], type_v=KINDS[kind])
    prefill_only(llm, tokens(301))
    evict_and_check(llm, path, policy, kind)


@pytest.mark.parametrize("arch", ["gemma2", "gpt-oss", "gemma3", "lfm2", "granitehybrid", "qwen2"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_families(make_tiny, load, tokens, arch, kind):
    """gemma2: soft-cap; gpt-oss: sink logits."""
    path = make_tiny(arch=arch, n_layer=4, n_head=4, head_dim=64, wo_type="F32", weight_type="F32")
    policy = KVPolicy(measure=True)
    llm = load(path, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024, type_k=KINDS[kind], type_v=KINDS[kind])
    prefill_only(llm, tokens(400))
    evict_and_check(llm, path, policy, kind)


@pytest.mark.parametrize("budget", [65, 150, 298, 299])
def test_large_and_small_changes(tiny, load, tokens, budget):
    """Nothing cancels when a single entry goes."""
    policy = KVPolicy(measure=True)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024)
    prefill_only(llm, tokens(300))
    for bound, change in evict_and_check(llm, tiny, policy, budget=budget):
        assert max(bound, change) < 0.03 or budget < 298


@pytest.mark.parametrize("wo_type", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("shape", [(96, 1, 16, 64), (16, 8, 64, 16), (8, 2, 32, 256)])
def test_blocks_of_heads(make_tiny, load, tokens, shape, wo_type):
    """Parts of a KV head's group, several KV heads, and a window of 256 queries in a graph."""
    n_head, n_head_kv, head_dim, window = shape
    path = make_tiny(n_head=n_head, n_head_kv=n_head_kv, head_dim=head_dim, n_layer=1, wo_type=wo_type)
    policy = KVPolicy(window=window, measure=True)
    llm = load(path, kv_budget=300, kv_policy=policy, n_ctx=1024)
    prefill_only(llm, tokens(700))
    evict_and_check(llm, path, policy, budget=300)


@pytest.mark.parametrize("norm", NORMS)
def test_the_adapter_counts(make_tiny, load, tokens, tmp_path, norm):
    path, lora = make_tiny(wo_type="F32", weight_type="F32", n_layer=2), str(tmp_path / "lora.gguf")
    write_tiny_lora(lora, path, rank=4, alpha=8.0)
    parts = tensors(lora)

    def adapted(path, il):
        a, b = (parts[f"blk.{il}.attn_output.weight.lora_{x}"].data.astype(np.float64) for x in "ab")
        return output_projection(path, il) + 0.5 * 8.0 / 4 * b @ a

    policy = KVPolicy(norm=norm, measure=True)
    llm = load(path, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024, lora_path=lora, lora_scale=0.5)
    prefill_only(llm, tokens(300))
    evict_and_check(llm, path, policy, wo_of=adapted)


@pytest.mark.parametrize("preset", ["critical-max", "streamingllm"])
def test_a_second_eviction_measures_anew(tiny, load, tokens, preset):
    policy = replace(PRESETS[preset], measure=True)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024)
    llm.eval(tokens(300))
    first = llm.kv_stats().change
    prefill_only(llm, tokens(40, seed=2))
    evict_and_check(llm, tiny, policy)
    assert llm.kv_stats().change != first


@pytest.mark.parametrize("preset", ["critical-max", "streamingllm"])
def test_prefill_exact_measures_what_full_does(tiny, load, tokens, preset):
    prompt, found = tokens(500), []
    for prefill in ("full", "exact"):
        llm = load(tiny, kv_budget=BUDGET, kv_policy=replace(PRESETS[preset], measure=True), prefill=prefill,
                   n_ctx=1024, n_ubatch=128)  # fmt: skip
        llm.eval(prompt)
        stats = llm.kv_stats()
        found.append((stats.bound, stats.change, kept(llm)))
    assert found[0] == found[1] and len(found[0][0]) == 3


@pytest.mark.parametrize("preset", ["critical-max", "streamingllm"])
def test_every_eviction_of_a_stream(tiny, load, tokens, monkeypatch, preset):
    policy = replace(PRESETS[preset], measure=True)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=policy, prefill="stream", n_ctx=2048,
               stream=Stream(observe="window", chunk=64))  # fmt: skip
    plain, count = llm._kv_store.evict, []

    def checked(budget, slack=0):
        before = layers_before(llm, tiny)
        n = int(llm._kv_store.stats().n_entries)
        plain(budget, slack)
        if n > budget:
            for il, of_layer in before.items():
                check_layer(llm, il, of_layer, output_projection(tiny, il), policy.norm)
            count.append(n)

    monkeypatch.setattr(llm._kv_store, "evict", checked)
    llm.eval(tokens(500))
    assert len(count) > 2


def test_a_peek_is_what_is_asked(tiny, load, tokens):
    prompt, asked = tokens(300), tokens(24, seed=2)
    read = load(tiny, kv_budget=BUDGET, kv_policy=KVPolicy(window=24), n_ctx=1024)
    prefill_only(read, prompt + asked)  # its window's queries are those of the peek
    policy = KVPolicy(measure=True)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=policy, n_ctx=1024)
    prefill_only(llm, prompt)
    llm._kv_store.peek(asked, 300)
    before = layers_before(llm, tiny)
    for il, of_layer in before.items():
        q, k = as_cached(read._kv_store.read("q", il), "f16", MAX_POOL + 1), llm._kv_store.read("k", il)
        of_layer.attention = window_attention(q, k, np.arange(300, 324), np.arange(300), read._kv_store.layer(il).scale)
    llm._kv_store.evict(BUDGET)
    for il, of_layer in before.items():
        # attention adds up in f16, in blocks that are not those of the other model
        check_layer(llm, il, of_layer, output_projection(tiny, il), policy.norm, 1e-3)


def test_nothing_is_measured_unless_asked_for(tiny, load, tokens):
    plain = load(tiny, kv_budget=BUDGET, n_ctx=1024)
    plain.eval(tokens(300))
    llm = load(tiny, kv_budget=BUDGET, kv_policy=KVPolicy(measure=True), n_ctx=1024)
    llm.eval(tokens(BUDGET))  # within the budget
    for stats in (plain.kv_stats(), llm.kv_stats()):
        assert (stats.bound, stats.change, stats.seconds_measure) == ((), (), 0)
    assert all(np.isnan(plain._kv_store.change(0)))
    llm.reset()
    llm.eval(tokens(300))
    assert kept(llm) == kept(plain)  # measuring changes nothing
    assert len(llm.kv_stats().change) == 3
    with pytest.raises(ValueError, match="layer 3 has no cache"):
        llm._kv_store.change(3)
    llm.reset()
    assert llm.kv_stats().change == ()


def test_a_state_is_loaded_whether_it_measured_or_not(tiny, load, tokens):
    plain = load(tiny, kv_budget=BUDGET, n_ctx=1024)
    llm = load(tiny, kv_budget=BUDGET, kv_policy=KVPolicy(measure=True), n_ctx=1024)
    for one, other in ((plain, llm), (llm, plain)):
        one.eval(tokens(300))
        other.load_state(one.save_state())
        assert kept(one) == kept(other)
        assert other.kv_stats().change == ()
        one.reset()


def test_a_prompt_that_was_stopped_leaves_the_last_measures(tiny, load, tokens):
    llm = load(tiny, kv_budget=BUDGET, kv_policy=KVPolicy(measure=True), prefill="exact", n_ctx=1024, n_ubatch=64)
    llm.eval(tokens(300))
    before = llm.kv_stats().change
    llm._kv_store.prefill(tokens(200, seed=2), BUDGET)
    llm._kv_store.cancel_prefill()
    assert llm.kv_stats().change == before != ()


def test_a_failure_fails_the_eviction(tiny, load, tokens):
    """streamingllm has no other graphs that could."""
    llm = load(tiny, kv_budget=BUDGET, kv_policy=replace(PRESETS["streamingllm"], measure=True), n_ctx=1024)
    llm.eval(tokens(300))
    before = llm.kv_stats().change
    prefill_only(llm, tokens(100, seed=2))
    positions, left = kept(llm), 60

    def abort(_):
        nonlocal left
        left -= 1
        return left < 0

    callback = llama_cpp.ggml_abort_callback(abort)
    llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
    with pytest.raises(RuntimeError, match="aborted"):
        llm._kv_store.evict(BUDGET)
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert (kept(llm), llm.kv_stats().change) == (positions, before)
    llm._kv_store.evict(BUDGET)
    assert llm.kv_stats().change != before


def test_policies_are_equal_but_for_measuring():
    assert KVPolicy(measure=True) == KVPolicy() and hash(KVPolicy(measure=True)) == hash(KVPolicy())
    with pytest.raises(TypeError, match="measure=1: allowed are True and False"):
        KVPolicy(measure=1)
    params = ffi.new("struct criticalkv_params *", lib.criticalkv_params_default())
    assert params.measure == 0
    params.measure = 2
    assert lib.criticalkv_params_check(params) == lib.CRITICALKV_ERR_ARGUMENT
