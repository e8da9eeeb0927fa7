"""Heads and layers that hold different numbers of entries: ``heads="adaptive"``, ``layers="pyramid"`` and so on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from expected import NORMS, QUANTIZED, TYPES, as_cached, output_projection, relative_error, unrotated
from helpers import greedy, kept, last_logits, prefill_only
from reference import change
from reference import scores as reference
from test_families import FAMILIES

from pycriticalkv import KVPolicy
from pycriticalkv.store import share_budget

KINDS = {**TYPES, **QUANTIZED}
WINDOW, BUDGET = 16, 64
COMMON = {"kv_budget": BUDGET, "n_ctx": 2048, "n_ubatch": 64}


def adaptive(**settings):
    return KVPolicy(heads="adaptive", **settings)


@pytest.fixture
def model(make_tiny):
    def make(arch="llama", **arguments):
        shape = {"n_layer": 4, "n_head": 4, "head_dim": 64, "wo_type": "F32", "weight_type": "F32"}
        return make_tiny(arch=arch, **{**shape, **arguments})

    return make


POLICIES = {
    "heads": adaptive(),
    "pyramid": KVPolicy(layers="pyramid"),
    "heads-pyramid": adaptive(layers="pyramid", aggregate="mean"),
    "layers": adaptive(layers="adaptive"),
}
EACH = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def lengths(llm):
    return [[len(head) for head in layer] for layer in kept(llm)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
@EACH
def test_kept_rows_are_moved_unchanged(make_tiny, load, tokens, kind, head_dim, policy):
    path = make_tiny(head_dim=head_dim, n_head=4, n_layer=2)
    llm = load(path, kv_policy=policy, type_k=KINDS[kind], type_v=KINDS[kind], **COMMON)
    prefill_only(llm, tokens(300))
    held = [[list(range(300))] * 2] * 2
    for _ in range(2):  # from rows of all heads, then from rows of one head
        before = {(which, il): llm._kv_store.read_heads(which, il) for which in "kv" for il in range(2)}
        llm._kv_store.evict(BUDGET)
        assert sum(map(sum, lengths(llm))) == 4 * BUDGET
        assert policy.layers != "uniform" or all(sum(layer) == 2 * BUDGET for layer in lengths(llm))
        for (which, il), rows in before.items():
            for head, after in enumerate(llm._kv_store.read_heads(which, il)):
                at = np.searchsorted(held[il][head], kept(llm)[il][head])
                assert np.array_equal(after, rows[head][at])
        for token in tokens(30, seed=2):
            prefill_only(llm, [token])
        held = kept(llm)
    assert policy.heads == "uniform" or any(len(set(layer)) > 1 for layer in lengths(llm))
    assert policy.layers == "uniform" or len({sum(layer) for layer in lengths(llm)}) > 1


def read_head(llm, path, il, head, kind):
    """Attention [group, m, n], values [n, 1, d] and W_O of one head that was evicted before.

    The queries of the window see all that it kept, then the tail in order.
    """
    store = llm._kv_store
    k, v = (store.read_heads(which, il)[head].astype(np.float64) for which in "kv")
    q, info = store.read("q", il).astype(np.float64), store.layer(il)
    group = info.n_head // info.n_head_kv
    heads = slice(head * group, (head + 1) * group)
    n, end = len(k), llm.n_tokens
    attention = reference.window_attention(
        as_cached(q, kind)[:, heads], k[:, None], np.arange(end - len(q), end), np.arange(end - n, end), info.scale
    )
    d = info.n_embd_v
    return (
        attention,
        unrotated(v[:, None], kind),
        output_projection(path, il)[:, head * group * d : (head + 1) * group * d],
    )


def scores_of_head(llm, path, il, head, norm, kind, aggregate):
    """Score and norm of one head, float64."""
    attention, values, wo = read_head(llm, path, il, head, kind)
    aggregated = reference.aggregate_max if aggregate == "max" else reference.aggregate_mean
    return aggregated(attention, WINDOW, 5, n_head_kv=1)[0], NORMS[norm](values[:-WINDOW], wo)[0]


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("aggregate", ["mean", "max"])
def test_scores_of_heads_of_different_lengths(model, load, tokens, kind, norm, aggregate):
    path = model()
    policy = adaptive(norm=norm, aggregate=aggregate)
    llm = load(path, kv_policy=policy, type_k=KINDS[kind], type_v=KINDS[kind], **COMMON)
    llm.eval(tokens(300))
    for token in tokens(20, seed=2):
        prefill_only(llm, [token])
    for il, layer in enumerate(lengths(llm)):
        attn, value = (np.split(part, np.cumsum([n - WINDOW for n in layer])[:-1])
                       for part in llm._kv_store.scores(il, WINDOW))  # fmt: skip
        for head in range(len(layer)):
            want_attn, want_value = scores_of_head(llm, path, il, head, norm, kind, aggregate)
            assert relative_error(attn[head], want_attn) < 1e-5
            assert relative_error(value[head], want_value) < 2e-5


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("norm", NORMS)
def test_bound_and_change_of_heads_of_different_lengths(model, load, tokens, kind, norm):
    path, policy = model(), adaptive(norm=norm, measure=True)
    llm = load(path, kv_policy=policy, type_k=KINDS[kind], type_v=KINDS[kind], **COMMON)
    llm.eval(tokens(300))
    for token in tokens(20, seed=2):
        prefill_only(llm, [token])
    held = kept(llm)
    before = [[read_head(llm, path, il, head, kind) for head in range(len(layer))] for il, layer in enumerate(held)]
    llm._kv_store.evict(BUDGET)
    for il, heads in enumerate(before):
        full, less, most, size = 0.0, 0.0, 0.0, 0.0
        for head, (attention, v, wo) in enumerate(heads):
            keep = np.isin(held[il][head], kept(llm)[il][head])[None]
            full = full + change.output(attention, v, wo)
            less = less + change.output(change.kept_attention(attention, keep), v, wo)
            parts = change.bound(change.mean_attention(attention, 1), NORMS[norm](v, wo), keep)
            most, size = most + parts[0], size + parts[1]
        moved = np.linalg.norm(less - full, axis=-1) / np.linalg.norm(full, axis=-1)
        assert llm._kv_store.change(il) == pytest.approx((most / size, moved.mean()), rel=2e-5)


def test_budgets_are_shared_by_the_scores_that_were_read_back(tiny, load, tokens):
    policy = adaptive()
    llm = load(tiny, kv_policy=policy, **COMMON)
    prefill_only(llm, tokens(300))
    want = []
    for il in range(3):
        attn, _ = llm._kv_store.scores(il, WINDOW)
        want.append(share_budget(policy, BUDGET, [range(300)] * len(attn), attn=attn).tolist())
    llm._kv_store.evict(BUDGET)
    assert lengths(llm) == want


@pytest.mark.parametrize("kind", [1, 8])
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("policy", ["heads", "pyramid"])
def test_exact_equals_full(model, load, tokens, arch, kind, policy):
    """A prompt, some tokens, and two more turns, of which one is long; heads end with different numbers of entries."""
    exact, full = (
        load(model(arch), prefill=prefill, kv_policy=POLICIES[policy], type_k=kind, type_v=kind, **COMMON)
        for prefill in ("exact", "full")
    )
    steps = [tokens(300), *([token] for token in tokens(40, seed=2)), tokens(200, seed=3), tokens(9, seed=4), [5]]
    for step in steps:
        for llm in (exact, full):
            llm.eval(step)
        assert kept(exact) == kept(full)
        assert np.array_equal(last_logits(exact), last_logits(full))
        one, other = exact.kv_stats(), full.kv_stats()
        assert (one.entries, one.bytes_now, one.entries_peak) == (other.entries, other.bytes_now, other.entries_peak)
    assert exact.kv_stats().evictions == full.kv_stats().evictions >= 2
    if policy == "heads":
        assert any(len(set(layer)) > 1 for layer in lengths(full))


def test_adaptive_layers_are_not_read_one_by_one(tiny, load, tokens):
    policy = POLICIES["layers"]
    with pytest.raises(ValueError, match="prefill='exact'.*adaptive layers"):
        load(tiny, kv_policy=policy, prefill="exact", **COMMON)
    with pytest.warns(match="adaptive layers"):
        llm = load(tiny, kv_policy=policy, **COMMON)
    llm.eval(tokens(300))
    assert llm.kv_stats().prefill == "full"


def test_what_layers_keep_is_what_all_of_them_share(tiny, load, tokens):
    policy = POLICIES["layers"]
    llm = load(tiny, kv_policy=policy, prefill="full", **COMMON)
    prefill_only(llm, tokens(300))
    attn = [row for il in range(3) for row in llm._kv_store.scores(il, WINDOW)[0]]
    llm._kv_store.evict(BUDGET)
    got = [n for layer in lengths(llm) for n in layer]
    assert got == share_budget(policy, BUDGET, [range(300)] * len(attn), attn=attn).tolist()


@EACH
@pytest.mark.parametrize("mode", ["full", "stream"])
def test_whatever_differs_the_mean_is_the_budget(model, load, tokens, policy, mode):
    llm = load(model("gemma3"), kv_policy=policy, prefill=mode, **COMMON)
    for step in (tokens(400), tokens(100, seed=2), *([token] for token in tokens(40, seed=3))):
        llm.eval(step)
        stats = llm.kv_stats()
        heads = [n for layer in stats.entries for n in layer]
        assert stats.entries == lengths(llm)
        assert BUDGET <= sum(heads) / len(heads) <= BUDGET + policy.slack_for(BUDGET)
        assert stats.bytes_now * stats.tokens_seen * len(heads) == stats.bytes_full * sum(heads)
    assert stats.evictions >= 3


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("kind", [1, 2])
@EACH
def test_a_state_comes_back(model, load, tokens, arch, kind, policy):
    one, other = (
        load(model(arch), kv_policy=policy, prefill="full", type_k=kind, type_v=kind, **COMMON) for _ in range(2)
    )
    greedy(one, tokens(300), 10)
    saved, before = one.save_state(), kept(one)
    more, want = tokens(60, seed=5), []
    for token in more:  # evicts again on the way
        one.eval([token])
        want.append(last_logits(one))
    after = kept(one)
    other.eval(tokens(100, seed=6))
    for target in (one, other):
        target.load_state(saved)
        assert kept(target) == before
        for token, logits in zip(more, want, strict=True):
            target.eval([token])
            assert np.array_equal(last_logits(target), logits)
        assert kept(target) == after
    # and a state from before any eviction, into a cache with heads of different lengths
    other.reset()
    other.eval(tokens(50))
    short, logits = other.save_state(), last_logits(other)
    one.load_state(short)
    one.eval([5])
    other.eval([5])
    assert kept(one) == kept(other)
    assert np.array_equal(last_logits(one), last_logits(other))
    assert logits.shape == last_logits(one).shape


def rows_of(llm):
    return [llm._kv_store.read_heads(which, il) for which in "kv" for il in llm._kv_store.layers()]


@pytest.mark.parametrize("into", ["itself", "a fresh object", "a longer conversation"])
def test_rows_of_a_state_come_back(model, load, tokens, into):
    """The rows that are read have room for other numbers of slots than those that held the state."""
    path, common = model(n_head=16, n_head_kv=8, n_layer=2), {**COMMON, "kv_policy": adaptive(slack=200)}
    one = load(path, **common)
    one.eval(tokens(300))
    for token in tokens(50, seed=2):
        one.eval([token])
    saved, held, rows = one.save_state(), kept(one), rows_of(one)
    other = one if into == "itself" else load(path, **common)
    if into == "a longer conversation":
        other.eval(tokens(900, seed=3))
        other.eval(tokens(150, seed=4))
    other.load_state(saved)
    assert kept(other) == held
    for got, want in zip(rows_of(other), rows, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_cut_state_leaves_nothing_allocated(tiny, load, tokens):
    llm = load(tiny, kv_policy=adaptive(), **COMMON)
    llm.eval(tokens(300))
    saved = llm.save_state()
    before, size = kept(llm), saved.llama_state_size
    for cut in (size // 2, size - 100):
        llm.eval([5])
        broken = type(saved)(**{**vars(saved), "llama_state": saved.llama_state[:cut], "llama_state_size": cut})
        with pytest.raises((ValueError, RuntimeError)):
            llm.load_state(broken)
        llm.load_state(saved)
        assert kept(llm) == before


@pytest.mark.parametrize("arch", ["llama", "gpt-oss"])  # the last layer of one is evicted, that of the other is not
def test_stats_while_a_prompt_is_read(model, load, tokens, arch):
    seen = []
    llm = load(model(arch), kv_policy=adaptive(), prefill="exact", **COMMON)
    llm.eval(tokens(300))
    held = [sum(layer) // len(layer) for layer in llm.kv_stats().entries]
    assert held == [BUDGET] * len(held)
    llm.prefill_progress = lambda *_: seen.append(llm.kv_stats())
    llm.eval(tokens(400, seed=2))
    assert llm.kv_stats().entries_peak == max(BUDGET + 400, 300)
    assert llm.kv_stats().bytes_now == seen[0].bytes_full * len(held) * BUDGET // (len(held) * seen[0].tokens_seen)
    for stats in seen:
        means = [sum(layer) // len(layer) for layer in stats.entries]
        assert set(means) <= {BUDGET, *range(BUDGET, BUDGET + 401)}
        assert sum(mean > BUDGET for mean in means) <= 1


def test_heads_shorter_than_the_window(model, load, tokens):
    """A cut to the start of the window, and another eviction before it is full again."""
    policy = adaptive(head_floor=0.0, measure=True)
    llm = load(model(n_head=16, n_head_kv=8), kv_policy=policy, **{**COMMON, "kv_budget": 30})
    llm.eval(tokens(300))
    llm.n_tokens = 284
    for token in tokens(8, seed=2):
        llm.eval([token])
    held = lengths(llm)
    budget = 21
    assert min(map(min, held)) <= WINDOW < budget < min(sum(layer) // len(layer) for layer in held)
    llm._kv_store.evict(budget)
    after = lengths(llm)
    assert all(sum(layer) == budget * len(layer) for layer in after)
    for old, new in zip(held, after, strict=True):
        assert all(b == a for a, b in zip(old, new, strict=True) if a <= WINDOW)


def test_a_state_of_uniform_heads_is_another_policy(tiny, load, tokens):
    uniform, ragged = load(tiny, **COMMON), load(tiny, kv_policy=adaptive(), **COMMON)
    for llm in (uniform, ragged):
        llm.eval(tokens(300))
    for one, other in ((uniform, ragged), (ragged, uniform)):
        before = kept(other)
        with pytest.raises(ValueError, match="policy"):
            other.load_state(one.save_state())
        assert kept(other) == before


def test_after_a_reset_everything_is_as_in_a_fresh_object(tiny, load, tokens):
    used, fresh = (load(tiny, kv_policy=adaptive(), **COMMON) for _ in range(2))
    used.eval(tokens(500, seed=9))
    used.reset()
    for n, seed in ((30, 1), (400, 2), (50, 3)):
        for llm in (used, fresh):
            llm.eval(tokens(n, seed=seed))
        assert kept(used) == kept(fresh)
        assert np.array_equal(last_logits(used), last_logits(fresh))


def test_cutting_back_inside_the_window(tiny, load, tokens):
    one, other = (load(tiny, kv_policy=adaptive(), **COMMON) for _ in range(2))
    for llm in (one, other):
        llm.eval(tokens(300))
    before = kept(one)
    for token in tokens(10, seed=2):
        one.eval([token])
    one.n_tokens = 300
    for llm in (one, other):
        llm.eval([9])
    assert kept(one) == kept(other)
    assert np.array_equal(last_logits(one), last_logits(other))
    one.n_tokens = 290
    one.eval([7])
    assert kept(one) == [[[p for p in head if p < 290] + [290] for head in layer] for layer in before]


@pytest.mark.parametrize("budget,slack", [(200, 56), (500, None), (1000, 24)])
@EACH
def test_memory_is_that_of_the_entries_and_the_slack(tiny, load, tokens, budget, slack, policy):
    policy = dataclasses.replace(policy, slack=slack)
    llm = load(tiny, kv_budget=budget, kv_policy=policy, n_ctx=8192, prefill="full")
    llm.eval(tokens(1500))
    stats = llm.kv_stats()
    per_entry = stats.bytes_now / sum(map(sum, stats.entries))
    n_heads = sum(len(layer) for layer in stats.entries)
    assert stats.bytes_now == per_entry * n_heads * budget
    assert stats.bytes_allocated <= 1.25 * per_entry * n_heads * (budget + policy.slack_for(budget))
    for token in tokens(policy.slack_for(budget) * 2 + 5, seed=2):
        llm.eval([token])
        stats = llm.kv_stats()
        assert sum(map(sum, stats.entries)) <= n_heads * (budget + policy.slack_for(budget))
        assert stats.bytes_allocated <= 1.25 * per_entry * n_heads * (budget + policy.slack_for(budget))


@pytest.mark.parametrize("name", ["ada-criticalkv", "ada-snapkv"])
def test_text_is_the_same_each_time(tiny, load, tokens, name):
    runs = []
    for _ in range(2):
        llm = load(tiny, kv_policy=name, **COMMON)
        runs.append((greedy(llm, tokens(400), 100), kept(llm)))
    llm.reset()
    runs.append((greedy(llm, tokens(400), 100), kept(llm)))
    assert runs[0] == runs[1] == runs[2]


def test_a_floor_of_one_is_uniform(tiny, load, tokens):
    uniform, ragged = load(tiny, **COMMON), load(tiny, kv_policy=adaptive(head_floor=1.0), **COMMON)
    for llm in (uniform, ragged):
        llm.eval(tokens(300))
        for token in tokens(20, seed=2):
            llm.eval([token])
    assert kept(uniform) == kept(ragged)
    difference = np.abs(last_logits(uniform) - last_logits(ragged)).max()
    assert difference < 2e-2 * np.abs(last_logits(uniform)).max()


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_floors_out_of_range(value):
    with pytest.raises(ValueError, match="head_floor"):
        adaptive(head_floor=value)
