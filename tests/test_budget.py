"""Budgets: what is kept when, and that a budget which is never reached changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import entries, greedy, kept, last_logits

from pycriticalkv import PRESETS, KVPolicy


def test_a_budget_of_the_prompt_or_more_gives_the_very_logits_of_no_budget(tiny, load, tokens):
    prompt, more = tokens(200), tokens(40, seed=2)
    plain = load(tiny, n_ctx=1024, flash_attn=True)
    with_budget = load(tiny, n_ctx=1024, kv_budget=240)
    for llm in (plain, with_budget):
        llm.eval(prompt)
    assert np.array_equal(last_logits(plain), last_logits(with_budget))
    for token in more:
        plain.eval([token])
        with_budget.eval([token])
        assert np.array_equal(last_logits(plain), last_logits(with_budget))
    assert with_budget.kv_stats().evictions == 0


@pytest.mark.parametrize("name", PRESETS)
def test_the_prompt_is_evicted_to_the_budget(tiny, load, tokens, name):
    llm = load(tiny, kv_budget=64, kv_policy=name, n_ctx=1024)
    greedy(llm, tokens(300), 1)
    stats = llm.kv_stats()
    if PRESETS[name].layers == "pyramid":
        assert stats.entries == [[106, 106], [64, 64], [22, 22]]
    elif PRESETS[name].heads == "adaptive":
        assert [sum(layer) for layer in stats.entries] == [128] * 3
    else:
        assert stats.entries == [[64, 64]] * 3
    assert stats.entries == [[len(head) for head in layer] for layer in kept(llm)]
    assert (stats.budget, stats.tokens_seen, stats.evictions, stats.entries_peak) == (64, 300, 1, 300)
    assert stats.bytes_now * 300 == stats.bytes_full * 64
    for heads in kept(llm):
        for positions in heads:
            window = PRESETS[name].window
            assert positions[:4] == [0, 1, 2, 3]
            assert positions[-window:] == list(range(300 - window, 300))
            assert positions == sorted(set(positions))
        assert PRESETS[name].heads != "shared" or all(positions == heads[0] for positions in heads)


def test_edge_budgets(tiny, load, tokens):
    for budget, left in ((21, 21), (99, 99), (100, 100), (101, 100)):
        llm = load(tiny, kv_budget=budget, n_ctx=1024)
        llm.eval(tokens(100))
        assert entries(llm) == left
        assert llm.kv_stats().evictions == (left < 100)


@pytest.mark.parametrize("share,n,left", [(0.2, 500, 100), (0.29, 300, 87), (0.07, 900, 64), (0.01, 300, 64)])
def test_a_share_of_the_prompt(tiny, load, tokens, share, n, left):
    llm = load(tiny, kv_budget=share, n_ctx=1024)
    llm.eval(tokens(n))
    assert entries(llm) == left


def test_a_share_follows_the_conversation(tiny, load, tokens):
    llm = load(tiny, kv_budget=0.5, kv_policy=KVPolicy(slack=1), n_ctx=2048)
    llm.eval(tokens(200))
    assert entries(llm) == 100
    llm.eval(tokens(200, seed=2))
    assert entries(llm) == 200
    assert llm.kv_stats().budget == 200


def test_a_share_grows_with_what_is_generated(tiny, load, tokens):
    llm = load(tiny, kv_budget=0.5, n_ctx=1024)
    greedy(llm, tokens(10), 400)
    stats = llm.kv_stats()
    assert stats.tokens_seen == 409
    assert 190 <= stats.budget <= 204
    assert stats.entries[0][0] >= stats.budget


@pytest.mark.parametrize("name", ["critical-max", "streamingllm"])
def test_three_thousand_tokens_stay_within_budget_and_slack(tiny, load, tokens, name):
    llm = load(tiny, kv_budget=256, kv_policy=name, n_ctx=4096)
    slack = PRESETS[name].slack_for(256)
    most, n = 0, 0
    for _ in llm.generate(tokens(600), temp=0.8):
        most, n = max(most, entries(llm)), n + 1
        if n == 3000:
            break
    assert n == 3000
    assert 256 < most <= 256 + slack
    assert llm.kv_stats().tokens_seen == 600 + 3000 - 1


def test_completion_runs_to_the_context_and_not_to_the_budget(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=512)
    out = llm("the keeper of the lighthouse " * 10, max_tokens=-1)
    usage = out["usage"]
    assert out["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == 512 - usage["prompt_tokens"]


def test_the_same_prompt_gives_the_same_entries_and_text(tiny, load, tokens):
    runs = []
    for _ in range(3):
        llm = load(tiny, kv_budget=64, n_ctx=1024)
        runs.append((greedy(llm, tokens(400), 100), kept(llm)))
    llm.reset()
    runs.append((greedy(llm, tokens(400), 100), kept(llm)))
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_the_context_is_the_models_own_with_a_budget(tiny, load):
    assert load(tiny, kv_budget=64).n_ctx() == 8192
    assert load(tiny).n_ctx() == 512


def test_evicting_to_less_than_the_least_raises_and_changes_nothing(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(64))
    before = kept(llm)
    with pytest.raises(ValueError, match="budget is 20"):
        llm._kv_store.evict(20)
    assert kept(llm) == before
