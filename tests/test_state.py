"""Saved states: round trips, and what is refused."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from copy import deepcopy

import llama_cpp
import numpy as np
import pytest
from helpers import greedy, kept, last_logits

from pycriticalkv import KVPolicy


def state_of(llm):
    return kept(llm), llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()


def test_round_trip(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    prompt = tokens(300)
    greedy(llm, prompt, 10)
    saved, before = llm.save_state(), state_of(llm)
    more = tokens(60, seed=5)
    want = []
    for token in more:  # evicts again on the way, with queries from before the save
        llm.eval([token])
        want.append(last_logits(llm))
    want_positions = kept(llm)
    other = load(tiny, kv_budget=64, n_ctx=1024)
    for target in (llm, other):
        target.load_state(saved)
        assert state_of(target) == before
        for token, logits in zip(more, want, strict=True):
            target.eval([token])
            assert np.array_equal(last_logits(target), logits)
        assert kept(target) == want_positions


def test_size_follows_the_kept_entries(tiny, load, tokens):
    sizes = {}
    for budget in (64, 128):
        llm = load(tiny, kv_budget=budget, n_ctx=2048)
        for n in (300, 1500):
            llm.reset()
            llm.eval(tokens(n))
            sizes[budget, n] = len(pickle.dumps(llm.save_state()))
    per_entry = 3 * 2 * 2 * 32 * 2
    assert sizes[64, 1500] - sizes[64, 300] < 5 * 1200  # only the tokens themselves
    assert 0.9 < (sizes[128, 300] - sizes[64, 300]) / (64 * per_entry) < 1.2


SCRIPT = """
import pickle, sys
from pycriticalkv import Llama
llm = Llama(sys.argv[1], kv_budget=64, n_ctx=1024, verbose=False, n_threads=1, n_threads_batch=2)
llm.load_state(pickle.load(open(sys.argv[2], "rb")))
out = []
for token in llm.generate(eval(sys.argv[3]), temp=0.0):
    out.append(int(token))
    if len(out) == 20:
        break
print(out)
"""


def test_a_saved_document_is_asked_in_a_fresh_process(tiny, load, tokens, tmp_path):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps(llm.save_state()))
    question = tokens(300) + tokens(12, seed=8)
    want = greedy(llm, question, 20)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny, str(path), str(question)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.stdout.strip().splitlines()[-1] == str(want)


def damaged(saved, how):
    bad = deepcopy(saved)
    if how == "truncated":
        bad.llama_state = bad.llama_state[:-100]
    elif how == "flipped":
        blob = bytearray(bad.llama_state)
        blob[len(blob) // 2] ^= 1
        bad.llama_state = bytes(blob)
    elif how == "other tokens":
        bad.input_ids[5] += 1
    elif how == "fewer tokens":
        bad.n_tokens -= 1
    elif how == "negative":
        bad.n_tokens = -1
    elif how == "empty":
        bad.llama_state = b""
    bad.llama_state_size = len(bad.llama_state)
    return bad


@pytest.mark.parametrize("how", ["truncated", "flipped", "other tokens", "fewer tokens", "negative", "empty"])
def test_a_damaged_state_is_refused_and_changes_nothing(tiny, load, tokens, how):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    llm.eval([5])
    before, logits = state_of(llm), last_logits(llm)
    with pytest.raises(ValueError, match="state cannot be loaded"):
        llm.load_state(damaged(saved, how))
    assert state_of(llm) == before
    assert np.array_equal(last_logits(llm), logits)


@pytest.mark.parametrize(
    "arguments,why",
    [
        ({"kv_policy": "snapkv"}, "another policy"),
        ({"seed": 9}, "another model"),
        ({"n_head_kv": 1}, "another model"),
        ({"n_ctx": 256}, "holds 300 tokens"),
    ],
)
def test_a_foreign_state_is_refused(make_tiny, load, tokens, arguments, why):
    llm = load(make_tiny(), kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    model = {k: v for k, v in arguments.items() if k in ("seed", "n_head_kv")}
    rest = {"kv_budget": 64, "n_ctx": 1024, **{k: v for k, v in arguments.items() if k not in model}}
    other = load(make_tiny(**model), **rest)
    other.eval(tokens(100, seed=3))
    before = state_of(other)
    with pytest.raises(ValueError, match=why):
        other.load_state(saved)
    assert state_of(other) == before


def test_states_with_and_without_a_budget_do_not_mix(tiny, load, tokens):
    plain, llm = load(tiny, n_ctx=1024, flash_attn=True), load(tiny, kv_budget=64, n_ctx=1024)
    for model in (plain, llm):
        model.eval(tokens(300))
    with pytest.raises(ValueError, match="without|with kv_budget|not saved"):
        llm.load_state(plain.save_state())
    with pytest.raises(ValueError, match="saved with kv_budget"):
        plain.load_state(llm.save_state())
    assert plain.n_tokens == llm.n_tokens == 300


def test_raw_blobs_from_a_cache_without_a_store_are_refused_before_anything_changes(tiny, load, tokens):
    plain, llm = load(tiny, n_ctx=1024, flash_attn=True), load(tiny, kv_budget=64, n_ctx=1024)
    for model in (plain, llm):
        model.eval(tokens(300))
    before = kept(llm)
    blob = plain.save_state().llama_state
    raw = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
    assert llama_cpp.llama_state_set_data(llm.ctx, raw, len(blob)) == 0
    assert kept(llm) == before


def test_ram_cache(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.set_cache(llama_cpp.LlamaRAMCache(capacity_bytes=1 << 24))
    prompt = "the keeper of the lighthouse " * 20
    first = llm(prompt, max_tokens=10, temperature=0.0)["choices"][0]["text"]
    llm("another prompt", max_tokens=4)
    again = llm(prompt + first, max_tokens=10, temperature=0.0)
    assert again["usage"]["completion_tokens"] == 10
    assert llm.kv_stats().tokens_seen == llm.n_tokens


def test_pickle_keeps_the_arguments(tiny, load):
    llm = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    other = pickle.loads(pickle.dumps(llm))
    assert other._kv_policy == llm._kv_policy
    assert other._kv_budget == llm._kv_budget
    other.close()


def test_before_anything_is_evicted_another_policy_with_the_same_window_may_load(tiny, load, tokens):
    llm = load(tiny, kv_budget=400, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    other = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    other.load_state(saved)
    other._kv_store.evict(64)
    fresh = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    fresh.eval(tokens(300))
    assert kept(other) == kept(fresh)
    narrow = load(tiny, kv_budget=64, kv_policy=KVPolicy(window=8), n_ctx=1024)
    with pytest.raises(ValueError, match="another policy"):
        narrow.load_state(saved)
