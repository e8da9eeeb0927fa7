"""The native selection against a brute-force one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.select import layer_budgets, select, share

from pycriticalkv import PRESETS, KVPolicy
from pycriticalkv.store import select_entries, share_budget, share_over_layers

# few different values, so that ties are everywhere, and some of very different size
SCORES = st.one_of(
    st.sampled_from([0.0, 1e-7, 0.25, 0.5, 1.0]),
    st.floats(0.0, 1.0, width=32, allow_subnormal=False),
)


@st.composite
def cases(draw):
    window, sinks = draw(st.integers(1, 8)), draw(st.integers(0, 5))
    n = draw(st.integers(window + sinks + 2, 60))
    least = window + sinks + 1
    budget = draw(st.one_of(st.sampled_from([least, n - 1, n, n + 1]), st.integers(least, n + 5)))
    gaps = draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    positions = (np.cumsum(gaps) - gaps[0]).tolist()
    row = st.lists(SCORES, min_size=n - window, max_size=n - window)
    return {
        "policy": {"window": window, "sinks": sinks, "alpha": draw(st.sampled_from([0.0, 0.25, 0.3, 0.5, 1.0]))},
        "budget": max(budget, least),
        "positions": positions,
        "attn": draw(row),
        "norm": draw(row),
    }


BUT_FOR_BUDGETS = {"ada-criticalkv": "criticalkv", "ada-snapkv": "snapkv", "pyramidkv": "snapkv"}


def preset(name, **settings):
    return KVPolicy(**{**{f: getattr(PRESETS[name], f) for f in ("score", "aggregate", "value", "heads")}, **settings})


@given(cases(), st.sampled_from([name for name in PRESETS if name != "random"]))
@settings(max_examples=600, deadline=None)
def test_same_as_brute_force(case, name):
    policy = preset(name, **case["policy"])
    got = select_entries(policy, case["budget"], case["positions"], attn=case["attn"], norm=case["norm"])
    want = select(
        BUT_FOR_BUDGETS.get(name, name), len(case["positions"]), case["budget"], policy.window, policy.sinks,
        attn=case["attn"], norm=case["norm"], alpha=policy.alpha, eps=policy.eps, positions=case["positions"],
    )  # fmt: skip
    assert got.tolist() == want


@st.composite
def layers(draw):
    window, sinks, n_head = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    least = window + sinks + 1
    n = draw(st.lists(st.integers(1, 36), min_size=n_head, max_size=n_head))
    # heads of an evicted cache: sinks and a tail in all of them, gaps between; a cut leaves less tail than the window
    tail = range(60, 60 + draw(st.sampled_from([window, 1])))
    positions = [sorted({*range(sinks), *draw(st.permutations(range(sinks, 60)))[:count], *tail}) for count in n]
    before = [max(len(p) - window, 0) for p in positions]
    attn = [draw(st.lists(SCORES, min_size=count, max_size=count)) for count in before]
    policy = {"window": window, "sinks": sinks, "head_floor": draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))}
    return policy, positions, attn, draw(st.integers(least, 45))


@given(layers(), st.sampled_from(["mean", "max"]))
@settings(max_examples=400, deadline=None)
def test_heads_share_a_budget_as_by_brute_force(case, aggregate):
    chosen, positions, attn, budget = case
    policy = KVPolicy(heads="adaptive", aggregate=aggregate, **chosen)
    got = share_budget(policy, budget, positions, attn=attn).tolist()
    want = share(
        positions, attn, budget, policy.window, policy.sinks, policy.head_floor, floored=aggregate == "max"
    )  # fmt: skip
    assert got == want
    total = sum(len(p) for p in positions)
    assert sum(got) == min(total, budget * len(positions))
    least = policy.window + policy.sinks + 1
    assert all(min(least, len(p)) <= b <= len(p) for b, p in zip(got, positions, strict=True))


@given(
    st.sampled_from(["uniform", "pyramid"]), st.integers(1, 8), st.integers(0, 5), st.integers(1, 3000), st.data(),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_layers_share_a_budget_as_by_the_formula(layers, window, sinks, free, data):
    policy, budget = KVPolicy(layers=layers, window=window, sinks=sinks), free + window + sinks
    # layers differ by what they kept before; some have less than they could keep
    n = data.draw(st.lists(st.integers(window + sinks + 1, 7000), min_size=1, max_size=40))
    got = share_over_layers(policy, budget, n)
    assert got == layer_budgets(layers, budget, window + sinks, n)
    assert sum(got) == min(sum(n), budget * len(n))
    assert all(window + sinks < b <= most for b, most in zip(got, n, strict=True))


def test_a_pyramid():
    """Free entries from 2 F - F / 20 to F / 20, F = 100."""
    policy = KVPolicy(layers="pyramid", window=16, sinks=4)
    got = share_over_layers(policy, 120, [1000] * 11)
    assert got == [20 + free for free in (195, 176, 157, 138, 119, 100, 81, 62, 43, 24, 5)]
    assert share_over_layers(policy, 120, [130] * 11) == [130] * 9 + [125, 25]


def splitmix64(x):
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_random_is_a_hash_of_seed_layer_head_and_position():
    policy = preset("random", seed=7)
    positions = list(range(100))
    place = (3 << 32) | 2
    scores = [float(splitmix64(splitmix64(splitmix64(7) ^ place) ^ p) >> 11) for p in positions]
    got = select_entries(policy, 50, positions, il=3, head=2)
    # ranks survive the rounding to float32 only if no two numbers fall together, so rank them here
    ranks = np.argsort(np.argsort(scores)).astype(float)
    assert got.tolist() == select("random", 100, 50, policy.window, policy.sinks, attn=ranks, positions=positions)
    assert got.tolist() != select_entries(policy, 50, positions, il=3, head=1).tolist()


@pytest.mark.parametrize("name", PRESETS)
def test_protected_entries_stay_whatever_the_scores(name):
    n, policy = 200, PRESETS[name]
    attn = np.full(n, 3.0e38, dtype=np.float32)
    attn[:4] = 0.0
    got = select_entries(policy, 40, range(n), attn=attn, norm=np.full(n, 3.0e38))
    assert len(got) == len(set(got.tolist())) == 40
    assert got[:4].tolist() == [0, 1, 2, 3]
    assert got[-policy.window :].tolist() == list(range(n - policy.window, n))


def test_ties_go_to_the_lower_index():
    policy = preset("snapkv")
    got = select_entries(policy, 30, range(100), attn=np.ones(100))
    assert got.tolist() == list(range(14)) + list(range(84, 100))


def test_a_budget_below_the_least_is_refused():
    with pytest.raises(ValueError, match=r"budget is 20, allowed: at least 21"):
        select_entries(KVPolicy(), 20, range(100), attn=np.ones(100), norm=np.ones(100))
